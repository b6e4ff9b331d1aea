"""A run's rollouts as JSON lines: rows that people and the report read, and that give back the whole rollout.

A row is a `Rollout` field by field, as msgspec encodes it, with some fields more for people::

    {"step": 40, "group_id": "39/1", "index": 0, "text": "…", "advantage": 0.7,
     "score": {"total": 1.0, "parts": {"accuracy": 1.0}, "per_segment"?: […], …} or null,
     "sample": {"id", "messages": [{"role", "content": ["What is it?", CLIP]}], "references", "choices", "task",
                "metadata", "turns": [{"audio": CLIP, "end", "reference", "source", "reference_seconds", "speech"}],
                "prompt": the messages as one text, "audio": every CLIP of the prompt},
     "segments": [{"text", "stop_reason", "policy_version", "source_time", "emit_time", "audio": [CLIP],
                   "prompt_ids": TENSOR, "ids", "logprobs", "codes", "prompt_codes", "code_mask", …,
                   "num_tokens", "advantages"?, "entropies"?, "ratios"?}],
     "spoken_audio": {"path": "rollouts/step_000040/0000.wav"}}

    CLIP     {"path", "start"?, "duration"?, "channel"?, "context"?, "sample_rate"?}; relative paths start from the run
             folder
    TENSOR   {"dtype": "int64", "shape": [12], "data": base64 of little-endian values}

The last three fields of a segment hold a 16-bit float a token (`audiorl.train.rl.trainer`); like "step", "text",
"advantage", "prompt", "audio" and "num_tokens" they are not read back. JSON has no NaN: in "per_segment" and
"segment_parts", where NaN means "not defined here", it is null. What JSON cannot tell apart in the metadata of a sample
is an object with one key: {"$clip": CLIP}, {"$tuple": […]}, {"$float": "nan"}, {"$dict": {"$key": …}}.
`audiorl.data.serialization` sends the same fields to reward servers.
"""

from __future__ import annotations

import base64
import io
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import numpy as np
import soundfile
import torch
from torch import Tensor

from audiorl.audio import AudioClip
from audiorl.data.rows import read_checked
from audiorl.data.schema import FieldError, check
from audiorl.pictures import Picture
from audiorl.types import Rollout, Sample, Score, Segment, Turn

# msgspec evaluates the annotations of values; their module does not import torch.
vars(sys.modules[Segment.__module__])["Tensor"] = Tensor
NOT_SENT = "<audio that was not sent (RemoteReward(audio='none')) or not recorded>"
"""In place of a path: whoever loads such a clip gets an error that says why there is no audio."""
_DTYPES = {"int64": torch.int64, "float32": torch.float32, "float16": torch.float16, "bool": torch.bool}
_TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype, int | None]] = {
    "prompt_ids": ((1,), torch.int64, 0),
    "ids": ((1,), torch.int64, 0),
    "logprobs": ((1, 2), torch.float32, None),
    "codes": ((2,), torch.int64, -1),
    "prompt_codes": ((2,), torch.int64, -1),
    "code_mask": ((2,), torch.bool, None),
    "policy_versions": ((1,), torch.int64, 0),
}
"""Numbers of dimensions, type and least value of the tensors of a segment."""
T = TypeVar("T")


# -- rows of a run folder ----------------------------------------------------------------------------------------------


