"""Who speaks: an embedding of each segment, and clusters of them over all recordings."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audiorl.speech_models import SpeakerEncoder
from corpora.annotate.recognisers import files_mark
from corpora.annotate.recordings import RATE, Recording

RELIABLE = 1.6
"""Seconds from which an embedding takes part in clustering; shorter segments join the nearest cluster afterwards. It is
the length of the partial utterances of Wan et al. 2018."""
BLOCK = 4000
"""Most embeddings that are clustered at once: the distances of all pairs take 64 MB."""


@dataclass(frozen=True)
class Voices:
    """The embedding of each segment as text: float16 in base64."""

    encoder: SpeakerEncoder
    path: str
    name: str = "voices"
    needs: tuple[str, ...] = ("segments",)

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"encoder": self.path, "files": files_mark(self.path)}

    def __call__(self, recording: Recording) -> list[str]:
        return [encoded(self.encoder.embed([recording.read(s)], RATE)[0]) for s in recording.results["segments"]]


def encoded(embedding: NDArray[Any]) -> str:
    return base64.b64encode(embedding.astype("<f2").tobytes()).decode("ascii")


def decoded(text: str) -> NDArray[np.float32]:
    """[D], of length 1."""
    embedding = np.frombuffer(base64.b64decode(text), "<f2").astype(np.float32)
    return embedding / max(float(np.linalg.norm(embedding)), 1e-9)


def speakers(embeddings_ND: NDArray[Any], seconds: Sequence[float], threshold: float) -> list[int]:
    """Return the number of the speaker of each segment, 0 for who speaks longest.

    Segments of RELIABLE seconds and more are clustered by `clusters`; shorter ones join the nearest centroid. Where all
    are shorter, all are clustered.
    """
    if not len(embeddings_ND):
        return []
    lengths = np.asarray(seconds)
    reliable = np.nonzero(lengths >= RELIABLE)[0]
    if not len(reliable):
        reliable = np.arange(len(lengths))
    labels = clusters(embeddings_ND[reliable], lengths[reliable], threshold)
    centroids = _centroids(embeddings_ND[reliable], lengths[reliable], labels)
    assigned = (embeddings_ND @ centroids.T).argmax(1)
    assigned[reliable] = labels
    order = np.argsort(-np.bincount(assigned, lengths, minlength=len(centroids)), kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[assigned].tolist()


def clusters(embeddings_ND: NDArray[Any], weights_N: NDArray[Any], threshold: float) -> NDArray[np.int64]:
    """Return a label from 0 for each of N embeddings of length 1, by agglomerative clustering with average linkage.

    It ends where the mean cosine distance of every two clusters is above `threshold`. Source: Garcia-Romero et al. 2017
    for diarisation, there with PLDA scores.

    More than BLOCK embeddings are clustered block by block, in their order, and then the centroids of the blocks'
    clusters, weighted; where that merges less than a tenth of them, the remaining clusters stay as they are.
    """
    if len(embeddings_ND) > BLOCK:
        labels = np.zeros(len(embeddings_ND), np.int64)
        count = 0
        for start in range(0, len(embeddings_ND), BLOCK):
            block = slice(start, start + BLOCK)
            labels[block] = count + clusters(embeddings_ND[block], weights_N[block], threshold)
            count = int(labels[block].max()) + 1
        if count > 0.9 * len(embeddings_ND):
            return labels
        centroids = _centroids(embeddings_ND, weights_N, labels)
        return clusters(centroids, np.bincount(labels, weights_N), threshold)[labels]
    if len(embeddings_ND) == 1:
        return np.zeros(1, np.int64)
    from scipy.cluster.hierarchy import fcluster, linkage

    tree = linkage(embeddings_ND.astype(np.float64), method="average", metric="cosine")
    return fcluster(np.maximum(tree, 0), threshold, criterion="distance").astype(np.int64) - 1


def _centroids(embeddings_ND: NDArray[Any], weights_N: NDArray[Any], labels_N: NDArray[Any]) -> NDArray[Any]:
    """[K, D], each of length 1."""
    sums = np.zeros((int(labels_N.max()) + 1, embeddings_ND.shape[1]))
    np.add.at(sums, labels_N, embeddings_ND * weights_N[:, None])
    return sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-9)
