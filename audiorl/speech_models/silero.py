"""Silero's voice activity detector, whose weights come with the faster-whisper package."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audiorl.speech_models.protocol import Waveform
from audiorl.speech_models.waves import resampled

RATE = 16_000
FRAME = 512
"""Samples at RATE of a frame, 32 ms."""


@dataclass(frozen=True)
class Silero:
    """The probability of speech in each frame of 32 ms. Source: Silero Team, Silero VAD, by its ONNX model.

    The model carries a state from frame to frame, within one call only.
    """

    @property
    def name(self) -> str:
        return "silero"

    @property
    def frame_seconds(self) -> float:
        return FRAME / RATE

    @cached_property
    def model(self) -> Any:
        try:
            from faster_whisper.vad import get_vad_model
        except ImportError as error:
            raise ImportError("voice activity detection needs faster-whisper: pip install 'audiorl[speech]'") from error
        return get_vad_model()

    def probabilities(self, waveform: Waveform, sample_rate: int) -> NDArray[np.float32]:
        (wav,) = resampled([waveform], sample_rate, RATE)
        if not len(wav):
            return np.zeros(0, np.float32)
        frames = -(-len(wav) // FRAME)
        filled = np.pad(wav, (0, frames * FRAME - len(wav)))  # a copy too: the package writes into what it is given
        return np.asarray(self.model(filled), np.float32).reshape(-1)[:frames]
