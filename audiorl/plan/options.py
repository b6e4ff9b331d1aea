"""The options of `audiorl doctor --plan`: those of the run itself, and what is assumed of its data and GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from audiorl.config import LoraConfig, ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.config.distributed import RuntimeConfig
from audiorl.models import AudioPolicy
from audiorl.plan.activations import Attention
from audiorl.plan.layout import Assumptions, Layout
from audiorl.plan.memory import make_plan
from audiorl.plan.parts import Plan
from audiorl.plan.sizes import Size, count, policy_of, size_of

ATTENTION: dict[str, Attention] = {
    "auto": "varlen",
    "varlen": "varlen",
    "flex": "varlen",
    "sdpa": "span",
    "eager": "mask",
}
"""What the kernel of each `ModelConfig.attention` keeps of a packed row on a GPU."""


@dataclass(frozen=True)
class PlanOptions:
    """A run's options, with the defaults of the recipes, and what a plan must know besides."""

    runtime: RuntimeConfig = RuntimeConfig()
    model: ModelConfig = ModelConfig(dtype="auto", gradient_checkpointing=True)
    """A dtype of auto counts as bfloat16, the type of the released checkpoints."""
    grpo: RLConfig = RLConfig()
    optim: OptimConfig = OptimConfig()
    """`master_weights` counts."""
    sampling: SamplingConfig = SamplingConfig()
    """Every response is counted as `max_new_tokens` long."""

    gpu_gib: float = 80.0
    """Memory of one GPU, GiB."""
    gpus_per_node: int = 8
    """GPUs of one machine; counts where the run has more."""
    prompt_tokens: int = 600
    """Tokens of a prompt with its audio, of which a second has 12.5 or 25."""
    clip_seconds: float = 20.0
    """Length of a prompt's audio, seconds."""
    clips: int = 8
    """Clips that a rank encodes in an update; they count where the audio encoder is trained."""
    codebooks: int = 0
    """Plan a text decoder as one that was taught to speak in this many codebooks (`dualize`); 0: as it is."""
    codebook_size: int = 1024
    """Codes of each of these codebooks."""
    speech_share: float = 0.0
    """Fraction of the sampled tokens that are codec frames, in [0, 1]."""
    assume: Assumptions = field(default_factory=Assumptions)

    def layout(self) -> Layout:
        """The numbers that the plan depends on. Raises ValueError for options that contradict each other, and for a
        teacher of distillation whose size cannot be counted."""
        self.runtime.check()
        runtime, model, rl = self.runtime, self.model, self.grpo
        separate_engines = runtime.engines > 0 and not runtime.shares_gpus
        engine_gpus = runtime.engines * runtime.engine_gpus if separate_engines else 0
        total = runtime.ranks + engine_gpus + runtime.references + runtime.critics
        nodes = -(-total // self.gpus_per_node)
        if nodes > 1 and total % self.gpus_per_node:
            raise ValueError(
                f"the run has {total} GPUs, which do not fill nodes of --gpus-per-node {self.gpus_per_node}"
            )
        reference: Literal["auto", "none", "separate"] = "none"
        if rl.kl_beta or rl.distill.from_reference_process:
            reference = "auto"
        critic: Literal["none", "shared", "own", "separate"] = "none"
        if runtime.critics:
            rl.check_separate_critic(runtime.critics)
            critic = "separate"
        elif rl.advantage == "gae":
            critic = "shared" if rl.critic.shared else "own"
        return Layout(
            gpu_gib=self.gpu_gib,
            gpus=total if nodes == 1 else self.gpus_per_node,
            nodes=nodes,
            dtype="bfloat16" if model.dtype == "auto" else model.dtype,
            autocast=model.autocast,
            lora_rank=model.lora.rank,
            audio=model.audio,
            codebooks=self.codebooks,
            codebook_size=self.codebook_size,
            gradient_checkpointing=model.gradient_checkpointing,
            attention=ATTENTION[model.attention],
            zero=runtime.zero,
            fsdp=runtime.fsdp,
            offload_optimizer=runtime.offload,
            master_weights=self.optim.master_weights,
            ema=rl.ema_decay is not None,
            reference="separate" if reference == "auto" and runtime.references else reference,
            reference_gpus=max(runtime.references, 1),
            teacher=self._teacher(),
            critic=critic,
            critic_gpus=max(runtime.critics, 1),
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.sampling.max_new_tokens,
            group_size=rl.group_size,
            share_prompts=rl.share_prompts,
            micro_batch_tokens=rl.micro_batch_tokens,
            clip_seconds=self.clip_seconds,
            clips=self.clips,
            speech_share=self.speech_share,
            engine=runtime.engine,
            placement="dedicated" if separate_engines else "colocated",
            engine_gpus=engine_gpus,
            tensor_parallel=runtime.engine_gpus if separate_engines else 1,
            engine_lora="merged" if runtime.engine_lora == "merged" else "adapter",
            gpu_fraction=runtime.engine_gpu_fraction,
            max_batch_tokens=self.sampling.max_batch_tokens,
            assume=self.assume,
        )

    def _teacher(self) -> Size | None:
        distill = self.grpo.distill
        if distill.coef == 0 or distill.teacher in ("reference", "policy"):
            return None
        return size_of(distill.teacher, replace(self.model, lora=LoraConfig(rank=0), audio="frozen", only=()))

    def size(self, model: str) -> Size:
        """The parameters of a released model or a model folder under these options."""
        return count(self.policy(model))

    def policy(self, model: str) -> AudioPolicy:
        """A released model or a model folder under these options, on the device meta."""
        return policy_of(model, self.model, self.codebooks, self.codebook_size)

    def plan(self, size: Size) -> Plan:
        """The memory of the run. Raises ValueError for options that contradict each other or the model."""
        return make_plan(size, self.layout())


Change = dict[str, Any]
"""New values by option name, such as {"runtime.zero": 2}."""


def changed(options: PlanOptions, change: Change) -> PlanOptions:
    """`options` with the values of `change`."""
    for name, value in change.items():
        group, _, attribute = name.partition(".")
        if attribute == "lora.rank":
            config: Any = replace(options.model, lora=LoraConfig(rank=value, alpha=2 * value))
        else:
            config = replace(getattr(options, group), **{attribute.replace("-", "_"): value})
        options = replace(options, **{group: config})
    return options


def command_line(change: Change) -> str:
    """`change` as it is written on a command line."""
    return " ".join(
        f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}" for name, value in change.items()
    )


