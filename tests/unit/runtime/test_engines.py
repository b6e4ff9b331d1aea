"""Engines apart, and vLLM, in whole phases of RL: the weights arrive at every step, also when processes are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from audiorl.config import ModelConfig, OptimConfig
from audiorl.models import AudioPolicy, qwen_omni
from audiorl.models.policy import Weights, named
from audiorl.rollout.hf import HFEngine
from audiorl.runtime.cluster import Cluster, RayGroup, connected
from audiorl.runtime.config import RuntimeConfig, set_current
from audiorl.runtime.team import check_engine
from audiorl.train.actors import ModelFile, _actor
from audiorl.train.engines import EngineApart, GroupEngine
from audiorl.train.loop import rl
from audiorl.train.run import Run
from audiorl.types import Request, Rollout, Sample, Score
from tests.conftest import TEXTS, make_omni
from tests.unit.train.test_overlap import CONFIG, OPTIM, SAMPLING, assert_same, column, even

RAY = RuntimeConfig(kind="ray", engines=1)

pytestmark = pytest.mark.usefixtures("own_runtime")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One trainer and one engine, whose processes all tests of this file use."""
    with connected(RAY) as found:
        yield found


class EvenAndDeadly:
    """The share of even token ids; kills a process when it is asked about the answers of certain steps."""

    def __init__(self, cluster: Cluster, places: dict[str, int]):
        self.cluster, self.places = cluster, places

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        place = self.places.pop(str(rollouts[0].group_id).partition("/")[0], None)
        if place is not None:
            from ray import get

            os.kill(get(self.cluster.host(place).pid.remote()), signal.SIGKILL)
        return even(rollouts)


def test_overlap_with_an_engine_apart_that_dies_is_overlap_in_one_process(
    cluster: Cluster, samples: list[Sample], tmp_path: Path
) -> None:
    """The engine dies twice between a step's answers and its greedy answers: of step 2, written beside the update to 2
    steps, so that weights are wanted again that the trainer has no more, and of step 3, written with current ones."""
    config = replace(CONFIG, advantage="remax")
    trained = {}
    for name, runtime, reward in (
        ("local", RuntimeConfig(), even),
        ("apart", RAY, EvenAndDeadly(cluster, {"2": 1, "3": 1})),
    ):
        set_current(runtime)
        trained[name] = make_omni(ModelConfig(audio="full"))
        run = Run.create(tmp_path / name, "overlap", [], config)
        rl(trained[name], samples, reward, run, config=config, optim=OPTIM, sampling=SAMPLING)
    assert cluster.restarts == RAY.restarts - 2
    assert_same(trained["apart"], trained["local"], 1e-5)
    for metric in ("rollout/staleness", "reward/mean", "policy/engine_gap", "grad_norm"):
        one, two = (column(tmp_path / name, metric) for name in trained)
        assert two == pytest.approx(one, abs=1e-5, rel=1e-4), metric
    assert column(tmp_path / "apart", "rollout/staleness") == [0, 1, 1, 0, 1]


class Fragile(HFEngine):
    """Its process dies when the first tensor has come, once."""

    once: Path

    def update_weights(self, weights: Weights, version: int) -> None:
        def coming() -> Iterator[tuple[str, torch.Tensor]]:
            for pair in named(weights):
                if not self.once.exists():
                    self.once.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                yield pair

        super().update_weights(coming(), version)


def fragile(start: ModelFile[AudioPolicy], once: str) -> EngineApart:
    engine = Fragile(start.load(), SAMPLING)
    engine.once = Path(once)
    return EngineApart(engine)


def test_a_death_in_the_middle_of_a_transfer(cluster: Cluster, samples: list[Sample], tmp_path: Path) -> None:
    cluster.restarts = 2
    set_current(RAY)
    policy = make_omni()
    run = Run.create(tmp_path / "run", "transfer", [], CONFIG)
    start = ModelFile.save(run, "rl", "start", policy)
    trainers = RayGroup("trainer", _actor, start, CONFIG, OPTIM, SAMPLING, None)
    engines = RayGroup("engine", fragile, start, str(tmp_path / "once"))
    engine = GroupEngine(trainers, engines)
    engine.sync(3)
    assert (tmp_path / "once").exists() and cluster.restarts == 1
    requests = [Request(s, 2) for s in samples]
    here = HFEngine(policy, SAMPLING).generate(requests)

    def assert_written(version: int) -> None:
        for a, b in zip(engine.generate(requests), here, strict=True):
            assert a.segments[0].policy_version == version
            assert torch.equal(a.segments[0].ids, b.segments[0].ids)

    assert_written(3)
    os.kill(trainers.pids()[0], signal.SIGKILL)  # the other end of the connection
    engine.sync(4)
    assert_written(4)
    engine.close()


# -- vLLM ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["beside", "apart"])
def test_vllm_writes_with_the_trainers_weights(
    where: str, samples: list[Sample], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With one update a step the gap is that of the weights that wrote to those that are trained: rounding alone, or
    where a step is written ahead what one update moves."""
    runtime, config = RuntimeConfig(engine="vllm"), replace(CONFIG, overlap=False, steps=3)
    if where == "apart":
        request.getfixturevalue("cluster")
        runtime, config = replace(RAY, engine="vllm"), replace(CONFIG, steps=4)
    runtime.check()
    set_current(runtime)
    # vLLM's attention on CPUs needs heads of at least 32.
    audio = ModelConfig(audio="full")
    policy = qwen_omni.tiny(TEXTS, hidden=128, layers=2, vocab_size=400, whisper=False, config=audio)
    run = Run.create(tmp_path / "run", "vllm", [], config)
    rl(policy, samples, even, run, config=config, optim=OptimConfig(lr=1e-2), sampling=SAMPLING)
    staleness = column(tmp_path / "run", "rollout/staleness")
    assert staleness == ([0, 0, 0] if where == "beside" else [0, 1, 1, 0])
    for stale, gap in zip(staleness, column(tmp_path / "run", "policy/engine_gap"), strict=True):
        assert gap > 1e-2 if stale else gap < 1e-4
    assert min(column(tmp_path / "run", "grad_norm")) > 0


@pytest.mark.parametrize(
    "runtime",
    [
        RuntimeConfig(kind="ray", engine="vllm"),
        RuntimeConfig(kind="torchrun", ranks=2, engine="vllm"),
        RuntimeConfig(engine="vllm", zero=1),
    ],
)
def test_vllm_beside_trainers_that_have_a_process_group(runtime: RuntimeConfig) -> None:
    with pytest.raises(ValueError, match=r"vLLM makes a process group .* --runtime.kind ray --runtime.engines N"):
        runtime.check()


def test_vllm_under_a_torchrun_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    set_current(RuntimeConfig(engine="vllm"))
    check_engine()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="vLLM makes a process group"):
        check_engine()


@pytest.mark.parametrize(("share", "engine"), [(0.0, "vllm"), (1.5, "vllm"), (0.5, "hf")])
def test_shares_of_a_gpu_that_cannot_be(share: float, engine: str) -> None:
    with pytest.raises(ValueError, match=r"runtime\.gpu_fraction"):
        RuntimeConfig(engine=engine, gpu_fraction=share).check()  # type: ignore[arg-type]
