"""Checkpoints in pieces and in the background: what any number of ranks wrote any other reads, and a crash at any
moment leaves the state before or the state after."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from audiorl.config import LoraConfig, ModelConfig, OptimConfig
from audiorl.config.distributed import RuntimeConfig, set_current
from audiorl.config.recipe import RecipeConfig
from audiorl.distributed.local import LocalGroup, World
from audiorl.errors import Interrupted
from audiorl.models import AudioPolicy
from audiorl.models.value import ValueModel
from audiorl.run import checkpoint as checkpoints
from audiorl.run import saving
from audiorl.run.checkpoint import (
    PIECES,
    StatePiece,
    partial_folder,
    read_range,
    read_state,
    save_state,
    state_file,
)
from audiorl.run.folder import Run
from audiorl.run.saving import CheckpointWriter, checkpoint, completing_saves, finish_save, restore
from tests.conftest import make_omni, make_whisper
from tests.support.checkpoints import load_checkpoint


def moments() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"exp_avg.a": (7, 3), "exp_avg.b": (1,), "exp_avg.c": (2, 2, 5), "master.c": (2, 2, 5)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} | {
        "step.a": torch.tensor(3.0),
        "updates": torch.tensor(3),
    }


def by_rows(tensor: Tensor, rank: int, size: int) -> StatePiece:
    """As FSDP divides: the first dimension in chunks of one size."""
    rows = -(-len(tensor) // size)
    start = min(rows * rank, len(tensor)) * (tensor.numel() // len(tensor))
    return StatePiece(tensor[rows * rank : rows * (rank + 1)].reshape(-1), start, tuple(tensor.shape))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_what_some_ranks_wrote_is_read_whole_and_in_any_range(size: int, tmp_path: Path) -> None:
    whole = moments()
    for rank in range(size):
        sharded = {n: by_rows(t, rank, size) if t.dim() else t for n, t in whole.items()}
        save_state(tmp_path, {"optimizer": sharded, "ema": {"a": whole["exp_avg.a"].clone()}}, rank, size)
    state = read_state(tmp_path)
    assert state["optimizer"].keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(state["optimizer"][name], tensor), name
        for start in range(tensor.numel()):
            for stop in range(start, tensor.numel() + 1):
                numbers = read_range(state["optimizer"], name, start, stop)
                assert torch.equal(numbers, tensor.reshape(-1)[start:stop])
    assert torch.equal(state["ema"]["a"], whole["exp_avg.a"])


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ('{"optimizer/a": [0, 9]}', "numbers 4 to 9 of 9 are missing"),
        ('{"optimizer/a": [6, 9]}', "does not fit into a tensor of"),
        ('{"optimizer/a": [-1, 9]}', "edited or damaged"),
        ('{"optimizer/a": []}', "edited or damaged"),
        ('["optimizer/a"]', "edited or damaged"),
        ("{", "edited or damaged"),
    ],
)
def test_edited_pieces_are_refused(pieces: str, message: str, tmp_path: Path) -> None:
    save_file({"optimizer/a": torch.zeros(4)}, tmp_path / state_file(0, 2), {PIECES: pieces})
    with pytest.raises(ValueError, match=message):
        read_state(tmp_path)["optimizer"]["a"]


def test_numbers_that_are_not_finite_are_refused_where_they_are_read(tmp_path: Path) -> None:
    save_state(tmp_path, {"optimizer": {"a": torch.tensor([1.0, float("nan"), 2.0])}}, 0, 2)
    save_state(tmp_path, {"optimizer": {"a": torch.tensor([1.0, float("nan"), 2.0])}}, 1, 2)
    state = read_state(tmp_path)["optimizer"]
    assert float(read_range(state, "a", 0, 1)) == 1
    with pytest.raises(ValueError, match=r"trainer-00002-of-00002.*not finite"):
        state["a"]


# -- in the background -------------------------------------------------------------------------------------------------


def value_model() -> ValueModel:
    return ValueModel(make_omni(), spread=0.1)


def further_stage() -> AudioPolicy:
    """A policy whose projector was trained beside its adapter, and is frozen now."""
    policy = make_omni(ModelConfig(lora=LoraConfig(rank=2), audio="projector"))
    policy.beside_adapter = frozenset(n for n in policy.trainable() if ".lora_" not in n)
    for module in policy.backbone.projector(policy.model):
        module.requires_grad_(False)
    return policy


MODELS: dict[str, Callable[[], AudioPolicy | ValueModel]] = {
    "omni": make_omni,
    "adapter": lambda: make_omni(ModelConfig(lora=LoraConfig(rank=2), audio="projector")),
    "further stage": further_stage,
    "whisper": make_whisper,
    "value model": value_model,
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.usefixtures("own_runtime")
def test_a_copy_is_written_while_the_weights_change(kind: str, sharded: bool, tmp_path: Path) -> None:
    """With sharded layers frozen weights are copied too, because updates free them."""
    set_current(RuntimeConfig(fsdp=sharded, async_save="on"))
    model = MODELS[kind]()
    before, at_once = tmp_path / "before", tmp_path / "at_once"
    before.mkdir()
    at_once.mkdir()
    model.save(before)
    writer = CheckpointWriter(model)
    counted = sum(p.numel() for p in model.trainable().values())
    writer.begin(str(at_once), {"optimizer": {"a": torch.arange(3.0)}})
    with torch.no_grad():
        for p in model.trainable().values():
            p.add_(1)
    files = writer.files(wait=True)
    assert files is not None and counted
    expected = {str(f.relative_to(before)) for f in before.rglob("*") if f.is_file()}
    assert set(files) == expected | {"trainer.safetensors"}
    for name in expected:
        if name.endswith(".safetensors"):
            one, other = load_file(before / name), load_file(at_once / name)
            assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


class Numbers:
    """A model of three numbers."""

    def __init__(self) -> None:
        self.numbers = torch.zeros(3)

    def save(self, folder: Path) -> None:
        save_file({"numbers": self.numbers}, folder / "model.safetensors")

    def restore(self, folder: Path) -> None:
        self.numbers = load_file(folder / "model.safetensors")["numbers"]

    def load_weights(self, weights: Any) -> None:
        self.numbers = weights["numbers"]


class Counter:
    """A worker that adds one to its model and to its state at every step."""

    def __init__(self) -> None:
        self.model = Numbers()
        self.steps = torch.zeros(2)
        self.writer = CheckpointWriter(self.model, World())

    def step(self) -> None:
        self.model.numbers = self.model.numbers + 1
        self.steps += 1

    def begin_save(self, folder: str) -> None:
        self.writer.begin(folder, {"progress": {"steps": self.steps}})

    def saved_files(self, wait: bool) -> Any:
        return self.writer.files(wait)

    def resume(self, where: str) -> None:
        self.model.restore(Path(where))
        self.steps = read_state(Path(where))["progress"]["steps"].clone()


def run_steps(folder: Path, steps: int, every: int = 1, trainers: LocalGroup | None = None) -> Counter:
    """As the training loops do."""
    trainers = trainers or LocalGroup([Counter()])
    worker: Counter = trainers.workers[0]
    with Run.open(folder) as run, run.interruptible(), completing_saves(run, trainers):
        for done in range(restore(run, "sft", trainers) + 1, steps + 1):
            worker.step()
            run.log("sft", done, {"loss": 1.0 / done})
            checkpoint(run, "sft", done, steps, every, trainers)
    return worker


def state_of(folder: Path) -> int:
    """The step that a new process would go on from; its files agree with it."""
    run = Run.open(folder)
    worker = Counter()
    step = restore(run, "sft", LocalGroup([worker]))
    assert worker.steps.tolist() == [step] * 2 and worker.model.numbers.tolist() == [step] * 3
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, step + 1))
    run.close()
    return step


POINTS = ("flush_to_disk", "save_state", "save_model", "rename", "write_json", "commit_checkpoint")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are cheap to make")
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3, 5])
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_moment_leaves_the_state_before_or_after(
    point: str, number: int, after: bool, tmp_path: Path
) -> None:
    """kill -9 before or after the Nth call of each function that writes, in a process that saves after every step."""
    folder = tmp_path / "run"
    Run.create(folder, "sft", [], {"a": 1}).close()
    run_steps(folder, 2)
    assert state_of(folder) == 2
    child = os.fork()
    if child == 0:
        kill_in(point, number, after)
        run_steps(folder, 6)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert died or os.waitstatus_to_exitcode(status) == 0
    reached = state_of(folder)
    assert 2 <= reached <= 6 and (died or reached == 6)
    assert died or number == 5, "there are four saves"
    assert run_steps(folder, 6).steps.tolist() == [6, 6], "it goes on"
    assert state_of(folder) == 6


def kill_in(point: str, number: int, after: bool) -> None:
    calls = [0]

    def killing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kw: Any) -> Any:
            calls[0] += 1
            if calls[0] == number and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            out = function(*args, **kw)
            if calls[0] == number and after:
                os.kill(os.getpid(), signal.SIGKILL)
            return out

        return call

    if point == "rename":
        Path.rename = killing(Path.rename)  # type: ignore[method-assign]
        return
    from audiorl.run import folder

    for module in (checkpoints, saving, folder):
        if hasattr(module, point):
            setattr(module, point, killing(getattr(module, point)))


@pytest.mark.usefixtures("own_runtime")
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of step 1 becomes visible once its files are complete, and not before; step 2 is not in it."""
    set_current(RuntimeConfig(async_save="on"))
    Run.create(tmp_path / "run", "sft", [], {"a": 1}).close()
    run = Run.open(tmp_path / "run")
    model = make_omni()
    writer = CheckpointWriter(model)
    go = threading.Event()
    write = saving.checksums
    monkeypatch.setattr(saving, "checksums", lambda *args: go.wait(30) and write(*args))

    class Worker:
        def begin_save(self, folder: str) -> None:
            writer.begin(folder, {"progress": {"steps": torch.tensor(1)}})

        def saved_files(self, wait: bool) -> Any:
            return writer.files(wait)

    trainers = LocalGroup([Worker()])
    run.log("sft", 1, {"loss": 1.0})
    checkpoint(run, "sft", 1, 9, 1, trainers)
    assert run.is_saving and not run.has_checkpoint("sft")
    run.log("sft", 2, {"loss": 0.5})
    checkpoint(run, "sft", 2, 9, 9, trainers)
    assert run.is_saving and not run.has_checkpoint("sft"), "step 2 is over and it is still being written"
    go.set()
    finish_save(run, trainers)
    assert not run.is_saving
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert state["seq"] == 1, "a resumed run repeats step 2"
    trainer, meta = load_checkpoint(run.checkpoint("sft"), make_omni())
    assert meta.step == 1 and int(trainer["progress"]["steps"]) == 1


