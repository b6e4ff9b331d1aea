"""A clip as an audio encoder takes it: Whisper's log-mel features, which most families read.

Shapes: T samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor

RATE, HOP = 16_000, 160
"""Samples a second, and from one frame of log-mel features to the next."""
Features = Mapping[str, Tensor]
"""A clip as a family's audio encoder takes it, by argument; the first dimension are the windows of the clip."""


def check_extractor(extractor: Any, encoder: Any, where: str) -> None:
    """Raise ValueError for features of another size, rate or step than the audio encoder was trained with."""
    bins, given = (
        getattr(getattr(encoder, "config", None), "num_mel_bins", None),
        getattr(extractor, "feature_size", None),
    )
    # Granite's encoder reads two frames side by side.
    if bins is not None and given is not None and bins % given:
        what = f"{where}: preprocessor_config.json gives {given} mel bins and the audio encoder takes {bins}"
        raise ValueError(f"{what}; do preprocessor and config.json belong together?")
    if isinstance(extractor, WhisperFeatureExtractor) and (extractor.sampling_rate, extractor.hop_length) != (
        RATE,
        HOP,
    ):
        what = f"{extractor.sampling_rate} Hz, one every {extractor.hop_length} samples"
        raise ValueError(f"{where}: preprocessor_config.json gives features of {what}; give {RATE} and {HOP}")


def to_weights(features: Features, weight: Tensor) -> Features:
    """Return the features where the weights are, numbers in their type."""

    def moved(x: Tensor) -> Tensor:
        dtype = weight.dtype if x.is_floating_point() else x.dtype
        return x.to(device=weight.device, dtype=dtype, non_blocking=True)

    return {name: moved(x) for name, x in features.items()}


def log_mels(
    extractor: WhisperFeatureExtractor,
    wavs: Sequence[np.ndarray],
    device: str | torch.device = "cpu",
    samples: int | None = None,
) -> list[Tensor]:
    """Return [mel bins, ceil(T / hop)] float32, on `device`, of each of mono samples [T] at the extractor's rate.

    Equal to what the models' processors compute with the clip padded to 30 s and the padding cut off again, without
    paying for the 30 s. With `samples` every clip is padded to so many, and the frames of its silence are returned as
    well: the first one or two behind a clip still hear its end. Give clips of similar length together. On a GPU it is
    computed there, to 1e-5 of that.
    """
    hop, device = extractor.hop_length, torch.device(device)
    frames = [math.ceil((samples or len(wav)) / hop) for wav in wavs]
    length = samples or (max(frames) + math.ceil(extractor.n_fft / hop) + 1) * hop
    padded = np.zeros((len(wavs), length), dtype=np.float32)
    for row, wav in zip(padded, wavs, strict=True):
        row[: len(wav)] = wav
    options = dict(sampling_rate=extractor.sampling_rate, padding=False, truncation=False, return_tensors="pt")
    # Under autocast its product with the mel filters would be bfloat16, which numpy lacks.
    with torch.autocast(device.type, enabled=False):
        if device.type == "cuda" and not extractor.dither:
            features = spectrogram(extractor, torch.from_numpy(padded).to(device, non_blocking=True))
        else:
            features = extractor(padded, **options)["input_features"].to(device)
    return [mel[:, :count] for mel, count in zip(features, frames, strict=True)]


def spectrogram(extractor: WhisperFeatureExtractor, wavs: Tensor) -> Tensor:
    """Return [clips, mel bins, frames] of wavs [clips, T], where these are: what the extractor computes, which copies
    its result to the host."""
    window = torch.hann_window(extractor.n_fft, device=wavs.device)
    spectrum = torch.stft(wavs, extractor.n_fft, extractor.hop_length, window=window, return_complex=True)
    filters = torch.from_numpy(extractor.mel_filters).to(wavs.device, torch.float64, non_blocking=True)
    # In float64: a product in TF32 would be off by a thousandth.
    mels = (filters.T @ (spectrum[..., :-1].abs() ** 2).double()).float()
    logs = mels.clamp(min=1e-10).log10()
    return (torch.maximum(logs, logs.amax((1, 2), keepdim=True) - 8.0) + 4.0) / 4.0
