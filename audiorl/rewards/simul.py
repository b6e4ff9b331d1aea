"""The rewards of simultaneous interpretation as functions of one chunk, or of a whole sequence (Seed LiveInterpret 2.0,
arXiv 2507.17527, section on reinforcement learning).

After each chunk t of audio the policy writes y_t, possibly nothing; y*_t is what could be said by then. A value that is
not defined for a chunk is NaN; `StandardisedSum` leaves it out of its statistics and gives it 0. Formulas that the
paper describes in words only are marked as reconstructed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

Similarity = Callable[[str, str], float]
"""How much a written text says what the reference says, in [0, 1]."""


def detection(written: str, reference: str) -> float:
    """r^l: 1 for keeping silent while nothing can be said yet, I(|y_t| = 0)·I(|y*_t| = 0)."""
    return float(not written.strip() and not reference.strip())


def initiative(written: str, reference: str) -> float:
    """r^s: 1 for speaking where something can be said, I(|y_t| > 0)·I(|y*_t| > 0). Formula reconstructed."""
    return float(bool(written.strip()) and bool(reference.strip()))


def quality(written: str, reference: str, similarity: Similarity | None = None) -> float:
    """r^q: the similarity of y_t and y*_t, sentence chrF / 100 unless another is given; NaN where y*_t is empty.

    Silence where something can be said has quality 0. The choice of metric is not published.
    """
    if not reference.strip():
        return math.nan
    return 0.0 if not written.strip() else (similarity or sentence_chrf)(written, reference)


def time_compliance(seconds: float, reference_seconds: float, eps: float = 1e-3) -> float:
    """r^c: 1 - min(1, |d - d*| / max(d*, eps)) for speech of d seconds against d*; NaN where there is no reference.

    Too long and too short cost the same. Shape reconstructed.
    """
    if not reference_seconds > 0:
        return math.nan
    return 1.0 - min(1.0, abs(seconds - reference_seconds) / max(reference_seconds, eps))


def format_match(written: str, pattern: str | re.Pattern[str]) -> float:
    """r^f: 1 where the whole of y_t matches the regular expression."""
    return float(re.fullmatch(pattern, written) is not None)


def latency_penalty(waits: Sequence[float], longest: float) -> float:
    """r^L: -(1/K)·Σ max(0, d_k - l) over K translations that waited d_k segments, l of them acceptable.

    0 when nothing was translated: r^Q, the quality of the whole output, punishes that. Formula reconstructed.
    """
    return -sum(max(0.0, wait - longest) for wait in waits) / len(waits) if waits else 0.0


def sentence_chrf(written: str, reference: str) -> float:
    """chrF of a sentence in [0, 1] (Popović 2015), by sacreBLEU."""
    try:
        from sacrebleu import sentence_chrf as chrf
    except ImportError as error:
        raise ImportError("chrF needs sacrebleu: pip install 'audiorl[metrics]'") from error
    return float(chrf(written, [reference]).score) / 100