def rollout_row(
    rollout: Rollout,
    step: int,
    advantage: float,
    run_folder: Path | None = None,
    numbers: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a rollout as one JSON object. `numbers`: by name a number [L] of each token, observed ones included.

    Audio in memory is written to rollouts/audio/ in `run_folder`, once for equal audio (32-bit float WAV, 64 kB for a
    second at 16 kHz); without a folder it is left out. Values of the sample's metadata that JSON cannot hold are left
    out too.
    """
    parts = _as_parts_of_one_array(rollout.sample.turns)

    def saved(clip: AudioClip) -> dict[str, Any]:
        clip = parts.get(clip, clip)
        if clip.path is not None:
            return clip_fields(clip, os.path.abspath(clip.path))
        if run_folder is None:
            return clip_fields(clip, NOT_SENT)
        content = file_bytes(clip)
        suffix = {b"RIFF": ".wav", b"fLaC": ".flac", b"OggS": ".ogg"}.get(content[:4], ".audio")
        path = Path("rollouts") / "audio" / f"{file_key(clip).partition('#')[0]}{suffix}"
        if not (run_folder / path).exists():
            (run_folder / path).parent.mkdir(parents=True, exist_ok=True)
            (run_folder / path).write_bytes(content)
        return clip_fields(clip, str(path))

    metadata = {}
    for key, value in rollout.sample.metadata.items():
        try:
            metadata[key] = encode_metadata(value)
        except TypeError:
            continue
    sample = replace(rollout.sample, metadata=metadata)
    # The latents on a flow's way to a sound would be most of a row, and say nothing to whoever hears it.
    segments = tuple(replace(s, flow=None) for s in rollout.segments)
    row = to_json(replace(rollout, sample=sample, segments=segments, score=None), saved)
    row["sample"]["prompt"] = "\n".join(
        "".join(c if isinstance(c, str) else "[audio]" if isinstance(c, AudioClip) else "[image]" for c in m.content)
        for m in sample.messages
    )
    row["sample"]["audio"] = _joined([saved(clip) for clip in sample.audio])
    end = 0
    for segment, held in zip(row["segments"], rollout.segments, strict=True):
        start = end + len(held.prompt_ids)
        end = start + len(held.ids)
        segment["num_tokens"] = len(held.ids)
        segment |= {name: tensor_row(values[start:end].half()) for name, values in numbers.items()}
    score = None if rollout.score is None else score_row(rollout.score)
    return {"step": step, **row, "text": rollout.text, "score": score, "advantage": round(float(advantage), 6)}


def read_rollouts(path: str | Path) -> list[Rollout]:
    """Read the rollouts of a file as a run writes it, with their recorded scores and `spoken_audio`.

    Raises ValueError naming file, row and field.
    """
    path = Path(path)
    folder = path.resolve().parent.parent
    rollouts = [rollout for _, rollout in read_checked(path, lambda row: rollout_from_row(row, folder))]
    if not rollouts:
        raise ValueError(f"{path}: no rollouts")
    return rollouts


def rollout_from_row(row: Mapping[str, Any], run_folder: Path) -> Rollout:
    """Return the rollout of one row. Raises FieldError for what is no row of rollouts."""
    rollout: Rollout = from_json({**row, "score": score_fields(row.get("score"))}, Rollout)
    if "index" not in row:  # In Python it is 0 unless told otherwise.
        raise FieldError("index", "missing; give the number of the rollout in its group")
    if not rollout.segments:
        raise FieldError("segments", "empty; a rollout has at least one segment")
    for number, segment in enumerate(rollout.segments):
        check_segment(segment, row["segments"][number], f"segments[{number}]")
    check_finite(rollout.score, "score")
    rollout = replace(rollout, sample=decode_metadata(rollout.sample, "sample"))

    def here(clip: AudioClip) -> AudioClip:
        return clip if clip.path in (None, NOT_SENT) else replace(clip, path=os.path.join(run_folder, str(clip.path)))

    return replace_clips(rollout, here)


def _joined(clips: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Clips for people to hear: chunks of one recording that follow each other become one clip."""
    joined: list[dict[str, Any]] = []
    for clip in clips:
        path = None if clip["path"] == NOT_SENT else clip["path"]
        start, duration = clip.get("start", 0.0), clip.get("duration")
        channel = {"channel": clip["channel"]} if "channel" in clip else {}
        last: dict[str, Any] = joined[-1] if joined else {"path": None}
        # A chunk continues the last clip if it is of the same file, both have an end, and it begins where that ends.
        same = path is not None and path == last["path"] and channel.get("channel") == last.get("channel")
        if same and None not in (duration, last["duration"]) and abs(last["start"] + last["duration"] - start) < 1e-3:
            last["duration"] = start + duration - last["start"]
        else:
            joined.append({"path": path, "start": start, "duration": duration, **channel})
    return joined


def _as_parts_of_one_array(turns: Sequence[Turn]) -> dict[AudioClip, AudioClip]:
    """Return each chunk of a stream in memory as a part of the whole recording, so that one file holds the stream.

    Empty where the chunks do not follow each other.
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
        place: dict[str, Any] = {"start": start / rate, "duration": len(own) / rate, "context": chunk.context}
        part = AudioClip(array=recording, sample_rate=rate, **place)
        if not np.array_equal(part.with_context().load(rate), chunk.with_context().load(rate)):
            return {}
        parts[chunk] = part
        start += len(own)
    return parts


# -- values as JSON ----------------------------------------------------------------------------------------------------


def to_json(value: Any, clip: Callable[[AudioClip], Mapping[str, Any]]) -> Any:
    """Return the dataclasses of `audiorl.types` as JSON values, each clip as `clip` says; metadata must be encoded."""

    def encode(held: Any) -> Any:
        if isinstance(held, Tensor):
            return tensor_row(held)
        if isinstance(held, np.generic):
            return held.item()
        raise TypeError(f"a {type(held).__name__} cannot be written")

    return msgspec.to_builtins(replace_clips(value, clip), enc_hook=encode)


def from_json(value: Any, kind: type[T], where: str = "") -> T:
    """Return what `to_json` wrote. Raises FieldError; metadata is still encoded."""

    def decode(hint: type, held: Any) -> Any:
        if hint is not Tensor:
            raise ValueError("samples cannot be given here; name a file")
        if not isinstance(held, dict) or not {"dtype", "shape", "data"} <= held.keys():
            raise ValueError("is not a tensor; give {dtype, shape, data}")
        return torch.from_numpy(array_of(held))

    return check(value, kind, where, decode)


def replace_clips(value: Any, new: Callable[[AudioClip], Any]) -> Any:
    """Return a value of `audiorl.types`, or JSON, with new(clip) for each clip in it."""
    if isinstance(value, AudioClip):
        return new(value)
    if isinstance(value, Picture):  # a tuple with a name
        return value
    if isinstance(value, tuple | list):
        return type(value)(replace_clips(held, new) for held in value)
    if isinstance(value, Mapping):
        return {key: replace_clips(held, new) for key, held in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: replace_clips(getattr(value, f.name), new) for f in fields(value)})
    return value


def clip_fields(clip: AudioClip, path: str) -> dict[str, Any]:
    """Return a clip as JSON, its audio called `path`."""
    part = {**clip.part, "context": clip.context, "sample_rate": clip.sample_rate}
    return {"path": path, **{name: value for name, value in part.items() if value or name == "channel"}}


def tensor_row(tensor: Tensor) -> dict[str, Any]:
    """Return a tensor as {"dtype", "shape", "data"}; other kinds of numbers become int64 or float32."""
    if tensor.dtype not in _DTYPES.values():
        tensor = tensor.float() if tensor.is_floating_point() else tensor.long()
    array = tensor.detach().cpu().numpy()
    data = base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}


def array_of(row: Mapping[str, Any]) -> np.ndarray:
    """Return the values of a `tensor_row`. Raises ValueError, KeyError or TypeError for anything else."""
    name, shape, text = row["dtype"], row["shape"], row["data"]
    if name not in _DTYPES:
        raise ValueError(f"{name!r} is none of {', '.join(_DTYPES)}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape!r} is not a list of whole numbers from 0")
    data, dtype = base64_bytes(text), np.dtype(name)
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for shape {shape}")
    # Any other byte than 0 and 1 is no bool of numpy.
    flat = np.frombuffer(data, np.uint8 if name == "bool" else dtype.newbyteorder("<"))
    return flat.reshape(shape).astype(dtype)


def base64_bytes(text: Any) -> bytes:
    """Decode base64. Raises ValueError for anything else."""
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, TypeError) as error:
        raise ValueError(f"not base64 ({error})") from None


def check_segment(segment: Segment, row: Mapping[str, Any], where: str) -> None:
    """Raise FieldError for fields that `row` lacks, tensors that do not fit each other and numbers that are none."""
    for name in ("text", "stop_reason", "policy_version"):  # In Python they have defaults; in a row none is true.
        if name not in row:
            raise FieldError(f"{where}.{name}", "missing; add it")
    if segment.policy_version < 0:
        raise FieldError(f"{where}.policy_version", f"holds {segment.policy_version}, expected 0 or more")
    if (segment.codes is None) != (segment.code_mask is None):
        raise FieldError(f"{where}.codes", "codes without code_mask, or code_mask without codes")
    tensors = {name: t for name in _TENSORS if (t := getattr(segment, name)) is not None}
    widths = {t.shape[1] for t in tensors.values() if t.dim() == 2}
    for name, tensor in tensors.items():
        dims, dtype, lowest = _TENSORS[name]
        ids = segment.prompt_ids if name.startswith("prompt") else segment.ids
        if tensor.dim() not in dims:
            fault = f"shape {list(tensor.shape)}, expected {dims[-1]} dimension(s)"
        elif tensor.dtype != dtype:
            fault = f"its numbers are {str(tensor.dtype).removeprefix('torch.')}"
        elif len(tensor) != len(ids):
            fault = f"not as long as its ids, which have {len(ids)} entries"
        elif tensor.dim() == 2 and len(widths) > 1:
            fault = f"another number of codebooks than the others ({sorted(widths)})"
        elif lowest is not None and bool((tensor < lowest).any()):
            fault = f"holds {int(tensor.min())}, expected {lowest} or more"
        else:
            continue
        raise FieldError(f"{where}.{name}", fault)


def score_row(score: Score) -> dict[str, Any]:
    """Return a score as JSON, with null for NaN; fields that are not given are left out."""

    def defined(values: Sequence[float]) -> list[float | None]:
        return [None if math.isnan(x) else float(x) for x in values]

    row: dict[str, Any] = {"total": float(score.total), "parts": {name: float(x) for name, x in score.parts.items()}}
    if score.per_segment is not None:
        row["per_segment"] = defined(score.per_segment)
    if score.per_token is not None:
        row["per_token"] = [float(x) for x in score.per_token]
    if score.step_ends is not None:
        row["step_ends"] = list(score.step_ends)
    if score.segment_parts:
        row["segment_parts"] = {name: defined(values) for name, values in score.segment_parts.items()}
    if score.weights:
        row["weights"] = {name: float(x) for name, x in score.weights.items()}
    return row


def score_fields(row: Any) -> Any:
    """Return the JSON of a score with NaN for null, for `from_json`."""

    def filled(values: Any) -> Any:
        return [math.nan if x is None else x for x in values] if isinstance(values, list) else values

    if not isinstance(row, dict):
        return row
    parts = row.get("segment_parts")
    parts = {name: filled(values) for name, values in parts.items()} if isinstance(parts, dict) else {}
    return {**row, "per_segment": filled(row.get("per_segment")), "segment_parts": parts}


def check_finite(score: Score | None, where: str) -> None:
    """Raise FieldError for a score with a NaN or an infinity where none has a meaning."""
    if score is None:
        return
    tokens = {f"per_token[{i}]": value for i, value in enumerate(score.per_token or ())}
    parts = {f"parts.{name}": value for name, value in score.parts.items()}
    for name, value in {"total": score.total, **parts, **tokens}.items():
        if not math.isfinite(value):
            raise FieldError(f"{where}.{name}", f"{value} is not a finite number; give one")


def encode_metadata(value: Any) -> Any:
    """Return a value of the metadata as JSON with clips in it. Raises TypeError for what JSON cannot hold."""
    if isinstance(value, AudioClip):
        return {"$clip": value}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        items = [encode_metadata(held) for held in value]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        entries = {key: encode_metadata(held) for key, held in value.items()}
        return {"$dict": entries} if any(key.startswith("$") for key in entries) else entries
    raise TypeError(f"a {type(value).__name__}")


def decode_metadata(sample: Sample, where: str) -> Sample:
    """Return the sample with its metadata as it was before `encode_metadata`. Raises FieldError."""

    def decode(value: Any, place: str) -> Any:
        marked = [key for key in value if key.startswith("$")] if isinstance(value, dict) else []
        if not marked or len(value) == 1:
            match value:
                case list():
                    return [decode(held, f"{place}[{i}]") for i, held in enumerate(value)]
                case {"$clip": held}:
                    return from_json(held, AudioClip, place)
                case {"$float": "nan" | "inf" | "-inf" as held}:
                    return float(held)
                case {"$tuple": list(held)}:
                    return tuple(decode(held, place))
                case {"$dict": dict(held)}:
                    return {key: decode(entry, f"{place}.{key}") for key, entry in held.items()}
                case dict() if not marked:
                    return {key: decode(held, f"{place}.{key}") for key, held in value.items()}
        if not marked:
            return value
        raise FieldError(place, f"{marked[0]!r} is no kind of value")

    return replace(sample, metadata={k: decode(v, f"{where}.metadata.{k}") for k, v in sample.metadata.items()})


# -- files behind clips ------------------------------------------------------------------------------------------------


def file_key(clip: AudioClip) -> str:
    """Return a key that is equal for clips of one file or array, whatever part or channel of it they select."""
    return replace(clip, start=0.0, duration=None, context=0.0, channel=None).key


def file_bytes(clip: AudioClip) -> bytes:
    """Return the whole file behind a clip; an array becomes 32-bit float WAV, which loses nothing."""
    if clip.data is not None:
        return clip.data
    if clip.path is not None:
        return Path(clip.path).read_bytes()
    assert clip.array is not None and clip.sample_rate is not None
    file = io.BytesIO()
    soundfile.write(file, np.asarray(clip.array, np.float32), clip.sample_rate, format="WAV", subtype="FLOAT")
    content = bytearray(file.getvalue())
    peak = content.index(b"PEAK")
    content[peak + 12 : peak + 16] = bytes(4)  # libsndfile writes the time there: equal audio shall be equal bytes
    return bytes(content)
