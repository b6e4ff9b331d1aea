"""Checkpoints: a Hugging Face model folder plus the trainer's tensors, complete or not there at all.

The trainer's tensors lie in one safetensors file for each rank that wrote them. `torch.distributed.checkpoint` is not
used: its index is a pickle, which runs code when it is read, and its safetensors keep no offsets within flat buffers,
which is what ZeRO has.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from audiorl.models import AudioPolicy, load_weights
from audiorl.models.weights import naming_damage
from audiorl.run.records import Count, Manifest, read_record
from tokenizers_audio.loading import check_finite_weights

MANIFEST = "manifest.json"
META = "trainer.json"
STATE_FILES = "trainer*.safetensors"
Writers = Literal["trainer", "trainer-critic"]
"""Whose ranks write a part of the trainer's state: the trainers, or critics in processes of their own."""
PIECES = "audiorl_pieces"
"""The entry of a safetensors header that gives, of every key that is a piece: where it begins and the whole shape."""
Checksums = Mapping[str, tuple[int, int]]
"""Size and CRC-32 of files by their path in a checkpoint."""


class Restorable(Protocol):
    """A model that writes and reads its own folder: a value model, an audio tokenizer."""

    def save(self, folder: Path, /) -> None: ...

    def restore(self, folder: Path, /) -> None:
        """Copy the weights saved in `folder` into this model."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor], /) -> None:
        """Copy named weights into this model, in place."""
        ...


Saved = AudioPolicy | Restorable
"""What a phase trains and its checkpoints hold."""


def save_checkpoint(folder: Path, model: Saved, trainer: TrainerState, meta: Mapping[str, Any]) -> None:
    """Write a checkpoint from one process: `begin_checkpoint`, its files, `commit_checkpoint`."""
    partial = begin_checkpoint(folder)
    try:
        files = [*save_model(partial, model), save_state(partial, trainer, 0, 1)]
        commit_checkpoint(folder, checksums(partial, files), meta)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise naming_full_disk(error, folder) from error


def partial_folder(folder: Path) -> Path:
    """Return where the files of a checkpoint lie until it is complete."""
    return folder.with_name(f".{folder.name}.partial")


def begin_checkpoint(folder: Path) -> Path:
    """Make an empty `partial_folder`."""
    partial = partial_folder(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit_checkpoint(folder: Path, files: Checksums, meta: Mapping[str, Any]) -> None:
    """Make a checkpoint visible whose `files` are on the disk: a crash leaves the old state or the new one."""
    partial = partial_folder(folder)
    for name, (size, _) in files.items():
        file = partial / name
        if not file.is_file() or file.stat().st_size != size:
            raise OSError(f"{file}: a rank wrote it, but it is not here; every node must see the run folder")
    (partial / META).write_text(json.dumps(dict(meta), indent=1))
    (partial / MANIFEST).write_text(json.dumps({**files, META: _checksum(partial / META)}, indent=1, sort_keys=True))
    for path in (partial / META, partial / MANIFEST, partial):
        flush_to_disk(path)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    flush_to_disk(folder.parent)


def checksums(partial: Path, files: Iterable[Path]) -> Checksums:
    """Return size and CRC-32 of files of a checkpoint by their path there, once they are on the disk."""
    for file in (written := sorted(files)):
        flush_to_disk(file)
    return {str(file.relative_to(partial)): _checksum(file) for file in written}


def save_model(partial: Path, model: Saved) -> list[Path]:
    """Write a model's folder. Returns its files, not trainers' states and hidden ones, which other ranks write now."""
    model.save(partial)
    paths = (path for path in partial.rglob("[!.]*") if not path.match(STATE_FILES))
    return [path for path in paths if path.is_file()]


def _checksum(file: Path) -> tuple[int, int]:
    """Return size and CRC-32."""
    crc = 0
    with open(file, "rb") as stream:
        while chunk := stream.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return file.stat().st_size, crc


# -- parts of a trainer's tensors --------------------------------------------------------------------------------------
#
# Every form of sharding gives a rank a range of a tensor's numbers in row-major order: ZeRO of a flat buffer, FSDP of
# the first dimension, plain data parallelism any share. A state that some number of ranks wrote is read by any other.


@dataclass(frozen=True, eq=False)
class StatePiece:
    """The numbers of a trainer's tensor of `shape`, in row-major order from `start` on, as one rank holds them."""

    flat_N: Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.flat_N.numel()

    def read(self, start: int, stop: int) -> Tensor:
        """Return the numbers [start, stop) of the whole tensor, flat; they lie in this piece."""
        return self.flat_N[start - self.start : stop - self.start]


