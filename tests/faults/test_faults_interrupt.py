"""Real processes that are stopped at random moments and resumed leave the same run as one that was not stopped.

A moment is a number of milestones (lines of metrics.jsonl plus finished phases) and a share of the time that the
undisturbed run took from there to the next milestone. Processes are stopped with their whole group, as Ctrl-C does.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import start

ROOT = Path(__file__).parents[2]
SFT_STEPS, GRPO_STEPS = 24, 6
# Enough supervised steps that rewards differ inside a group: GRPO that changes nothing would always come out the same.
OPTIONS = (
    "--control False --threads 1 --think False --max-phrases 12 "
    f"--sft.steps {SFT_STEPS} --sft.save-every 5 --sft-optim.lr 3e-3 --sft-optim.warmup-steps 0 "
    f"--rl.steps {GRPO_STEPS} --rl.save-every 2 --rl.group-size 4 --rl.rollouts-every 1 "
    "--rl-optim.lr 5e-4 --rl-optim.warmup-steps 0"
).split()
TRAIN = ["train", "quickstart", "--tiny", *OPTIONS]
MILESTONES = SFT_STEPS + GRPO_STEPS + 4  # sft, before, grpo, after are finished once each
PATIENCE = 120.0  # seconds
CLOCKS = ("time", "seconds", "tokens_per_s", "source_time", "emit_time")


def launch(*args: str) -> subprocess.Popen[str]:
    """`audiorl` in a process group of its own, which a signal can reach as a terminal's would."""
    return subprocess.Popen(
        [sys.executable, "-m", "audiorl.cli", *args], cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


class Forked:
    """The same without the imports, which take most of the seconds of such a short run."""

    def __init__(self, *args: str):
        self._printed, self._errors = (Path(tempfile.mkstemp()[1]) for _ in range(2))
        self._process = start(["-m", "audiorl.cli", *args], self._printed, self._errors, HF_HUB_OFFLINE="1")
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        self._process.join(timeout)
        printed, errors = self._printed.read_text(), self._errors.read_text()
        assert self._process.exitcode is not None, f"still there after {timeout:g} s: {errors}"
        return printed, errors


def milestones(out: Path) -> int:
    """Lines of metrics.jsonl and finished phases so far."""
    try:
        state = json.loads((out / "state.json").read_text())
        return (out / "metrics.jsonl").read_bytes().count(b"\n") + len(state["finished"])
    except FileNotFoundError:
        return 0


@dataclass(frozen=True)
class Undisturbed:
    out: Path
    times: tuple[float, ...]
    """Seconds from the start to each milestone."""

    def gap(self, milestone: int) -> float:
        """Seconds from one milestone to the next."""
        return self.times[milestone + 1] - self.times[milestone]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    process, began, times = launch(*TRAIN, "--out", str(out)), time.monotonic(), [0.0]
    while process.poll() is None:
        reached = milestones(out)
        times += [time.monotonic() - began] * (reached + 1 - len(times))
        time.sleep(0.005)
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert stderr == ""
    times += [time.monotonic() - began] * (MILESTONES + 1 - len(times))
    grad_norms = [row["grad_norm"] for row in metrics(out) if row["phase"] == "grpo"]
    assert sum(norm > 0.1 for norm in grad_norms) >= 2, (
        "GRPO did not change the weights: the comparison would show little"
    )
    return Undisturbed(out, tuple(times))


@dataclass(frozen=True)
class Stop:
    """Which signal to send, after which milestone, and after which share of the time to the next one."""

    signal: signal.Signals
    milestone: int
    share: float


def stops(seed: int, signals: Sequence[signal.Signals]) -> list[Stop]:
    """One stop per signal, in random order, each in its own part of the run, so that every phase is hit."""
    rng = random.Random(seed)
    order = rng.sample(list(signals), len(signals))
    edges = [round(i * (MILESTONES - 1) / len(order)) for i in range(len(order) + 1)]
    return [
        Stop(s, rng.randrange(max(low, 1), high), rng.random())
        for s, low, high in zip(order, edges[:-1], edges[1:], strict=True)
    ]


def stop(command: Sequence[str], out: Path, at: Stop, plan: Undisturbed) -> bool:
    """Send the signal at its moment and check how the process ends; False if it was finished before."""
    # A resumed run first drops lines and writes them again; beyond what is there now, it has surely begun.
    milestone = max(at.milestone, milestones(out) + 1)
    process, began = Forked(*command), time.monotonic()
    while process.poll() is None and milestones(out) < milestone:
        assert time.monotonic() - began < PATIENCE, f"not at milestone {milestone} after {PATIENCE:g} s"
        time.sleep(0.005)
    time.sleep(at.share * plan.gap(min(milestone, MILESTONES - 1)))
    if process.poll() is None:
        os.killpg(process.pid, at.signal)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    if process.returncode == 0:
        return False
    if at.signal == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL, stderr
    else:
        assert process.returncode == 130, stderr
        *said, line = stderr.splitlines()
        assert said in ([], ["audiorl: stopping after this step; once more stops at once"])
        assert line.startswith("audiorl: stopped") and "audiorl resume" in line
        assert "Traceback" not in stdout
    return True


def disturbed(out: Path, plan: Undisturbed, moments: Sequence[Stop]) -> int:
    """Run to the end with these stops; returns how many of them hit."""
    command, hit = [*TRAIN, "--out", str(out)], 0
    for at in moments:
        if not stop(command, out, at, plan):
            return hit
        command, hit = ["resume", str(out)], hit + 1
    process = Forked(*command)
    _, stderr = process.communicate(timeout=2 * PATIENCE)
    assert process.returncode == 0, stderr
    return hit


def without_clocks(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_clocks(v) for k, v in value.items() if k not in CLOCKS and not k.startswith("time/")}
    return [without_clocks(v) for v in value] if isinstance(value, list) else value


def rows(path: Path) -> list[Any]:
    return [without_clocks(json.loads(line)) for line in path.read_text().splitlines()]


def metrics(out: Path) -> list[dict[str, Any]]:
    return rows(out / "metrics.jsonl")


def assert_same_run(out: Path, expected: Path) -> None:
    """Weights and optimizer bit by bit; every line that was logged; rollouts and evaluations."""
    last = Path("checkpoints") / "grpo" / f"step_{GRPO_STEPS:06d}"
    for name in ("model.safetensors", "trainer.safetensors"):
        assert (out / last / name).read_bytes() == (expected / last / name).read_bytes(), name
    assert [row["seq"] for row in metrics(out)] == list(range(SFT_STEPS + GRPO_STEPS))
    assert metrics(out) == metrics(expected)
    assert json.loads((out / "eval.json").read_text()) == json.loads((expected / "eval.json").read_text())
    for folder, count in (("rollouts", GRPO_STEPS), ("eval", 2)):
        names = sorted(p.name for p in (expected / folder).iterdir())
        assert len(names) == count and sorted(p.name for p in (out / folder).iterdir()) == names
        for name in names:
            assert rows(out / folder / name) == rows(expected / folder / name), name
    assert (out / "report.html").is_file()
    unfinished = [p for p in out.rglob("*") if p.name.endswith((".partial", ".tmp"))]
    assert not unfinished, unfinished


def test_two_interrupts_and_two_kills(tmp_path: Path, undisturbed: Undisturbed) -> None:
    moments = stops(1, [signal.SIGINT] * 2 + [signal.SIGKILL] * 2)
    assert disturbed(tmp_path / "run", undisturbed, moments) >= 3  # the last may come when all is done
    assert_same_run(tmp_path / "run", undisturbed.out)


def test_stopped_in_evaluations(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The moments that the loop does not watch: after supervised training and after GRPO."""
    before, after = SFT_STEPS + 1, SFT_STEPS + GRPO_STEPS + 3
    moments = [
        Stop(s, milestone, share)
        for milestone in (before, after)
        for s, share in ((signal.SIGINT, 0.3), (signal.SIGKILL, 0.6))
    ]
    assert disturbed(tmp_path / "run", undisturbed, moments) >= 2
    assert_same_run(tmp_path / "run", undisturbed.out)


def test_killed_while_starting(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Kills before the first step, of the first start and of a resume, leave nothing in the way."""
    out, rng = tmp_path / "run", random.Random(3)
    for share in sorted(rng.random() for _ in range(3)):
        process = launch("resume", str(out)) if out.exists() else launch(*TRAIN, "--out", str(out))
        time.sleep(share * undisturbed.times[1])
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    process = Forked("resume", str(out)) if out.exists() else Forked(*TRAIN, "--out", str(out))
    _, stderr = process.communicate(timeout=2 * PATIENCE)
    assert process.returncode == 0, stderr
    assert_same_run(out, undisturbed.out)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_interrupted_while_importing(tmp_path: Path, undisturbed: Undisturbed, share: float) -> None:
    """Most of the time before the first step passes in imports; Ctrl-C is quiet there too."""
    process = launch(*TRAIN, "--out", str(tmp_path / "run"))
    time.sleep(share * undisturbed.times[1])
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    # Python ends by the signal itself if that arrived in code that an import runs by exec; a shell shows 130 for both.
    assert process.returncode in (130, -signal.SIGINT), stderr
    assert len(stderr.splitlines()) == 1 and stdout == ""