def suggestions(model: str, options: PlanOptions) -> list[tuple[Change, Plan]]:
    """Changes of the options with which the run fits, and its plan then.

    Single changes if one is enough. Otherwise one combination, built greedily: in each round the change that removes
    most of the memory above the limit, summed over phases and kinds of GPU.
    """
    sizes: dict[bool, Size] = {}

    def plan_of(candidate: PlanOptions) -> Plan:
        adapted = candidate.model.lora.rank > 0
        if adapted not in sizes:
            sizes[adapted] = candidate.size(model)
        return candidate.plan(sizes[adapted])

    chosen: Change = {}
    best = plan_of(options)
    while True:
        candidates: list[tuple[Change, Plan]] = []
        for change in _changes(changed(options, chosen)):
            try:
                candidates.append((change, plan_of(changed(options, chosen | change))))
            except ValueError:
                continue  # these options do not go together
        fitting = [(chosen | change, plan) for change, plan in candidates if plan.fits]
        if fitting:
            return fitting
        change, plan = min(candidates, key=lambda candidate: _excess(candidate[1]), default=({}, best))
        if _excess(plan) >= _excess(best):
            return []
        chosen, best = chosen | change, plan


def _excess(plan: Plan) -> float:
    """Bytes above the GPUs' size, over phases and kinds of GPU. A cache too small for a sequence counts as a GPU."""
    missing = sum(gpu.size for gpu in plan.gpus if gpu.cache is not None and not gpu.cache.sequences)
    return missing + sum(max(total - gpu.size, 0) for gpu in plan.gpus for total in gpu.totals)


def _changes(options: PlanOptions) -> Iterator[Change]:
    """Changes of one setting that may save memory."""
    runtime, model = options.runtime, options.model
    if not model.gradient_checkpointing:
        yield {"model.gradient-checkpointing": True}
    yield {"grpo.micro-batch-tokens": options.grpo.micro_batch_tokens // 2}
    if runtime.engine == "hf":
        yield {"sampling.max-batch-tokens": options.sampling.max_batch_tokens // 2}
    if model.dtype == "float32":
        yield {"model.dtype": "bfloat16", "model.autocast": False}
    for stage in (1, 2, 3):
        if stage > runtime.zero and runtime.ranks > 1 and not runtime.fsdp:
            yield {"runtime.zero": stage}
    if runtime.kind == "ray" and not runtime.references and options.layout().reference == "auto":
        yield {"runtime.references": 1}
    if runtime.kind == "ray" and options.layout().critic == "own":
        yield {"runtime.critics": 1}
    if not runtime.sharded and runtime.ranks > 1:
        yield {"runtime.fsdp": True}
    if not runtime.offload and not runtime.fsdp:
        yield {"runtime.zero": max(runtime.zero, 2), "runtime.offload": True}
    if not model.lora.rank:
        yield {"model.lora.rank": 16}
    if runtime.engine == "vllm":
        for fraction in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
            if fraction != runtime.engine_gpu_fraction:
                yield {"runtime.gpu-fraction": fraction}
        if runtime.engines and not runtime.shares_gpus:
            for gpus in (2, 4, 8):
                if gpus > runtime.engine_gpus and not runtime.engines * runtime.engine_gpus % gpus:
                    engines = runtime.engines * runtime.engine_gpus // gpus
                    yield {"runtime.engine-gpus": gpus, "runtime.engines": engines}
