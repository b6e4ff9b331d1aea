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


@pytest.mark.parametrize("advantage", ["grpo", "time-index"])
def test_simul_ppo_without_a_critic(tmp_path: Path, advantage: str) -> None:
    settings = {"advantage": advantage, "group-size": "2", "kl.place": "loss", "kl.kind": "k3"}
    options = [word for stage in STAGES for name, value in settings.items() for word in (f"--{stage}.{name}", value)]
    run = train("simul_ppo", tmp_path / "run", *options, "--sft-epochs", "0", "--rewards.time", "True")
    metrics = [m for m in read_metrics(run / "metrics.jsonl") if m["phase"] == "stage2"]
    assert all(m["grad_norm"] > 0 and "reward/time" in m for m in metrics)


def test_unknown_weights_and_streams_without_reference(
    tmp_path: Path, streams: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path / "run"))
    common = ["train", "simul-ppo", "--tiny", *out]
    assert main([*common, "--rewards.weights", "speed", "2"]) != 0
    assert "no reward is called 'speed'" in capsys.readouterr().err
    rows = rows_of(streams)
    rows[1]["units"] = []
    bare = streams.parent / "bare.jsonl"
    bare.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert main([*common[:3], "--out", str(tmp_path / "two"), "--data", str(bare), "--target-language", "fr"]) != 0
    assert "has no units" in capsys.readouterr().err
