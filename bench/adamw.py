"""CPU seconds of an AdamW step on the CPU: torch's default, and the fused form that an offloaded optimizer takes.

    OMP_NUM_THREADS=1 python bench/adamw.py [--numbers 10000000] [--rounds 9]

The two take turns; medians. Both must give the same weights to 1e-6.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

from audiorl.config import OptimConfig
from audiorl.train.optim.adamw import adamw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numbers", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(args.numbers, generator=generator) for _ in range(2))
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [
        adamw({"weight": p}, OptimConfig(lr=1e-4), fused) for p, fused in zip(weights, (False, True), strict=True)
    ]
    times: list[list[float]] = [[], []]
    for round_ in range(args.rounds + 1):
        for side, optimizer in enumerate(optimizers):
            weights[side].grad = gradient
            began = time.process_time()
            optimizer.step()
            if round_:
                times[side].append(time.process_time() - began)
    torch.testing.assert_close(weights[1], weights[0], atol=1e-6, rtol=0)
    plain, fused = (1e3 * statistics.median(t) for t in times)
    print(f"{args.numbers:,} numbers: default {plain:.1f} ms, fused {fused:.1f} ms, {fused / plain:.2f}× the time")


if __name__ == "__main__":
    main()
