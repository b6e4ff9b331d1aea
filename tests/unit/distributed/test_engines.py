"""Separate engines and vLLM in whole phases of RL: weights arrive at every step, also when processes are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from audiorl.algos.experience import Experience
from audiorl.config import GenerationConfig, LoraConfig, ModelConfig, OptimConfig, RLConfig
from audiorl.config.distributed import RuntimeConfig, set_current
from audiorl.distributed.local import World
from audiorl.distributed.ray_cluster import Cluster, connected
from audiorl.distributed.ray_group import RayGroup
from audiorl.eval._phases import Evaluation
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.families import qwen_omni
from audiorl.models.weights import Weights, named
from audiorl.protocols import Ended, Request
from audiorl.rewards import WeightedSum
from audiorl.rewards.files import FunctionReward
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.vllm_weights import served_weights
from audiorl.run.folder import Run
from audiorl.run.saving import ModelFile
from audiorl.train.rl import train as loop
from audiorl.train.rl import workers
from audiorl.train.rl.processes import GroupEngine, Workers
from audiorl.train.rl.train import train_rl
from audiorl.train.rl.trainer import TrainBatch, Trainer, TrainOutput
from audiorl.train.rl.workers import Actor, EngineWorker, engine_lora, make_actor, make_reference
from audiorl.types import Rollout, Sample, Score
from tests.conftest import TEXTS, make_omni, make_qwen3_omni
from tests.support.held_out import Compared
from tests.support.overlapped_runs import CONFIG, OPTIM, SAMPLING, assert_same, column, even

RAY = RuntimeConfig(kind="ray", engines=1)
COLOCATED = replace(RAY, placement="colocated")

pytestmark = pytest.mark.usefixtures("own_runtime")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A trainer, an engine in its place and a reference, whose processes all tests of this file use."""
    with connected(replace(COLOCATED, references=1)) as found:
        yield found


def train(
    folder: Path, samples: list[Sample], config: RLConfig, runtime: RuntimeConfig, reward: Any = even, **more: Any
) -> AudioPolicy:
    """A tiny policy after a phase of RL."""
    set_current(runtime)
    policy = make_omni(ModelConfig(audio="full"))
    run = Run.create(folder, "engines", [], config)
    train_rl(policy, samples, reward, run, config=config, optim=OPTIM, sampling=SAMPLING, **more)
    return policy


def same_columns(folder: Path, names: Sequence[str], *metrics: str) -> None:
    for metric in metrics:
        one, two = (column(folder / name, metric) for name in names)
        assert two == pytest.approx(one, abs=1e-5, rel=1e-4), metric


class EvenAndDeadly:
    """The share of even token ids; kills a process when it is asked about the answers of certain steps."""

    def __init__(self, cluster: Cluster, places: dict[str, int]):
        self.cluster, self.places = cluster, places

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        place = self.places.pop(str(rollouts[0].group_id).partition("/")[0], None)
        if place is not None:
            from ray import get

            os.kill(get(self.cluster.process(place).pid.remote()), signal.SIGKILL)
        return even(rollouts)


def test_overlap_with_a_separate_engine_that_dies_is_overlap_in_one_process(
    cluster: Cluster, samples: list[Sample], tmp_path: Path
) -> None:
    """The engine dies twice between a step's answers and its greedy answers: of step 2, generated during the
    update, whose weights must be sent again from the snapshot, and of step 3, generated with current weights."""
    config = replace(CONFIG, advantage="remax")
    local = train(tmp_path / "local", samples, config, RuntimeConfig())
    separate = train(tmp_path / "separate", samples, config, RAY, EvenAndDeadly(cluster, {"2": 1, "3": 1}))
    assert cluster.restarts == RAY.restarts - 2
    assert_same(separate, local, 1e-5)
    metrics = ("rollout/staleness", "reward/mean", "policy/logprob_gap", "grad_norm")
    same_columns(tmp_path, ("local", "separate"), *metrics)
    assert column(tmp_path / "separate", "rollout/staleness") == [0, 1, 1, 0, 1]


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


def fragile(start: ModelFile[AudioPolicy], once: str) -> EngineWorker:
    engine = Fragile(start.load(), SAMPLING)
    engine.once = Path(once)
    return EngineWorker(engine)


def test_a_death_in_the_middle_of_a_transfer(cluster: Cluster, samples: list[Sample], tmp_path: Path) -> None:
    cluster.restarts = 2
    set_current(RAY)
    policy = make_omni()
    run = Run.create(tmp_path / "run", "transfer", [], CONFIG)
    start = ModelFile.save(run, "rl", "start", policy)
    trainers = RayGroup("trainer", make_actor, start, CONFIG, OPTIM, SAMPLING, None)
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


# -- colocated with trainers ------------------------------------------------------------------------------------------


