"""Iterative DPO: every round the policy answers, the reward picks its best and worst answer, and DPO learns from both.

    audiorl train dpo-online --out runs/online --path Qwen/Qwen2.5-Omni-3B \\
        --model.dtype bfloat16 --data avqa.jsonl --held-out mmau-test-mini.json

The reference of a round is the policy that wrote its answers. Any loss of `dpo-audio-qa` may be used; pairs are
made of answers whose rewards differ. `--path tiny --data bundled` tries the recipe without any download.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from audiorl.algos.advantages import all_equal
from audiorl.config import ModelConfig, OptimConfig, PreferenceConfig, SamplingConfig
from audiorl.config.recipe import HeldOutOptions, RecipeConfig, RewardOptions
from audiorl.data.preferences import Pair, pairs_to_judged
from audiorl.data.schedule import batch_of_step
from audiorl.eval._common import complete_rows
from audiorl.protocols import Request, Reward, RolloutEngine
from audiorl.recipes._common import (
    answer_reward,
    evaluate_around_training,
    evaluation_of,
    read_questions,
    rl_check,
    with_user_reward,
)
from audiorl.rewards.combine import scored_rollouts
from audiorl.rollout.hf import HFEngine
from audiorl.run.folder import Run
from audiorl.train.preference import prefer
from audiorl.types import Sample

CHUNK = 16  # Prompts that are answered between two savings


@dataclass(frozen=True)
class OnlineDPOConfig(HeldOutOptions, RewardOptions, RecipeConfig):
    think: bool = True
    """Ask for thoughts before the answer, and reward their format."""
    rounds: int = 3
    """Rounds of answering and learning."""
    prompts_per_round: int = 1024
    """Prompts that are answered in a round."""
    answers: int = 8
    """Answers sampled for each prompt."""
    eval_tokens: int = 256
    """Most tokens of a greedy answer to a held-out question."""
    dpo: PreferenceConfig = PreferenceConfig(batch_size=32)
    """The loss. The steps of a round follow from its pairs, `epochs` and `max_steps`."""
    optim: OptimConfig = OptimConfig(lr=5e-7)
    """The policy's optimizer."""
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, max_new_tokens=64)
    """How the answers of a round are sampled."""


def tiny() -> OnlineDPOConfig:
    return OnlineDPOConfig(
        path="tiny",
        data=("bundled",),
        held_out_count=4,
        rounds=2,
        prompts_per_round=4,
        answers=3,
        max_steps=1,
        eval_tokens=8,
        reward_file="recipes/rewards/variety.py",
        model=ModelConfig(),
        dpo=PreferenceConfig(batch_size=2, save_every=1),
        sampling=SamplingConfig(max_new_tokens=8),
    )


def main(config: OnlineDPOConfig, run: Run) -> None:
    reward = with_user_reward(config, answer_reward(config.think))
    check = rl_check(config, reward, config.eval_tokens)
    samples, held_out = read_questions(config, think=config.think, check=check)
    policy = check.policy()
    evaluation = evaluation_of(config, samples, held_out, reward, config.eval_tokens, check=check, think=config.think)
    with evaluate_around_training(run, policy, evaluation) as evaluate:
        for k in range(1, config.rounds + 1):
            phase = f"round_{k}"
            if run.finished(phase):
                run.load_result(phase, policy)
            else:
                prompts = {s.id: s for s in batch_of_step(samples, k - 1, config.prompts_per_round, config.seed)}
                engine = HFEngine(policy, config.sampling)
                pairs = sampled_pairs(
                    run, phase, engine, list(prompts.values()), reward, config.answers, config.seed + k
                )
                # An answer may spell a reserved token in letters; learned as a text it would be that token.
                spelled = policy.prompts.reserved.search
                pairs = [p for p in pairs if not any(spelled(str(text)) for text in (p.chosen, p.rejected))]
                items = pairs_to_judged(pairs) if config.dpo.loss == "kto" else pairs
                dpo = config.with_steps_for(config.dpo, len(items))
                prefer(
                    policy, items, run, config=dpo, optim=config.optim, seed=config.seed, phase=phase, evaluate=evaluate
                )
            if k < config.rounds:
                evaluation.measure(run, f"after_{k}", policy)


def sampled_pairs(
    run: Run, phase: str, engine: RolloutEngine, samples: Sequence[Sample], reward: Reward, answers: int, seed: int
) -> list[Pair]:
    """Return the best and the worst of `answers` answers to each prompt, where their rewards and texts differ.

    Of equal rewards the first answer counts. Kept in answers/PHASE.jsonl, one row a prompt, where an interrupted pass
    continues. Raises ValueError when no prompt gives a pair.
    """

    def answered(batch: Sequence[Sample]) -> list[dict[str, Any]]:
        scored = scored_rollouts(reward, engine.generate([Request(s, answers, seed=seed) for s in batch]))
        rows: list[dict[str, Any]] = []
        for sample in batch:
            own = [(r.score.total, r.text) for r in scored if r.score and r.sample is sample]
            rows.append({"id": sample.id, "score": float(sum(total for total, _ in own)) / len(own) if own else None})
            if own:
                (high, best), (low, worst) = (pick(own, key=lambda scored: scored[0]) for pick in (max, min))
                if not all_equal((high, low)) and best.strip() and worst.strip() and best.strip() != worst.strip():
                    rows[-1] |= {"chosen": best, "rejected": worst, "margin": high - low}
        return rows

    rows = complete_rows(run.dir / "answers" / f"{phase}.jsonl", {s.id: s for s in samples}, answered, CHUNK)
    found = [(s, rows[s.id]) for s in samples if "chosen" in rows[s.id]]
    print(f"{phase}: {len(found)} pairs from {len(samples)} prompts", flush=True)
    if not found:
        raise ValueError(
            f"{phase}: the answers to each of {len(samples)} prompts were all rewarded the same, so there is nothing "
            "to prefer; ask for more answers, a higher temperature or another reward"
        )
    return [Pair(s, row["chosen"], row["rejected"], row["margin"]) for s, row in found]
