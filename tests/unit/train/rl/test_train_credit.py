"""Credit by hand: token rewards from scores, scores as they are shaped, advantages of every kind.

The step of most tests is four answers to two prompts; capitals are sampled, and b0 listens twice::

    a0 p p X          score 3      b0 p X o o X X    score 0
    a1 p p X X X      score 1      b1 p X X          score 4
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from audiorl.algos.experience import Experience
from audiorl.config import CriticConfig, EstimatorConfig, KLConfig, KLKind, RLConfig, ScoreConfig
from audiorl.recipes.simul_ppo import SimulPPOConfig
from audiorl.train.rl.advantages import compute_advantages, mean_advantage, normalize_scores
from audiorl.train.rl.collect import RolloutBatch, scored_experiences
from audiorl.train.rl.minibatch import mini_batch_numbers, trained_by
from audiorl.types import Rollout, Sample, Score, Segment

Turns = Sequence[tuple[int, int]]
A0, A1, B0, B1 = ((2, 1),), ((2, 3),), ((1, 1), (2, 2)), ((1, 2),)
SCORES = (3.0, 1.0, 0.0, 4.0)


def rollout(group: str, turns: Turns, score: Score | None, index: int = 0) -> Rollout:
    """`turns`: (observed tokens, sampled tokens) of each."""
    segments = tuple(
        Segment(torch.arange(p), torch.arange(n), -torch.arange(1, n + 1).float(), text="x" * n) for p, n in turns
    )
    return Rollout(Sample(group, ()), segments, group, index, score)


def laid(group: str, turns: Turns, score: float | Score) -> Experience:
    return Experience.from_rollout(rollout(group, turns, score if isinstance(score, Score) else Score(score)))


def step(scores: Sequence[float | Score] = SCORES) -> list[Experience]:
    return [laid(g, t, s) for g, t, s in zip("aabb", (A0, A1, B0, B1), scores, strict=True)]


def filled(batch: Sequence[Experience], name: str, tokens: Sequence[Sequence[float]]) -> list[Experience]:
    """`tokens`: the field's entries on each experience's sampled tokens; elsewhere a 9 that must not show."""
    out = []
    for e, own in zip(batch, tokens, strict=True):
        stream = torch.full((len(e),), 9.0)
        stream[e.loss_mask] = torch.tensor(own, dtype=torch.float32)
        out.append(e.replace(**{name: stream}))
    return out


PLAIN = EstimatorConfig(whiten=False)


def advantages(batch: Sequence[Experience], beta: float = 0.0, **config: object) -> list[list[float]]:
    """On the sampled tokens; elsewhere there must be none."""
    found = compute_advantages(batch, RLConfig(**config), beta)  # type: ignore[arg-type]
    for e, before in zip(found, batch, strict=True):
        assert e.advantages is not None and e.advantages.shape == e.ids.shape
        assert not e.advantages[~e.loss_mask].any()
        assert e.ids is before.ids
    return [e.advantages[e.loss_mask].tolist() for e in found]


def assert_close(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> None:
    assert [len(x) for x in found] == [len(x) for x in expected]
    for x, y in zip(found, expected, strict=True):
        assert list(x) == pytest.approx(list(y), abs=1e-6)


def whitened(tokens: Sequence[Sequence[float]]) -> list[list[float]]:
    flat = torch.tensor([x for own in tokens for x in own], dtype=torch.float64)
    mean, std = float(flat.mean()), float(flat.std())
    return [[(x - mean) / std for x in own] for own in tokens]


# -- every kind ----------------------------------------------------------------------------------------------------


def test_group_relative_by_hand() -> None:
    a, b = 1 / (math.sqrt(2) + 1e-4), 2 / (math.sqrt(8) + 1e-4)
    assert_close(advantages(step(), advantage="grpo"), [[a], [-a] * 3, [-b] * 3, [b] * 2])
    assert_close(advantages(step(), estimator=EstimatorConfig(std=False)), [[1], [-1] * 3, [-2] * 3, [2] * 2])
    a, b = 1 / (math.sqrt(2) + 1), 2 / (math.sqrt(8) + 1)
    assert_close(advantages(step(), estimator=EstimatorConfig(eps=1.0)), [[a], [-a] * 3, [-b] * 3, [b] * 2])


def test_reinforce_by_hand() -> None:
    """Discounted over sampled tokens only: the two that b0 observes between its turns do not count."""
    batch = step((3.0, 1.0, 8.0, 4.0))
    expected = [[3.0], [0.25, 0.5, 1], [2, 4, 8], [2, 4]]
    assert_close(advantages(batch, advantage="reinforce", estimator=EstimatorConfig(gamma=0.5, whiten=False)), expected)
    assert_close(advantages(batch, advantage="reinforce", estimator=EstimatorConfig(gamma=0.5)), whitened(expected))


def test_gae_by_hand() -> None:
    """γ = λ = ½ over turns: b0's δ are 0 + ½·1 - 2 = -1.5, 0 + ½·4 - 1 = 1 and 0 - 4."""
    batch = filled(step(), "values", [[1], [0, 0, 0], [2, 1, 4], [3, 2]])
    # b1: δ 0 + ½·2 - 3 = -2, 4 - 2
    expected = [[2], [1 / 16, 1 / 4, 1], [-1.5 + 0.25 * 0, 1 - 1, -4], [-2 + 0.5, 2]]
    found = compute_advantages(
        batch, RLConfig(advantage="gae", estimator=EstimatorConfig(gamma=0.5, lam=0.5, whiten=False)), 0.0
    )
    assert_close([e.advantages[e.loss_mask].tolist() for e in found], expected)  # type: ignore[index]
    returns = [[3], [1 / 16, 1 / 4, 1], [0.5, 1, 0], [1.5, 4]]
    assert_close([e.returns[e.loss_mask].tolist() for e in found], returns)  # type: ignore[index]
    assert all(not e.returns[~e.loss_mask].any() for e in found)  # type: ignore[index]
    white = compute_advantages(batch, RLConfig(advantage="gae", estimator=EstimatorConfig(gamma=0.5, lam=0.5)), 0.0)
    assert_close([e.advantages[e.loss_mask].tolist() for e in white], whitened(expected))  # type: ignore[index]
    assert_close([e.returns[e.loss_mask].tolist() for e in white], returns)  # type: ignore[index]


