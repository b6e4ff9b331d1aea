"""Saving and resuming a phase: each rank's writer, and what every training loop does around its checkpoints.

The first rank writes the model's folder, every rank its part of the trainer's state, from a copy in CPU memory by a
thread while training goes on. No tensor goes through the driver, which gets sizes and checksums of the files and then
makes the checkpoint visible (`checkpoint`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from audiorl.config import ModelConfig
from audiorl.config.distributed import current
from audiorl.distributed.local import Group, Groups, World, changes_worker, replaces_worker
from audiorl.distributed.torchrun import local_device
from audiorl.errors import Interrupted, RankError
from audiorl.models import AudioPolicy, FlowPolicy, load_policy
from audiorl.models.export import codec_of
from audiorl.models.flow import load_flow
from audiorl.models.value import ValueModel, load_value_model
from audiorl.run.checkpoint import (
    Checksums,
    Saved,
    StatePiece,
    TrainerState,
    Writers,
    checksums,
    load_into,
    naming_full_disk,
    read_state,
    save_model,
    save_state,
    share_of,
)
from audiorl.run.folder import Run
from tokenizers_audio import AudioTokenizer
from tokenizers_audio import load as load_codec

M = TypeVar("M", AudioPolicy, FlowPolicy, ValueModel)


class CheckpointWriter:
    """Writes this rank's files, one checkpoint at a time. Made before the optimizer, which may shard `model`.

    Critics in processes of their own write only the state: `model`, their trunk, is a part of it.
    """

    def __init__(self, model: Saved, world: World | None = None, writers: Writers = "trainer"):
        self._world = world or World()
        self._model = model
        self._writers: Writers = writers
        self._saves_model = writers == "trainer" and self._world.rank == 0
        trunk = model.trunk if isinstance(model, ValueModel) else model
        on_gpu = isinstance(trunk, AudioPolicy) and trunk.device.type != "cpu"
        self._background = current().async_save == "on" or (current().async_save == "auto" and on_gpu)
        self._skeleton: _Skeleton | None = None
        if self._background and self._saves_model and isinstance(model, (AudioPolicy, ValueModel)):
            self._skeleton = _Skeleton(model)
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._files: Future[Checksums] = Future()

    def begin(self, folder: str, state: TrainerState) -> None:
        """Write this rank's files into `folder`: a copy in the background, or before this returns; see `async_save`.

        Models other than policies and value models are small: they are written before this returns.
        """
        if not self._background:
            self._write_now(Path(folder), state)
            return
        weights = self._skeleton.copy_weights() if self._skeleton else {}
        copies: dict[str, dict[str, StatePiece]] = {}
        for part, members in state.items():
            pieces = {name: share_of(tensor, self._world.rank, self._world.size) for name, tensor in members.items()}
            copies[part] = {n: replace(p, flat_N=_cpu_copy(p.flat_N)) for n, p in pieces.items() if p is not None}
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are complete
        if self._skeleton is None and self._saves_model:
            self._write_now(Path(folder), copies)
        else:
            self._files = self._executor.submit(self._write, Path(folder), copies, weights)

    def _write_now(self, partial: Path, state: TrainerState) -> None:
        self._files = Future()
        try:
            self._files.set_result(self._write(partial, state, {}))
        except Exception as error:
            self._files.set_exception(error)

    def _write(self, partial: Path, state: TrainerState, weights: Mapping[str, Tensor]) -> Checksums:
        try:
            files = [save_state(partial, state, self._world.rank, self._world.size, self._writers)]
            if self._saves_model:
                files += self._skeleton.save(partial, weights) if self._skeleton else save_model(partial, self._model)
            return checksums(partial, files)
        except Exception as error:
            raise naming_full_disk(error, partial) from error

    def files(self, wait: bool) -> Checksums | None:
        """Return what `begin` wrote, once it is on the disk; None while it is not. Raises what stopped the writing."""
        return self._files.result() if wait or self._files.done() else None

    def read_model(self, folder: Path) -> None:
        """Load the weights of a checkpoint into the model, if this writer writes the model."""
        if self._writers == "trainer":
            load_into(folder, self._model, verified=True)


class CheckpointedWorker:
    """A worker that writes and reads its rank's part of checkpoints.

    Its state is that of one optimizer unless it says otherwise. It makes `_writer` before the optimizer.
    """

    model: Any
    optimizer: Any
    _writer: CheckpointWriter

    def state(self) -> TrainerState:
        """Return what training needs besides the weights."""
        return {"optimizer": self.optimizer.state()}

    def weights(self) -> Mapping[str, Tensor]:
        """Return the trained weights by name."""
        weights: Mapping[str, Tensor] = self.model.weights()
        return weights

    def load(self, state: Mapping[str, Mapping[str, Tensor]], where: str) -> None:
        """Take over a `state` that was read from the checkpoint `where`."""
        self.optimizer.load(state["optimizer"], where)

    def close(self) -> None:
        """End after the last update."""
        self.optimizer.close()

    @changes_worker
    def begin_save(self, folder: str) -> None:
        """Write this rank's files of a checkpoint; see `CheckpointWriter`."""
        self._writer.begin(folder, self.state())

    def saved_files(self, wait: bool) -> Checksums | None:
        """Return this rank's files once they are on the disk; see `CheckpointWriter.files`."""
        return self._writer.files(wait)

    @replaces_worker
    def resume(self, where: str) -> None:
        """Continue from a checkpoint's folder, weights and all."""
        self._writer.read_model(Path(where))
        self.load(read_state(Path(where)), where)


