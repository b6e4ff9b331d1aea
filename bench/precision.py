"""Seconds of an update and of decoding in float32 and with `--model.autocast`, by the decoder's width.

    OMP_NUM_THREADS=1 python bench/precision.py [--rows 1024] [--rounds 5]

A Qwen2 of two layers. Update: a pack of answers that share prompts, forward and backward. Decoding: 8 answers of 32
tokens by the `hf` engine. The two take turns; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from audiorl.algos.experience import PackedBatch
from audiorl.algos.packing import pack_experiences
from audiorl.config import ModelConfig, SamplingConfig
from audiorl.gpu_check.setup import PRETEND_SCALE, Scale, Setup, experiences, full_width_policy
from audiorl.models import AudioPolicy
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.types import Message, Sample

WIDTHS = (64, 128, 256, 512, 1024)


def update(policy: AudioPolicy, batch: PackedBatch) -> float:
    began = time.perf_counter()
    policy.forward(batch).logprobs.mean().backward()
    return time.perf_counter() - began


def decode(policy: AudioPolicy) -> float:
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=32))
    sample = Sample("question", (Message("user", ("What is said, and by whom?",)),))
    began = time.perf_counter()
    rollouts = engine.generate([Request(sample, n=8)])
    seconds = time.perf_counter() - began
    assert sum(r.num_sampled for r in rollouts) == 8 * 32
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024, help="tokens of the pack, about")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("width", "", "float32, ms", "autocast, ms", "× the time")
    for width in WIDTHS:
        groups = max(args.rows // 256, 1)
        scale = Scale(width, 3 * width, 4, 2, PRETEND_SCALE.vocabulary, 2, groups, 4, 128, 32, 1, 1)
        setup = Setup(torch.device("cpu"), scale)
        policies = [full_width_policy(setup, ModelConfig(autocast=autocast)) for autocast in (False, True)]
        batch = pack_experiences(experiences(scale))
        for policy in policies:
            policy.stop_ids = (-1,)  # no token, so that all answers have equal lengths
        for what, run in {"update": lambda policy, batch=batch: update(policy, batch), "decoding": decode}.items():
            times: list[list[float]] = [[], []]
            for round_ in range(args.rounds + 1):
                for side, policy in enumerate(policies):
                    seconds = run(policy)
                    if round_:
                        times[side].append(seconds)
            plain, autocast = (1e3 * statistics.median(t) for t in times)
            table.add_row(str(width), what, f"{plain:.1f}", f"{autocast:.1f}", f"{autocast / plain:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
