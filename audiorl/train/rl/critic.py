"""The critic of PPO with its optimizer, in the trainers or in processes of its own.

It gives values before an update, and learns towards returns. Shapes: N sampled tokens of a micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from audiorl.algos.experience import Experience, PackedBatch
from audiorl.algos.losses import value_loss
from audiorl.config import CriticConfig, OptimConfig, RLConfig
from audiorl.config.checks import pass_tokens
from audiorl.distributed.local import World, changes_worker
from audiorl.models import AudioPolicy
from audiorl.models.value import ValueModel
from audiorl.run.checkpoint import TrainerState, read_shape
from audiorl.run.saving import CheckpointedWorker, CheckpointWriter, ModelFile
from audiorl.train.batches import PassMetrics, fill, gather, idle_batch
from audiorl.train.optim.steps import backward, idle_passes, optimizer_for, with_pass_tokens, within_memory
from audiorl.train.rl.minibatch import MicroBatch, MiniBatch, TrainBatch, mini_batches_of, updates_of


class Critic:
    """A value model with its optimizer. With `config.shared` its trunk is the policy, and `optim` the policy's options.

    In the first `config.warmup_steps` the critic learns and the policy does not: of a shared trunk only the value head.
    """

    def __init__(self, model: ValueModel, config: CriticConfig, optim: OptimConfig, updates: int, world: World):
        self.model, self.config = model, config
        # The head of a shared trunk has an optimizer of its own, so that it can learn alone in the warm-up.
        self.optimizer = optimizer_for(model, optim if config.shared else config.optim, updates, world)

    def values(self, batch: PackedBatch) -> Tensor:
        """Return [N] from a forward pass of its own; of a shared trunk without gradients for the trunk."""
        if not self.config.shared:
            return self.model(batch)
        with torch.no_grad(), self.model.trunk.autocast():
            hidden = self.model.trunk.predicting_hidden(batch)
        return self.model.head(hidden)

    def loss(self, micro: MicroBatch, values: Tensor | None, with_policy: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the value loss, times `config.coef` where the policy learns on the same trunk, and its metrics."""
        assert values is not None and micro.values is not None and micro.returns is not None
        loss, sums = value_loss(values, micro.values, micro.returns, micro.mean_weights, self.config.clip)
        metrics = {"critic/loss": loss.detach(), "critic/clip_frac": sums["value_clip_frac"]}
        return self.config.coef * loss if with_policy and self.config.shared else loss, metrics

    def step(self, norm: float) -> dict[str, float]:
        """Update once, after `optimizer.clip` gave `norm`. Returns `critic/grad_norm` and `critic/lr`."""
        metrics = self.optimizer.step(norm)
        self.model.weights_changed()
        return {f"critic/{name}": value for name, value in metrics.items()}

    def metrics(self, experiences: Sequence[Experience], world: World) -> dict[str, float]:
        """Return the mean value over the tokens of all ranks, and the share of the returns' variance that the values
        explained before the update."""
        values_N = returns_N = torch.zeros(0)
        if experiences:
            values_N, returns_N = (s for n in ("values", "returns") if (s := gather(experiences, n)) is not None)
        values_N, returns_N = values_N.double(), returns_N.double()
        error_N = returns_N - values_N
        own = [values_N.new_tensor(float(len(values_N))), values_N.sum(), returns_N.sum(), error_N.sum()]
        count, value, mean, mean_error = world.sum(torch.stack(own)).tolist()
        if not count:
            return {}
        squares = torch.stack([((returns_N - mean / count) ** 2).sum(), ((error_N - mean_error / count) ** 2).sum()])
        variance, residual = (world.sum(squares) / count).tolist()
        explained = 1 - residual / variance if variance > 1e-12 else 0.0
        return {"critic/value": value / count, "critic/explained_variance": explained}

    def state(self) -> TrainerState:
        """Return the parts `critic` and `critic_optimizer` of a trainer's state."""
        weights = {name: p.detach() for name, p in self.model.trainable().items()}
        return {"critic": weights, "critic_optimizer": self.optimizer.state()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], where: str) -> None:
        """Take over a `state`, whichever processes wrote it. Raises ValueError for none and another architecture."""
        if "critic" not in state:
            raise ValueError(f"{where}: the checkpoint holds no critic; it was written without one")
        weights, parameters = state["critic"], self.model.trainable()
        if {n: read_shape(weights, n) for n in weights} != {n: tuple(p.shape) for n, p in parameters.items()}:
            raise ValueError(f"{where}: its critic is of another architecture")
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)
        self.model.weights_changed()
        self.optimizer.load(state["critic_optimizer"], where)


