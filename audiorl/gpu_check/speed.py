"""Checks of time and memory: the packed update, decoding, host syncs, and the planner's estimate."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from audiorl.algos.experience import PackedBatch
from audiorl.algos.packing import attention_mask, pack_experiences
from audiorl.algos.varlen import SegmentAttention, Segments, choose_kernel
from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.gpu_check.setup import Check, Outcome, Setup, at_least, experiences, full_width_policy, question, spans
from audiorl.models import AudioPolicy
from audiorl.models.attention import head_width, spans_of
from audiorl.plan.memory import Assumptions, PlanOptions, make_plan
from audiorl.plan.models import count
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.train.rl.trainer import TrainBatch, Trainer
from audiorl.types import Rollout

PEAK_TFLOPS = {
    "H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0, "B200": 2250.0, "4090": 165.0, "L40": 181.0,
    "L4": 121.0,
}  # fmt: skip
"""Dense bfloat16 TFLOP/s by a part of the GPU's name, from the vendor's data sheets (SXM where there are several)."""
MFU_TARGET, DENSE_TARGET, MEMORY_TOLERANCE, SAME_ANSWERS, MOST_SYNCS = 0.4, 3.0, 0.25, 0.9, 3


_AUTOCAST = ModelConfig(autocast=True, gradient_checkpointing=False)


def peak_flops(setup: Setup) -> tuple[float, str]:
    """Return the FLOP/s of the device in bfloat16 (of an unknown one those of a large product), and their source."""
    name = torch.cuda.get_device_name(setup.device) if setup.is_gpu else "CPU"
    for part, tflops in PEAK_TFLOPS.items():
        if re.search(rf"{part}\b", name):
            return tflops * 1e12, f"{tflops:g} TFLOP/s nominal"
    width = 8192 if setup.is_gpu else 512
    a = torch.randn(width, width, device=setup.device, dtype=setup.dtype)
    rate = 2 * width**3 / setup.seconds(lambda: a @ a)
    return rate, f"{rate / 1e12:.2f} TFLOP/s of a product of {width} x {width}, measured"


def update_flops(policy: AudioPolicy, setup: Setup) -> float:
    """Count the FLOPs of forward and backward of the pack: 6 for each weight of a matrix and row, 12 for each visible
    pair of query and key, head and number of its width; nothing that is computed twice."""
    return pass_flops(policy, pack_experiences(experiences(setup.scale)))


def pass_flops(policy: AudioPolicy, batch: PackedBatch) -> float:
    """Return `update_flops` of any pack; the audio encoder's are left out."""
    decoder, head = policy.backbone.decoder(policy.model), policy.backbone.head(policy.model)
    matrices = sum(p.numel() for p in decoder.layers.parameters() if p.dim() == 2)
    first, end = Segments.of_spans(spans_of(batch.span_ids, batch.span_parents), torch.device("cpu")).visible
    heads = decoder.config.num_attention_heads * head_width(decoder.config)
    attended = 12 * int((end - first).sum()) * heads * len(decoder.layers)
    return float(6 * matrices * len(batch.ids) + attended + 6 * int(batch.loss_mask.sum()) * head.weight.numel())


def packed_update(setup: Setup) -> Outcome:
    """Time forward and backward of a pack with shared prompts, as the trainer runs them."""
    policy = full_width_policy(setup, _AUTOCAST)
    batch = pack_experiences(experiences(setup.scale))

    def update() -> None:
        policy.forward(batch).logprobs.mean().backward()

    seconds = setup.seconds(update)
    peak, source = peak_flops(setup)
    mfu = update_flops(policy, setup) / seconds / peak
    rate = len(batch.ids) / seconds
    detail = f"{rate:,.0f} tokens/s, MFU {mfu:.1%} of {source}"
    return at_least(mfu, MFU_TARGET, detail, setup, tokens_per_second=rate, mfu=mfu, seconds=seconds)


