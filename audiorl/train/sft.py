"""Supervised fine-tuning on assistant turns, packed like everything else."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from audiorl.algos.losses import token_weights
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.config import OptimConfig, SFTConfig
from audiorl.data.schedule import rough_length
from audiorl.distributed.local import changes_worker
from audiorl.distributed.world import World
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, experience
from audiorl.run.folder import ComputeTime, Run
from audiorl.train.batches import counts, repeat_each
from audiorl.train.checks import read_pass
from audiorl.train.fit import fit
from audiorl.train.learner import Learner, learners


class SFTWorker(Learner[AudioPolicy]):
    """Cross-entropy on target tokens: the mean over the batch's tokens, or over its examples' means."""

    def __init__(self, policy: AudioPolicy, sft: SFTConfig, optim: OptimConfig, world: World | None = None):
        super().__init__(policy, optim, sft.steps, world)
        self.policy = policy
        self.sft = sft

    @changes_worker
    def train(self, examples: Sequence[Example]) -> dict[str, float]:
        per_sequence = self.sft.weighting == "sequence"
        sums = {"sft/loss": 0.0, "policy/entropy": 0.0}
        with self.policy.encode_audio_once():
            experiences = [experience(self.policy, e) for e in examples]
            lengths, share = self.world.gather_list(counts(experiences))
            weights = token_weights(lengths, "sequence-mean-token-mean" if per_sequence else "token-mean")[share]
            mean = token_weights(lengths, "token-mean")[0]

            def loss(indices: list[int]) -> Tensor:
                part = [experiences[i] for i in indices]
                out = self.policy.forward(pack_experiences(part, share_prompts=False))
                weight = repeat_each([weights[i] for i in indices], counts(part)).to(out.logprobs)
                total = -(weight * out.logprobs).sum()
                read = read_pass(part, total, {"loss": total, "entropy": out.entropy.sum()})
                sums["sft/loss"] += read["loss"]
                sums["policy/entropy"] += mean * read["entropy"]
                return total

            self.learn(micro_batches(experiences, self.sft.micro_batch_tokens, share_prompts=False), loss)
        return self.step(sums)


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
    """Supervised fine-tuning of `policy` in place. It ends before its last step once it has taken the time `limit`."""
    if run.finished(phase):
        run.load_result(phase, policy)
        return
    trainers = learners(run, phase, policy, SFTWorker, config, optim)
    fit(
        trainers,
        policy,
        examples,
        run,
        config,
        phase=phase,
        seed=seed,
        length=lambda e: rough_length(e.sample, e.target),
        limit=limit,
    )
