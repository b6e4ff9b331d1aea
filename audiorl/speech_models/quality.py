"""Models without text: DNSMOS predicts opinion scores, Silero detects speech."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from audiorl.errors import install
from audiorl.speech_models.protocol import Waveform, require_samples, resampled

RATE = 16_000
FRAME = 512
"""Samples at RATE of a frame, 32 ms."""


@dataclass(frozen=True)
class DNSMOS:
    """The overall score of DNSMOS P.835. Clips under 9 s are repeated, as the package does.

    Source: Reddy et al. 2022, arXiv 2110.01763.
    """

    name: ClassVar[str] = "dnsmos-overall"

    def rate(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[float]:
        try:
            from speechmos import dnsmos
        except ImportError as error:
            raise ImportError(f"DNSMOS needs speechmos and librosa: {install('speech')}") from error
        waves = resampled(waveforms, sample_rate, RATE)
        require_samples(waves)
        return [float(dnsmos.run(np.clip(wav, -1.0, 1.0), RATE)["ovrl_mos"]) for wav in waves]


@dataclass(frozen=True)
class Silero:
    """The probability of speech in each frame of 32 ms. Source: Silero Team, Silero VAD, by its ONNX model.

    The model carries a state from frame to frame, within one call only.
    """

    name: ClassVar[str] = "silero"
    frame_seconds: ClassVar[float] = FRAME / RATE

    @cached_property
    def model(self) -> Any:
        try:
            from faster_whisper.vad import get_vad_model
        except ImportError as error:
            raise ImportError(f"voice activity detection needs faster-whisper: {install('speech')}") from error
        return get_vad_model()

    def probabilities(self, waveform: Waveform, sample_rate: int) -> NDArray[np.float32]:
        (wav,) = resampled([waveform], sample_rate, RATE)
        if not len(wav):
            return np.zeros(0, np.float32)
        frames = -(-len(wav) // FRAME)
        filled = np.pad(wav, (0, frames * FRAME - len(wav)))  # a copy too: the package writes into what it is given
        return np.asarray(self.model(filled), np.float32).reshape(-1)[:frames]
