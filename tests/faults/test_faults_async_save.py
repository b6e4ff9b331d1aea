"""A run that writes checkpoints in the background, killed and resumed, ends with the bits of one that was never
stopped: weights, optimizer state, moving average and metrics, in one process and on two ranks with FSDP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rank_runs import RECIPE, rows, saved_tensors

STEPS = 8
RUNTIMES = {
    "one process": ("--runtime.async-save", "on"),
    "two ranks, fsdp": (
        *("--runtime.kind", "torchrun", "--runtime.ranks", "2", "--runtime.fsdp"),
        *("--runtime.async-save", "on"),
    ),
}
PATIENCE = 300.0


@pytest.fixture(scope="module", params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return RUNTIMES[request.param]


@pytest.fixture(scope="module")
def undisturbed(runtime: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    finish("train", str(RECIPE), "--out", str(out), "--steps", str(STEPS), *runtime)
    assert sum(row["grad_norm"] > 1e-3 for row in rows(out, "rl")) >= 4, "or equality would show little"
    return out


def launch(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "audiorl.cli", *args],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(RECIPE.parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*args: str) -> None:
    process = launch(*args)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said[-3000:]


def kill_when(reached: Callable[[], bool], *args: str) -> None:
    process, began = launch(*args), time.monotonic()
    while not reached():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() - began < PATIENCE
        time.sleep(0.001)
    for pid in [process.pid, *descendants(process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def descendants(pid: int) -> list[int]:
    """A launcher's ranks, which are sessions of their own."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [p for child in children for p in descendants(child)]


def last_checkpoint(out: Path) -> str:
    try:
        return str(json.loads((out / "state.json").read_text())["checkpoints"].get("rl", ""))
    except FileNotFoundError:
        return ""


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if not k.startswith("time") and k != "tokens_per_s"}


def assert_same_bits(out: Path, expected: Path) -> None:
    for phase in ("sft", "rl"):
        assert [timeless(r) for r in rows(out, phase)] == [timeless(r) for r in rows(expected, phase)]
    assert len(rows(out, "rl")) == STEPS
    last = Path("checkpoints") / "rl" / f"step_{STEPS:06d}"
    tensors, others = saved_tensors(expected / last), saved_tensors(out / last)
    assert tensors.keys() == others.keys()
    assert {"optimizer", "ema"} <= {name.partition("/")[0] for name in tensors}
    for name, tensor in tensors.items():
        assert others[name].dtype == tensor.dtype and torch.equal(others[name], tensor), name
    for file in (expected / last).rglob("*.safetensors"):
        assert (out / last / file.relative_to(expected / last)).read_bytes() == file.read_bytes(), file.name
    assert not list(out.rglob("*.partial"))


def test_killed_after_a_checkpoint(undisturbed: Path, runtime: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "run"
    train = ("train", str(RECIPE), "--out", str(out), "--steps", str(STEPS), *runtime)
    kill_when(lambda: last_checkpoint(out).endswith("step_000004"), *train)
    assert len(rows(out, "rl")) < STEPS
    finish("resume", str(out), "--trust", str(RECIPE), *runtime)
    assert_same_bits(out, undisturbed)


def test_killed_while_a_checkpoint_is_being_written(
    undisturbed: Path, runtime: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train = ("train", str(RECIPE), "--out", str(out), "--steps", str(STEPS), *runtime)
    kill_when((out / "checkpoints" / "rl" / ".step_000004.partial").is_dir, *train)
    assert last_checkpoint(out).endswith("step_000002")
    finish("resume", str(out), "--trust", str(RECIPE), *runtime)
    assert_same_bits(out, undisturbed)