@pytest.mark.parametrize(("stage", "least", "most"), [("stage1", 0.0, 1e-3), ("stage2", 0.5, 1.0)])
def test_what_a_stream_earns_at_its_end_reaches_the_turn_that_decides_it(stage: str, least: float, most: float) -> None:
    """200 tokens before a reward of 1 on the last one, of which a perfect critic knows from there on."""
    config = getattr(SimulPPOConfig(path="tiny"), stage)
    gamma, decision, tokens = config.estimator.gamma, 40, 240
    values = [0.0] * (decision + 1) + [gamma ** (tokens - 1 - t) for t in range(decision + 1, tokens)]
    batch = filled([laid("a", ((1, tokens),), 1.0)], "values", [values])
    plain = RLConfig(advantage=config.advantage, estimator=replace(config.estimator, whiten=False))
    (found,) = compute_advantages(batch, plain, 0.0)
    assert found.advantages is not None
    assert least <= found.advantages[found.loss_mask][decision] <= most


def test_the_order_of_experiences_does_not_matter() -> None:
    batch = filled(step(), "values", [[1], [0, 0, 0], [2, 1, 4], [3, 2]])
    for kind in ("grpo", "rloo", "reinforce", "reinforce++", "reinforce++-baseline", "gae"):
        straight = advantages(batch, advantage=kind)
        mixed = advantages([batch[i] for i in (2, 0, 3, 1)], advantage=kind)
        assert_close([mixed[i] for i in (1, 3, 0, 2)], straight)


# -- finer rewards -------------------------------------------------------------------------------------------------


def test_rewards_for_segments_and_tokens_lie_on_their_tokens() -> None:
    per_segment = laid("b", B0, Score(1.0, per_segment=(2.0, -1.0)))
    assert per_segment.rewards.tolist() == [0, 2, 0, 0, 0, -1]  # type: ignore[union-attr]
    per_token = laid("b", B0, Score(1.0, per_token=(2.0, -1.5, 0.5)))
    assert per_token.rewards.tolist() == [0, 2, 0, 0, -1.5, 0.5]  # type: ignore[union-attr]
    both = laid("b", B0, Score(1.0, per_segment=(5.0, 5.0), per_token=(2.0, -1.5, 0.5)))
    assert both.rewards.tolist() == per_token.rewards.tolist()  # type: ignore[union-attr]
    whole = laid("b", B0, 1.0)
    assert whole.rewards.tolist() == [0, 0, 0, 0, 0, 1]  # type: ignore[union-attr]
    assert whole.loss_mask.tolist() == [False, True, False, False, True, True]
    assert whole.rollout_logprobs.tolist() == [0, -1, 0, 0, -1, -2]  # type: ignore[union-attr]
    assert (whole.prompt_length, whole.score) == (1, 1.0)
    assert Experience.from_rollout(rollout("b", B0, None)).rewards is None


