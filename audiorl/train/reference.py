"""The reference's log-probs of answers, computed once and saved in the run folder.

The policy before its first update is the reference; every trainer computes a part. Results are saved every minute, so
an interrupted pass continues where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from audiorl.distributed.local import Group
from audiorl.errors import Interrupted
from audiorl.models.examples import Example
from audiorl.models.weights import read_tensors
from audiorl.run.checkpoint import flush_to_disk
from audiorl.run.folder import Run
from audiorl.run.progress import Progress


class AnswerScorer(Protocol):
    """A worker that knows how probable its policy finds answers."""

    def logprobs(self, groups: Sequence[tuple[Example, ...]]) -> list[tuple[Tensor, ...]]:
        """Return the log-probs [tokens] of each group's answers, which share a prompt."""
        ...


CHUNK = 32
"""Groups that a trainer computes per call."""
SAVE_SECONDS = 60.0


def reference_logprobs(
    trainers: Group, groups: Sequence[tuple[Example, ...]], run: Run, phase: str, wanted: Sequence[int]
) -> list[tuple[Tensor, ...]]:
    """Per group, one tensor [tokens] for each of its answers, which share a prompt; empty ones outside `wanted`.

    `trainers` must not have made an update yet, unless everything in `wanted` is on disk. Their
    `logprobs` takes groups.
    """
    path = run.dir / "checkpoints" / phase / "reference.safetensors"
    logprobs = read_tensors(path) if path.exists() else {}
    digest = _digest(groups)
    if logprobs and not torch.equal(logprobs.pop("items", torch.empty(0)), digest):
        raise ValueError(f"{path}: holds the log-probs of other answers; the data has changed since, start a new run")
    missing = [i for i in wanted if f"{i}/0" not in logprobs]
    if missing and run.has_checkpoint(phase):
        raise ValueError(f"{path}: log-probs of item {missing[0]} are missing although training has begun; start again")
    saved, size = time.monotonic(), trainers.size
    with run.interruptible(), Progress(f"{phase} reference", len(wanted), len(wanted) - len(missing)) as progress:
        for start in range(0, len(missing), CHUNK * size):
            parts = [missing[start : start + CHUNK * size][r::size] for r in range(size)]
            answers = trainers.each(AnswerScorer.logprobs, [[groups[i] for i in part] for part in parts])
            for part, values in zip(parts, answers, strict=True):
                logprobs |= {
                    f"{i}/{k}": tensor for i, group in zip(part, values, strict=True) for k, tensor in enumerate(group)
                }
            if run.asked_to_stop or time.monotonic() - saved > SAVE_SECONDS:
                _write(path, logprobs | {"items": digest})
                saved = time.monotonic()
            if run.asked_to_stop:
                raise Interrupted(f"stopped before {phase} step 1; continue with 'audiorl resume {run.dir}'")
            progress.update(len(wanted) - len(missing) + start + sum(map(len, parts)), {})
    if missing:
        _write(path, logprobs | {"items": digest})
    empty = torch.empty(0)
    return [tuple(logprobs.get(f"{i}/{k}", empty) for k in range(len(group))) for i, group in enumerate(groups)]


def _digest(groups: Sequence[tuple[Example, ...]]) -> Tensor:
    """A hash of the prompts' ids and the answers, [32] uint8."""
    digest = sha256()
    for group in groups:
        for e in group:
            answer = "\0".join([e.target, *(clip.key for clip in e.speech)])
            digest.update(f"{e.sample.id}\0{answer}\0".encode())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    save_file(tensors, partial)
    flush_to_disk(partial)
    partial.replace(path)
