"""Rollouts as JSON rows: what a run folder records and what replayed rewards, evaluations and reports read."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from audiorl.audio import AudioClip
from audiorl.types import Rollout, Sample, Score, Turn


def rollout_row(rollout: Rollout, step: int, advantage: float) -> dict[str, Any]:
    """A rollout as the JSON values of one line of rollouts/step_*.jsonl.

    It holds the sample, the segments with their times, every reward part, and the audio by path.
    """
    prompt = "\n".join(
        "".join(c if isinstance(c, str) else "[audio]" for c in m.content) for m in rollout.sample.messages
    )
    score = rollout.score
    return {
        "step": step,
        "group_id": rollout.group_id,
        "index": rollout.index,
        "sample": {
            "id": rollout.sample.id,
            "prompt": prompt,
            "references": list(rollout.sample.references),
            "choices": list(rollout.sample.choices),
            "task": rollout.sample.task,
            "metadata": {k: v for k, v in rollout.sample.metadata.items() if isinstance(v, str | int | float | bool)},
            "audio": [_clip_row(c) for c in _merged_clips(rollout.sample)],
        }
        | ({"turns": [_turn_row(t) for t in rollout.sample.turns]} if rollout.sample.turns else {}),
        "segments": [
            {
                "text": s.text,
                "stop_reason": s.stop_reason,
                "num_tokens": len(s.ids),
                "policy_version": s.policy_version,
                "source_time": s.source_time,
                "emit_time": s.emit_time,
            }
            for s in rollout.segments
        ],
        "text": rollout.text,
        "score": None if score is None else _score_row(score),
        "advantage": round(float(advantage), 6),
    }


def _score_row(score: Score) -> dict[str, Any]:
    row: dict[str, Any] = {"total": score.total, "parts": dict(score.parts)}
    if score.per_segment is not None:
        row["per_segment"] = list(score.per_segment)
    if score.segment_parts:
        named = score.segment_parts.items()
        row["segment_parts"] = {name: [None if math.isnan(x) else x for x in values] for name, values in named}
    return row


def _merged_clips(sample: Sample) -> list[AudioClip]:
    """The sample's clips; consecutive chunks of one recording are merged into one clip."""
    out: list[AudioClip] = []
    for clip in sample.audio:
        if out and _continues(out[-1], clip):
            assert clip.duration is not None
            out[-1] = replace(out[-1], duration=clip.start + clip.duration - out[-1].start)
        else:
            out.append(clip)
    return out


def _continues(before: AudioClip, clip: AudioClip) -> bool:
    if clip.path is None or clip.path != before.path or clip.duration is None or before.duration is None:
        return False
    return abs(before.start + before.duration - clip.start) < 1e-3


def _turn_row(turn: Turn) -> dict[str, Any]:
    return {name: getattr(turn, name) for name in ("end", "reference", "source", "reference_seconds")}


def _clip_row(clip: AudioClip) -> dict[str, Any]:
    path = None if clip.path is None else str(Path(clip.path).resolve())
    return {"path": path, "start": clip.start, "duration": clip.duration}
