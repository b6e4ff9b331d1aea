"""Checkpoints as training loops write and read them, in one call."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from audiorl.run.checkpoint import META, Saved, TrainerState, checksums, load_into, read_state, save_model, save_state
from audiorl.run.folder import Run
from audiorl.run.records import TrainerMeta, read_record


def save_run(run: Run, phase: str, step: int, model: Saved, trainer: TrainerState) -> None:
    """Write a checkpoint of a run from this process."""
    partial = run.begin_save(phase, step)
    run.end_save(checksums(partial, [*save_model(partial, model), save_state(partial, trainer, 0, 1)]))


def load_checkpoint(folder: Path, model: Saved) -> tuple[dict[str, dict[str, Tensor]], TrainerMeta]:
    """Copy a checkpoint's weights into `model`; returns the trainer's state and the metadata."""
    load_into(folder, model)
    trainer = {part: dict(tensors) for part, tensors in read_state(folder).items()}
    return trainer, read_record(folder / META, TrainerMeta)
