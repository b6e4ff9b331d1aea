"""What sharing a group's prompt saves in the update: forward and backward, shared against repeated, in one process.

    python bench/shared_prompt.py [--group 8] [--seconds 8] [--answer 32]

Prints median times over alternating repetitions, their ratio, and the largest difference between the two gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from audiorl.algos.packing import pack_experiences
from audiorl.config import ModelConfig
from audiorl.data.corpus import bundled_speech
from audiorl.models import AudioPolicy
from audiorl.models.qwen_omni import tiny
from audiorl.types import Experience, Message, Sample


def experiences(policy: AudioPolicy, prompts: int, group: int, seconds: float, answer: int) -> list[Experience]:
    """Groups of random answers to real recordings of about `seconds`."""
    utterances = [u for u in bundled_speech() if 0.6 * seconds < u.duration < 1.4 * seconds][:prompts]
    generator = torch.Generator().manual_seed(0)
    out = []
    for u in utterances:
        sample = Sample(u.id, (Message("user", (u.clip, "What is said?")),))
        prompt = policy.prompt_ids(sample)
        for _ in range(group):
            ids = torch.cat([prompt, torch.randint(0, 200, (answer,), generator=generator)])
            mask = torch.arange(len(ids)) >= len(prompt)
            out.append(Experience(ids, mask, len(prompt), sample.audio, group_id=u.id))
    return out


def gradients(policy: AudioPolicy, batch: Sequence[Experience], group: int, share: bool) -> tuple[float, torch.Tensor]:
    """Seconds of a forward and backward pass, one row per group (shared) or per experience, and the flat gradient."""
    rows = [batch[i : i + group] for i in range(0, len(batch), group)] if share else [[e] for e in batch]
    policy.model.zero_grad()
    began = time.perf_counter()
    for row in rows:
        policy.forward(pack_experiences(row, share)).logprobs.sum().backward()
    seconds = time.perf_counter() - began
    return seconds, torch.cat([p.grad.flatten() for p in policy.trainable().values() if p.grad is not None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    policy = tiny([u.text for u in bundled_speech()], config=ModelConfig())
    batch = experiences(policy, args.prompts, args.group, args.seconds, args.answer)
    times: dict[bool, list[float]] = {True: [], False: []}
    flat: dict[bool, torch.Tensor] = {}
    for repeat in range(args.repeats + 1):
        for share in (True, False):
            seconds, flat[share] = gradients(policy, batch, args.group, share)
            if repeat:  # the first round hears the clips
                times[share].append(seconds)
    shared, repeated = (statistics.median(times[share]) for share in (True, False))
    error = float((flat[True] - flat[False]).abs().max() / flat[False].abs().max())
    prompt = batch[0].prompt_length
    print(f"{args.prompts} prompts of about {prompt} tokens x {args.group} answers of {args.answer} tokens")
    ratio = repeated / shared
    print(f"repeated {repeated:.3f} s, shared {shared:.3f} s, ratio {ratio:.2f}, gradient error {error:.1e}")


if __name__ == "__main__":
    main()
