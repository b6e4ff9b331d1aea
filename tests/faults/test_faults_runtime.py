"""Trainers, engines and reward servers killed at random moments of a run: what it leaves is as if nobody had been.

A moment is a number of lines of metrics.jsonl and a share of the time that the run's quickest step has taken.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from audiorl.cli import main
from audiorl.config.distributed import RuntimeConfig, set_current
from audiorl.distributed.ray_cluster import Cluster, import_ray
from audiorl.distributed.ray_group import RayGroup
from audiorl.run.checkpoint import verify
from tests.support.rank_runs import RECIPE, assert_equal_runs, audiorl, rows
from tests.support.ray_workers import Counter
from tests.support.reward_servers import Process

Kind = Literal["trainer", "engine", "server"]
STEPS = 12
LINES = 2 + STEPS  # two of supervised training
PLACES: dict[Kind, tuple[int, ...]] = {"trainer": (0, 1), "engine": (2, 3)}
RAY = ("--runtime.kind", "ray", "--runtime.ranks", "2", "--runtime.engines", "2")
TRAIN = ("train", str(RECIPE), "--steps", str(STEPS))

VOWELS = """
import time

def reward(rollout):
    time.sleep(0.03)  # a judge takes its time, in which it may die
    return sum(rollout.text.lower().count(v) for v in "aeiou") / (1 + len(rollout.text))
"""

pytestmark = pytest.mark.usefixtures("own_runtime")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process, with the reward in it too."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    audiorl(*TRAIN, "--out", str(out))
    return out


@dataclass(frozen=True)
class Moment:
    kind: Kind
    line: int
    share: float


def moments(seed: int, kinds: Sequence[Kind]) -> list[Moment]:
    """One for each, in random order, each in its own stretch of the run."""
    rng = random.Random(seed)
    order = rng.sample(list(kinds), len(kinds))
    edges = [round(i * (LINES - 1) / len(order)) for i in range(len(order) + 1)]
    return [
        Moment(kind, rng.randrange(low, high), rng.random())
        for kind, low, high in zip(order, edges[:-1], edges[1:], strict=True)
    ]


def lines(out: Path) -> int:
    """Of metrics.jsonl so far."""
    with suppress(FileNotFoundError):
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def quickest(out: Path) -> float:
    """Seconds of the shortest step so far."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] if lines(out) else []
    return min((row.get("time/rollout", 0.0) + row["time/train"] for row in found), default=0.5)


class Killer(threading.Thread):
    """Kills processes of a cluster, and servers, while a run goes on. `hit`: what was killed, in order.

    Processes are known by the number that they give themselves, which one that is busy would not tell in time: it is
    asked for as soon as a process is there.
    """

    def __init__(self, cluster: Cluster, out: Path, plan: Sequence[Moment], servers: Sequence[Process], seed: int = 0):
        super().__init__(daemon=True)
        self.cluster, self.out, self.plan, self.servers = cluster, out, plan, servers
        self.rng = random.Random(seed)
        self.hit: list[Kind] = []
        self.gone: set[int] = set()
        self.asked: dict[int, tuple[Any, Any]] = {}
        self.finished = threading.Event()

    def run(self) -> None:
        for moment in self.plan:
            while lines(self.out) < moment.line:
                if self._over():
                    return
            until = time.monotonic() + moment.share * quickest(self.out)
            while time.monotonic() < until:
                if self._over():
                    return
            self.kill(moment.kind)

    def kill(self, kind: Kind) -> None:
        """One that lives, at random, as soon as there is one. With one trainer all are gone."""
        while not (found := sorted(set(self.alive(kind)) - self.gone)):
            if self._over():
                return
        number = self.rng.choice(found)
        os.kill(number, signal.SIGKILL)
        self.hit.append(kind)
        self.gone |= set(found) if kind == "trainer" else {number}

    def alive(self, kind: Kind) -> list[int]:
        if kind == "server":
            return [s.process.pid for s in self.servers]
        return [number for place in PLACES[kind] for number in self._number(place)]

    def _number(self, place: int) -> list[int]:
        """Of the process at a place, if it is there and has said it."""
        host = self.cluster._processes.get(place)
        if host is None:
            return []
        if self.asked.get(place, (None, None))[0] is not host:
            self.asked[place] = host, host.pid.remote()
        ray, answer = import_ray(), self.asked[place][1]
        with suppress(ray.exceptions.RayError):
            return ray.get([answer], timeout=0) if ray.wait([answer], timeout=0)[0] else []
        return []

    def _over(self) -> bool:
        for place in range(4):
            self._number(place)
        return self.finished.wait(0.01)

    def __enter__(self) -> Killer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finished.set()
        self.join()


