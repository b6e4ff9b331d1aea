"""Peak memory and CPU time of divergences over a vocabulary of 151,936 tokens: in tiles, and with plain PyTorch.

    python bench/distill.py [--tokens 2048] [--student 896] [--teacher 896] [--frozen-head]

A call gives the divergence of every token and the gradient of its sum. Peak memory is the growth of a fresh process's
high-water mark (VmHWM, Linux only) from just before the call, when inputs exist and a small call has loaded every
library; the gradient of the student's head is part of it, unless that is frozen, as under LoRA. Both sides must agree.
Also measured: `top_k` with its tail as one outcome, from a teacher whose tokens and logits are given.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from audiorl.algos.distill import Kind, bucket_logits, divergence, fused_divergence, top_ids

VOCABULARY = 151_936
KINDS: tuple[Kind, ...] = ("reverse", "forward", "jsd")
TOP_K = 64


def models(n: int, v: int, student: int, teacher: int) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((n, student), (v, student), (n, teacher), (v, teacher))
    return [torch.randn(k, h) if k == n else torch.randn(k, h).mul_(2 * h**-0.5) for k, h in sizes]


def plain(h: Tensor, w: Tensor, th: Tensor, tw: Tensor, kind: Kind) -> Tensor:
    with torch.no_grad():
        teacher = (th @ tw.T).log_softmax(-1)
    return divergence((h @ w.T).log_softmax(-1), teacher, kind)


def step(side: str, kind: Kind, inputs: list[Tensor], frozen: bool) -> list[Tensor | None]:
    """The divergence, the gradient of the hidden states, and 8 rows of the head's."""
    h, w = inputs[0].requires_grad_(), inputs[1].requires_grad_(not frozen)
    h.grad = w.grad = None
    if side == "top_k":
        with torch.no_grad():
            ids = top_ids(*inputs[2:], TOP_K)
            teacher = bucket_logits(*inputs[2:], ids).log_softmax(-1)
        value = divergence(bucket_logits(h, w, ids).log_softmax(-1), teacher, kind)
    else:
        value = (plain if side == "plain" else fused_divergence)(h, w, *inputs[2:], kind)
    value.sum().backward()
    return [value.detach(), h.grad, None if frozen else w.grad[:8].clone()]


def measure(side: str, kind: Kind, n: int, student: int, teacher: int, frozen: bool) -> dict[str, float]:
    """Peak MiB and CPU seconds, in this process, which must be fresh."""
    step(side, kind, models(16, 1000, 32, 32), frozen)
    inputs = models(n, VOCABULARY, student, teacher)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from what is held now
    before, began = _status("VmRSS"), time.process_time()
    step(side, kind, inputs, frozen)
    return {"seconds": time.process_time() - began, "mib": (_status("VmHWM") - before) / 1024}


def _status(field: str) -> int:
    """KiB, of this process."""
    return int(re.findall(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a pass")
    parser.add_argument("--student", type=int, default=896, help="hidden size of the student")
    parser.add_argument("--teacher", type=int, default=896, help="hidden size of the teacher")
    parser.add_argument("--frozen-head", action="store_true", help="no gradient for the student's head, as under LoRA")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.one:
        print(json.dumps(measure(*json.loads(args.one))))
        return
    for kind in KINDS:
        tiled, whole = (step(side, kind, models(16, 1000, 32, 24), False) for side in ("tiles", "plain"))
        torch.testing.assert_close(tiled, whole, atol=1e-5, rtol=1e-4)
    title = f"N {args.tokens}, V {VOCABULARY}, H {args.student}, teacher's H {args.teacher}"
    table = Table("divergence", "side", "peak MiB", "/ plain", "CPU seconds", "/ plain", title=title)
    for kind in KINDS:
        rows = {}
        for side in ("plain", "tiles", "top_k"):
            request = json.dumps([side, kind, args.tokens, args.student, args.teacher, args.frozen_head])
            command = [sys.executable, __file__, "--threads", str(args.threads), "--one", request]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr or f"{side} ended with {done.returncode}: not enough memory?")
            rows[side] = json.loads(done.stdout.splitlines()[-1])
        for side, row in rows.items():
            ratios = {name: f"{row[name] / rows['plain'][name]:.3f}" for name in row}
            table.add_row(kind, side, f"{row['mib']:.0f}", ratios["mib"], f"{row['seconds']:.1f}", ratios["seconds"])
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
