"""Attention of packed rows is attention under the mask, forward and backward, with every kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from audiorl.algos import varlen
from audiorl.algos.experience import Experience
from audiorl.algos.packing import attention_mask, pack_experiences
from audiorl.algos.varlen import Kernel, Segments, flex, sdpa
from audiorl.audio import AudioClip
from audiorl.config import ModelConfig
from audiorl.data.corpus import Utterance
from audiorl.models import AudioPolicy
from audiorl.models.attention import GQA, spans_of
from audiorl.models.families import higgs
from audiorl.types import Sample
from tests.conftest import (
    TEXTS,
    Make,
    make_dual_omni,
    make_omni,
    make_qwen2_audio,
    make_qwen3_omni,
    make_text,
    make_whisper,
    readable,
)
from tests.support.speaking_models import experiences as spoken


def answers(policy: AudioPolicy, samples: list[Sample]) -> list[Experience]:
    """Groups of 3, 1 and 2 answers of random tokens, one of them a single token."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for sample, lengths in zip(readable(policy, samples), ((5, 1, 9), (4,), (7, 3)), strict=True):
        prompt = policy.prompt(sample).ids
        for n in lengths:
            ids = torch.cat([prompt, torch.randint(0, 200, (n,), generator=generator)])
            mask = torch.arange(len(ids)) >= len(prompt)
            audio = sample.audio if policy.backbone.audio_token else ()
            out.append(Experience(ids, mask, len(prompt), audio, group_id=sample.id))
    return out


