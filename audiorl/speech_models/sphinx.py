"""The recogniser of the pocketsphinx package, whose English model comes in its wheel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from audiorl.speech_models.protocol import Waveform
from audiorl.speech_models.waves import resampled

RATE = 16_000


@dataclass(frozen=True)
class PocketSphinx:
    """English, far weaker than Whisper and small enough for tests. Source: Huggins-Daines et al. 2006."""

    @property
    def name(self) -> str:
        return "pocketsphinx"

    @cached_property
    def decoder(self) -> Any:
        try:
            from pocketsphinx import Decoder
        except ImportError as error:
            raise ImportError("this recogniser needs its package: pip install 'audiorl[speech]'") from error
        # Means over the whole utterance: those carried from one to the next would make texts depend on their order.
        return Decoder(samprate=RATE, cmn="batch", loglevel="FATAL")

    def transcribe(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[str]:
        return [self._text(wav) if len(wav) else "" for wav in resampled(waveforms, sample_rate, RATE)]

    def _text(self, wav: np.ndarray) -> str:
        samples = (np.clip(wav, -1.0, 1.0) * 32767).astype(np.int16)
        self.decoder.start_utt()
        self.decoder.process_raw(samples.tobytes(), no_search=False, full_utt=True)
        self.decoder.end_utt()
        hypothesis = self.decoder.hyp()
        return hypothesis.hypstr if hypothesis else ""
