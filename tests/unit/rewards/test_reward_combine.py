import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from audiorl.data.serialization import VERSION, deserialize_scores, serialize_scores
from audiorl.rewards import AnswerAccuracy, Gated, StandardisedSum, Term, ThinkFormat, WeightedSum, check_scores
from audiorl.types import Rollout, Score


@dataclass(frozen=True)
class Fixed:
    score: Score

    def __call__(self, rollouts: list[Rollout]) -> list[Score]:
        return [self.score for _ in rollouts]


def test_weighted_sum(make_rollout) -> None:
    reward = WeightedSum.of(accuracy=(AnswerAccuracy(), 2.0), format=ThinkFormat())
    rollouts = [
        make_rollout("<think>x</think><answer>B</answer>", references=("B",)),
        make_rollout("<answer>B</answer>", references=("B",)),
        make_rollout("<think>x</think><answer>C</answer>", references=("B",)),
    ]
    scores = reward(rollouts)
    assert [s.total for s in scores] == [3.0, 2.0, 1.0]
    assert [dict(s.parts) for s in scores] == [
        {"accuracy": 1.0, "format": 1.0},
        {"accuracy": 1.0, "format": 0.0},
        {"accuracy": 0.0, "format": 1.0},
    ]
    assert all(s.weights == {"accuracy": 2.0, "format": 1.0} for s in scores)
    answer = {"version": VERSION, "scores": serialize_scores(scores)}
    assert [s.weights for s in deserialize_scores(answer)] == [s.weights for s in scores]
    assert reward([]) == []


def test_nested_sums_flatten(make_rollout) -> None:
    inner = WeightedSum.of(a=(Fixed(Score(1.0)), 3.0), b=Fixed(Score(0.5, {"x": 7.0})))
    (score,) = WeightedSum.of(task=(inner, 0.5), c=Fixed(Score(-1.0)))([make_rollout("hi")])
    assert score.total == pytest.approx(0.5 * 3.5 - 1.0)
    assert score.parts == {"task": 3.5, "task/a": 1.0, "task/b": 0.5, "task/b/x": 7.0, "c": -1.0}


