"""The random models and packs that the checks run on."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from audiorl.algos.experience import Experience
from audiorl.config import ModelConfig
from audiorl.gpu_check.outcome import Scale, Setup
from audiorl.models import AudioPolicy
from audiorl.models.families.text import TextDecoder
from audiorl.models.tiny import tiny_tokenizer

TEXTS = ["What is said, and by whom? yes no why English Spanish French"] * 20
"""From which the tokenizer learns its few words."""


def full_width_policy(setup: Setup, config: ModelConfig) -> AudioPolicy:
    """A text decoder of the scale's width in the config's dtype, the same weights every time."""
    scale = setup.scale
    tokenizer = tiny_tokenizer(TEXTS, 400)
    size = Qwen2Config(
        hidden_size=scale.hidden,
        intermediate_size=scale.intermediate,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        num_key_value_heads=scale.kv_heads,
        vocab_size=max(scale.vocabulary, len(tokenizer)),
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[setup.device] if setup.is_gpu else []), setup.device:
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(size)
        for weight in model.parameters():
            if weight.dim() == 2:  # transformers' are so small that every token is as likely as another
                torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        model.to(getattr(torch, config.dtype))
    return AudioPolicy(model, tokenizer, None, TextDecoder(tokenizer), config)


def experiences(scale: Scale) -> list[Experience]:
    """Groups of random answers of equal length, with random advantages."""
    generator = torch.Generator().manual_seed(0)
    out: list[Experience] = []
    for group in range(scale.groups):
        prompt = torch.randint(0, 300, (scale.prompt,), generator=generator)
        for _ in range(scale.group_size):
            ids = torch.cat([prompt, torch.randint(0, 300, (scale.response,), generator=generator)])
            mask = torch.arange(len(ids)) >= len(prompt)
            advantages = torch.where(mask, float(torch.randn((), generator=generator)), 0.0)
            e = Experience(ids, mask, len(prompt), group_id=str(group), name=f"rollout {len(out)}")
            zeros = torch.zeros(len(ids))
            out.append(e.replace(advantages=advantages, rewards=zeros, rollout_logprobs=torch.where(mask, -5.0, zeros)))
    return out


def spans(scale: Scale) -> list[tuple[int, int, int, int]]:
    """The spans of a pack of `experiences`."""
    out: list[tuple[int, int, int, int]] = []
    at = 0
    for _ in range(scale.groups):
        parent = (at, at + scale.prompt)
        out.append((*parent, 0, 0))
        for start in range(parent[1], parent[1] + scale.group_size * scale.response, scale.response):
            out.append((start, start + scale.response, *parent))
        at = out[-1][1]
    return out


def largest(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest value of `b`."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))
