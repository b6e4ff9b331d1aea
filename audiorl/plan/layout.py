"""What a plan is made for: the training, its processes and GPUs, and what is assumed of libraries."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from audiorl.plan.activations import Attention
from audiorl.plan.sizes import Size

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PHASES = ("generate", "score", "backward", "step", "sync")
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Assumptions:
    """Numbers that depend on drivers, libraries and settings, not on the model. Measure yours and set them."""

    context_gib: float = 0.6
    """CUDA context and libraries of one process."""
    nccl_gib: float = 0.5
    """Communication buffers, with more than one rank."""
    fragmentation: float = 0.05
    """Of what the trainer allocates, lost between allocations."""
    engine_workspace_gib: float = 2.0
    """An engine's activations and captured graphs."""
    engine_asleep_gib: float = 1.5
    """What a sleeping engine does not give back."""
    zero_bucket: int = 500_000_000
    """Gradients reduced at once by ZeRO, in numbers (DeepSpeed's reduce_bucket_size)."""
    zero_live: int = 1_000_000_000
    """Weights that ZeRO-3 keeps gathered at a time (DeepSpeed's stage3_max_live_parameters)."""
    sync_bucket_mib: int = 512
    """Weights sent to an engine at a time, at least the largest tensor."""
    logits_chunk: int = 2**26
    """Logits worked on at once (`chunk` of `fused_logprobs`)."""
    logits_keep: int = 2**31
    """Bytes of logits kept for the backward pass (`keep` of `fused_logprobs`)."""


