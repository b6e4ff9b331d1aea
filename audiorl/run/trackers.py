"""Experiment trackers: TensorBoard, Weights & Biases, Trackio and MLflow, one adapter each.

Every tracker gets the curve of every metric, at the line number (`seq`) of metrics.jsonl, a table of the rollouts that
are written, with audio players, and each evaluation of eval.json when it has ended, as `eval/NAME/METRIC` and by task
`eval/NAME/METRIC/TASK`. Its table of runs has the configuration and the evaluations: config and summary of W&B, config
of Trackio, params and metrics of MLflow, hparams of TensorBoard. Which trackers a run has is not part of its recipe.

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
from typing import Any

import numpy as np

from audiorl.audio import AudioClip, write_wav
from audiorl.errors import install
from audiorl.run.records import flat, read_record, write_json
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


@dataclass(frozen=True)
class RolloutTable:
    """Rollouts of one step, made by `rollout_table`."""

    columns: tuple[str, ...]
    rows: list[list[Any]]
    audio: list[dict[str, np.ndarray]]
    """By row "input audio" (what the model heard) and "spoken audio", mono float32 [T] at `AUDIO_RATE`; empty after the
    first `MAX_AUDIO_ROWS`."""


class Tracker:
    """Shows a run's metrics and rollouts, from the line `first` of metrics.jsonl on; those before are there already."""

    first = 0
    folder: Path

    def write(self, row: Mapping[str, Any]) -> None:
        """Log the numbers of one line of metrics.jsonl."""
        if row["seq"] >= self.first:
            self.log(row, numbers(row))

    def write_rollouts(self, seq: int, table: RolloutTable) -> None:
        """Log the rollouts of one step."""
        if seq >= self.first:
            self.log_rollouts(seq, table)

    def write_evaluation(self, seq: int, name: str, entry: Mapping[str, Any]) -> None:
        """Log an entry of eval.json before line `seq`: with the last line, so that a resumed run still logs its own."""
        self.log_evaluation(max(seq - 1, 0), evaluated({name: entry}))

    def log(self, row: Mapping[str, Any], metrics: dict[str, float]) -> None:
        raise NotImplementedError

    def log_rollouts(self, seq: int, table: RolloutTable) -> None:
        raise NotImplementedError

    def log_evaluation(self, seq: int, metrics: dict[str, float]) -> None:
        raise NotImplementedError

    def close(self, evaluations: Mapping[str, Any]) -> None:
        """Write the summary, with all of eval.json and the report if there is one, and send what is still held."""
        raise NotImplementedError


