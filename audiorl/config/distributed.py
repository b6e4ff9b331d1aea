"""The processes of a run. Not part of the recipe: a run may be resumed with other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VLLM_COLOCATED_ERROR = (
    "runtime.engine vllm: vLLM makes a torch process group, so it cannot run in the process of a trainer that has one "
    "too (several trainers, ZeRO, FSDP); give engines their own processes: --runtime.kind ray --runtime.engines N puts "
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
    fsdp: bool = False
    """Divide what ZeRO 3 divides (weights in updates, gradients, the optimizer's state) with torch's FSDP2, without
    DeepSpeed. Not together with `zero`."""
    offload: bool = False
    """Keep the optimizer's state in CPU memory; needs zero 1, 2 or 3 (not `fsdp`)."""
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
    engine_lora: Literal["auto", "adapter", "merged"] = "auto"
    """What vLLM is sent of a policy with LoRA. adapter: the adapter's matrices, which vLLM runs next to the weights.
    merged: the decoder's weights with the adapter in them. auto: adapter where vLLM can run it, else merged."""
    references: int = 0
    """Number of processes that hold the KL's reference model, one GPU each (ray only); 0: every trainer holds it."""
    critics: int = 0
    """Number of processes that hold the critic of PPO with its optimizer, one GPU each (ray only); 0: every trainer
    holds it. They divide what `zero` and `fsdp` divide among themselves. Not for a critic on the policy's trunk."""
    gpu_fraction: float | None = None
    """Fraction of a GPU's memory that vLLM takes, in (0, 1]; None: 0.9 on its own GPU, 0.4 on a trainer's."""
    address: str | None = None
    """HOST:PORT of a running Ray cluster; None: the one in RAY_ADDRESS, else a cluster is started on this machine."""
    async_save: Literal["auto", "on", "off"] = "auto"
    """on: write checkpoints while training goes on, from a copy in CPU memory of what is saved. off: training waits.
    auto: on where the model is on a GPU, since on a CPU the copy and the writing take memory and time."""
    sync_timeout: float = 300.0
    """Seconds that trainers and engines wait for each other while weights are sent; an error then names who did not
    answer."""
    restarts: int = 3
    """How many times processes that died are replaced before the run stops (ray only)."""

    def check(self) -> None:
        """Raise ValueError for options that contradict each other."""
        for name in ("ranks", "engine_gpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"runtime.{name} is {getattr(self, name)}; it must be at least 1")
        if self.kind == "local" and self.ranks > 1:
            raise ValueError(f"runtime.ranks {self.ranks}: several processes need --runtime.kind torchrun or ray")
        for name in ("engines", "references", "critics", "restarts"):
            if getattr(self, name) < 0:
                raise ValueError(f"runtime.{name} is {getattr(self, name)}; it must be at least 0")
        if self.engines and self.kind != "ray":
            raise ValueError("runtime.engines: engines with their own processes need --runtime.kind ray")
        if self.references and self.kind != "ray":
            raise ValueError("runtime.references: a reference with its own process needs --runtime.kind ray")
        if self.critics and self.kind != "ray":
            raise ValueError("runtime.critics: a critic with its own process needs --runtime.kind ray")
        if self.critics == 1 and self.sharded and not self.offload:
            raise ValueError(
                "runtime.critics 1: ZeRO and FSDP divide nothing on one critic; take at least 2, or leave out "
                "runtime.zero and runtime.fsdp"
            )
        if self.placement == "colocated":
            self._check_colocated()
        if self.address is not None and self.kind != "ray":
            raise ValueError("runtime.address: only --runtime.kind ray connects to a cluster")
        if self.engine_gpus > 1 and self.engine == "hf":
            raise ValueError(f"runtime.engine_gpus {self.engine_gpus}: only --runtime.engine vllm can use several")
        if self.engine == "vllm" and not self.engines and (self.kind != "local" or self.sharded):
            raise ValueError(VLLM_COLOCATED_ERROR)
        if self.engine_lora != "auto" and self.engine != "vllm":
            raise ValueError(f"runtime.engine_lora {self.engine_lora}: only --runtime.engine vllm is sent weights so")
        if not 0 < self.sync_timeout < float("inf"):
            raise ValueError(f"runtime.sync_timeout is {self.sync_timeout}; it must be a number of seconds above 0")
        if self.gpu_fraction is not None and not 0 < self.gpu_fraction <= 1:
            raise ValueError(f"runtime.gpu_fraction is {self.gpu_fraction}; it must be in (0, 1]")
        if self.gpu_fraction is not None and self.engine != "vllm":
            raise ValueError("runtime.gpu_fraction: only --runtime.engine vllm reserves a fraction of the GPU")
        if self.fsdp and self.zero:
            raise ValueError(f"runtime.fsdp and runtime.zero {self.zero}: both divide the trainers' state; take one")
        if self.offload and self.fsdp:
            raise ValueError(
                "runtime.offload: FSDP keeps the optimizer on the GPUs; replace --runtime.fsdp by --runtime.zero 3"
            )
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
    def sharded(self) -> bool:
        """Whether trainers divide the optimizer's state among them."""
        return self.fsdp or self.zero > 0

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
    """Return the options of this process's run."""
    return _current


def set_current(config: RuntimeConfig) -> None:
    """Set the options of this process's run. Ray's workers are sent them when they are made."""
    global _current
    _current = config
