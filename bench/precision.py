"""Seconds of an update in float32 and with `--model.autocast`, by the decoder's width.

    OMP_NUM_THREADS=1 python bench/precision.py [--rows 1024] [--rounds 5]

A Qwen2 of two layers, a pack of answers that share prompts, forward and backward. The two take turns; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from audiorl.algos.packing import pack_experiences
from audiorl.config import ModelConfig
from audiorl.gpu_check.models import experiences, full_width_policy
from audiorl.gpu_check.outcome import PRETEND_SCALE, Scale, Setup
from audiorl.models import AudioPolicy
from audiorl.types import PackedBatch

WIDTHS = (64, 128, 256, 512, 1024)


def update(policy: AudioPolicy, batch: PackedBatch) -> float:
    began = time.perf_counter()
    policy.forward(batch).logprobs.mean().backward()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024, help="tokens of the pack, about")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("width", "float32, ms", "autocast, ms", "× the time")
    for width in WIDTHS:
        groups = max(args.rows // 256, 1)
        scale = Scale(width, 3 * width, 4, 2, PRETEND_SCALE.vocabulary, 2, groups, 4, 128, 32, 1, 1)
        setup = Setup(torch.device("cpu"), scale)
        policies = [full_width_policy(setup, ModelConfig(autocast=autocast)) for autocast in (False, True)]
        batch = pack_experiences(experiences(scale))
        times: list[list[float]] = [[], []]
        for round_ in range(args.rounds + 1):
            for side, policy in enumerate(policies):
                seconds = update(policy, batch)
                if round_:
                    times[side].append(seconds)
        plain, autocast = (1e3 * statistics.median(t) for t in times)
        table.add_row(str(width), f"{plain:.1f}", f"{autocast:.1f}", f"{autocast / plain:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
