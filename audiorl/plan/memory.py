"""How much GPU memory a run needs, by part and by phase of a step, from arithmetic alone.

Model states follow ZeRO (Rajbhandari et al., arXiv 1910.02054): with Ψ trained weights on N ranks in a 16-bit dtype,
weights 2Ψ, gradients 2Ψ, and 12Ψ for AdamW (Loshchilov and Hutter, arXiv 1711.05101): two moments and a master copy in
float32. Stage 1 divides the last by N, stage 2 also the gradients, stage 3 also the weights, here while a backward pass
runs: between updates every rank holds them whole (`audiorl.train.zero`). A step needs the gradients in float32 for a
moment, 4Ψ / N. AdamW without master weights keeps two moments in the dtype of the weights, and torch's default form
makes one temporary copy of a moment in a step. Frozen weights have neither gradients nor moments. An optimizer on the
CPU (ZeRO-Offload, arXiv 2101.06840) leaves weights and a bucket of gradients on the GPU.

Activations and logits are `audiorl.plan.activations`, counts of weights `audiorl.plan.sizes`. An engine takes a
fraction of the GPU: what its weights and its workspace leave of it is its key-value cache (arXiv 2309.06180).

A step has five phases; what they hold together is the column of a table, and the largest column decides:

    generate   the engine writes; the trainer's states wait beside it when both share a GPU
    score      log-probs of the reference, of the old policy, and values, without gradients
    backward   activations of a micro-batch, logits, gradients
    step       the optimizer; activations are gone
    sync       weights on their way to the engine

What cannot be computed is a field of `Assumptions`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from audiorl.config import LoraConfig, ModelConfig
from audiorl.plan.activations import (
    Attention,
    Pack,
    Precision,
    decoder_bytes,
    kv_bytes_per_token,
    logits_bytes,
    pack_of,
    tower_bytes,
    working_bytes,
)
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
    """A model's training and where it runs. One trainer rank a GPU."""

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
    attention: Attention = "mask"
    """`mask` is one kernel over the row with a mask, as on a GPU; `span` goes from one span of the row to the
    next, as on a CPU; `flash` is a kernel for sequences of different length, for models that run with one."""

    zero: Literal[0, 1, 2, 3] = 0
    offload_optimizer: bool = False
    """Moments, master weights and (from stage 2) gradients in the node's memory."""
    master_weights: bool | None = None
    """A float32 copy of 16-bit weights for the optimizer; None: with ZeRO only."""
    ema: bool = False
    """A float32 moving average of the trained weights."""
    reference: Literal["auto", "none", "copy", "lora", "apart"] = "auto"
    """`lora` is the model under its adapter, `copy` a second copy of what is trained, `apart` that model on GPUs of its
    own (--runtime.references); `auto` is lora or copy as the policy makes it; `none` is kl_beta 0."""
    reference_gpus: int = 1
    """GPUs that only hold the reference, where it is apart."""
    critic: Literal["none", "shared", "own"] = "none"

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
    """`hf` writes with the trainer's own weights."""
    placement: Literal["together", "apart"] = "together"
    """vLLM on the trainers' GPUs, one engine each, or on GPUs of its own."""
    engine_gpus: int = 0
    """GPUs that only engines use, with placement apart."""
    tensor_parallel: int = 1
    """GPUs of one engine, with placement apart."""
    gpu_fraction: float = 0.5
    """Of a GPU, for an engine with its weights and cache (vLLM's gpu_memory_utilization)."""
    sleep: bool = True
    """An engine together with a trainer hands its memory back while the trainer works."""
    max_batch_tokens: int = 65_536
    """Tokens that the `hf` engine decodes side by side (sampling.max_batch_tokens)."""

    assume: Assumptions = field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        counts = ("gpus", "nodes", "prompt_tokens", "response_tokens", "group_size", "tensor_parallel", "clips")
        for name in (*counts, "reference_gpus"):
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
                f"{self.total_gpus} GPUs leave none to a trainer beside {self.total_gpus - self.trainers} for engines "
                "and the reference; take more, or fewer --engine-gpus and --reference-gpus"
            )
        if self.zero and self.trainers == 1 and not self.offload_optimizer:
            raise ValueError(
                f"--zero {self.zero} divides nothing on one trainer GPU; take --zero 0, more GPUs, or "
                "--offload-optimizer True"
            )
        if self.offload_optimizer and not self.zero:
            raise ValueError("--offload-optimizer is ZeRO's: it needs --zero 1, 2 or 3")
        if self.autocast and self.dtype != "float32":
            raise ValueError(f"--autocast is for float32 weights, not {self.dtype}; leave it out")
        if self.reference == "lora" and not self.lora_rank:
            raise ValueError("--reference lora is the model under its adapter: it needs --lora-rank")
        if self.micro_batch_tokens < self.prompt_tokens + self.response_tokens:
            raise ValueError(
                f"--micro-batch-tokens {self.micro_batch_tokens} do not hold one prompt of {self.prompt_tokens} and "
                f"response of {self.response_tokens}"
            )

    def _check_placement(self) -> None:
        if self.placement == "together" and self.engine_gpus:
            raise ValueError("--engine-gpus are for --placement apart; together, engines use the trainers' GPUs")
        if self.placement == "together" and self.engine == "vllm" and self.tensor_parallel > 1:
            raise ValueError(
                f"--tensor-parallel {self.tensor_parallel}: together, an engine shares one trainer's GPU; for engines "
                "of several take --placement apart --engine-gpus N"
            )
        if self.placement == "apart":
            if self.engine == "hf":
                raise ValueError("--engine hf writes with the trainer's weights: it cannot be apart")
            if not 0 < self.engine_gpus < self.total_gpus:
                raise ValueError(
                    f"--engine-gpus is {self.engine_gpus} of {self.total_gpus} GPUs; engines and trainers need at "
                    "least one each"
                )
        if self.engine == "vllm":
            pool = self.engine_gpus if self.placement == "apart" else self.trainers
            if self.tensor_parallel > self.gpus or pool % self.tensor_parallel:
                raise ValueError(
                    f"--tensor-parallel {self.tensor_parallel}: an engine lies within a node of {self.gpus} GPUs, and "
                    f"engines of this size must fill the {pool} GPUs they have"
                )

    @property
    def total_gpus(self) -> int:
        return self.gpus * self.nodes

    @property
    def trainers(self) -> int:
        """Trainer ranks."""
        return self.total_gpus - self.engine_gpus - (self.reference_gpus if self.reference == "apart" else 0)

    def model_config(self) -> ModelConfig:
        lora = LoraConfig(rank=self.lora_rank, alpha=2 * self.lora_rank) if self.lora_rank else None
        return ModelConfig(dtype=self.dtype, autocast=self.autocast, audio=self.audio, lora=lora)


