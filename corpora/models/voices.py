"""A speaker encoder that is fitted to a corpus: linear discriminants of spectra."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor

from audiorl.config import torch_device
from audiorl.models.features import log_mels
from audiorl.speech_models.protocol import Waveform, batches_by_length, require_samples, resampled

RATE = 16_000
LOUDER = 0.75
"""Frames count that are less than 30 dB below the loudest: 3 decades, of which log-mel frames make 0.75."""
BATCH = 64
"""Clips whose frames are computed together."""
SHRINKAGE = 1e-3
"""Share of the mean variance that is added to the covariance within speakers."""


@dataclass(frozen=True, eq=False)
class VoiceLDA:
    """What distinguishes speakers in the long-term spectrum; silence has no voice, leave it out.

    Made by `fit_voices`. It knows voices like those that it was fitted on; as a reward for the voice of the prompt it
    leaves a neural encoder free to measure. Kept are the mean and the deviation of each log-mel band over a clip's
    louder frames; Fisher's linear discriminants (Fisher 1936; with a shrunk covariance) say which directions of these
    differ between speakers and not within one. N clips, B mel bands, D discriminants.
    """

    mean: NDArray[np.float64]
    """[2B]: of the statistics of all clips."""
    directions: NDArray[np.float64]
    """[2B, D]: the discriminants, in which speakers have a variance of 1 within."""
    name: str = "voice-lda"

    def embed(self, waveforms: Sequence[Waveform], sample_rate: int) -> NDArray[Any]:
        embedded = (statistics(waveforms, sample_rate) - self.mean) @ self.directions
        lengths = np.maximum(np.linalg.norm(embedded, axis=1, keepdims=True), 1e-9)
        return (embedded / lengths).astype(np.float32)


def fit_voices(
    waveforms: Sequence[Waveform], speakers: Sequence[str], sample_rate: int, discriminants: int = 24
) -> VoiceLDA:
    """Fit an encoder to these speakers' clips. Raises ValueError for fewer than two speakers or two clips of one."""
    names, of_clip, counts = np.unique(np.array(speakers), return_inverse=True, return_counts=True)
    if len(names) < 2 or counts.min() < 2:
        fewest = min(counts, default=0)
        raise ValueError(
            f"{len(names)} speakers, the fewest clips of one {fewest}; give two speakers, two clips of each"
        )
    measured = statistics(waveforms, sample_rate)
    means = np.stack([measured[of_clip == speaker].mean(0) for speaker in range(len(names))])
    within = np.cov(measured - means[of_clip], rowvar=False)
    within += SHRINKAGE * np.trace(within) / len(within) * np.eye(len(within))
    whiten = np.linalg.cholesky(np.linalg.inv(within))
    _, _, axes = np.linalg.svd((means - measured.mean(0)) @ whiten, full_matrices=False)
    return VoiceLDA(measured.mean(0), whiten @ axes[: min(discriminants, len(names) - 1)].T)


def statistics(waveforms: Sequence[Waveform], sample_rate: int) -> NDArray[np.float64]:
    """[N, 2B]: mean and standard deviation of each log-mel band over the louder frames, the level taken off."""
    waves = resampled(waveforms, sample_rate, RATE)
    require_samples(waves)
    extractor, device = _extractor(), torch_device("auto")
    out = np.zeros((len(waves), 2 * extractor.feature_size))
    for places in batches_by_length(waves, BATCH):
        for place, mel in zip(places, log_mels(extractor, [waves[i] for i in places], device), strict=True):
            level = mel.mean(0)
            louder = mel[:, level >= level.max() - LOUDER].cpu().numpy()
            out[place] = np.concatenate([louder.mean(1) - louder.mean(), louder.std(1)])
    return out


@cache
def _extractor() -> WhisperFeatureExtractor:
    """Made once: it computes its mel filters."""
    return WhisperFeatureExtractor()
