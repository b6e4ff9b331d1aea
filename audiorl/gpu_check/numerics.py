"""Checks of what is computed: kernels, packing, log-probs of the engine, audio encoders."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.algos.varlen import FLEX, PADDED, SDPA, TORCH_VARLEN, Attention, Kernel, SegmentAttention, Segments
from audiorl.audio import AudioClip
from audiorl.config import LoraConfig, ModelConfig, SamplingConfig
from audiorl.gpu_check.setup import (
    TEXTS,
    Check,
    Outcome,
    Setup,
    experiences,
    full_width_policy,
    largest,
    question,
    spans,
    within,
)
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.audio_encoder import PASS_SECONDS
from audiorl.models.families import qwen_omni
from audiorl.protocols import Request, RolloutEngine
from audiorl.rollout import kernels
from audiorl.rollout.hf import HFEngine

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest relative error of outputs and gradients of a kernel, against float32 of the same inputs."""


def kernel_equals_reference(kernel: Kernel, dtype: torch.dtype, setup: Setup) -> Outcome:
    """Compare outputs and gradients of spans that share prompts (grouped queries) with SDPA on the CPU in float32."""
    obstacle = kernel.obstacle(setup.device, dtype, setup.scale.head_width)
    if obstacle is not None:
        return Outcome("skipped", f"{kernel.name} {obstacle}")
    generator = torch.Generator().manual_seed(0)
    rows = spans(setup.scale)[-1][1]
    heads = (setup.scale.heads, setup.scale.kv_heads, setup.scale.kv_heads, setup.scale.heads)
    inputs = [torch.randn(1, h, rows, setup.scale.head_width, generator=generator).to(dtype) for h in heads]
    expected = _attended(SDPA, [x.float() for x in inputs], setup)
    computed = _attended(kernel, [x.to(setup.device) for x in inputs], setup)
    errors = [largest(a.cpu().float(), b) for a, b in zip(computed, expected, strict=True)]
    names = ("output", "query_gradient", "key_gradient", "value_gradient")
    return within(max(errors), BOUNDS[dtype], "largest error", **dict(zip(names, errors, strict=True)))


def _attended(kernel: Kernel, inputs: list[Tensor], setup: Setup) -> list[Tensor]:
    """Return the output, and the gradients of query, key and value."""
    query, key, value = (x.detach().requires_grad_() for x in inputs[:3])
    out = SegmentAttention(kernel, Segments.of_spans(spans(setup.scale), query.device))(query, key, value)
    out.backward(inputs[3].transpose(1, 2))
    return [out.detach(), *(x.grad for x in (query, key, value) if x.grad is not None)]


def packed_equals_single(setup: Setup) -> Outcome:
    """Compare log-probs in float32: shared prompts in one pack, repeated prompts in one pack, one answer at a time."""
    policy = full_width_policy(setup, ModelConfig(gradient_checkpointing=False))
    group = experiences(setup.scale)[: 2 * setup.scale.group_size : 2]
    with torch.no_grad():
        single = torch.cat([policy.forward(pack_experiences([e])).logprobs for e in group])
        packed = policy.forward(pack_experiences(group, share_prompts=False)).logprobs
        shared = policy.forward(pack_experiences(group)).logprobs
    error = max(float((x - single).abs().max()) for x in (packed, shared))
    return within(error, 1e-3, "largest difference of a log-prob")


def update_in_bf16(setup: Setup) -> Outcome:
    """Compare gradients with the kernel that training takes, in bfloat16 over float32 weights, layers computed twice,
    with float32 span by span: the cosine of each weight's gradient, in float64, of which the worst counts."""
    reference = _gradients(setup, "sdpa", autocast=False)
    gradients = _gradients(setup, "auto", autocast=True)
    cosines = {name: float(torch.cosine_similarity(reference[name], gradients[name], dim=0)) for name in reference}
    worst = min(cosines, key=lambda name: cosines[name])
    return within(1 - cosines[worst], 0.01, f"1 - cosine of the gradient of {worst}", cosine=cosines[worst])


def _gradients(setup: Setup, attention: Attention, autocast: bool) -> dict[str, Tensor]:
    """Return the gradient of each weight of the layers, flat, in float64 on the CPU."""
    config = ModelConfig(attention=attention, autocast=autocast, gradient_checkpointing=True, only=("layers",))
    policy = full_width_policy(setup, config)
    group = experiences(setup.scale)[: setup.scale.group_size]
    out = policy.forward(pack_experiences(group)).logprobs
    (out * torch.linspace(-1, 1, len(out), device=out.device)).mean().backward()
    return {n: p.grad.flatten().cpu().double() for n, p in policy.trainable().items() if p.grad is not None}


def decoding_kernels(dtype: torch.dtype, setup: Setup) -> Outcome:
    """Compare Triton's kernels of a decoding step with torch's operators."""
    if not setup.is_gpu:
        return Outcome("skipped", "only a GPU runs Triton's kernels")
    groups = setup.scale.heads // setup.scale.kv_heads
    far = kernels.differences(setup.device, dtype, groups, setup.scale.head_width)
    return within(max(far.values()), kernels.LIMITS[dtype], "largest difference", **far)