class Diary:
    """A file that processes write in."""

    def __init__(self, path: str):
        self.path = Path(path)

    def note(self, what: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{what}\n")


class Dozing(HFEngine):
    """An engine that can sleep, as vLLM on a GPU, and cannot do anything else meanwhile."""

    can_sleep = True
    diary: Diary
    asleep = False

    def sleep(self) -> None:
        assert not self.asleep
        self.asleep = True
        self.diary.note("sleep")

    def wake(self) -> None:
        assert self.asleep
        self.asleep = False
        self.diary.note("wake")

    def update_weights(self, weights: Weights, version: int) -> None:
        self._awake("receive")
        super().update_weights(weights, version)

    def generate(self, requests: Sequence[Request], ended: Ended | None = None) -> list[Rollout]:
        self._awake("write")
        return super().generate(requests, ended)

    def _awake(self, what: str) -> None:
        if self.asleep:
            raise AssertionError(f"{what}, but the engine sleeps")
        self.diary.note(what)


class Noting(Actor):
    diary: Diary

    def free_memory(self) -> None:
        super().free_memory()
        self.diary.note("room")

    def step(self, shard: TrainBatch) -> TrainOutput:
        self.diary.note("train")
        return super().step(shard)


def dozing(start: ModelFile[AudioPolicy], path: str) -> EngineWorker:
    engine = Dozing(start.load(), SAMPLING)
    engine.diary = Diary(path)
    worker = EngineWorker(engine)
    worker.sleep()
    return worker


def noting(start: ModelFile[AudioPolicy], config: RLConfig, path: str) -> Noting:
    worker = Noting(start.load(), config, OPTIM, SAMPLING, None, World.of_process_group())
    worker.diary = Diary(path)
    return worker


def test_engines_sleep_while_trainers_train_and_wake_to_write(
    cluster: Cluster, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine dies between the answers and the greedy answers of the second step: the new one begins asleep."""
    config = replace(CONFIG, advantage="remax", generation=GenerationConfig(overlap=False), steps=3)
    diary = tmp_path / "diary"

    def workers(run: Run, phase: str, policy: AudioPolicy, *_: object) -> Workers:
        start = ModelFile.save(run, phase, "start", policy)
        trainers = RayGroup("trainer", noting, start, config, str(diary))
        engines = RayGroup("engine", dozing, start, str(diary))
        return Workers(config, trainers, GroupEngine(trainers, engines, colocated=True))

    cluster.restarts = 1
    local = train(tmp_path / "local", samples, config, RuntimeConfig())
    monkeypatch.setattr(loop, "start_workers", workers)
    colocated = train(tmp_path / "colocated", samples, config, COLOCATED, EvenAndDeadly(cluster, {"1": 1}))
    assert cluster.restarts == 0
    assert_same(colocated, local, 1e-5)
    step = ["room", "wake", "receive", "write", "write", "sleep", "train"]
    died = ["room", "wake", "receive", "write", "sleep", "wake", "receive", "write", "sleep", "train"]
    assert diary.read_text().split() == ["room", "sleep", *step[1:], *died, *step]


async def even_later(rollout: Rollout) -> float:
    return even([rollout])[0].total


def test_long_answers_and_rewards_that_wait_are_those_of_one_process(
    cluster: Cluster, samples: list[Sample], tmp_path: Path
) -> None:
    """Answers are paused on the engine and gone on with there; an `async def` scores groups as they arrive."""
    config = replace(CONFIG, steps=4, generation=GenerationConfig(overlap=True, partial_tokens=3), save_every=2)
    reward = FunctionReward(even_later, "here")
    local = train(tmp_path / "local", samples, config, RuntimeConfig(), reward)
    assert_same(train(tmp_path / "ray", samples, config, RAY, reward), local, 1e-5)
    same_columns(tmp_path, ("local", "ray"), "rollout/paused", "rollout/partial", "rollout/staleness_max")
    assert max(column(tmp_path / "ray", "rollout/paused")) > 0


# -- separate references ---------------------------------------------------------------------------------------------


def test_a_separate_reference_that_dies_and_is_not_the_policys_start(
    cluster: Cluster, samples: list[Sample], tmp_path: Path
) -> None:
    """As in a second phase that is held to another policy than it begins with."""
    config = replace(CONFIG, kl_beta=0.5, generation=GenerationConfig(overlap=False), steps=3)
    reference = make_omni(ModelConfig(audio="full"), seed=1).reference()
    cluster.restarts = 1
    local = train(tmp_path / "local", samples, config, RuntimeConfig(), reference=reference)
    runtime, reward = replace(RAY, engines=0, references=1), EvenAndDeadly(cluster, {"1": 2})
    separate = train(tmp_path / "separate", samples, config, runtime, reward, reference=reference)
    assert cluster.restarts == 0
    assert_same(separate, local, 1e-5)
    same_columns(tmp_path, ("local", "separate"), "kl", "policy/loss", "grad_norm")
    assert column(tmp_path / "separate", "kl")[0] > 1e-3, "it is another"


@pytest.mark.parametrize("learned", [False, True])
def test_a_separate_reference_below_an_adapter(learned: bool, samples: list[Sample], tmp_path: Path) -> None:
    """Its log-probs are those of the base model, also where a phase begins with an adapter that has learned."""
    make_omni().save(tmp_path / "base")
    policy = load_policy(tmp_path / "base", ModelConfig(lora=LoraConfig(rank=4)))
    reference = policy.reference()
    if learned:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            policy.load_weights({name: t + torch.randn_like(t) for name, t in policy.weights().items()})
    run = Run.create(tmp_path / "run", "reference", [], CONFIG)
    start = ModelFile.save(run, "rl", "start", policy)
    found = [Experience.from_rollout(r) for r in HFEngine(policy, SAMPLING).generate([Request(s, 2) for s in samples])]
    worker = Trainer(policy, replace(CONFIG, kl_beta=0.5), OPTIM, 1.0, 8, reference)
    separate = make_reference(start, worker.config, SAMPLING, "base" if learned else None)
    for e, logprobs in zip(worker.prepare(found), separate.ref_logprobs(found), strict=True):
        assert e.ref_logprobs is not None
        torch.testing.assert_close(logprobs, e.ref_logprobs, atol=1e-6, rtol=0)
        here = e.rollout_logprobs
        assert here is not None and torch.allclose(here, e.ref_logprobs, atol=1e-4) != learned


# -- vLLM ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "lora"), [("colocated", True), ("separate", False)])
def test_vllm_writes_with_the_trainers_weights(
    where: str,
    lora: bool,
    samples: list[Sample],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one update a step the gap is that of the weights that wrote to those that are trained: rounding alone, or
    where a step is written ahead what one update moves. Of a policy with LoRA the adapter alone is sent."""
    separate = where == "separate"
    runtime = replace(RAY if separate else RuntimeConfig(), engine="vllm")
    config = replace(CONFIG, generation=GenerationConfig(overlap=separate), steps=4 if separate else 3)
    if separate:
        request.getfixturevalue("cluster")
    runtime.check()
    set_current(runtime)
    # vLLM's attention on CPUs needs heads of at least 32.
    tiny = partial(qwen_omni.tiny, TEXTS, hidden=128, layers=2, vocab_size=400, whisper=False)
    if lora:
        tiny().save(tmp_path / "base")
        policy = load_policy(tmp_path / "base", ModelConfig(lora=LoraConfig(rank=4), audio="projector"))
    else:
        policy = tiny(config=ModelConfig(audio="full"))
    run = Run.create(tmp_path / "run", "vllm", [], config)
    calls: list[str] = []
    monkeypatch.setattr(workers, "served_weights", lambda p, lora: calls.append(lora) or served_weights(p, lora))
    evaluate = None
    if not separate and not lora:  # greedy answers of vLLM, with the weights of the step, are those of the policy
        evaluation = Evaluation(WeightedSum.of(even=even), samples, SAMPLING.max_new_tokens, metric="even")
        evaluate, config = Compared(evaluation.probe(policy)), replace(config, eval_every=1)
    settings: dict[str, Any] = dict(optim=OptimConfig(lr=2e-2), sampling=SAMPLING, evaluate=evaluate)
    train_rl(policy, samples, even, run, config=config, **settings)
    if evaluate is not None:
        assert [{s.policy_version for r in spy.rollouts for s in r.segments} for spy in evaluate.spies] == [{1}, {2}]
    staleness = column(tmp_path / "run", "rollout/staleness")
    assert staleness == ([0, 1, 1, 0] if separate else [0, 0, 0])
    for stale, gap in zip(staleness, column(tmp_path / "run", "policy/logprob_gap"), strict=True):
        assert gap > 1e-2 if stale else gap < 1e-4
    assert min(column(tmp_path / "run", "grad_norm")) > 0
    sent = "adapter" if lora else "merged"
    assert set(calls) == (set() if separate else {sent}), "other processes send their own"
    if lora:
        assert engine_lora(ModelFile.save(run, "rl", "start", policy)) == "adapter"
        assert policy.has_fresh_adapter() is False


def test_adapters_that_vllm_cannot_run_are_merged_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lora = LoraConfig(rank=4, target_modules=("q_proj",))
    make_qwen3_omni(hidden=128, head_dim=32).save(tmp_path / "base")
    policy = load_policy(tmp_path / "base", ModelConfig(lora=lora))
    start = ModelFile.save(Run.create(tmp_path / "run", "vllm", [], CONFIG), "rl", "start", policy)
    set_current(RuntimeConfig(engine="vllm"))
    assert engine_lora(start) == engine_lora(start, warn=True) == "merged"
    (record,) = caplog.records
    assert record.getMessage().endswith("not the adapter: on a CPU it runs no adapter in a model with experts")
    set_current(RuntimeConfig(engine="vllm", engine_lora="adapter"))
    with pytest.raises(ValueError, match=r"runtime\.engine_lora adapter: vLLM cannot run it: .* take auto or merged"):
        engine_lora(start)
    set_current(RuntimeConfig(engine="vllm", engine_lora="merged"))
    assert engine_lora(start) == "merged"
    with pytest.raises(ValueError, match=r"runtime\.engine_lora: only --runtime\.engine vllm"):
        RuntimeConfig(engine_lora="merged").check()
