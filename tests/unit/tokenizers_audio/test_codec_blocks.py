"""Encoders that hear blocks: which frame comes from which block, and that nothing else differs from one block."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import tokenizers_audio
from tests.support.codecs import speech
from tokenizers_audio.blocks import Blocks, BlockSize, block_size

HOP = 2


def recorder() -> tuple[Blocks, list[list[int]]]:
    """Blocks of 4 frames that overlap by 2, whose features are (sample number // HOP, number of the block)."""
    heard: list[list[int]] = []

    def analyse(wav: Tensor) -> Tensor:
        heard.append(wav[0, 0].int().tolist())
        frames = wav[:, :, ::HOP] // HOP
        return torch.cat([frames, torch.full_like(frames, len(heard) - 1)], 1)

    return Blocks(analyse, HOP, BlockSize(4, 2)), heard


def samples(frames: int) -> Tensor:
    return torch.arange(frames * HOP, dtype=torch.float32)[None, None]


@pytest.mark.parametrize(
    ("frames", "source"),
    [
        (1, [0]),
        (4, [0, 0, 0, 0]),
        (5, [0, 0, 0, 1, 1]),
        (6, [0, 0, 0, 1, 1, 1]),
        (7, [0, 0, 0, 1, 1, 2, 2]),
        (8, [0, 0, 0, 1, 1, 2, 2, 2]),
    ],
)
def test_which_block_a_frame_comes_from(frames: int, source: list[int]) -> None:
    """Block i begins at frame 2i; of an overlap of two frames each block gives one."""
    layer, _ = recorder()
    for chunk in (1, 3, 10**6):
        parts = [layer.push(part) for part in samples(frames).split(min(chunk, frames) * HOP, -1)]
        features = torch.cat([part for part in [*parts, layer.finish()] if part.shape[-1]], -1)[0]
        assert features[0].tolist() == list(range(frames))
        first = features[1, 0]
        assert (features[1] - first).tolist() == source


def test_what_a_block_hears_and_when_it_speaks() -> None:
    layer, heard = recorder()
    counts = [layer.push(part).shape[-1] for part in samples(7).split(HOP, -1)]
    assert counts == [0, 0, 0, 0, 3, 0, 2]  # a block ends when something follows it
    assert layer.finish().shape[-1] == 2
    assert heard == [list(range(0, 8)), list(range(4, 12)), list(range(8, 14))]


def test_sizes() -> None:
    assert block_size(30, 2, 25) == BlockSize(750, 50)
    assert block_size(0.2, 0.08, 25) == BlockSize(5, 2)
    assert block_size(1, 0, 50) == BlockSize(50, 0)
    for wrong in ((1.0, 1.2), (1.0, -0.5), (0.0, 0.0)):
        with pytest.raises(ValueError, match="longer than its overlap"):
            block_size(*wrong, 25)


@pytest.mark.parametrize("name", ["higgs", "xcodec"])
def test_up_to_one_block_its_length_does_not_matter(folders: dict[str, Path], name: str) -> None:
    short = tokenizers_audio.load(folders[name], block_seconds=0.4, overlap_seconds=0.16)
    usual = tokenizers_audio.load(folders[name])
    assert short.identity == usual.identity
    wav = speech(short, 1.0)
    one = wav[: round(0.4 * short.sample_rate)]
    assert torch.equal(short.encode(one), usual.encode(one))
    whole, blocks = usual.encode(wav), short.encode(wav)
    assert whole.shape == blocks.shape and not torch.equal(whole, blocks)
    # The first block of a long recording is the same block: all but the last half overlap is kept from it.
    kept = round((0.4 - 0.08) * short.frame_rate)
    assert torch.equal(blocks[..., :kept], usual.encode(one)[..., :kept])
