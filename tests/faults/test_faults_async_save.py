"""A run that writes checkpoints in the background, killed and resumed, ends with the bits of one that was never
stopped: weights, optimizer state, moving average and metrics, in one process and on two ranks with FSDP."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forks import start
from tests.support.rank_runs import RECIPE, rows, saved_tensors

STEPS = 8
IN_BACKGROUND = ("--runtime.async-save", "on")
RUNTIMES = {
    "one process": IN_BACKGROUND,
    "two ranks, fsdp": ("--runtime.kind", "torchrun", "--runtime.ranks", "2", "--runtime.fsdp", *IN_BACKGROUND),
}
PATIENCE = 300.0


@pytest.fixture(scope="module", params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return RUNTIMES[request.param]


@pytest.fixture(scope="module")
def undisturbed(runtime: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(out.with_name("said"), "train", str(RECIPE), "--out", str(out), "--steps", str(STEPS), *runtime)
    assert sum(row["grad_norm"] > 1e-3 for row in rows(out, "rl")) >= 4, "or equality would show little"
    return out


def finish(said: Path, *args: str) -> None:
    process = start(["-m", "audiorl.cli", *args], said)
    process.join(PATIENCE)
    assert process.exitcode == 0, said.read_text()[-3000:]


def kill_when(reached: Callable[[], bool], said: Path, *args: str) -> None:
    process, began = start(["-m", "audiorl.cli", *args], said), time.monotonic()
    while not reached():
        assert process.is_alive() and time.monotonic() - began < PATIENCE, said.read_text()[-3000:]
        time.sleep(0.001)
    assert process.pid is not None
    for pid in [process.pid, *descendants(process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


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
    kill_when(lambda: last_checkpoint(out).endswith("step_000004"), tmp_path / "said", *train)
    assert len(rows(out, "rl")) < STEPS
    finish(tmp_path / "again", "resume", str(out), "--trust", str(RECIPE), *runtime)
    assert_same_bits(out, undisturbed)


def test_killed_while_a_checkpoint_is_being_written(
    undisturbed: Path, runtime: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train = ("train", str(RECIPE), "--out", str(out), "--steps", str(STEPS), *runtime)
    kill_when((out / "checkpoints" / "rl" / ".step_000004.partial").is_dir, tmp_path / "said", *train)
    assert last_checkpoint(out).endswith("step_000002")
    finish(tmp_path / "again", "resume", str(out), "--trust", str(RECIPE), *runtime)
    assert_same_bits(out, undisturbed)
