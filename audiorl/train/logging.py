"""What a run tells while it goes: metrics.jsonl, optional loggers, and the progress display.

One line of metrics.jsonl is one JSON object: "seq" (an integer that grows by one per line, over all phases), "step",
"phase", "time" (seconds since the run started) and any number of named values. Values that JSON cannot hold (nan, inf)
are written as the strings "nan", "inf" and "-inf", and `read_metrics` turns them back, so that a run that diverged
shows it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_NOT_SCALARS = ("seq", "step", "phase", "time")


# ---------------------------------------------------------------------------------------------------- reading back


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that was cut off while being written is left out.

    Any other line that is not a JSON object is a ValueError with file and row.
    """
    return [row for _, row in _rows(Path(path))]


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, oldest first, with nan and inf as floats again."""
    return [
        {k: _NOT_FINITE.get(v, v) if isinstance(v, str) and k != "phase" else v for k, v in row.items()}
        for row in read_jsonl(path)
    ]


def truncate_from(path: str | Path, seq: int) -> int:
    """Drop the lines that a resumed run will write again: keep those with "seq" < `seq`. Returns how many were dropped.

    The file is replaced in one move, so a crash leaves either the old or the new one. No `MetricsLog` may have it open.
    """
    path = Path(path)
    if not path.exists():
        return 0
    kept: list[str] = []
    dropped = 0
    for number, (line, row) in enumerate(_rows(path), 1):
        if not isinstance(row.get("seq"), int):
            raise ValueError(f'{path}:{number}: no integer "seq", cannot tell whether to keep this line')
        if row["seq"] < seq:
            kept.append(line)
        else:
            dropped += 1
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return dropped


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line, object) pairs. Only an unterminated last line may be broken; it is skipped."""
    text = path.read_bytes().decode("utf-8", errors="replace")
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        torn = number == len(lines)
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if torn:
                return
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            if torn:
                return
            raise ValueError(f"{path}:{number}: expected a JSON object, found {type(row).__name__}")
        yield line, row


# --------------------------------------------------------------------------------------------------------- writing


