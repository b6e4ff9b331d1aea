"""The run folder: what a run wrote, how far it is, and how it continues (docs/reference/data.md lists its files).

A run is a sequence of named phases (say sft, before, grpo, after). A finished phase is never done again; a training
phase continues from its last checkpoint; what was logged after that checkpoint is dropped and written again.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

import audiorl
from audiorl.audio import write_wav
from audiorl.config import to_json
from audiorl.data.rollout_rows import rollout_row
from audiorl.data.rows import steps_in, write_json_lines
from audiorl.protocols import SpeechDecoder
from audiorl.run.checkpoint import (
    META,
    Checksums,
    Saved,
    begin_checkpoint,
    commit_checkpoint,
    load_into,
    partial_folder,
    save_checkpoint,
    verify,
)
from audiorl.run.metrics_log import MetricsLog
from audiorl.run.records import RunConfig, RunState, TrainerMeta, locked, read_record, write_json
from audiorl.types import Rollout

if TYPE_CHECKING:
    from torch import Tensor

    from audiorl.run.trackers import Tracker

CONTROL = "control"
"""How the names of phases begin that train what the result is compared with."""
KEPT_CHECKPOINTS = 2
"""Of each phase, where the recipe has no option `keep_checkpoints`."""
VERSIONS = ("torch", "transformers", "peft", "numpy")


def check_run_folder(folder: Path) -> None:
    """Raise ValueError for a folder without the files of a run."""
    if not (folder / "state.json").is_file() or not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: not a run folder (config.json and state.json are not both there)")


def newest_checkpoint(model: str | Path, phase: str | None = None) -> str:
    """Return the newest checkpoint of a run folder, which stderr names: of `phase`, else of what the run trained.

    That is the last phase which is no control, by name: a phase `control…` trains what the result is compared with.
    Whatever is no run folder is returned as it is. Raises ValueError for a run without such a checkpoint, naming those
    that it has, and for a phase of anything but a run.
    """
    folder = Path(model)
    if not (folder / "state.json").is_file():
        if phase is not None:
            raise ValueError(f"--phase {phase}: {model} is no run folder; leave --phase out, or give the run's folder")
        return str(model)
    check_run_folder(folder)
    state = read_record(folder / "state.json", RunState)
    found = {name: folder / path for name, path in state.checkpoints.items() if (folder / path / META).is_file()}
    if not found:
        raise ValueError(f"{folder}: the run has no checkpoint yet; wait for the first one, or name a model")
    wanted = [name for name in found if (name == phase if phase else not name.startswith(CONTROL))]
    listed = ", ".join(found)
    if not wanted:
        what = f"no checkpoint of a phase {phase!r}" if phase else "only controls have checkpoints"
        raise ValueError(f"{folder}: {what}; choose by --phase: {listed}")
    name = max(wanted, key=lambda name: read_record(found[name] / META, TrainerMeta).seq)
    begun = [other for other in state.rollout_offsets if other not in found and not phase]
    notes = [f"phases: {listed}"] * (len(found) > 1) + [f"no checkpoint of {other} yet" for other in begun]
    print(f"{folder}: {found[name].relative_to(folder)}" + f" ({'; '.join(notes)})" * bool(notes), file=sys.stderr)
    return str(found[name])


class _Saving(NamedTuple):
    """A checkpoint that is being written, and how far the run was when that began."""

    folder: Path
    meta: TrainerMeta


class ComputeTime(NamedTuple):
    """How long something was computed."""

    seconds: float
    unit: Literal["cpu", "wall"]
    """cpu: CPU seconds of all threads and processes, which a busy machine does not change. wall: where a GPU computed.
    """


class StopRequest:
    """Remembers whether a signal asked to stop while `awaited` was entered. In the main thread only."""

    def __init__(self) -> None:
        self.received = False

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Remember the first SIGINT or SIGTERM inside the block; the second one raises KeyboardInterrupt."""

        def handler(signum: int, frame: FrameType | None) -> None:
            if self.received:
                raise KeyboardInterrupt
            self.received = True
            os.write(2, b"audiorl: stopping after this step; once more stops at once\n")  # print is not reentrant

        before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for s, previous in before.items():
                signal.signal(s, previous)