def against_padded(setup: Setup) -> Outcome:
    """Compare with the same answers in the usual form: the prompt repeated, transformers' own forward, full logits."""
    policy = full_width_policy(setup, _AUTOCAST)
    stock = full_width_policy(setup, _AUTOCAST).model
    stock.config._attn_implementation = "sdpa"
    group = experiences(setup.scale)
    ids = torch.stack([e.ids for e in group]).to(setup.device)
    batch = pack_experiences(group)
    prompt = setup.scale.prompt

    def padded() -> None:
        for part in ids.split(setup.scale.group_size):
            with torch.autocast(setup.device.type, torch.bfloat16):
                logits = stock(input_ids=part, use_cache=False).logits[:, prompt - 1 : -1].float()
            loss = cross_entropy(logits.flatten(0, 1), part[:, prompt:].flatten(), reduction="sum")
            (loss / ids[:, prompt:].numel()).backward()

    seconds = setup.seconds(lambda: policy.forward(batch).logprobs.mean().backward())
    padded_seconds = setup.seconds(padded)
    ratio = padded_seconds / seconds
    detail = f"packed {seconds:.3f} s, padded {padded_seconds:.3f} s: {ratio:.1f}× faster"
    return at_least(ratio, 1.0, detail, setup, ratio=ratio, seconds=seconds, padded_seconds=padded_seconds)


def against_the_mask(setup: Setup) -> Outcome:
    """Time attention of a pack, forward and backward: the chosen kernel against one call with a mask of T × T."""
    scale = setup.scale
    rows = spans(scale)[-1][1]
    heads = (scale.heads, scale.kv_heads, scale.kv_heads)
    query, key, value = (
        torch.randn(1, h, rows, scale.head_width, device=setup.device, dtype=setup.dtype, requires_grad=True)
        for h in heads
    )
    batch = pack_experiences(experiences(scale))
    mask = attention_mask(batch.span_ids, batch.span_parents).to(setup.device)
    kernel = choose_kernel("auto", setup.device, setup.dtype, scale.head_width)
    attend = SegmentAttention(kernel, Segments.of_spans(spans(scale), setup.device))
    groups = scale.heads // scale.kv_heads

    def dense() -> Tensor:
        keys, values = (x.repeat_interleave(groups, 1) for x in (key, value))
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    seconds = setup.seconds(lambda: attend(query, key, value).sum().backward())
    dense_seconds = setup.seconds(lambda: dense().sum().backward())
    ratio = dense_seconds / seconds
    detail = f"{kernel.name} {1e3 * seconds:.2f} ms, mask {1e3 * dense_seconds:.2f} ms at T = {rows}: {ratio:.1f}×"
    return at_least(ratio, DENSE_TARGET, detail, setup, ratio=ratio, seconds=seconds, dense_seconds=dense_seconds)


def decoding(setup: Setup) -> Outcome:
    """Measure tokens per second of the `hf` engine."""
    policy = full_width_policy(setup, _AUTOCAST)
    _, rate = _decoded(HFEngine(policy, SamplingConfig(max_new_tokens=setup.scale.response)), setup)
    weights = sum(p.numel() for p in policy.model.parameters())
    peak, _ = peak_flops(setup)
    mfu = 2 * weights * rate / peak
    detail = f"{rate:,.0f} tokens/s of {setup.scale.decoded} rollouts, MFU {mfu:.2%}"
    return Outcome("measured", detail, {"tokens_per_second": rate, "mfu": mfu})


