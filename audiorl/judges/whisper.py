"""Whisper checkpoints of transformers as recognisers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from audiorl.config import torch_device
from audiorl.judges.checkpoint import load_judge, load_processor
from audiorl.judges.protocol import Waveform
from audiorl.judges.waves import Wave, batches_by_length, resampled

PROMPT = 4
"""Maximum number of tokens before the text: start, language, task, no timestamps."""


@dataclass(frozen=True)
class Whisper:
    """Greedy transcripts without timestamps, in float32 on the CPU and float16 on a GPU.

    Clips of up to 30 s are transcribed in batches; longer ones alone, window by window, as the paper describes for
    long-form transcription but without its random retries at higher temperatures. A multilingual model detects the
    language of each clip unless it is given. `task` "translate" writes English whatever is spoken, which only
    multilingual models can. Source: Radford et al. 2022.
    """

    path: str
    language: str | None = None
    device: str = "auto"
    batch_size: int = 8
    max_new_tokens: int = 200
    task: Literal["transcribe", "translate"] = "transcribe"

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.max_new_tokens < 1:
            raise ValueError("Whisper: batch_size and max_new_tokens must be at least 1")

    @property
    def name(self) -> str:
        return Path(self.path).name

    @cached_property
    def parts(self) -> tuple[Any, Any, Any]:
        """Model, feature extractor and tokenizer."""
        from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer

        model = load_judge(WhisperForConditionalGeneration, self.path, torch_device(self.device))
        extractor = load_processor(WhisperFeatureExtractor, self.path, "feature extractor")
        tokenizer = load_processor(WhisperTokenizer, self.path, "tokenizer")
        languages = getattr(model.generation_config, "lang_to_id", None) or {}
        if self.language and languages and f"<|{self.language}|>" not in languages:
            codes = ", ".join(sorted(token.strip("<|>") for token in languages))
            raise ValueError(f"{self.path}: no language {self.language!r}; it has {codes}")
        return model, extractor, tokenizer

    def transcribe(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[str]:
        _, extractor, _ = self.parts
        waves = resampled(waveforms, sample_rate, extractor.sampling_rate)
        window = extractor.sampling_rate * extractor.chunk_length
        texts = [""] * len(waves)
        short = [wav if len(wav) <= window else wav[:0] for wav in waves]
        for batch in batches_by_length(short, self.batch_size):
            for place, text in zip(batch, self._texts([waves[i] for i in batch], long=False), strict=True):
                texts[place] = text
        for i, wav in enumerate(waves):
            if len(wav) > window:
                (texts[i],) = self._texts([wav], long=True)
        return texts

    @torch.no_grad()
    def _texts(self, waves: Sequence[Wave], long: bool) -> list[str]:
        model, extractor, tokenizer = self.parts
        features = extractor(
            list(waves),
            sampling_rate=extractor.sampling_rate,
            return_tensors="pt",
            return_attention_mask=True,
            **({"truncation": False, "padding": "longest"} if long else {}),
        ).to(model.device)
        from audiorl.models.loading import quietly

        options: dict[str, Any] = {"return_timestamps": True} if long else {}
        if getattr(model.generation_config, "is_multilingual", False):
            options |= {"language": self.language, "task": self.task}
        elif self.task == "translate":
            raise ValueError(f"{self.path}: an English model of Whisper cannot translate; give a multilingual one")
        with quietly():  # it warns about arguments that it passes to itself
            ids = model.generate(
                features.input_features.to(model.dtype),
                attention_mask=features.attention_mask,
                num_beams=1,
                do_sample=False,
                max_new_tokens=min(self.max_new_tokens, model.config.max_target_positions - PROMPT),
                **options,
            )
        return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
