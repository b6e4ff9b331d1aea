"""What a shorter window saves: processor seconds of Whisper's encoder, of a step of SFT, and of answers, by model.

    python tools/shorten_whisper.py models/whisper-base models/whisper-base-10s --seconds 10
    OMP_NUM_THREADS=1 python bench/whisper_window.py models/whisper-base models/whisper-base-10s

Eight bundled recordings; the models take turns; medians, and times the first model's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from audiorl.config import ModelConfig, OptimConfig, SamplingConfig, SFTConfig
from audiorl.data.bundled import bundled_transcripts
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.examples import Example
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.train.fit import Learner
from audiorl.train.sft import sft_loss

CLIPS = 8


def processor_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(policy: AudioPolicy, worker: Learner, examples: list[Example]) -> dict[str, float]:
    samples = [example.sample for example in examples]

    def encode() -> None:
        policy.audio.cache.clear()
        policy.audio.encoder_outputs([sample.audio[0] for sample in samples])

    engine = HFEngine(policy, SamplingConfig(max_new_tokens=16))
    return {
        "encoder": processor_seconds(encode),
        "step of SFT": processor_seconds(lambda: worker.train(examples)),
        "4 answers each": processor_seconds(lambda: engine.generate([Request(s, 4) for s in samples])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders of Whisper")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    samples = bundled_transcripts(max_seconds=5.0)[:: 1120 // CLIPS][:CLIPS]
    examples = [Example(s, s.references[0]) for s in samples]
    policies = [load_policy(path, ModelConfig()) for path in args.models]
    workers = [Learner(sft_loss, policy, SFTConfig(), OptimConfig(lr=1e-6)) for policy in policies]
    rounds = [
        [measure(policy, worker, examples) for policy, worker in zip(policies, workers, strict=True)]
        for _ in range(args.rounds + 1)
    ][1:]
    table = Table("model", *rounds[0][0])
    for place, path in enumerate(args.models):
        medians = {name: statistics.median(r[place][name] for r in rounds) for name in rounds[0][0]}
        first = {name: statistics.median(r[0][name] for r in rounds) for name in medians}
        table.add_row(Path(path).name, *(f"{s:.2f} s, × {s / first[name]:.2f}" for name, s in medians.items()))
    Console().print(table)


if __name__ == "__main__":
    main()
