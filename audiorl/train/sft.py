"""Supervised fine-tuning on assistant turns, packed like everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from audiorl.algos.losses import token_weights
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.config import OptimConfig, SFTConfig
from audiorl.data.schedule import rough_length
from audiorl.models import AudioPolicy
from audiorl.runtime.local import Group
from audiorl.runtime.team import team
from audiorl.runtime.world import World
from audiorl.train.actors import PolicyFile
from audiorl.train.batches import blank, check_loss, counts, spread
from audiorl.train.checkpoint import load_checkpoint
from audiorl.train.examples import Example, experience
from audiorl.train.fit import fit
from audiorl.train.optim import backward, idle_passes, optimizer_for
from audiorl.train.run import Run


class SFTWorker:
    """Cross-entropy on target tokens: the mean over the batch's tokens, or over its examples' means."""

    def __init__(self, policy: AudioPolicy, sft: SFTConfig, optim: OptimConfig, world: World | None = None):
        self.policy = policy
        self.sft = sft
        self.world = world or World()
        self.optimizer = optimizer_for(policy, optim, sft.steps, self.world)

    def train(self, examples: Sequence[Example]) -> dict[str, float]:
        per_sequence = self.sft.weighting == "sequence"
        self.optimizer.zero_grad()
        total, entropy = 0.0, 0.0
        with self.policy.hear_once():
            experiences = [experience(self.policy, e) for e in examples]
            lengths, own = self.world.gather_list(counts(experiences))
            weights = token_weights(lengths, "sequence-mean-token-mean" if per_sequence else "token-mean")[own]
            mean = token_weights(lengths, "token-mean")[0]
            packs = micro_batches(experiences, self.sft.micro_batch_tokens, share_prompts=False)
            idle = idle_passes(len(packs), self.world, self.optimizer)
            for indices in packs:
                part = [experiences[i] for i in indices]
                out = self.policy.forward(pack_experiences(part, share_prompts=False))
                weight = spread([weights[i] for i in indices], counts(part)).to(out.logprobs)
                loss = -(weight * out.logprobs).sum()
                check_loss(part, loss.detach())
                backward(loss, self.optimizer)
                total += float(loss.detach())
                entropy += mean * float(out.entropy.detach().sum())
            for _ in range(idle):
                backward(0 * self.policy.forward(blank(self.policy)).logprobs.sum(), self.optimizer)
        self.optimizer.gather_gradients()
        metrics = self.world.add_up({"sft/loss": total, "policy/entropy": entropy}) | self.optimizer.step()
        self.policy.weights_changed()
        return metrics

    def weights(self) -> Mapping[str, Tensor]:
        return self.policy.weights()

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {"optimizer": self.optimizer.state()}

    def load(self, state: dict[str, dict[str, Tensor]], where: str) -> None:
        self.optimizer.load(state["optimizer"], where)

    def resume(self, where: str) -> None:
        """Continue from a checkpoint's folder, weights and all."""
        state, _ = load_checkpoint(Path(where), self.policy)
        self.load(state, where)

    def close(self) -> None:
        """After the last update."""
        self.optimizer.close()


def sft_workers(run: Run, phase: str, policy: AudioPolicy, config: SFTConfig, optim: OptimConfig) -> Group:
    """The trainers of a supervised phase, one on each rank."""
    return team(
        lambda world: SFTWorker(policy, config, optim, world),
        lambda: (_sft_worker, PolicyFile.save(run, phase, "start", policy), config, optim),
    )


def _sft_worker(start: PolicyFile, config: SFTConfig, optim: OptimConfig) -> SFTWorker:
    return SFTWorker(start.load(), config, optim, World.of_process_group())


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
    trainers = sft_workers(run, phase, policy, config, optim)
    fit(
        trainers,
        policy,
        examples,
        run,
        config,
        phase=phase,
        seed=seed,
        length=lambda e: rough_length(e.sample, e.target),
        max_seconds=max_seconds,
    )
    trainers.all("close")
