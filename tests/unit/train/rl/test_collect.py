"""A step's rollouts: who is asked, what dynamic sampling drops and asks instead, and ReMax's greedy answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from audiorl.config import RLConfig
from audiorl.data.schedule import batch_of_step
from audiorl.protocols import Request
from audiorl.rewards import StandardisedSum
from audiorl.run.folder import Run
from audiorl.train.rl.advantages import compute_advantages, mean_advantage
from audiorl.train.rl.collect import RolloutBatch, collect, scored_experiences, step_metrics
from audiorl.train.rl.hooks import EQUAL_STEPS, EqualRewards, FinishedStep
from audiorl.train.rl.trainer import TrainOutput
from audiorl.types import FlowPath, Rollout, Sample, Score, Segment

SAMPLES = [Sample(name, ()) for name in "abcdefgh"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second one, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Engine:
    """Answers every request with one token, and remembers what it was asked."""

    policy_version = 0

    def __init__(self) -> None:
        self.calls: list[list[Request]] = []

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        self.calls.append(list(requests))
        segment = Segment(torch.tensor([1]), torch.tensor([2]), torch.zeros(1), "x")
        return [Rollout(r.sample, (segment,), r.group_id, -1 if r.greedy else i) for r in requests for i in range(r.n)]

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None: ...

    def asked(self) -> list[list[str]]:
        return [[r.sample.id for r in call] for call in self.calls]


class Known:
    """1 for the first answer to a sample with signal, else 0; a greedy answer gets 0.25."""

    def __init__(self, signal: str):
        self.signal = signal

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(0.25 if r.index < 0 else float(r.index == 0 and r.sample.id in self.signal)) for r in rollouts]


def run(
    signal: str, *, step: int = 0, seed: int = 0, samples: Sequence[Sample] = SAMPLES, **config: object
) -> tuple[RolloutBatch, Engine]:
    engine = Engine()
    settings = RLConfig(**({"prompts_per_step": 3, "group_size": 2} | config))  # type: ignore[arg-type]
    return collect(engine, samples, Known(signal), step, settings, seed), engine


def groups(found: RolloutBatch) -> dict[str, str]:
    """Group id: the sample that its members answer."""
    out: dict[str, str] = {}
    for r in found.rollouts:
        assert out.setdefault(r.group_id, r.sample.id) == r.sample.id, "one group answers two prompts"
    return out


def first_round(step: int = 0, seed: int = 0, size: int = 3) -> list[str]:
    return [s.id for s in batch_of_step(SAMPLES, step, size, seed)]


def test_a_step_asks_its_prompts_once() -> None:
    found, engine = run("")
    assert engine.asked() == [first_round()]
    assert [(r.n, r.seed, r.greedy) for r in engine.calls[0]] == [(2, 0, False)] * 3
    assert groups(found) == {f"0/{i}": name for i, name in enumerate(first_round())}
    assert [r.index for r in found.rollouts] == [0, 1] * 3
    assert [s.total for s in (r.score for r in found.rollouts) if s] == [0] * 6
    assert (found.dropped, found.refilled, found.greedy) == (0, 0, [])


def test_groups_without_signal_are_dropped_and_others_asked() -> None:
    a, b, c = first_round()
    others = "".join(s.id for s in SAMPLES if s.id not in (a, b, c))
    found, engine = run(a + c + others, dynamic_sampling=2)
    assert len(engine.calls) == 2 and engine.asked()[0] == [a, b, c]
    (new,) = engine.asked()[1]
    assert new in others
    assert list(groups(found).values()) == [a, c, new] and len(groups(found)) == 3
    assert (found.dropped, found.refilled, len(found.rollouts)) == (1, 1, 6)
    metrics = step_metrics(found, 0, RLConfig(dynamic_sampling=2))
    assert (metrics["reward/mean"], metrics["reward/all"]) == (3 / 6, 3 / 8)
    assert {k: v for k, v in metrics.items() if k.startswith("group/")} == {
        "group/without_signal": 0,
        "group/dropped": 1,
        "group/refilled": 1,
        "group/trained": 3,
    }


def test_tokens_without_an_engines_logprob_are_counted() -> None:
    """Of text, and of frames by their codes; a step without any has no such metric."""
    found, _ = run("")
    assert "rollout/unknown_logprobs" not in step_metrics(found, 0, RLConfig())
    text = Segment(torch.tensor([1]), torch.tensor([2, 3, 4]), torch.tensor([-1.0, math.nan, math.nan]))
    speech = replace(text, logprobs=torch.tensor([[-1.0, -1.0], [math.nan, math.nan], [-1.0, -1.0]]))
    nothing = replace(text, ids=text.ids[:0], logprobs=text.logprobs[:0])
    rollouts = [replace(r, segments=(s, nothing)) for r, s in zip(found.rollouts, (text, speech), strict=False)]
    assert step_metrics(RolloutBatch(rollouts, []), 0, RLConfig())["rollout/unknown_logprobs"] == 3


@pytest.mark.parametrize(("noise", "unknown"), [("none", None), ("dance", 3)])
def test_a_sound_that_is_noised_again_has_no_log_probs_to_know(noise: str, unknown: int | None) -> None:
    found, _ = run("")
    flow = FlowPath(torch.zeros(2, 1, 1), (1.0, 0.0), None, noise, 0.5, 1.0)
    segment = Segment(torch.tensor([1]), torch.arange(1), torch.tensor([math.nan]), flow=flow)
    rollouts = [replace(r, segments=(segment,)) for r in found.rollouts[:3]]
    assert step_metrics(RolloutBatch(rollouts, []), 0, RLConfig()).get("rollout/unknown_logprobs") == unknown


@pytest.mark.parametrize("high", [0.500001, 0.5 + 3e-8])
def test_what_counts_as_a_signal_is_what_has_an_advantage(high: float) -> None:
    found, _ = run("")
    scored = [r.with_score(Score(s)) for r, s in zip(found.rollouts, (0.5, high, 1e6, 1e6, 1e-9, 0.0), strict=True)]
    experiences = scored_experiences(RolloutBatch(scored, []), RLConfig(group_size=2))
    moved = [mean_advantage(e) != 0 for e in compute_advantages(experiences, RLConfig())[::2]]
    assert moved == [high == 0.500001, False, True]
    metrics = step_metrics(RolloutBatch(scored, []), 0, RLConfig())
    assert metrics["group/without_signal"] == moved.count(False) / 3


STEPS = (Score(1.0, per_token=(1, 0), step_ends=(0, 1)), Score(1.0, per_token=(0, 1), step_ends=(0, 1)))


@pytest.mark.parametrize(
    ("advantage", "group_size", "scores", "without_signal", "said"),
    [
        ("grpo", 2, (Score(1.0), Score(1.0), Score(0.0), Score(0.0)), 1.0, True),
        ("grpo", 2, (Score(1.0), Score(1.0), Score(0.0), Score(1.0)), 0.5, False),
        ("process", 2, STEPS, 0.0, False),
        ("reinforce", 2, (Score(1.0), Score(1.0), Score(0.0), Score(0.0)), None, False),  # it compares over the step
        ("gae", 1, (Score(1.0), Score(1.0)), None, True),
        ("gae", 1, (Score(1.0), Score(0.0)), None, False),
    ],
)
def test_equal_rewards_are_said_where_nothing_is_learned(
    advantage: str,
    group_size: int,
    scores: Sequence[Score],
    without_signal: float | None,
    said: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = RLConfig(advantage=advantage, group_size=group_size)
    segment = Segment(torch.arange(2), torch.arange(2), torch.zeros(2))
    rollouts = [Rollout(SAMPLES[0], (segment,), f"{i // group_size}", score=s) for i, s in enumerate(scores)]
    assert step_metrics(RolloutBatch(rollouts, []), 0, config).get("group/without_signal") == without_signal
    with Run.create(tmp_path / "run", "recipe.py", [], {}) as run:
        hook = EqualRewards(run, "rl", config)
        for done in range(EQUAL_STEPS):
            hook.after_step(FinishedStep(done + 1, rollouts, TrainOutput({}, [], [])))
    assert ("so that nothing is learned" in capsys.readouterr().err) == said


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("step", [0, 1, 5])
def test_refills_are_new_prompts_as_long_as_there_are_any(seed: int, step: int) -> None:
    """Three prompts of eight have no signal in the first round; two rounds reach all others."""
    kept = first_round(step, seed)[0]
    found, engine = run(kept, step=step, seed=seed, dynamic_sampling=3)
    asked = [name for call in engine.asked()[1:] for name in call]
    assert len(set(asked)) == len(asked) and not set(asked) & set(engine.asked()[0])
    assert set(asked) == {s.id for s in SAMPLES} - set(engine.asked()[0])
    assert list(groups(found).values()) == [kept]
    assert (found.dropped, found.refilled) == (len(set(asked)) + len(engine.asked()[0]) - 1, len(asked))


def test_without_any_signal_the_first_round_is_kept() -> None:
    found, _ = run("", dynamic_sampling=2)
    assert list(groups(found).values()) == first_round() and len(found.rollouts) == 6
    assert found.dropped == 8  # all there are


def test_groups_keep_apart_when_a_step_meets_a_prompt_twice() -> None:
    """Five prompts, four a step: the second step crosses into the next shuffle and may ask one prompt twice."""
    five, met = SAMPLES[:5], 0
    for seed in range(12):
        first = [s.id for s in batch_of_step(five, 1, 4, seed)]
        lone = next(x for x in first if first.count(x) == 1)
        found, engine = run(
            lone + "abcde".translate({ord(x): None for x in first}),
            step=1,
            seed=seed,
            samples=five,
            prompts_per_step=4,
            dynamic_sampling=1,
        )
        met += len(set(first)) < 4
        asked = [r for call in engine.calls for r in call]
        assert len({r.group_id for r in asked}) == len(asked)
        assert len({(r.sample.id, r.seed) for r in asked}) == len(asked), "two groups with the same random numbers"
        assert len(found.rollouts) == 2 * len(groups(found))
    assert met


def test_a_step_is_a_function_of_seed_and_step() -> None:
    def trace(seed: int, step: int) -> list[list[tuple[str, int, str]]]:
        _, engine = run("aceg", seed=seed, step=step, dynamic_sampling=2)
        return [[(r.sample.id, r.seed, r.group_id) for r in call] for call in engine.calls]

    assert trace(3, 1) == trace(3, 1)
    different = [trace(3, 1), trace(3, 2), trace(4, 1)]
    assert all(different[i] != different[j] for i, j in ((0, 1), (0, 2), (1, 2)))
    seeds = {call[0][1] for t in different for call in t}
    assert len(seeds) == 3  # every step and every run has noise of its own


def test_remax_asks_one_greedy_answer_to_each_prompt() -> None:
    asked = first_round()
    found, engine = run("", advantage="remax")
    sampled, last = engine.calls
    assert [(r.sample.id, r.n, r.greedy) for r in last] == [(name, 1, True) for name in asked]
    assert [r.group_id for r in last] == list(groups(found)) and not any(r.greedy for r in sampled)
    assert [s.total for s in found.greedy] == [0.25] * 3
    assert [e.greedy_score for e in scored_experiences(found, RLConfig(advantage="remax"))] == [0.25] * 6
    assert len(found.rollouts) == 6  # the greedy answers are not trained on
    settings = RLConfig(prompts_per_step=3, group_size=2, advantage="remax")
    found = collect(Engine(), SAMPLES, StandardisedSum.of(known=Known("a")), 0, settings, 0)
    assert [s.parts["known"] for s in found.greedy] == [0.25] * 3
    assert_standardised_together(found)


def assert_standardised_together(found: RolloutBatch) -> None:
    scores = [*(r.score for r in found.rollouts if r.score), *found.greedy]
    raw = torch.tensor([s.parts["known"] for s in scores])
    wanted = (raw - raw.mean()) / (raw - raw.mean()).square().mean().sqrt()
    torch.testing.assert_close(torch.tensor([s.total for s in scores]), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by_turn", [False, True])
def test_what_is_standardised_over_a_batch_is_so_over_the_rounds_of_dynamic_sampling(by_turn: bool) -> None:
    """The first of three prompts has signal; of the others in their place all have. Nothing is scored twice."""
    scored: list[str] = []

    def reward(rollouts: Sequence[Rollout]) -> list[Score]:
        scored.extend(f"{r.group_id} {r.index}" for r in rollouts)
        known = Known("".join(set("abcdefgh") - set(first_round()[1:])))(rollouts)
        return [Score(s.total, per_segment=(s.total,) if by_turn else None) for s in known]

    settings = RLConfig(prompts_per_step=3, group_size=2, dynamic_sampling=2)
    found = collect(Engine(), SAMPLES, StandardisedSum.of(known=reward), 0, settings, 0)
    assert (found.dropped, found.refilled, len(found.rollouts)) == (2, 2, 6) and len(set(scored)) == len(scored) == 10
    assert_standardised_together(found)
    assert all((r.score.per_segment == (r.score.total,)) == by_turn for r in found.rollouts if r.score)


def test_each_turn_at_its_token_limit_counts_as_cut() -> None:
    ends = [("length", "eos"), ("length", "length"), ("eos", "eos")]
    segment = Segment(torch.tensor([1]), torch.tensor([2]), torch.zeros(1), "x")
    streams = [
        Rollout(SAMPLES[0], tuple(replace(segment, stop_reason=end) for end in turns), "g", i, Score(0.0))  # type: ignore[arg-type]
        for i, turns in enumerate(ends)
    ]
    assert step_metrics(RolloutBatch(streams, []), 0, RLConfig())["response/cut"] == 3 / 6


def test_a_bad_score_names_its_sample() -> None:
    def reward(rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(float("nan") if r.sample.id == first_round()[1] else 0.0) for r in rollouts]

    with pytest.raises(ValueError, match=f"sample '{first_round()[1]}': total is nan"):
        collect(Engine(), SAMPLES, reward, 0, RLConfig(prompts_per_step=3, group_size=2), 0)
