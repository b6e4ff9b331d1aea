"""The delay pattern: rows counted by hand, transformers' Higgs processor as reference, and what a sampler decides."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import HiggsAudioV2Processor
from transformers.models.higgs_audio_v2.generation_higgs_audio_v2 import HiggsAudioV2DelayPatternLogitsProcessor

from tokenizers_audio.delay import NEVER, deinterleave, interleave, sampled_codes_mask, step

B, E = 1024, 1025

CODES = torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32]])
ROWS = torch.tensor([[B, B, B], [10, B, B], [11, 20, B], [12, 21, 30], [E, 22, 31], [E, E, 32], [E, E, E]])
DRAWN = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1], [0, 0, 1], [0, 0, 0]]


def mask(rows: Tensor) -> list[list[int]]:
    return sampled_codes_mask(rows, B, E).int().tolist()


def test_three_frames_of_three_codebooks_by_hand() -> None:
    assert interleave(CODES, B, E).tolist() == ROWS.tolist()
    assert deinterleave(ROWS, B, E).tolist() == CODES.tolist()
    assert mask(ROWS) == DRAWN


def test_no_frames_and_one_codebook() -> None:
    nothing = interleave(torch.zeros(3, 0, dtype=torch.int64), B, E)
    assert nothing.tolist() == [[B, B, B], [E, B, B], [E, E, B], [E, E, E]]
    assert deinterleave(nothing, B, E).shape == (3, 0)
    assert mask(nothing) == [[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    single = interleave(torch.tensor([[7, 8]]), B, E)
    assert single.tolist() == [[B], [7], [8], [E]] and mask(single) == [[0], [1], [1], [1]]
    assert deinterleave(single, B, E).tolist() == [[7, 8]]


@pytest.mark.parametrize(("rows", "frames"), [(7, 3), (6, 3), (5, 2), (4, 1), (3, 0), (1, 0), (0, 0)])
def test_a_generation_cut_off_keeps_its_complete_frames(rows: int, frames: int) -> None:
    assert deinterleave(ROWS[:rows], B, E).tolist() == CODES[:, :frames].tolist()
    assert mask(ROWS[:rows]) == DRAWN[:rows]


def test_an_end_in_the_middle_of_the_delay() -> None:
    """EOS of codebook 1 in row 4 stands for codebook 0 in row 3: two frames, and a 12 that never becomes one."""
    rows = torch.tensor([[B, B, B], [10, B, B], [11, 20, B], [12, 21, 30], [E, E, 31], [E, E, E]])
    assert deinterleave(rows, B, E).tolist() == CODES[:, :2].tolist()
    assert mask(rows) == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [0, 1, 1], [0, 0, 0]]


def test_what_follows_the_end_is_ignored() -> None:
    """transformers' generation draws codebook k once more in the row of its first EOS; no code of it is kept."""
    rows = ROWS.clone()
    rows[5, 1], rows[6, 2] = 900, 901
    assert deinterleave(rows, B, E).tolist() == CODES.tolist()
    with pytest.raises(ValueError, match="row 5, codebook 1 holds 900"):
        sampled_codes_mask(rows, B, E)


def test_wrong_rows_and_codes() -> None:
    inner = ROWS.clone()
    inner[2, 0] = B
    for function in (deinterleave, sampled_codes_mask):
        with pytest.raises(ValueError, match="row 1, codebook 1 holds 5, not BOS"):
            function(torch.tensor([[B, B], [4, 5], [6, 7]]), B, E)
        with pytest.raises(ValueError, match="row 2, codebook 0 holds 1024"):
            function(inner, B, E)
    with pytest.raises(ValueError, match="rows already"):
        interleave(ROWS.T, B, E)


@given(st.integers(1, 8), st.integers(0, 12))
def test_equal_to_the_higgs_processor(num_codebooks: int, frames: int) -> None:
    codes = torch.randint(0, 1024, (num_codebooks, frames))
    edges = (codes.new_full((num_codebooks, 1), B), codes, codes.new_full((num_codebooks, 1), E))
    processor = SimpleNamespace(audio_stream_bos_id=B, audio_stream_eos_id=E)
    theirs = HiggsAudioV2Processor.build_delay_pattern(processor, torch.cat(edges, 1)[None])[0].T
    rows = interleave(codes, B, E)
    assert torch.equal(rows, theirs)
    assert torch.equal(deinterleave(rows, B, E), codes)
    if frames:  # theirs takes the rows between the first and the first that is all EOS
        assert torch.equal(HiggsAudioV2Processor.revert_delay_pattern(processor, rows[1:-1]).T, codes)


