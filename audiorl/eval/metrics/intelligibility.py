"""STOI and PESQ, computed by the libraries that others use, with a defined result for what they cannot judge.

Both compare an original with what became of it: mono [T], one rate, aligned, of equal length.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import soxr
from numpy.typing import NDArray

from audiorl.eval.metrics.spectral import aligned

PESQ_RATE = 16_000
PESQ_WORST = 1.0
"""Of silence in place of speech, of which PESQ says nothing; the worst that it gives otherwise is about 1.04."""


def stoi(reference: NDArray[Any], estimate: NDArray[Any], sample_rate: int, extended: bool = False) -> float:
    """Short-time objective intelligibility, up to 1; `extended` for ESTOI. NaN where speech lasts under about 0.4 s.

    Source: Taal et al. 2011; Jensen and Taal 2016; computed by pystoi (extra `speech`).
    """
    try:
        from pystoi import stoi as measure
    except ImportError as error:
        raise ImportError("STOI needs pystoi: pip install 'audiorl[speech]'") from error
    x, y = aligned(reference, estimate)
    if not np.any(x):
        return math.nan
    with warnings.catch_warnings():
        # pystoi answers 1e-5 with a warning where there are fewer than 30 frames of speech.
        warnings.simplefilter("error", RuntimeWarning)
        try:
            return float(measure(x, y, sample_rate, extended=extended))
        except RuntimeWarning:
            return math.nan


def pesq_wb(reference: NDArray[Any], estimate: NDArray[Any], sample_rate: int) -> float:
    """Wideband PESQ (ITU-T P.862.2), about 1.04 to 4.64, at 16 kHz, to which other rates are resampled.

    NaN where the reference holds no speech that it finds, or lasts under 0.25 s; PESQ_WORST where only the estimate is
    silent. Computed by pesq (extra `pesq`, built with a C compiler).
    """
    try:
        from pesq import BufferTooShortError, NoUtterancesError, pesq
    except ImportError as error:
        raise ImportError("PESQ needs its package and a C compiler: pip install 'audiorl[pesq]'") from error
    x, y = aligned(reference, estimate)
    if sample_rate != PESQ_RATE:
        x, y = (soxr.resample(wav, sample_rate, PESQ_RATE) for wav in (x, y))
    x, y = x.astype(np.float32), y.astype(np.float32)
    if not np.any(x):
        return math.nan
    try:
        return PESQ_WORST if not np.any(y) else float(pesq(PESQ_RATE, x, y, "wb"))
    except BufferTooShortError:
        return math.nan
    except NoUtterancesError:
        pass
    try:
        pesq(PESQ_RATE, x, x, "wb")
    except NoUtterancesError:
        return math.nan
    return PESQ_WORST
