"""Log-probs and entropies of sampled tokens from hidden states, without keeping the full logits.

Shapes: N predicted tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def fused_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, chunk: int = 4096
) -> tuple[Tensor, Tensor]:
    """Log-prob of `targets` and entropy under softmax(hidden @ weight.T / temperature).

    hidden [N, H], weight [V, H], targets [N] int64. Returns two float32 tensors [N]. `chunk` bounds the logits alive at
    once to chunk x V: they are recomputed in the backward pass.
    """
    if hidden.shape[0] <= chunk:
        return _chunk_logprobs(hidden, weight, targets, temperature)
    parts = [
        checkpoint(_chunk_logprobs, h, weight, t, temperature, use_reentrant=False)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _chunk_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight).float() / temperature
    logs = logits.log_softmax(-1)
    # p·log p is taken as 0 where a token is impossible
    entropy = -(logs.exp() * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(-1)
    return logs.gather(-1, targets[:, None]).squeeze(-1), entropy
