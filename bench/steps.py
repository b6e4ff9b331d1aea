"""CPU seconds of training steps or of decoding of this checkout against another one.

    git worktree add /tmp/before COMMIT
    python bench/steps.py train --against /tmp/before     # or decode; without --against: this checkout alone, once

Each side is a process of its own on one thread; they take turns, and the table gives medians of CPU seconds (user +
system) and of the ratios of neighbours. Both must end with the same losses to 1e-3, and sample the same tokens.

Of `train`, `small`: the update of GRPO on 6 answers of 12 tokens, a Qwen2 of width 128 with 2 layers. `sft`: 24
examples, and `short sft`: 2 examples, the tiny Qwen2.5-Omni of the quickstart on human speech. `grpo`: the update on 16
prompts x 8 answers of 4 to 32 tokens, with the reference's pass. `ppo, shared critic`: the same answers with the KL in
the reward and a critic on the policy's trunk. `rollout`: 16 prompts x 8 answers of up to 32 tokens.

Of `decode`, `decode`: 8 prompts of about 280 tokens x 8 samples of up to 96 tokens. `single`: one sample of each of 64
such prompts. `update`: `Trainer.step` on the rollouts of `decode`. The decoder is a Qwen2 with 4 query heads for 2
heads of keys. `ending` and `full`: 8 prompts of 547 tokens x 8 samples of up to 512 tokens, together 64 x 1059, which
is more than the default of `sampling.max_batch_tokens` (65,536). Answers of `ending` end after random numbers of
tokens, those of `full` take all 512; of both also decoder calls after the prompts, rows times calls, and the peak of
the cache.
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

STEPS = 3
WORDS = "What is said here? Which language is it, and who speaks? yes no why English Spanish French "


def train() -> dict[str, Any]:
    """Return CPU seconds a step and the last loss of every case."""
    import torch

    from audiorl.algos.experience import Experience
    from audiorl.config import CriticConfig, KLConfig, ModelConfig, OptimConfig, RLConfig, SamplingConfig, SFTConfig
    from audiorl.data.bundled import LANGUAGE_QUESTION, language_phrases, language_question
    from audiorl.models import AudioPolicy
    from audiorl.models.examples import Example
    from audiorl.models.families import qwen_omni, text
    from audiorl.protocols import Request
    from audiorl.rollout.hf import HFEngine
    from audiorl.train.fit import Learner
    from audiorl.train.rl.trainer import TrainBatch, Trainer
    from audiorl.train.sft import sft_loss
    from audiorl.types import Message, Sample

    torch.set_num_threads(1)
    numbers: dict[str, Any] = {}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        seconds = []
        for _ in range(1 + STEPS):
            before = time.process_time()
            result = step()
            seconds.append(time.process_time() - before)
        numbers[name] = statistics.median(seconds[1:])
        return result

    def update(name: str, policy: AudioPolicy, experiences: list[Experience], **options: Any) -> None:
        sizes = {"steps": 1 + STEPS, "prompts_per_step": 16, "group_size": 8, "micro_batch_tokens": 800}
        trainer = Trainer(policy, RLConfig(**{**sizes, **options}), OptimConfig(lr=1e-4), 1.0, 32)
        output = timed(name, lambda: trainer.step(TrainBatch(experiences)))
        numbers[f"{name}, loss"] = output.metrics["policy/loss"]

    def answered(
        policy: AudioPolicy, samples: list[Sample], size: int, shortest: int, longest: int
    ) -> list[Experience]:
        """Random answers with random rewards."""
        generator = torch.Generator().manual_seed(0)
        out = []
        for sample in samples:
            prompt = policy.prompt(sample)
            for _ in range(size):
                length = int(torch.randint(shortest, longest + 1, (), generator=generator))
                ids = torch.cat([prompt.ids, torch.randint(0, 200, (length,), generator=generator)])
                mask = torch.arange(len(ids)) >= len(prompt.ids)
                rewards = torch.zeros(len(ids))
                rewards[-1] = float(torch.randn((), generator=generator))
                e = Experience(ids, mask, len(prompt.ids), audio=prompt.audio, group_id=sample.id, name=f"{len(out)}")
                zeros = torch.zeros(len(ids))
                out.append(e.replace(rewards=rewards, score=float(rewards[-1]), rollout_logprobs=mask * -5.0 + zeros))
        return out

    def with_advantages(experiences: list[Experience]) -> list[Experience]:
        return [e.replace(advantages=e.loss_mask * e.score) for e in experiences]

    def omni() -> AudioPolicy:
        texts = [u.text for u in phrases] + [LANGUAGE_QUESTION] * 100
        return qwen_omni.tiny(texts, config=ModelConfig(audio="projector"))

    small = text.tiny(["What is said, and by whom? yes no why"] * 20, hidden=128, layers=2, vocab_size=400)
    questions = [Sample(str(k), (Message("user", (f"{word} said",)),)) for k, word in enumerate(("who", "what"))]
    update("small", small, with_advantages(answered(small, questions, 3, 12, 12)), kl_beta=0.0)
    phrases = language_phrases(3.0, 48)[:24]
    samples = [language_question(u.clip, u, str(k)) for k, u in enumerate(phrases)]
    policy = omni()
    examples = [Example(s, f"<think>{u.text}</think>") for s, u in zip(samples, phrases, strict=True)]
    for name, count in (("sft", 24), ("short sft", 2)):
        worker = Learner(sft_loss, omni(), SFTConfig(steps=9, micro_batch_tokens=800), OptimConfig(lr=1e-4))
        numbers[f"{name}, loss"] = timed(name, lambda w=worker, n=count: w.train(examples[:n]))["sft/loss"]
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=32))
    requests = [Request(s, 8, seed=1, group_id=s.id) for s in samples[:16]]
    timed("rollout", lambda: engine.generate(requests))
    experiences = answered(policy, samples[:16], 8, 4, 32)
    update("grpo", policy, with_advantages(experiences), kl_beta=0.01)
    critic = CriticConfig(shared=True)
    ppo = {"advantage": "gae", "kl": KLConfig(place="reward"), "kl_beta": 0.01, "critic": critic}
    update("ppo, shared critic", omni(), experiences, **ppo)
    return numbers


def decode() -> dict[str, Any]:
    """Return CPU seconds, and what the cache held."""
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
    seconds, rollouts = timed(lambda: engine.generate(requests))
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
    numbers: dict[str, Any] = {"decode": seconds, "single": single, "update": update}
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
            name: seconds,
            f"{name}, cache in MB": max(size for _, size in calls) / 1e6,
            f"{name}, tokens": sum(lengths(many)),
        }
        sampled += many
    numbers["prompt, tokens"] = max(len(r.segments[0].prompt_ids) for r in many)
    numbers["all, ids"] = hash(tuple(tuple(r.segments[0].ids.tolist()) for r in sampled))
    return numbers


def measure(checkout: Path, what: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), what, "--child"]
    out = subprocess.run(command, env=environment, cwd=checkout, check=True, stdout=subprocess.PIPE, text=True).stdout
    numbers: dict[str, Any] = json.loads(out.splitlines()[-1])
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "decode"))
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(train() if options.what == "train" else decode()))
        return
    here = Path(__file__).resolve().parents[1]
    if options.against is None:
        for name, number in measure(here, options.what).items():
            print(f"{name}: {number:.5g}")
        return
    pairs = [
        (measure(options.against.resolve(), options.what), measure(here, options.what)) for _ in range(options.rounds)
    ]
    table = Table("CPU s a step, unless it says otherwise", "before", "now", "now / before")
    for name in pairs[0][0]:
        before, now = ([side[name] for side in sides] for sides in zip(*pairs, strict=True))
        if name.endswith((", loss", ", ids", ", tokens")):
            assert abs(before[0] - now[0]) < 1e-3, f"{name}: {before[0]} before, {now[0]} now"
            continue
        ratios = [b / a for a, b in zip(before, now, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        table.add_row(name, f"{statistics.median(before):.4g}", f"{statistics.median(now):.4g}", spread)
    Console().print(table)


if __name__ == "__main__":
    main()