def captured_decoding(setup: Setup) -> Outcome:
    """Run the `hf` engine with and without CUDA graphs: in float32 they sample the same answers, up to rounding in one
    of ten; then tokens per second of both in bfloat16."""
    if not setup.is_gpu:
        return Outcome("skipped", "only a GPU has CUDA graphs")
    captured = SamplingConfig(max_new_tokens=setup.scale.response)
    both = (replace(captured, cuda_graphs=False), captured)
    policy = full_width_policy(setup, ModelConfig())
    expected, answers = (_decoded(HFEngine(policy, sampling), setup)[0] for sampling in both)
    pairs = zip(expected, answers, strict=True)
    same = sum(a.segments[0].ids.tolist() == b.segments[0].ids.tolist() for a, b in pairs) / len(expected)
    policy = full_width_policy(setup, _AUTOCAST)
    plain_rate, rate = (_decoded(HFEngine(policy, sampling), setup)[1] for sampling in both)
    detail = f"{same:.0%} of the answers equal, {rate:,.0f} tokens/s, {plain_rate:,.0f} without"
    numbers = {"tokens_per_second": rate, "plain_tokens_per_second": plain_rate, "same": same}
    return Outcome("pass" if same >= SAME_ANSWERS and rate > plain_rate else "fail", detail, numbers)


def _decoded(engine: HFEngine, setup: Setup) -> tuple[list[Rollout], float]:
    """Return the rollouts of one prompt, and tokens per second of a second call."""
    rollouts: list[Rollout] = []

    def generate() -> None:
        rollouts[:] = engine.generate([Request(question(), n=setup.scale.decoded)])

    seconds = setup.seconds(generate, repeats=1)
    return rollouts, sum(r.num_sampled for r in rollouts) / seconds


def memory(setup: Setup) -> Outcome:
    """Compare the peak memory of a training step with what the planner says for it."""
    policy = full_width_policy(setup, _AUTOCAST)
    scale = setup.scale
    options = PlanOptions(
        model=policy.config,
        rl=RLConfig(
            kl_beta=0.0,
            prompts_per_step=scale.groups,
            group_size=scale.group_size,
            micro_batch_tokens=scale.tokens,
        ),
        sampling=SamplingConfig(max_new_tokens=scale.response, max_batch_tokens=1),
        prompt_tokens=scale.prompt,
        assume=Assumptions(0, 0, 0, 0, 0, 0),
    )
    planned = make_plan(count(policy), options).gpus[0].peak
    numbers = {"planned_bytes": planned}
    if not setup.is_gpu:
        return Outcome("skipped", f"planned {planned / 1e9:.3f} GB; only a GPU counts what is allocated", numbers)
    trainer = _trainer(policy)
    torch.cuda.reset_peak_memory_stats(setup.device)
    for _ in range(2):  # AdamW makes its state in the first step
        trainer.step(TrainBatch(experiences(scale)))
    measured = torch.cuda.max_memory_allocated(setup.device)
    error = abs(planned - measured) / measured
    state = "pass" if error <= MEMORY_TOLERANCE else "fail"
    detail = f"planned {planned / 1e9:.2f} GB, measured {measured / 1e9:.2f} GB ({planned / measured - 1:+.0%})"
    return Outcome(state, detail, {**numbers, "measured_bytes": float(measured)})  # type: ignore[arg-type]


def syncs(setup: Setup) -> Outcome:
    """Count operations of a training step that make the host wait for the GPU; torch reports them as warnings."""
    if not setup.is_gpu:
        return Outcome("skipped", "only a GPU has syncs to count")
    trainer = _trainer(full_width_policy(setup, _AUTOCAST))
    batch = TrainBatch(experiences(setup.scale))
    trainer.step(batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    count = sum("synchronizing" in str(w.message) for w in caught)
    state = "pass" if count <= MOST_SYNCS else "fail"
    return Outcome(state, f"{count} in a step of one micro-batch, at most {MOST_SYNCS}", {"syncs": float(count)})  # type: ignore[arg-type]


def _trainer(policy: AudioPolicy) -> Trainer:
    scale = RLConfig(steps=10, kl_beta=0.0, micro_batch_tokens=2**20)
    return Trainer(policy, scale, OptimConfig(lr=1e-6), 1.0, 256)


CHECKS: dict[str, Check] = {
    "attention against a mask": against_the_mask,
    "packed update": packed_update,
    "packed against padded": against_padded,
    "decoding": decoding,
    "decoding, captured": captured_decoding,
    "memory against the plan": memory,
    "syncs of a step": syncs,
}