@dataclass(frozen=True)
class Layout:
    """The numbers that a plan depends on. `plan.options.PlanOptions` makes one from a run's options."""

    gpu_gib: float = 80.0
    """Memory of one GPU."""
    gpus: int = 1
    """GPUs of a node."""
    nodes: int = 1

    dtype: Dtype = "bfloat16"
    """Of the trainer's weights."""
    autocast: bool = False
    """Run float32 weights in bfloat16."""
    lora_rank: int = 0
    """Train low-rank adapters on the decoder; 0 trains the decoder itself."""
    audio: Literal["frozen", "projector", "full"] = "frozen"
    """What of the audio side is trained."""
    codebooks: int = 0
    """Count a text decoder as one that has learned to speak in so many codebooks (dualize)."""
    codebook_size: int = 1024
    gradient_checkpointing: bool = False
    attention: Attention = "varlen"
    """`varlen` is one call for all spans of a row, with keys gathered for each of them, as on a GPU; `span` goes from
    one span to the next, as on a CPU; `mask` is one call under a mask of the row's length squared."""

    zero: Literal[0, 1, 2, 3] = 0
    fsdp: bool = False
    """FSDP2 in the place of ZeRO: it divides what stage 3 divides."""
    offload_optimizer: bool = False
    """Moments, master weights and (from stage 2) gradients in the node's memory."""
    master_weights: bool = False
    """A float32 copy of 16-bit weights for the optimizer; ZeRO has one in any case."""
    ema: bool = False
    """A float32 moving average of the trained weights."""
    reference: Literal["auto", "none", "copy", "lora", "separate"] = "auto"
    """lora: the model below the adapter. copy: a second copy of what is trained. separate: processes with GPUs of their
    own. auto: lora or copy, as the policy makes it. none: kl_beta is 0."""
    reference_gpus: int = 1
    """GPUs that only hold a separate reference."""
    teacher: Size | None = None
    """Of distillation, where it is another model; with a separate reference it lies there."""
    critic: Literal["none", "shared", "own", "separate"] = "none"
    """shared: a head on the policy. own: a model on every trainer. separate: processes with GPUs of their own."""
    critic_gpus: int = 1
    """GPUs that only hold a separate critic."""

    prompt_tokens: int = 600
    """With the audio's: 12.5 or 25 tokens a second."""
    response_tokens: int = 400
    group_size: int = 8
    share_prompts: bool = True
    micro_batch_tokens: int = 8192
    clip_seconds: float = 20.0
    clips: int = 8
    """Clips that a rank hears in an update; they count where the audio tower is trained."""
    speech_share: float = 0.0
    """Share of predicted tokens that are frames of codes, whose head is small."""
    fused_logprobs: bool = True

    engine: Literal["hf", "vllm"] = "vllm"
    """hf generates with the trainer's own weights."""
    placement: Literal["colocated", "dedicated"] = "colocated"
    """vLLM on the trainers' GPUs, one engine each, or on GPUs of its own (all engines of kind hf are colocated)."""
    engine_gpus: int = 0
    """GPUs of all dedicated engines together."""
    tensor_parallel: int = 1
    """GPUs of one dedicated engine."""
    engine_lora: Literal["adapter", "merged"] = "adapter"
    """Whether vLLM runs a LoRA adapter next to the weights or is sent merged weights."""
    gpu_fraction: float = 0.5
    """Of a GPU, for an engine with its weights and cache (vLLM's gpu_memory_utilization)."""
    sleep: bool = True
    """A colocated engine frees its memory while the trainer works."""
    max_batch_tokens: int = 65_536
    """Tokens that the `hf` engine decodes side by side (sampling.max_batch_tokens)."""

    assume: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        counts = ("gpus", "nodes", "prompt_tokens", "response_tokens", "group_size", "tensor_parallel", "clips")
        for name in (*counts, "reference_gpus", "critic_gpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} is {getattr(self, name)}; it must be at least 1")
        for name in ("engine_gpus", "lora_rank", "codebooks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{_flag(name)} is {getattr(self, name)}; it must be at least 0")
        if not 0 < self.gpu_fraction <= 1:
            raise ValueError(f"--gpu-fraction is {self.gpu_fraction}; it must be above 0 and at most 1")
        if not 0 <= self.speech_share <= 1:
            raise ValueError(f"--speech-share is {self.speech_share}; it must be from 0 to 1")
        if self.gpu_gib <= 0:
            raise ValueError(f"--gpu-gib is {self.gpu_gib:g}; it must be above 0")
        self._check_placement()
        if self.trainers < 1:
            raise ValueError(
                f"{self.total_gpus} GPUs leave none to a trainer: engines, references and critics take "
                f"{self.total_gpus - self.trainers}; use more GPUs, or fewer --runtime.engines, --runtime.references "
                "and --runtime.critics"
            )
        if self.zero and self.trainers == 1 and not self.offload_optimizer:
            raise ValueError(
                f"--runtime.zero {self.zero} divides nothing on one trainer GPU; take --runtime.zero 0, more GPUs, or "
                "--runtime.offload True"
            )
        if self.fsdp and self.trainers == 1:
            raise ValueError("--runtime.fsdp divides nothing on one trainer GPU; leave it out, or take more GPUs")
        if self.offload_optimizer and not self.zero:
            raise ValueError("--runtime.offload is ZeRO's: it needs --runtime.zero 1, 2 or 3")
        if self.autocast and self.dtype != "float32":
            raise ValueError(f"--model.autocast is for float32 weights, not {self.dtype}; leave it out")
        if self.reference == "lora" and not self.lora_rank:
            raise ValueError("--reference lora is the model under its adapter: it needs --model.lora.rank")
        if self.micro_batch_tokens < self.prompt_tokens + self.response_tokens:
            raise ValueError(
                f"--grpo.micro-batch-tokens {self.micro_batch_tokens} do not hold one prompt of "
                f"{self.prompt_tokens} and response of {self.response_tokens}"
            )

    def _check_placement(self) -> None:
        if self.placement == "colocated" and (self.engine_gpus or self.tensor_parallel > 1):
            raise ValueError("--runtime.engine-gpus are for --runtime.placement dedicated")
        if self.placement == "dedicated" and not 0 < self.engine_gpus < self.total_gpus:
            raise ValueError(
                f"engines have {self.engine_gpus} of {self.total_gpus} GPUs; trainers and engines need one each"
            )
        if self.placement == "dedicated" and (
            self.tensor_parallel > self.gpus or self.engine_gpus % self.tensor_parallel
        ):
            raise ValueError(
                f"--runtime.engine-gpus {self.tensor_parallel}: an engine lies within a node of {self.gpus} GPUs, and "
                f"engines of this size must fill the {self.engine_gpus} GPUs that they have"
            )

    @property
    def sends_adapter(self) -> bool:
        """Whether the engines are vLLM and get a LoRA adapter as an adapter."""
        return self.engine == "vllm" and self.lora_rank > 0 and self.engine_lora == "adapter"

    @property
    def sharded(self) -> bool:
        """Whether the optimizer's state is divided by the trainers."""
        return self.fsdp or self.zero > 0

    @property
    def shards_weights(self) -> bool:
        """Whether the weights are, too, in an update."""
        return self.fsdp or self.zero == 3

    @property
    def total_gpus(self) -> int:
        return self.gpus * self.nodes

    @property
    def trainers(self) -> int:
        """Trainer ranks."""
        references = self.reference_gpus if self.reference == "separate" else 0
        critics = self.critic_gpus if self.critic == "separate" else 0
        return self.total_gpus - self.engine_gpus - references - critics


def critics_layout(layout: Layout) -> Layout:
    """The layout of a separate critic's GPUs, as if they were all trainers."""
    return replace(
        layout,
        gpus=layout.critic_gpus,
        nodes=1,
        placement="colocated",
        engine_gpus=0,
        tensor_parallel=1,
        reference="none",
        critic="none",
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
