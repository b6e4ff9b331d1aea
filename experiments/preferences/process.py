"""The part `process`: RL from a process reward model, one total for an answer against credit for each step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from arms import markdown

from audiorl.config import CriticConfig, KLConfig, OptimConfig, ProcessRewardConfig, RLConfig, SamplingConfig
from audiorl.data.preferences import Steps
from audiorl.models import AudioPolicy
from audiorl.models.process_reward import ProcessRewardModel
from audiorl.protocols import Reward
from audiorl.rewards import ProcessModelReward, ThinkFormat, WeightedSum
from audiorl.run.folder import Run
from audiorl.train.reward_model import train_process_reward
from audiorl.train.rl.train import train_rl
from audiorl.types import Rollout, Sample, Score
from preferences.bench import BUDGET, Bench, Row, last_metrics, read, slug
from preferences.tables import interval, mean, policy_table, transcribed


@dataclass(frozen=True)
class OneTotal:
    """A reward without its credit per token: the same total on the last token."""

    reward: Reward

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        return [None if s is None else replace(s, per_token=None) for s in self.reward(rollouts)]


def run(bench: Bench, seeds: Sequence[int]) -> None:
    """A process reward model of thoughts and answers, then GRPO and PPO from it."""
    size = bench.size

    def labelled(name: str, samples: Sequence[Sample], seed: int) -> list[Steps]:
        """Up to two right and two wrong answers a question: is the thought what is said, is the answer right?"""
        steps = []
        for sample, given in bench.answers(name, samples):
            rng = random.Random(f"steps {seed} {sample.id}")
            for right in (True, False):
                kind = [a for a in {a.text: a for a in given}.values() if a.well_formed and a.right is right]
                for a in rng.sample(kind, min(2, len(kind))):
                    both = ProcessModelReward("").steps(a.text)
                    labels = (transcribed(sample, a.text, words=2).total, float(right))
                    steps.append(Steps(sample, both, labels))
        return steps

    def judge(seed: int, policy: AudioPolicy, run: Run) -> Row:
        items = labelled("train", bench.questions, seed)
        config = ProcessRewardConfig(
            steps=size.steps, batch_size=size.batch, soft=True, micro_batch_tokens=BUDGET, save_every=size.steps
        )
        optim = OptimConfig(lr=1e-4, warmup_steps=5)
        train_process_reward(policy, items, run, config=config, optim=optim, seed=seed)
        policy.save(bench.out / "judges" / str(seed))
        held_out = labelled("test", next(iter(bench.measured.values())), seed)
        judgements = ProcessRewardModel(policy, config.marker, config.good, config.bad).score_steps(
            [(i.sample, i.steps) for i in held_out]
        )
        row: Row = {"items": len(items), **last_metrics(run)}
        for step, kind in enumerate(("thought", "answer")):
            row[kind] = [(values[step], item.labels[step]) for values, item in zip(judgements, held_out, strict=True)]
        return row

    def reinforced(options: Row, per_step: bool, seed: int, policy: AudioPolicy, run: Run) -> Row:
        judged: Reward = ProcessModelReward(str(bench.out / "judges" / str(seed)), credit="steps")
        total = WeightedSum.of(process=(judged if per_step else OneTotal(judged), 2.0), format=(ThinkFormat(), 1.0))
        config = RLConfig(steps=size.rl_steps, micro_batch_tokens=800, save_every=size.rl_steps, **options)
        sampling = SamplingConfig(max_new_tokens=size.tokens // 2, max_batch_tokens=32_768)
        optim = OptimConfig(lr=1e-4, warmup_steps=5)
        train_rl(policy, bench.questions, total, run, config=config, optim=optim, sampling=sampling, seed=seed)
        return last_metrics(run)

    for seed in seeds:
        bench.trained(f"process/judge/{seed}", partial(judge, seed))
        for name, (options, per_step) in PROCESS.items():
            run = f"process/{slug(name)}/{seed}"
            bench.trained(run, partial(reinforced, options, per_step, seed))
            bench.measure(run)


GRPO: Row = {"prompts_per_step": 16, "group_size": 8}


PPO: Row = {
    "prompts_per_step": 64,
    "group_size": 2,
    "mini_batches": 2,
    "advantage": "gae",
    "kl": KLConfig("k1", "reward"),
    "kl_beta": 0.02,
    "critic": CriticConfig(warmup_steps=5, optim=OptimConfig(lr=1e-4)),
}


PROCESS: dict[str, tuple[Row, bool]] = {
    "GRPO, one total": (GRPO, False),
    "GRPO, credit per step": (GRPO | {"advantage": "process"}, True),
    "GRPO, credit per step, compared step by step": (GRPO | {"advantage": "step-index"}, True),
    "PPO, one total": (PPO, False),
    "PPO, credit per step": (PPO, True),
}
"""By name: the options of RLConfig, and whether each step's reward stands at its end."""


def judge_table(bench: Bench) -> str:
    """How the process reward model judges held-out steps."""
    header = ["step", "mean label", "correlation of judgement and label", "on the right side of 0.5 %"]
    seed_results = [read(p) for p in sorted((bench.out / "results" / "process" / "judge").glob("*/train.json"))]
    lines = []
    for kind in ("thought", "answer"):
        pairs = [pair for row in seed_results for pair in row[kind]]
        if pairs:
            correlation = np.corrcoef(np.array(pairs).T)[0, 1]
            hits = [float((p > 0.5) == (label > 0.5)) for p, label in pairs]
            lines.append([kind, f"{mean([label for _, label in pairs]):.2f}", f"{correlation:+.2f}", interval(hits)])
    return markdown(header, lines)


def tables(bench: Bench) -> dict[str, str]:
    runs = [(name, f"process/{slug(name)}/*") for name in PROCESS]
    return {
        "Process reward model": judge_table(bench),
        "RL from the process reward model": policy_table(bench, runs),
    }
