"""Reward models: a score for a whole answer, learned from pairs, or a judgement of each step, learned from labels.

A process reward model is a policy whose decoder judges a step at the marker that ends it. Shapes: P pairs of a pack, K
step markers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.algos.preference import bradley_terry, length_expert, length_logit, process_reward
from audiorl.config import OptimConfig, ProcessRewardConfig, RewardModelConfig
from audiorl.config.checks import pass_tokens
from audiorl.data.preferences import Pair, Steps
from audiorl.models import AudioPolicy
from audiorl.models.examples import experience
from audiorl.models.process_reward import ProcessRewardModel
from audiorl.models.value import ValueModel, score_answers
from audiorl.run.folder import Run
from audiorl.train.batches import group_packs
from audiorl.train.fit import Learner, PackLoss, train_on
from audiorl.train.preference import pair_examples


def pair_score_loss(
    learner: Learner, config: RewardModelConfig, pairs: Sequence[Pair], expert: tuple[float, float] = (0.0, 1.0)
) -> tuple[list[list[int]], PackLoss]:
    """Compute Bradley-Terry on the scores at the last token of both answers, the mean over the pairs of all ranks.

    `expert`: slope and scale of `length_expert`, of which only the slope 0 leaves the scores as they are.
    """
    model = learner.model
    assert isinstance(model, ValueModel)
    count = sum(learner.world.gather(len(pairs)))
    groups = [[experience(model.trunk, e, str(k)) for e in pair_examples(p)] for k, p in enumerate(pairs)]

    def loss(places: list[int]) -> tuple[list[Experience], Tensor, dict[str, Tensor], Tensor | None]:
        part = [e for p in places for e in groups[p]]
        scores = model.scores(pack_experiences(part))
        chosen, rejected = scores[::2], scores[1::2]
        margins = [pairs[p].margin if config.margins else 0.0 for p in places]
        margin = torch.tensor(margins).to(chosen)
        if config.length_debias:
            longer = [groups[p][0].num_sampled - groups[p][1].num_sampled for p in places]
            margin = margin - length_logit(torch.tensor(longer).to(chosen), *expert)
        total = bradley_terry(chosen, rejected, margin, config.regulariser).sum() / count
        metrics = {"accuracy": (chosen > rejected).sum(), "margin": (chosen - rejected).sum(), "mean": scores.sum()}
        shares = {"accuracy": count, "margin": count, "mean": 2 * count}
        means = {f"reward_model/{name}": value.double() / shares[name] for name, value in metrics.items()}
        return part, total, {"reward_model/loss": total, **means}, None

    return group_packs(groups, pass_tokens(config)), loss


def train_reward_model(
    model: ValueModel,
    pairs: Sequence[Pair],
    run: Run,
    *,
    config: RewardModelConfig,
    optim: OptimConfig,
    seed: int = 0,
    phase: str = "reward_model",
) -> None:
    """Train `model` in place, from the phase's last checkpoint on."""
    expert = (0.0, 1.0)
    if config.length_debias and not run.finished(phase):
        both = [[experience(model.trunk, e).num_sampled for e in pair_examples(p)] for p in pairs]
        expert = length_expert(torch.tensor([chosen - rejected for chosen, rejected in both]))
        print(f"{phase}: length alone gives log-odds of {expert[0]:.2f}·tanh(tokens / {expert[1]:.1f})", flush=True)

    loss = partial(pair_score_loss, expert=expert)
    train_on(loss, model, pairs, run, config, optim, phase=phase, seed=seed)


def ranked_right(model: ValueModel, pairs: Sequence[Pair]) -> list[bool]:
    """Tell for each pair whether the chosen answer scores higher."""
    scores = score_answers(model, [example for p in pairs for example in pair_examples(p)])
    return [c > r for c, r in zip(scores[::2], scores[1::2], strict=True)]


# -- process rewards ---------------------------------------------------------------------------------------------------


def step_judgement_loss(
    learner: Learner, config: ProcessRewardConfig, items: Sequence[Steps]
) -> tuple[list[list[int]], PackLoss]:
    """Compute the cross-entropy at the step markers, the mean over the steps of all ranks."""
    judge = ProcessRewardModel(learner.policy, config.marker, config.good, config.bad)
    steps = sum(learner.world.gather(sum(len(i.steps) for i in items)))
    marked = [judge.mark(i.sample, i.steps) for i in items]
    if not config.soft and any(label not in (0, 1) for i in items for label in i.labels):
        raise ValueError("a step's label is neither 0 nor 1; set soft to learn from probabilities")

    def loss(indices: list[int]) -> tuple[list[Experience], Tensor, dict[str, Tensor], Tensor | None]:
        part = [marked[i] for i in indices]
        logits = judge.logits(part)
        labels = torch.tensor([x for i in indices for x in items[i].labels], device=logits.device)
        total = process_reward(logits, labels, judge.label_ids).sum() / steps
        good, bad = (logits[:, label] for label in judge.label_ids)
        right = ((good > bad) == (labels > 0.5)).sum()
        metrics = {"process_reward/loss": total, "process_reward/accuracy": right.double() / steps}
        return [m.experience for m in part], total, metrics, None

    return micro_batches([m.experience for m in marked], pass_tokens(config), share_prompts=False), loss


def train_process_reward(
    policy: AudioPolicy,
    items: Sequence[Steps],
    run: Run,
    *,
    config: ProcessRewardConfig,
    optim: OptimConfig,
    seed: int = 0,
    phase: str = "process_reward",
) -> None:
    """Train `policy` in place to judge steps, from the phase's last checkpoint on."""
    train_on(step_judgement_loss, policy, items, run, config, optim, phase=phase, seed=seed)


def judged_right(judge: ProcessRewardModel, items: Sequence[Steps]) -> list[bool]:
    """Tell for each step of all items whether it is judged as it is labelled."""
    probabilities = [p for ps in judge.score_steps([(i.sample, i.steps) for i in items]) for p in ps]
    labels = [label for i in items for label in i.labels]
    return [(p > 0.5) == (label > 0.5) for p, label in zip(probabilities, labels, strict=True)]
