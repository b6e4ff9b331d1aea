"""Two processes of torchrun do what one does: the same losses and weights, resumed on one rank or two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from audiorl.cli import main
from tests.support.data_recipe import PHASES
from tests.support.rank_runs import DATA, RECIPE, assert_equal_runs, audiorl, output, rewind, saved_tensors, torchrun


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_two_ranks_train_as_one_and_one_goes_on_where_they_stopped(kind: str, tmp_path: Path) -> None:
    """Three groups on two ranks: their shares differ, and so do their numbers of micro-batches."""
    one, two = tmp_path / "one", tmp_path / "two"
    audiorl("train", str(RECIPE), "--kind", kind, "--out", str(one))
    audiorl("train", str(RECIPE), "--kind", kind, "--out", str(two), ranks=2)
    assert_equal_runs(one, two)
    if kind == "grpo":
        rewind(two)
        audiorl("resume", str(two), "--trust", str(RECIPE))
        assert_equal_runs(one, two)


def test_two_ranks_learn_preferences_and_judgements_as_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    audiorl("train", str(DATA), "--out", str(one))
    audiorl("train", str(DATA), "--out", str(two), ranks=2)
    assert_equal_runs(one, two, PHASES)


@pytest.mark.parametrize("loss", ["guard", "crpo"])
def test_two_ranks_train_a_flow_as_one_and_one_goes_on_where_they_stopped(tmp_path: Path, loss: str) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import numpy as np\n\n\ndef reward(rollout):\n    return -float(np.abs(rollout.spoken_audio.array).mean())\n"
    )
    options = ["--reward-file", str(reward), "--max-steps", "3", "--rl.prompts-per-step", "4", "--rl.loss", loss]
    options += ["--sampling.noisy", "none" if loss == "crpo" else "branch"]
    options += ["--rl.mini-batches", "2", "--rl.micro-batch-tokens", "120", "--rl.clip-low", "1", "--rl.clip-high", "1"]
    one, two = tmp_path / "one", tmp_path / "two"
    audiorl("train", "sound-grpo", "--tiny", *options, "--out", str(one))
    audiorl("train", "sound-grpo", "--tiny", *options, "--out", str(two), ranks=2)
    assert_equal_runs(one, two, ("grpo",))
    kept = saved_tensors(one / "checkpoints/grpo/step_000003")
    rewind(one, "grpo", 2, 2)
    audiorl("resume", str(one), "--trust", str(reward))
    again = saved_tensors(one / "checkpoints/grpo/step_000003")
    assert all(torch.equal(again[name], tensor) for name, tensor in kept.items()), "the same bits"


GROUP = """
import os, signal, sys, torch
from audiorl.distributed.torchrun import RanksGroup, RankError, follow, process_group, rank
from tests.support.rank_runs import Adder, Counted