TrainerState = Mapping[str, Mapping[str, Tensor | StatePiece]]
"""What a trainer needs on top of its weights, by part (such as "optimizer") and name; a piece is this rank's own."""


def share_of(tensor: Tensor | StatePiece, rank: int, size: int) -> StatePiece | None:
    """Return what rank `rank` of `size` writes: its own piece, or its share of a tensor that all have, or None.

    The first rank writes tensors without numbers.
    """
    if isinstance(tensor, StatePiece):
        return tensor if tensor.flat_N.numel() or not prod(tensor.shape) else None
    numel = tensor.numel()
    start, stop = numel * rank // size, numel * (rank + 1) // size
    if start == stop and (numel or rank):
        return None
    return StatePiece(tensor.detach().reshape(-1)[start:stop], start, tuple(tensor.shape))


def even_range(numel: int, rank: int, size: int) -> tuple[int, int]:
    """Return the range of rank `rank` where all ranks but the last have equally many (ZeRO 3, FSDP's whole weights)."""
    each = -(-numel // size)
    return min(each * rank, numel), min(each * (rank + 1), numel)


def row_range(shape: Sequence[int], rank: int, size: int) -> tuple[int, int]:
    """Return the numbers of rank `rank` where the first dimension is divided, as FSDP does."""
    first, last = even_range(shape[0], rank, size)
    row = prod(shape[1:])
    return first * row, last * row


@dataclass(frozen=True)
class SavedRange:
    """A `StatePiece` in a file, read when it is asked for."""

    file: Path
    key: str
    start: int
    stop: int
    shape: tuple[int, ...]
    whole: bool

    def read(self, start: int, stop: int) -> Tensor:
        """Return the numbers [start, stop), flat. Raises ValueError for damage and for numbers that are not finite."""
        with naming_damage(self.file), safe_open(self.file, framework="pt") as stream:
            if self.whole:
                numbers: Tensor = stream.get_tensor(self.key).reshape(-1)[start:stop]
            else:
                numbers = stream.get_slice(self.key)[start - self.start : stop - self.start]
        check_finite_weights([(self.key, numbers)], self.file)
        return numbers


class Joined(Mapping[str, Tensor]):
    """Tensors by name, put together from ranges when they are asked for, in whole or in part."""

    def __init__(self, ranges: Mapping[str, Sequence[StatePiece | SavedRange]]):
        self._ranges = ranges

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.range(name, 0, prod(shape)).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._ranges[name][0].shape

    def range(self, name: str, start: int, stop: int) -> Tensor:
        """Return the numbers [start, stop) of a tensor, flat. Raises ValueError where some are missing."""
        ranges = sorted(self._ranges[name], key=lambda r: r.start)
        parts, at = [], start
        for each in ranges:
            if each.start <= at < min(stop, each.stop):
                parts.append(each.read(at, min(stop, each.stop)))
                at = min(stop, each.stop)
        if at < stop:
            raise ValueError(f"{name!r} is incomplete: numbers {at} to {stop} of {prod(self.shape(name))} are missing")
        if not parts:
            return ranges[0].read(ranges[0].start, ranges[0].start)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def read_range(tensors: Mapping[str, Tensor], name: str, start: int, stop: int) -> Tensor:
    """Return the numbers [start, stop) of a tensor in row-major order; of `Joined` nothing else is read."""
    if isinstance(tensors, Joined):
        return tensors.range(name, start, stop)
    return tensors[name].reshape(-1)[start:stop]


def read_shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Return the shape of a tensor; of `Joined` nothing is read."""
    return tensors.shape(name) if isinstance(tensors, Joined) else tuple(tensors[name].shape)


# -- the trainer's state ---------------------------------------------------------------------------------------------


def state_file(rank: int, size: int, writers: Writers = "trainer") -> str:
    """Return the name of the file of one rank."""
    return f"{writers}.safetensors" if size == 1 else f"{writers}-{rank + 1:05d}-of-{size:05d}.safetensors"


def save_state(partial: Path, trainer: TrainerState, rank: int, size: int, writers: Writers = "trainer") -> Path:
    """Write this rank's part of a state. The file's metadata give place and shape of tensors that are not whole."""
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, list[int]] = {}
    addresses: set[int] = set()
    for part, members in trainer.items():
        for name, tensor in members.items():
            if (piece := share_of(tensor, rank, size)) is not None:
                key, flat = f"{part}/{name}", piece.flat_N.detach().cpu().contiguous()
                if flat.data_ptr() in addresses:  # ZeRO counts the updates of all weights in one tensor
                    flat = flat.clone()
                addresses.add(flat.data_ptr())
                whole = flat.numel() == prod(piece.shape)
                tensors[key] = flat.view(piece.shape) if whole else flat
                if not whole:
                    pieces[key] = [piece.start, *piece.shape]
    file = partial / state_file(rank, size, writers)
    save_file(tensors, file, {PIECES: json.dumps(pieces)} if pieces else None)
    return file


def read_state(folder: Path) -> dict[str, Joined]:
    """Read the trainer's state of a checkpoint by part, whatever number of ranks wrote it. Tensors are read when used.

    Raises ValueError for a damaged file.
    """
    ranges: dict[str, dict[str, list[SavedRange]]] = {}
    files = sorted(folder.glob(STATE_FILES))
    if not files:
        raise ValueError(f"{folder}: {state_file(0, 1)} is missing; {_REMOVE}")
    for file in files:
        with naming_damage(file), safe_open(file, framework="pt") as stream:
            try:
                header = (stream.metadata() or {}).get(PIECES, "{}")
                pieces = msgspec.json.decode(header, type=dict[str, Annotated[list[Count], msgspec.Meta(min_length=1)]])
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ValueError(f"{file}: edited or damaged: its metadata {PIECES!r}: {error}") from error
            for key in stream.keys():  # noqa: SIM118
                shape = tuple(stream.get_slice(key).get_shape())
                start, *whole = pieces.get(key, [0, *shape])
                if key in pieces and (len(shape) != 1 or start + shape[0] > prod(whole)):
                    raise ValueError(f"{file}: edited or damaged: {key!r} does not fit into a tensor of {whole}")
                part, _, name = key.partition("/")
                saved = SavedRange(file, key, start, start + prod(shape), tuple(whole), key not in pieces)
                same_name = ranges.setdefault(part, {}).setdefault(name, [])
                if same_name and same_name[0].shape != saved.shape:
                    raise ValueError(f"{file}: edited or damaged: {key!r} is of another shape in another file")
                same_name.append(saved)
    return {part: Joined(members) for part, members in ranges.items()}


# -- reading -----------------------------------------------------------------------------------------------------------


def load_into(folder: Path, model: Saved, verified: bool = False) -> None:
    """Copy a checkpoint's weights into `model`. Raises ValueError for one of another architecture, or damaged."""
    if not verified:
        verify(folder)
    if isinstance(model, AudioPolicy):
        load_weights(folder, model)
    else:
        model.restore(folder)


def verify(folder: Path) -> None:
    """Raise ValueError naming the first file of a checkpoint that is not what was written, or was not written."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder}: {MANIFEST} is missing; the checkpoint is not complete")
    manifest = read_record(folder / MANIFEST, Manifest)
    for path in sorted(folder.rglob("*.safetensors")):
        if (name := str(path.relative_to(folder))) not in manifest:
            raise ValueError(f"{folder / MANIFEST}: edited or damaged: {name} is not in it; {_REMOVE}")
    for name, (size, crc) in manifest.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{folder}: {name} is missing; {_REMOVE}")
        if file.stat().st_size != size or _checksum(file)[1] != crc:
            raise ValueError(f"{file}: damaged, it is not what was written; {_REMOVE}")


_REMOVE = "copy it again, or remove the checkpoint's folder to go on from the one before it"


def naming_full_disk(error: Exception, folder: Path) -> Exception:
    """Return the error, or where a disk, quota or file size limit is exhausted one that says so."""
    match = re.search(r"\(os error (\d+)\)", str(error))  # Rust libraries have exceptions of their own
    code = int(match[1]) if match else getattr(error, "errno", None)
    if code not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return error
    message = f"disk full while saving {folder}; free space and resume from the checkpoint before it"
    return OSError(errno.ENOSPC, message)


def flush_to_disk(path: Path) -> None:
    """Return when what was written to a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
