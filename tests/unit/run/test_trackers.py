"""Curves, tables of rollouts and audio arrive in each experiment tracker, also from a run that is resumed."""

from __future__ import annotations

import json
import math
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from audiorl.audio import AudioClip
from audiorl.cli import main
from audiorl.data.corpus import bundled_speech
from audiorl.run.folder import Run
from audiorl.run.metrics_log import read_metrics
from audiorl.run.trackers import AUDIO_RATE, MAX_AUDIO_ROWS, TRACKERS, open_trackers, rollout_table
from audiorl.types import Message, Rollout, Sample, Score, Segment

RECIPE = Path(__file__).parents[2] / "support" / "steps_recipe.py"
NUMBER = MAX_AUDIO_ROWS + 1
LIBRARIES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}


class Beep:
    """A speech decoder that says a constant for a quarter of a second."""

    sample_rate = 16_000

    def waveform(self, rollout: Rollout) -> torch.Tensor:
        return torch.full((4000,), 0.25)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", "recipe.py", [], {"rl": {"lr": 1e-3, "clip": [0.2, 0.28]}, "lora": True})


def log_two_steps(run: Run, name: str) -> None:
    """A step with rollouts and two more. Then, as after a crash behind a checkpoint, the run is opened after the first
    one: the second is logged again, the third with another value, and a fourth."""
    utterance = bundled_speech(("en",))[0]
    sample = Sample("s", (Message("user", (utterance.clip, "What | is\nsaid?")),), (utterance.text,))
    nothing = torch.zeros(0, dtype=torch.long)
    rollouts = [
        Rollout(sample, (Segment(nothing, nothing, torch.zeros(0), f"answer {i}"),), "0/0", i)
        .with_score(Score(0.5 + i, {"accuracy": i % 2}))
        for i in range(NUMBER)
    ]  # fmt: skip
    run.track([name])
    evaluate(run, "before", 0.25)
    run.write_rollouts("rl", 1, rollouts, [0.25 * i for i in range(NUMBER)], Beep())  # type: ignore[arg-type]
    run.log("grpo", 1, {"reward/mean": 0.5, "kl": math.nan})
    run.finish("grpo")  # the line that a resumed run goes on from
    run.log("grpo", 2, {"reward/mean": 0.75, "kl": 0.1})
    run.write_rollouts("rl", 3, rollouts, [0.0] * NUMBER, Beep())  # type: ignore[arg-type]
    run.log("grpo", 3, {"reward/mean": 0.8, "kl": 0.1})
    run.close()
    if name == "wandb":
        time.sleep(1.1)  # it names the folder of an offline run by the second
    resumed = Run.open(run.dir)
    resumed.track([name])
    resumed.log("grpo", 2, {"reward/mean": 0.75, "kl": 0.1})
    resumed.write_rollouts("rl", 3, rollouts, [0.0] * NUMBER, Beep())  # type: ignore[arg-type]
    resumed.log("grpo", 3, {"reward/mean": AGAIN, "kl": 0.1})
    resumed.log("grpo", 4, {"reward/mean": 0.9, "kl": 0.1})
    evaluate(resumed, "after", 0.5)
    (run.dir / "report.html").write_text("<!doctype html><p>the report")
    resumed.close()


def evaluate(run: Run, name: str, accuracy: float) -> None:
    """As the recipes do: two sets, by task, and a result that is written again with its changes."""
    for full in (f"unseen_{name}", name):
        entry = {"accuracy": accuracy, "n": 8, "low": 0.1, "high": 0.9, "by_task": {"en": {"accuracy": 0.125, "n": 4}}}
        run.write_result(full, entry)
        run.write_result(full, entry | {"changes": {}})
        run.finish(full)


