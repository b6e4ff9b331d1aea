"""DualFFN: a decoder whose frames of audio go through norms and feed-forward blocks of their own (Higgs Audio V2).

Attention is shared. `Routing` is made once per batch: a permutation that puts the text rows in front of the frames, so
that each branch works on a slice. A batch of one kind goes straight through its branch.

Shapes: B, L batch and length, T = B·L rows, H decoder width, Q codebooks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer


@dataclass(frozen=True, eq=False)
class Routing:
    """Which rows of a batch are text and which are frames.

    `frame` [T] bool. `order` [T] lists the text rows, then the frames; `place` [T] is its inverse. All three are None
    where all rows are of one kind.
    """

    texts: int
    frames: int
    frame: Tensor | None = None
    order: Tensor | None = None
    place: Tensor | None = None

    TEXT: ClassVar[Routing]
    FRAMES: ClassVar[Routing]

    @staticmethod
    def of(frame: Tensor, device: torch.device) -> Routing:
        """From a mask of any shape, on the CPU for the sake of a GPU that should not be waited for."""
        flat = frame.reshape(-1)
        frames = int(flat.sum())
        if not frames:
            return Routing.TEXT
        if frames == len(flat):
            return Routing.FRAMES
        order = torch.argsort(flat.int(), stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return Routing(len(flat) - frames, frames, flat.to(device), order.to(device), place.to(device))


Routing.TEXT = Routing(1, 0)
Routing.FRAMES = Routing(0, 1)


class DualLayer(GradientCheckpointingLayer):
    """A decoder layer with a second branch for frames. Its parts have the names that Higgs checkpoints give them.

    Without `routing` all rows are text, as for the layer that it was made from.
    """

    def __init__(self, layer: Any, input_layernorm: nn.Module, post_attention_layernorm: nn.Module, mlp: nn.Module):
        """`layer` gives attention and the text branch, the others are the branch for frames."""
        super().__init__()
        self.self_attn = layer.self_attn
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp
        self.audio_input_layernorm = input_layernorm
        self.audio_post_attention_layernorm = post_attention_layernorm
        self.audio_mlp = mlp

    def forward(self, hidden_states: Tensor, routing: Routing | None = None, **kwargs: Any) -> Tensor:
        """[B, L, H] -> [B, L, H]. What transformers' model passes in addition to `routing` is for the attention."""
        if routing is None and "audio_token_mask" in kwargs:
            raise ValueError("this Higgs model is routed: call it through its policy, which says what is a frame")
        kwargs.pop("audio_token_mask", None)  # made by comparing embeddings, which cannot tell
        if routing is None or not routing.frames:
            norm, between, block = self.input_layernorm, self.post_attention_layernorm, self.mlp
        elif not routing.texts:
            norm, between, block = (
                self.audio_input_layernorm,
                self.audio_post_attention_layernorm,
                self.audio_mlp,
            )
        else:
            return self._mixed(hidden_states, routing, kwargs)
        attended, _ = self.self_attn(hidden_states=norm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + block(between(hidden_states))

    def _mixed(self, hidden: Tensor, routing: Routing, kwargs: dict[str, Any]) -> Tensor:
        assert routing.frame is not None and routing.order is not None and routing.place is not None
        frame = routing.frame.view(*hidden.shape[:-1], 1)
        normed = _rms_norm(hidden, self.input_layernorm, self.audio_input_layernorm, frame)
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        hidden = hidden + attended
        sorted_rows = _Permute.apply(hidden.reshape(-1, hidden.shape[-1]), routing.order, routing.place)
        text, frames = sorted_rows.split([routing.texts, routing.frames])
        text = self.mlp(self.post_attention_layernorm(text))
        frames = self.audio_mlp(self.audio_post_attention_layernorm(frames))
        out = _Permute.apply(torch.cat([text, frames]), routing.place, routing.order)
        return hidden + out.view_as(hidden)


def _rms_norm(x: Tensor, text: Any, audio: Any, frame: Tensor) -> Tensor:
    """Root mean square norm of x [..., H] (arXiv 1910.07467), the weight chosen by `frame` [..., 1]."""
    exact = x.float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + text.variance_epsilon)
    return torch.where(frame, audio.weight, text.weight) * exact.to(x.dtype)


class _Permute(torch.autograd.Function):
    """rows[order]; the gradient goes back through the inverse, `place`, where indexing would scatter and add."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class CodeEmbedding(nn.Module):
    """Codes [..., Q] -> [..., H], summed over codebooks. Named as in Higgs: one table, a codebook after the other."""

    def __init__(self, codebooks: int, size: int, width: int):
        super().__init__()
        self.embed_audio_tokens = nn.Embedding(codebooks * size, width)
        self.size = size

    def forward(self, codes: Tensor) -> Tensor:
        offsets = torch.arange(codes.shape[-1], device=codes.device) * self.size
        summed: Tensor = self.embed_audio_tokens(codes + offsets).sum(-2)
        return summed
