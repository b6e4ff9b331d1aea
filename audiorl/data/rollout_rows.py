"""A run's rollouts as JSON lines: rows that people and the report read, and that give back the whole rollout.

    {"step": 40, "group_id": "39/1", "index": 0, "text": "…", "advantage": 0.7,
     "score": {"total": 1.0, "parts": {"accuracy": 1.0}, "per_segment"?: […], …} or null,
     "sample": {"id", "prompt", "references", "choices", "task", "metadata", "audio": [{"path", "start", "duration"}],
                "messages", "turns": [{"audio", "end", "reference", "source", "reference_seconds", "speech"}]},
     "segments": [{"text", "stop_reason", "num_tokens", "policy_version", "source_time", "emit_time", "audio",
                   "prompt_ids", "ids", "logprobs", "codes", "prompt_codes", "code_mask",
                   "advantages"?, "entropies"?, "ratios"?}],
     "clips": [{"path", "start", "duration", "context", "sample_rate", "audio"}],
     "spoken_audio"?: {"path": "rollouts/step_000040/0000.wav"}}

The last three fields of a segment hold a 16-bit float a token for people (`audiorl.train.rl.token_record`); the
rollout that
is read back does not have them. Entries of `clips` are referred to by number. `sample.prompt` and `sample.audio` repeat
messages and turns for people. Paths of files that the run wrote are relative to the run folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audiorl.audio import AudioClip
from audiorl.data.clip_files import file_bytes, file_key
from audiorl.data.rows import BadRow, read_rows
from audiorl.data.schema import FieldError, check
from audiorl.data.schema.rollouts_01 import RecordedFile, RolloutRow01, SegmentRow01, TurnRow01
from audiorl.data.score_rows import read_score, score_row
from audiorl.data.serialization import NOT_SENT, VERSION, Reader, Writer
from audiorl.data.tensor_rows import tensor_row
from audiorl.types import Message, Rollout, Sample, Score, Segment, Turn

_HALF = np.dtype("<f2")
_SUFFIXES = {b"RIFF": ".wav", b"fLaC": ".flac", b"OggS": ".ogg"}
"""Of encoded audio, by its first bytes."""


def rollout_row(
    rollout: Rollout,
    step: int,
    advantage: float,
    run_folder: Path | None = None,
    numbers: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Any]:
    """A rollout as one JSON object. `numbers`: by name a number [L] of each token, observed ones included.

    Audio in memory is written to rollouts/audio/ in `run_folder`, once for equal audio (32-bit float WAV, 64 kB for a
    second at 16 kHz); without a folder it is left out. Values of the sample's metadata that JSON cannot hold are left
    out too.
    """

    def save(clip: AudioClip) -> str | None:
        if run_folder is None:
            return None
        content = file_bytes(clip)
        suffix = _SUFFIXES.get(content[:4], ".audio")
        path = Path("rollouts") / "audio" / f"{file_key(clip).partition('#')[0]}{suffix}"
        if not (run_folder / path).exists():
            (run_folder / path).parent.mkdir(parents=True, exist_ok=True)
            (run_folder / path).write_bytes(content)
        return str(path)

    metadata = {key: value for key, value in rollout.sample.metadata.items() if _is_serializable(value)}
    sample = replace(rollout.sample, metadata=metadata)
    writer = Writer("path", save, _as_parts_of_one_array(sample.turns))
    row = writer.rollout(replace(rollout, sample=sample))
    audio: list[dict[str, Any]] = []
    for clip in sample.audio:
        _append_or_extend(audio, writer.clips[writer.clip(clip)])
    prompt = "\n".join("".join(c if isinstance(c, str) else "[audio]" for c in m.content) for m in sample.messages)
    return {
        "step": step,
        **{name: row[name] for name in ("group_id", "index")},
        "sample": {**writer.samples[0], "prompt": prompt, "audio": audio},
        "segments": [
            {
                **segment,
                "num_tokens": len(s.ids),
                **{name: tensor_row(values[at], _HALF) for name, values in numbers.items()},
            }
            for segment, s, at in zip(row["segments"], rollout.segments, _sampled(rollout), strict=True)
        ],
        "clips": writer.clips,
        "text": rollout.text,
        "score": None if rollout.score is None else _score_row(rollout.score),
        "advantage": round(float(advantage), 6),
    }


def _sampled(rollout: Rollout) -> Iterator[slice]:
    """Where the sampled tokens of each segment stand in the rollout's L tokens."""
    start = 0
    for segment in rollout.segments:
        start += len(segment.prompt_ids)
        yield slice(start, start + len(segment.ids))
        start += len(segment.ids)


def read_rollouts(path: str | Path) -> list[Rollout]:
    """The rollouts of a file as a run writes it, with their recorded scores and `spoken_audio`.

    Rows of 0.1 are read as far as they go: their token ids are zeros (their number is right), there are no codes, and
    audio without a path is missing. Raises ValueError naming file, row and field.
    """
    path = Path(path)
    rollouts = []
    for row in read_rows(path):
        if isinstance(row, BadRow):
            raise ValueError(str(row))
        try:
            rollouts.append(rollout_from_row(row.data, path.resolve().parent.parent))
        except KeyError as missing:
            raise ValueError(f"{path}: row {row.number}: no field {missing}; is this a run's rollouts file?") from None
        except FieldError as error:
            raise ValueError(str(BadRow(row.file, row.number, error.field, error.message))) from error
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}: row {row.number}: not a rollout ({error})") from error
    if not rollouts:
        raise ValueError(f"{path}: no rollouts")
    return rollouts


