"""Process reward models: the decoder judges every step of an answer at the marker that ends it.

Shapes: K step markers, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from audiorl.algos.packing import micro_batches
from audiorl.algos.preference import process_reward
from audiorl.config import OptimConfig, ProcessRewardConfig
from audiorl.data.preferences import Steps
from audiorl.data.schedule import rough_length
from audiorl.distributed.local import changes_worker
from audiorl.distributed.world import World
from audiorl.models import AudioPolicy
from audiorl.models.process_reward import ProcessRewardModel
from audiorl.run.folder import Run
from audiorl.train.checks import read_pass
from audiorl.train.fit import fit
from audiorl.train.learner import Learner, learners


def judged_right(judge: ProcessRewardModel, items: Sequence[Steps]) -> list[bool]:
    """Per step of all items, whether it is judged as it is labelled."""
    probabilities = judge.score_steps([(i.sample, i.steps) for i in items])
    return [
        (p > 0.5) == (label > 0.5)
        for i, ps in zip(items, probabilities, strict=True)
        for p, label in zip(ps, i.labels, strict=True)
    ]


class ProcessRewardWorker(Learner[AudioPolicy]):
    """Cross-entropy at the step markers, the mean over all steps of a batch."""

    def __init__(
        self, policy: AudioPolicy, config: ProcessRewardConfig, optim: OptimConfig, world: World | None = None
    ):
        super().__init__(policy, optim, config.steps, world)
        self.config = config
        self.judge = ProcessRewardModel(policy, config.marker, config.good, config.bad)

    @changes_worker
    def train(self, items: Sequence[Steps]) -> dict[str, float]:
        """One update. Returns means over the steps of all ranks."""
        sums: dict[str, float] = defaultdict(float)
        steps = sum(self.world.gather(sum(len(i.steps) for i in items)))
        with self.model.encode_audio_once():
            marked = [self.judge.mark(i.sample, i.steps) for i in items]

            def loss(indices: list[int]) -> Tensor:
                part = [marked[i] for i in indices]
                logits = self.judge.logits(part)
                labels = torch.tensor([x for i in indices for x in items[i].labels], device=logits.device)
                total = process_reward(logits, self._labels(labels), self.judge.label_ids).sum() / steps
                good, bad = (logits[:, label] for label in self.judge.label_ids)
                right = ((good > bad) == (labels > 0.5)).sum()
                read = read_pass([m.experience for m in part], total, {"loss": total, "right": right})
                sums["process_reward/loss"] += read["loss"]
                sums["process_reward/accuracy"] += read["right"] / steps
                return total

            tokens = [m.experience for m in marked]
            self.learn(micro_batches(tokens, self.config.micro_batch_tokens, share_prompts=False), loss)
        return self.step(sums)

    def _labels(self, labels: Tensor) -> Tensor:
        """Soft labels as they are; hard ones as the token that should follow."""
        if self.config.soft:
            return labels.float()
        if bool(((labels != 0) & (labels != 1)).any()):
            raise ValueError("a step's label is neither 0 nor 1; set soft to learn from probabilities")
        good, bad = self.judge.label_ids
        return torch.where(labels == 1, good, bad)


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
    if run.finished(phase):
        run.load_result(phase, policy)
        return
    trainers = learners(run, phase, policy, ProcessRewardWorker, config, optim)

    def length(item: Steps) -> int:
        return rough_length(item.sample, *item.steps)

    fit(trainers, policy, items, run, config, phase=phase, seed=seed, length=length)
