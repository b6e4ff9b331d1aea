"""The compute time of a phase, by which the supervised control is measured out."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch

from audiorl.config import SFTConfig
from audiorl.distributed.local import LocalGroup, cpu_seconds, gpu_seconds, gpu_work
from audiorl.run import progress
from audiorl.run.checkpoint import Checksums
from audiorl.run.folder import ComputeTime, Run
from audiorl.run.progress import StepClock
from audiorl.run.saving import CheckpointWriter
from audiorl.train.fit import fit
from tests.conftest import make_text


def new_run(folder: Path) -> Run:
    return Run.create(folder, "r.py", [], SFTConfig())


class Processes:
    """A group whose processes report these CPU seconds, one list a reading."""

    def __init__(self, *readings: list[float | None]):
        self.readings = list(readings)

    def cpu_seconds(self) -> list[float | None]:
        return self.readings.pop(0)


def test_sleep_takes_no_cpu_seconds_and_threads_do() -> None:
    clock = StepClock(LocalGroup([object()]))
    time.sleep(0.2)
    clock.lap("sleep")
    assert clock.seconds >= 0.2 and clock.cpu_seconds is not None and clock.cpu_seconds < 0.1
    before = time.process_time()
    while time.process_time() - before < 0.1:
        pass
    clock.lap("compute")
    assert clock.cpu_seconds >= 0.1 and set(clock.laps) == {"time/save", "time/sleep", "time/compute"}
    seconds, slept = clock.seconds, clock.laps["time/sleep"]
    clock.lap("hooks", counts=False)
    assert clock.seconds == seconds, "a held-out evaluation is no training"
    clock.divide("sleep", "nap", 0.15)
    assert clock.laps["time/nap"] == 0.15 and clock.laps["time/sleep"] == pytest.approx(slept - 0.15)
    assert clock.times()["time/step"] == pytest.approx(sum(clock.laps.values()))
    time.sleep(0.01)
    clock.begin()
    assert clock.seconds == 0 and clock.laps["time/save"] >= 0.01 and set(clock.laps) == {"time/save"}


def test_a_gpu_is_busy_between_the_events_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of this GPU ticks a millisecond with every event; blocks within a block are part of it."""
    ticks = iter(range(100))

    class Event:
        def __init__(self, enable_timing: bool):
            self.at = -1

        def record(self) -> None:
            self.at = next(ticks)

        def synchronize(self) -> None:
            assert self.at >= 0

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    assert gpu_seconds() is None
    with gpu_work():  # no GPU here
        pass
    assert gpu_seconds() is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for _ in range(3):
        with gpu_work(), gpu_work():
            next(ticks)
        next(ticks)
    with pytest.raises(ValueError, match="fails"), gpu_work():
        raise ValueError("fails")
    assert gpu_seconds() == pytest.approx(3 * 0.002) and gpu_seconds() is None


def test_processes_are_added_up_and_one_on_a_gpu_makes_the_sum_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*groups: Processes) -> float | None:
        clock = StepClock(*groups)
        clock.lap("step")
        return clock.cpu_seconds

    monkeypatch.setattr(progress, "cpu_seconds", lambda: 1.0)
    assert measured(Processes([10.0, 20.0], [11.0, 22.5]), Processes([0.0], [4.0])) == 7.5
    assert measured(Processes([10.0, 20.0], [1.0, 23.0])) == 3.0, "the first was replaced meanwhile"
    assert measured(Processes([10.0, 0.0], [11.0, None])) is None
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert cpu_seconds() is None and measured() is None


