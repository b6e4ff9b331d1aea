"""A critic in processes of a Ray cluster of its own does what one in the trainer does, also when some of them die."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.cli import main
from audiorl.config import CriticConfig, GenerationConfig, OptimConfig, RLConfig
from audiorl.config.distributed import RuntimeConfig, set_current
from audiorl.distributed.local import World
from audiorl.distributed.ray_cluster import Cluster, connected
from audiorl.distributed.torchrun import RankError
from audiorl.models import AudioPolicy
from audiorl.run.checkpoint import STATE_FILES
from audiorl.run.folder import Run
from audiorl.run.saving import ModelFile
from audiorl.train.rl import processes
from audiorl.train.rl.critic import CriticWorker
from audiorl.train.rl.minibatch import MiniBatch
from audiorl.train.rl.train import train_rl
from audiorl.types import Rollout, Sample, Score
from tests.conftest import make_omni
from tests.support.overlapped_runs import SAMPLING, assert_same, even
from tests.support.rank_runs import RECIPE, assert_equal_runs, rewind, rows, saved_tensors

RUNTIME = RuntimeConfig(kind="ray", ranks=2, critics=2)
RAY = ("--runtime.kind", "ray", "--runtime.ranks", "2")
OPTIM = OptimConfig(lr=1e-3, eps=1e-6)  # With 1e-8 Adam makes 2e-5 of rounding where a gradient is almost 0.
CONFIG = RLConfig(
    steps=5,
    prompts_per_step=4,
    group_size=2,
    epochs=2,
    mini_batches=2,
    advantage="gae",
    kl_beta=0.0,
    tis_cap=2.0,
    generation=GenerationConfig(overlap=True),
    save_every=2,
    critic=CriticConfig(warmup_steps=1, optim=OPTIM),
)

pytestmark = pytest.mark.usefixtures("own_runtime")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two trainers and two critics, whose processes all tests of this file use."""
    with connected(RUNTIME) as connection:
        yield connection


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process that the others are compared with."""
    out = tmp_path_factory.mktemp("local") / "one"
    assert main(["train", str(RECIPE), "--kind", "ppo", "--out", str(out)]) == 0
    return out


def train(folder: Path, samples: list[Sample], config: RLConfig, reward: object = even) -> AudioPolicy:
    policy = make_omni()
    with Run.create(folder, "critics", [], config) as run:
        train_rl(policy, samples, reward, run, config=config, optim=OPTIM, sampling=SAMPLING)  # type: ignore[arg-type]
    return policy


def test_critics_train_as_one_process_and_either_goes_on_where_the_other_stopped(
    cluster: Cluster, one: Path, tmp_path: Path
) -> None:
    """With a warm-up step, two epochs, the KL in the reward and a supervised term."""
    two, other = tmp_path / "two", tmp_path / "other"
    shutil.copytree(one, other)
    assert main(["train", str(RECIPE), "--kind", "ppo", "--out", str(two), *RAY, "--runtime.critics", "2"]) == 0
    assert_equal_runs(one, two)
    assert all("critic/loss" in row for row in rows(two, "rl"))
    last = "checkpoints/rl/step_000005"
    assert sorted(file.name for file in (two / last).glob(STATE_FILES)) == [
        "trainer-00001-of-00002.safetensors",
        "trainer-00002-of-00002.safetensors",
        "trainer-critic-00001-of-00002.safetensors",
        "trainer-critic-00002-of-00002.safetensors",
    ]
    for out, runtime in ((two, ()), (other, (*RAY, "--runtime.critics", "1"))):
        rewind(out)
        assert main(["resume", str(out), "--trust", str(RECIPE), *runtime]) == 0
        assert_equal_runs(one, out)


@pytest.mark.parametrize("sharding", ["--runtime.zero=2", "--runtime.fsdp"])
def test_critics_are_sharded_among_themselves(sharding: str, cluster: Cluster, one: Path, tmp_path: Path) -> None:
    """Three groups of rollouts on two critics, whose audio encoder is trained."""
    if "zero" in sharding:
        pytest.importorskip("deepspeed")
    two = tmp_path / "two"
    assert (
        main(["train", str(RECIPE), "--kind", "ppo", "--out", str(two), *RAY, "--runtime.critics", "2", sharding]) == 0
    )
    assert_equal_runs(one, two)


class Dying(CriticWorker):
    """A critic whose last rank dies once after the values of the second step, and once in the update of the third."""

    def __init__(self, trunk: AudioPolicy, config: RLConfig, world: World, once: Path):
        super().__init__(trunk, config, world)
        self._once = once

    def values(self, experiences: Sequence[Experience]) -> list[Tensor]:
        out = super().values(experiences)
        self._die("values", 4)
        return out

    def _passes(self, mini_batch: MiniBatch) -> tuple[dict[str, float], float]:
        self._die("update", 9)
        return super()._passes(mini_batch)

    def _die(self, where: str, updates: int) -> None:
        note = self._once / where
        if self.world.rank == self.world.size - 1 and self.critic.optimizer.updates == updates and not note.exists():
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def dying(start: ModelFile[AudioPolicy], config: RLConfig, once: Path) -> Dying:
    return Dying(start.load(), config, World.of_process_group(), once)


class Refusing(Dying):
    """A critic that refuses its second update of the third step, when the policy has made its step."""

    def _die(self, where: str, updates: int) -> None:
        if where == "update" and self.critic.optimizer.updates == 9:
            raise FloatingPointError("the loss of 'sample-1' is nan; this update changed no weight")


def refusing(start: ModelFile[AudioPolicy], config: RLConfig) -> Refusing:
    return Refusing(start.load(), config, World.of_process_group(), Path())


class DeadlyToTrainers:
    """Kills the first trainer when it is asked about the answers of the fourth step."""

    def __init__(self, cluster: Cluster):
        self.cluster, self.done = cluster, False

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        if str(rollouts[0].group_id).startswith("3/") and not self.done:
            from ray import get

            self.done = True
            os.kill(get(self.cluster.process(0).pid.remote()), signal.SIGKILL)
        return even(rollouts)


def test_dead_critics_and_trainers_are_replaced_and_repeat_the_same_updates(
    cluster: Cluster, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first checkpoint, between two, and with rollouts collected ahead."""
    expected = train(tmp_path / "local", samples, CONFIG)
    set_current(RUNTIME)
    cluster.restarts = 3
    monkeypatch.setattr(processes, "make_critic", partial(dying, once=tmp_path))
    trained = train(tmp_path / "separate", samples, CONFIG, DeadlyToTrainers(cluster))
    assert cluster.restarts == 0 and (tmp_path / "values").exists() and (tmp_path / "update").exists()
    assert_same(trained, expected, 1e-5)
    assert_same_checkpoints(tmp_path / "local", tmp_path / "separate")


