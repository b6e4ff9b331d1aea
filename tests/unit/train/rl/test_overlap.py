"""Rollouts that are written beside the update before them: which weights wrote them, and what a resume repeats."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from audiorl.config import GenerationConfig, ModelConfig, RLConfig
from audiorl.errors import Interrupted
from audiorl.models import AudioPolicy
from audiorl.rollout.hf import HFEngine
from audiorl.run.folder import Run
from audiorl.train.rl.collect import RolloutBatch, collect, scored_experiences
from audiorl.train.rl.train import train_rl
from audiorl.train.rl.trainer import TrainBatch, Trainer
from audiorl.types import Rollout, Sample, Score
from tests.conftest import make_omni
from tests.support.overlapped_runs import CONFIG, OPTIM, SAMPLING, assert_same, column, even, rows


def policy() -> AudioPolicy:
    return make_omni(ModelConfig(audio="full"))


def train(
    folder: Path, samples: list[Sample], config: RLConfig = CONFIG, reward: Any = even, resume: bool = False
) -> AudioPolicy:
    trained = policy()
    with Run.open(folder) if resume else Run.create(folder, "overlap", [], config) as run:
        train_rl(trained, samples, reward, run, config=config, optim=OPTIM, sampling=SAMPLING)
    return trained


def by_hand(samples: list[Sample]) -> AudioPolicy:
    trained = policy()
    worker = Trainer(trained, CONFIG, OPTIM, 1.0, SAMPLING.max_new_tokens)
    engine = HFEngine(trained, SAMPLING)

    def written(step: int) -> RolloutBatch:
        return collect(engine, samples, even, step, CONFIG, 0)

    first = written(0)
    second = written(1)
    worker.step(TrainBatch(scored_experiences(first, CONFIG)))
    third = written(2)
    for found in (second, third):
        worker.step(TrainBatch(scored_experiences(found, CONFIG)))
    fourth = written(3)  # after the checkpoint of three steps
    fifth = written(4)
    for found in (fourth, fifth):
        worker.step(TrainBatch(scored_experiences(found, CONFIG)))
    return trained


def test_rollouts_are_one_update_old_but_after_a_checkpoint(samples: list[Sample], tmp_path: Path) -> None:
    trained = train(tmp_path / "overlap", samples)
    assert column(tmp_path / "overlap", "rollout/staleness") == [0, 1, 1, 0, 1]
    for step, version in enumerate([0, 0, 1, 3, 3], 1):
        lines = (tmp_path / "overlap" / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        assert {s["policy_version"] for line in lines for s in json.loads(line)["segments"]} == {version}
    gaps = column(tmp_path / "overlap", "policy/logprob_gap")
    assert max(gaps[0], gaps[3]) < 1e-5 and min(gaps[1], gaps[2], gaps[4]) > 1e-3
    assert_same(trained, by_hand(samples))

    usual = train(tmp_path / "usual", samples, replace(CONFIG, generation=GenerationConfig(overlap=False)))
    assert column(tmp_path / "usual", "rollout/staleness") == [0] * 5
    with pytest.raises(AssertionError):
        assert_same(usual, trained, tolerance=1e-4)


def test_a_resumed_run_is_the_undisturbed_one(samples: list[Sample], tmp_path: Path) -> None:
    out = tmp_path / "out"
    once = train(out, samples)
    before = rows(out)
    state = json.loads((out / "state.json").read_text())
    state["finished"].pop("rl")
    state["checkpoints"]["rl"] = "checkpoints/rl/step_000003"
    (out / "state.json").write_text(json.dumps(state | {"seq": 3}))
    assert_same(train(out, samples, resume=True), once)
    for a, b in zip(before, rows(out), strict=True):
        timeless = {k: v for k, v in a.items() if not k.startswith(("time", "tokens_per_s"))}
        assert timeless == {k: b[k] for k in timeless}


def test_ctrl_c_while_the_next_step_is_written(samples: list[Sample], tmp_path: Path) -> None:
    """It saves after the step that trains, and goes on with rollouts of the current weights."""

    def interrupted(rollouts: Sequence[Rollout]) -> list[Score]:
        if rollouts[0].group_id.startswith("2/"):
            os.kill(os.getpid(), signal.SIGINT)
        return even(rollouts)

    out = tmp_path / "out"
    with pytest.raises(Interrupted, match="stopped after rl step 2"):
        train(out, samples, reward=interrupted)
    train(out, samples, resume=True)
    assert column(out, "rollout/staleness") == [0, 1, 0, 0, 1]


def test_without_a_correction_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"overlap trains on tokens of older weights, .*: set tis_cap"):
        RLConfig(generation=GenerationConfig(overlap=True))