# -- what a training loop does around a phase's checkpoints ------------------------------------------------------------


def restore(run: Run, phase: str, trainers: Group | Groups) -> int:
    """Load the phase's last checkpoint into the trainers, each from the disk; returns the steps done."""
    start, folder = run.last_checkpoint(phase)
    if folder is not None:
        trainers.all(CheckpointedWorker.resume, str(folder.resolve()))
    return start


def checkpoint(
    run: Run,
    phase: str,
    done: int,
    steps: int,
    every: int,
    trainers: Group | Groups,
    save_more: Callable[[Path], None] | None = None,
) -> None:
    """Save when due; when the run was asked to stop, save and leave.

    The trainers write while they train on (`CheckpointWriter`). The checkpoint becomes visible after the first step
    that finds it complete; before the next one, at the last step and before leaving it is waited for. `save_more` is
    called first, with the folder of the phase's checkpoints, to save what belongs to this one.
    """
    last = done == steps or run.asked_to_stop
    if done % every == 0 or last:
        finish_save(run, trainers)
        if save_more is not None:
            save_more(run.dir / "checkpoints" / phase)
        partial = run.begin_save(phase, done)
        try:
            trainers.all(CheckpointedWorker.begin_save, str(partial.resolve()))
        except BaseException:  # a rank that did not begin has nothing to wait for
            run.cancel_save()
            raise
        trainers.saving()
    if run.is_saving:
        finish_save(run, trainers, wait=last)
    if last and run.asked_to_stop:  # asked later than `last`: after the next step, which is saved then
        raise Interrupted(f"stopped after {phase} step {done}; continue with 'audiorl resume {run.dir}'")


def finish_save(run: Run, trainers: Group | Groups, wait: bool = True) -> None:
    """Make the checkpoint that is being written visible, if its files are complete or once they are (`wait`)."""
    if not run.is_saving:
        return
    parts = trainers.all(CheckpointedWorker.saved_files, wait)
    files = [part for part in parts if part is not None]
    if len(files) == len(parts):
        folder = run.end_save({name: checksum for part in files for name, checksum in part.items()})
        trainers.saved(str(folder.resolve()))


@contextmanager
def completing_saves(run: Run, trainers: Group | Groups) -> Iterator[None]:
    """Complete, when a training loop ends with an error, the checkpoint that is being written.

    Not when a rank failed, nor under torchrun, whose ranks may wait for each other in a collective: then the checkpoint
    before it remains.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, RankError) and trainers.answers_after_error:
            finish_save(run, trainers)
        raise


def pull(model: Saved, trainers: Group) -> None:
    """Give the driver's model the trainers' weights, where they are not the same."""
    if not trainers.shared:
        model.load_weights(trainers.first(CheckpointedWorker.weights))


def pull_last(run: Run, phase: str, model: Saved, trainers: Group) -> None:
    """Do as `pull` after the phase's last step, whose weights are in a checkpoint: they are read from there."""
    if not trainers.shared and run.has_checkpoint(phase):
        run.load_result(phase, model)