class Run:
    """One run folder, open for writing until `close`, or until the process ends.

    Opening it locks the folder, then drops what was logged after the last checkpoint. Raises ValueError and changes
    nothing where it is open already, in this process or another. Readers of the files need no `Run`.
    """

    def __init__(self, folder: Path):
        self.dir = folder
        self._closed = False
        self._stop = StopRequest()
        self._saving: _Saving | None = None
        self._trackers: tuple[Tracker, ...] = ()
        with ExitStack() as opened:
            opened.enter_context(locked(folder))
            self._state = read_record(folder / "state.json", RunState)
            for path in self._state.checkpoints.values():
                if "\0" in path or not (folder / path).resolve().is_relative_to(folder.resolve()):
                    outside = f"the checkpoint {path!r} lies outside of the run folder"
                    raise ValueError(f"{folder}/state.json: edited: {outside}")
                meta = folder / path / META
                if meta.is_file() and (logged := read_record(meta, TrainerMeta).seq) > self._state.seq:
                    earlier = f"seq is {self._state.seq}, but {path} was saved after {logged} lines of metrics"
                    raise ValueError(f"{folder}/state.json: edited or damaged: {earlier}; restore the file")
            self._log = MetricsLog(folder / "metrics.jsonl", self._state.seq)
            for partial in folder.glob("checkpoints/*/.*.partial"):  # of a process that ended while it saved
                shutil.rmtree(partial, ignore_errors=True)
            self._seq = self._state.seq
            self._lock = opened.pop_all()

    @classmethod
    def create(cls, out: str | Path, recipe: str, argv: Sequence[str], config: Any) -> Run:
        """Make a new run folder and open it. Raises ValueError where something is there already."""
        folder = Path(out).resolve()
        if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
            raise ValueError(f"{out} exists already; choose another --out, or continue it with 'audiorl resume {out}'")
        partial = folder.with_name(folder.name + ".partial")  # a run folder is there whole or not at all
        shutil.rmtree(partial, ignore_errors=True)
        # A plain checkout on PYTHONPATH has no metadata of a package audiorl.
        versions = {"python": platform.python_version(), "audiorl": audiorl.__version__}
        versions |= {name: version(name) for name in VERSIONS}
        record = RunConfig(recipe, list(argv), to_json(config), versions)
        try:
            for name in ("rollouts", "checkpoints", "eval"):
                (partial / name).mkdir(parents=True)
            write_json(partial / "config.json", msgspec.to_builtins(record))
            write_json(partial / "state.json", msgspec.to_builtins(RunState(0, {}, {}, {})))
            partial.rename(folder)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return cls(Path(out))

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Open the folder of a run to continue it."""
        check_run_folder(Path(folder))
        return cls(Path(folder))

    def track(self, names: Sequence[str]) -> None:
        """Log to these trackers (`audiorl.run.trackers.TRACKERS`) too, until `close`."""
        if names:
            from audiorl.run.trackers import open_trackers

            config = read_record(self.dir / "config.json", RunConfig).config
            self._trackers = open_trackers(names, self.dir, config, self._seq)

    def close(self) -> None:
        """Close the metrics log and the trackers, which send what they still hold, and unlock the folder."""
        self._closed = True
        self.cancel_save()  # the writing failed, on a full disk perhaps
        with self._lock:
            self._log.close()
            for tracker in self._trackers:
                tracker.close(self._evaluations())
            self._trackers = ()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def discard_if_empty(self) -> None:
        """Remove the folder when nothing that took time is in it: no step, no checkpoint, no finished phase."""
        state = self._state
        if not (self._seq or state.finished or state.checkpoints or any((self.dir / "checkpoints").rglob("*"))):
            self.close()  # before: trackers write what they still hold
            shutil.rmtree(self.dir)

    # -- phases ----------------------------------------------------------------------------------------------------

    def finished(self, phase: str) -> bool:
        """Tell whether the phase has ended."""
        return phase in self._state.finished

    def result(self, phase: str) -> Any:
        """Return what a finished phase ended with."""
        return self._state.finished[phase]

    def finish(self, phase: str, result: Any = None) -> None:
        """Note that the phase has ended, with a result that JSON can hold."""
        self._state.finished[phase] = result
        self._write_state()
        if self._trackers and (entry := self._evaluations().get(phase)):
            for tracker in self._trackers:
                tracker.write_evaluation(self._seq, phase, entry)

    def seconds(self, phase: str) -> float:
        """Return the wall-clock seconds spent in the steps of a phase, over all sittings."""
        return float(self._state.seconds.get(phase, 0.0))

    def compute_time(self, phase: str) -> ComputeTime:
        """Return what the steps of a phase took so far: CPU seconds if all ran on CPUs, else wall-clock seconds."""
        cpu = self._state.cpu_seconds.get(phase)
        return ComputeTime(self.seconds(phase), "wall") if cpu is None else ComputeTime(cpu, "cpu")

    def add_seconds(self, phase: str, seconds: float, cpu_seconds: float | None = None) -> None:
        """Count a step of a phase. cpu_seconds: None where a GPU took part."""
        cpu_before = 0.0 if phase not in self._state.seconds else self._state.cpu_seconds.pop(phase, None)
        self._state.seconds[phase] = self.seconds(phase) + seconds
        if cpu_before is not None and cpu_seconds is not None:
            self._state.cpu_seconds[phase] = cpu_before + cpu_seconds

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def last_checkpoint(self, phase: str) -> tuple[int, Path | None]:
        """Return the steps done and the folder of the phase's last checkpoint, verified; (0, None) at its start.

        Where that was removed, the run goes back to the one before, and to what was logged until then.
        """
        if phase not in self._state.checkpoints:
            return 0, None
        lost = self.checkpoint(phase)
        if not lost.is_dir():
            left = [*steps_in(lost.parent).values()]
            if not left:
                raise ValueError(f"{lost} is missing, and there is no checkpoint before it; start the run again")
            print(f"{phase}: {lost.name} is gone; going on from {left[-1].name}", flush=True)
            self._state.checkpoints[phase] = str(left[-1].relative_to(self.dir))
            meta = read_record(left[-1] / META, TrainerMeta)
            self._state, self._seq = self._state_at(phase, meta), meta.seq
            self._log.close()
            self._log = MetricsLog(self.dir / "metrics.jsonl", self._seq)
            self._write_state()
        folder = self.checkpoint(phase)
        verify(folder)
        return read_record(folder / META, TrainerMeta).step, folder

    def load_result(self, phase: str, model: Saved) -> None:
        """Copy the weights that a finished training phase ended with into `model`."""
        load_into(self.checkpoint(phase), model)

    def has_checkpoint(self, phase: str) -> bool:
        """Tell whether a checkpoint of the phase was completed."""
        return phase in self._state.checkpoints

    def checkpoint(self, phase: str) -> Path:
        """Return the folder of the phase's last checkpoint."""
        return self.dir / self._state.checkpoints[phase]

    def model(self, phase: str, name: str) -> Path:
        """Return where a model of its own lies, checkpoints/PHASE/NAME."""
        return self.dir / "checkpoints" / phase / name

    def keep_model(self, phase: str, name: str, model: Saved) -> str:
        """Write a model of its own unless it is there. Returns its folder as every process finds it."""
        folder = self.model(phase, name)
        if not folder.is_dir():
            self.save_model(phase, name, model)
        return str(folder.resolve())

    def save_model(self, phase: str, name: str, model: Saved) -> None:
        """Write a model folder of its own."""
        save_checkpoint(self.model(phase, name), model, {}, {"phase": phase})

    def begin_save(self, phase: str, step: int) -> Path:
        """Begin a checkpoint after `step` of the run as it is now. Returns the empty folder for its files."""
        folder = self.dir / "checkpoints" / phase / f"step_{step:06d}"
        meta = TrainerMeta(phase, step, self._seq, self.seconds(phase), self._state.cpu_seconds.get(phase))
        partial = begin_checkpoint(folder)
        self._saving = _Saving(folder, meta)
        return partial

    def cancel_save(self) -> None:
        """Drop the checkpoint that was begun; the one before it remains."""
        if self._saving is not None:
            shutil.rmtree(partial_folder(self._saving.folder), ignore_errors=True)
            self._saving = None

    @property
    def is_saving(self) -> bool:
        """True from the begin of a checkpoint to its end."""
        return self._saving is not None

    def end_save(self, files: Checksums) -> Path:
        """Make the checkpoint visible, of which all `files` are on the disk. Returns its folder."""
        assert self._saving is not None, "begin_save first"
        folder, meta = self._saving
        commit_checkpoint(folder, files, msgspec.to_builtins(meta))
        self._saving = None
        self._log.sync()
        self._state.checkpoints[meta.phase] = str(folder.relative_to(self.dir))
        # What was logged since belongs to steps that a resumed run repeats.
        self._write_state(self._state_at(meta.phase, meta))
        kept = read_record(self.dir / "config.json", RunConfig).config.get("keep_checkpoints", KEPT_CHECKPOINTS)
        for old in [*steps_in(folder.parent).values()][:-kept]:
            shutil.rmtree(old)
        return folder

    def _state_at(self, phase: str, meta: TrainerMeta) -> RunState:
        """Return the state with lines and seconds as they were when a checkpoint of the phase was begun."""
        state = msgspec.structs.replace(self._state, seq=meta.seq)
        if meta.seconds is not None:
            state.seconds = state.seconds | {phase: meta.seconds}
            state.cpu_seconds = {name: s for name, s in state.cpu_seconds.items() if name != phase}
            if meta.cpu_seconds is not None:
                state.cpu_seconds[phase] = meta.cpu_seconds
        return state

    @property
    def asked_to_stop(self) -> bool:
        return self._stop.received

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the first SIGINT or SIGTERM only ask to stop after the current step; the second one stops at once."""
        with self._stop.awaited():
            yield

    # -- what is written -------------------------------------------------------------------------------------------

    def log(self, phase: str, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line to metrics.jsonl, for the trackers too."""
        row = self._log.write({"seq": self._seq, "phase": phase, "step": step, **metrics})
        for tracker in self._trackers:
            tracker.write(row)
        self._seq += 1

    def write_rollouts(
        self,
        phase: str,
        step: int,
        rollouts: Sequence[Rollout],
        advantages: Sequence[float],
        speech_decoder: SpeechDecoder | None = None,
        numbers: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Write rollouts/step_N.jsonl; with a `speech_decoder` also their speech as wav files, which the rows name.

        numbers: of each rollout the numbers of its tokens, see `rollout_row`. N counts the steps of all phases: a
        second phase continues after the last recorded step of the first.
        """
        offsets = self._state.rollout_offsets  # kept in state.json: a resumed phase writes the same files
        if phase not in offsets:
            offsets[phase] = max(steps_in(self.dir / "rollouts", ".jsonl"), default=0)
            self._write_state()
        number = offsets[phase] + step
        path = self.dir / "rollouts" / f"step_{number:06d}.jsonl"
        of_tokens = numbers or [{}] * len(rollouts)
        rows: list[dict[str, Any]] = []
        for rollout, advantage, tokens in zip(rollouts, advantages, of_tokens, strict=True):
            row = rollout_row(rollout, number, advantage, self.dir, tokens)
            wav = None if speech_decoder is None else speech_decoder.waveform(rollout)
            if speech_decoder is not None and wav is not None:
                spoken_audio = Path("rollouts") / path.stem / f"{len(rows):04d}.wav"
                write_wav(self.dir / spoken_audio, wav, speech_decoder.sample_rate)
                row["spoken_audio"] = {"path": str(spoken_audio)}
            rows.append(row)
        write_json_lines(path, rows)
        if self._trackers:
            from audiorl.run.trackers import rollout_table

            table = rollout_table(rollouts, rows, self.dir)
            for tracker in self._trackers:
                tracker.write_rollouts(self._seq, table)

    def write_eval(
        self, name: str, results: Mapping[str, Any], rollouts: Sequence[Rollout], columns: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write eval/NAME.jsonl and an entry of eval.json.

        columns: of each rollout if it is `correct`, its `parts`, and what else the row is to hold.
        """
        rows = []
        for r, column in zip(rollouts, columns, strict=True):
            sample = rollout_row(r, 0, 0.0)["sample"]
            row = {"id": r.sample.id, "prompt": sample["prompt"], "references": list(r.sample.references)}
            rows.append({**row, "text": r.text, **column, "task": r.sample.task, "audio": sample["audio"]})
        write_json_lines(self.dir / "eval" / f"{name}.jsonl", rows)
        self.write_result(name, results)

    def write_result(self, name: str, results: Mapping[str, Any]) -> None:
        """Set one entry of eval.json."""
        write_json(self.dir / "eval.json", self._evaluations() | {name: dict(results)})

    def _evaluations(self) -> dict[str, Any]:
        path = self.dir / "eval.json"
        return read_record(path, dict[str, Any]) if path.exists() else {}

    def _write_state(self, state: RunState | None = None) -> None:
        assert not self._closed, f"{self.dir}: closed, another process may write here"
        self._state.seq = self._seq
        write_json(self.dir / "state.json", msgspec.to_builtins(state or self._state))