def gradients(policy: AudioPolicy, packs: list[list[Experience]], shared: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of all experiences, and the gradients of a sum in which each weighs differently."""
    policy.zero_grad()
    out = torch.cat([policy.forward(pack_experiences(pack, shared)).logprobs for pack in packs])
    (out * torch.linspace(-1, 1, len(out))).sum().backward()
    return out.detach(), {n: p.grad.clone() for n, p in policy.trainable().items() if p.grad is not None}


@pytest.fixture
def flex_differentiates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled FlexAttention has gradients on the CPU too, behind a check that refuses them."""
    monkeypatch.setattr(import_module("torch.nn.attention.flex_attention"), "_validate_device", lambda *_: None)


def gathered_sdpa(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None = None) -> Tensor:
    """What the GPU's kernels compute, with the reference: keys gathered by the index, lengths of queries and keys."""
    key, value = segments.gather(key, value)
    return sdpa(query, key, value, replace(segments, parents=(), key_rows=None), scale)


def stream(policy: AudioPolicy, samples: list[Sample]) -> Experience:
    """Two chunks of audio, each followed by sampled tokens."""
    clips = [c for s in samples[:2] for c in s.audio]
    turns = [policy.prompt(samples[0]).ids, torch.arange(9), policy.chunk_ids(clips[1]), torch.arange(20, 24)]
    mask = torch.cat([torch.full((len(t),), sampled) for t, sampled in zip(turns, (False, True) * 2, strict=True)])
    return Experience(torch.cat(turns), mask, len(turns[0]), tuple(clips), group_id="stream")


def with_stream(policy: AudioPolicy, samples: list[Sample]) -> list[Experience]:
    return [*answers(policy, samples), stream(policy, samples)]


FAMILIES: dict[str, tuple[Make, Callable[[AudioPolicy, list[Sample]], list[Experience]]]] = {
    "qwen2.5-omni": (make_omni, with_stream),
    "qwen3-omni": (make_qwen3_omni, with_stream),
    "qwen2-audio": (make_qwen2_audio, with_stream),
    "text": (make_text, answers),
    "speaking omni": (make_dual_omni, lambda policy, _: spoken(policy)),
    "higgs": (partial(higgs.tiny, TEXTS), lambda policy, _: spoken(policy)),
    "whisper": (make_whisper, answers),
}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("run", [sdpa, gathered_sdpa, flex], ids=["sdpa", "gathered", "flex"])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_equal_the_mask(
    family: str,
    shared: bool,
    run: Callable[..., Tensor],
    samples: list[Sample],
    monkeypatch: pytest.MonkeyPatch,
    flex_differentiates: None,
) -> None:
    """Log-probs and gradients. Layers are checkpointed: attention runs again in the backward pass.

    Whisper never had a mask: there the reference is one experience in a pack, span by span.
    """
    make, experiences_of = FAMILIES[family]
    model = make(config=ModelConfig(audio="projector", attention="flex", gradient_checkpointing=True))
    monkeypatch.setitem(varlen.KERNELS, "flex", (Kernel("the kernel under test", run, lambda *_: None),))
    reference = make(config=ModelConfig(audio="projector", attention="sdpa"))
    reference.load_weights(model.weights())
    reference.backbone.decoder(reference.model).config._attn_implementation = "sdpa"  # transformers', with a mask
    experiences = experiences_of(model, samples)
    logprobs, grads = gradients(model, [experiences], shared)
    expected, expected_grads = gradients(reference, [[e] for e in experiences], False)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    assert grads.keys() == expected_grads.keys()
    for name, gradient in expected_grads.items():
        scale = max(float(gradient.abs().max()), 1.0)
        torch.testing.assert_close(grads[name] / scale, gradient / scale, atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", [make_omni, make_qwen3_omni, make_qwen2_audio, make_whisper])
@pytest.mark.parametrize("run", [sdpa, flex], ids=["sdpa", "flex"])
def test_clips_are_encoded_together(
    make: Make,
    run: Callable[..., Tensor],
    speech: list[Utterance],
    monkeypatch: pytest.MonkeyPatch,
    flex_differentiates: None,
) -> None:
    """Features and gradients of many clips at once, all their chunks in one call, are those of transformers' encoder
    for one clip after the other."""
    monkeypatch.setitem(varlen.KERNELS, "flex", (Kernel("the kernel under test", run, lambda *_: None),))
    together, stock = make(ModelConfig(audio="full", attention="flex")), make(ModelConfig(audio="full"))
    stock.load_weights(together.weights())
    stock.backbone.audio_encoder(stock.model).config._attn_implementation = "sdpa"
    joined = np.concatenate([u.clip.load() for u in speech[:4]])  # longer than a chunk
    clips = [AudioClip(array=joined, sample_rate=16_000), *(u.clip for u in speech[:5])]

    def features(policy: AudioPolicy) -> tuple[Tensor, dict[str, Tensor]]:
        with policy.audio.once():
            out = torch.cat(policy.encode_audio(clips + clips[:2]))
            (out * torch.linspace(-1, 1, len(out))[:, None]).mean().backward()
        named = policy.backbone.audio_encoder(policy.model).named_parameters()
        return out.detach(), {n: p.grad for n, p in named if p.grad is not None}

    expected, expected_grads = features(stock)
    passes: list[int] = []
    read: list[float] = []  # seconds of log-mels at 100 frames a second
    encode = type(together.backbone).encode_audio

    def counted(self: Any, model: Any, mels: Sequence[Tensor]) -> list[Tensor]:
        passes.append(len(mels))
        read.append(sum(m["input_features"].numel() for m in mels) / together.extractor.feature_size / 100)  # type: ignore[call-overload]
        return encode(self, model, mels)

    monkeypatch.setattr(type(together.backbone), "encode_audio", counted)
    limit = 24.0 if make in (make_qwen2_audio, make_whisper) else 12.0  # their clips are windows
    together.audio.pass_seconds = limit
    out, grads = features(together)
    assert sum(passes) == len(clips) and 1 < len(passes) < len(clips)  # each once
    assert max(read) <= limit  # the padding to a window included
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    assert grads.keys() == expected_grads.keys()
    for name, gradient in expected_grads.items():
        scale = max(float(gradient.abs().max()), 1.0)
        torch.testing.assert_close(grads[name] / scale, gradient / scale, atol=1e-5, rtol=0)


def test_eager_attention_adds_its_mask(make_any: Make, samples: list[Sample]) -> None:
    """It took the mask of true and false for numbers, and every row saw the whole pack."""
    model, eager = make_any(), make_any(ModelConfig(attention="eager"))
    eager.load_weights(model.weights())
    experiences = answers(model, samples)
    logprobs = [gradients(policy, [experiences], True)[0] for policy in (model, eager)]
    torch.testing.assert_close(*logprobs, atol=1e-5, rtol=0)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest result of any operation."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def test_a_pack_of_16k_tokens_makes_no_tensor_of_its_square() -> None:
    model = make_text(ModelConfig(attention="sdpa", gradient_checkpointing=True))
    generator = torch.Generator().manual_seed(0)
    experiences = []
    for group in range(16):
        prompt = torch.randint(0, 200, (512,), generator=generator)
        for _ in range(4):
            ids = torch.cat([prompt, torch.randint(0, 200, (128,), generator=generator)])
            experiences.append(Experience(ids, torch.arange(640) >= 512, 512, group_id=str(group)))
    batch = pack_experiences(experiences)
    tokens = len(batch.ids)
    assert tokens == 16_384
    with LargestTensor() as largest:
        model.forward(batch).logprobs.sum().backward()
        assert Segments.of_spans(spans_of(batch.span_ids, batch.span_parents), torch.device("cpu")).block_mask
    assert tokens < largest.elements < tokens**2 / 64


@pytest.mark.parametrize("make", [make_omni, make_whisper])
@pytest.mark.parametrize("attention", ["varlen", "flex"])
def test_a_kernel_that_cannot_run_is_an_error(make: Make, samples: list[Sample], attention: Any) -> None:
    model = make(ModelConfig(attention=attention))
    with pytest.raises(ValueError, match=f"model.attention '{attention}' cannot run here: .*cpu"):
        model.forward(pack_experiences(answers(model, samples)))


def windowed(model: Any, attention: Any) -> AudioPolicy:
    policy = make_text(ModelConfig(attention=attention))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model(policy.model.config.vocab_size)
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.2, generator=torch.Generator().manual_seed(p.numel()))
    return AudioPolicy(model, policy.tokenizer, None, policy.backbone, policy.config)


def qwen_with_windows(vocabulary: int, **changes: Any) -> Any:
    size = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    windows = dict(use_sliding_window=True, sliding_window=6, max_window_layers=1) | changes
    return Qwen2ForCausalLM(Qwen2Config(**size, **windows, vocab_size=vocabulary, max_position_embeddings=512))


def mistral(vocabulary: int) -> Any:
    size = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return MistralForCausalLM(MistralConfig(**size, sliding_window=6, vocab_size=vocabulary))


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("attention", ["auto", "sdpa", "flex", "eager"])
@pytest.mark.parametrize("model", [qwen_with_windows, mistral])
def test_sliding_windows_hold_in_packed_rows(model: Any, attention: Any, share: bool, samples: list[Sample]) -> None:
    """Log-probs and gradients are those of transformers' own forward over one sequence at a time."""
    policy = windowed(model, attention)
    group = answers(policy, readable(policy, samples))
    assert all(len(e) > 12 for e in group), "longer than the windows"
    own = windowed(model, "sdpa").model
    own.config._attn_implementation = "sdpa"
    single = []
    for e in group:
        logprobs = own(input_ids=e.ids[None], use_cache=False).logits[0].log_softmax(-1)[:-1]
        single.append(logprobs.gather(-1, e.ids[1:, None])[:, 0][e.loss_mask[1:]])
    torch.cat(single).sum().backward()
    packed = policy.forward(pack_experiences(group, share)).logprobs
    torch.testing.assert_close(packed, torch.cat(single), atol=1e-4, rtol=0)
    packed.sum().backward()
    gradients = dict(own.named_parameters())
    for name, p in policy.model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name].grad, atol=2e-3, rtol=1e-4)


