"""Trainers and engines in processes of a Ray cluster do what one process does, also when some of them are killed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from audiorl.cli import main
from audiorl.config.distributed import RuntimeConfig, set_current
from audiorl.distributed.ray_cluster import Cluster, bundles, check_answers, check_fits, connected, placements
from audiorl.distributed.ray_group import RayGroup
from audiorl.distributed.torchrun import RankError
from audiorl.recipes._loader import load_recipe
from tests.support.rank_runs import DATA, RECIPE, assert_equal_runs, rewind, rows
from tests.support.ray_workers import Counter

RAY = ("--runtime.kind", "ray", "--runtime.ranks", "2")

pytestmark = pytest.mark.usefixtures("own_runtime")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two trainers with an engine in the place of each, and two references: what all tests of this file use."""
    with connected(RuntimeConfig(kind="ray", ranks=2, engines=2, placement="colocated", references=2)) as found:
        yield found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process that the others are compared with."""
    out = tmp_path_factory.mktemp("local") / "one"
    assert main(["train", str(RECIPE), "--out", str(out)]) == 0
    return out


def trainers(start: float = 0.0, restarts: int = 3) -> RayGroup:
    set_current(RuntimeConfig(kind="ray", ranks=2, engines=2, restarts=restarts))
    return RayGroup("trainer", Counter, start)


def test_a_group_calls_its_workers_as_every_group_does(cluster: Cluster) -> None:
    group = trainers(10.0)
    assert group.size == 2 and not group.shared
    assert group.each(Counter.train, [1.0, 2.0]) == [23.0, 23.0], "each has its own, and the sum is everyone's"
    assert group.all(Counter.train, 1.0) == [25.0, 25.0] and group.first(Counter.train, 0.0) == 25.0
    assert group.first(Counter.weights) == {"total": torch.tensor(12.0)}
    before = group.cpu_seconds()
    group.all(Counter.compute, 0.2)
    assert all(0.2 <= b - a < 0.4 for a, b in zip(before, group.cpu_seconds(), strict=True))
    engines = RayGroup("engine", Counter, 0.0)
    engines.all(Counter.update_weights, group.first(Counter.weights), 7)
    assert [total for total, _ in engines.all(Counter.generate, 0.0)] == [19.0, 19.0]


def test_what_a_worker_raises_reaches_the_driver_and_the_next_group_works(cluster: Cluster) -> None:
    group = trainers()
    with pytest.raises(RankError, match=r"rank 1: ValueError: row 7 of data\.jsonl is empty; the run stopped"):
        group.all(Counter.fail_on, 1, "data.jsonl")
    assert trainers(3.0).all(Counter.train, 1.0) == [8.0, 8.0]


def test_dead_trainers_are_replaced_and_brought_to_where_they_were(cluster: Cluster, tmp_path: Path) -> None:
    cluster.restarts = 2
    group = trainers(1.0)
    group.all(Counter.train, 5.0)
    state = tmp_path / "state"
    state.write_text("100")
    group.saving()
    group.each(Counter.train, [1.0, 2.0])  # while the checkpoint is written
    group.saved(str(state))  # in the place of what came before `saving`
    before = group.pids()
    assert group.all(Counter.end_on, 1, str(tmp_path / "once")) == [203.0, 203.0]
    assert not set(before) & set(group.pids()), "both are new: their process group was broken"
    os.kill(group.pids()[0], signal.SIGKILL)  # between two calls
    assert group.each(Counter.train, [1.0, 1.0]) == [205.0, 205.0]
    os.kill(group.pids()[0], signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 0 died \(.+\), after as many restarts as runtime.restarts allows"):
        group.all(Counter.train, 1.0)


def test_a_dead_engine_is_replaced_alone(cluster: Cluster) -> None:
    cluster.restarts = 1
    set_current(RuntimeConfig(kind="ray", ranks=2, engines=2))
    group = RayGroup("engine", Counter, 0.0)
    group.all(Counter.update_weights, {"total": torch.tensor(4.0)}, 1)
    before = group.pids()
    threading.Timer(0.5, os.kill, (before[1], signal.SIGKILL)).start()
    (first, kept), (second, new) = group.each(Counter.generate, [0.1, 1.5])
    assert (first, second) == (5.0, 5.0) and kept == before[0] and new not in before


# -- runs ------------------------------------------------------------------------------------------------------------


def test_ray_trains_as_one_process_and_either_goes_on_where_the_other_stopped(
    cluster: Cluster, one: Path, tmp_path: Path
) -> None:
    two = tmp_path / "two"
    assert main(["train", str(RECIPE), "--out", str(two), *RAY]) == 0
    assert_equal_runs(one, two)
    for runtime in ((), RAY):
        rewind(two)
        assert main(["resume", str(two), "--trust", str(RECIPE), *runtime]) == 0
        assert_equal_runs(one, two)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("grpo", ("--runtime.engines", "2", "--runtime.placement", "colocated")),
        ("grpo", ("--runtime.references", "2")),
        ("ppo", ("--runtime.references", "1")),
        ("distill", ("--runtime.references", "1")),
    ],
)
def test_engines_and_references_of_their_own_train_as_one_process(
    kind: str, options: tuple[str, ...], cluster: Cluster, one: Path, tmp_path: Path
) -> None:
    """With the KL in the loss, in the reward of PPO, and as the teacher of distillation too."""
    local, separate = (one if kind == "grpo" else tmp_path / "one"), tmp_path / "separate"
    if kind != "grpo":
        assert main(["train", str(RECIPE), "--kind", kind, "--out", str(local)]) == 0
    assert main(["train", str(RECIPE), "--kind", kind, "--out", str(separate), *RAY, *options]) == 0
    assert_equal_runs(local, separate)
    assert all(row["kl/beta"] > 0 for row in rows(separate, "rl")) and abs(rows(separate, "rl")[-1]["kl"]) > 1e-3


def test_no_tensor_comes_to_the_driver_when_a_run_is_saved_and_resumed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither state nor weights are asked for; what saving and resuming answer are checksums."""
    answers: list[tuple[str, int]] = []
    call = RayGroup._call

    def recorded(group: RayGroup, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        results = call(group, method, *args, **kwargs)
        answers.append((method, max(len(pickle.dumps(r)) for r in results)))
        return results

    monkeypatch.setattr(RayGroup, "_call", recorded)
    out = tmp_path / "run"
    assert main(["train", str(DATA), "--out", str(out), *RAY, "--runtime.fsdp"]) == 0
    shutil.rmtree(out / "checkpoints/process_reward/step_000002")
    state = json.loads((out / "state.json").read_text())
    state["finished"].pop("process_reward")
    (out / "state.json").write_text(json.dumps(state))
    assert main(["resume", str(out), "--trust", str(DATA), *RAY, "--runtime.fsdp"]) == 0
    sizes = {method: max(n for m, n in answers if m == method) for method, _ in answers}
    assert {"begin_save", "saved_files", "resume"} <= set(sizes)
    assert not {"state", "weights"} & set(sizes), sizes
    assert max(sizes[m] for m in ("begin_save", "saved_files", "resume")) < 2_000


def test_ctrl_c_lets_the_step_end_saves_and_ends_ray(tmp_path: Path) -> None:
    """In a terminal every process of the run gets the signal, those of Ray too."""
    out = tmp_path / "stopped"
    command = [sys.executable, "-m", "audiorl.cli", "train", str(RECIPE), "--out", str(out), "--steps", "60"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(RECIPE.parents[2])}
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(
        [*command, "--runtime.kind", "ray"], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while process.poll() is None and (not (out / "metrics.jsonl").exists() or len(rows(out, "rl")) < 2):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    done = len(rows(out, "rl"))
    assert f"stopped after rl step {done}" in said and 2 <= done < 60
    assert json.loads((out / "state.json").read_text())["checkpoints"]["rl"].endswith(f"{done:06d}")
    deadline = time.monotonic() + 60
    while _session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _session(process.pid), "processes of Ray are left"


def _session(leader: int) -> list[str]:
    """What still runs of a session."""
    listed = subprocess.run(["ps", "-e", "-o", "sid=,stat=,args="], capture_output=True, text=True).stdout
    found = [line.split(None, 2) for line in listed.splitlines()]
    return [args for session, state, args in found if int(session) == leader and not state.startswith("Z")]


# -- clusters that cannot be used ------------------------------------------------------------------------------------


def test_addresses_where_no_cluster_answers(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{other.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ValueError, match=f"runtime.address {address}: no Ray cluster answers there"):
            check_answers(address)
        other.listen()
        with pytest.raises(ValueError, match=f"runtime.address {address}: no Ray cluster answers there"):
            check_answers(address)
    assert time.monotonic() - began < 20
    server = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = process.stdout.readline().split(" port ")[1].split()[0]
        with pytest.raises(ValueError, match="the server there is not a Ray cluster"):
            check_answers(f"127.0.0.1:{port}")
        process.terminate()
    for bad in ("ray://host:10001", "host", "host:port"):
        with pytest.raises(ValueError, match="give HOST:PORT"):
            check_answers(bad)


CLUSTER = """
import json, sys
from ray._private.ray_constants import KV_NAMESPACE_CLUSTER
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from audiorl.cli import main

def train():
    return main(["train", sys.argv[1], "--out", sys.argv[2], "--runtime.kind", "ray", "--runtime.ranks", "2",
                 "--runtime.address", cluster.address])

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
assert train() == 2
store = GcsClient(address=cluster.address)
about = json.loads(store.internal_kv_get(b"CLUSTER_METADATA", KV_NAMESPACE_CLUSTER)) | {"ray_version": "2.40.0"}
store.internal_kv_put(b"CLUSTER_METADATA", json.dumps(about).encode(), True, KV_NAMESPACE_CLUSTER)
assert train() == 2
"""


def test_a_cluster_that_is_too_small_or_of_another_version(tmp_path: Path) -> None:
    """A real one with one processor, which then claims to be older."""
    out = tmp_path / "never"
    done = subprocess.run(
        [sys.executable, "-c", CLUSTER, str(RECIPE), str(out)],
        env=os.environ | {"PYTHONPATH": str(RECIPE.parents[2]), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    small, old = (line for line in done.stderr.splitlines() if line.startswith("audiorl: "))
    assert "runtime.ranks 2 need 0 GPUs and 2 CPUs, but the cluster has 0 GPUs and 1 CPUs on 1 node" in small
    assert "Version mismatch: The cluster was started with: Ray: 2.40.0" in old
    assert not out.exists()


ONE, TWO = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}
DEDICATED = RuntimeConfig(kind="ray", ranks=2, engines=1, engine="vllm", engine_gpus=4, references=2)
COLOCATED = RuntimeConfig(kind="ray", ranks=3, engines=2, engine="vllm", placement="colocated")
ALL = RuntimeConfig(kind="ray", ranks=2, engines=1, placement="colocated", references=1, critics=2)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("runtime", "places", "wanted"),
    [
        (DEDICATED, [0, 1, 2, 3, 4], [ONE, ONE, {"CPU": 1.0, "GPU": 4.0}, ONE, ONE]),
        (COLOCATED, [0, 1, 2, 0, 1], [TWO, TWO, ONE]),  # the last trainer has its GPU alone
        (ALL, [0, 1, 0, 2, 3, 4], [TWO, ONE, ONE, ONE, ONE]),
    ],
)
def test_processes_and_their_bundles(runtime: RuntimeConfig, places: list[int], wanted: list[Any]) -> None:
    assert [bundle for bundle, _ in placements(runtime, gpus=True)] == places
    assert bundles(runtime, gpus=True) == wanted
    assert bundles(runtime, gpus=False) == [{"CPU": bundle["CPU"]} for bundle in wanted]
    halves = [resources["GPU"] for _, resources in placements(COLOCATED, gpus=True)]
    assert halves == [0.5, 0.5, 1.0, 0.5, 0.5]


@pytest.mark.smoke
def test_what_does_not_fit_is_said_with_numbers() -> None:
    runtime = RuntimeConfig(kind="ray", ranks=4, engines=2, engine="vllm", engine_gpus=2)
    node = {"CPU": 64.0, "GPU": 4.0}
    check_fits(bundles(runtime, gpus=True), [node, node], runtime)
    check_fits(bundles(COLOCATED, gpus=True), [{"CPU": 4.0, "GPU": 2.0}, ONE], COLOCATED)
    asked = "runtime.ranks 4 and runtime.engines 2 of 2 GPUs on one node each need 8 GPUs and 6 CPUs"
    shared = "runtime.ranks 3 and runtime.engines 2 on their GPUs need 3 GPUs and 5 CPUs"
    for one, nodes, message in (
        (runtime, [node, {"CPU": 64.0, "GPU": 3.0}], f"{asked}, but the cluster has 7 GPUs and 128 CPUs on 2 node"),
        (runtime, [{"CPU": 64.0, "GPU": 1.0}] * 8, f"{asked}, but the cluster has 8 GPUs and 512 CPUs on 8 node"),
        (COLOCATED, [{"CPU": 8.0, "GPU": 2.0}], f"{shared}, but the cluster has 2 GPUs and 8"),
        (COLOCATED, [ONE, ONE, {"CPU": 3.0, "GPU": 1.0}], f"{shared}, but the cluster has 3 GPUs and 5 CPUs on 3 node"),
        (
            DEDICATED,
            [{"CPU": 9.0, "GPU": 7.0}],
            "runtime.references 2 need 8 GPUs and 5 CPUs, but the cluster has 7 GPUs",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            check_fits(bundles(one, gpus=True), nodes, one)


def test_processes_of_a_smaller_run(cluster: Cluster) -> None:
    set_current(RuntimeConfig(kind="ray", ranks=1, engines=1, references=2))
    places = [cluster.indices(role) for role in ("trainer", "engine", "reference")]
    assert places == [range(1), range(2, 3), range(4, 6)]
    set_current(RuntimeConfig(kind="ray", ranks=1, references=3))
    with pytest.raises(ValueError, match="3 references are wanted, but the cluster was made for 2"):
        cluster.indices("reference")


RECIPE_OF_ITS_OWN = """
from dataclasses import dataclass
import helper_module

@dataclass(frozen=True)
class Config: ...

def tiny(): return Config()

def main(config, run): ...

class Doubler:
    def generate(self, x): return helper_module.twice(x)
"""


def test_workers_import_what_the_driver_can_and_recipes_travel(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "helper_module.py").write_text("def twice(x): return 2 * x")
    (tmp_path / "doubling.py").write_text(RECIPE_OF_ITS_OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = load_recipe(tmp_path / "doubling.py")
    runtime = RuntimeConfig(kind="ray", ranks=2, engines=1)
    set_current(runtime)
    cluster.kill(2)  # a process that starts from here on knows the path
    with connected(runtime):
        assert RayGroup("engine", recipe.Doubler).each(recipe.Doubler.generate, [21]) == [42]
