"""What codes cost and how well their codebooks are used.

Shapes: Q codebooks of V codes, F frames.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


def bitrate(frame_rate: float, num_codebooks: int, codebook_size: int) -> float:
    """Return bits per second of codes sent as they are: frame_rate · Q · log2 V.

    >>> bitrate(25, 8, 1024)
    2000.0
    """
    return float(frame_rate * num_codebooks * math.log2(codebook_size))


@dataclass(frozen=True)
class CodebookUse:
    """How one codebook is used: the share of its codes that occur, and the entropy of their frequencies in bits."""

    used: float
    entropy: float

    @property
    def perplexity(self) -> float:
        """2^entropy: how many equally frequent codes would have this entropy."""
        return float(2**self.entropy)


def count_codes(codes: Iterable[NDArray[Any]], num_codebooks: int, codebook_size: int) -> NDArray[np.int64]:
    """Count how often each code occurs, [Q, V], over recordings of codes [Q, F]. ValueError for codes out of range."""
    counts = np.zeros((num_codebooks, codebook_size), np.int64)
    for frames in codes:
        for book, row in enumerate(frames):
            counts[book] += np.bincount(row, minlength=codebook_size)
    return counts


def codebook_use(counts: NDArray[Any]) -> tuple[CodebookUse, ...]:
    """Return one value a codebook, from counts [Q, V]. ValueError for a codebook without any code."""
    uses = []
    for book, row in enumerate(np.asarray(counts, dtype=np.float64)):
        if not row.sum():
            raise ValueError(f"codebook {book}: no codes were counted")
        p = row[row > 0] / row.sum()
        uses.append(CodebookUse(len(p) / len(row), max(0.0, float(-(p * np.log2(p)).sum()))))
    return tuple(uses)


def entropy_bitrate(frame_rate: float, uses: Iterable[CodebookUse]) -> float:
    """Return bits per second after ideal entropy coding of each codebook on its own: frame_rate · Σ entropy."""
    return frame_rate * sum(use.entropy for use in uses)
