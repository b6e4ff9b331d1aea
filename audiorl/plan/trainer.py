"""What a trainer holds: weights, gradients, optimizer, reference, critic, activations, logits."""

from __future__ import annotations

from audiorl.plan.activations import (
    Pack,
    Precision,
    decoder_bytes,
    logits_bytes,
    pack_of,
    tower_bytes,
    working_bytes,
)
from audiorl.plan.layout import BYTES, PHASES, Layout
from audiorl.plan.parts import Part, count_text, only, part
from audiorl.plan.sizes import Size


def precision_of(layout: Layout) -> Precision:
    weights = BYTES[layout.dtype]
    # peft holds adapters of a 16-bit model in float32; DeepSpeed casts everything to the model's dtype.
    return Precision(weights, 2 if layout.autocast else weights, weights if layout.zero else 4)


def trainer_parts(size: Size, layout: Layout) -> list[Part]:
    p = precision_of(layout)
    parts = [_weights(size, layout, p), *_states("", size, layout, p, size.trained, size.adapters)]
    if layout.autocast:
        copies = 2 * size.linears * (2 if layout.critic == "own" else 1)
        parts.append(part("autocast copies", "the layers' matrices in 2 bytes", copies, "score backward"))
    if layout.ema:
        parts.append(part("moving average", "float32 of what is trained", 4 * (size.trained + size.adapters)))
    parts += _reference(size, layout, p)
    if layout.reference != "separate":
        parts += _teacher(size, layout, p)
    if layout.critic == "own":
        # Weights that are divided have one owner: at stage 3 the critic copies the frozen ones, too.
        what, copied = "what is trained", _copied(size, p)
        if layout.shards_weights:
            what, copied = "the model", _held(size, p)
        parts.append(_divided("critic weights", f"a copy of {what}", copied, size, layout, p))
        parts += _states("critic ", size, layout, p, size.trained - size.heads, size.adapters)
    return parts + _activations(size, layout, p)


def _weights(size: Size, layout: Layout, p: Precision) -> Part:
    return _divided("weights", f"{count_text(size.total)} x {p.weights} bytes", _held(size, p), size, layout, p)


def _held(size: Size, p: Precision) -> float:
    return (size.total - size.adapters) * p.weights + size.adapters * p.adapter


def _copied(size: Size, p: Precision) -> float:
    """A copy shares what is never trained."""
    return size.trained * p.weights + size.adapters * p.adapter


def _divided(name: str, how: str, held: float, size: Size, layout: Layout, p: Precision) -> Part:
    """At stage 3 and with FSDP each rank's part, plus all weights between updates; in a backward pass only those
    outside of the decoder's layers and the layers that are gathered (with FSDP one, and the next)."""
    if not layout.shards_weights:
        return part(name, how, held)
    layers = _in_layers(size)
    non_layer = size.total - layers
    live = 2 * layers / size.shape.layers if layout.fsdp else max(layout.assume.zero_live, size.largest)
    gathered = (non_layer + min(layers, live)) * p.weights
    spread = (layers * p.weights if layout.fsdp else held) / layout.trainers
    at_work = tuple(spread + (min(gathered, held) if x == "backward" else held) for x in PHASES)
    return Part(name, f"{how}, / {layout.trainers} and whole between updates", at_work)


def _in_layers(size: Size) -> int:
    return size.adapters + sum(size.parts.get(name, 0) for name in ("decoder layers", "audio FFNs"))


def _states(name: str, size: Size, layout: Layout, p: Precision, trained: int, adapters: int) -> list[Part]:
    """Gradients, the optimizer's states and its temporary memory."""
    n = layout.trainers
    weights = trained * p.weights + adapters * p.adapter
    gradient, bucket = float(weights), 0.0
    if layout.zero:
        bucket = min(trained + adapters, layout.assume.zero_bucket) * p.weights
    how = f"{count_text(trained + adapters)} trained"
    if layout.zero >= 2:
        gradient = 0 if layout.offload_optimizer else gradient / n
        how += ", a bucket of them" if layout.offload_optimizer else f" / {n} + a bucket"
    gradients = tuple(gradient * (x in ("backward", "step")) + bucket * (x == "backward") for x in PHASES)
    if layout.fsdp:  # those outside of the layers are reduced after the last backward pass; a layer's in 4 bytes
        in_layers = trained + adapters if layout.lora_rank else min(trained, _in_layers(size))
        outside = (trained + adapters - in_layers) * p.weights
        divided = gradient / n
        reduced = 2 * 4 * in_layers / size.shape.layers
        gradients = tuple(
            (gradient - outside) / n + outside + reduced if x == "backward" else divided * (x == "step") for x in PHASES
        )
        how += f" / {n}, whole outside of the layers until the step"
    parts = [Part(f"{name}gradients", how, gradients)]
    if not layout.offload_optimizer:
        states, how = optimizer_bytes(layout, p, trained, adapters)
        parts.append(part(f"{name}optimizer", how, states))
        master = _master(layout, p)
        in_float32 = master or layout.zero
        temporary = (4 * (trained + adapters) if in_float32 else weights) / (n if layout.sharded else 1)
        what = "gradients in float32" if in_float32 else "a moment's copy"
        parts.append(part(f"{name}step", what, temporary, "step"))
    return parts


