"""One rank's part in checkpoints: a copy in CPU memory, written by a thread while training goes on.

The first rank writes the model's folder, every rank its part of the trainer's state. No tensor goes through the driver,
which gets sizes and checksums of the files and then makes the checkpoint visible (`phase.checkpoint`).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from audiorl.config.distributed import current
from audiorl.distributed.local import changes_worker, replaces_worker
from audiorl.distributed.world import World
from audiorl.models import AudioPolicy
from audiorl.models.value import ValueModel
from audiorl.run.checkpoint import (
    Checksums,
    Saved,
    Writers,
    checksums,
    load_verified,
    naming_full_disk,
    read_state,
    save_model,
    save_state,
)
from audiorl.run.pieces import Piece, TrainerState, share_of

Pieces = Mapping[str, Mapping[str, Piece]]


class CheckpointWriter:
    """Writes this rank's files, one checkpoint at a time. Made before the optimizer, which may shard `model`.

    Of critics in processes of their own only the state is written: `model`, their trunk, is a part of it.
    """

    def __init__(self, model: Saved, world: World | None = None, writers: Writers = "trainer"):
        self._world = world or World()
        self._model = model
        self._writers: Writers = writers
        self._saves_model = writers == "trainer" and self._world.rank == 0
        self._skeleton: _Skeleton | None = None
        self._background = _in_background(model)
        if self._background and self._saves_model and isinstance(model, (AudioPolicy, ValueModel)):
            self._skeleton = _Skeleton(model)
        self._thread: threading.Thread | None = None
        self._files: Checksums = {}
        self._error: Exception | None = None

    def begin(self, folder: str, state: TrainerState) -> None:
        """Write this rank's files into `folder`: a copy in the background, or before this returns; see `async_save`.

        Models other than policies and value models are small: they are written before this returns.
        """
        assert self._thread is None, "the checkpoint before this one is still being written"
        self._error, self._files = None, {}
        partial, rank, size = Path(folder), self._world.rank, self._world.size
        shares = {part: _shares(members, rank, size) for part, members in state.items()}
        if not self._background:
            self._write(partial, shares, {})
            return
        weights = self._skeleton.copy_weights() if self._skeleton else {}
        copies = {part: {n: _copied(p) for n, p in pieces.items()} for part, pieces in shares.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are complete
        if self._skeleton is None and self._saves_model:
            self._write(partial, copies, weights)
            return
        self._thread = threading.Thread(target=self._write, args=(partial, copies, weights), name="checkpoint")
        self._thread.start()

    def _write(self, partial: Path, state: Pieces, weights: Mapping[str, Tensor]) -> None:
        try:
            files = [save_state(partial, state, self._world.rank, self._world.size, self._writers)]
            if self._saves_model:
                files += self._skeleton.save(partial, weights) if self._skeleton else save_model(partial, self._model)
            self._files = checksums(partial, files)
        except Exception as error:
            self._error = naming_full_disk(error, partial)

    def files(self, wait: bool) -> Checksums | None:
        """What `begin` wrote, once it is on the disk; None while it is not. Raises what stopped the writing."""
        if self._thread is not None:
            self._thread.join(None if wait else 0)
            if self._thread.is_alive():
                return None
            self._thread = None
        if self._error is not None:
            raise self._error
        return self._files

    def read_model(self, folder: Path) -> None:
        """The weights of a checkpoint into the model, where the model is written, too."""
        if self._writers == "trainer":
            load_verified(folder, self._model)


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
        return self._writer.files(wait)

    @replaces_worker
    def resume(self, where: str) -> None:
        """Continue from a checkpoint's folder, weights and all."""
        self._writer.read_model(Path(where))
        self.load(read_state(Path(where)), where)


def _in_background(model: Saved) -> bool:
    option = current().async_save
    if option != "auto":
        return option == "on"
    if not isinstance(model, (AudioPolicy, ValueModel)):
        return False
    return (model.trunk if isinstance(model, ValueModel) else model).device.type != "cpu"


def _shares(members: Mapping[str, Tensor | Piece], rank: int, size: int) -> dict[str, Piece]:
    return {name: piece for name, tensor in members.items() if (piece := share_of(tensor, rank, size)) is not None}


def _copied(piece: Piece) -> Piece:
    return Piece(_cpu_copy(piece.flat_N), piece.start, piece.shape)


def _cpu_copy(tensor: Tensor) -> Tensor:
    """A copy in CPU memory; of a tensor on a GPU in pinned memory, complete after a synchronization."""
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
        adapter_alone = policy.adapter is not None  # nothing frozen is saved
        self._names = [n for n, p in named.items() if p.requires_grad or (sharded and not adapter_alone)]
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
        """Of the model as it is now."""
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
