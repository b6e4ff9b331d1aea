"""Rollouts and scores as JSON, without loss: what travels between `RemoteReward` and a reward server.

    {"version": 4,
     "audio":    [base64 of an audio file, …],
     "samples":  [{"id": "q", "messages": […], "metadata": {…}, "turns": […], …}, …],
     "rollouts": [{"sample": 0, "group_id": "3/1", "index": 0, "segments": […], "spoken_audio": null}, …]}

    {"version": 4, "scores": [{"total": 1.0, "parts": {…}, "per_segment": [0.5, null], …}, null, …], …}

Samples, segments, clips, tensors and scores are written as `audiorl.data.rollout_rows` shows. A clip whose path is
"audio[0]" refers to the document's list. A score of null means that the reward skipped the rollout.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from audiorl.audio import AudioClip, probe
from audiorl.data import rollout_rows
from audiorl.data.schema import FieldError
from audiorl.types import Rollout, Sample, Score, Segment

VERSION = 4
AudioMode = Literal["bytes", "path", "none"]
"""How audio is sent: its bytes, the names of files that both sides see, or not at all."""


class SerializationError(ValueError):
    """A document with something missing or wrong; the message begins with the field."""


class PathNotAllowed(SerializationError):
    """Audio outside the folders from which the server may read."""


class _SentRollout(msgspec.Struct):
    sample: Annotated[int, Meta(ge=0, le=2**53, description="a number from 0; give that of the sample")]
    segments: tuple[Segment, ...]
    group_id: Annotated[str, Meta(description="a text; give the text")]
    index: Annotated[int, Meta(description="a whole number; give that of the rollout in its group")]
    spoken_audio: AudioClip | None


class _Rollouts(msgspec.Struct):
    audio: list[str]
    samples: list[Sample]
    rollouts: list[_SentRollout]


class _Scores(msgspec.Struct):
    scores: list[Score | None]


def digest(document: bytes) -> str:
    """Return what identifies a document; an answer names the digest of its request."""
    return hashlib.sha256(document).hexdigest()[:32]


def serialize_rollouts(rollouts: Sequence[Rollout], audio: AudioMode = "bytes") -> bytes:
    """Return the JSON document of some rollouts, without their scores.

    With `audio` "bytes" each file is sent unchanged, once, however many clips refer to it. A clip that is less than
    half of its file is cut out at the file's own rate instead; such clips, and audio in memory, are sent as 32-bit
    float WAV, so that the server loads the same samples to the bit. With "path" only audio that is no file is sent.

    Raises ValueError naming the sample for metadata that JSON cannot hold, AudioError or OSError for unreadable audio.
    """
    files: dict[str, tuple[int, str]] = {}  # by key: place in the document, content in base64
    clips: dict[AudioClip, dict[str, Any]] = {}

    def sent(clip: AudioClip) -> dict[str, Any]:
        if audio == "path" and clip.path is not None:
            return rollout_rows.clip_fields(clip, os.path.abspath(clip.path))
        if audio == "none":
            return rollout_rows.clip_fields(clip, rollout_rows.NOT_SENT)
        if clip not in clips:
            part = clip
            if clip.array is None and not clip.context and clip.duration is not None:
                about = probe(clip)
                if 2 * clip.duration < about.seconds:
                    cut_out, rate = clip.load(about.sample_rate), about.sample_rate
                    part = AudioClip(array=cut_out, sample_rate=rate, duration=clip.duration)
            key = rollout_rows.file_key(part)
            if key not in files:
                files[key] = (len(files), base64.b64encode(rollout_rows.file_bytes(part)).decode())
            clips[clip] = rollout_rows.clip_fields(part, f"audio[{files[key][0]}]")
        return clips[clip]

    def metadata(sample: Sample) -> dict[str, Any]:
        encoded = {}
        for key, value in sample.metadata.items():
            if key == "reference_audio" and isinstance(value, str) and value:  # a text that names a file
                value = AudioClip(path=value)
            try:
                encoded[key] = rollout_rows.encode_metadata(value)
            except TypeError as error:
                held = f"sample {sample.id!r}: metadata[{key!r}] holds {error}"
                raise ValueError(f"{held}, which cannot be sent to a reward server; leave it out") from None
        return encoded

    samples = list({id(r.sample): r.sample for r in rollouts}.values())
    numbers = {id(sample): number for number, sample in enumerate(samples)}
    document: dict[str, Any] = {
        "version": VERSION,
        "samples": [rollout_rows.to_json(replace(s, metadata=metadata(s)), sent) for s in samples],
        "rollouts": [
            {**rollout_rows.to_json(replace(r, sample=None, score=None), sent), "sample": numbers[id(r.sample)]}  # type: ignore[arg-type]
            for r in rollouts
        ],
    }
    document["audio"] = [content for _, content in files.values()]
    # Escaped, since what a model writes may be half a character, which UTF-8 has no bytes for.
    return json.dumps(document, allow_nan=False).encode()


@contextmanager
def _naming_fields() -> Iterator[None]:
    """Raise what is wrong with a document as a SerializationError."""
    try:
        yield
    except SerializationError:
        raise
    except FieldError as error:
        raise SerializationError(f"{error.field or 'document'}: {error.message}") from None
    except RecursionError:
        raise SerializationError("document: nested too deeply") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise SerializationError(f"document: not JSON ({error})") from None


@_naming_fields()
def deserialize_rollouts(document: bytes, folders: Sequence[Path] = ()) -> list[Rollout]:
    """Return what `serialize_rollouts` wrote; samples, clips and audio that were one object are one again.

    Audio by path must lie in one of `folders`, links followed; PathNotAllowed otherwise. SerializationError names the
    field that is missing or wrong.
    """

    def not_json(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    parsed = json.loads(document, parse_constant=not_json)
    _check_version(parsed, "this server speaks")
    held: _Rollouts = rollout_rows.from_json(parsed, _Rollouts)
    audio: dict[str, bytes] = {}
    for number, text in enumerate(held.audio):
        try:
            audio[f"audio[{number}]"] = rollout_rows.base64_bytes(text)
        except ValueError as error:
            raise FieldError(f"audio[{number}]", str(error)) from None
    allowed = [Path(os.path.realpath(folder)) for folder in folders]
    clips: dict[tuple[Any, ...], AudioClip] = {}

    def received(clip: AudioClip) -> AudioClip:
        path = str(clip.path)
        key = (path, clip.sample_rate, clip.start, clip.duration, clip.context, clip.channel)
        if key not in clips:
            if path in audio:
                clip = replace(clip, path=None, data=audio[path])
            elif path != rollout_rows.NOT_SENT:
                real = os.path.realpath(path)
                if not any(Path(real).is_relative_to(folder) for folder in allowed):
                    where = ", ".join(map(str, allowed)) or "none"
                    remedy = "start the server with --audio-root, or send audio='bytes'"
                    raise PathNotAllowed(f"path: {path} lies outside the folders that may be read ({where}); {remedy}")
                clip = replace(clip, path=real)
            clips[key] = clip
        return clips[key]

    samples = []
    for number, sample in enumerate(held.samples):
        sample = rollout_rows.decode_metadata(sample, f"samples[{number}]")
        if isinstance(sample.metadata.get("reference_audio"), str) and sample.metadata["reference_audio"]:
            message = "is a text, expected a clip; a path must not get around --audio-root"
            raise FieldError(f"samples[{number}].metadata.reference_audio", message)
        samples.append(rollout_rows.replace_clips(sample, received))
    rollouts = []
    for number, sent in enumerate(held.rollouts):
        where = f"rollouts[{number}]"
        if sent.sample >= len(samples):
            raise FieldError(f"{where}.sample", f"is {sent.sample}, there are {len(samples)}")
        for index, segment in enumerate(sent.segments):
            row = parsed["rollouts"][number]["segments"][index]
            rollout_rows.check_segment(segment, row, f"{where}.segments[{index}]")
        segments, spoken = rollout_rows.replace_clips((sent.segments, sent.spoken_audio), received)
        rollouts.append(Rollout(samples[sent.sample], segments, sent.group_id, sent.index, spoken_audio=spoken))
    return rollouts


def serialize_scores(scores: Sequence[Score | None]) -> list[dict[str, Any] | None]:
    """Return the `scores` of an answer; they must have passed `check_scores`."""
    return [None if s is None else rollout_rows.score_row(s) for s in scores]


@_naming_fields()
def deserialize_scores(answer: Any) -> list[Score | None]:
    """Return the scores of a parsed answer. Raises SerializationError; `check_scores` finds what else is wrong."""
    _check_version(answer, "expected")
    scores = answer.get("scores")
    if isinstance(scores, list):
        answer = {"scores": [rollout_rows.score_fields(score) for score in scores]}
    held = rollout_rows.from_json(answer, _Scores).scores
    for number, score in enumerate(held):
        rollout_rows.check_finite(score, f"scores[{number}]")
    return held


def _check_version(document: Any, other: str) -> None:
    version = document.get("version") if isinstance(document, dict) else None
    if type(version) is not int or version != VERSION:
        raise FieldError("document.version", f"is {version!r}, {other} {VERSION}; install the same audiorl")