with process_group() as world:
    if rank() > 0:
        follow()
    else:
        group = RanksGroup(lambda: Adder(10), Adder, 20)
        assert group.each(Adder.plus, [1, 2]) == [11, 22] and group.all(Adder.plus, 5) == [15, 25]
        assert group.first(Adder.plus, 7) == 17 and group.all(Adder.total) == [30.0, 30.0]
        (before,) = group.cpu_seconds()
        group.all(Adder.compute, 0.5)
        (after,) = group.cpu_seconds()
        assert 0.5 <= after - before < 1.0, "the other rank's, without the driver's own"
        for _ in range(2):
            kept = RanksGroup(Counted, Counted)
            assert kept.all(Counted.living) == [1, 1]
            assert RanksGroup(Counted, Counted).all(Counted.living) == [2, 2] and group.all(Adder.plus, 5) == [15, 25]
            del kept
        print("so far so good", flush=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in a step of a run: torchrun sends it when a rank has failed
        if sys.argv[1] == "other":
            try:
                group.all(Adder.fail_on, 1)
            except RankError as error:
                print("driver:", error, flush=True)
        if sys.argv[1] == "own":
            group.all(Adder.fail_on, 0)
"""


@pytest.mark.parametrize("who", ["none", "other", "own"])
def test_a_group_of_ranks_and_what_goes_wrong_in_it(who: str, tmp_path: Path) -> None:
    """A rank that fails ends the others, which wait for it, and the driver knows why."""
    script = tmp_path / "script.py"
    script.write_text(GROUP)
    printed = torchrun(str(script), who, fails=who != "none")
    assert "so far so good" in printed
    if who == "other":
        assert "driver: rank 1: ValueError: row 7 of data.jsonl is empty; the run stopped" in printed
    if who == "own":
        assert "ValueError: row 7 of data.jsonl is empty" in printed


RAY = ("--runtime.kind", "ray", "--runtime.ranks", "2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--runtime.ranks", "2"], "several processes need --runtime.kind torchrun"),
        (["--runtime.kind", "torchrun", "--runtime.ranks", "0"], "runtime.ranks is 0; it must be at least 1"),
        (["--runtime.fsdp", "--runtime.offload"], "FSDP keeps the optimizer on the GPUs; take --runtime.zero 3"),
        (["--runtime.offload"], "only ZeRO can offload the optimizer; add --runtime.zero 1, 2 or 3"),
        (["--runtime.references", "1"], "a reference with its own process needs --runtime.kind ray"),
        ([*RAY, "--runtime.references=-1"], "runtime.references is -1; it must be at least 0"),
        (["--runtime.address", "127.0.0.1:6379"], "only --runtime.kind ray connects to a cluster"),
        (["--runtime.engines", "1"], "engines with their own processes need --runtime.kind ray"),
        ([*RAY, "--runtime.engine-gpus", "2"], "only --runtime.engine vllm can use several"),
        (["--runtime.critics", "1"], "a critic with its own process needs --runtime.kind ray"),
        ([*RAY, "--runtime.critics", "1", "--runtime.zero", "2"], "divide nothing on one critic; take at least 2"),
        ([*RAY, "--runtime.critics", "1", "--runtime.fsdp"], "divide nothing on one critic; take at least 2"),
        ([*RAY, "--runtime.engine", "vllm"], "vLLM makes a torch process group"),
        (["--runtime.engine", "vllm", "--runtime.zero", "1"], "vLLM makes a torch process group"),
        (["--runtime.gpu-fraction", "0.5"], "only --runtime.engine vllm reserves memory"),
        (["--runtime.engine", "vllm", "--runtime.gpu-fraction", "1.5"], "runtime.gpu_fraction is 1.5"),
    ],
)
def test_a_runtime_that_cannot_be(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(RECIPE), "--out", "never", *options]) == 2
    assert message in capsys.readouterr().err


SOCKETS = """
import os
from dataclasses import dataclass
from pathlib import Path

@dataclass(frozen=True)
class Config:
    seed: int = 0

def tiny():
    return Config()

def listening(process):
    held = {os.readlink(fd) for fd in Path(f"/proc/{process}/fd").iterdir() if fd.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
                yield fields[1].split(":")[0]

def main(config, run):
    launcher = os.getppid()
    ranks = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal()]
    ranks = [p for p in ranks if Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split()[1] == str(launcher)]
    print("processes", 1 + len(ranks), "listen on", *(a for p in (launcher, *ranks) for a in listening(p)), flush=True)
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="lists sockets as Linux does")
def test_the_processes_that_the_launcher_starts_listen_on_loopback_only(tmp_path: Path) -> None:
    recipe = tmp_path / "sockets.py"
    recipe.write_text(SOCKETS)
    runtime = ("--runtime.kind", "torchrun", "--runtime.ranks", "2")
    printed = output("-m", "audiorl.cli", "train", str(recipe), "--out", str(tmp_path / "run"), *runtime)
    processes, _, addresses = printed.partition("processes ")[2].partition("\n")[0].partition(" listen on ")
    assert processes == "3" and addresses, printed
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert set(addresses.split()) <= loopback, addresses
