"""Choosing the next token by one uniform number, so that a rollout depends on its seed and not on its batch.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from audiorl.config import SamplingConfig


def filtered_logprobs(logits: Tensor, config: SamplingConfig) -> Tensor:
    """The log-probs [B, V] of the distribution that is sampled from: temperature, then top-k, then top-p.

    Impossible tokens get -inf. Greedy decoding (temperature 0) reports the model's own distribution.
    """
    logits = logits.float()
    if config.temperature > 0:
        logits = logits / config.temperature
    if config.top_k and config.top_k < logits.shape[-1]:
        kth = logits.topk(config.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if config.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= config.top_p  # the token that crosses top_p stays
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    return logits.log_softmax(-1)


def choose(logprobs: Tensor, uniform: Tensor, greedy: Tensor | bool) -> Tensor:
    """Token ids [B] from log-probs [B, V] by inverting the cumulative distribution at `uniform` [B] in [0, 1).

    Where `greedy` [B], or one truth for all rows, is true: the most probable token.
    """
    if isinstance(greedy, Tensor):
        return torch.where(greedy, logprobs.argmax(-1), choose(logprobs, uniform, False))
    if greedy:
        return logprobs.argmax(-1)
    cumulative = logprobs.double().exp_().cumsum_(-1)
    total = cumulative[:, -1:]
    # Rounding must not reach the total itself: beyond it there is no token.
    target = torch.minimum(uniform[:, None].to(cumulative) * total, total.nextafter(torch.zeros_like(total)))
    # right=True: a token of probability 0 has an empty interval and is never chosen
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def uniforms(seed: int, sample_id: str, index: int, count: int) -> Tensor:
    """`count` uniform numbers for one rollout, fixed by (seed, sample, index)."""
    generator = torch.Generator().manual_seed(seed_of(seed, sample_id, index))
    return torch.rand(count, generator=generator, dtype=torch.float64)


def seed_of(seed: int, sample_id: str, index: int) -> int:
    """The seed of one rollout, 63 bits."""
    digest = hashlib.blake2b(f"{seed}\0{sample_id}\0{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
