"""The recipes of speech output through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import soundfile

from audiorl.cli import main
from audiorl.judges.character_ctc import load as load_ear
from audiorl.models import load_policy
from audiorl.train.logging import read_metrics
from tokenizers_audio import load


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "tts"
    assert main(["train", "recipes/tts_quickstart.py", "--tiny", "--threads", "1", "--out", str(out)]) == 0
    return out


def test_quickstart_writes_a_whole_run(quickstart: Path) -> None:
    evals = json.loads((quickstart / "eval.json").read_text())
    assert {"before", "after"} <= set(evals)
    for name in ("before", "after"):
        assert evals[name]["n"] == 2 and 0 <= evals[name]["low"] <= evals[name]["accuracy"] <= evals[name]["high"] <= 1
        for row in rows_of(quickstart / "eval" / f"{name}.jsonl"):
            wav, rate = soundfile.read(quickstart / row["said"]["path"])
            assert rate == 24_000 and len(wav) / rate == pytest.approx(row["seconds"])
    metrics = [m for m in read_metrics(quickstart / "metrics.jsonl") if m["phase"] == "grpo"]
    assert [m["step"] for m in metrics] == [1, 2]
    for wanted in ("reward/understood", "reward/length", "reward/finished", "kl_audio", "policy/entropy_audio"):
        assert wanted in metrics[0]
    assert metrics[0]["policy/ratio"] > 0 and metrics[0]["policy/engine_gap"] < 1e-4 and metrics[0]["grad_norm"] > 0


def test_its_parts_can_be_loaded(quickstart: Path) -> None:
    codec = load(quickstart / "codec")
    policy = load_policy(sorted((quickstart / "checkpoints" / "grpo").glob("step_*"))[-1])
    assert policy.speech is not None
    policy.set_codec(codec)
    assert load_ear(quickstart / "ear").name == "ear"


def test_what_was_said_is_in_the_report(quickstart: Path) -> None:
    rows = rows_of(sorted((quickstart / "rollouts").glob("step_*.jsonl"))[-1])
    said = [row for row in rows if "said" in row]
    assert said and all((quickstart / row["said"]["path"]).is_file() for row in said)
    page = (quickstart / "report.html").read_text()
    assert "What was said" in page and page.count("<audio") >= 4


def test_a_finished_quickstart_goes_on_to_nothing(quickstart: Path) -> None:
    before = (quickstart / "metrics.jsonl").read_bytes()
    assert main(["resume", str(quickstart)]) == 0
    assert (quickstart / "metrics.jsonl").read_bytes() == before