def engine_equals_trainer(dtype: torch.dtype, setup: Setup) -> Outcome:
    """Compare log-probs of sampled tokens: by the engine with its cache, and by the trainer over the packed row."""
    policy = full_width_policy(setup, ModelConfig(autocast=dtype == torch.bfloat16))
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=setup.scale.response))
    return _gap(policy, engine, 1e-3 if dtype == torch.float32 else 0.05, setup)


def vllm_equals_trainer(setup: Setup, adapter: bool = False) -> Outcome:
    """Compare log-probs of tokens that vLLM sampled, with a checkpoint's weights or an adapter that is sent to it."""
    if importlib.util.find_spec("vllm") is None:
        return Outcome("skipped", "vllm is not installed")
    from audiorl.rollout.vllm import VLLMConfig, VLLMEngine
    from audiorl.rollout.vllm_weights import served_weights

    config = ModelConfig(dtype="bfloat16" if setup.is_gpu else "float32")
    policy = full_width_policy(setup, config)
    sampling = SamplingConfig(max_new_tokens=setup.scale.response)
    options = VLLMConfig(
        max_model_len=1024,
        kv_cache_mb=512 if setup.is_gpu else 16,
        enforce_eager=not setup.is_gpu,
        lora="adapter" if adapter else "merged",
    )
    with TemporaryDirectory() as folder:
        policy.save(folder)
        if adapter:
            policy = load_policy(folder, replace(config, device=str(setup.device), lora=LoraConfig(rank=16)))
            policy.save(folder + "/adapter")
        engine = VLLMEngine(folder + "/adapter" if adapter else folder, sampling, options)
        try:
            if adapter:
                generator = torch.Generator().manual_seed(0)
                with torch.no_grad():
                    for p in policy.trainable().values():  # random matrices, which change the log-probs
                        p.copy_(0.02 * torch.randn(p.shape, generator=generator))
                engine.update_weights(served_weights(policy, "adapter"), 1)
            return _gap(policy, engine, 0.05 if setup.is_gpu else 1e-3, setup)
        finally:
            engine.close()


def _gap(policy: AudioPolicy, engine: RolloutEngine, bound: float, setup: Setup) -> Outcome:
    rollouts = engine.generate([Request(question(), n=setup.scale.decoded)])
    batch = [Experience.from_rollout(r) for r in rollouts]
    with torch.no_grad():
        trained = policy.forward(pack_experiences(batch)).logprobs.float().cpu()
    sampled = torch.cat([e.rollout_logprobs[e.loss_mask] for e in batch if e.rollout_logprobs is not None])
    gap = (trained - sampled).abs()
    return within(float(gap.mean()), bound, "mean difference of a log-prob", largest=float(gap.max()))


def clips_together(setup: Setup) -> Outcome:
    """Compare features of an Omni encoder in float32: many clips at once, and one after the other; also the speed."""
    policy = qwen_omni.tiny(TEXTS, hidden=64, layers=1, vocab_size=400, whisper=False)
    policy.model.to(setup.device)
    generator = np.random.default_rng(0)
    clips = [
        AudioClip(array=(0.1 * generator.standard_normal(16_000 * n)).astype(np.float32), sample_rate=16_000)
        for n in (1, 3, 7, 2, 5, 4, 6, 8)
    ]

    def features(pass_seconds: float) -> tuple[Tensor, float]:
        def encode() -> Tensor:
            policy.audio.cache.clear()
            return torch.cat(policy.encode_audio(clips))

        policy.audio.pass_seconds = pass_seconds
        return encode(), setup.seconds(encode)

    (single, slow), (together, fast) = features(0.0), features(PASS_SECONDS)
    outcome = within(largest(together, single), 1e-4, "largest error of a feature", times_faster=slow / fast)
    return Outcome(outcome.state, f"{outcome.detail}; {slow / fast:.1f}× faster", outcome.numbers)


CHECKS: dict[str, Check] = {
    **{
        f"kernel {kernel.name}, {name}": partial(kernel_equals_reference, kernel, dtype)
        for kernel in (TORCH_VARLEN, PADDED, FLEX, SDPA)
        for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"))
    },
    **{
        f"decoding kernels, {name}": partial(decoding_kernels, dtype)
        for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"))
    },
    "packed = shared = single": packed_equals_single,
    "gradients in bf16": update_in_bf16,
    "HF engine = trainer, fp32": partial(engine_equals_trainer, torch.float32),
    "HF engine = trainer, bf16": partial(engine_equals_trainer, torch.bfloat16),
    "vLLM = trainer": vllm_equals_trainer,
    "vLLM with an adapter = trainer": partial(vllm_equals_trainer, adapter=True),
    "clips encoded together": clips_together,
}
