"""Runs of steps_recipe.py on one or several ranks, and what they must agree on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from audiorl.cli import main
from audiorl.distributed.local import World
from audiorl.run.checkpoint import STATE_FILES, read_state
from tests.support.forks import forked, free_port

RECIPE = Path(__file__).parent / "steps_recipe.py"


DATA = Path(__file__).parent / "data_recipe.py"


def audiorl(*args: str, ranks: int = 1) -> str:
    """What `audiorl ARGS` printed, in this process or in several as torchrun starts them."""
    if ranks > 1:
        runtime = ("--runtime.kind", "torchrun", "--runtime.ranks", str(ranks))
        return forked("-m", "audiorl.cli", *args, *runtime, ranks=ranks)
    threads = torch.get_num_threads()
    assert main([*args]) == 0
    torch.set_num_threads(threads)
    return ""


def torchrun(*args: str, ranks: int = 2, fails: bool = False) -> str:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    return output(*launcher, *args, fails=fails)


def output(*args: str, fails: bool = False) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(RECIPE.parents[2])}
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, env=environment, timeout=900)
    assert (done.returncode != 0) == fails, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def rows(run: Path, phase: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if row["phase"] == phase]


def assert_equal_runs(one: Path, two: Path, phases: Sequence[str] = ("sft", "rl")) -> None:
    """Every metric that is no time to 1e-5, and the weights and optimizer state of every checkpoint to 3e-5.

    The order of a sum decides the last bits of a gradient, and Adam divides by its size.
    """
    for phase in phases:
        for a, b in zip(rows(one, phase), rows(two, phase), strict=True):
            assert a.keys() == b.keys()
            timeless = [k for k in a if not k.startswith(("time", "tokens_per_s", "phase"))]
            if a["step"] == 1:  # the policy is its reference: rounding alone decides which answer is preferred
                timeless = [k for k in timeless if k != "preference/accuracy"]
            assert [b[k] for k in timeless] == pytest.approx([a[k] for k in timeless], abs=1e-5, rel=1e-5)
        assert rows(one, phase) and all(row["grad_norm"] > 0 for row in rows(one, phase)[-2:])
    folders = sorted(p.relative_to(one) for p in one.glob("checkpoints/*/*_*"))
    assert len(folders) > min(len(phases), 2)
    for folder in folders:
        tensors, others = saved_tensors(one / folder), saved_tensors(two / folder)
        for name, tensor in tensors.items():
            torch.testing.assert_close(others[name], tensor, atol=3e-5, rtol=0)


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, and its trainer's state by part and name, whatever number of ranks wrote it."""
    files = [file for file in folder.glob("*.safetensors") if not file.match(STATE_FILES)]
    weights = {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}
    state = read_state(folder)
    return weights | {f"{part}/{name}": joined[name] for part, joined in state.items() for name in joined}


def rewind(run: Path, phase: str = "rl", step: int = 4, seq: int = 6) -> None:
    """Back to the checkpoint of a step before the last, as if the machine had died after it; `seq` counts all lines."""
    state = json.loads((run / "state.json").read_text())
    for name in (phase, "after"):
        state["finished"].pop(name, None)
    state["checkpoints"][phase] = f"checkpoints/{phase}/step_{step:06d}"
    (run / "state.json").write_text(json.dumps(state | {"seq": seq}))


class Counted:
    """A worker that is no longer there when its group is not."""

    everywhere: ClassVar[WeakSet[Counted]] = WeakSet()

    def __init__(self) -> None:
        self.everywhere.add(self)

    def living(self) -> int:
        return len(self.everywhere)


class Adder:
    def __init__(self, base: int):
        self.base = base

    def plus(self, x: int) -> int:
        return self.base + x

    def total(self) -> float:
        return float(World.of_process_group().sum(torch.tensor(float(self.base))))

    def compute(self, seconds: float) -> None:
        """Use so many CPU seconds."""
        began = time.process_time()
        while time.process_time() - began < seconds:
            pass

    def fail_on(self, rank: int) -> float:
        if World.of_process_group().rank == rank:
            raise ValueError("row 7 of data.jsonl is empty")
        return self.total()
