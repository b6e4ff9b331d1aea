"""The progress display of a phase."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

# (label, metric names in order of preference, format)
_SHOWN = (
    ("loss", ("loss", "sft/loss", "preference/loss", "reward_model/loss", "process_reward/loss", "ctc/loss"), "{:.3f}"),
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
            value = next((self._last[n] for n in names if n in self._last), None)
            if value is not None:
                yield label, form.format(value)

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


class StepClock:
    """The wall-clock time of one step by its parts, in seconds."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """The part `name` ends now."""
        now = time.monotonic()
        self._laps[f"time/{name}"] = now - self._last
        self._last = now

    @property
    def seconds(self) -> float:
        """From the start to the last lap."""
        return self._last - self._start

    def metrics(self, tokens: int) -> dict[str, float]:
        """`time/NAME` of every lap, and tokens_per_s."""
        return {**self._laps, "tokens_per_s": tokens / self.seconds}
