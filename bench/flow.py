"""What a flow's packs save over padding, and what the parts of a step of sound-grpo cost. CPU seconds.

    OMP_NUM_THREADS=1 python bench/flow.py [--device cuda]

The network has the default size (width 256, 2 joint and 4 single blocks), random weights and the codec `mels`. A padded
batch is one whose sounds are all as long as the longest: what a network with masks computes at least. The ways take
turns, after a first pass of each that is not timed; on a GPU seconds are those of the clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from audiorl.algos.experience import Experience
from audiorl.config import ModelConfig, OptimConfig, RLConfig, torch_device
from audiorl.config.flow import FlowConfig, FlowModelConfig
from audiorl.models.flow import SoundPrompt, new_flow
from audiorl.protocols import Request
from audiorl.rewards.combine import WeightedSum, score_rollouts
from audiorl.rollout.flow import FlowEngine
from audiorl.speech_models.taggers import SoundTagger, TaggerNetwork
from audiorl.tasks.sound.rewards import Clean, EventsHeard, EventTimes, SoundModels
from audiorl.tasks.sound.scenes import Event, write_thought
from audiorl.train.rl.minibatch import TrainBatch
from audiorl.train.rl.trainer import Trainer
from audiorl.types import Message, Sample
from tokenizers_audio.unified import UnifiedTokenizer
from tokenizers_audio.unified.config import MELS

EVENTS = (Event("bell", 0.2, 0.7), Event("rain", 0.8, 1.9))
LENGTHS = (50, 200, 75, 120, 60, 250, 90, 150)
"""Frames of the sounds of a pack: 2 to 10 s."""
WAYS = {
    "Fast-GRPO": (FlowConfig(), RLConfig(prompts_per_step=1)),
    "DiffusionNFT": (FlowConfig(noisy="none"), RLConfig(prompts_per_step=1, loss="nft")),
    "CRPO": (FlowConfig(noisy="none"), RLConfig(prompts_per_step=1, loss="crpo")),
}


def sample(number: int) -> Sample:
    about = {"duration": 2.0, "events": EVENTS, "thought": write_thought(EVENTS)}
    return Sample(f"{number}", (Message("user", ("A bell, then rain on a roof.",)),), metadata=about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="timed passes of each way")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default)")
    args = parser.parse_args()
    device, rounds = torch.device(torch_device(args.device)), args.rounds

    def timed(run: Callable[..., Any], *args: Any) -> tuple[float, Any]:
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        began = clock()
        result = run(*args)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - began, result

    codec = UnifiedTokenizer(MELS)
    codec.begin(0.1 * torch.randn(8, codec.sample_rate), torch.Generator().manual_seed(0))
    policy = new_flow(FlowModelConfig(), codec, ModelConfig(device=args.device))

    def train(lengths: tuple[int, ...]) -> None:
        prompts = [SoundPrompt(n, "A bell, then rain on a roof.", write_thought(EVENTS)) for n in lengths]
        x = torch.randn(sum(lengths), policy.model.latent_channels, device=device)
        policy.velocity(x, torch.full((len(lengths),), 0.5, device=device), prompts).square().sum().backward()

    packs = (LENGTHS, (max(LENGTHS),) * len(LENGTHS))
    passes = [[timed(train, lengths)[0] for lengths in packs] for _ in range(1 + rounds)]
    packed, padded = (sum(way[1:]) / rounds for way in zip(*passes, strict=True))
    frames = max(LENGTHS) * len(LENGTHS) / sum(LENGTHS)
    print(f"forward and backward of {len(LENGTHS)} sounds: packed {packed:.2f} s, padded {padded:.2f} s,", end=" ")
    print(f"ratio {padded / packed:.2f} of {frames:.2f} times the frames", flush=True)

    sounds = SoundModels(SoundTagger(TaggerNetwork(24, 32).eval(), (*map(str, range(22)), "bell", "rain")))
    reward = WeightedSum.of(events=EventsHeard(sounds), times=EventTimes(sounds), clean=Clean(sounds))
    for name, (sampling, config) in WAYS.items():
        trainer, engine = Trainer(policy, config, OptimConfig(), 1.0, sampling.steps), FlowEngine(policy, sampling)
        parts = dict.fromkeys(("sampling", "reward", "update"), 0.0)
        for step in range(1 + rounds):
            requests = [Request(sample(k), config.group_size, seed=step) for k in range(config.prompts_per_step)]
            sampling_seconds, rollouts = timed(engine.generate, requests)
            reward_seconds, scores = timed(score_rollouts, reward, rollouts)
            scored = [r.with_score(s) for r, s in zip(rollouts, scores, strict=True)]
            batch = TrainBatch([Experience.from_rollout(r) for r in scored])
            spent = (sampling_seconds, reward_seconds, timed(trainer.step, batch)[0])
            if step:
                parts = {part: own + more / rounds for (part, own), more in zip(parts.items(), spent, strict=True)}
        total = sum(parts.values())
        shares = ", ".join(f"{part} {own:.2f} s ({100 * own / total:.0f} %)" for part, own in parts.items())
        print(f"{name}: {shares}, together {total:.2f} s", flush=True)


if __name__ == "__main__":
    main()