def optimizer_bytes(layout: Layout, p: Precision, trained: int, adapters: int) -> tuple[float, str]:
    """AdamW's states on one rank (or in the nodes' memory, for one rank), and how they are counted."""
    if _master(layout, p) and (layout.zero or trained):
        copied = trained + (adapters if layout.zero else 0)  # without ZeRO adapters are float32 and need no copy
        states, how = 12.0 * copied + 8.0 * (trained + adapters - copied), "12 bytes (master weights, two moments)"
    elif layout.zero:
        states, how = 8.0 * (trained + adapters), "8 bytes (two moments)"
    else:
        states, how = 2.0 * (trained * p.weights + adapters * p.adapter), "two moments"
    return (states / layout.trainers, f"{how} / {layout.trainers}") if layout.sharded else (states, how)


def _master(layout: Layout, p: Precision) -> bool:
    return (layout.master_weights or bool(layout.zero)) and p.weights < 4


def _reference_kind(layout: Layout) -> str:
    if layout.reference != "auto":
        return layout.reference
    return "lora" if layout.lora_rank and layout.audio == "frozen" else "copy"


def _reference(size: Size, layout: Layout, p: Precision) -> list[Part]:
    if _reference_kind(layout) != "copy":
        return []
    return [part("reference", "a copy of what is trained, on every rank", _copied(size, p))]


def reference_parts(size: Size, layout: Layout) -> list[Part]:
    """The whole model on a GPU of its own, which only scores."""
    p = precision_of(layout)
    parts = [part("weights", f"{count_text(size.total)} x {p.weights} bytes", _held(size, p))]
    if layout.autocast:
        parts.append(part("autocast copies", "the layers' matrices in 2 bytes", 2 * size.linears, "score"))
    parts += _teacher(size, layout, p)
    return parts + [only(part, "score") for part in _activations(size, layout, p)]


def critic_parts(size: Size, layout: Layout) -> list[Part]:
    """The value model on GPUs of its own, which scores and learns, with its optimizer. `layout`: of the critics."""
    p = precision_of(layout)
    parts = [_weights(size, layout, p), *_states("", size, layout, p, size.trained - size.heads, size.adapters)]
    if layout.autocast:
        parts.append(part("autocast copies", "the layers' matrices in 2 bytes", 2 * size.linears, "score backward"))
    activations = [part for part in _activations(size, layout, p) if part.name != "logits"]
    return parts + [only(part, "score", "backward") for part in activations]


def _teacher(size: Size, layout: Layout, p: Precision) -> list[Part]:
    """A teacher of distillation that is another model: whole and frozen. It scores before or after the policy does."""
    teacher = layout.teacher
    if teacher is None:
        return []
    score = PHASES.index("score")
    teachers, policys = (sum(x.bytes[score] for x in _activations(each, layout, p)) for each in (teacher, size))
    how = f"{count_text(teacher.total)} x {p.weights} bytes, frozen"
    more = part("teacher's activations", "what they take more than the policy's", max(teachers - policys, 0), "score")
    return [part("teacher", how, teacher.total * p.weights), more]


def _activations(size: Size, layout: Layout, p: Precision) -> list[Part]:
    shape = size.shape
    pack = pack_of(
        layout.micro_batch_tokens, layout.prompt_tokens, layout.response_tokens, layout.group_size, layout.share_prompts
    )
    saved = decoder_bytes(shape, pack, p, layout.attention, layout.gradient_checkpointing)
    passes = 2 if layout.critic == "own" else 1  # both graphs wait for one backward pass
    working = working_bytes(shape, pack, p)
    how = f"{shape.layers} layers, a row of {pack.tokens} tokens" + (" x 2 models" if passes == 2 else "")
    parts = [
        part("activations", how, passes * saved, "backward"),
        part("one layer's work", "estimate", working, "score backward"),
        _logits(shape.vocabulary, shape.codes, layout, pack, p),
    ]
    if shape.tower is not None:
        trained = layout.audio == "full"
        encoder = tower_bytes(shape.tower, layout.clip_seconds, layout.clips, p, trained, layout.gradient_checkpointing)
        alone = tower_bytes(shape.tower, layout.clip_seconds, 1, p, False, False)
        how = f"{layout.clips if trained else 1} x {layout.clip_seconds:g} s"
        by_phase = {"generate": alone, "score": alone, "backward": encoder}
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
