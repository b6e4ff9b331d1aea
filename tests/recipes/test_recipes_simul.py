"""simul-ppo through the command line."""

from __future__ import annotations

import json
import os
import signal
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from audiorl.cli import main
from audiorl.models import load_policy
from audiorl.recipes._simul import StreamRewards
from audiorl.run.metrics_log import read_metrics
from audiorl.tasks.simul.bundled import bundled_streams
from audiorl.tasks.simul.formats import write_streams
from audiorl.train.rl.trainer import Trainer
from tests.support.recipe_runs import last_checkpoint, rows_of, train

STAGES = ("stage1", "stage2")


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    write_streams(folder, bundled_streams("train", "fr", count=6, seconds=(2.0, 4.0), max_prompt_seconds=2.0))
    return folder / "streams.jsonl"


def test_simul_ppo_on_streams_of_a_file_interrupted_in_stage_two(
    streams: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--data", str(streams), "--target-language", "fr", "--optim.lr", "1e-3", "--sft-epochs", "1")
    whole = train("simul_ppo", tmp_path / "whole", *options)
    original, calls = Trainer.step, 0

    @wraps(original)
    def interrupted(self: Trainer, shard: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:  # the first step of stage 2
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, shard)

    monkeypatch.setattr(Trainer, "step", interrupted)
    capsys.readouterr()
    run = tmp_path / "run"
    assert main(["train", "simul-ppo", "--tiny", *options, "--out", str(run)]) == 130
    assert "after stage2 step 1" in capsys.readouterr().err
    assert main(["resume", str(run)]) == 0
    for stage in STAGES:
        for name in ("model.safetensors", "trainer.safetensors"):
            assert (last_checkpoint(run, stage) / name).read_bytes() == (
                last_checkpoint(whole, stage) / name
            ).read_bytes()
    policy, start = load_policy(last_checkpoint(whole, "stage2")), load_policy(last_checkpoint(whole, "sft"))
    assert any(not (p == start.trainable()[n]).all() for n, p in policy.trainable().items())


@pytest.mark.parametrize(
    ("advantage", "betas", "start"),
    [
        ("grpo", ("--stage1.kl-beta", "0"), 0.1),
        ("time-index", ("--stage1.kl.control", "fixed", "--stage1.kl-beta", "9", "--stage2.kl-beta", "0.2"), 0.2),
    ],
)
def test_simul_ppo_without_a_critic(tmp_path: Path, advantage: str, betas: tuple[str, ...], start: float) -> None:
    """Only an adaptive β that is not 0 goes on from stage 1 to stage 2, whose controller moves it by 10 % at most."""
    settings = {"advantage": advantage, "group-size": "2", "kl.place": "loss", "kl.kind": "k3"}
    options = [word for stage in STAGES for name, value in settings.items() for word in (f"--{stage}.{name}", value)]
    run = train("simul_ppo", tmp_path / "run", *options, *betas, "--sft-epochs", "0", "--rewards.time", "True")
    metrics = [m for m in read_metrics(run / "metrics.jsonl") if m["phase"] == "stage2"]
    assert all(m["grad_norm"] > 0 and "reward/time" in m for m in metrics)
    assert metrics[0]["kl/beta"] == pytest.approx(start, rel=0.11)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"hpo": True}, ""),
        ({"hpo": True, "hinge": 0.7}, ""),
        ({"hinge": 0.5, "weights": {"latency": 2.0}, "time": True}, ""),
        ({"hpo": True, "weights": {"latency": 2.0}}, "--rewards.weights: has no effect with --rewards.hpo"),
        ({"hpo": True, "time": True}, "--rewards.time: has no effect with --rewards.hpo"),
        ({"hpo": True, "guards": False}, "--rewards.guards: has no effect with --rewards.hpo"),
        ({"hinge": 0.5, "longest_wait": 2.0}, "--rewards.longest-wait: has no effect with --rewards.hinge"),
        ({"hinge": 0.0, "waits": "available"}, "--rewards.waits: has no effect with --rewards.hinge"),
    ],
)
def test_rewards_that_another_option_replaces(given: dict[str, Any], fault: str) -> None:
    rewards = StreamRewards(**given)
    if not fault:
        rewards.refuse_unused(StreamRewards())
        return
    with pytest.raises(ValueError, match=fault):
        rewards.refuse_unused(StreamRewards())


def test_unknown_weights_and_streams_without_reference(
    tmp_path: Path, streams: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path / "run"))
    common = ["train", "simul-ppo", "--tiny", *out]
    assert main([*common, "--rewards.weights", "speed", "2"]) != 0
    assert "no reward is called 'speed'" in capsys.readouterr().err
    assert main([*common, "--rewards.hpo", "True", "--rewards.waits", "available"]) != 0
    assert "--rewards.waits: has no effect with --rewards.hpo" in capsys.readouterr().err
    rows = rows_of(streams)
    rows[1]["units"] = []
    bare = streams.parent / "bare.jsonl"
    bare.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert main([*common[:3], "--out", str(tmp_path / "two"), "--data", str(bare), "--target-language", "fr"]) != 0
    assert "has no units" in capsys.readouterr().err