@dataclass(frozen=True)
class ModelFile(Generic[M]):
    """A policy or a value model in a folder, and how to hold it."""

    folder: str
    kind: type[M]
    config: ModelConfig
    codec: AudioTokenizer | None

    @classmethod
    def save(cls, run: Run, phase: str, name: str, model: M) -> ModelFile[M]:
        """Write checkpoints/PHASE/NAME of the run, unless it is there."""
        trunk = model.trunk if isinstance(model, ValueModel) else model
        config = replace(trunk.config, device=trunk.device.type)
        # The codec of a flow lies in the run; sent to other processes it would have to be pickled.
        codec = None if isinstance(trunk, FlowPolicy) else trunk.codec
        return cls(run.keep_model(phase, name, model), type(model), config, codec)

    def load(self) -> M:
        config = replace(self.config, device=local_device(self.config.device))
        if issubclass(self.kind, FlowPolicy):
            found = codec_of(self.folder)
            return cast(M, load_flow(self.folder, config, None if found is None else load_codec(found)))
        load: Any = load_value_model if issubclass(self.kind, ValueModel) else load_policy
        return cast(M, load(self.folder, config, self.codec))


# -- copies that are written while training goes on -------------------------------------------------------------------


def _cpu_copy(tensor: Tensor) -> Tensor:
    """Return a copy in CPU memory; of a tensor on a GPU in pinned memory, complete after a synchronization."""
    if tensor.device.type != "cuda":
        return tensor.detach().to("cpu", copy=True)
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach(), non_blocking=True)


class _Skeleton:
    """A model's structure, from which copied weights are saved while the model itself trains.

    Weights that no update changes are shared with the model, except where sharding frees them on the way.
    """

    def __init__(self, model: AudioPolicy | ValueModel):
        policy = model.trunk if isinstance(model, ValueModel) else model
        sharded = current().fsdp or current().zero == 3
        named = _named(model)
        self._model = model
        saved = named.keys() if policy.adapter is None else policy.beside_adapter  # of the frozen ones
        self._names = [n for n, p in named.items() if p.requires_grad or (sharded and n in saved)]
        hollow = list(named.values()) if sharded else [named[n] for n in self._names]
        trunk = policy.skeleton(hollow)
        self._copy: AudioPolicy | ValueModel = trunk
        modules = list(trunk.modules())
        if isinstance(model, ValueModel):
            self._copy = copy.deepcopy(model, {id(policy): trunk})
            modules += self._copy.modules()
        names = {id(p): name for name, p in _named(self._copy).items()}
        self._places = [
            (module, attribute, p, names[id(p)])
            for module in modules
            for attribute, p in module._parameters.items()
            if p is not None and names.get(id(p)) in set(self._names)
        ]

    def copy_weights(self) -> dict[str, Tensor]:
        """Copy the weights of the model as it is now."""
        named = _named(self._model)
        return {name: _cpu_copy(named[name]) for name in self._names}

    def save(self, partial: Path, weights: Mapping[str, Tensor]) -> list[Path]:
        """Write a model's folder with these weights. Returns its files."""
        trained = {name: p.requires_grad for _, _, p, name in self._places}
        filled = {name: nn.Parameter(tensor, trained[name]) for name, tensor in weights.items()}
        for module, attribute, _, name in self._places:
            module._parameters[attribute] = filled[name]
        try:
            return save_model(partial, self._copy)
        finally:
            for module, attribute, p, _ in self._places:
                module._parameters[attribute] = p


def _named(model: AudioPolicy | ValueModel) -> dict[str, nn.Parameter]:
    if isinstance(model, AudioPolicy):
        return model.parameters_by_name()
    head = {f"value_head.{name}": p for name, p in model.head.named_parameters()}
    return head | model.trunk.parameters_by_name()
