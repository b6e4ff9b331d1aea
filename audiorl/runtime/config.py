"""Where a run's processes are and what they do. No part of a recipe: the same run can go on elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VLLM_BESIDE = (
    "runtime.engine vllm: vLLM makes a process group of its own, beside which a trainer that is one of several, or "
    "under ZeRO, cannot have another; put engines apart from the trainers: --runtime.kind ray --runtime.engines N"
)


@dataclass(frozen=True)
class RuntimeConfig:
    """The options `--runtime.…` of `audiorl train` and `audiorl resume`."""

    kind: Literal["local", "torchrun", "ray"] = "local"
    ranks: int = 1
    """Trainers, a GPU each where there are GPUs. torchrun: of this machine; for several start torchrun yourself."""
    zero: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage of the trainers; 0 is plain data parallelism, without DeepSpeed."""
    offload: bool = False
    """Optimizer state in the machine's memory, with ZeRO."""
    engine: Literal["hf", "vllm"] = "hf"
    """What writes rollouts: the trainer's own model, or vLLM. vLLM beside a trainer is for one process (local)."""
    engines: int = 0
    """Engines apart from the trainers, with their own weights (ray only); 0: one with each trainer."""
    engine_gpus: int = 1
    """GPUs of an engine apart (tensor parallel), all on one node."""
    gpu_fraction: float | None = None
    """The share of a GPU's memory that vLLM takes; None: 0.9 apart, 0.4 beside a trainer."""
    address: str | None = None
    """HOST:PORT of a Ray cluster that runs already. Without it RAY_ADDRESS counts; without both one is started here."""
    restarts: int = 3
    """How often workers that died are replaced before the run stops (ray only)."""

    def check(self) -> None:
        """Raises ValueError for options that cannot be together."""
        for name in ("ranks", "engine_gpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"runtime.{name} is {getattr(self, name)}; it must be at least 1")
        if self.kind == "local" and self.ranks > 1:
            raise ValueError(f"runtime.ranks {self.ranks}: several processes need --runtime.kind torchrun or ray")
        if self.engines < 0 or self.restarts < 0:
            raise ValueError("runtime.engines and runtime.restarts must be at least 0")
        if self.engines and self.kind != "ray":
            raise ValueError("runtime.engines: engines apart from the trainers need --runtime.kind ray")
        if self.address is not None and self.kind != "ray":
            raise ValueError("runtime.address: only --runtime.kind ray connects to a cluster")
        if self.engine_gpus > 1 and self.engine == "hf":
            raise ValueError(f"runtime.engine_gpus {self.engine_gpus}: only --runtime.engine vllm can use several")
        if self.engine == "vllm" and not self.engines and (self.kind != "local" or self.zero):
            raise ValueError(VLLM_BESIDE)
        if self.gpu_fraction is not None and not 0 < self.gpu_fraction <= 1:
            raise ValueError(f"runtime.gpu_fraction is {self.gpu_fraction}; it must be in (0, 1]")
        if self.gpu_fraction is not None and self.engine != "vllm":
            raise ValueError("runtime.gpu_fraction: only --runtime.engine vllm takes a share of its own")
        if self.offload and not self.zero:
            raise ValueError("runtime.offload: only ZeRO can keep the optimizer there; add --runtime.zero 1, 2 or 3")


_current = RuntimeConfig()


def current() -> RuntimeConfig:
    """The options of this process's run."""
    return _current


def set_current(config: RuntimeConfig) -> None:
    """Of the process's run from here on; workers elsewhere are given it with what they are made from."""
    global _current
    _current = config
