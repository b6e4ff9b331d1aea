"""Time of two DualFFN decoder layers, forward and backward, against transformers' layer with its boolean mask.

    OMP_WAIT_POLICY=passive python bench/dual_ffn.py [--quick] [--threads N]

Both sides have the same weights and inputs, and each case checks that outputs and all gradients agree to 1e-5 before it
is timed. Six rows in ten are frames, at random. Three cases at each size:

- *routing*: a batch of eight sequences of equal length, causal attention by the same kernel on both sides. What differs
  is how rows find their branch; the matrix products, most of the time at larger widths, are the same.
- *packed row*: the same eight sequences as one row, as the trainer has them. transformers' layer takes the mask that
  keeps them apart, ours goes span by span (`models/attention.py`).
- *decoding*: 32 rollouts of one token each, no gradient, text and frames mixed.

The sides take turns in one process; times are medians of process CPU time, which other programs on the machine disturb
less than wall time, and ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import HiggsAudioV2Config
from transformers.models.higgs_audio_v2.modeling_higgs_audio_v2 import (
    HiggsAudioV2DecoderLayer,
    HiggsAudioV2RotaryEmbedding,
)

from audiorl.algos.packing import attention_mask
from audiorl.algos.varlen import SDPA, SegmentAttention, Segments
from audiorl.models.attention import VARLEN, spans_of
from audiorl.models.speech import DualLayer, Routing

SIZES = [(128, 384, 1024), (256, 768, 1024), (512, 1408, 1024)]  # H, feed-forward width, rows
SEQUENCES = 8
FRAMES = 0.6
Side = Callable[[], Any]


def stacks(width: int, inner: int, attention: str) -> tuple[nn.ModuleList, nn.ModuleList, nn.Module]:
    """transformers' layers, ours with copies of the same weights, and the rotary embedding."""
    config = HiggsAudioV2Config(
        hidden_size=width, intermediate_size=inner, num_attention_heads=width // 32,
        num_key_value_heads=max(width // 128, 1), head_dim=32, vocab_size=8,
        **dict.fromkeys(("pad_token_id", "eos_token_id", "audio_token_id"), 0),
        **dict.fromkeys(("audio_bos_token_id", "audio_delay_token_id"), 0),
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    stock = nn.ModuleList(HiggsAudioV2DecoderLayer(config, i) for i in range(2))
    own = nn.ModuleList()
    for layer in copy.deepcopy(stock):
        parts = (layer.audio_input_layernorm, layer.audio_post_attention_layernorm, layer.audio_mlp)
        layer.self_attn.config = copy.copy(config)
        layer.self_attn.config._attn_implementation = attention
        own.append(DualLayer(layer, *parts))
    return stock, own, HiggsAudioV2RotaryEmbedding(config)


def passed(layers: nn.ModuleList, x: Tensor, weights: Tensor | None, **kwargs: Any) -> list[Tensor]:
    """Output, and with `weights` the gradients of input and parameters under a weighted sum."""
    if weights is None:
        with torch.no_grad():
            for layer in layers:
                x = layer(x, **kwargs)
        return [x]
    for p in layers.parameters():
        p.grad = None
    inputs = x.detach().requires_grad_()
    hidden = inputs
    for layer in layers:
        hidden = layer(hidden, **kwargs)
    (hidden * weights).sum().backward()
    named = dict(layers.named_parameters())
    return [hidden.detach(), *(p.grad for p in (inputs, *(named[n] for n in sorted(named))) if p.grad is not None)]


def agree(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        scale = max(float(b.abs().max()), 1.0)
        torch.testing.assert_close(a / scale, b / scale, atol=1e-5, rtol=0)


def routing(width: int, inner: int, rows: int) -> tuple[Side, Side]:
    stock, own, rotary = stacks(width, inner, "sdpa")
    x, weights = torch.randn(2, SEQUENCES, rows // SEQUENCES, width)
    frames = torch.rand(x.shape[:2]) < FRAMES
    places = torch.arange(x.shape[1])[None].expand(SEQUENCES, -1)
    shared = {"position_embeddings": rotary(x, places), "attention_mask": None}
    return (
        partial(passed, own, x, weights, routing=Routing.from_mask(frames, x.device), **shared),
        partial(passed, stock, x, weights, audio_token_mask=frames, **shared),
    )


def packed(width: int, inner: int, rows: int) -> tuple[Side, Side]:
    stock, own, rotary = stacks(width, inner, VARLEN)
    x, weights = torch.randn(2, 1, rows, width)
    frames = torch.rand(1, rows) < FRAMES
    span_ids, span_parents = torch.arange(rows) // (rows // SEQUENCES), torch.full((SEQUENCES,), -1)
    places = rotary(x, (torch.arange(rows) % (rows // SEQUENCES))[None])
    segments = Segments.of_spans(spans_of(span_ids, span_parents), x.device)
    ours = {"attention_mask": None, "packed": SegmentAttention(SDPA, segments)}
    theirs = {"attention_mask": attention_mask(span_ids, span_parents)[None, None]}
    return (
        partial(
            passed, own, x, weights, routing=Routing.from_mask(frames, x.device), position_embeddings=places, **ours
        ),
        partial(passed, stock, x, weights, audio_token_mask=frames, position_embeddings=places, **theirs),
    )


def decoding(width: int, inner: int, _: int) -> tuple[Side, Side]:
    stock, own, rotary = stacks(width, inner, "sdpa")
    x = torch.randn(32, 1, width)
    frames = torch.rand(32, 1) < FRAMES
    shared = {"position_embeddings": rotary(x, torch.zeros(32, 1).long()), "attention_mask": None}

    def ours() -> list[Tensor]:  # in decoding, routing is computed at every step
        return passed(own, x, None, routing=Routing.from_mask(frames, x.device), **shared)

    return ours, partial(passed, stock, x, None, audio_token_mask=frames, **shared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    table = Table(
        "H", "feed-forward", "rows", "case", "audiorl", "transformers", "times faster", title="DualFFN, 2 layers"
    )
    for width, inner, rows in SIZES[: 1 if args.quick else None]:
        for case in (routing, packed, decoding):
            ours, theirs = case(width, inner, rows)
            agree(ours(), theirs())
            repeats = (5 if args.quick else 15) * (10 if case is decoding else 1)
            seconds: dict[Side, list[float]] = {ours: [], theirs: []}
            for _ in range(repeats):
                for side, times in seconds.items():
                    began = time.process_time()
                    side()
                    times.append(time.process_time() - began)
            ratio = statistics.median(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True))
            times_ms = [f"{statistics.median(seconds[side]) * 1e3:.3g} ms" for side in (ours, theirs)]
            size = [str(width), str(inner), "32" if case is decoding else str(rows)]
            table.add_row(*size, case.__name__, *times_ms, f"{ratio:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
