"""Who speaks: cosines between speaker embeddings, and how well the voices of a conversation hold together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


def cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    """a·b / (|a|·|b|) in float64. ValueError for a vector without length or direction."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"cosine: vectors of shape {x.shape} and {y.shape}; embed both with the same encoder")
    norms = math.sqrt(float(x @ x)) * math.sqrt(float(y @ y))
    if not (norms > 0 and math.isfinite(norms)):
        raise ValueError("cosine: a vector of zeros, or one that is not finite, has no direction")
    return float(x @ y) / norms


@dataclass(frozen=True)
class VoiceCosines:
    """Mean cosines over all pairs of turns of a conversation: by the same speaker, and by two speakers.

    NaN where there is no such pair.
    """

    intra: float
    inter: float

    @property
    def similarity(self) -> float:
        """sqrt(intra · (1 - inter)), each factor kept in [0, 1]; NaN where one is not defined.

        The geometric mean of how alike a speaker's turns are and how unlike two speakers are. Reported by Higgs Audio
        V2 in words; formula reconstructed.
        """
        alike, unlike = min(max(self.intra, 0.0), 1.0), min(max(1.0 - self.inter, 0.0), 1.0)
        return math.sqrt(alike * unlike) if not math.isnan(self.intra + self.inter) else math.nan


def voice_cosines(embeddings: Sequence[NDArray[Any] | None], speakers: Sequence[str]) -> VoiceCosines:
    """Of turns with these embeddings, spoken by these speakers; every pair of turns counts once.

    None is a turn without speech. A pair with such a turn counts as the worst: 0 for one speaker, 1 for two.
    """
    if len(embeddings) != len(speakers):
        raise ValueError(f"voice_cosines: {len(embeddings)} embeddings but {len(speakers)} speakers")
    cosines: dict[bool, list[float]] = {True: [], False: []}
    for i, one in enumerate(speakers):
        for j in range(i):
            same, a, b = one == speakers[j], embeddings[i], embeddings[j]
            cosines[same].append(float(not same) if a is None or b is None else cosine(a, b))
    intra, inter = (sum(f) / len(f) if f else math.nan for f in (cosines[True], cosines[False]))
    return VoiceCosines(intra, inter)
