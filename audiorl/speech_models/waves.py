"""Checks, resampling, padding and batching of the waveforms that judges get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import soxr
from numpy.typing import NDArray

from audiorl.speech_models.protocol import Waveform

Wave = NDArray[np.float32]


def resampled(waveforms: Sequence[Waveform], sample_rate: int, wanted: int) -> list[Wave]:
    """Each as float32 [T] at `wanted` Hz. Raises ValueError naming a waveform that is not usable."""
    if not (isinstance(sample_rate, int) and sample_rate > 0):
        raise ValueError(f"sample_rate: {sample_rate!r}; give the waveforms' rate in Hz, an integer")
    return [_resampled(np.asarray(wav), i, sample_rate, wanted) for i, wav in enumerate(waveforms)]


def _resampled(wav: Waveform, number: int, sample_rate: int, wanted: int) -> Wave:
    if wav.ndim != 1 or wav.dtype.kind != "f":
        raise ValueError(f"waveform {number}: {wav.dtype} of shape {wav.shape}; give mono floats [T] in [-1, 1]")
    if not np.isfinite(wav).all():
        bad = int(np.count_nonzero(~np.isfinite(wav)))
        raise ValueError(f"waveform {number}: {bad} of {len(wav)} samples are NaN or infinite")
    wav = np.ascontiguousarray(wav, dtype=np.float32)
    return wav if sample_rate == wanted or not len(wav) else soxr.resample(wav, sample_rate, wanted)


def require_samples(waves: Sequence[Wave]) -> None:
    """Raise ValueError naming the first waveform without samples, for judges that have no result for it."""
    for number, wav in enumerate(waves):
        if not len(wav):
            raise ValueError(f"waveform {number}: holds no samples")


def padded(wav: Wave, samples: int) -> Wave:
    """The waveform, with silence after it where it is shorter than `samples`."""
    return wav if len(wav) >= samples else np.pad(wav, (0, samples - len(wav)))


def batches_by_length(waves: Sequence[Wave], size: int) -> Iterator[list[int]]:
    """Indices in batches of up to `size` of similar length, the longest first; those without samples are left out."""
    order = sorted((i for i, wav in enumerate(waves) if len(wav)), key=lambda i: -len(waves[i]))
    for at in range(0, len(order), size):
        yield order[at : at + size]