@dataclass(frozen=True)
class Part:
    """Bytes of one thing in each of `PHASES`, and how they come about."""

    name: str
    how: str
    bytes: tuple[float, ...]


@dataclass(frozen=True)
class Cache:
    """An engine's key-value cache, of one GPU: bytes of a token there, tokens of a whole engine, and what they hold.

    `sequences` of prompt and response each; `shared` where the group's prompt is stored once (prefix caching).
    """

    token_bytes: int
    tokens: int
    sequences: int
    shared: int


@dataclass(frozen=True)
class GPU:
    """What lies on every GPU of one kind."""

    name: str
    count: int
    size: float
    """Bytes that there are."""
    parts: tuple[Part, ...]
    cache: Cache | None

    @property
    def totals(self) -> tuple[float, ...]:
        return tuple(sum(column) for column in zip(*(p.bytes for p in self.parts), strict=True))

    @property
    def peak(self) -> float:
        return max(self.totals)

    @property
    def fits(self) -> bool:
        return self.peak <= self.size and (self.cache is None or self.cache.sequences >= 1)


@dataclass(frozen=True)
class Plan:
    size: Size
    layout: Layout
    gpus: tuple[GPU, ...]
    host: float
    """Bytes of memory that a node needs beside its GPUs."""

    @property
    def fits(self) -> bool:
        return all(gpu.fits for gpu in self.gpus)


