"""Decoding and the update of this checkout against another one, and how many decoder calls a batch of rollouts takes.

    git worktree add /tmp/before COMMIT
    python bench/decode.py --against /tmp/before     # without it: this checkout alone, once

Each side is a process of its own; they take turns, one measurement each, and the table gives medians of CPU seconds
(user + system) and of the ratios of neighbours. Both must sample the same tokens.

`decode`: 8 prompts of about 280 tokens x 8 samples of up to 96 tokens. `single`: one sample of each of 64 such prompts.
`update`: `Trainer.step` on the rollouts of `decode`. The decoder is a Qwen2 with 4 query heads for 2 heads of keys, on
one thread.

`ending` and `full`: 8 prompts of 547 tokens x 8 samples of up to 512 tokens, together 64 x 1059, which is more than the
default of `sampling.max_batch_tokens` (65,536). Answers of `ending` end after random numbers of tokens, those of `full`
take all 512. The numbers are decoder calls after the prompts, rows times calls, CPU seconds, and the peak of the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

WORDS = "What is said here? Which language is it, and who speaks? yes no why English Spanish French "


def child() -> None:
    """Measure once and print the numbers as JSON."""
    import torch

    from audiorl.algos.experience import Experience
    from audiorl.config import OptimConfig, RLConfig, SamplingConfig
    from audiorl.models.families import text
    from audiorl.protocols import Request
    from audiorl.rollout.hf import HFEngine
    from audiorl.train.rl.trainer import TrainBatch, Trainer
    from audiorl.types import Message, Rollout, Sample

    torch.set_num_threads(1)

    def model(hidden: int, layers: int, vocabulary: int, stop: float) -> Any:
        policy = text.tiny([WORDS * 20], hidden=hidden, layers=layers, vocab_size=vocabulary)
        head = policy.backbone.head(policy.model)
        likely = torch.zeros(head.weight.shape[0])
        likely[list(policy.stop_ids)] = stop
        head.register_forward_hook(lambda module, args, out: out + likely)
        return policy

    def ask(policy: Any, tokens: int, prompts: int = 8, samples_each: int = 8) -> list[Request]:
        words = WORDS.split()
        samples = []
        for i in range(prompts):
            count = tokens
            while True:  # the longest prompt of at most `tokens` tokens
                sample = Sample(
                    f"{i}", (Message("user", (" ".join(words[(i + k) % len(words)] for k in range(count)),)),)
                )
                if len(policy.prompt(sample).ids) <= tokens:
                    break
                count -= 1
            samples.append(sample)
        return [Request(sample, samples_each, seed=1, group_id=sample.id) for sample in samples]

    LONG = SamplingConfig(max_new_tokens=512)

    def timed(run: Callable[[], Any]) -> tuple[float, Any]:
        before = time.process_time()
        result = run()
        return time.process_time() - before, result

    def lengths(rollouts: list[Rollout]) -> list[int]:
        return [r.num_sampled for r in rollouts]

    policy = model(256, 4, 2000, 2.0)
    engine, requests = HFEngine(policy, SamplingConfig(max_new_tokens=96)), ask(policy, 280)
    engine.generate(requests[:1])
    decode, rollouts = timed(lambda: engine.generate(requests))
    experiences = []
    for k, rollout in enumerate(rollouts):
        e = Experience.from_rollout(rollout)
        experiences.append(e.replace(advantages=torch.where(e.loss_mask, 1.0 if k % 2 else -1.0, 0.0)))
    config = RLConfig(steps=4, prompts_per_step=8, group_size=8, kl_beta=0.0, micro_batch_tokens=2048)
    trainer = Trainer(policy, config, OptimConfig(lr=1e-4), 1.0, 96)
    trainer.step(TrainBatch(experiences))
    update, _ = timed(lambda: trainer.step(TrainBatch(experiences)))

    def cache_bytes(arguments: dict[str, Any]) -> int:
        layers = arguments["past_key_values"].layers
        tensors = [b for layer in layers for b in getattr(layer, "buffers", (layer.keys, layer.values))]
        prompts = arguments.get("prompts")
        tensors += [] if prompts is None else [*prompts.keys, *prompts.values]
        return sum(x.numel() * x.element_size() for x in tensors)

    singles = ask(policy, 280, 64, 1)
    single, alone = timed(lambda: engine.generate(singles))
    numbers: dict[str, Any] = {"decode": decode, "single": single, "update": update}
    sampled = [*rollouts, *alone]
    for name, stop in (("ending", 0.0), ("full", -1e9)):
        small = model(32, 1, 400, stop)
        long_prompts = ask(small, 547)
        calls: list[tuple[int, int]] = []
        small.backbone.decoder(small.model).register_forward_pre_hook(
            lambda module, args, kwargs, calls=calls: (
                calls.append((kwargs["inputs_embeds"].shape[0], cache_bytes(kwargs)))
                if kwargs["inputs_embeds"].shape[1] == 1
                else None
            ),
            with_kwargs=True,
        )
        seconds, many = timed(
            lambda small=small, long_prompts=long_prompts: HFEngine(small, LONG).generate(long_prompts)
        )
        numbers |= {
            f"{name}, calls": len(calls),
            f"{name}, rows": sum(rows for rows, _ in calls),
            f"{name}, CPU s": seconds,
            f"{name}, cache in MB": max(size for _, size in calls) / 1e6,
            f"{name}, tokens": sum(lengths(many)),
        }
        sampled += many
    numbers["prompt"] = max(len(r.segments[0].prompt_ids) for r in many)
    numbers["ids"] = hash(tuple(tuple(r.segments[0].ids.tolist()) for r in sampled))
    print(json.dumps(numbers))


def measure(checkout: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--child"]
    out = subprocess.run(command, env=environment, cwd=checkout, check=True, capture_output=True, text=True).stdout
    numbers: dict[str, Any] = json.loads(out.splitlines()[-1])
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
        return
    here = Path(__file__).resolve().parents[1]
    if options.against is None:
        for name, number in measure(here).items():
            if name != "ids":
                print(f"{name}: {number:.5g}")
        return
    pairs = [(measure(options.against.resolve()), measure(here)) for _ in range(options.rounds)]
    before, now = pairs[0]
    assert before["ids"] == now["ids"], "the two checkouts sample different tokens"
    table = Table("", "before", "now", "now / before")
    for name in ("decode", "single", "update", "ending, CPU s", "full, CPU s"):
        ratios = [b[name] / a[name] for a, b in pairs]
        middle = [statistics.median(side[name] for side in sides) for sides in zip(*pairs, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        label = name if name.endswith("CPU s") else f"{name}, CPU s"
        table.add_row(label, *(f"{x:.2f}" for x in middle), spread)
    for name in (f"{case}, {what}" for case in ("ending", "full") for what in ("calls", "rows", "cache in MB")):
        table.add_row(name, f"{before[name]:.5g}", f"{now[name]:.5g}", f"{now[name] / before[name]:.2f}")
    console = Console()
    console.print(table)
    console.print(
        f"prompts of {now['prompt']} tokens; {now['ending, tokens']} and {now['full, tokens']} tokens were sampled"
    )


if __name__ == "__main__":
    main()