def test_fine_grained_values_add_up_and_outcomes_land_on_the_last_place(make_rollout) -> None:
    rollout = make_rollout("a", "b", "c", tokens=2)
    fine = Fixed(Score(6.0, per_segment=(1.0, 2.0, 3.0)))
    (score,) = WeightedSum.of(fine=(fine, 2.0), outcome=(Fixed(Score(5.0)), 0.5))([rollout])
    assert score.per_segment == (2.0, 4.0, 8.5)
    assert score.per_token is None
    assert score.total == sum(score.per_segment)

    tokens = Fixed(Score(1.0, per_token=(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)))
    (score,) = WeightedSum.of(tokens=tokens, fine=fine)([rollout])
    assert score.per_token == (1.0, 0.0, 0.0, 0.0, 0.0, 6.0)
    assert score.per_segment == (1.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (Score(float("nan")), "reward 'bad', sample 'clip-7': total is nan"),
        (Score(0.0, {"x": float("inf")}), "reward 'bad', sample 'clip-7': part 'x' is inf"),
        (0.5, "reward 'bad', sample 'clip-7': returned float, expected Score"),
        (Score("0.5"), "reward 'bad', sample 'clip-7': total is '0.5', expected a number"),
        (Score(torch.ones(2)), r"total is tensor\(\[1., 1.\]\), expected a number"),
        (Score(0.0, {"x": None}), "part 'x' is None, expected a number"),
        (Score(0.0, per_segment=("a",)), "per_segment is 'a', expected a number"),
        (Score(0.0, per_segment=(1.0, 2.0)), "per_segment has 2 values, the rollout has 1"),
        (Score(0.0, per_token=(1.0, float("nan"))), "per_token holds a value that is not finite"),
    ],
)
def test_bad_scores_name_reward_and_sample(make_rollout, score, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightedSum.of(good=Fixed(Score(1.0)), bad=Fixed(score))([make_rollout("hi")])


def test_bad_sums(make_rollout) -> None:
    rollouts = [make_rollout("hi")]
    for call, message in (
        (lambda: WeightedSum(()), "at least one"),
        (lambda: WeightedSum((Term("a", ThinkFormat()), Term("a", ThinkFormat()))), "share a name"),
        (lambda: WeightedSum((Term("a/b", ThinkFormat()),)), "'a/b' cannot name"),
        (lambda: WeightedSum.of(a=ThinkFormat), "expected a reward object"),
        (lambda: WeightedSum.of(short=given())(rollouts), "reward 'short': returned 0 scores for 1 rollouts"),
        (lambda: check_scores("none", None, rollouts), "reward 'none': returned NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def given(*scores: Score) -> Callable[[Sequence[Rollout]], list[Score]]:
    """One score for each rollout, in order."""
    return lambda rollouts: list(scores)


def test_standardised_by_hand(make_rollout) -> None:
    """Totals 1, 3 become -1, 1; a constant term contributes nothing; weights come after."""
    rollouts = [make_rollout("a"), make_rollout("b")]
    reward = StandardisedSum.of(quality=(given(Score(1.0), Score(3.0)), 2.0), constant=given(Score(7.0), Score(7.0)))
    scores = reward(rollouts)
    assert [s.total for s in scores] == pytest.approx([-2.0, 2.0])
    assert [dict(s.parts) for s in scores] == [{"quality": 1.0, "constant": 7.0}, {"quality": 3.0, "constant": 7.0}]
    assert all(s.per_segment is None for s in scores)


def test_segments_are_standardised_over_the_batch_where_they_are_defined(make_rollout) -> None:
    """Values 0, 2 | -, 4: mean 2, deviation sqrt(8/3); the undefined segment gets 0. A whole reward goes to the end."""
    two = make_rollout("a", "b")
    nan = float("nan")
    fine = given(Score(2.0, per_segment=(0.0, 2.0)), Score(4.0, per_segment=(nan, 4.0)))
    scores = StandardisedSum.of(fine=fine, whole=given(Score(0.0), Score(1.0)))([two, two])
    unit = 2 / (8 / 3) ** 0.5
    assert scores[0].per_segment == pytest.approx((-unit, 0.0 - 1.0))
    assert scores[1].per_segment == pytest.approx((0.0, unit + 1.0))
    assert [s.total for s in scores] == pytest.approx([-unit - 1, unit + 1])
    with pytest.raises(ValueError, match=r"reward 'fine'.*per_segment holds a value that is not finite"):
        WeightedSum.of(fine=fine)([two, two])


def test_a_gate_withholds_a_reward(make_rollout) -> None:
    rollouts = [make_rollout(f"<answer>{answer}</answer>", references=("B",)) for answer in "BC"]
    voice = Fixed(Score(0.8, {"pitch": 3.0}, per_segment=(0.8,), per_token=(0.5,) * rollouts[0].num_sampled))
    understood, babble = Gated(voice, AnswerAccuracy(), at_least=1.0)(rollouts)
    assert understood == dataclasses.replace(voice.score, parts={"pitch": 3.0, "open": 1.0})
    assert (babble.total, babble.per_segment, set(babble.per_token)) == (0.0, (0.0,), {0.0})
    assert babble.parts == {"pitch": 3.0, "open": 0.0}
    assert Gated(voice, lambda rollouts: [None, Score(1.0)], 0.5)(rollouts)[0] is None
    assert Gated(lambda rollouts: [None, Score(1.0)], voice, 0.5)(rollouts) == [None, Score(1.0, {"open": 1.0})]
    (score,) = WeightedSum.of(voice=(Gated(voice, AnswerAccuracy(), 0.5), 0.5))(rollouts[:1])
    assert score.total == 0.4 and score.parts == {"voice": 0.8, "voice/pitch": 3.0, "voice/open": 1.0}
    with pytest.raises(ValueError, match=r"reward 'gate'.*total is nan"):
        Gated(voice, Fixed(Score(float("nan"))), 0.5)(rollouts)
    for broken in (lambda: Gated(voice, AnswerAccuracy, 0.5), lambda: Gated(voice, voice, float("nan"))):
        with pytest.raises(ValueError, match=r"expected a reward object|at_least is nan"):
            broken()
