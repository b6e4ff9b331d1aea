"""Experiment trackers: TensorBoard, Weights & Biases, Trackio and MLflow, one adapter each.

Every tracker gets the curve of every metric, at the line number (`seq`) of metrics.jsonl, and at the steps whose
rollouts are written a table of rollouts (prompt, text, reward and its parts, advantage) with audio players. Which
trackers a run has is not part of its recipe: `audiorl train … --log wandb` and `audiorl resume … --log tensorboard`
choose independently. A library is imported only when its tracker is opened.

Where they write: TensorBoard to RUN/tensorboard; W&B to your account, or to RUN/wandb with WANDB_MODE=offline; Trackio
to its own folder (TRACKIO_DIR); MLflow to MLFLOW_TRACKING_URI, or to RUN/mlflow.db without it. The project is "audiorl"
unless WANDB_PROJECT, TRACKIO_PROJECT or MLFLOW_EXPERIMENT_NAME names another.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from audiorl.audio import AudioClip, write_wav
from audiorl.run.records import read_record, write_json
from audiorl.types import Rollout

AUDIO_RATE = 24_000
"""Hz of the audio that trackers get."""
MAX_ROWS = 64
"""Rollouts of one step in a table."""
MAX_AUDIO_ROWS = 8
"""Rollouts of one step with audio players."""
PROJECT = "audiorl"
NEXT_STEP = "audiorl.next_step"
"""Tag of an MLflow run: the line of metrics.jsonl that comes next."""


class Tracker(Protocol):
    """Shows a run's metrics and rollouts."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Log the numbers of one line of metrics.jsonl."""
        ...

    def write_rollouts(self, seq: int, table: RolloutTable) -> None:
        """Log the rollouts of one step."""
        ...

    def close(self) -> None: ...


class Waveform(NamedTuple):
    """Audio of one rollout."""

    name: str
    """input audio (what the model heard) or spoken audio (what it said)."""
    samples_T: np.ndarray
    """Mono float32 at `AUDIO_RATE`."""


@dataclass(frozen=True)
class RolloutTable:
    """Rollouts of one step, made by `rollout_table`."""

    columns: tuple[str, ...]
    rows: list[list[Any]]
    audio: list[list[Waveform]]
    """By row; empty after the first `MAX_AUDIO_ROWS`."""


def open_trackers(
    names: Sequence[str], run_folder: str | Path, config: Mapping[str, Any], seq: int = 0
) -> tuple[Tracker, ...]:
    """Open trackers by name (`TRACKERS`). `config`: the recipe's configuration as JSON values, which they show.

    A run that is resumed continues the same W&B, Trackio or MLflow run: ids are kept in RUN/trackers.json. `seq` is
    the first line that it will log. Steps after the checkpoint that it continues from are computed again: TensorBoard
    shows their new values, the others, which only append, keep the first ones. Raises ValueError for an unknown name
    and for a library that is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"--log {name}: not a tracker; choose from {', '.join(TRACKERS)}")
    folder = Path(run_folder).resolve()
    ids = read_record(folder / "trackers.json", dict[str, str]) if (folder / "trackers.json").exists() else {}
    ids.setdefault("id", uuid.uuid4().hex[:8])
    trackers: list[Tracker] = []
    for name in dict.fromkeys(names):
        try:
            trackers.append(TRACKERS[name](folder, ids, dict(config), seq))
        except ImportError as error:
            raise ValueError(f"--log {name}: {error}; install it: pip install 'audiorl[loggers]'") from error
    write_json(folder / "trackers.json", ids)
    return tuple(trackers)


class TensorBoard:
    """Scalars, a text panel with the table, audio players."""

    def __init__(self, folder: Path, ids: dict[str, str], config: dict[str, Any], seq: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=seq or None)

    def write(self, row: Mapping[str, Any]) -> None:
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, row["seq"])

    def write_rollouts(self, seq: int, table: RolloutTable) -> None:
        self._writer.add_text("rollouts", _markdown(table), seq)
        for i, waveforms in enumerate(table.audio):
            for name, samples_T in waveforms:
                self._writer.add_audio(f"rollouts/{i} {name}", samples_T[None], seq, AUDIO_RATE)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Metrics, and a wandb.Table with wandb.Audio cells."""

    def __init__(self, folder: Path, ids: dict[str, str], config: dict[str, Any], seq: int):
        import wandb

        self._library: Any = wandb
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        try:
            self._run: Any = wandb.init(
                project=project, name=folder.name, id=ids["id"], resume="allow", dir=folder, config=config
            )
        except wandb.Error as error:
            raise ValueError(f"--log wandb: {error}; log in with 'wandb login', or set WANDB_MODE=offline") from error
        # Each sitting of an offline run has a folder of its own, and wandb does not know what was logged.
        self._logged: Path | None = folder / "wandb" / "next_step"
        self._first = max(self._run.step, int(self._logged.read_text()) if self._logged.is_file() else 0)

    def write(self, row: Mapping[str, Any]) -> None:
        if row["seq"] < self._first:
            return
        self._run.log({**numbers(row), "phase": row.get("phase", "")}, step=row["seq"])
        if self._logged is not None:
            self._logged.parent.mkdir(exist_ok=True)
            self._logged.write_text(str(row["seq"] + 1))

    def write_rollouts(self, seq: int, table: RolloutTable) -> None:
        if seq >= self._first:
            columns, rows = _with_audio(table, self._audio)
            self._run.log({"rollouts": self._library.Table(columns=columns, data=rows)}, step=seq)

    def _audio(self, samples_T: np.ndarray) -> Any:
        return self._library.Audio(samples_T, sample_rate=AUDIO_RATE)

    def close(self) -> None:
        self._run.finish()