def test_a_segment_that_sampled_nothing_rewards_the_token_before_it() -> None:
    """Silence first, then a word, silence twice, and a word: rewards 1; 2 + 4 + 8 go to the word before; 16."""
    e = laid("g", ((1, 0), (1, 1), (1, 0), (1, 0), (1, 2)), Score(31.0, per_segment=(1.0, 2.0, 4.0, 8.0, 16.0)))
    assert e.loss_mask.tolist() == [False, False, True, False, False, False, True, True]
    assert e.rewards.tolist() == [0, 0, 15, 0, 0, 0, 0, 16]  # type: ignore[union-attr]
    assert advantages([e], advantage="reinforce", estimator=PLAIN) == [[31, 16, 16]]


def test_fine_rewards_reach_the_advantages_that_read_tokens() -> None:
    scores = (3.0, Score(1.0, per_token=(4.0, -4.0, 1.0)), Score(0.0, per_segment=(1.0, -1.0)), 4.0)
    batch = step(scores)
    expected = [[3], [1, -3, 1], [0, -1, -1], [4, 4]]
    assert_close(advantages(batch, advantage="reinforce", estimator=PLAIN), expected)
    assert_close(advantages(batch, advantage="reinforce++"), whitened(expected))
    zero = filled(batch, "values", [[0], [0] * 3, [0] * 3, [0] * 2])
    assert_close(advantages(zero, advantage="gae", estimator=EstimatorConfig(lam=1.0, whiten=False)), expected)
    # those of whole answers see the totals alone
    assert advantages(batch, advantage="rloo") == advantages(step(), advantage="rloo")


# -- the KL in the reward ------------------------------------------------------------------------------------------

OLD = [[-1.0], [-1, -1, -1], [-2, -2, -2], [-1, -1]]
REF = [[-1.5], [-1, -2, -1], [-2, -2.5, -3], [-1, 0]]
# k1 = old - ref: [.5], [0, 1, 0], [0, .5, 1], [0, -1]; β = 2


def with_kl() -> list[Experience]:
    return filled(filled(step(), "old_logprobs", OLD), "ref_logprobs", REF)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # scores 3 - 1, 1 - 2; 0 - 3, 4 + 2
        ("rloo", [[3], [-3] * 3, [-9] * 3, [9] * 2]),
        ("remax", [[2], [-1] * 3, [-3] * 3, [6] * 2]),
        ("reinforce", [[2], [-1, -1, 1], [-3, -3, -2], [6, 6]]),
    ],
)
def test_the_kl_costs_every_token_and_the_score(kind: str, expected: list[list[float]]) -> None:
    config = {"advantage": kind, "kl": KLConfig(place="reward", kind="k1"), "estimator": PLAIN}
    assert_close(advantages(with_kl(), beta=2.0, **config), expected)


def test_the_kl_reaches_every_other_kind() -> None:
    config = {"kl": KLConfig(place="reward", kind="k1")}
    a, b = 1.5 / (math.sqrt(4.5) + 1e-4), 4.5 / (math.sqrt(40.5) + 1e-4)
    assert_close(advantages(with_kl(), 2.0, advantage="grpo", **config), [[a], [-a] * 3, [-b] * 3, [b] * 2])
    assert_close(
        advantages(with_kl(), 2.0, advantage="reinforce++", **config),
        whitened([[2], [-1, -1, 1], [-3, -3, -2], [6, 6]]),
    )
    assert_close(
        advantages(with_kl(), 2.0, advantage="reinforce++-baseline", **config),
        whitened([[1.5], [-1.5] * 3, [-4.5] * 3, [4.5] * 2]),
    )
    batch = filled(with_kl(), "values", [[0], [0] * 3, [0] * 3, [0] * 2])
    # γ = 1, λ = 0: the token's own reward
    found = advantages(batch, 2.0, advantage="gae", estimator=EstimatorConfig(lam=0.0, whiten=False), **config)
    assert_close(found, [[2], [0, -2, 1], [0, -1, -2], [0, 6]])


