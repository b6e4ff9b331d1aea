"""Checkpoints: a Hugging Face model folder plus the trainer's tensors, whole or not there at all."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import save_file
from torch import Tensor

from audiorl.models import AudioPolicy, load_weights
from audiorl.models.loading import check_finite_weights, read_tensors
from audiorl.run.records import Manifest, TrainerMeta, read_record

MANIFEST = "manifest.json"
TrainerState = dict[str, dict[str, Tensor]]


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
    """Write to a temporary folder, flush to disk, rename: a crash at any moment leaves the old state or the new one."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        model.save(partial)
        flat = {
            f"{part}/{name}": t.detach().cpu().contiguous() for part, ts in trainer.items() for name, t in ts.items()
        }
        save_file(flat, partial / "trainer.safetensors")
        (partial / "trainer.json").write_text(json.dumps(dict(meta), indent=1))
        files = [file for file in sorted(partial.rglob("*")) if file.is_file()]
        checksums = {str(file.relative_to(partial)): [file.stat().st_size, _crc32(file)] for file in files}
        (partial / MANIFEST).write_text(json.dumps(checksums, indent=1))
        for file in [*files, partial / MANIFEST]:
            flush_to_disk(file)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if _no_room(error):
            raise OSError(
                errno.ENOSPC, f"disk full while saving {folder}; free space and resume from the checkpoint before it"
            ) from error
        raise
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    flush_to_disk(folder.parent)


def load_checkpoint(folder: Path, model: Saved) -> tuple[TrainerState, TrainerMeta]:
    """Copy a checkpoint's weights into `model`; returns the trainer's state and the metadata.

    Raises ValueError when the checkpoint is of another architecture, damaged or incomplete.
    """
    load_into(folder, model)
    trainer: TrainerState = {}
    tensors = read_tensors(folder / "trainer.safetensors")
    check_finite_weights(tensors.items(), folder / "trainer.safetensors")
    for name, tensor in tensors.items():
        part, _, rest = name.partition("/")
        trainer.setdefault(part, {})[rest] = tensor
    return trainer, read_record(folder / "trainer.json", TrainerMeta)


def load_into(folder: Path, model: Saved) -> None:
    """Copy a checkpoint's weights into `model`, by the same code that loads a model for use.

    Raises ValueError as `load_checkpoint` does.
    """
    verify(folder)
    if isinstance(model, AudioPolicy):
        load_weights(folder, model)
    else:
        model.restore(folder)


def verify(folder: Path) -> None:
    """Raises ValueError naming the first file of a checkpoint that is not what was written, or was not written."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder}: {MANIFEST} is missing; the checkpoint is not complete")
    manifest = read_record(folder / MANIFEST, Manifest)
    for file in sorted(folder.rglob("*.safetensors")):
        if str(file.relative_to(folder)) not in manifest:
            raise ValueError(
                f"{folder / MANIFEST}: edited or damaged: {file.relative_to(folder)} is not in it; {_REMOVE}"
            )
    for name, (size, crc) in manifest.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{folder}: {name} is missing; {_REMOVE}")
        if file.stat().st_size != size or _crc32(file) != crc:
            raise ValueError(f"{file}: damaged, it is not what was written; {_REMOVE}")


_REMOVE = "copy it again, or remove the checkpoint's folder to go on from the one before it"


def _crc32(file: Path) -> int:
    crc = 0
    with open(file, "rb") as stream:
        while chunk := stream.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _no_room(error: Exception) -> bool:
    """Whether a disk, quota or file size limit is exhausted; Rust libraries say so with exceptions of their own."""
    match = re.search(r"\(os error (\d+)\)", str(error))
    code = int(match[1]) if match else getattr(error, "errno", None)
    return code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def flush_to_disk(path: Path) -> None:
    """Return when what was written to a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