def test_on_a_cpu_training_waits_for_the_files(tmp_path: Path) -> None:
    writer = CheckpointWriter(make_omni())
    writer.begin(str(tmp_path), {"progress": {"steps": torch.tensor(1)}})
    assert writer.files(wait=False) and (tmp_path / "trainer.safetensors").is_file()


def test_the_file_that_another_rank_is_writing_is_not_taken_for_the_models(tmp_path: Path) -> None:
    # safetensors writes a hidden file and renames it
    (tmp_path / ".tmpABC").touch()
    writer = CheckpointWriter(make_omni(), World(rank=0, size=2))
    writer.begin(str(tmp_path), {"progress": {"steps": torch.tensor(1)}})
    files = writer.files(wait=True)
    assert files and "model.safetensors" in files and ".tmpABC" not in files


def test_what_stops_the_writing_is_raised_and_the_state_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    Run.create(folder, "sft", [], {"a": 1}).close()
    run_steps(folder, 2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "save_state", full)
    with pytest.raises(OSError, match=r"disk full while saving .*step_000003"):
        run_steps(folder, 4)
    monkeypatch.undo()
    assert state_of(folder) == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("error", [FileExistsError, MemoryError])
def test_what_stops_the_begin_of_a_checkpoint_is_raised_and_the_state_before_stays(
    error: type[Exception], step: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    Run.create(folder, "sft", [], {"a": 1}).close()

    class Full(Counter):
        def begin_save(self, folder: str) -> None:
            if error is MemoryError and int(self.steps[0]) == step:
                raise MemoryError
            super().begin_save(folder)

    if error is FileExistsError:
        partial = partial_folder(folder / f"checkpoints/sft/step_{step:06d}")
        partial.parent.mkdir()
        partial.touch()
    with pytest.raises(error):
        run_steps(folder, 4, trainers=LocalGroup([Full()]))
    assert not any(f.is_dir() for f in (folder / "checkpoints/sft").glob(".*.partial"))
    assert state_of(folder) == step - 1


@pytest.mark.parametrize(("steps", "reached"), [(4, 2), (1, 1)])
def test_a_run_that_is_stopped_while_a_checkpoint_is_begun_names_the_step_that_was_saved(
    steps: int, reached: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    Run.create(folder, "sft", [], {"a": 1}).close()

    class Asked(Counter):
        """Asked to stop with the first checkpoint, whose files take until they are waited for."""

        def begin_save(self, folder: str) -> None:
            super().begin_save(folder)
            if self.steps[0] == 1:
                os.kill(os.getpid(), signal.SIGINT)

        def saved_files(self, wait: bool) -> Any:
            return super().saved_files(wait) if wait else None

    class Ranks(LocalGroup):
        answers_after_error = False  # as under torchrun

    with pytest.raises(Interrupted, match=f"stopped after sft step {reached};"):
        run_steps(folder, steps, trainers=Ranks([Asked()]))
    assert state_of(folder) == reached


def test_a_file_that_the_driver_cannot_see_is_an_error(tmp_path: Path) -> None:
    Run.create(tmp_path / "run", "sft", [], {"a": 1}).close()
    run = Run.open(tmp_path / "run")
    run.begin_save("sft", 1)
    with pytest.raises(OSError, match="every node must see the run folder"):
        run.end_save({"trainer-00002-of-00002.safetensors": (10, 1)})
    assert not run.has_checkpoint("sft")


def test_tensors_without_numbers_and_tensors_of_two_names_are_written(tmp_path: Path) -> None:
    updates = torch.tensor(3.0)
    state = {"empty": torch.zeros(0, 4), "none": torch.zeros(0), "step.a": updates, "step.b": updates}
    save_state(tmp_path, {"optimizer": state}, 0, 1)
    read = read_state(tmp_path)["optimizer"]
    assert read.keys() == state.keys() and all(torch.equal(read[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(("config", "kept"), [(OptimConfig(), [3, 4]), (RecipeConfig(keep_checkpoints=3), [2, 3, 4])])
def test_as_many_checkpoints_stay_as_the_recipe_keeps(config: Any, kept: list[int], tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", "kept", [], config) as run:
        for phase, first in (("sft", 0), ("long", 999_997)):  # the last are 1000000 and 1000001
            for step in range(first, first + 5):
                run.begin_save(phase, step)
                run.end_save({})
            folders = {f"step_{first + k:06d}" for k in kept}
            assert {f.name for f in (tmp_path / "run/checkpoints" / phase).iterdir()} == folders
        shutil.rmtree(run.checkpoint("long"))
        assert run.last_checkpoint("long")[0] == 1_000_000
