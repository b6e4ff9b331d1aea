"""Attention span by span is attention under the mask, forward and backward."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from audiorl.algos.packing import attention_mask, pack_experiences
from audiorl.config import ModelConfig
from audiorl.models import AudioPolicy, policy
from audiorl.models.attention import by_span, spans_of
from audiorl.types import Experience, Sample
from tests.conftest import Make, readable


def answers(policy: AudioPolicy, samples: list[Sample]) -> list[Experience]:
    """Groups of 3, 1 and 2 answers of random tokens, one of them a single token."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for sample, lengths in zip(readable(policy, samples), ((5, 1, 9), (4,), (7, 3)), strict=True):
        prompt = policy.prompt_ids(sample)
        for n in lengths:
            ids = torch.cat([prompt, torch.randint(0, 200, (n,), generator=generator)])
            mask = torch.arange(len(ids)) >= len(prompt)
            audio = sample.audio if policy.backbone.audio_token else ()
            out.append(Experience(ids, mask, len(prompt), audio, group_id=sample.id))
    return out


def gradients(policy: AudioPolicy, experiences: list[Experience], shared: bool) -> tuple[Tensor, dict[str, Tensor]]:
    policy.zero_grad()
    out = policy.forward(pack_experiences(experiences, shared)).logprobs
    (out * torch.linspace(-1, 1, len(out))).sum().backward()
    return out.detach(), {n: p.grad.clone() for n, p in policy.trainable().items() if p.grad is not None}


@pytest.mark.parametrize("shared", [True, False])
def test_by_span_is_by_mask(
    make_any: Make, samples: list[Sample], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_any(ModelConfig(audio="projector"))
    experiences = answers(model, samples)
    found, of_found = gradients(model, experiences, shared)
    monkeypatch.setattr(policy, "by_span", lambda decoder: nullcontext(False))
    expected, of_expected = gradients(model, experiences, shared)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert of_found.keys() == of_expected.keys()
    for name, gradient in of_expected.items():
        torch.testing.assert_close(of_found[name], gradient, atol=1e-5, rtol=1e-4)


def test_checkpointed_layers_keep_the_mask(make_any: Make, samples: list[Sample]) -> None:
    """They run again in the backward pass, where the replacement is over."""
    plain = make_any(ModelConfig())
    checkpointed = make_any(ModelConfig(gradient_checkpointing=True))
    checkpointed.load_weights(plain.weights())
    experiences = answers(plain, samples)
    (one, of_one), (two, of_two) = (gradients(m, experiences, True) for m in (plain, checkpointed))
    torch.testing.assert_close(one, two, atol=1e-5, rtol=0)
    for name, gradient in of_one.items():
        torch.testing.assert_close(of_two[name], gradient, atol=1e-5, rtol=1e-4)


def test_the_replacement_ends_with_its_block(make_any: Make) -> None:
    model = make_any()
    decoder = model.backbone.decoder(model.model)
    with by_span(decoder) as taken:
        assert taken and decoder.config._attn_implementation != "sdpa"
    assert decoder.config._attn_implementation == "sdpa"
    decoder.config._attn_implementation = "eager"
    with by_span(decoder) as taken:
        assert not taken and decoder.config._attn_implementation == "eager"


def test_spans_by_hand() -> None:
    """p p p | a a | b, both answers to p; and c, whose span is empty, is left out."""
    span_ids, span_parents = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([-1, 0, 0, -1])
    assert spans_of(span_ids, span_parents) == [(0, 3, 0, 0), (3, 5, 0, 3), (5, 6, 0, 3)]
    mask = torch.zeros(6, 6, dtype=torch.bool)
    for first, end, above, below in spans_of(span_ids, span_parents):
        mask[first:end, above:below] = True
        mask[first:end, first:end] = torch.ones(end - first, end - first, dtype=torch.bool).tril()
    assert torch.equal(mask, attention_mask(span_ids, span_parents))
