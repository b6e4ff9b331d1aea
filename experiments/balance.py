"""The choice among samples that keeps the prosody of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from audiorl.eval.metrics.prosody import Prosody
from audiorl.tasks.tts.prosody import ProsodyBins


def balanced_choice(
    rewards: NDArray[np.float64], measured: Sequence[Prosody | None], bins: ProsodyBins, rounds: int = 400
) -> NDArray[np.int64]:
    """Choose which of the K samples of each of N texts to keep, [N]: rewards as high as possible, while all that are
    chosen together have the prosody of `bins`: of recordings, or of the samples themselves; then choosing moves none.

    rewards [N, K]; measured: of the N * K samples, text by text. If only the best were chosen, a batch would become
    monotone as soon as flat speech is understood a little better. Here each bin has a price, which rises while too few
    samples of it are chosen and falls while too many are, and each text keeps the sample with the highest sum of reward
    and prices: dual ascent on the linear programme whose constraints are the shares of `bins`. Of all rounds the one
    that comes nearest to these shares counts. Speech without voice has no bin and no price.
    """
    texts = np.arange(len(rewards))
    places = [b.reshape(rewards.shape) for b in bins.of(measured).values()]
    # One price more than bins, which stays 0: that of speech without voice, whose place is -1.
    wanted = [np.array([*shares, 0.0]) for shares in bins.shares.values()]
    prices = [np.zeros(len(shares)) for shares in wanted]
    best, smallest = rewards.argmax(1), math.inf
    for step in range(1, rounds + 1):
        chosen = (rewards + sum(price[place] for price, place in zip(prices, places, strict=True))).argmax(1)
        distance = 0.0
        for price, place, shares in zip(prices, places, wanted, strict=True):
            counts = np.bincount(place[texts, chosen] % len(shares), minlength=len(shares))
            excess = counts[:-1] / max(counts[:-1].sum(), 1) - shares[:-1]
            price[:-1] -= excess / math.sqrt(step)
            distance += float(np.abs(excess).sum())
        if distance < smallest:
            best, smallest = chosen, distance
    return best
