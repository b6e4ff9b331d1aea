"""Where a run's processes are and what they do. No part of a recipe: the same run can go on elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VLLM_BESIDE = (
    "runtime.engine vllm: vLLM makes a process group of its own, beside which a trainer that is one of several, or "
    "under ZeRO, cannot have another; make engines processes of their own: --runtime.kind ray --runtime.engines N puts "
    "them on GPUs of their own, with --runtime.placement together they share the trainers'"
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
    """What writes rollouts: the trainer's own model, or vLLM. vLLM in a trainer's process: one process (local)."""
    engines: int = 0
    """Engines in processes of their own, with their own weights (ray only); 0: one with each trainer."""
    placement: Literal["apart", "together"] = "apart"
    """Engines have GPUs of their own, or each lies on a trainer's GPU, where they take turns: vLLM sleeps meanwhile."""
    engine_gpus: int = 1
    """GPUs of an engine apart (tensor parallel), all on one node."""
    references: int = 0
    """Processes that hold the reference of the KL, a GPU each (ray only); 0: every trainer holds it."""
    gpu_fraction: float | None = None
    """The share of a GPU's memory that vLLM takes; None: 0.9 on a GPU of its own, 0.4 with a trainer."""
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
        for name in ("engines", "references", "restarts"):
            if getattr(self, name) < 0:
                raise ValueError(f"runtime.{name} is {getattr(self, name)}; it must be at least 0")
        if self.engines and self.kind != "ray":
            raise ValueError("runtime.engines: engines apart from the trainers need --runtime.kind ray")
        if self.references and self.kind != "ray":
            raise ValueError("runtime.references: a reference apart from the trainers needs --runtime.kind ray")
        if self.placement == "together":
            self._check_together()
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

    def _check_together(self) -> None:
        where = "runtime.placement together"
        if not self.engines:
            raise ValueError(f"{where}: there are no engines to place; add --runtime.kind ray --runtime.engines N")
        if self.engines > self.ranks:
            raise ValueError(
                f"{where}: engine k shares the GPU of trainer k, but runtime.engines {self.engines} are more than "
                f"runtime.ranks {self.ranks}; take at most as many"
            )
        if self.engine_gpus > 1:
            raise ValueError(
                f"{where}: an engine shares one trainer's GPU, it cannot have runtime.engine_gpus {self.engine_gpus}; "
                "put engines of several GPUs apart: --runtime.placement apart"
            )

    @property
    def shares_gpus(self) -> bool:
        """Whether engines are on the trainers' GPUs."""
        return not self.engines or self.placement == "together"


_current = RuntimeConfig()


def current() -> RuntimeConfig:
    """The options of this process's run."""
    return _current


def set_current(config: RuntimeConfig) -> None:
    """Of the process's run from here on; workers elsewhere are given it with what they are made from."""
    global _current
    _current = config
