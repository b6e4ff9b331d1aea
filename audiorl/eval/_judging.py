"""The judges of an evaluation: what was said, and in whose voice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from audiorl.speech_models import Recogniser, SpeakerEncoder, load_recogniser, load_speaker_encoder


@dataclass(frozen=True)
class Judges:
    """A speech recogniser and a speaker encoder; None leaves out what it would measure."""

    recogniser: Recogniser | None = None
    encoder: SpeakerEncoder | None = None

    @classmethod
    def load(
        cls,
        asr: str | None,
        speaker: str | None,
        language: str | None = None,
        device: str = "auto",
        numerals: bool = True,
    ) -> Judges:
        """Those that options name; see `audiorl.speech_models`. `language`: what a multilingual recogniser expects.

        `numerals` False: it writes numbers as words, where it can.
        """
        return cls(
            load_recogniser(asr, language, device, numerals=numerals) if asr else None,
            load_speaker_encoder(speaker, device) if speaker else None,
        )

    def judge(self, waves: Sequence[np.ndarray], sample_rate: int) -> list[dict[str, Any]]:
        """{"hypothesis": text, "voice": embedding [D]} of each waveform [T], as far as there are judges."""
        rows: list[dict[str, Any]] = [{} for _ in waves]
        if self.recogniser is not None:
            for row, text in zip(rows, self.recogniser.transcribe(waves, sample_rate), strict=True):
                row["hypothesis"] = text
        if self.encoder is not None:
            for row, voice in zip(rows, self.encoder.embed(waves, sample_rate), strict=True):
                row["voice"] = voice
        return rows
