"""How much GPU memory a run needs, by part and by phase of a step, from arithmetic alone.

Model states follow ZeRO (Rajbhandari et al., arXiv 1910.02054): with Ψ trained weights on N ranks in a 16-bit dtype,
weights 2Ψ, gradients 2Ψ, and 12Ψ for AdamW (Loshchilov and Hutter, arXiv 1711.05101): two moments and a master copy in
float32. Stage 1 divides the last by N, stage 2 also the gradients, stage 3 also the weights, here while a backward pass
runs: between updates every rank holds them whole (`audiorl.train.optim.zero`). A step needs the gradients in
float32 for a
moment, 4Ψ / N. AdamW without master weights keeps two moments in the dtype of the weights, and torch's default form
makes one temporary copy of a moment in a step. Frozen weights have neither gradients nor moments. An optimizer on the
CPU (ZeRO-Offload, arXiv 2101.06840) leaves weights and a bucket of gradients on the GPU.

Activations and logits are `audiorl.plan.activations`, counts of weights `audiorl.plan.sizes`. An engine takes a
fraction of the GPU: what its weights and its workspace leave of it is its key-value cache (arXiv 2309.06180).

A step has five phases; what they hold together is the column of a table, and the largest column decides:

    generate   the engine generates; colocated trainers keep their states, but no gradients
    score      log-probs of the reference, of the old policy, and values, without gradients
    backward   activations of a micro-batch, logits, gradients
    step       the optimizer; activations are gone
    sync       weights on their way to the engine

Numbers that cannot be computed are fields of `Assumptions`.
"""

from __future__ import annotations

from audiorl.plan.engine import engine_parts, host_bytes
from audiorl.plan.layout import Layout, critics_layout
from audiorl.plan.parts import GPU, Plan, gpu_of, with_overhead
from audiorl.plan.sizes import Size
from audiorl.plan.trainer import critic_parts, reference_parts, trainer_parts


def make_plan(size: Size, layout: Layout) -> Plan:
    """What a run of this size and layout puts on its GPUs. Raises ValueError where they do not go together."""
    _check_model(size, layout)
    engine, cache = engine_parts(size, layout)
    trainer = trainer_parts(size, layout)
    gpus: tuple[GPU, ...]
    if layout.placement == "dedicated":
        separate = with_overhead(engine, layout, "engine", processes=1, ranks=layout.tensor_parallel)
        trainer += [part for part in engine if part.name == "weight sync"]  # one sends, the other receives
        gpus = (
            gpu_of("trainer", layout.trainers, layout, with_overhead(trainer, layout, "trainer", 1, layout.trainers)),
            gpu_of("engine", layout.engine_gpus, layout, separate, cache),
        )
    else:
        processes = 2 if layout.engine == "vllm" else 1
        shared = with_overhead(trainer, layout, "trainer", processes, layout.trainers) + engine
        gpus = (gpu_of("trainer and engine", layout.trainers, layout, shared, cache),)
    if layout.reference == "separate":
        separate = with_overhead(reference_parts(size, layout), layout, "reference", processes=1, ranks=1)
        gpus += (gpu_of("reference", layout.reference_gpus, layout, separate),)
    if layout.critic == "separate":
        critic = critic_parts(size, critics_layout(layout))
        separate = with_overhead(critic, layout, "critic", processes=1, ranks=layout.critic_gpus)
        gpus += (gpu_of("critic", layout.critic_gpus, layout, separate),)
    return Plan(size, layout, gpus, host_bytes(size, layout))


def _check_model(size: Size, layout: Layout) -> None:
    shape = size.shape
    tp = layout.tensor_parallel
    if layout.engine == "vllm":
        if shape.heads % tp:
            raise ValueError(f"--runtime.engine-gpus {tp} does not divide the {shape.heads} attention heads")
        if shape.kv_heads % tp and tp % shape.kv_heads:
            raise ValueError(
                f"--runtime.engine-gpus {tp} and {shape.kv_heads} key-value heads: neither divides the other"
            )
        if shape.codes:
            raise ValueError("vLLM does not serve models that write codes; use --runtime.engine hf")
        if shape.kind == "whisper":
            raise ValueError("vLLM serves no Whisper policy; use --runtime.engine hf")
    if layout.speech_share and not shape.codes:
        raise ValueError("--speech-share is for a model that writes codes; give --codebooks, or leave it out")
