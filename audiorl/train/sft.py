"""Supervised fine-tuning on assistant turns, packed like everything else."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.algos.losses import token_weights
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.config import OptimConfig, SFTConfig
from audiorl.config.checks import pass_tokens
from audiorl.data.schedule import rough_length
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, experience
from audiorl.run.folder import ComputeTime, Run
from audiorl.train.batches import counts, repeat_each
from audiorl.train.fit import Learner, PackLoss, train_on


def sft_loss(learner: Learner, config: SFTConfig, examples: Sequence[Example]) -> tuple[list[list[int]], PackLoss]:
    """Compute the cross-entropy on target tokens: the mean over the batch's tokens, or over its examples' means."""
    learner.policy.encode_ahead(e.sample for e in examples)
    experiences = [experience(learner.policy, e) for e in examples]
    lengths, share = learner.world.gather_list(counts(experiences))
    per_sequence = config.weighting == "sequence"
    weights = token_weights(lengths, "sequence-mean-token-mean" if per_sequence else "token-mean")[share]
    mean = token_weights(lengths, "token-mean")[0]

    def loss(indices: list[int]) -> tuple[list[Experience], Tensor, dict[str, Tensor], Tensor | None]:
        part = [experiences[i] for i in indices]
        out = learner.policy.forward(pack_experiences(part, share_prompts=False))
        weight = repeat_each([weights[i] for i in indices], counts(part)).to(out.logprobs, non_blocking=True)
        total = -(weight * out.logprobs).sum()
        return part, total, {"sft/loss": total, "policy/entropy": mean * out.entropy.sum().double()}, None

    return micro_batches(experiences, pass_tokens(config), share_prompts=False), loss


def sft(
    policy: AudioPolicy,
    examples: Sequence[Example],
    run: Run,
    *,
    config: SFTConfig,
    optim: OptimConfig,
    seed: int = 0,
    phase: str = "sft",
    limit: ComputeTime | None = None,
) -> None:
    """Fine-tune `policy` in place. Training ends before its last step once it has taken the time `limit`."""
    lengths = tuple(rough_length(e.sample, e.target) for e in examples) if config.sort else ()
    train_on(sft_loss, policy, examples, run, config, optim, phase=phase, seed=seed, lengths=lengths, limit=limit)