@pytest.mark.parametrize(("kind", "cost"), [("k1", -1.0), ("k2", 0.5), ("k3", math.e - 2)])
def test_the_kl_is_the_estimator_that_was_asked_for(kind: KLKind, cost: float) -> None:
    """On b1's last token, whose log-ratio is -1."""
    config = {"advantage": "reinforce", "kl": KLConfig(kind=kind, place="reward"), "estimator": PLAIN}
    assert advantages(with_kl(), 2.0, **config)[3] == pytest.approx([4 - 2 * cost] * 2, abs=1e-6)


# -- corners -------------------------------------------------------------------------------------------------------


def test_an_empty_answer_counts_in_its_group_and_has_no_tokens() -> None:
    """Group c: scores 2 and, with nothing sampled, 0."""
    empty = laid("c", ((2, 0),), 0.0)
    assert not empty.rewards.any() and not empty.loss_mask.any()  # type: ignore[union-attr]
    batch = [*step(), laid("c", ((2, 2),), 2.0), empty]
    assert_close(advantages(batch, advantage="rloo")[4:], [[2, 2], []])
    assert_close(
        advantages(batch, advantage="reinforce++")[4:], [*whitened([[3], [1] * 3, [0] * 3, [4] * 2, [2, 2]])[4:], []]
    )
    valued = filled(batch, "values", [[0], [0] * 3, [0] * 3, [0] * 2, [1, 1], []])
    found = advantages(valued, advantage="gae", estimator=EstimatorConfig(lam=1.0, whiten=False))
    assert_close(found[4:], [[1, 1], []])
    (found,) = compute_advantages([empty], RLConfig(advantage="reinforce"), 0.0)
    assert mean_advantage(found) == 0
    assert Experience.from_rollout(rollout("c", ((2, 0),), Score(5.0, per_segment=(5.0,)))).rewards.tolist() == [0, 0]  # type: ignore[union-attr]


# -- shaping -------------------------------------------------------------------------------------------------------


def totals(scores: Sequence[Score]) -> list[float]:
    return [s.total for s in scores]


def test_shaping_by_hand() -> None:
    scores = [Score(-9.0, {"part": -9.0}), Score(1.0), Score(5.0)]
    clipped = normalize_scores(scores, 3.0, False)
    assert totals(clipped) == [-3, 1, 3] and clipped[0].parts == {"part": -9.0}
    # of -3, 1, 3: mean 1/3, variance (9 + 1 + 9)/3 - 1/9 = 56/9
    std = math.sqrt(56) / 3
    expected = [(x - 1 / 3) / std for x in (-3, 1, 3)]
    assert totals(normalize_scores(scores, 3.0, True)) == pytest.approx(expected, abs=1e-12)
    assert normalize_scores(scores, None, False) == scores
    assert totals(normalize_scores([Score(0.3)] * 3, None, True)) == [0, 0, 0]
    assert normalize_scores([], 1.0, True) == []


@pytest.mark.parametrize("field", ["per_segment", "per_token"])
def test_shaped_fine_values_still_add_up_to_the_total(field: str) -> None:
    scores = [Score(sum(v), **{field: v}) for v in ((1.0, 2.0), (0.5,), (-2.0, 0.0, -1.0))]  # type: ignore[arg-type]
    shaped = normalize_scores(scores, None, True)
    assert torch.tensor(totals(shaped)).std(unbiased=False).item() == pytest.approx(1, abs=1e-6)
    # totals 3, 0.5, -3: mean 1/6
    std = math.sqrt((9 + 0.25 + 9) / 3 - 1 / 36)
    for s, before in zip(shaped, scores, strict=True):
        fine, was = getattr(s, field), getattr(before, field)
        assert sum(fine) == pytest.approx(s.total, abs=1e-12)
        assert fine[:-1] == pytest.approx([x / std for x in was[:-1]], abs=1e-12)
        assert fine[-1] == pytest.approx(was[-1] / std - 1 / 6 / std, abs=1e-12)


