"""The processes of a run. Not part of the recipe: a run may be resumed with other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VLLM_COLOCATED_ERROR = (
    "runtime.engine vllm: vLLM makes a torch process group, so it cannot run in the process of a trainer that has one "
    "too (several trainers, or ZeRO); give engines their own processes: --runtime.kind ray --runtime.engines N puts "
    "them on their own GPUs, with --runtime.placement colocated they share the trainers' GPUs"
)


@dataclass(frozen=True)
class RuntimeConfig:
    """The options `--runtime.…` of `audiorl train`, `audiorl resume` and `audiorl doctor --plan`."""

    kind: Literal["local", "torchrun", "ray"] = "local"
    """local: this process trains. torchrun: `ranks` processes of this machine train. ray: a Ray cluster's processes."""
    ranks: int = 1
    """Number of trainers, one GPU each where there are GPUs. With torchrun: on this machine; for several machines start
    torchrun yourself."""
    zero: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage of the trainers; 0: plain data parallelism, without DeepSpeed."""
    offload: bool = False
    """Keep the optimizer's state in CPU memory; needs zero 1, 2 or 3."""
    engine: Literal["hf", "vllm"] = "hf"
    """What generates rollouts. hf: the trainer's own model, by transformers. vllm: vLLM; without `engines` it runs in
    the trainer's process, for one trainer (local) only."""
    engines: int = 0
    """Number of engines with their own processes and weights (ray only); 0: every trainer generates itself."""
    placement: Literal["dedicated", "colocated"] = "dedicated"
    """dedicated: `engines` have their own GPUs. colocated: engine k shares the GPU of trainer k; they take turns, and
    vLLM sleeps while the trainer updates."""
    engine_gpus: int = 1
    """GPUs of one dedicated engine (vLLM's tensor parallel size), all on one node."""
    references: int = 0
    """Number of processes that hold the KL's reference model, one GPU each (ray only); 0: every trainer holds it."""
    gpu_fraction: float | None = None
    """Fraction of a GPU's memory that vLLM takes, in (0, 1]; None: 0.9 on its own GPU, 0.4 on a trainer's."""
    address: str | None = None
    """HOST:PORT of a running Ray cluster; None: the one in RAY_ADDRESS, else a cluster is started on this machine."""
    restarts: int = 3
    """How many times processes that died are replaced before the run stops (ray only)."""

    def check(self) -> None:
        """Raise ValueError for options that contradict each other."""
        for name in ("ranks", "engine_gpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"runtime.{name} is {getattr(self, name)}; it must be at least 1")
        if self.kind == "local" and self.ranks > 1:
            raise ValueError(f"runtime.ranks {self.ranks}: several processes need --runtime.kind torchrun or ray")
        for name in ("engines", "references", "restarts"):
            if getattr(self, name) < 0:
                raise ValueError(f"runtime.{name} is {getattr(self, name)}; it must be at least 0")
        if self.engines and self.kind != "ray":
            raise ValueError("runtime.engines: engines with their own processes need --runtime.kind ray")
        if self.references and self.kind != "ray":
            raise ValueError("runtime.references: a reference with its own process needs --runtime.kind ray")
        if self.placement == "colocated":
            self._check_colocated()
        if self.address is not None and self.kind != "ray":
            raise ValueError("runtime.address: only --runtime.kind ray connects to a cluster")
        if self.engine_gpus > 1 and self.engine == "hf":
            raise ValueError(f"runtime.engine_gpus {self.engine_gpus}: only --runtime.engine vllm can use several")
        if self.engine == "vllm" and not self.engines and (self.kind != "local" or self.zero):
            raise ValueError(VLLM_COLOCATED_ERROR)
        if self.gpu_fraction is not None and not 0 < self.gpu_fraction <= 1:
            raise ValueError(f"runtime.gpu_fraction is {self.gpu_fraction}; it must be in (0, 1]")
        if self.gpu_fraction is not None and self.engine != "vllm":
            raise ValueError("runtime.gpu_fraction: only --runtime.engine vllm reserves a fraction of the GPU")
        if self.offload and not self.zero:
            raise ValueError("runtime.offload: only ZeRO can offload the optimizer; add --runtime.zero 1, 2 or 3")

    def _check_colocated(self) -> None:
        where = "runtime.placement colocated"
        if not self.engines:
            raise ValueError(f"{where}: there are no engines to place; add --runtime.kind ray --runtime.engines N")
        if self.engines > self.ranks:
            raise ValueError(
                f"{where}: engine k shares the GPU of trainer k, but runtime.engines {self.engines} are more than "
                f"runtime.ranks {self.ranks}; use at most as many"
            )
        if self.engine_gpus > 1:
            raise ValueError(
                f"{where}: an engine shares one trainer's GPU, so it cannot have runtime.engine_gpus "
                f"{self.engine_gpus}; engines of several GPUs need --runtime.placement dedicated"
            )

    @property
    def shares_gpus(self) -> bool:
        """Whether engines are on the trainers' GPUs."""
        return not self.engines or self.placement == "colocated"

    @property
    def engine_gpu_fraction(self) -> float:
        """`gpu_fraction`, or its default for the placement."""
        return self.gpu_fraction or (0.4 if self.shares_gpus else 0.9)


_current = RuntimeConfig()


def current() -> RuntimeConfig:
    """The options of this process's run."""
    return _current


def set_current(config: RuntimeConfig) -> None:
    """Set the options of this process's run. Ray's workers are sent them when they are made."""
    global _current
    _current = config
