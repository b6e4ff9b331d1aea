"""What every training loop does around a phase's checkpoints: restore the last one, save when due, stop when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from audiorl.distributed.local import Group, Groups
from audiorl.errors import Interrupted, RankError
from audiorl.run.checkpoint import Saved
from audiorl.run.folder import Run
from audiorl.run.saving import CheckpointedWorker


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
        trainers.all(CheckpointedWorker.begin_save, str(partial.resolve()))
        trainers.saving()
    if run.is_saving:
        finish_save(run, trainers, wait=last)
    if run.asked_to_stop:
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
    """Around a training loop: when it ends with an error, complete the checkpoint that is being written.

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
    """Give the driver's model the weights that the trainers have, where they are not the same."""
    if not trainers.shared:
        model.load_weights(trainers.first(CheckpointedWorker.weights))


def pull_last(run: Run, phase: str, model: Saved, trainers: Group) -> None:
    """As `pull` after the phase's last step, whose weights are in a checkpoint: they are read from there."""
    if not trainers.shared and run.has_checkpoint(phase):
        run.load_result(phase, model)