class Trackio(Wandb):
    """Metrics, and a trackio.Table with trackio.Audio cells, on this machine: the interface is that of wandb."""

    def __init__(self, folder: Path, ids: dict[str, str], config: dict[str, Any], seq: int):
        import trackio

        self._library = trackio
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{folder.name}-{ids['id']}",
            resume="allow",
            config=config,
            embed=False,
        )
        self._first = self._run._next_step  # after the last one that its database holds
        self._logged = None

    def _audio(self, samples_T: np.ndarray) -> Any:
        pcm_T = (samples_T.clip(-1, 1) * np.iinfo(np.int16).max).astype(np.int16)
        return self._library.Audio(pcm_T, sample_rate=AUDIO_RATE)


class MLflow:
    """Metrics, the configuration, and as artifacts the tables and WAV files."""

    def __init__(self, folder: Path, ids: dict[str, str], config: dict[str, Any], seq: int):
        from mlflow import MlflowClient

        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
        self._first = 0
        if "mlflow" in ids:
            self._id = ids["mlflow"]
            self._client.update_run(self._id, status="RUNNING")
            self._first = int(self._client.get_run(self._id).data.tags.get(NEXT_STEP, 0))
            return
        existing = self._client.get_experiment_by_name(experiment)
        location = None if uri else (folder / "mlflow_artifacts").as_uri()
        where = existing.experiment_id if existing else self._client.create_experiment(experiment, location)
        self._id = ids["mlflow"] = self._client.create_run(where, run_name=folder.name).info.run_id
        self._client.log_dict(self._id, config, "config.json")

    def write(self, row: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric, RunTag

        if row["seq"] < self._first:
            return
        now = int(time.time() * 1000)
        named = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in numbers(row).items()}
        metrics = [Metric(name, value, now, row["seq"]) for name, value in named.items()]
        self._client.log_batch(self._id, metrics, tags=[RunTag(NEXT_STEP, str(row["seq"] + 1))])

    def write_rollouts(self, seq: int, table: RolloutTable) -> None:
        if seq < self._first:
            return
        columns = {name: [row[i] for row in table.rows] for i, name in enumerate(table.columns)}
        self._client.log_table(self._id, columns, f"rollouts/{seq:06d}.json")
        with tempfile.TemporaryDirectory() as folder:
            for i, waveforms in enumerate(table.audio):
                for name, samples_T in waveforms:
                    file = Path(folder) / f"{i} {name}.wav"
                    write_wav(file, samples_T, AUDIO_RATE)
                    self._client.log_artifact(self._id, str(file), f"rollouts/{seq:06d}")

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "mlflow": MLflow}


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line of metrics.jsonl, without its position and time."""
    position = ("seq", "step", "phase", "time")
    return {k: float(v) for k, v in row.items() if k not in position and isinstance(v, int | float)}


def rollout_table(rollouts: Sequence[Rollout], rows: Sequence[Mapping[str, Any]], run_folder: Path) -> RolloutTable:
    """Make the table of the first `MAX_ROWS` rollouts. `rows`: the same rollouts as in rollouts/step_*.jsonl."""
    rows = rows[:MAX_ROWS]
    scores = [row["score"] or {"total": None, "parts": {}} for row in rows]
    parts = list(dict.fromkeys(name for score in scores for name in score["parts"]))
    columns = ("group_id", "index", "prompt", "text", "reward", *(f"reward/{name}" for name in parts), "advantage")
    cells = [
        [row["group_id"], row["index"], row["sample"]["prompt"], row["text"], score["total"]]
        + [score["parts"].get(name) for name in parts]
        + [row["advantage"]]
        for row, score in zip(rows, scores, strict=True)
    ]
    return RolloutTable(
        columns,
        cells,
        [_waveforms(r, row, run_folder) for r, row in zip(rollouts[:MAX_AUDIO_ROWS], rows, strict=False)],
    )


def _waveforms(rollout: Rollout, row: Mapping[str, Any], run_folder: Path) -> list[Waveform]:
    clips = [clip.load(AUDIO_RATE) for clip in rollout.sample.audio]
    waveforms = [Waveform("input audio", np.concatenate(clips))] if clips else []
    if row.get("spoken_audio"):
        spoken = AudioClip(path=str(run_folder / row["spoken_audio"]["path"]))
        waveforms.append(Waveform("spoken audio", spoken.load(AUDIO_RATE)))
    return waveforms


def _with_audio(table: RolloutTable, audio: Any) -> tuple[list[Any], list[list[Any]]]:
    """Columns and rows with a column of `audio(samples_T)` for each kind of audio that the table has."""
    names = list(dict.fromkeys(waveform.name for waveforms in table.audio for waveform in waveforms))
    players = [{w.name: audio(w.samples_T) for w in waveforms} for waveforms in table.audio]
    players += [{}] * (len(table.rows) - len(players))
    rows = [[*row, *(player.get(name) for name in names)] for row, player in zip(table.rows, players, strict=True)]
    return [*table.columns, *names], rows


def _markdown(table: RolloutTable) -> str:
    def cell(value: Any) -> str:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        return text.replace("|", "\\|").replace("\n", "<br>")

    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)
