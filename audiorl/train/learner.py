"""The base of the workers that train on a fixed data set: SFT, preference losses, reward models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from audiorl.config import OptimConfig
from audiorl.distributed.local import Group
from audiorl.distributed.placement import trainer_group
from audiorl.distributed.world import World
from audiorl.models import AudioPolicy
from audiorl.models.value import ValueModel
from audiorl.run.folder import Run
from audiorl.run.model_file import ModelFile
from audiorl.run.pieces import TrainerState
from audiorl.run.saving import CheckpointedWorker, CheckpointWriter
from audiorl.train.batches import idle_batch
from audiorl.train.optim.steps import backward, idle_passes, optimizer_for

M = TypeVar("M", AudioPolicy, ValueModel)
P = TypeVar("P")


class Learner(CheckpointedWorker, Generic[M]):
    """Updates one model from its share of every batch, for `fit`.

    The learners of one world together do what one would do alone: their losses and metrics are parts of one sum, with
    weights from the counts of all ranks.
    """

    def __init__(self, model: M, optim: OptimConfig, steps: int, world: World | None = None):
        self.model: M = model
        self.world = world or World()
        self._writer = CheckpointWriter(model, self.world)
        self.optimizer = optimizer_for(model, optim, steps, self.world)

    def learn(self, packs: Sequence[P], loss: Callable[[P], Tensor]) -> None:
        """Add the gradients of every pack's loss, then run the passes without a loss that ZeRO needs on this rank."""
        self.optimizer.zero_grad()
        idle = idle_passes(len(packs), self.world, self.optimizer)
        for pack in packs:
            backward(loss(pack), self.optimizer)
        for _ in range(idle):
            backward(0 * self._idle_pass().sum(), self.optimizer)

    def step(self, sums: Mapping[str, float]) -> dict[str, float]:
        """One update from the gradients of `learn`. Returns its metrics, and `sums` over all ranks."""
        self.optimizer.gather_gradients()
        metrics = self.world.add_up(sums) | self.optimizer.step()
        self.model.weights_changed()
        return metrics

    def _idle_pass(self) -> Tensor:
        if isinstance(self.model, ValueModel):
            return self.model.scores(idle_batch(self.model.trunk))
        return self.model.forward(idle_batch(self.model)).logprobs

    def weights(self) -> Mapping[str, Tensor]:
        return self.model.weights()

    def state(self) -> TrainerState:
        return {"optimizer": self.optimizer.state()}

    def load(self, state: Mapping[str, Mapping[str, Tensor]], where: str) -> None:
        self.optimizer.load(state["optimizer"], where)

    def close(self) -> None:
        """After the last update."""
        self.optimizer.close()


def learners(run: Run, phase: str, model: AudioPolicy | ValueModel, make: Callable[..., Any], *args: Any) -> Group:
    """The trainers of a phase, one on each rank: `make(model, *args, world)`."""
    return trainer_group(
        lambda world: make(model, *args, world),
        lambda: (_learner, make, ModelFile.save(run, phase, "start", model), args),
    )


def _learner(make: Callable[..., Any], start: ModelFile, args: tuple[Any, ...]) -> Any:
    return make(start.load(), *args, World.of_process_group())
