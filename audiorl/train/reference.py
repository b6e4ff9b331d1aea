"""The reference's log-probs of answers, computed once and kept in the run folder.

The policy before its first update is the reference; every trainer goes through a part of the answers. What is computed
is on disk every minute, so an interrupted pass goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from audiorl.errors import Interrupted
from audiorl.models.examples import Example
from audiorl.models.loading import read_tensors
from audiorl.run.checkpoint import flush_to_disk
from audiorl.run.folder import Run
from audiorl.run.progress import Progress
from audiorl.runtime.local import Group

CHUNK = 32
"""Groups that a trainer goes through at a time."""
SAVE_SECONDS = 60.0


def reference_logprobs(
    trainers: Group, groups: Sequence[tuple[Example, ...]], run: Run, phase: str, wanted: Sequence[int]
) -> list[tuple[Tensor, ...]]:
    """Per group, one tensor [tokens] for each of its answers, which share a prompt; empty ones outside `wanted`.

    `trainers` have made no update yet, or what is asked for is on disk; their `logprobs` takes groups.
    """
    path = run.dir / "checkpoints" / phase / "reference.safetensors"
    known = read_tensors(path) if path.exists() else {}
    digest = _digest(groups)
    if known and not torch.equal(known.pop("items", torch.empty(0)), digest):
        raise ValueError(f"{path}: holds the log-probs of other answers; the data has changed since, start a new run")
    left = [i for i in wanted if f"{i}/0" not in known]
    if left and run.has_checkpoint(phase):
        raise ValueError(f"{path}: log-probs of item {left[0]} are missing although training has begun; start again")
    saved, size = time.monotonic(), trainers.size
    with run.interruptible(), Progress(f"{phase} reference", len(wanted), len(wanted) - len(left)) as progress:
        for start in range(0, len(left), CHUNK * size):
            parts = [left[start : start + CHUNK * size][r::size] for r in range(size)]
            answers = trainers.each("logprobs", [[groups[i] for i in part] for part in parts])
            for part, found in zip(parts, answers, strict=True):
                known |= {
                    f"{i}/{k}": each for i, group in zip(part, found, strict=True) for k, each in enumerate(group)
                }
            if run.asked_to_stop or time.monotonic() - saved > SAVE_SECONDS:
                _write(path, known | {"items": digest})
                saved = time.monotonic()
            if run.asked_to_stop:
                raise Interrupted(f"stopped before {phase} step 1; continue with 'audiorl resume {run.dir}'")
            progress.update(len(wanted) - len(left) + start + sum(map(len, parts)), {})
    if left:
        _write(path, known | {"items": digest})
    empty = torch.empty(0)
    return [tuple(known.get(f"{i}/{k}", empty) for k in range(len(group))) for i, group in enumerate(groups)]


def _digest(groups: Sequence[tuple[Example, ...]]) -> Tensor:
    """What tells these prompts and answers from others, [32] uint8."""
    known = sha256()
    for group in groups:
        for e in group:
            known.update(f"{e.sample.id}\0{e.target}\0".encode())
    return torch.tensor(list(known.digest()), dtype=torch.uint8)


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    save_file(tensors, partial)
    flush_to_disk(partial)
    partial.replace(path)
