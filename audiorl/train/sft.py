"""Supervised fine-tuning on assistant turns, packed like everything else."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from audiorl.algos.losses import token_weights
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.config import OptimConfig, SFTConfig
from audiorl.data.schedule import rough_length
from audiorl.models import AudioPolicy
from audiorl.train.batches import check_loss, counts, spread
from audiorl.train.examples import Example, experience
from audiorl.train.fit import fit
from audiorl.train.optim import Optimizer
from audiorl.train.run import Run


class SFTWorker:
    """Cross-entropy on target tokens: the mean over the batch's tokens, or over its examples' means."""

    def __init__(self, policy: AudioPolicy, sft: SFTConfig, optim: OptimConfig):
        self.policy = policy
        self.sft = sft
        self.optimizer = Optimizer(policy.trainable(), optim, sft.steps)

    def train(self, examples: Sequence[Example]) -> dict[str, float]:
        per_sequence = self.sft.weighting == "sequence"
        self.optimizer.zero_grad()
        total, entropy = 0.0, 0.0
        with self.policy.hear_once():
            experiences = [experience(self.policy, e) for e in examples]
            lengths = counts(experiences)
            weights = token_weights(lengths, "sequence-mean-token-mean" if per_sequence else "token-mean")
            mean = token_weights(lengths, "token-mean")[0]
            for indices in micro_batches(experiences, self.sft.micro_batch_tokens, share_prompts=False):
                part = [experiences[i] for i in indices]
                out = self.policy.forward(pack_experiences(part, share_prompts=False))
                weight = spread([weights[i] for i in indices], counts(part)).to(out.logprobs)
                loss = -(weight * out.logprobs).sum()
                check_loss(part, loss.detach())
                loss.backward()
                total += float(loss.detach())
                entropy += mean * float(out.entropy.detach().sum())
        metrics = {"sft/loss": total, "policy/entropy": entropy} | self.optimizer.step()
        self.policy.weights_changed()
        return metrics

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {"optimizer": self.optimizer.state()}

    def load(self, state: dict[str, dict[str, Tensor]], where: str) -> None:
        self.optimizer.load(state["optimizer"], where)


def sft(
    policy: AudioPolicy,
    examples: Sequence[Example],
    run: Run,
    *,
    config: SFTConfig,
    optim: OptimConfig,
    seed: int = 0,
    phase: str = "sft",
    max_seconds: float | None = None,
) -> None:
    """Supervised fine-tuning of `policy` in place. `max_seconds` of training end it before its last step."""
    if run.finished(phase):
        run.load_result(phase, policy)
        return
    worker = SFTWorker(policy, config, optim)
    fit(
        worker,
        policy,
        examples,
        run,
        config,
        phase=phase,
        seed=seed,
        length=lambda e: rough_length(e.sample, e.target),
        max_seconds=max_seconds,
    )