def test_layers_that_a_mask_does_not_keep_to_one_sequence_are_refused(samples: list[Sample]) -> None:
    policy = windowed(qwen_with_windows, "auto")
    group = answers(policy, readable(policy, samples))
    policy.model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="qwen2: layers of the kind 'linear_attention' cannot read several answers"):
        policy.forward(pack_experiences(group))


@pytest.mark.parametrize("tokens", [1, 3])
def test_grouped_heads_read_the_cache_without_a_copy(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers computes it from keys and values that are repeated for every head of a group."""
    rng = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, tokens, 8, generator=rng)
    key, value = (torch.randn(2, 2, 9, 8, generator=rng) for _ in range(2))
    mask = torch.rand(2, 1, tokens, 9, generator=rng) > 0.3
    mask[..., 0] = True
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True, training=False)
    repeated = [x.repeat_interleave(3, 1) for x in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=0.3)
    monkeypatch.setattr("transformers.integrations.sdpa_attention.repeat_kv", None)
    out, _ = AttentionInterface._global_mapping[GQA](module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(out, expected.transpose(1, 2), atol=1e-6, rtol=1e-6)


def test_spans_by_hand() -> None:
    """p p p | a a | b, both answers to p; and c, whose span is empty, is left out."""
    span_ids, span_parents = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([-1, 0, 0, -1])
    assert spans_of(span_ids, span_parents) == [(0, 3, 0, 0), (3, 5, 0, 3), (5, 6, 0, 3)]
    mask = torch.zeros(6, 6, dtype=torch.bool)
    for first, end, above, below in spans_of(span_ids, span_parents):
        mask[first:end, above:below] = True
        mask[first:end, first:end] = torch.ones(end - first, end - first, dtype=torch.bool).tril()
    assert torch.equal(mask, attention_mask(span_ids, span_parents))
