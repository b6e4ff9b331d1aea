"""Partial rollouts: answers that a later step continues where the earlier one stopped.

With `GenerationConfig.partial_tokens` an answer samples at most so many tokens in one step (Kimi k1.5, arXiv
2501.12599, section 2.6). A group with an answer that has not ended waits for the next step, which samples the rest with
its own weights. Tokens keep the log-probs and the version of the weights that sampled them; `tis_cap` corrects each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from audiorl.config import RLConfig
from audiorl.models import AudioPolicy
from audiorl.protocols import Request
from audiorl.rollout.hf import AnswerState, build_rollout, token_versions
from audiorl.rollout.samplers import SegmentBuffer
from audiorl.types import Rollout, Sample, Segment

FIELDS = ("sample", "seed", "group_id", "rollouts")
ROLLOUT_FIELDS = ("index", "ids", "logprobs", "stop_reason", "version", "versions")


@dataclass(frozen=True)
class UnfinishedGroup:
    """A group that waits for its paused answers."""

    request: Request
    """As it was first asked."""
    rollouts: Sequence[Rollout]
    """All answers of the group: those that have ended, and the paused ones."""

    def continuation(self, token_limit: int | None) -> Request:
        """The request that goes on with the paused answers."""
        paused = tuple(r for r in self.rollouts if is_paused(r))
        return replace(self.request, n=len(paused), token_limit=token_limit, paused=paused)

    def with_continued(self, continued: Sequence[Rollout]) -> UnfinishedGroup:
        """Return the group with the answers to `continuation` in place of the paused ones."""
        by_index = {r.index: r for r in continued}
        return replace(self, rollouts=[by_index.get(r.index, r) for r in self.rollouts])

    @property
    def has_ended(self) -> bool:
        return not any(map(is_paused, self.rollouts))


def is_paused(rollout: Rollout) -> bool:
    return rollout.segments[-1].stop_reason == "paused"


def check_can_pause(policy: AudioPolicy, samples: Sequence[Sample], config: RLConfig) -> None:
    """Raise ValueError where `partial_tokens` is set for anything but answers of text."""
    if config.generation.partial_tokens is None:
        return
    if policy.speech is not None:
        raise ValueError("partial_tokens: answers of a model that speaks cannot be paused; leave the option out")
    stream = next((s for s in samples if s.turns), None)
    if stream is not None:
        raise ValueError(f"partial_tokens: sample {stream.id!r} is a stream, whose turns are short; leave it out")


def partial_metrics(rollouts: Sequence[Rollout], waiting: Sequence[UnfinishedGroup], step: int) -> dict[str, float]:
    """`rollout/partial`: the share of the trained answers that were paused before; `rollout/partial_tokens`: the share
    of their tokens that older weights than the last ones sampled; `rollout/paused`: answers that wait for the next
    step; `rollout/staleness_max`: of any token."""
    segments = [r.segments[-1] for r in rollouts]
    versions = [token_versions(s) for s in segments if len(s.ids)]
    older = sum(int((v < v[-1]).sum()) for v in versions)
    return {
        "rollout/partial": sum(s.policy_versions is not None for s in segments) / max(len(segments), 1),
        "rollout/partial_tokens": older / max(sum(map(len, versions)), 1),
        "rollout/paused": float(sum(is_paused(r) for group in waiting for r in group.rollouts)),
        "rollout/staleness_max": float(max((step - int(v.min()) for v in versions), default=0)),
    }


# -- in the run folder -------------------------------------------------------------------------------------------------


def unfinished_file(checkpoints: Path, step: int) -> Path:
    """Return where the groups lie that wait after `step` steps; `checkpoints`: the folder of the phase's
    checkpoints."""
    return checkpoints / "unfinished" / f"step_{step:06d}.jsonl"


def save_unfinished(path: Path, groups: Sequence[UnfinishedGroup]) -> None:
    """Write the groups, a line each. Files whose checkpoint has been removed are removed too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for older in path.parent.glob("step_*.jsonl"):
        if not (path.parent.parent / older.stem).is_dir():
            older.unlink()
    new = path.with_suffix(".tmp")
    with new.open("w", encoding="utf-8") as file:
        for group in groups:
            file.write(json.dumps(_as_row(group)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def load_unfinished(path: Path, policy: AudioPolicy, samples: Sequence[Sample]) -> list[UnfinishedGroup]:
    """Return the groups of a file. Raises ValueError that names file, line and field."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: it holds the answers that wait; start the run again")
    by_id = {s.id: s for s in samples}
    groups = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            groups.append(_group(json.loads(line), policy, by_id))
        except (ValueError, KeyError, TypeError) as error:
            reason = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}, line {number}: {reason}") from error
    return groups


def _as_row(group: UnfinishedGroup) -> dict[str, Any]:
    request = group.request
    rollouts = [
        dict(
            zip(
                ROLLOUT_FIELDS,
                (r.index, s.ids.tolist(), s.logprobs.tolist(), s.stop_reason, s.policy_version, _versions(s)),
                strict=True,
            )
        )
        for r in group.rollouts
        for s in r.segments
    ]
    return dict(zip(FIELDS, (request.sample.id, request.seed, request.group_id, rollouts), strict=True))


def _group(row: Mapping[str, Any], policy: AudioPolicy, samples: Mapping[str, Sample]) -> UnfinishedGroup:
    name, seed, group_id, answers = (row[field] for field in FIELDS)
    if name not in samples:
        raise ValueError(f"sample {name!r} is not in the data; resume with the data that the run began with")
    request = Request(samples[name], len(answers), seed=seed, group_id=group_id)
    prompt = policy.prompt(samples[name])
    rollouts = []
    for answer in answers:
        index, ids, logprobs, reason, version, versions = (answer[field] for field in ROLLOUT_FIELDS)
        if not len(ids) == len(logprobs) == len(versions or ids):
            raise ValueError(f"answer {index}: ids, logprobs and versions are not equally many")
        answer = AnswerState(request, index, prompt)
        rollout = build_rollout(policy, answer, SegmentBuffer(ids, logprobs), reason, version)
        if versions is not None:
            segment = replace(rollout.segments[0], policy_versions=torch.tensor(versions))
            rollout = replace(rollout, segments=(segment,))
        rollouts.append(rollout)
    return UnfinishedGroup(request, rollouts)


def _versions(segment: Segment) -> list[int] | None:
    return None if segment.policy_versions is None else segment.policy_versions.tolist()