def test_after_a_refused_update_policy_and_critic_go_on_from_the_same_step(
    cluster: Cluster, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train(tmp_path / "local", samples, CONFIG)
    set_current(RUNTIME)
    with monkeypatch.context() as patch:
        patch.setattr(processes, "make_critic", refusing)
        with pytest.raises(RankError, match=r"critic \d: FloatingPointError: the loss of .* resume it from the last"):
            train(tmp_path / "separate", samples, CONFIG)
    assert [folder.name for folder in (tmp_path / "separate/checkpoints/rl").glob("step_*")] == ["step_000002"]
    run, policy = Run.open(tmp_path / "separate"), make_omni()
    train_rl(policy, samples, even, run, config=CONFIG, optim=OPTIM, sampling=SAMPLING)  # type: ignore[arg-type]
    assert_same(policy, expected, 1e-5)
    assert_same_checkpoints(tmp_path / "local", tmp_path / "separate")


def assert_same_checkpoints(one: Path, two: Path) -> None:
    """Weights and state of policy and critic after steps 4 and 5, to 1e-5."""
    for step in ("step_000004", "step_000005"):
        expected, tensors = (saved_tensors(run / "checkpoints/rl" / step) for run in (one, two))
        assert expected.keys() == tensors.keys() and any(name.startswith("critic_optimizer/") for name in tensors)
        for name, tensor in expected.items():
            torch.testing.assert_close(tensors[name], tensor, atol=1e-5, rtol=0)
