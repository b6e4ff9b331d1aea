"""X-vectors of transformers (WavLM, Wav2Vec2, UniSpeech-SAT …) as speaker encoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from audiorl.config import torch_device
from audiorl.speech_models.checkpoint import load_judge, load_processor
from audiorl.speech_models.ctc import inputs
from audiorl.speech_models.protocol import Waveform
from audiorl.speech_models.waves import require_samples, resampled

MIN_SAMPLES = 8000
"""Samples (0.5 s) to which shorter clips are padded with silence: the context of the time-delay layers."""


@dataclass(frozen=True)
class XVector:
    """The model's embedding at length 1. Source: Snyder et al. 2018, on self-supervised features.

    Clips are embedded one at a time: in a padded batch transformers pools frames of padding, since its frame count
    ignores the dilation of the time-delay layers.
    """

    path: str
    device: str = "auto"

    @property
    def name(self) -> str:
        return Path(self.path).name

    @cached_property
    def parts(self) -> tuple[Any, Any]:
        """Model and feature extractor."""
        from transformers import AutoModelForAudioXVector, Wav2Vec2FeatureExtractor

        model = load_judge(AutoModelForAudioXVector, self.path, torch_device(self.device))
        return model, load_processor(Wav2Vec2FeatureExtractor, self.path, "feature extractor")

    @torch.no_grad()
    def embed(self, waveforms: Sequence[Waveform], sample_rate: int) -> NDArray[Any]:
        model, extractor = self.parts
        waves = resampled(waveforms, sample_rate, extractor.sampling_rate)
        require_samples(waves)
        out = np.zeros((len(waves), model.config.xvector_output_dim), np.float32)
        for i, wav in enumerate(waves):
            embedding = model(**inputs(model, extractor, [wav], MIN_SAMPLES)).embeddings[0].float()
            out[i] = torch.nn.functional.normalize(embedding, dim=-1).cpu().numpy()
        return out