def test_greedy_scores_are_shaped_with_the_others_and_reach_their_group() -> None:
    answers = [rollout(g, A0, Score(s), i) for g, i, s in (("x", 0, 1.0), ("x", 1, 5.0), ("y", 0, 1.0), ("y", 1, 1.0))]
    found = RolloutBatch(answers, [Score(9.0), Score(-5.0)])
    batch = scored_experiences(found, RLConfig(advantage="remax", scores=ScoreConfig(clip=5.0)))
    assert [e.greedy_score for e in batch] == [5, 5, -5, -5]
    assert [e.score for e in batch] == [1, 5, 1, 1]
    # of 1, 5, 1, 1, 5, -5: mean 4/3
    std = math.sqrt((1 + 25 + 1 + 1 + 25 + 25) / 6 - 16 / 9)
    normal = scored_experiences(found, RLConfig(advantage="remax", scores=ScoreConfig(clip=5.0, normalize=True)))
    assert [e.greedy_score for e in normal] == pytest.approx([(x - 4 / 3) / std for x in (5, 5, -5, -5)])
    assert_close(advantages(normal, advantage="remax"), [[-4 / std], [0], [6 / std], [6 / std]])


def test_terms_of_a_sum_are_normalised_one_by_one() -> None:
    """Equal totals, whose terms differ: GRPO sees nothing, the decoupled estimator follows the weights."""
    terms = [{"right": 1.0, "format": 0.0}, {"right": 0.0, "format": 2.0}]
    weights = {"right": 2.0, "format": 1.0}
    scores = [Score(2.0, parts, weights=weights) for parts in terms]
    batch = [laid("x", A0, score) for score in scores]
    assert_close(advantages(batch, advantage="grpo"), [[0], [0]])
    s = math.sqrt(0.5)  # (2 - 1)·½/s each, then over the batch
    assert_close(advantages(batch, advantage="gdpo", estimator=EstimatorConfig(eps=1e-8)), [[s], [-s]])
    with pytest.raises(ValueError, match="needs a reward that is a WeightedSum"):
        advantages([*batch, laid("x", A0, 1.0)], advantage="gdpo")
    with pytest.raises(ValueError, match="needs a reward that is a WeightedSum"):  # of which one was closed by a gate
        advantages([*batch, laid("x", A0, replace(scores[0], total=0.0))], advantage="gdpo")


def test_mini_batches_of_what_a_loss_of_groups_trains_are_equal_and_keep_pairs() -> None:
    scores = {"a": (1.0, 1.0), "b": (0.0, 1.0), "c": (0.0, 0.0), "d": (0.5, 0.2, 0.1), "e": (2.0, 1.0)}
    batch = [laid(group, A0, score) for group, each in scores.items() for score in each]
    for loss, expected in (("raft", [0, 0, 1]), ("crpo", [0, 0, 0, 0, 1, 1]), ("ppo", [0] * 6 + [1] * 5)):
        config = RLConfig(loss=loss, mini_batches=2)
        numbers = mini_batch_numbers(config, batch)
        assert [numbers[i] for i in trained_by(config, batch)] == expected
    assert sorted(set(mini_batch_numbers(RLConfig(mini_batches=8), batch[:9]))) == list(range(8))
    assert mini_batch_numbers(RLConfig(loss="raft", mini_batches=2), batch[:2]) == [0, 0]


def test_a_critic_warms_up_for_half_of_a_short_training_at_most() -> None:
    critic = CriticConfig(warmup_steps=10)
    lengths = [RLConfig(advantage="gae", critic=critic, steps=n).critic_warmup for n in (1, 5, 100)]
    assert lengths == [0, 2, 10] and RLConfig(critic=critic, steps=100).critic_warmup == 0


def test_credit_does_not_reach_over_padding() -> None:
    """The longest row alone decides the padding; a longer neighbour changes nothing."""
    long = laid("z", ((1, 70),), 2.0)
    batch = filled([*step(), long], "values", [[1], [0, 0, 0], [2, 1, 4], [3, 2], [0] * 70])
    alone = advantages(batch[:4], advantage="gae", estimator=PLAIN)
    assert_close(advantages(batch, advantage="gae", estimator=PLAIN)[:4], alone)


def test_a_users_estimator_joins_sums_on_a_rank_without_rollouts(tmp_path: Path) -> None:
    """A rank that leaves it out would let the others wait."""
    mine = tmp_path / "mine.py"
    mine.write_text("def centred(x, options):\n    return x.scores_B - x.reduce(x.scores_B.sum())\n")
    summed: list[float] = []
    config = RLConfig(advantage=f"{mine}:centred")
    compute_advantages([], config, reduce=lambda t: summed.append(float(t)) or t)  # type: ignore[func-returns-value]
    assert summed == [0.0]
    assert advantages([laid("a", A0, 3.0)], advantage=config.advantage) == [[0.0]]