def make_plan(size: Size, layout: Layout) -> Plan:
    """What a run of this size and layout puts on its GPUs. Raises ValueError where they do not go together."""
    _check_model(size, layout)
    engine, cache = _engine(size, layout)
    trainer = _trainer(size, layout)
    gpus: tuple[GPU, ...]
    if layout.placement == "apart":
        alone = _with_overhead(engine, layout, "engine", processes=1, ranks=layout.tensor_parallel)
        trainer += [part for part in engine if part.name == "weight sync"]  # one sends, the other receives
        gpus = (
            _gpu("trainer", layout.trainers, layout, _with_overhead(trainer, layout, "trainer", 1, layout.trainers)),
            _gpu("engine", layout.engine_gpus, layout, alone, cache),
        )
    else:
        processes = 2 if layout.engine == "vllm" else 1
        together = _with_overhead(trainer, layout, "trainer", processes, layout.trainers) + engine
        gpus = (_gpu("trainer and engine", layout.trainers, layout, together, cache),)
    if layout.reference == "apart":
        alone = _with_overhead(_reference_alone(size, layout), layout, "reference", processes=1, ranks=1)
        gpus += (_gpu("reference", layout.reference_gpus, layout, alone),)
    return Plan(size, layout, gpus, _host(size, layout))