def test_a_phase_counts_cpu_seconds_unless_a_step_did_not(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    assert run.compute_time("rl") == ComputeTime(0.0, "wall")
    run.add_seconds("rl", 5.0, 2.0)
    run.add_seconds("rl", 5.0, 3.0)
    assert run.compute_time("rl") == ComputeTime(5.0, "cpu") and run.seconds("rl") == 10.0
    run.add_seconds("rl", 1.0, None)
    assert run.compute_time("rl") == ComputeTime(11.0, "wall")
    run.add_seconds("rl", 1.0, 1.0)
    assert run.compute_time("rl") == ComputeTime(12.0, "wall"), "what a GPU computed stays uncounted"


class Worker:
    """Each update sleeps 10 ms and computes as long as `cpu` says, in seconds."""

    def __init__(self, cpu: float):
        self.cpu, self.updates = cpu, 0
        self.writer = CheckpointWriter(make_text())

    def train(self, batch: list[int]) -> dict[str, float]:
        self.updates += 1
        time.sleep(0.01)
        began = time.process_time()
        while time.process_time() - began < self.cpu:
            pass
        return {}

    def begin_save(self, folder: str) -> None:
        self.writer.begin(folder, {"optimizer": {"updates": torch.zeros(1)}})

    def saved_files(self, wait: bool) -> Checksums | None:
        return self.writer.files(wait)

    def resume(self, where: str) -> None: ...

    def close(self) -> None: ...


def train(run: Run, limit: ComputeTime | None, steps: int = 50, cpu: float = 0.02) -> Worker:
    worker, config = Worker(cpu), SFTConfig(steps=steps, batch_size=1, save_every=3)
    with run:
        fit(LocalGroup([worker]), make_text(), [1, 2], run, config, phase="p", seed=0, limit=limit)
    return worker


def test_training_ends_by_the_unit_of_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = train(new_run(tmp_path / "cpu"), ComputeTime(0.09, "cpu"))
    assert 2 <= cpu.updates <= 5, "the first update that reaches the limit is the last"
    asleep = train(new_run(tmp_path / "asleep"), ComputeTime(0.09, "cpu"), steps=12, cpu=0.0)
    assert asleep.updates == 12, "waiting does not count"
    wall = train(new_run(tmp_path / "wall"), ComputeTime(0.055, "wall"), cpu=0.0)
    assert wall.updates <= 6
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    gpu = train(new_run(tmp_path / "gpu"), ComputeTime(0.055, "cpu"), cpu=0.0)
    assert gpu.updates <= 6, "CPU seconds do not show what a GPU computes"
    assert train(new_run(tmp_path / "none"), ComputeTime(0.0, "cpu")).updates == 0


def test_a_resumed_phase_has_what_is_left_of_its_limit(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    train(run, None, steps=3)
    state = json.loads((run.dir / "state.json").read_text())
    assert state["cpu_seconds"]["p"] == pytest.approx(run.compute_time("p").seconds)
    assert state["cpu_seconds"]["p"] >= 0.06
    (run.dir / "state.json").write_text(json.dumps(state | {"finished": {}, "cpu_seconds": {"p": 0.085}}))
    assert train(Run.open(run.dir), ComputeTime(0.1, "cpu")).updates == 1


def test_what_was_computed_after_the_last_checkpoint_is_counted_once(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.add_seconds("p", 2.0, 1.0)
    run.begin_save("p", 1)
    run.add_seconds("p", 2.0, 1.0)
    run.end_save({})
    assert run.compute_time("p") == ComputeTime(2.0, "cpu")
    run.close()
    assert Run.open(run.dir).compute_time("p") == ComputeTime(1.0, "cpu"), "a resumed run repeats the second step"


@pytest.mark.parametrize("cpu", [1.0, None])
def test_what_was_computed_after_a_checkpoint_that_is_gone_is_taken_back(cpu: float | None, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    for step in (1, 2):
        run.add_seconds("p", 2.0, cpu if step == 1 else None)
        run.begin_save("p", step)
        run.end_save({})
    shutil.rmtree(run.checkpoint("p"))
    run.close()
    for _ in range(2):  # state.json says so, too
        again = Run.open(run.dir)
        again.last_checkpoint("p")
        assert again.seconds("p") == 2.0
        assert again.compute_time("p") == (ComputeTime(2.0, "wall") if cpu is None else ComputeTime(1.0, "cpu"))
        again.close()