def test_forced_positions_are_those_of_the_higgs_generation() -> None:
    """Step by step beside transformers' logits processor, for a policy that ends every codebook in its due row."""
    num_codebooks, audio, delay, start = 3, 90, 91, 92
    theirs = HiggsAudioV2DelayPatternLogitsProcessor([1, 2, 3], start, delay, B, E, num_codebooks, 1026)
    text, end = torch.tensor([[5, 6, 7, start]]), torch.tensor([NEVER])
    for row, wanted in enumerate(ROWS):
        scores = theirs(text, torch.zeros(1, num_codebooks * 1026)).view(num_codebooks, 1026)
        forced = (scores > -math.inf).sum(1) == 1
        tokens, drawn, end = step(row, wanted[None], end, B, E)
        assert tokens[0].tolist() == wanted.tolist()
        assert drawn[0].int().tolist() == DRAWN[row]
        for k in range(num_codebooks):
            if forced[k]:  # theirs forces a codebook's EOS from the row after its first one
                assert not drawn[0, k] and int(scores[k].argmax()) == wanted[k]
        token = delay if text[0, -1] == delay or (wanted == E).any() else audio
        text = torch.cat([text, torch.tensor([[token]])], 1)
    assert end.tolist() == [4]


def test_steps_of_a_batch_end_each_in_its_own_way() -> None:
    draws = torch.full((8, 4, 3), 5)  # rows, streams, codebooks
    draws[3, 0, 0] = E  # in codebook 0: two frames
    draws[4, 1, 1] = E  # in codebook 1: two frames
    draws[4, 2, 0] = draws[4, 2, 2] = E  # in 0 and 2 at once, the higher one counts: one frame
    end, rows, drawn = torch.full((4,), NEVER), [], []
    for t in range(8):
        tokens, where, end = step(t, draws[t], end, B, E)
        rows.append(tokens)
        drawn.append(where)
    assert end.tolist() == [3, 3, 2, NEVER]
    for i, (last, frames) in enumerate([(5, 2), (5, 2), (4, 1), (7, 5)]):
        stream = torch.stack([row[i] for row in rows])[: last + 1]
        assert (stream[-1] == E).all() == (i < 3)
        assert deinterleave(stream, B, E).shape == (3, frames)
        assert torch.equal(sampled_codes_mask(stream, B, E), torch.stack([w[i] for w in drawn])[: last + 1])


def test_streams_may_be_at_rows_of_their_own() -> None:
    draws, end = torch.tensor([[5, E, 5], [5, 5, E]]), torch.tensor([NEVER, 3])
    both = step(torch.tensor([[2], [4]]), draws, end, B, E)
    for i, row in enumerate((2, 4)):
        for ours, alone in zip(both, step(row, draws[i : i + 1], end[i : i + 1], B, E), strict=True):
            assert torch.equal(ours[i : i + 1], alone)
    assert both[0].tolist() == [[E, E, B], [E, E, E]] and both[2].tolist() == [1, 2]


@pytest.mark.parametrize(("num_codebooks", "length"), [(2, 4), (3, 4)])
def test_the_mask_gives_the_probability_of_rows(num_codebooks: int, length: int) -> None:
    """Over all draws of a small sampler: P(rows) is the product over the drawn positions, and sums to 1."""
    code, bos, eos = 0, 1, 2
    p = torch.rand(length, num_codebooks).mul(0.8).add(0.1)  # of a code, in each row and codebook; else EOS
    observed: dict[tuple[int, ...], float] = defaultdict(float)
    for choice in itertools.product((code, eos), repeat=(length - 1) * num_codebooks):
        draws = torch.tensor([0] * num_codebooks + list(choice)).view(length, 1, num_codebooks)
        end, rows = torch.tensor([NEVER]), []
        for t in range(length):
            tokens, _, end = step(t, draws[t], end, bos, eos)
            rows.append(tokens[0])
        chance = torch.where(draws[1:, 0] == code, p[1:], 1 - p[1:]).prod()
        observed[tuple(torch.stack(rows).flatten().tolist())] += float(chance)
    assert len(observed) > 5 and sum(observed.values()) == pytest.approx(1, abs=1e-5)
    for flat, chance in observed.items():
        rows_ = torch.tensor(flat).view(length, num_codebooks)
        where = sampled_codes_mask(rows_, bos, eos)
        assert float(torch.where(rows_ == code, p, 1 - p)[where].prod()) == pytest.approx(chance, rel=1e-4)