def open_trackers(
    names: Sequence[str], run_folder: str | Path, config: Mapping[str, Any], seq: int = 0
) -> tuple[Tracker, ...]:
    """Open trackers by name (`TRACKERS`). `config`: the recipe's configuration as JSON values, which they show.

    A run that is resumed continues the same W&B, Trackio or MLflow run: ids are kept in RUN/trackers.json. `seq` is
    the first line that it will log. Of steps that are computed again TensorBoard shows the new values, the others,
    which only append, keep the first ones.
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
            raise ValueError(f"--log {name}: {error}; install it: {install('loggers')}") from error
    write_json(folder / "trackers.json", ids)
    return tuple(trackers)


class TensorBoard(Tracker):
    """Scalars, a text panel with the table, audio players."""

    def __init__(self, folder: Path, ids: dict[str, str], config: dict[str, Any], seq: int):
        from torch.utils.tensorboard import SummaryWriter

        self._config, self.folder = config, folder / "tensorboard"
        self._writer = SummaryWriter(str(self.folder), purge_step=seq)

    def write_evaluation(self, seq: int, name: str, entry: Mapping[str, Any]) -> None:
        """Log an entry of eval.json before line `seq`, from which on a resumed run purges what is there."""
        self.log_evaluation(seq - 1, evaluated({name: entry}))

    def log(self, row: Mapping[str, Any], metrics: dict[str, float]) -> None:
        self.log_evaluation(row["seq"], metrics)

    def log_rollouts(self, seq: int, table: RolloutTable) -> None:
        def cell(value: Any) -> str:
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            return text.replace("|", "\\|").replace("\n", "<br>")

        lines = [table.columns, ["---"] * len(table.columns), *table.rows]
        self._writer.add_text("rollouts", "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines), seq)
        for i, waves in enumerate(table.audio):
            for name, samples_T in waves.items():
                self._writer.add_audio(f"rollouts/{i} {name}", samples_T[None], seq, AUDIO_RATE)

    def log_evaluation(self, seq: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, seq)

    def close(self, evaluations: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._writer.close()
        # Not add_hparams, which makes a second run. TensorBoard keeps the first of such records, so that of an earlier
        # sitting, which knew fewer evaluations, is removed.
        for earlier in self.folder.glob("*.hparams"):
            earlier.unlink()
        writer = SummaryWriter(str(self.folder), filename_suffix=".hparams")
        for summary in hparams(flat(self._config), evaluated(evaluations)):
            writer._get_file_writer().add_summary(summary)
        writer.close()


class Wandb(Tracker):
    """Metrics, and a wandb.Table with wandb.Audio cells."""

    def __init__(self, folder: Path, ids: dict[str, str], config: dict[str, Any], seq: int):
        import wandb

        self._library: Any = wandb
        self.folder = folder
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        try:
            self._run: Any = wandb.init(
                project=project, name=folder.name, id=ids["id"], resume="allow", dir=folder, config=config
            )
        except wandb.Error as error:
            raise ValueError(f"--log wandb: {error}; log in with 'wandb login', or set WANDB_MODE=offline") from error
        # Each sitting of an offline run has a folder of its own, and wandb does not know what was logged.
        self._logged: Path | None = folder / "wandb" / "next_step"
        self.first = max(self._run.step, int(self._logged.read_text()) if self._logged.is_file() else 0)

    def log(self, row: Mapping[str, Any], metrics: dict[str, float]) -> None:
        self._run.log({**metrics, "phase": row.get("phase", "")}, step=row["seq"])
        if self._logged is not None:
            self._logged.parent.mkdir(exist_ok=True)
            self._logged.write_text(str(row["seq"] + 1))

    def log_rollouts(self, seq: int, table: RolloutTable) -> None:
        names = list(dict.fromkeys(name for waves in table.audio for name in waves))
        players = [{name: self._audio(wave_T) for name, wave_T in waves.items()} for waves in table.audio]
        players += [{}] * (len(table.rows) - len(players))
        rows = [[*row, *(player.get(name) for name in names)] for row, player in zip(table.rows, players, strict=True)]
        self._run.log({"rollouts": self._library.Table(columns=[*table.columns, *names], data=rows)}, step=seq)

    def _audio(self, samples_T: np.ndarray) -> Any:
        return self._library.Audio(samples_T, sample_rate=AUDIO_RATE)

    def log_evaluation(self, seq: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=seq)

    def close(self, evaluations: Mapping[str, Any]) -> None:
        self._run.summary.update(evaluated(evaluations))
        if (self.folder / "report.html").is_file():
            self._run.summary["report"] = self._library.Html(self.folder / "report.html", inject=False)
        self._run.finish()


class Trackio(Wandb):
    """Metrics, and a trackio.Table with trackio.Audio cells, on this machine: the interface is that of wandb."""

    def __init__(self, folder: Path, ids: dict[str, str], config: dict[str, Any], seq: int):
        import trackio

        self._library = trackio
        project, name = os.environ.get("TRACKIO_PROJECT", PROJECT), f"{folder.name}-{ids['id']}"
        self._run = trackio.init(project=project, name=name, resume="allow", config=config, embed=False)
        self.first = self._run._next_step  # after the last one that its database holds
        self._logged = None

    def close(self, evaluations: Mapping[str, Any]) -> None:
        self._run.finish()  # it has no summary: its table shows the last value of each metric

    def _audio(self, samples_T: np.ndarray) -> Any:
        pcm_T = (samples_T.clip(-1, 1) * np.iinfo(np.int16).max).astype(np.int16)
        return self._library.Audio(pcm_T, sample_rate=AUDIO_RATE)


class MLflow(Tracker):
    """Metrics, the configuration, and as artifacts the tables and WAV files."""

    def __init__(self, folder: Path, ids: dict[str, str], config: dict[str, Any], seq: int):
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.folder = folder
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
        if "mlflow" in ids:
            self._id = ids["mlflow"]
            self._client.update_run(self._id, status="RUNNING")
            self.first = int(self._client.get_run(self._id).data.tags.get(NEXT_STEP, 0))
            return
        existing = self._client.get_experiment_by_name(experiment)
        location = None if uri else (folder / "mlflow_artifacts").as_uri()
        where = existing.experiment_id if existing else self._client.create_experiment(experiment, location)
        self._id = ids["mlflow"] = self._client.create_run(where, run_name=folder.name).info.run_id
        self._client.log_dict(self._id, config, "config.json")
        params = [Param(_mlflow_name(name), str(value)[:6000]) for name, value in flat(config).items()]
        for start in range(0, len(params), 100):  # as many as it takes at once; of each 6000 letters
            self._client.log_batch(self._id, params=params[start : start + 100])

    def log(self, row: Mapping[str, Any], metrics: dict[str, float]) -> None:
        from mlflow.entities import RunTag

        self.log_evaluation(row["seq"], metrics, [RunTag(NEXT_STEP, str(row["seq"] + 1))])

    def log_evaluation(self, seq: int, metrics: dict[str, float], tags: Sequence[Any] = ()) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        named = {_mlflow_name(name): value for name, value in metrics.items()}
        self._client.log_batch(self._id, [Metric(name, value, now, seq) for name, value in named.items()], tags=tags)

    def log_rollouts(self, seq: int, table: RolloutTable) -> None:
        columns = {name: [row[i] for row in table.rows] for i, name in enumerate(table.columns)}
        self._client.log_table(self._id, columns, f"rollouts/{seq:06d}.json")
        with tempfile.TemporaryDirectory() as folder:
            for i, waves in enumerate(table.audio):
                for name, samples_T in waves.items():
                    file = Path(folder) / f"{i} {name}.wav"
                    write_wav(file, samples_T, AUDIO_RATE)
                    self._client.log_artifact(self._id, str(file), f"rollouts/{seq:06d}")

    def close(self, evaluations: Mapping[str, Any]) -> None:
        if (self.folder / "report.html").is_file():
            self._client.log_artifact(self._id, str(self.folder / "report.html"))
        self._client.set_terminated(self._id)


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "mlflow": MLflow}


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


def evaluated(entries: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of entries of eval.json as eval/NAME/METRIC, and those by task as eval/NAME/METRIC/TASK."""
    results: dict[str, float] = {}
    for name, entry in entries.items():
        for task, values in {"": entry, **(entry.get("by_task") or {})}.items():
            for metric, value in numbers(values).items():
                if metric not in ("n", "low", "high"):
                    results["/".join(filter(None, ("eval", name, metric, task)))] = value
    return results


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
    audio = []
    for rollout, row in zip(rollouts[:MAX_AUDIO_ROWS], rows, strict=False):
        clips = [clip.load(AUDIO_RATE) for clip in rollout.sample.audio]
        waves = {"input audio": np.concatenate(clips)} if clips else {}
        if row.get("spoken_audio"):
            spoken = AudioClip(path=str(run_folder / row["spoken_audio"]["path"]))
            waves["spoken audio"] = spoken.load(AUDIO_RATE)
        audio.append(waves)
    return RolloutTable(columns, cells, audio)
