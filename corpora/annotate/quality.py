"""How good a segment sounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from audiorl.eval.metrics.speech import clipped_share, frame_levels, level, silent_share
from audiorl.speech_models import QualityModel
from corpora.annotate.recordings import RATE, Recording

QUIETEST = -100.0
"""dB that digital silence counts as, so that every level is a number."""
AUDIBLE = 60.0
"""dB below the strongest frequency down to which a frequency belongs to the bandwidth."""
FFT = 1024


@dataclass(frozen=True)
class Quality:
    """{"mos"?, "level", "snr", "clipped", "silent", "bandwidth"} of each segment, at the rate of the recording.

    mos: that of the model. level: dB of full scale. clipped, silent: shares of samples and frames, see
    `audiorl.eval.metrics.speech`. snr and bandwidth: see the functions below.
    """

    model: QualityModel | None
    name: str = "quality"
    needs: tuple[str, ...] = ("segments",)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"model": None if self.model is None else self.model.name}

    def __call__(self, recording: Recording) -> list[dict[str, float]]:
        rows = []
        for span in recording.results["segments"]:
            row = waveform_quality(recording.native(span), recording.rate)
            if self.model is not None:
                row = {"mos": round(self.model.rate([recording.read(span)], RATE)[0], 3), **row}
            rows.append(row)
        return rows


def waveform_quality(wav: np.ndarray, rate: int) -> dict[str, float]:
    """Of samples [T] at `rate` Hz."""
    return {
        "level": round(max(level(wav), QUIETEST), 2),
        "snr": round(snr(wav, rate), 2),
        "clipped": round(clipped_share(wav), 6),
        "silent": round(silent_share(wav, rate), 4),
        "bandwidth": round(bandwidth(wav, rate)),
    }


def snr(wav: np.ndarray, rate: int) -> float:
    """Estimate in dB of speech over noise: the 95th percentile of the levels of 25 ms frames minus the 5th.

    Without pauses, and for noise that is not steady, it is too low. After NIST's STNR, which takes both levels from a
    histogram of frame powers.
    """
    levels = np.maximum(frame_levels(wav, rate), QUIETEST)
    if not len(levels):
        return 0.0
    return float(np.percentile(levels, 95) - np.percentile(levels, 5))


def bandwidth(wav: np.ndarray, rate: int) -> float:
    """The highest frequency in Hz whose mean power is at most AUDIBLE dB below that of the strongest; 0 for silence.

    Telephone speech that was resampled to 48 kHz has about 4000.
    """
    filled = np.pad(wav.astype(np.float64), (0, max(0, FFT - len(wav))))
    frames = np.lib.stride_tricks.sliding_window_view(filled, FFT)[:: FFT // 2]
    powers = (np.abs(np.fft.rfft(frames * np.hanning(FFT), axis=-1)) ** 2).mean(0)
    if powers.max() <= 0:
        return 0.0
    return float(np.nonzero(powers >= powers.max() * 10 ** (-AUDIBLE / 10))[0][-1] * rate / FFT)
