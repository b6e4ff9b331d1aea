"""What a check is, and what it says."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

State = Literal["pass", "fail", "skipped", "measured"]


@dataclass(frozen=True)
class Outcome:
    """The result of one check. "measured" has no bound that it could miss."""

    state: State
    detail: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scale:
    """Sizes of the models and packs that are checked."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    layers: int
    groups: int
    """Groups of a pack."""
    group_size: int
    prompt: int
    """Tokens of a prompt."""
    response: int
    decoded: int
    """Rollouts decoded together."""
    repeats: int
    """Timed runs, of which the median counts."""

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        """Tokens of a pack with shared prompts."""
        return self.groups * (self.prompt + self.group_size * self.response)


GPU_SCALE = Scale(2048, 11_008, 16, 2, 151_936, 2, 3, 8, 600, 256, 32, 5)
"""Two layers of Qwen2.5-3B's width; a pack of 7,944 tokens."""
PRETEND_SCALE = Scale(128, 256, 4, 2, 400, 2, 2, 3, 40, 12, 4, 2)
"""Small enough for the CPU in seconds."""


@dataclass(frozen=True)
class Setup:
    """Where and how large the checks run."""

    device: torch.device
    scale: Scale

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The type in which training computes."""
        return torch.bfloat16 if self.is_gpu else torch.float32

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        """Median time of a run, after one that is not timed."""
        run()
        times = []
        for _ in range(self.scale.repeats):
            self.wait()
            began = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times)


Check = Callable[[Setup], Outcome]


def within(error: float, bound: float, what: str, **numbers: float) -> Outcome:
    """Passes up to `bound`; NaN fails."""
    state: State = "pass" if error <= bound else "fail"
    return Outcome(state, f"{what} {error:.2g}, at most {bound:g}", {"error": error, "bound": bound, **numbers})


def at_least(value: float, target: float, detail: str, setup: Setup, **numbers: float) -> Outcome:
    """Passes from `target` on a GPU; elsewhere it is a measurement without meaning for one."""
    if not setup.is_gpu:
        return Outcome("measured", detail, numbers)
    return Outcome("pass" if value >= target else "fail", f"{detail}; target {target:g}", {**numbers, "target": target})