EVALUATED = {
    **{f"eval/{set}before/accuracy": 0.25 for set in ("unseen_", "")},
    **{f"eval/{set}after/accuracy": 0.5 for set in ("unseen_", "")},
    **{f"eval/{name}/accuracy/en": 0.125 for name in ("unseen_before", "before", "unseen_after", "after")},
}
SETTINGS = {"rl.lr": 1e-3, "rl.clip": "[0.2, 0.28]", "lora": True}
AGAIN = 0.81
CURVE = [(0, 0.5), (1, 0.75), (2, 0.8), (3, 0.9)]
"""Of the trackers that only append."""


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a log of LevelDB behind a header of 7 bytes."""
    block, position, record = 32_768, 7, b""
    while position + 7 <= len(data):
        if block - position % block < 7:
            position += block - position % block
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def test_the_table_of_rollouts(run: Run) -> None:
    score: dict[str, Any] = {"total": 1.0, "parts": {"accuracy": 1.0}}
    rows = [
        {"group_id": "0/0", "index": 0, "sample": {"prompt": "p"}, "text": "a", "score": score, "advantage": 0.5},
        {"group_id": "0/0", "index": 1, "sample": {"prompt": "p"}, "text": "b", "score": None, "advantage": 0.0},
    ]
    clip = AudioClip(array=torch.zeros(1600).numpy(), sample_rate=16_000)
    rollout = Rollout(Sample("s", (Message("user", (clip, "p")),)), (), "0/0")
    table = rollout_table([rollout, rollout], rows, run.dir)
    assert table.columns == ("group_id", "index", "prompt", "text", "reward", "reward/accuracy", "advantage")
    assert table.rows == [["0/0", 0, "p", "a", 1.0, 1.0, 0.5], ["0/0", 1, "p", "b", None, None, 0.0]]
    assert [{n: len(wave) for n, wave in each.items()} for each in table.audio] == [
        {"input audio": AUDIO_RATE // 10}
    ] * 2


def test_tensorboard(run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    log_two_steps(run, "tensorboard")
    events = EventAccumulator(str(run.dir / "tensorboard"))
    events.Reload()
    curve = events.Scalars("reward/mean")
    assert [e.step for e in curve] == [0, 1, 2, 3]
    assert [e.value for e in curve] == pytest.approx([0.5, 0.75, AGAIN, 0.9])
    scalars = {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"] if tag in EVALUATED}
    assert scalars == {tag: [value] for tag, value in EVALUATED.items()}
    plugin = HParamsPluginData.FromString
    start = plugin(events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content).session_start_info
    shown = {k: getattr(v, str(v.WhichOneof("kind"))) for k, v in start.hparams.items()}
    experiment = plugin(events.SummaryMetadata("_hparams_/experiment").plugin_data.content).experiment
    assert shown == SETTINGS and {info.name.tag for info in experiment.metric_infos} == set(EVALUATED)
    assert len(events.Tags()["audio"]) == 2 * MAX_AUDIO_ROWS
    assert events.Audio("rollouts/0 spoken audio")[0].sample_rate == AUDIO_RATE
    text, *others = events.Tensors("rollouts/text_summary")
    assert text.step == 0 and {other.step for other in others} == {2}  # this reader purges no texts
    line = "| 0/0 | 1 | [audio]What \\| is<br>said? | answer 1 | 1.5 | 1 | 0.25 |"
    assert line in text.tensor_proto.string_val[0].decode().splitlines()


def test_tensorboard_shows_steps_before_the_first_checkpoint_once(run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for values in ([0.5, 0.75], [0.6, 0.8, 0.9]):
        run.track(["tensorboard"])
        if not run.finished("before"):
            evaluate(run, "before", 0.25)
        for step, value in enumerate(values):
            run.log("grpo", step, {"reward/mean": value})
        run.close()
        run = Run.open(run.dir)
    events = EventAccumulator(str(run.dir / "tensorboard"))
    events.Reload()
    curve = events.Scalars("reward/mean")
    assert [e.step for e in curve] == [0, 1, 2] and [e.value for e in curve] == pytest.approx([0.6, 0.8, 0.9])
    assert [e.value for e in events.Scalars("eval/before/accuracy")] == [0.25]


@pytest.mark.parametrize("name", ["tensorboard", pytest.param("mlflow", marks=pytest.mark.slow)])
def test_a_mistake_in_the_data_leaves_no_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ValueError, match="row 3"), Run.create(tmp_path / "run", "recipe.py", [], {}) as run:
        run.track([name])
        try:
            raise ValueError("row 3")
        except ValueError:
            run.discard_if_empty()
            raise
    Run.create(tmp_path / "run", "recipe.py", [], {}).close()


@pytest.mark.slow
def test_wandb(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    log_two_steps(run, "wandb")
    deadline = time.monotonic() + 30  # wandb writes in a process of its own
    while True:
        history: list[dict[str, Any]] = []
        summary: dict[str, Any] = {}
        ids, artifacts = set(), set[str]()
        for file in sorted((run.dir / "wandb").glob("offline-run-*/*.wandb")):
            for record in map(Record.FromString, wandb_records(file.read_bytes())):
                ids |= {record.run.run_id} - {""}
                artifacts |= {entry.path for entry in record.artifact.manifest.contents}
                artifacts |= {e.path for e in record.request.log_artifact.artifact.manifest.contents}
                summary |= {"/".join(i.nested_key) or i.key: i.value_json for i in record.summary.update}
                if record.HasField("history"):
                    items = record.history.item
                    history.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
        if len(history) == len(CURVE) or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert ids == {json.loads((run.dir / "trackers.json").read_text())["id"]}
    assert [(row["_step"], row["reward/mean"]) for row in history] == CURVE
    assert {k: v for row in history for k, v in row.items() if k in EVALUATED} == EVALUATED
    assert {k: json.loads(v) for k, v in summary.items() if k in EVALUATED} == EVALUATED
    assert any(path.endswith(".html") for path in map(str, (run.dir / "wandb").rglob("*"))), "the report"
    table, _ = sorted((run.dir / "wandb").rglob("rollouts_*.table.json"), key=lambda file: file.stat().st_mtime)
    content = json.loads(table.read_text())
    assert content["columns"][-2:] == ["input audio", "spoken audio"] and len(content["data"]) == NUMBER
    assert content["data"][1][3:7] == ["answer 1", 1.5, 1, 0.25]
    assert content["data"][0][-2:] == ["Audio", "Audio"] and content["data"][-1][-2:] == [None, None]
    assert sum(path.endswith(".wav") for path in artifacts) == 2, "equal audio is stored once"


@pytest.mark.slow
def test_trackio(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads its folder when it is imported
    log_two_steps(run, "trackio")
    with sqlite3.connect(tmp_path / "trackio" / "audiorl.db") as database:
        rows = [
            (step, json.loads(row)) for step, row in database.execute("select step, metrics from metrics order by id")
        ]
    curve = [(step, row["reward/mean"]) for step, row in rows if "reward/mean" in row]
    assert curve == CURVE
    assert {k: v for _, row in rows for k, v in row.items() if k in EVALUATED} == EVALUATED
    table, _ = (row["rollouts"] for _, row in rows if "rollouts" in row)
    assert len(table["_value"]) == NUMBER and table["_value"][1]["text"] == "answer 1"
    assert len(list((tmp_path / "trackio" / "media").rglob("*.wav"))) == 2 * 2 * MAX_AUDIO_ROWS


@pytest.mark.slow
def test_mlflow(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log_two_steps(run, "mlflow")
    client = MlflowClient(f"sqlite:///{run.dir.resolve() / 'mlflow.db'}")
    (logged,) = client.search_runs([client.get_experiment_by_name("audiorl").experiment_id])
    history = client.get_metric_history(logged.info.run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == CURVE
    assert {k: v for k, v in logged.data.metrics.items() if k in EVALUATED} == EVALUATED
    assert logged.data.params == {k: str(v) for k, v in SETTINGS.items()}
    artifacts = run.dir / "mlflow_artifacts" / logged.info.run_id / "artifacts"
    table = json.loads((artifacts / "rollouts" / "000000.json").read_text())
    assert len(table["data"]) == NUMBER and "answer 1" in table["data"][1]
    assert len(list(artifacts.rglob("*.wav"))) == 2 * 2 * MAX_AUDIO_ROWS
    config = {"rl": {"lr": 1e-3, "clip": [0.2, 0.28]}, "lora": True}
    assert json.loads((artifacts / "config.json").read_text()) == config and (artifacts / "report.html").exists()
    assert logged.info.status == "FINISHED"


@pytest.mark.slow
def test_the_command_line_logs_a_run_and_its_resumption(tmp_path: Path) -> None:
    """Two supervised and two RL steps, then the last of them again, as after a crash."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    assert main(["train", str(RECIPE), "--log", "tensorboard", "--steps", "2", "--out", str(out)]) == 0
    state = json.loads((out / "state.json").read_text())
    state["finished"].pop("rl")
    (out / "state.json").write_text(json.dumps(state))
    assert main(["resume", str(out), "--trust", str(RECIPE), "--log", "tensorboard"]) == 0
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    rewards = [row["reward/mean"] for row in read_metrics(out / "metrics.jsonl") if row["phase"] == "rl"]
    curve = events.Scalars("reward/mean")
    assert [e.step for e in curve] == [2, 3] and [e.value for e in curve] == pytest.approx(rewards)
    assert any(tag.endswith("input audio") for tag in events.Tags()["audio"])


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_library_names_the_extra(name: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LIBRARIES[name], None)
    with pytest.raises(ValueError, match=rf"--log {name}: .*install it: pip install .*\[loggers\]'"):
        open_trackers([name], run.dir, {})
    with pytest.raises(ValueError, match="--log comet: not a tracker; choose from tensorboard, wandb, trackio, mlflow"):
        run.track(["comet"])
