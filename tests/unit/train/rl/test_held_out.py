"""Held-out evaluation during training: by the run's engine, with the weights of the step, else by the policy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from audiorl.config import GenerationConfig, SamplingConfig
from audiorl.eval._phases import Evaluation
from audiorl.protocols import RolloutEngine
from audiorl.rewards import WeightedSum
from audiorl.run.folder import Run
from audiorl.train.rl.train import train_rl
from audiorl.types import Rollout, Sample, Score
from tests.conftest import make_omni
from tests.support.held_out import Compared
from tests.support.overlapped_runs import CONFIG, OPTIM, SAMPLING, even, rows

EVALUATED = replace(CONFIG, steps=3, eval_every=1)
REWARD = WeightedSum.of(even=even)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_runs_engine_answers_with_the_weights_of_the_step(
    overlap: bool, samples: list[Sample], tmp_path: Path
) -> None:
    policy = make_omni()
    evaluation = Evaluation(REWARD, samples, SAMPLING.max_new_tokens, metric="even")
    compared = Compared(evaluation.probe(policy))
    config = replace(EVALUATED, generation=GenerationConfig(overlap=overlap))
    run = Run.create(tmp_path / "out", "held out", [], config)
    train_rl(policy, samples, REWARD, run, config=config, optim=OPTIM, sampling=SAMPLING, evaluate=compared)
    assert [{s.policy_version for r in spy.rollouts for s in r.segments} for spy in compared.spies] == [{1}, {2}]
    assert all(r.greedy and r.n == 1 for spy in compared.spies for r in spy.requests)
    assert compared.notes == ["held-out 2/3", "held-out 3/3"] * 2
    assert ["eval/even" in row for row in rows(tmp_path / "out")] == [True, True, False]


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [(SAMPLING, 5), (replace(SAMPLING, stop=("zzz",)), SAMPLING.max_new_tokens)],
    ids=["shorter answers", "stop strings"],
)
def test_an_engine_that_answers_otherwise_is_not_asked(
    sampling: SamplingConfig, tokens: int, samples: list[Sample], tmp_path: Path
) -> None:
    policy = make_omni()
    evaluation = Evaluation(REWARD, samples, tokens, metric="even")

    class OfThePolicy(Compared):
        def __call__(self) -> Mapping[str, float]:
            self.notes.append("by the policy")
            return self.probe()

        def by_engine(self, engine: RolloutEngine, several: int, note: Any) -> Mapping[str, float]:
            raise AssertionError("its answers end elsewhere")

    compared = OfThePolicy(evaluation.probe(policy))
    run = Run.create(tmp_path / "out", "held out", [], EVALUATED)
    train_rl(policy, samples, REWARD, run, config=EVALUATED, optim=OPTIM, sampling=sampling, evaluate=compared)
    assert compared.notes == ["by the policy"] * 2


def test_every_second_of_a_step_is_in_one_of_its_parts(samples: list[Sample], tmp_path: Path) -> None:
    """Scores that take 0.1 s, an evaluation of 0.2 s, and checkpoints, each in its own part; the parts add up."""

    def slow(rollouts: Sequence[Rollout]) -> list[Score]:
        time.sleep(0.1)
        return even(rollouts)

    def evaluate() -> Mapping[str, float]:
        time.sleep(0.2)
        return {"accuracy": 0.5}

    config = replace(EVALUATED, save_every=1)
    run = Run.create(tmp_path / "out", "times", [], config)
    began = time.monotonic()
    train_rl(make_omni(), samples, slow, run, config=config, optim=OPTIM, sampling=SAMPLING, evaluate=evaluate)
    wall, found = time.monotonic() - began, rows(tmp_path / "out")
    for i, row in enumerate(found):
        parts = {name: row[f"time/{name}"] for name in ("save", "sync", "rollout", "rewards", "batch", "logprobs")}
        parts |= {name: row[f"time/{name}"] for name in ("train", "hooks")}
        assert set(row) >= {f"time/{name}" for name in parts} and min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(row["time/step"])
        assert parts["rewards"] >= 0.1 and (parts["hooks"] >= 0.2 or i == 2)
        assert parts["rollout"] > 0 and parts["logprobs"] > 0 and parts["train"] > 0
        assert "time/gpu_busy" not in row
    assert found[1]["time/save"] > 0 and sum(row["time/step"] for row in found) <= wall
