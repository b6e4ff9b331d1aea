"""Where the driver's copy of the model is while trainers in other processes train, and the metrics of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from audiorl.config import RLConfig
from audiorl.distributed.local import LocalGroup
from audiorl.train.rl.minibatch import TrainBatch
from audiorl.train.rl.processes import GroupEngine, Workers
from audiorl.train.rl.trainer import TrainOutput


class Model:
    """Notes where it is moved."""

    def __init__(self) -> None:
        self.places = [torch.device("cuda")]

    def to(self, device: torch.device) -> None:
        self.places.append(device)


class Policy:
    """On a GPU that this machine need not have."""

    def __init__(self, device: str = "cuda") -> None:
        self.model = Model()
        self.config = SimpleNamespace(device=device)

    @property
    def device(self) -> torch.device:
        return self.model.places[-1]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def workers(shared: bool) -> Workers:
    group: Any = SimpleNamespace(shared=shared)
    return Workers(RLConfig(), group, GroupEngine(group))


OTHERS, OWN = workers(shared=False), workers(shared=True)


def test_the_model_is_on_the_gpu_only_while_the_driver_computes() -> None:
    policy: Any = Policy()
    with OTHERS.driver_on_cpu(policy):
        assert policy.device.type == "cpu"
        with OTHERS.driver_on_gpu(policy):
            assert policy.device.type == "cuda"
        assert policy.device.type == "cpu"
    assert [d.type for d in policy.model.places] == ["cuda", "cpu", "cuda", "cpu", "cuda"]


def test_it_comes_back_after_an_error() -> None:
    policy: Any = Policy()
    with pytest.raises(RuntimeError), OTHERS.driver_on_cpu(policy):
        raise RuntimeError
    assert policy.device.type == "cuda"


def test_a_model_that_the_first_trainer_trains_stays() -> None:
    policy: Any = Policy()
    with OWN.driver_on_cpu(policy), OWN.driver_on_gpu(policy):
        assert policy.device.type == "cuda"
    assert len(policy.model.places) == 1


class Rank:
    """A trainer that reports these metrics."""

    def __init__(self, metrics: dict[str, float]) -> None:
        self.metrics = metrics

    def step(self, batch: TrainBatch) -> TrainOutput:
        return TrainOutput(self.metrics, [], [])


@pytest.mark.parametrize("busy_rank", [0, 1])
def test_a_rank_without_work_for_its_gpu_was_busy_for_no_time(busy_rank: int) -> None:
    group = LocalGroup(
        [Rank({"loss": float(r), **({"time/gpu_busy": 3.0} if r == busy_rank else {})}) for r in range(2)]
    )
    output = Workers(RLConfig(), group, GroupEngine(group)).step(TrainBatch([]))
    assert output.metrics == {"loss": 0.5, "time/gpu_busy": 1.5}
