"""Recognisers without a CTC head: Whisper by transformers, Whisper by CTranslate2, pocketsphinx."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from audiorl.config import torch_device
from audiorl.errors import install
from audiorl.eval.metrics.text import UNSPACED
from audiorl.speech_models.protocol import (
    ModelFolder,
    Wave,
    Waveform,
    batches_by_length,
    load_model,
    load_processor,
    resampled,
)

RATE = 16_000
PROMPT = 4
"""Maximum number of tokens before the text: start, language, task, no timestamps."""


@dataclass(frozen=True)
class WhisperRecogniser(ModelFolder):
    """Greedy transcripts without timestamps, in float32 on the CPU and float16 on a GPU.

    Clips of up to 30 s are transcribed in batches; longer ones alone, window by window, as the paper describes for
    long-form transcription but without its random retries at higher temperatures. A multilingual model detects the
    language of each clip unless it is given. `task` "translate" writes English whatever is spoken, which only
    multilingual models can. Without `numerals` no token with a digit or a sign such as % is written: numbers become
    words. Source: Radford et al. 2022.
    """

    language: str | None = None
    device: str = "auto"
    batch_size: int = 8
    max_new_tokens: int = 444
    task: Literal["transcribe", "translate"] = "transcribe"
    numerals: bool = True

    @cached_property
    def parts(self) -> tuple[Any, Any, Any]:
        """Model, feature extractor and tokenizer."""
        from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer

        model = load_model(WhisperForConditionalGeneration, self.path, torch_device(self.device))
        extractor = load_processor(WhisperFeatureExtractor, self.path, "feature extractor")
        tokenizer = load_processor(WhisperTokenizer, self.path, "tokenizer")
        self._check_language(model, self.language)
        return model, extractor, tokenizer

    @cached_property
    def suppressed(self) -> list[int]:
        """Tokens that are never written: the model's own, and those of numerals where they are not wanted."""
        model, _, tokenizer = self.parts
        own = list(model.generation_config.suppress_tokens or ())
        if self.numerals:
            return own
        texts = tokenizer.batch_decode([[i] for i in range(tokenizer.eos_token_id)])
        return own + [i for i, text in enumerate(texts) if any(c.isdigit() or c in "%$£€" for c in text)]

    @property
    def multilingual(self) -> bool:
        from transformers import GenerationConfig

        config = load_processor(GenerationConfig, self.path, "generation configuration")
        return bool(getattr(config, "is_multilingual", False))

    def transcribe(
        self, waveforms: Sequence[Waveform], sample_rate: int, languages: Sequence[str] | None = None
    ) -> list[str]:
        model, extractor, _ = self.parts
        for given in sorted(set(languages or ())):
            self._check_language(model, given)
        waves = resampled(waveforms, sample_rate, extractor.sampling_rate)
        window = extractor.sampling_rate * extractor.chunk_length
        texts = [""] * len(waves)
        codes = list(languages) if languages is not None else [self.language] * len(waves)
        for language in dict.fromkeys(codes):
            of_language = [w if code == language else w[:0] for w, code in zip(waves, codes, strict=True)]
            batches = list(batches_by_length([w if len(w) <= window else w[:0] for w in of_language], self.batch_size))
            batches += [[i] for i, wav in enumerate(of_language) if len(wav) > window]
            for batch in batches:
                long = len(waves[batch[0]]) > window
                for place, text in zip(batch, self._texts([waves[i] for i in batch], long, language), strict=True):
                    texts[place] = text
        return texts

    @torch.no_grad()
    def identify(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[dict[str, float]]:
        """Return the probability of each language by its code, from the first 30 s; {} for no samples.

        It is that of the language's token after the start token, among all languages (Radford et al. 2022, 2.3).
        """
        model, extractor, _ = self.parts
        tokens = getattr(model.generation_config, "lang_to_id", None) or {}
        if not self.multilingual or not tokens:
            raise ValueError(f"{self.path}: an English Whisper identifies no languages; give a multilingual one")
        codes, ids = [token.strip("<|>") for token in tokens], list(tokens.values())
        waves = resampled(waveforms, sample_rate, extractor.sampling_rate)
        probabilities: list[dict[str, float]] = [{} for _ in waves]
        for batch in batches_by_length(waves, self.batch_size):
            features = self._features([waves[i] for i in batch])
            start = torch.full((len(batch), 1), model.config.decoder_start_token_id, device=model.device)
            logits_NV = model(input_features=features, decoder_input_ids=start).logits[:, -1, ids].float()
            for place, row in zip(batch, logits_NV.softmax(-1).tolist(), strict=True):
                probabilities[place] = dict(zip(codes, row, strict=True))
        return probabilities

    @torch.no_grad()
    def log_probabilities(self, waveforms: Sequence[Waveform], sample_rate: int, texts: Sequence[str]) -> list[float]:
        """Score as `TextScorer`, of the text's tokens after the prompt and of the end; clips are cut after 30 s.

        A text begins with a space, as the model's transcripts do, except in scripts without spaces. A multilingual
        model needs the language. Raises ValueError without one.
        """
        model, extractor, tokenizer = self.parts
        if self.multilingual and self.language is None:
            raise ValueError(f"{self.path}: give the language of the texts, as load_recogniser(…, language='en')")
        if empty := [text for text in texts if not text.strip()]:
            raise ValueError(f"{self.name}: text {empty[0]!r} has no words; leave it out")
        said = [text if re.match(f"[{UNSPACED}]", text) else f" {text}" for text in map(str.strip, texts)]
        tokenizer.set_prefix_tokens(language=self.language, task=self.task if self.multilingual else None)
        waves = resampled(waveforms, sample_rate, extractor.sampling_rate)
        values = [-math.inf] * len(waves)
        encoded = [torch.tensor(tokenizer(text).input_ids) for text in said]
        most = model.config.max_target_positions
        fitting = [w if len(row) - 1 <= most else w[:0] for w, row in zip(waves, encoded, strict=True)]
        for batch in batches_by_length(fitting, self.batch_size):
            features = self._features([waves[i] for i in batch])
            rows = [encoded[i] for i in batch]
            ids_NL = pad_sequence(rows, batch_first=True, padding_value=tokenizer.eos_token_id).to(model.device)
            logits_NLV = model(input_features=features, decoder_input_ids=ids_NL[:, :-1]).logits.float()
            logprobs_NL = logits_NLV.log_softmax(-1).gather(-1, ids_NL[:, 1:, None])[..., 0]
            first = len(tokenizer.prefix_tokens) - 1
            for place, row, logprobs in zip(batch, rows, logprobs_NL, strict=True):
                values[place] = float(logprobs[first : len(row) - 1].sum())
        return values

    def _features(self, waves: Sequence[Wave]) -> torch.Tensor:
        """Return the input features of the first 30 s of each."""
        model, extractor, _ = self.parts
        window = extractor.sampling_rate * extractor.chunk_length
        short = [wav[:window] for wav in waves]
        features = extractor(short, sampling_rate=extractor.sampling_rate, return_tensors="pt").input_features
        return features.to(model.device, model.dtype)

    def _check_language(self, model: Any, language: str | None) -> None:
        tokens = getattr(model.generation_config, "lang_to_id", None) or {}
        if language and tokens and f"<|{language}|>" not in tokens:
            codes = ", ".join(sorted(token.strip("<|>") for token in tokens))
            raise ValueError(f"{self.path}: no language {language!r}; it has {codes}")

    @torch.no_grad()
    def _texts(self, waves: Sequence[Wave], long: bool, language: str | None) -> list[str]:
        from audiorl.models.weights import silent_transformers

        model, extractor, tokenizer = self.parts
        whole = {"truncation": False, "padding": "longest"} if long else {}
        whole |= {"sampling_rate": extractor.sampling_rate, "return_tensors": "pt", "return_attention_mask": True}
        features = extractor(list(waves), **whole).to(model.device)
        options: dict[str, Any] = {"return_timestamps": True} if long else {}
        if not self.numerals:
            options["suppress_tokens"] = self.suppressed
        if getattr(model.generation_config, "is_multilingual", False):
            options |= {"language": language, "task": self.task}
        elif self.task == "translate":
            raise ValueError(f"{self.path}: an English model of Whisper cannot translate; give a multilingual one")
        with silent_transformers():  # it warns about arguments that it passes to itself
            options |= {"attention_mask": features.attention_mask, "num_beams": 1, "do_sample": False}
            most = min(self.max_new_tokens, model.config.max_target_positions - PROMPT)
            ids = model.generate(features.input_features.to(model.dtype), max_new_tokens=most, **options)
        return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


@dataclass(frozen=True)
class FasterWhisper(ModelFolder):
    """Greedy transcripts at temperature 0, without retries or conditioning on previous text, one clip at a time."""

    language: str | None = None
    device: str = "auto"
    task: Literal["transcribe", "translate"] = "transcribe"

    @cached_property
    def model(self) -> Any:
        try:
            from faster_whisper import WhisperModel
        except ImportError as error:
            raise ImportError(f"CTranslate2 folders need faster-whisper: {install('speech')}") from error
        device, _, index = self.device.partition(":")
        try:
            return WhisperModel(self.path, device=device, device_index=int(index or 0), local_files_only=True)
        except (RuntimeError, ValueError, OSError) as error:
            raise ValueError(f"{self.path}: cannot be read as a CTranslate2 folder of Whisper ({error})") from error

    @property
    def multilingual(self) -> bool:
        return bool(self.model.model.is_multilingual)

    def transcribe(
        self, waveforms: Sequence[Waveform], sample_rate: int, languages: Sequence[str] | None = None
    ) -> list[str]:
        waves = resampled(waveforms, sample_rate, RATE)
        codes = languages if languages is not None else [self.language] * len(waves)
        # One of each: neither beams, nor retries, nor texts of before.
        greedy = {"beam_size": 1, "best_of": 1, "temperature": 0.0, "condition_on_previous_text": False}
        texts = []
        for wav, code in zip(waves, codes, strict=True):
            found = self.model.transcribe(wav, language=code, task=self.task, **greedy)[0] if len(wav) else ()
            texts.append("".join(segment.text for segment in found).strip())
        return texts

    def identify(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[dict[str, float]]:
        """Return the probability of each language by its code, from the first 30 s; {} for no samples."""
        waves = resampled(waveforms, sample_rate, RATE)
        return [dict(self.model.detect_language(audio=wav)[2]) if len(wav) else {} for wav in waves]


@dataclass(frozen=True)
class PocketSphinx:
    """English, far weaker than Whisper and small enough for tests. Source: Huggins-Daines et al. 2006."""

    name: ClassVar[str] = "pocketsphinx"

    @cached_property
    def decoder(self) -> Any:
        try:
            from pocketsphinx import Decoder
        except ImportError as error:
            raise ImportError(f"this recogniser needs its package: {install('speech')}") from error
        # Means over the whole utterance: those carried from one to the next would make texts depend on their order.
        return Decoder(samprate=RATE, cmn="batch", loglevel="FATAL")

    def transcribe(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[str]:
        return [self._text(wav) if len(wav) else "" for wav in resampled(waveforms, sample_rate, RATE)]

    def _text(self, wav: np.ndarray) -> str:
        samples = (np.clip(wav, -1.0, 1.0) * 32767).astype(np.int16)
        self.decoder.start_utt()
        self.decoder.process_raw(samples.tobytes(), no_search=False, full_utt=True)
        self.decoder.end_utt()
        hypothesis = self.decoder.hyp()
        return hypothesis.hypstr if hypothesis else ""