class CriticWorker(CheckpointedWorker):
    """One rank of the critic. Its ranks together do what the critic of one trainer would do.

    `trunk`: the policy as the phase begins, which becomes the critic's own.
    """

    def __init__(self, trunk: AudioPolicy, config: RLConfig, world: World):
        self._writer = CheckpointWriter(trunk, world, "trainer-critic")
        self.given, self.config = config, with_pass_tokens(config, trunk, config.critic.optim)
        self.world = world
        self.critic = Critic(ValueModel(trunk), config.critic, config.critic.optim, updates_of(config), world)

    def values(self, experiences: Sequence[Experience]) -> list[Tensor]:
        """Return for each [L]: the value of the state before each sampled token, 0 on observed tokens."""
        model, share = self.critic.model, self.config.share_prompts
        filled = within_memory(
            self, lambda: fill(experiences, lambda b: {"values": model(b)}, pass_tokens(self.config), share)
        )
        return [e.values for e in filled if e.values is not None]

    @changes_worker
    def update(self, batch: TrainBatch) -> dict[str, float]:
        """`epochs` passes over `mini_batches` updates on experiences with values and returns.

        Returns the metrics critic/*, of the whole step. Raises FloatingPointError before an update that is not finite.
        """
        mini_batches = mini_batches_of(batch, self.config, 1, self.world)
        totals: dict[str, float] = defaultdict(float)
        for mini_batch in mini_batches * self.config.epochs:
            sums, norm = within_memory(self, partial(self._passes, mini_batch))
            for name, value in (self.world.add_up(sums) | self.critic.step(norm)).items():
                totals[name] += value
        updates = len(mini_batches) * self.config.epochs
        means = {name: value / updates for name, value in totals.items()}
        return means | self.critic.metrics(batch.experiences, self.world)

    def _passes(self, mini_batch: MiniBatch) -> tuple[dict[str, float], float]:
        """Run all forward and backward passes. Returns sums of metrics, and the norm of the gradients."""
        critic, trunk = self.critic, self.critic.model.trunk
        mini_batch.divide(pass_tokens(self.config))
        critic.optimizer.zero_grad()
        passes = PassMetrics()
        with trunk.audio.once():
            idle = idle_passes(len(mini_batch), self.world, critic.optimizer)
            for micro in mini_batch.micro_batches(trunk.device):
                loss, metrics = critic.loss(micro, critic.values(micro.batch), with_policy=False)
                backward(loss, critic.optimizer)
                passes.add(micro.experiences, loss, metrics)
            for _ in range(idle):
                backward(0 * critic.values(idle_batch(trunk)).sum(), critic.optimizer)
        critic.optimizer.gather_gradients()
        sums, (norm,) = passes.read(critic.optimizer.clip())
        return sums, norm

    def state(self) -> TrainerState:
        return self.critic.state()

    def load(self, state: Mapping[str, Mapping[str, Tensor]], where: str) -> None:
        self.critic.load(state, where)

    def close(self) -> None:
        self.critic.optimizer.close()


def make_critic(start: ModelFile[AudioPolicy], config: RLConfig) -> CriticWorker:
    """Return the critic of this process, from the policy that the phase begins with."""
    return CriticWorker(start.load(), config, World.of_process_group())
