"""The critic of PPO with its optimizer: values before an update, their loss in every pack, what a resume needs.

Shapes: N sampled tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from audiorl.algos.experience import Experience, PackedBatch
from audiorl.algos.losses import value_loss
from audiorl.config import CriticConfig, OptimConfig
from audiorl.distributed.world import World
from audiorl.models.value import ValueModel
from audiorl.run.checkpoint import TrainerState, read_shape
from audiorl.train.batches import gather
from audiorl.train.checks import check_gradients
from audiorl.train.optim.steps import optimizer_for
from audiorl.train.rl.packs import Pack


class Critic:
    """A value model with its optimizer. With `config.shared` its trunk is the policy, and `optim` the policy's options.

    In the first `config.warmup_steps` the critic learns and the policy does not: of a shared trunk only the value head.
    """

    def __init__(self, model: ValueModel, config: CriticConfig, optim: OptimConfig, updates: int, world: World):
        self.model = model
        # The head of a shared trunk has an optimizer of its own, so that it can learn alone in the warm-up.
        self.optimizer = optimizer_for(self.model, optim if config.shared else config.optim, updates, world)
        self.config = config

    @property
    def head(self) -> torch.nn.Module:
        return self.model.head

    def values(self, batch: PackedBatch) -> Tensor:
        """[N] values from a forward pass of their own; of a shared trunk without gradients for the trunk."""
        if not self.config.shared:
            return self.model(batch)
        with torch.no_grad(), self.model.trunk.autocast():
            hidden = self.model.trunk.predicting_hidden(batch)
        return self.model.head(hidden)

    def loss(self, pack: Pack, values_N: Tensor | None, with_policy: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """The value loss of a pack, times `config.coef` where the policy learns on the same trunk, and its metrics."""
        old_N, returns_N = pack.gather("values"), pack.gather("returns")
        assert values_N is not None and old_N is not None and returns_N is not None
        loss, sums = value_loss(values_N, old_N, returns_N, pack.mean_weights_N, self.config.clip)
        metrics = {"critic/loss": loss.detach(), "critic/clip_frac": sums["value_clip_frac"]}
        return self.config.coef * loss if with_policy and self.config.shared else loss, metrics

    def check_gradients(self) -> None:
        """Raise FloatingPointError before the policy has moved: both step, or neither."""
        check_gradients(self.model.trainable())

    def step(self) -> dict[str, float]:
        """One update. Returns `critic/grad_norm` and `critic/lr`."""
        metrics = self.optimizer.step()
        self.model.weights_changed()
        return {f"critic/{name}": value for name, value in metrics.items()}

    def metrics(self, experiences: Sequence[Experience], world: World) -> dict[str, float]:
        """Mean value, and the share of the returns' variance that the values explained before the update."""
        values_N = returns_N = torch.zeros(0)
        if experiences:
            cpu = torch.device("cpu")
            values_N, returns_N = (s for n in ("values", "returns") if (s := gather(experiences, n, cpu)) is not None)
        count, value, variance, residual = _moments(values_N.double(), returns_N.double(), world)
        if not count:
            return {}
        explained = 1 - residual / variance if variance > 1e-12 else 0.0
        return {"critic/value": value, "critic/explained_variance": explained}

    def state(self) -> TrainerState:
        """The parts `critic` and `critic_optimizer` of a trainer's state."""
        weights = {name: p.detach() for name, p in self.model.trainable().items()}
        return {"critic": weights, "critic_optimizer": self.optimizer.state()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], where: str) -> None:
        weights, parameters = state["critic"], self.model.trainable()
        if {n: read_shape(weights, n) for n in weights} != {n: tuple(p.shape) for n, p in parameters.items()}:
            raise ValueError(f"{where}: its critic is of another architecture")
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)
        self.model.weights_changed()
        self.optimizer.load(state["critic_optimizer"], where)


def _moments(values_N: Tensor, returns_N: Tensor, world: World) -> tuple[int, float, float, float]:
    """N over all ranks, the mean value, the variance of the returns, and of what the values leave unexplained."""
    error_N = returns_N - values_N
    count, value, mean, mean_error = world.sum(
        torch.stack([values_N.new_tensor(float(len(values_N))), values_N.sum(), returns_N.sum(), error_N.sum()])
    ).tolist()
    if not count:
        return 0, 0.0, 0.0, 0.0
    squares = torch.stack([((returns_N - mean / count) ** 2).sum(), ((error_N - mean_error / count) ** 2).sum()])
    variance, residual = (world.sum(squares) / count).tolist()
    return int(count), value / count, variance, residual
