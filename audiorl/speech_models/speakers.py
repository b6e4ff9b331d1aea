"""Speaker encoders: X-vectors of transformers, GE2E with Resemblyzer's weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from audiorl.config import torch_device
from audiorl.eval.metrics.speech import mel_filters
from audiorl.speech_models.ctc import inputs
from audiorl.speech_models.protocol import (
    ModelFolder,
    Wave,
    Waveform,
    load_model,
    load_processor,
    require_samples,
    resampled,
)

MIN_SAMPLES = 8000
"""Samples (0.5 s) to which shorter clips are padded with silence: the context of the time-delay layers."""


@dataclass(frozen=True)
class XVector(ModelFolder):
    """The model's embedding at length 1. Source: Snyder et al. 2018, on self-supervised features.

    Clips are embedded one at a time: in a padded batch transformers pools frames of padding, since its frame count
    ignores the dilation of the time-delay layers.
    """

    device: str = "auto"

    @cached_property
    def parts(self) -> tuple[Any, Any]:
        """Model and feature extractor."""
        from transformers import AutoModelForAudioXVector, Wav2Vec2FeatureExtractor

        model = load_model(AutoModelForAudioXVector, self.path, torch_device(self.device))
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


RATE, WINDOW, HOP, BANDS = 16_000, 400, 160, 40
FRAMES = 160
"""Frames of one partial utterance, 1.6 s."""
STEP = round(RATE / 1.3 / HOP)
"""Frames between partial utterances: 1.3 a second."""
COVERAGE = 0.75
"""Share of the last partial utterance that must be speech, unless it is the only one."""
LOUDNESS = -30.0
"""dB to which quieter clips are raised."""


class GE2ENetwork(nn.Module):
    """Mel frames [N, FRAMES, BANDS] to embeddings [N, 256] of length 1."""

    def __init__(self, width: int = 256, layers: int = 3) -> None:
        super().__init__()
        self.lstm = nn.LSTM(BANDS, width, layers, batch_first=True)
        self.linear = nn.Linear(width, width)

    def forward(self, mels: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(mels)
        return nn.functional.normalize(torch.relu(self.linear(hidden[-1])), dim=-1)


@dataclass(frozen=True)
class GE2E(ModelFolder):
    """The mean embedding of partial utterances of 1.6 s, at length 1. Silence is not cut out; leave it out yourself.

    Source: Wan et al. 2018, with Resemblyzer's weights from a folder that tools/fetch_judges.py writes. Resemblyzer's
    own package needs a compiled voice activity detector that current setuptools cannot import.
    """

    device: str = "auto"

    @cached_property
    def network(self) -> GE2ENetwork:
        from safetensors.torch import load_file

        from audiorl.models.weights import naming_damage

        file = Path(self.path) / "model.safetensors"
        if not file.is_file():
            raise ValueError(f"{file}: missing; write the folder with tools/fetch_judges.py")
        network = GE2ENetwork()
        with naming_damage(file):
            weights = load_file(file)
        try:
            network.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"{file}: not the weights of this encoder ({error})") from error
        return network.to(torch_device(self.device)).eval().requires_grad_(False)

    @torch.no_grad()
    def embed(self, waveforms: Sequence[Waveform], sample_rate: int) -> NDArray[Any]:
        waves = resampled(waveforms, sample_rate, RATE)
        require_samples(waves)
        device = self.network.linear.weight.device
        embeddings = []
        for wav in waves:
            parts = self.network(torch.from_numpy(partials(wav)).to(device))
            embeddings.append(nn.functional.normalize(parts.mean(0), dim=-1).cpu().numpy())
        return np.stack(embeddings) if embeddings else np.zeros((0, self.network.linear.out_features), np.float32)


def partials(wav: Wave) -> NDArray[np.float32]:
    """Return the mel frames of each partial utterance, [N >= 1, FRAMES, BANDS], the last filled with silence."""
    starts = list(range(0, max(math.ceil((len(wav) + 1) / HOP) - FRAMES + STEP + 1, 1), STEP))
    if (len(wav) - starts[-1] * HOP) / (FRAMES * HOP) < COVERAGE and len(starts) > 1:
        starts.pop()
    # Powers of windows of 25 ms every 10 ms, centred, with silence beyond the edges.
    missing = max(0, (starts[-1] + FRAMES) * HOP - len(wav))
    padded = np.pad(raised(wav).astype(np.float64), (WINDOW // 2, WINDOW // 2 + missing))
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    powers = np.abs(np.fft.rfft(frames * hann, axis=-1)) ** 2
    mels = (powers @ mel_filters(RATE, WINDOW, BANDS).T).astype(np.float32)
    return np.stack([mels[s : s + FRAMES] for s in starts])


def raised(wav: Wave) -> Wave:
    """Return the waveform with a mean power of LOUDNESS at least; silence stays silent."""
    power = float(np.mean(wav.astype(np.float64) ** 2))
    missing = LOUDNESS - 10 * math.log10(power) if power > 0 else 0.0
    return wav if missing <= 0 else (wav * 10 ** (missing / 20)).astype(np.float32)
