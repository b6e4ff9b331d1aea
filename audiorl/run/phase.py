"""What every training loop does around a phase's checkpoints: restore the last one, save when due, stop when asked."""

from __future__ import annotations

from audiorl.errors import Interrupted
from audiorl.run.checkpoint import Saved
from audiorl.run.folder import Run
from audiorl.runtime.local import Group, LocalGroup


def restore(run: Run, phase: str, model: Saved, trainers: Group) -> int:
    """Load the phase's last checkpoint into model and trainers; returns the steps done."""
    start, state = run.restore(phase, model)
    if state is not None and isinstance(trainers, LocalGroup):
        trainers.all("load", state, str(run.checkpoint(phase)))
    elif state is not None:
        trainers.all("resume", str(run.checkpoint(phase).resolve()))
    return start


def checkpoint(run: Run, phase: str, done: int, steps: int, every: int, model: Saved, trainers: Group) -> None:
    """Save when due; when the run was asked to stop, save and leave."""
    if done % every == 0 or done == steps or run.asked_to_stop:
        pull(model, trainers)
        run.save(phase, done, model, trainers.first("state"))
        trainers.saved(str(run.checkpoint(phase).resolve()))
    if run.asked_to_stop:
        raise Interrupted(f"stopped after {phase} step {done}; continue with 'audiorl resume {run.dir}'")


def pull(model: Saved, trainers: Group) -> None:
    """Give the driver's model the weights that the trainers have, where they are not the same."""
    if not trainers.shared:
        model.load_weights(trainers.first("weights"))
