"""The progress display of a phase."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from audiorl.distributed.local import Group, cpu_seconds

# (label, metric names in order of preference, format)
_SHOWN = (
    ("loss", ("loss", "sft/loss", "preference/loss", "reward_model/loss", "process_reward/loss", "ctc/loss"), "{:.3f}"),
    ("right", ("preference/accuracy", "reward_model/accuracy", "process_reward/accuracy"), "{:.1%}"),
    ("reward", ("reward/mean",), "{:.3f}"),
    ("acc", ("reward/accuracy",), "{:.1%}"),
    ("held-out", ("eval/accuracy",), "{:.1%}"),
    ("WER", ("eval/wer",), "{:.1%}"),
    ("CER", ("eval/cer",), "{:.1%}"),
    ("KL", ("kl",), "{:.4f}"),
    ("tok/s", ("tokens_per_s",), "{:.0f}"),
)


class Progress:
    """Shows how a phase goes: a live line on a terminal, a plain line every `interval` seconds elsewhere.

    `step` counts finished steps, so the last update of a phase has `step == total`. A value that a step does not
    report (held-out accuracy is not measured every step) keeps its last reading. `spent`: where a time limit may end
    the phase before its last step, the fraction of it that is used so far.
    """

    def __init__(
        self,
        phase: str,
        total: int,
        start: int = 0,
        *,
        interval: float = 5.0,
        spent: float | None = None,
        console: Console | None = None,
    ):
        self.phase, self.total, self.start, self.interval = phase, total, start, interval
        self._spent_before = self._spent = spent
        self.console = console or Console()
        self._step, self._note = start, ""
        self._last: dict[str, float] = {}
        self._live: Live | None = None
        self._began = self._printed = -math.inf

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        if self.console.is_terminal:
            self._live = Live(self._render(), console=self.console, refresh_per_second=4)
            self._live.__enter__()
        return self

    def update(self, step: int, metrics: Mapping[str, Any], spent: float | None = None) -> None:
        """Show that `step` steps are done, with what the last one reports."""
        self._step, self._spent = step, spent
        self._last.update({k: float(v) for k, v in metrics.items() if isinstance(v, int | float)})
        self._show(due=step >= self.total)

    def note(self, text: str) -> None:
        """Show what happens besides the steps, such as "held-out 64/200", until the next note."""
        self._note = text
        if text or self._live is not None:
            self._show()

    def _show(self, due: bool = False) -> None:
        if self._live is not None:
            self._live.update(self._render())
        elif due or time.monotonic() - self._printed >= self.interval:
            self._printed = time.monotonic()
            self.console.print(self.line(), highlight=False, markup=False, soft_wrap=True)

    def line(self) -> str:
        """Say the state in one plain line: ``grpo 12/200  reward 0.250  KL 0.0010  left 3:20``."""
        cells = (f"{label} {value}".strip() for label, value in self._cells())
        return f"{self.phase} {'  '.join(cell for cell in cells if cell)}"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, tb)

    def _cells(self) -> list[tuple[str, str]]:
        """(label, value) of the steps, of what they report, of the time left, and the note."""
        cells = [("", f"{self._step}/{self.total}" if self._spent is None else str(self._step))]
        for label, names, form in _SHOWN:
            value = next((self._last[n] for n in names if n in self._last), None)
            cells += [] if value is None else [(label, form.format(value))]
        left = self._left()
        return [*cells, ("left" if left else "", left), ("", self._note)]

    def _left(self) -> str:
        """Time left at the pace of the steps or of the limit; empty before the first step and after the last."""
        done = self._step - self.start
        if done <= 0 or self._step >= self.total:
            return ""
        elapsed = time.monotonic() - self._began
        seconds = elapsed / done * (self.total - self._step)
        if self._spent is not None and self._spent_before is not None:
            pace = (self._spent - self._spent_before) / elapsed
            seconds = min(seconds, max(1 - self._spent, 0.0) / pace if pace > 0 else seconds)
        hours, rest = divmod(round(seconds), 3600)
        return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"

    def _render(self) -> Table:
        done = min(max(self._step / max(self.total, 1), self._spent or 0.0), 1.0)  # by steps or by time
        table = Table.grid(padding=(0, 2))
        cells = [f"[dim]{label}[/] {value}" if label else value for label, value in self._cells()]
        bar = ProgressBar(total=1.0, completed=done, width=24)
        table.add_row(f"[bold]{self.phase}[/]", bar, *cells)
        return table


class StepClock:
    """Measures steps: wall-clock time by its parts, CPU time of this process and those of `groups` together.

    Every second from one row of metrics to the next is in a part: their sum is `time/step`.
    """

    def __init__(self, *groups: Group) -> None:
        self._groups = groups
        self._last = time.monotonic()
        self.begin()

    def begin(self) -> None:
        """Begin a step. What came after the last lap, such as a checkpoint, is the new step's part `time/save`."""
        now = time.monotonic()
        self.laps: dict[str, float] = {"time/save": now - self._last}
        """Wall-clock seconds of every part, as `time/NAME`."""
        self.seconds = 0.0
        """Wall-clock seconds from the beginning to the last lap that counts."""
        self._start = self._last = now
        self._cpu_start = self._read_cpu()
        self.cpu_seconds: float | None = 0.0
        """Of the same time; None where a GPU took part."""

    def lap(self, name: str, counts: bool = True) -> None:
        """End the part `name` now. `counts`: it belongs to the training itself."""
        now = time.monotonic()
        self.laps[f"time/{name}"] = now - self._last
        self._last = now
        if not counts:
            return
        self.seconds = now - self._start
        self.cpu_seconds = 0.0
        for before, after in zip(self._cpu_start, self._read_cpu(), strict=True):
            if before is None or after is None:
                self.cpu_seconds = None
                return
            self.cpu_seconds += max(after - before, 0.0)  # a process that was replaced meanwhile counts 0

    def divide(self, name: str, part: str, seconds: float) -> None:
        """Take `seconds` from the part `name` as a part of its own."""
        seconds = min(max(seconds, 0.0), self.laps[f"time/{name}"])
        self.laps |= {f"time/{name}": self.laps[f"time/{name}"] - seconds, f"time/{part}": seconds}

    def times(self) -> dict[str, float]:
        """Return the parts so far, and `time/step`, which they add up to."""
        return self.laps | {"time/step": sum(self.laps.values())}

    def _read_cpu(self) -> list[float | None]:
        return [cpu_seconds(), *(seconds for group in self._groups for seconds in group.cpu_seconds())]