@contextmanager
def supervised(file: Path, count: int) -> Iterator[list[Process]]:
    """Reward servers, each of which is started again whenever it has ended."""
    servers = [Process(file) for _ in range(count)]
    over = threading.Event()

    def watch(server: Process) -> None:
        while not over.wait(0.05):
            if server.process.poll() is not None:
                server.close()
                with suppress(AssertionError):  # killed while it started: again
                    server.start()

    watchers = [threading.Thread(target=watch, args=(server,)) for server in servers]
    for watcher in watchers:
        watcher.start()
    try:
        yield servers
    finally:
        over.set()
        for watcher, server in zip(watchers, servers, strict=True):
            watcher.join()
            server.close()


def assert_nothing_shows(out: Path, undisturbed: Path) -> None:
    """Every sample of every step is there once, and weights, state, rewards and all other metrics are equal."""
    assert [row["step"] for row in rows(out, "rl")] == list(range(1, STEPS + 1))
    assert [row["seq"] for phase in ("sft", "rl") for row in rows(out, phase)] == list(range(LINES))
    files = sorted(p.name for p in (undisturbed / "rollouts").iterdir())
    assert len(files) == STEPS and sorted(p.name for p in (out / "rollouts").iterdir()) == files
    for name in files:
        here, there = (answers(run / "rollouts" / name) for run in (out, undisturbed))
        assert len(set(here)) == len(here) == 12
        assert [row[:-1] for row in here] == [row[:-1] for row in there]
        assert [row[-1] for row in here] == pytest.approx([row[-1] for row in there], abs=1e-5)
    assert_equal_runs(undisturbed, out)


def answers(file: Path) -> list[tuple[Any, ...]]:
    """Of one step: group, place in it, sample, text, weights' version, reward."""
    found = []
    for line in file.read_text().splitlines():
        row = json.loads(line)
        (answer,) = row["segments"]
        what = (row["sample"]["id"], answer["text"], answer["policy_version"], row["score"]["total"])
        found.append((row["group_id"], row["index"], *what))
    return found


def assert_whole(out: Path) -> None:
    """The last checkpoint is what was written."""
    verify(out / json.loads((out / "state.json").read_text())["checkpoints"]["rl"])
    assert 4 <= len(rows(out, "rl")) < STEPS


def test_six_deaths_do_not_show(
    cluster: Cluster, undisturbed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two trainers, two engines and two reward servers, of which two take turns and are started again."""
    out, file = tmp_path / "run", tmp_path / "vowels.py"
    file.write_text(VOWELS)
    kinds: list[Kind] = ["trainer"] * 2 + ["engine"] * 2 + ["server"] * 2
    plan = moments(0, kinds)
    with supervised(file, 2) as servers, Killer(cluster, out, plan, servers) as killer:
        urls = [server.url for server in servers]
        assert main([*TRAIN, "--rewards", *urls, "--out", str(out), *RAY, "--runtime.restarts", "4"]) == 0
        assert killer.hit == [moment.kind for moment in plan]
    said = capfd.readouterr().err
    assert said.count(" died (") == 4 - cluster.restarts > 0
    assert_nothing_shows(out, undisturbed)


def test_a_run_that_dies_too_often_stops_and_is_resumed(
    cluster: Cluster, undisturbed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A trainer is killed, and once more when it has come back: after one restart that is the end."""
    out = tmp_path / "run"
    with Killer(cluster, out, [Moment("trainer", 7, 0.3), Moment("trainer", 7, 0.0)], []) as killer:
        assert main([*TRAIN, "--out", str(out), *RAY, "--runtime.restarts", "1"]) == 2
        assert len(killer.hit) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert "rank " in last and "after as many restarts as runtime.restarts allows (1)" in last
    assert "resume it from the last checkpoint" in last
    assert_whole(out)
    audiorl("resume", str(out), "--trust", str(RECIPE))
    assert_nothing_shows(out, undisturbed)


def test_a_process_that_dies_while_it_starts_is_replaced(cluster: Cluster) -> None:
    cluster.restarts = 2
    set_current(RuntimeConfig(kind="ray", ranks=2, engines=2))
    cluster.kill(2)
    os.kill(import_ray().get(cluster.process(2).pid.remote()), signal.SIGKILL)
    group = RayGroup("engine", Counter, 4.0)
    assert [total for total, _ in group.all(Counter.generate, 0.0)] == [4.0, 4.0]
    assert cluster.restarts == 1


def test_a_rank_of_torchrun_that_is_killed_ends_the_run_which_is_resumed(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "audiorl.cli", *TRAIN, "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(RECIPE.parents[2])}
    with subprocess.Popen(
        [*command, "--runtime.kind", "torchrun", "--runtime.ranks", "2"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while process.poll() is None and lines(out) < 7:
            time.sleep(0.01)
        os.kill(rank_of(process.pid, 1), signal.SIGKILL)
        _, said = process.communicate(timeout=600)
    assert process.returncode == 1 and "Signal 9 (SIGKILL)" in said, said
    assert_whole(out)
    audiorl("resume", str(out), "--trust", str(RECIPE))
    assert_nothing_shows(out, undisturbed)


def rank_of(launcher: int, rank: int) -> int:
    """The process that torchrun started as this rank."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"no rank {rank}")
