"""CTranslate2 folders of Whisper as recognisers, through faster-whisper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from audiorl.speech_models.protocol import Waveform
from audiorl.speech_models.waves import resampled

RATE = 16_000


@dataclass(frozen=True)
class FasterWhisper:
    """Greedy transcripts at temperature 0, without retries or conditioning on previous text, one clip at a time.

    `compute_type` as CTranslate2 names it; "default" is that of the folder.
    """

    path: str
    language: str | None = None
    device: str = "auto"
    compute_type: str = "default"
    task: Literal["transcribe", "translate"] = "transcribe"

    @property
    def name(self) -> str:
        return Path(self.path).name

    @cached_property
    def model(self) -> Any:
        try:
            from faster_whisper import WhisperModel
        except ImportError as error:
            raise ImportError("CTranslate2 folders need faster-whisper: pip install 'audiorl[speech]'") from error
        try:
            return WhisperModel(self.path, device=self.device, compute_type=self.compute_type, local_files_only=True)
        except (RuntimeError, ValueError, OSError) as error:
            raise ValueError(f"{self.path}: cannot be read as a CTranslate2 folder of Whisper ({error})") from error

    @property
    def multilingual(self) -> bool:
        return bool(self.model.model.is_multilingual)

    def transcribe(
        self, waveforms: Sequence[Waveform], sample_rate: int, languages: Sequence[str] | None = None
    ) -> list[str]:
        waves = resampled(waveforms, sample_rate, RATE)
        codes = languages if languages is not None else [self.language] * len(waves)
        return [self._text(wav, code) if len(wav) else "" for wav, code in zip(waves, codes, strict=True)]

    def identify(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[dict[str, float]]:
        """The probability of each language by its code, from the first 30 s; {} for no samples."""
        waves = resampled(waveforms, sample_rate, RATE)
        return [dict(self.model.detect_language(audio=wav)[2]) if len(wav) else {} for wav in waves]

    def _text(self, wav: Waveform, language: str | None) -> str:
        segments, _ = self.model.transcribe(
            wav,
            language=language,
            task=self.task,
            beam_size=1,
            best_of=1,
            temperature=0.0,
            condition_on_previous_text=False,
        )
        return "".join(segment.text for segment in segments).strip()
