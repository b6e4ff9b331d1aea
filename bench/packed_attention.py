"""Attention of a packed row: span by span against one call under a mask of T × T; seconds and peak memory.

    OMP_NUM_THREADS=1 python bench/packed_attention.py [--longest 16384]

Forward and backward on the CPU, float32, 4 heads that share 2 key heads of width 64: groups of a prompt of 512 tokens
and 4 answers of 128. Each measurement is a process of its own; the memory is its largest resident size less that of the
process before the call. Both give the same output and gradients.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from audiorl.algos.packing import attention_mask
from audiorl.algos.varlen import SDPA, SegmentAttention, Segments

PROMPT, ANSWER, ANSWERS = 512, 128, 4
HEADS, KEY_HEADS, WIDTH = 4, 2, 64


def pack(groups: int) -> tuple[list[tuple[int, int, int, int]], Tensor, Tensor]:
    """The spans of a row, and its span_ids and span_parents."""
    spans: list[tuple[int, int, int, int]] = []
    parents: list[int] = []
    for group in range(groups):
        start = group * (PROMPT + ANSWERS * ANSWER)
        prompt, number = (start, start + PROMPT), len(spans)
        spans.append((*prompt, 0, 0))
        spans += [(prompt[1] + i * ANSWER, prompt[1] + (i + 1) * ANSWER, *prompt) for i in range(ANSWERS)]
        parents += [-1, *[number] * ANSWERS]
    lengths = torch.tensor([end - start for start, end, _, _ in spans])
    return spans, torch.arange(len(spans)).repeat_interleave(lengths), torch.tensor(parents)


def measure(kind: str, groups: int) -> tuple[float, float, list[Tensor]]:
    """Seconds, MiB, and the sums of the output and the gradients by head."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    spans, span_ids, span_parents = pack(groups)
    rows = len(span_ids)
    query, key, value = (
        torch.randn(1, heads, rows, WIDTH, generator=generator, requires_grad=True)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    if kind == "spans":
        out = SegmentAttention(SDPA, Segments.of_spans(spans, query.device))(query, key, value)
    else:
        keys, values = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (key, value))
        mask = attention_mask(span_ids, span_parents)
        out = scaled_dot_product_attention(query, keys, values, attn_mask=mask).transpose(1, 2)
    out.sum().backward()
    seconds = time.perf_counter() - began
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    sums = [out.detach().sum((0, 1, 3)), *(x.grad.sum((0, 2, 3)) for x in (query, key, value) if x.grad is not None)]
    return seconds, memory, sums


def alone(*args: Any) -> tuple[float, float, list[Tensor]]:
    """`measure` in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        seconds, memory, sums = pool.apply(measure, args)
    return seconds, memory, sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--longest", type=int, default=16_384, help="tokens of the longest row")
    longest = parser.parse_args().longest
    table = Table("T", "spans, s", "mask, s", "spans, MiB", "mask, MiB")
    rows = 2048
    while rows <= longest:
        (spans_s, spans_mib, ours), (mask_s, mask_mib, theirs) = (
            alone(kind, rows // (PROMPT + ANSWERS * ANSWER)) for kind in ("spans", "mask")
        )
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-4)
        table.add_row(f"{rows:,}", f"{spans_s:.2f}", f"{mask_s:.2f}", f"{spans_mib:.0f}", f"{mask_mib:.0f}")
        rows *= 2
    Console().print(table)


if __name__ == "__main__":
    main()
