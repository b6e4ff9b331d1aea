"""Frames of codes in rollouts, experiences and packs, by hand.

Two codebooks with 4 codes, B = 4 and E = 5. The model writes "hi", opens speech, two frames follow with their run-out,
then speech is closed::

    ids    h i [ f f f f f ]
    q0     - - - B a b E E -      drawn: a b E, the second E is forced
    q1     - - - B B c d E -      drawn: c d
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from audiorl.algos.experience import Experience, PackedBatch
from audiorl.algos.packing import micro_batches, pack_experiences, shared_groups
from audiorl.config import EstimatorConfig, KLConfig, RLConfig
from audiorl.train.batches import check_finite, counts, fill, gather, sum_codebooks
from audiorl.train.rl.advantages import compute_advantages
from audiorl.train.rl.minibatch import flat_code_mask, is_frame
from audiorl.types import Rollout, Sample, Score, Segment

H, I, OPEN, F, CLOSE = 1, 2, 3, 9, 4
B, E = 4, 5
N = -1

IDS = torch.tensor([H, I, OPEN, F, F, F, F, F, CLOSE])
CODES = torch.tensor([[N, N], [N, N], [N, N], [B, B], [0, B], [1, 2], [E, 3], [E, E], [N, N]])
DRAWN = torch.tensor([[1, 0], [1, 0], [1, 0], [0, 0], [1, 0], [1, 1], [1, 1], [0, 0], [0, 0]]).bool()
LOGPROBS = torch.tensor(
    [[-1.0, 0], [-2.0, 0], [-3.0, 0], [0, 0], [-0.1, 0], [-0.2, -0.3], [-0.4, -0.5], [0, 0], [0, 0]]
)
MASK = [1, 1, 1, 0, 1, 1, 1, 0, 0]


def spoken(prompt: tuple[int, ...] = (7, 8), **changes: object) -> Segment:
    segment = Segment(torch.tensor(prompt), IDS, LOGPROBS, codes=CODES, code_mask=DRAWN)
    return dataclasses.replace(segment, **changes)  # type: ignore[arg-type]


def written() -> Segment:
    return Segment(torch.tensor([7, 8]), torch.tensor([H, I]), torch.tensor([-1.0, -2.0]))


def rollout(*segments: Segment, score: Score | None = None, group: str = "g", index: int = 0) -> Rollout:
    return Rollout(Sample("s", ()), segments, group, index, score)


def test_a_spoken_segment_becomes_rows_of_codes() -> None:
    e = Experience.from_rollout(rollout(spoken()))
    assert e.codes is not None and e.code_mask is not None and e.rollout_logprobs is not None
    assert e.ids.tolist() == [7, 8, *IDS.tolist()]
    assert e.loss_mask.int().tolist() == [0, 0, *MASK]
    assert e.codes.tolist() == [[N, N], [N, N], *CODES.tolist()]
    assert torch.equal(e.code_mask[2:], DRAWN) and not e.code_mask[:2].any()
    assert torch.equal(e.rollout_logprobs[2:], LOGPROBS)


def test_a_text_segment_beside_a_spoken_one_stands_in_column_0() -> None:
    e = Experience.from_rollout(rollout(written(), spoken((5,))))
    assert e.codes is not None and e.code_mask is not None and e.rollout_logprobs is not None
    assert e.code_mask[:5].tolist() == [[False, False]] * 2 + [[True, False]] * 2 + [[False, False]]
    assert e.rollout_logprobs[:4].tolist() == [[0, 0], [0, 0], [-1, 0], [-2, 0]]
    assert e.segment is not None and e.segment.tolist() == [0] * 4 + [1] * 10


def test_codes_that_were_heard_are_observed() -> None:
    voice = torch.tensor([[0, 1], [2, 3]])
    e = Experience.from_rollout(rollout(dataclasses.replace(written(), prompt_codes=voice)))
    assert e.codes is not None and e.code_mask is not None
    assert e.codes.tolist() == [[0, 1], [2, 3], [N, N], [N, N]]
    assert e.loss_mask.tolist() == [False, False, True, True] and not e.code_mask[:2].any()


def test_a_reward_falls_on_the_last_drawn_row() -> None:
    """The closing token and the run-out are forced: the frame before them carries the reward."""
    e = Experience.from_rollout(rollout(spoken(), score=Score(2.0)))
    assert e.rewards is not None
    assert e.rewards.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0]


def test_rewards_of_tokens_on_forced_rows_move_to_the_drawn_row_before() -> None:
    values = tuple(float(i) for i in range(9))
    e = Experience.from_rollout(rollout(spoken(), score=Score(0.0, per_token=values)))
    assert e.rewards is not None
    # rows 3 (forced BOS) joins row 2; rows 7 and 8 join row 6
    assert e.rewards.tolist() == [0, 0, 0, 1, 2 + 3, 0, 4, 5, 6 + 7 + 8, 0, 0]


def test_packing_carries_codes_and_fills_up_text() -> None:
    mixed = [Experience.from_rollout(rollout(spoken())), Experience.from_rollout(rollout(written(), group="h"))]
    packed = pack_experiences(mixed)
    assert packed.codes is not None and packed.code_mask is not None
    assert packed.codes.shape == (15, 2) and bool((packed.codes[11:] == N).all())
    assert packed.code_mask[11:].tolist() == [[False, False]] * 2 + [[True, False]] * 2
    assert torch.equal(packed.code_mask.any(1), packed.loss_mask)
    assert pack_experiences(mixed[1:]).codes is None


def test_a_group_that_speaks_shares_its_prompt() -> None:
    """Forced rows behind the prompt are written, not observed, so they do not forbid it."""
    group = [Experience.from_rollout(rollout(spoken(), index=i)) for i in range(2)]
    assert len(shared_groups(group)) == 1
    packed = pack_experiences(group)
    assert len(packed.ids) == 2 + 9 + 9
    for e, rows in zip(group, packed.source, strict=True):
        assert e.codes is not None and packed.codes is not None and torch.equal(packed.codes[rows], e.codes)


def test_streams_that_speak_do_not_share() -> None:
    group = [Experience.from_rollout(rollout(spoken(), spoken((5,)), index=i)) for i in range(2)]
    assert len(shared_groups(group)) == 2


def test_gather_and_joint() -> None:
    mixed = [Experience.from_rollout(rollout(spoken())), Experience.from_rollout(rollout(written()))]
    flat = gather(mixed, "rollout_logprobs")
    assert flat is not None and flat.shape == (8, 2)
    assert sum_codebooks(flat).tolist() == pytest.approx([-1, -2, -3, -0.1, -0.5, -0.9, -1, -2])
    spoke = is_frame(mixed)
    assert spoke is not None and spoke.int().tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    code_mask = flat_code_mask(mixed)
    assert code_mask is not None and code_mask.sum(1).tolist() == [1, 1, 1, 1, 2, 2, 1, 1]
    assert not is_frame(mixed[1:]).any() and flat_code_mask(mixed[1:]) is None


def test_fill_keeps_the_columns() -> None:
    mixed = [Experience.from_rollout(rollout(spoken())), Experience.from_rollout(rollout(written(), group="h"))]

    def forward(batch: PackedBatch) -> Tensor:
        assert batch.code_mask is not None
        return -batch.code_mask[batch.loss_mask].float()

    filled = fill(mixed, lambda batch: {"old_logprobs": forward(batch)}, 1000, True)
    assert filled[0].old_logprobs is not None and filled[1].old_logprobs is not None
    assert torch.equal(filled[0].old_logprobs[2:], -DRAWN.float())
    assert filled[1].old_logprobs.tolist() == [0, 0, -1, -1]  # text keeps its shape, whatever shares its pack


def test_a_code_that_is_not_finite_is_named() -> None:
    e = Experience.from_rollout(rollout(spoken()))
    flat = torch.zeros(counts([e])[0], 2)
    flat[4, 1] = math.nan
    with pytest.raises(FloatingPointError, match="sampled token 4, codebook 1"):
        check_finite([e], flat, "the log-prob")


def test_the_kl_in_the_reward_is_the_sum_over_a_frames_codes() -> None:
    e = Experience.from_rollout(rollout(spoken(), score=Score(1.0)))
    assert e.rollout_logprobs is not None and e.code_mask is not None
    reference = torch.where(e.code_mask, e.rollout_logprobs - 0.5, 0.0)
    filled = e.replace(old_logprobs=e.rollout_logprobs, ref_logprobs=reference, values=torch.zeros(len(e)))
    config = RLConfig(
        advantage="gae",
        kl=KLConfig(place="reward", kind="k1"),
        estimator=EstimatorConfig(gamma=1.0, lam=0.0, whiten=False),
    )
    (given,) = compute_advantages([filled], config, beta=0.1)
    assert given.advantages is not None
    # k1 is 0.5 for every drawn code; two are drawn in the last two frames
    expected = [0, 0, -0.05, -0.05, -0.05, 0, -0.05, -0.1, -0.1 + 1, 0, 0]
    assert given.advantages.tolist() == pytest.approx(expected, abs=1e-6)


def test_micro_batches_count_a_spoken_prompt_once() -> None:
    group = [Experience.from_rollout(rollout(spoken(), index=i)) for i in range(3)]
    assert micro_batches(group, 2 + 3 * 9) == [[0, 1, 2]]
