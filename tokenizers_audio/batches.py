"""Many recordings through a codec: those of equal length together, where nothing is padded and no code changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tokenizers_audio.protocol import AudioTokenizer

BATCH_SECONDS = 60.0
"""The most sound of a batch; a longer recording is a batch of its own."""


def encode_all(codec: AudioTokenizer, waves: Sequence[Tensor]) -> list[Tensor]:
    """Codes [Q, F] int64, on the CPU, of each of the waves [T] in [-1, 1] at the codec's rate."""
    codes = list[Tensor](waves)
    for places in equal_lengths([len(wav) for wav in waves], round(BATCH_SECONDS * codec.sample_rate)):
        for place, of_one in zip(places, codec.encode(torch.stack([waves[i] for i in places])).cpu(), strict=True):
            codes[place] = of_one
    return codes


@torch.no_grad()
def decode_all(codec: AudioTokenizer, codes: Sequence[Tensor]) -> list[Tensor]:
    """Waves [T] float32, on the CPU, of each of the codes [Q, F]."""
    waves = list[Tensor](codes)
    for places in equal_lengths([c.shape[-1] for c in codes], round(BATCH_SECONDS * codec.frame_rate)):
        decoded = codec.decode(torch.stack([codes[i] for i in places])).float().cpu()
        for place, wav in zip(places, decoded, strict=True):
            waves[place] = wav
    return waves


def equal_lengths(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Places in batches of one length each, which together are at most `most` long."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, length in enumerate(lengths):
        places[length].append(place)
    for length, of_length in places.items():
        size = max(most // max(length, 1), 1)
        for at in range(0, len(of_length), size):
            yield of_length[at : at + size]
