"""A critic in processes of its own: values before the trainers' step, and its update towards their returns after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.config import RLConfig
from audiorl.distributed.local import changes_worker
from audiorl.distributed.world import World
from audiorl.models import AudioPolicy
from audiorl.models.value import ValueModel
from audiorl.run.checkpoint import TrainerState
from audiorl.run.saving import CheckpointedWorker, CheckpointWriter, ModelFile
from audiorl.train.batches import fill, idle_batch
from audiorl.train.checks import read_pass
from audiorl.train.optim.steps import backward, idle_passes
from audiorl.train.rl.critic import Critic
from audiorl.train.rl.packs import MiniBatch, mini_batches_of
from audiorl.train.rl.trainer import TrainBatch, updates_of


class CriticWorker(CheckpointedWorker):
    """One rank of the critic. Its ranks together do what the critic of one trainer would do.

    `trunk`: the policy as the phase begins, which becomes the critic's own.
    """

    def __init__(self, trunk: AudioPolicy, config: RLConfig, world: World):
        self._writer = CheckpointWriter(trunk, world, "trainer-critic")
        # Clip-Cov and KL-Cov choose tokens for the policy's loss, from advantages that are not here.
        self._config = replace(config, loss="clip")
        self._world = world
        self.critic = Critic(ValueModel(trunk), config.critic, config.critic.optim, updates_of(config), world)

    def values(self, experiences: Sequence[Experience]) -> list[Tensor]:
        """Of each experience [L]: the value of the state before each sampled token, 0 on observed tokens."""
        config = self._config
        filled = fill(experiences, "values", self.critic.model, config.micro_batch_tokens, config.share_prompts)
        return [e.values for e in filled if e.values is not None]

    @changes_worker
    def update(self, batch: TrainBatch) -> dict[str, float]:
        """`epochs` passes over `mini_batches` updates on experiences with values and returns.

        Returns the metrics critic/*, of the whole step. Raises FloatingPointError before an update that is not finite.
        """
        mini_batches = mini_batches_of(batch.experiences, batch.mini_batches, self._config, 1, self._world)
        totals: dict[str, float] = defaultdict(float)
        for mini_batch in mini_batches * self._config.epochs:
            for name, value in self._update(mini_batch).items():
                totals[name] += value
        updates = len(mini_batches) * self._config.epochs
        means = {name: value / updates for name, value in totals.items()}
        return means | self.critic.metrics(batch.experiences, self._world)

    def _update(self, mini_batch: MiniBatch) -> dict[str, float]:
        critic = self.critic
        critic.optimizer.zero_grad()
        sums: dict[str, float] = defaultdict(float)
        with critic.model.trunk.encode_audio_once():
            idle = idle_passes(len(mini_batch), self._world, critic.optimizer)
            for pack in mini_batch.packs(critic.model.trunk.device):
                loss, metrics = critic.loss(pack, critic.values(pack.batch), with_policy=False)
                backward(loss, critic.optimizer)
                for name, number in read_pass(pack.experiences, loss, metrics).items():
                    sums[name] += number
            for _ in range(idle):
                backward(0 * critic.values(idle_batch(critic.model.trunk)).sum(), critic.optimizer)
        means = self._world.add_up(sums)
        critic.optimizer.gather_gradients()
        return means | critic.step()

    def state(self) -> TrainerState:
        return self.critic.state()

    def load(self, state: Mapping[str, Mapping[str, Tensor]], where: str) -> None:
        """Whichever processes wrote it. Raises ValueError for a checkpoint of a run without a critic."""
        if "critic" not in state:
            raise ValueError(f"{where}: the checkpoint holds no critic; it was written without one")
        self.critic.load(state, where)

    def close(self) -> None:
        """After the last update."""
        self.critic.optimizer.close()


def critic_worker(start: ModelFile[AudioPolicy], config: RLConfig) -> CriticWorker:
    """The critic of this process, from the policy that the phase begins with."""
    return CriticWorker(start.load(), config, World.of_process_group())
