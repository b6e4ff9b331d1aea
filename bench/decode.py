"""Decoding and the update of this checkout against another one, and how many decoder calls a batch of rollouts takes.

    git worktree add /tmp/before COMMIT
    python bench/decode.py --against /tmp/before

Each side is a process of its own; they take turns, one measurement each, and the table gives medians of CPU seconds
(user + system) and of the ratios of neighbours. Both must sample the same tokens.

`decode`: 8 prompts of about 280 tokens x 8 samples of up to 96 tokens. `update`: `Trainer.step` on these rollouts. The
decoder is a Qwen2 with 4 query heads for 2 heads of keys, on one thread.

`calls`: 8 prompts of 547 tokens x 8 samples of up to 512 tokens, together 64 x 1059, which is more than the default of
`sampling.max_batch_tokens` (65,536). Answers end after random numbers of tokens. The numbers are decoder calls after
the prompts, and rows times calls.
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

    from audiorl.config import OptimConfig, RLConfig, SamplingConfig
    from audiorl.models import text
    from audiorl.rl.trainer import TrainBatch, Trainer
    from audiorl.rollout.hf import HFEngine
    from audiorl.types import Experience, Message, Request, Rollout, Sample

    torch.set_num_threads(1)

    def model(hidden: int, layers: int, vocabulary: int, stop: float) -> Any:
        policy = text.tiny([WORDS * 20], hidden=hidden, layers=layers, vocab_size=vocabulary)
        head = policy.backbone.head(policy.model)
        likely = torch.zeros(head.weight.shape[0])
        likely[list(policy.stop_ids)] = stop
        head.register_forward_hook(lambda module, args, out: out + likely)
        return policy

    def ask(policy: Any, tokens: int) -> list[Request]:
        words = WORDS.split()
        samples = []
        for i in range(8):
            count = tokens
            while True:  # the longest prompt of at most `tokens` tokens
                sample = Sample(
                    f"{i}", (Message("user", (" ".join(words[(i + k) % len(words)] for k in range(count)),)),)
                )
                if len(policy.prompt_ids(sample)) <= tokens:
                    break
                count -= 1
            samples.append(sample)
        return [Request(sample, 8, seed=1, group_id=sample.id) for sample in samples]

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

    small = model(32, 1, 400, 0.0)
    calls: list[int] = []
    small.backbone.decoder(small.model).register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(
            kwargs["inputs_embeds"].shape[0] if kwargs["inputs_embeds"].shape[1] == 1 else 0
        ),
        with_kwargs=True,
    )
    many = HFEngine(small, SamplingConfig(max_new_tokens=512)).generate(ask(small, 547))
    numbers = {
        "decode": decode,
        "update": update,
        "calls": sum(rows > 0 for rows in calls),
        "rows": sum(calls),
        "longest": max(lengths(many)),
        "prompt": max(len(r.segments[0].prompt_ids) for r in many),
        "tokens": sum(lengths(many)),
        "ids": hash(tuple(tuple(r.segments[0].ids.tolist()) for r in [*rollouts, *many])),
    }
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
    if options.against is None:
        parser.error("give --against FOLDER, a checkout of the commit to compare with")
    here = Path(__file__).resolve().parents[1]
    pairs = [(measure(options.against.resolve()), measure(here)) for _ in range(options.rounds)]
    before, now = pairs[0]
    assert before["ids"] == now["ids"], "the two checkouts sample different tokens"
    table = Table("", "before", "now", "now / before")
    for name in ("decode", "update"):
        ratios = [b[name] / a[name] for a, b in pairs]
        middle = [statistics.median(side[name] for side in sides) for sides in zip(*pairs, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        table.add_row(f"{name}, CPU s", *(f"{x:.2f}" for x in middle), spread)
    for name in ("calls", "rows"):
        table.add_row(name, f"{before[name]}", f"{now[name]}", f"{now[name] / before[name]:.2f}")
    console = Console()
    console.print(table)
    console.print(
        f"calls: prompts of {now['prompt']} tokens, {now['tokens']} tokens sampled, the longest answer {now['longest']}"
    )


if __name__ == "__main__":
    main()
