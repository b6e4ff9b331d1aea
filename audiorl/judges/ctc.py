"""Recognisers with a CTC head: Wav2Vec2, HuBERT, WavLM, Data2Vec and others of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from audiorl.config import torch_device
from audiorl.judges.checkpoint import load_judge, load_processor
from audiorl.judges.protocol import Waveform
from audiorl.judges.waves import Wave, batches_by_length, padded, resampled

MIN_SAMPLES = 1600
"""Samples (0.1 s) to which shorter clips are padded with silence: the convolutions need some."""


@dataclass(frozen=True)
class CTC:
    """The most probable label of each frame, repeats and blanks removed. Source: Graves et al. 2006.

    Models whose first convolution normalises over time (Wav2Vec2 base, HuBERT base) get one clip at a time, since the
    padding of a batch would change their output. The others get batches with a mask.
    """

    path: str
    device: str = "auto"
    batch_size: int = 8

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError("CTC: batch_size must be at least 1")

    @property
    def name(self) -> str:
        return Path(self.path).name

    @cached_property
    def parts(self) -> tuple[Any, Any, Any]:
        """Model, feature extractor and tokenizer."""
        from transformers import AutoModelForCTC, AutoTokenizer, Wav2Vec2FeatureExtractor

        model = load_judge(AutoModelForCTC, self.path, torch_device(self.device))
        extractor = load_processor(Wav2Vec2FeatureExtractor, self.path, "feature extractor")
        return model, extractor, load_processor(AutoTokenizer, self.path, "tokenizer")

    def transcribe(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[str]:
        model, extractor, tokenizer = self.parts
        waves = resampled(waveforms, sample_rate, extractor.sampling_rate)
        texts = [""] * len(waves)
        for batch in batches_by_length(waves, batch_size(model, self.batch_size)):
            for place, ids in zip(batch, self._labels([waves[i] for i in batch]), strict=True):
                # The tokenizer removes repeats, then blanks; with skip_special_tokens it would drop blanks first.
                texts[place] = tokenizer.decode(ids).strip()
        return texts

    @torch.no_grad()
    def _labels(self, waves: Sequence[Wave]) -> list[Tensor]:
        """The label of each frame, [frames] for each clip, repeats and blanks still in it."""
        model, extractor, _ = self.parts
        logits = model(**inputs(model, extractor, waves, MIN_SAMPLES)).logits
        lengths = [int(frames(model, max(len(wav), MIN_SAMPLES))) for wav in waves]
        return [row[:n].argmax(-1) for row, n in zip(logits, lengths, strict=True)]


def batch_size(model: Any, wanted: int) -> int:
    """1 for models whose output the padding of a batch would change."""
    return wanted if getattr(model.config, "feat_extract_norm", "group") == "layer" else 1


def inputs(model: Any, extractor: Any, waves: Sequence[Wave], shortest: int) -> dict[str, Tensor]:
    """The keyword arguments of the model for clips of at least `shortest` samples."""
    filled = [padded(wav, shortest) for wav in waves]
    mask = len(filled) > 1
    features = extractor(
        filled,
        sampling_rate=extractor.sampling_rate,
        padding=True,
        return_attention_mask=mask,
        return_tensors="pt",
    )
    return {key: t.to(model.device, model.dtype if t.is_floating_point() else None) for key, t in features.items()}


def frames(model: Any, samples: int) -> int:
    """How many frames the convolutions make of so many samples."""
    for kernel, stride in zip(model.config.conv_kernel, model.config.conv_stride, strict=True):
        samples = (samples - kernel) // stride + 1
    return samples