def changes(size_of: dict[bool, Size], layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Single changes of a layout that may save memory: what to write on the command line, and the new layout.

    `size_of` gives the size with and without adapters.
    """
    half, sharded = layout.micro_batch_tokens // 2, max(layout.zero, 2)
    tries: list[tuple[str, dict[str, Any]]] = [
        ("--gradient-checkpointing True", {"gradient_checkpointing": True}),
        (f"--micro-batch-tokens {half}", {"micro_batch_tokens": half}),
        ("--dtype bfloat16", {"dtype": "bfloat16", "autocast": False}),
        *((f"--zero {stage}", {"zero": stage}) for stage in (1, 2, 3) if stage > layout.zero and layout.trainers > 1),
        ("--reference apart", {"reference": "apart"}),
        (f"--zero {sharded} --offload-optimizer True", {"zero": sharded, "offload_optimizer": True}),
        ("--lora-rank 16", {"lora_rank": 16, "reference": "auto"}),
        *((f"--gpu-fraction {f:g}", {"gpu_fraction": f}) for f in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)),
        *((f"--tensor-parallel {n}", {"tensor_parallel": n}) for n in (2, 4, 8)),
    ]
    for words, values in tries:
        if all(getattr(layout, name) == value for name, value in values.items()):
            continue
        if words.startswith("--lora") and layout.lora_rank:
            continue
        if words.startswith("--reference") and _reference_kind(layout) != "copy":
            continue
        try:
            changed = dataclasses.replace(layout, **values)
            make_plan(size_of[bool(changed.lora_rank)], changed)
        except (ValueError, KeyError):
            continue
        yield words, changed


def _check_model(size: Size, layout: Layout) -> None:
    shape = size.shape
    tp = layout.tensor_parallel
    if layout.engine == "vllm":
        if shape.heads % tp:
            raise ValueError(f"--tensor-parallel {tp} does not divide the {shape.heads} attention heads")
        if shape.kv_heads % tp and tp % shape.kv_heads:
            raise ValueError(f"--tensor-parallel {tp} and {shape.kv_heads} key-value heads do not divide each other")
        if shape.codes:
            raise ValueError("vLLM does not serve models that write codes; take --engine hf")
    if layout.speech_share and not shape.codes:
        raise ValueError("--speech-share is for a model that writes codes; give --codebooks, or leave it out")


# ---------------------------------------------------------------------------------------------------------- trainer


def precision_of(layout: Layout) -> Precision:
    weights = BYTES[layout.dtype]
    # peft holds adapters of a 16-bit model in float32; DeepSpeed casts everything to the model's dtype.
    return Precision(weights, 2 if layout.autocast else weights, weights if layout.zero else 4)


def _trainer(size: Size, layout: Layout) -> list[Part]:
    p = precision_of(layout)
    parts = [_weights(size, layout, p), *_states("", size, layout, p, size.trained, size.adapters)]
    if layout.autocast:
        copies = 2 * size.linears * (2 if layout.critic == "own" else 1)
        parts.append(_part("autocast copies", "the layers' matrices in 2 bytes", copies, "score backward"))
    if layout.ema:
        parts.append(_part("moving average", "float32 of what is trained", 4 * (size.trained + size.adapters)))
    parts += _reference(size, layout, p)
    if layout.critic == "own":
        # Weights that are divided have one owner: at stage 3 the critic copies the frozen ones, too.
        what, copied = "what is trained", _copied(size, p)
        if layout.zero == 3:
            what, copied = "the model", _held(size, p)
        parts.append(_divided("critic weights", f"a copy of {what}", copied, size, layout, p))
        parts += _states("critic ", size, layout, p, size.trained - size.heads, size.adapters)
    return parts + _activations(size, layout, p)


def _weights(size: Size, layout: Layout, p: Precision) -> Part:
    return _divided("weights", f"{_count(size.total)} x {p.weights} bytes", _held(size, p), size, layout, p)


def _held(size: Size, p: Precision) -> float:
    return (size.total - size.adapters) * p.weights + size.adapters * p.adapter


def _copied(size: Size, p: Precision) -> float:
    """A copy shares what is never trained."""
    return size.trained * p.weights + size.adapters * p.adapter


def _divided(name: str, how: str, held: float, size: Size, layout: Layout, p: Precision) -> Part:
    """At stage 3 each rank's part, and beside it all weights between updates; in a backward pass only those outside of
    the decoder's layers and the layers that are gathered."""
    if layout.zero != 3:
        return _part(name, how, held)
    layers = size.adapters + sum(size.parts.get(name, 0) for name in ("decoder layers", "audio FFNs"))
    beside = size.total - layers - size.parts.get("vision tower", 0)
    gathered = (beside + min(layers, max(layout.assume.zero_live, size.largest))) * p.weights
    spread = held / layout.trainers
    at_work = tuple(spread + (min(gathered, held) if x == "backward" else held) for x in PHASES)
    return Part(name, f"{how}, / {layout.trainers} and whole between updates", at_work)


def _states(name: str, size: Size, layout: Layout, p: Precision, trained: int, adapters: int) -> list[Part]:
    """Gradients, the optimizer's states and its temporary memory."""
    n = layout.trainers
    weights = trained * p.weights + adapters * p.adapter
    gradient, bucket = float(weights), 0.0
    if layout.zero:
        bucket = min(trained + adapters, layout.assume.zero_bucket) * p.weights
    how = f"{_count(trained + adapters)} trained"
    if layout.zero >= 2:
        gradient = 0 if layout.offload_optimizer else gradient / n
        how += ", a bucket of them" if layout.offload_optimizer else f" / {n} + a bucket"
    gradients = tuple(gradient * (x in ("backward", "step")) + bucket * (x == "backward") for x in PHASES)
    parts = [Part(f"{name}gradients", how, gradients)]
    if not layout.offload_optimizer:
        states, how = optimizer_bytes(layout, p, trained, adapters)
        parts.append(_part(f"{name}optimizer", how, states))
        master = _master(layout, p)
        temporary = 4 * (trained + adapters) / (n if layout.zero else 1) if master or layout.zero else weights
        what = "gradients in float32" if master or layout.zero else "a moment's copy"
        parts.append(_part(f"{name}step", what, temporary, "step"))
    return parts


def optimizer_bytes(layout: Layout, p: Precision, trained: int, adapters: int) -> tuple[float, str]:
    """AdamW's states on one rank (or in the nodes' memory, for one rank), and how they are counted."""
    if _master(layout, p):
        states, how = 12.0 * (trained + adapters), "12 bytes (master weights, two moments)"
    elif layout.zero:
        states, how = 8.0 * (trained + adapters), "8 bytes (two moments)"
    else:
        states, how = 2.0 * (trained * p.weights + adapters * p.adapter), "two moments"
    return (states / layout.trainers, f"{how} / {layout.trainers}") if layout.zero else (states, how)


def _master(layout: Layout, p: Precision) -> bool:
    wanted = bool(layout.zero) if layout.master_weights is None else layout.master_weights
    return wanted and p.weights < 4


def _reference_kind(layout: Layout) -> str:
    if layout.reference != "auto":
        return layout.reference
    return "lora" if layout.lora_rank and layout.audio == "frozen" else "copy"


def _reference(size: Size, layout: Layout, p: Precision) -> list[Part]:
    if _reference_kind(layout) != "copy":
        return []
    return [_part("reference", "a copy of what is trained, on every rank", _copied(size, p))]


def _reference_alone(size: Size, layout: Layout) -> list[Part]:
    """The whole model on a GPU of its own, which only scores."""
    p = precision_of(layout)
    parts = [_part("weights", f"{_count(size.total)} x {p.weights} bytes", _held(size, p))]
    if layout.autocast:
        parts.append(_part("autocast copies", "the layers' matrices in 2 bytes", 2 * size.linears, "score"))
    return parts + [_only(part, "score") for part in _activations(size, layout, p)]


def _activations(size: Size, layout: Layout, p: Precision) -> list[Part]:
    shape = size.shape
    pack = pack_of(
        layout.micro_batch_tokens, layout.prompt_tokens, layout.response_tokens, layout.group_size, layout.share_prompts
    )
    kept = decoder_bytes(shape, pack, p, layout.attention, layout.gradient_checkpointing)
    passes = 2 if layout.critic == "own" else 1  # both graphs wait for one backward pass
    working = working_bytes(shape, pack, p)
    how = f"{shape.layers} layers, a row of {pack.tokens} tokens" + (" x 2 models" if passes == 2 else "")
    parts = [
        _part("activations", how, passes * kept, "backward"),
        _part("one layer's work", "estimate", working, "score backward"),
        _logits(shape.vocabulary, shape.codes, layout, pack, p),
    ]
    if shape.tower is not None:
        trained = layout.audio == "full"
        heard = tower_bytes(shape.tower, layout.clip_seconds, layout.clips, p, trained, layout.gradient_checkpointing)
        alone = tower_bytes(shape.tower, layout.clip_seconds, 1, p, False, False)
        how = f"{layout.clips if trained else 1} x {layout.clip_seconds:g} s"
        by_phase = {"generate": alone, "score": alone, "backward": heard}
        parts.append(Part("audio tower's activations", how, tuple(by_phase.get(x, 0.0) for x in PHASES)))
    return parts


def _logits(vocabulary: int, codes: int, layout: Layout, pack: Pack, p: Precision) -> Part:
    frames = round(pack.predicted * layout.speech_share)
    a = layout.assume

    def both(gradient: bool) -> float:
        return sum(
            logits_bytes(rows, width, p, layout.fused_logprobs, gradient, a.logits_chunk, a.logits_keep)
            for rows, width in ((pack.predicted - frames, vocabulary), (frames, codes))
        )

    by_phase = {"score": both(False), "backward": both(True)}
    how = f"{pack.predicted} predicted x {vocabulary}" + ("" if layout.fused_logprobs else ", all at once")
    return Part("logits", how, tuple(by_phase.get(x, 0.0) for x in PHASES))


# ----------------------------------------------------------------------------------------------------------- engine


def _engine(size: Size, layout: Layout) -> tuple[list[Part], Cache | None]:
    shape, a = size.shape, layout.assume
    if layout.engine == "hf":
        each = kv_bytes_per_token(shape, 2 if layout.autocast else BYTES[layout.dtype])
        how = f"{layout.max_batch_tokens} tokens x {each} bytes"
        return [_part("key-value cache", how, layout.max_batch_tokens * each, "generate")], None
    tp, number = layout.tensor_parallel, 2
    whole = sum(size.parts.get(name, 0) for name in ("audio tower", "projector", "vision tower"))
    weights = number * (whole + (size.total - size.adapters - whole) / tp)
    work = a.engine_workspace_gib * GIB
    budget = layout.gpu_fraction * layout.gpu_gib * GIB
    each = kv_bytes_per_token(shape, number, tp)
    room = max(budget - weights - work, 0.0)
    cache = _cache(each, int(room // each), layout)
    sync = max(a.sync_bucket_mib * 2**20, size.largest * number)
    asleep = layout.sleep and layout.placement == "together"
    rest = "" if asleep else " score backward step sync"
    split = f"{_count(size.total - size.adapters)} x {number} bytes" + (f", the decoder / {tp}" if tp > 1 else "")
    parts = [
        _part("engine's weights", split, weights, "generate sync" if asleep else "generate" + rest),
        _part("key-value cache", f"what {layout.gpu_fraction:g} of the GPU leaves", room, "generate" + rest),
        _part("engine's workspace", "assumed", work, "generate" + rest),
        _part("weight sync", "a bucket or the largest tensor", sync, "sync"),
    ]
    if asleep:
        parts.append(_part("engine asleep", "assumed", a.engine_asleep_gib * GIB, "score backward step"))
    return parts, cache


def _cache(each: int, tokens: int, layout: Layout) -> Cache:
    """Every GPU of an engine holds its share of each token, so an engine has room for as many as one of them."""
    sequence = layout.prompt_tokens + layout.response_tokens
    group = layout.prompt_tokens + layout.group_size * layout.response_tokens
    whole, rest = divmod(tokens, group)
    shared = whole * layout.group_size + max(rest - layout.prompt_tokens, 0) // layout.response_tokens
    return Cache(each, tokens, tokens // sequence, shared)


def _host(size: Size, layout: Layout) -> float:
    p = precision_of(layout)
    ranks = min(layout.gpus, layout.trainers)
    needed = 0.0
    if layout.offload_optimizer:
        states, _ = optimizer_bytes(layout, p, size.trained, size.adapters)
        needed += ranks * (states + 4 * (size.trained + size.adapters) / layout.trainers)
    if layout.engine == "vllm" and layout.placement == "together" and layout.sleep:
        needed += 2 * size.total * ranks
    return needed


# ------------------------------------------------------------------------------------------------------------ helpers


def _part(name: str, how: str, size: float, phases: str = " ".join(PHASES)) -> Part:
    return Part(name, how, tuple(size * (x in phases.split()) for x in PHASES))


def _only(part: Part, phase: str) -> Part:
    return Part(part.name, part.how, tuple(b * (x == phase) for b, x in zip(part.bytes, PHASES, strict=True)))


def _with_overhead(parts: list[Part], layout: Layout, kind: str, processes: int, ranks: int) -> list[Part]:
    a = layout.assume
    fixed = GIB * (processes * a.context_gib + (a.nccl_gib if ranks > 1 else 0))
    out = [*parts, _part("CUDA and NCCL", f"{processes} process{'es' * (processes > 1)}, assumed", fixed)]
    if kind == "trainer":
        lost = tuple(a.fragmentation * sum(column) for column in zip(*(p.bytes for p in parts), strict=True))
        out.append(Part("fragmentation", f"{a.fragmentation:.0%} of the trainer's, assumed", lost))
    return out


def _gpu(name: str, count: int, layout: Layout, parts: list[Part], cache: Cache | None = None) -> GPU:
    return GPU(name, count, layout.gpu_gib * GIB, tuple(p for p in parts if any(p.bytes)), cache)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
