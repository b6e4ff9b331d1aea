"""How well clusters agree with known classes: purity and V-measure. Neither depends on the clusters' names."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ClusterScores:
    """Each in [0, 1], 1 for a perfect clustering.

    purity: share of items that belong to the most frequent class of their cluster; 1 for clusters of single items.
    homogeneity = 1 - H(class | cluster) / H(class), 1 where each cluster holds one class. completeness: the same with
    the roles exchanged, 1 where each class lies in one cluster. v_measure: their harmonic mean. Source: Rosenberg and
    Hirschberg 2007.
    """

    purity: float
    homogeneity: float
    completeness: float
    v_measure: float


def compare_clusters(classes: Sequence[Hashable], clusters: Sequence[Hashable]) -> ClusterScores:
    """Of items with these classes that were put into these clusters. ValueError for no items or unequal lengths."""
    if len(classes) != len(clusters) or not classes:
        raise ValueError(f"compare_clusters: {len(classes)} classes and {len(clusters)} clusters; give one an item")
    pairs = Counter(zip(classes, clusters, strict=True))
    best: Counter[Hashable] = Counter()
    for (_, cluster), count in pairs.items():
        best[cluster] = max(best[cluster], count)
    joint, of_class, of_cluster = (_entropy(c) for c in (pairs, Counter(classes), Counter(clusters)))
    homogeneity = 1 - (joint - of_cluster) / of_class if of_class else 1.0
    completeness = 1 - (joint - of_class) / of_cluster if of_cluster else 1.0
    total = homogeneity + completeness
    v_measure = 2 * homogeneity * completeness / total if total > 0 else 0.0
    return ClusterScores(sum(best.values()) / len(classes), homogeneity, completeness, v_measure)


def _entropy(counts: Counter) -> float:
    """In nats."""
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())