def rollout_from_row(row: Mapping[str, Any], run_folder: Path) -> Rollout:
    """The rollout of one row. FieldError, KeyError, TypeError or ValueError for what is no row of rollouts."""
    spoken = row.get("spoken_audio", row.get("said"))  # "said" in rows of 0.1
    if "clips" in row:
        document = {"version": VERSION, "audio": [], "clips": row["clips"], "samples": [row["sample"]]}
        document["rollouts"] = [{**row, "sample": 0, "spoken_audio": None}]
        (rollout,) = Reader(document, None, run_folder).rollouts()
    else:
        rollout = _rollout_of_0_1(check(row, RolloutRow01))
    if not rollout.segments:
        raise FieldError("segments", "empty; a rollout has at least one segment")
    if spoken is not None:
        spoken = AudioClip(path=str(run_folder / check(spoken, RecordedFile, "spoken_audio").path))
    return replace(rollout, score=_score(row.get("score")), spoken_audio=spoken)


def _score_row(score: Score) -> dict[str, Any]:
    return {name: value for name, value in score_row(score).items() if name in ("total", "parts") or value}


def _score(row: Mapping[str, Any] | None) -> Score | None:
    if row is None:
        return None
    return read_score({"per_segment": None, "per_token": None, "segment_parts": {}, **row}, "score")


def _is_serializable(value: Any) -> bool:
    try:
        Writer("none").value(value, "")
    except ValueError:
        return False
    return True


def _append_or_extend(clips: list[dict[str, Any]], clip: Mapping[str, Any]) -> None:
    """Add a clip for people to hear; chunks of one recording that follow each other become one clip."""
    row = {name: clip[name] for name in ("path", "start", "duration")}
    last = clips[-1] if clips else row
    same_file = bool(clips and row["path"]) and row["path"] == last["path"]
    follows = same_file and None not in (row["duration"], last["duration"])
    if follows and abs(last["start"] + last["duration"] - row["start"]) < 1e-3:
        last["duration"] = row["start"] + row["duration"] - last["start"]
    else:
        clips.append(row)


def _as_parts_of_one_array(turns: Sequence[Turn]) -> dict[AudioClip, AudioClip]:
    """For a stream in memory, whose chunks are arrays of their own: each chunk as a part of the whole recording.

    So one file holds the stream. Empty where the chunks do not follow each other.
    """
    chunks = [turn.audio for turn in turns]
    rates = {chunk.sample_rate for chunk in chunks}
    if len(rates) != 1 or any(chunk.array is None or chunk.duration is None for chunk in chunks):
        return {}
    rate = rates.pop() or 1
    samples = [chunk.load(rate) for chunk in chunks]
    recording = np.concatenate(samples)
    parts: dict[AudioClip, AudioClip] = {}
    start = 0
    for chunk, own in zip(chunks, samples, strict=True):
        if round(chunk.context * rate) > start:
            return {}
        part = AudioClip(
            array=recording,
            sample_rate=rate,
            start=start / rate,
            duration=len(own) / rate,
            context=chunk.context,
        )
        if not np.array_equal(part.with_context().load(rate), chunk.with_context().load(rate)):
            return {}
        parts[chunk] = part
        start += len(own)
    return parts


# -- rows of 0.1 -------------------------------------------------------------------------------------------------------


def _rollout_of_0_1(row: RolloutRow01) -> Rollout:
    held = row.sample
    clips = [AudioClip(path=c.path, start=c.start, duration=c.duration) for c in held.audio if c.path]
    sample = Sample(
        id=str(held.id),
        messages=(Message("user", (*([] if held.turns else clips), held.prompt)),),
        references=tuple(held.references),
        choices=tuple(held.choices),
        task=held.task,
        metadata=held.metadata,
        turns=_turns_of_0_1(held.turns, clips[0] if clips else AudioClip(path=NOT_SENT)),
    )
    return Rollout(sample, tuple(map(_segment_of_0_1, row.segments)), str(row.group_id), row.index)


def _turns_of_0_1(rows: Sequence[TurnRow01], recording: AudioClip) -> tuple[Turn, ...]:
    """Turns of the recording between their ends."""
    turns = []
    start = 0.0
    for row in rows:
        audio = replace(recording, start=recording.start + start, duration=row.end - start)
        turns.append(Turn(audio, row.end, row.reference, row.source, row.reference_seconds))
        start = row.end
    return tuple(turns)


def _segment_of_0_1(row: SegmentRow01) -> Segment:
    return Segment(
        prompt_ids=torch.zeros(0, dtype=torch.long),
        ids=torch.zeros(row.num_tokens, dtype=torch.long),
        logprobs=torch.zeros(row.num_tokens),
        text=row.text,
        stop_reason=row.stop_reason,
        policy_version=row.policy_version,
        source_time=row.source_time,
        emit_time=row.emit_time,
    )
