"""The processes of a run. Not part of the recipe: a run may be resumed with other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from audiorl.config.checks import refuse, require

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
    """Number of trainers, one GPU each where there are GPUs; with torchrun those of this machine."""
    zero: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage of the trainers; 0: plain data parallelism, without DeepSpeed."""
    fsdp: bool = False
    """Divide what ZeRO 3 divides with torch's FSDP2, without DeepSpeed. Not together with `zero`."""
    offload: bool = False
    """Keep the optimizer's state in CPU memory; needs zero 1, 2 or 3 (not `fsdp`)."""
    engine: Literal["hf", "vllm"] = "hf"
    """What generates rollouts: the trainer's own model, or vLLM (without `engines` for one local trainer only)."""
    engines: int = 0
    """Number of engines with their own processes and weights (ray only); 0: every trainer generates itself."""
    placement: Literal["dedicated", "colocated"] = "dedicated"
    """dedicated: `engines` have their own GPUs. colocated: engine k shares the GPU of trainer k; they take turns."""
    engine_gpus: int = 1
    """GPUs of one dedicated engine (vLLM's tensor parallel size), all on one node."""
    engine_lora: Literal["auto", "adapter", "merged"] = "auto"
    """What vLLM is sent of a policy with LoRA: the adapter, or weights with it in them; auto: adapter where it can."""
    references: int = 0
    """Number of processes that hold the KL's reference model, one GPU each (ray only); 0: every trainer holds it."""
    critics: int = 0
    """Number of processes that hold the critic of PPO with its optimizer, one GPU each (ray only); 0: every trainer
    holds it. Not for a critic on the policy's trunk."""
    gpu_fraction: float | None = None
    """Fraction of a GPU's memory that vLLM takes, in (0, 1]; None: 0.9 on its own GPU, 0.4 on a trainer's."""
    address: str | None = None
    """HOST:PORT of a running Ray cluster; None: the one in RAY_ADDRESS, else a cluster is started on this machine."""
    async_save: Literal["auto", "on", "off"] = "auto"
    """on: write checkpoints while training goes on, from a copy in CPU memory; off: training waits; auto: on a GPU."""
    sync_timeout: float = 300.0
    """Seconds that trainers and engines wait for each other while weights are sent."""
    restarts: int = 3
    """How many times processes that died are replaced before the run stops (ray only)."""

    def check(self) -> None:
        """Raise ValueError for options that contradict each other."""
        for name, least in dict(ranks=1, engine_gpus=1, engines=0, references=0, critics=0, restarts=0).items():
            require(getattr(self, name) >= least, f"runtime.{name}", getattr(self, name), f"at least {least}")
        require(0 < self.sync_timeout < float("inf"), "runtime.sync_timeout", self.sync_timeout, "seconds above 0")
        fraction = self.gpu_fraction
        require(fraction is None or 0 < fraction <= 1, "runtime.gpu_fraction", fraction, "in (0, 1]")
        local, ray, vllm = self.kind == "local", self.kind == "ray", self.engine == "vllm"
        colocated, where = self.placement == "colocated", "runtime.placement colocated"
        one_critic = self.critics == 1 and self.sharded and not self.offload
        refuse(
            (
                local and self.ranks > 1,
                f"runtime.ranks {self.ranks}: several processes need --runtime.kind torchrun or ray",
            ),
            (self.engines and not ray, "runtime.engines: engines with their own processes need --runtime.kind ray"),
            (
                self.references and not ray,
                "runtime.references: a reference with its own process needs --runtime.kind ray",
            ),
            (self.critics and not ray, "runtime.critics: a critic with its own process needs --runtime.kind ray"),
            (one_critic, "runtime.critics 1: ZeRO and FSDP divide nothing on one critic; take at least 2"),
            (
                colocated and not self.engines,
                f"{where}: there are no engines to place; add --runtime.kind ray --runtime.engines N",
            ),
            (
                colocated and self.engines > self.ranks,
                f"{where}: runtime.engines {self.engines} share the GPUs of runtime.ranks {self.ranks}; use at most "
                "as many",
            ),
            (
                colocated and self.engine_gpus > 1,
                f"{where}: an engine on a trainer's GPU cannot have runtime.engine_gpus {self.engine_gpus}; engines of "
                "several GPUs need --runtime.placement dedicated",
            ),
            (self.address and not ray, "runtime.address: only --runtime.kind ray connects to a cluster"),
            (self.engine_gpus > 1 and not vllm, "runtime.engine_gpus: only --runtime.engine vllm can use several"),
            (vllm and not self.engines and (not local or self.sharded), VLLM_COLOCATED_ERROR),
            (
                self.engine_lora != "auto" and not vllm,
                "runtime.engine_lora: only --runtime.engine vllm is sent weights so",
            ),
            (fraction is not None and not vllm, "runtime.gpu_fraction: only --runtime.engine vllm reserves memory"),
            (self.fsdp and self.zero, "runtime.fsdp and runtime.zero: both divide the trainers' state; take one"),
            (
                self.offload and self.fsdp,
                "runtime.offload: FSDP keeps the optimizer on the GPUs; take --runtime.zero 3",
            ),
            (
                self.offload and not self.zero,
                "runtime.offload: only ZeRO can offload the optimizer; add --runtime.zero 1, 2 or 3",
            ),
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