class Sink(Protocol):
    """Somewhere else that metrics go to."""

    def write(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """Appends to metrics.jsonl, flushed line by line, and hands each line on to the sinks.

    Opening an existing file repairs a torn last line and continues its clock: "time" goes on from the last line.

        with MetricsLog(run / "metrics.jsonl") as log:
            log.write({"seq": 0, "phase": "grpo", "step": 1, "reward/mean": 0.25})
    """

    def __init__(self, path: str | Path, sinks: tuple[Sink, ...] = ()):
        self.path = Path(path)
        self.sinks = sinks
        self.path.parent.mkdir(parents=True, exist_ok=True)
        earlier = 0.0
        if self.path.exists():
            _repair_tail(self.path)
            earlier = max((float(r.get("time", 0.0)) for r in read_metrics(self.path)), default=0.0)
        self._started = time.monotonic() - earlier
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line. "time" is filled in when absent; one-element tensors and NumPy numbers become floats."""
        plain = {key: _plain(key, value) for key, value in row.items()}
        plain.setdefault("time", round(time.monotonic() - self._started, 3))
        encoded = {key: _encode(value) for key, value in plain.items()}
        self._file.write(json.dumps(encoded, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()
        for sink in self.sinks:
            sink.write(plain)

    def close(self) -> None:
        self._file.close()
        for sink in self.sinks:
            sink.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _plain(key: str, value: Any) -> str | int | float | bool | None:
    if hasattr(value, "item"):
        shape = tuple(getattr(value, "shape", ()))
        if math.prod(shape) != 1:
            raise ValueError(f"metric {key!r}: expected one number, got shape {shape}")
        value = value.item()
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(f"metric {key!r}: expected a number or a string, got {type(value).__name__}")


def _encode(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _repair_tail(path: Path) -> None:
    """Make the file end with a whole line, so that the next one starts on its own."""
    content = path.read_bytes()
    if not content or content.endswith(b"\n"):
        return
    start = content.rfind(b"\n") + 1
    try:
        whole = isinstance(json.loads(content[start:]), dict)
    except ValueError:
        whole = False
    with path.open("r+b") as file:
        if whole:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(start)


class TensorBoardSink:
    """Writes every number of a line as a TensorBoard scalar at step "seq" (or "step" when there is no "seq")."""

    def __init__(self, folder: str | Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError('TensorBoard logging needs: pip install "audiorl[loggers]"') from error
        self._writer = SummaryWriter(str(folder))

    def write(self, row: Mapping[str, Any]) -> None:
        for key, value in _scalars(row).items():
            self._writer.add_scalar(key, value, _position(row))

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Logs every line to Weights & Biases; `settings` go to `wandb.init` (project, name, config, mode, …)."""

    def __init__(self, **settings: Any):
        try:
            import wandb
        except ImportError as error:
            raise ImportError('Weights & Biases logging needs: pip install "audiorl[loggers]"') from error
        self._run = wandb.init(**settings)

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log({**_scalars(row), "phase": row.get("phase", "")}, step=_position(row))

    def close(self) -> None:
        self._run.finish()


def _position(row: Mapping[str, Any]) -> int:
    return int(row["seq"] if "seq" in row else row["step"])


def _scalars(row: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in row.items() if k not in _NOT_SCALARS and isinstance(v, int | float)}


# --------------------------------------------------------------------------------------------------------- display

# (label, metric names in order of preference, format)
_SHOWN = (
    ("loss", ("loss", "sft/loss", "preference/loss", "reward_model/loss", "process_reward/loss"), "{:.3f}"),
    ("right", ("preference/accuracy", "reward_model/accuracy", "process_reward/accuracy"), "{:.1%}"),
    ("reward", ("reward/mean",), "{:.3f}"),
    ("acc", ("reward/accuracy",), "{:.1%}"),
    ("held-out", ("eval/accuracy",), "{:.1%}"),
    ("KL", ("kl",), "{:.4f}"),
    ("tok/s", ("tokens_per_s",), "{:.0f}"),
)


class Progress:
    """Shows how a phase goes: a live line on a terminal, a plain line every `interval` seconds elsewhere.

    `step` counts finished steps, so the last update of a phase has `step == total`. A value that a step does not
    report (held-out accuracy is not measured every step) keeps its last reading. `max_seconds` from now may end the
    phase before its last step.

        with Progress("grpo", total=200) as progress:
            progress.update(1, {"reward/mean": 0.25, "kl": 0.001})
    """

    def __init__(
        self,
        phase: str,
        total: int,
        start: int = 0,
        *,
        interval: float = 5.0,
        max_seconds: float | None = None,
        console: Console | None = None,
    ):
        self.phase, self.total, self.start = phase, total, start
        self.interval = interval
        self.max_seconds = max_seconds
        self.console = console or Console()
        self._step = start
        self._last: dict[str, float] = {}
        self._live: Live | None = None
        self._began = self._printed = -math.inf

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        if self.console.is_terminal:
            self._live = Live(self._render(), console=self.console, refresh_per_second=4)
            self._live.__enter__()
        return self

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._step = step
        self._last.update({k: float(v) for k, v in metrics.items() if isinstance(v, int | float)})
        if self._live is not None:
            self._live.update(self._render())
        elif step >= self.total or time.monotonic() - self._printed >= self.interval:
            self._printed = time.monotonic()
            self.console.print(self.line(), highlight=False, markup=False, soft_wrap=True)

    def line(self) -> str:
        """The state in one plain line: ``grpo 12/200  reward 0.250  KL 0.0010  left 3:20``."""
        left = self._left()
        parts = [f"{self.phase} {self._count()}", *(f"{label} {value}" for label, value in self._values())]
        return "  ".join(parts + ([f"left {left}"] if left else []))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, tb)

    def _values(self) -> Iterator[tuple[str, str]]:
        for label, names, form in _SHOWN:
            found = next((self._last[n] for n in names if n in self._last), None)
            if found is not None:
                yield label, form.format(found)

    def _count(self) -> str:
        return f"{self._step}/{self.total}" if self.max_seconds is None else str(self._step)

    def _left(self) -> str:
        """Time left at the pace since `start`, or of `max_seconds`; empty before the first step and after the last."""
        done = self._step - self.start
        if done <= 0 or self._step >= self.total:
            return ""
        elapsed = time.monotonic() - self._began
        seconds = elapsed / done * (self.total - self._step)
        if self.max_seconds is not None:
            seconds = min(seconds, max(self.max_seconds - elapsed, 0.0))
        hours, rest = divmod(round(seconds), 3600)
        return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"

    def _share(self) -> float:
        """How much of the phase is done, by steps or by time."""
        share = self._step / max(self.total, 1)
        if self.max_seconds:
            share = max(share, (time.monotonic() - self._began) / self.max_seconds)
        return min(share, 1.0)

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 2))
        left = self._left()
        table.add_row(
            f"[bold]{self.phase}[/]",
            ProgressBar(total=1.0, completed=self._share(), width=24),
            self._count(),
            *(f"[dim]{label}[/] {value}" for label, value in self._values()),
            f"[dim]left[/] {left}" if left else "",
        )
        return table
