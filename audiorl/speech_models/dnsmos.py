"""DNSMOS: predicted mean opinion scores, by the models in the speechmos package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from audiorl.speech_models.protocol import Waveform
from audiorl.speech_models.waves import require_samples, resampled

RATE = 16_000
_KEYS = {"overall": "ovrl_mos", "signal": "sig_mos", "background": "bak_mos", "p808": "p808_mos"}


@dataclass(frozen=True)
class DNSMOS:
    """DNSMOS P.835 (overall, signal or background), or P.808. Clips under 9 s are repeated, as the package does.

    Source: Reddy et al. 2022, arXiv 2110.01763.
    """

    scale: Literal["overall", "signal", "background", "p808"] = "overall"

    def __post_init__(self) -> None:
        if self.scale not in _KEYS:
            raise ValueError(f"DNSMOS: scale {self.scale!r} is not one of {', '.join(_KEYS)}")

    @property
    def name(self) -> str:
        return f"dnsmos-{self.scale}"

    def rate(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[float]:
        try:
            from speechmos import dnsmos
        except ImportError as error:
            raise ImportError("DNSMOS needs speechmos and librosa: pip install 'audiorl[speech]'") from error
        waves = resampled(waveforms, sample_rate, RATE)
        require_samples(waves)
        scores: list[dict[str, Any]] = [dnsmos.run(np.clip(wav, -1.0, 1.0), RATE) for wav in waves]
        return [float(values[_KEYS[self.scale]]) for values in scores]
