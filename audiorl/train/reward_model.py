"""Reward models: a score for a whole answer, learned from pairs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.algos.preference import length_expert, length_logit, pairwise
from audiorl.config import OptimConfig, RewardModelConfig
from audiorl.data.preferences import Pair
from audiorl.data.schedule import rough_length
from audiorl.distributed.local import changes_worker
from audiorl.distributed.world import World
from audiorl.models import AudioPolicy
from audiorl.models.examples import experience
from audiorl.models.value import ValueModel, score_answers
from audiorl.run.folder import Run
from audiorl.train.batches import group_packs
from audiorl.train.checks import read_pass
from audiorl.train.fit import fit
from audiorl.train.learner import Learner, learners
from audiorl.train.preference import pair_examples


class RewardModelWorker(Learner[ValueModel]):
    """Bradley-Terry on the scores at the last token of both answers of a pair.

    `expert`: slope and scale of `length_expert`, of which only the slope 0 leaves the scores as they are.
    """

    def __init__(
        self,
        model: ValueModel,
        config: RewardModelConfig,
        optim: OptimConfig,
        expert: tuple[float, float] = (0.0, 1.0),
        world: World | None = None,
    ):
        super().__init__(model, optim, config.steps, world)
        self.config = config
        self.expert = expert

    @changes_worker
    def train(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """One update from the mean loss over the pairs of all ranks. Returns means over them."""
        sums: dict[str, float] = defaultdict(float)
        count = sum(self.world.gather(len(pairs)))
        with self.model.trunk.encode_audio_once():
            groups = pair_experiences(self.model.trunk, pairs)

            def loss(places: list[int]) -> Tensor:
                part = [e for p in places for e in groups[p]]
                scores = self.model.scores(pack_experiences(part))
                chosen, rejected = scores[::2], scores[1::2]
                margin: Tensor | float = 0.0
                if self.config.margins and not self.config.log_exp:
                    margin = torch.tensor([pairs[p].margin for p in places]).to(chosen)
                if self.config.length_debias:
                    longer = torch.tensor([_excess(groups[p]) for p in places]).to(chosen)
                    margin = margin - length_logit(longer, *self.expert)
                each = pairwise(chosen, rejected, margin, self.config.log_exp, self.config.regulariser)
                total = each.sum() / count
                gaps = {"accuracy": (chosen > rejected).sum(), "margin": (chosen - rejected).sum()}
                read = read_pass(part, total, {"loss": total, "mean": scores.sum(), **gaps})
                sums["reward_model/loss"] += read["loss"]
                sums["reward_model/accuracy"] += read["accuracy"] / count
                sums["reward_model/margin"] += read["margin"] / count
                sums["reward_model/mean"] += read["mean"] / (2 * count)
                return total

            self.learn(group_packs(groups, self.config.micro_batch_tokens), loss)
        return self.step(sums)


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
    if run.finished(phase):
        run.load_result(phase, model)
        return
    expert = (0.0, 1.0)
    if config.length_debias:
        excess = [_excess(group) for group in pair_experiences(model.trunk, pairs)]
        expert = length_expert(torch.tensor(excess))
        print(f"{phase}: length alone gives log-odds of {expert[0]:.2f}·tanh(tokens / {expert[1]:.1f})", flush=True)
    trainers = learners(run, phase, model, RewardModelWorker, config, optim, expert)

    def length(pair: Pair) -> int:
        return rough_length(pair.sample, pair.chosen, pair.rejected)

    fit(trainers, model, pairs, run, config, phase=phase, seed=seed, length=length)


def _excess(group: Sequence[Experience]) -> int:
    """How many tokens longer the chosen answer of [chosen, rejected] is."""
    return group[0].num_sampled - group[1].num_sampled


def ranked_right(model: ValueModel, pairs: Sequence[Pair]) -> list[bool]:
    """Per pair, whether the chosen answer scores higher."""
    scores = score_answers(model, [example for p in pairs for example in pair_examples(p)])
    return [c > r for c, r in zip(scores[::2], scores[1::2], strict=True)]


def pair_experiences(policy: AudioPolicy, pairs: Sequence[Pair]) -> list[list[Experience]]:
    """[chosen, rejected] per pair, sharing their prompt."""
    return [[experience(policy, example, str(k)) for example in pair_examples(p)] for k, p in enumerate(pairs)]
