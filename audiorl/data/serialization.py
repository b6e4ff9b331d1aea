"""Rollouts as JSON, without loss: documents for a reward server, and the rows of a run's rollout files.

What rollouts share is written once::

    {"version": 2,
     "audio":    [base64 of an audio file, …],
     "clips":    [{"path": "/data/a.flac" or null, "audio": 0 or null, "start": 0.0, …}, …]   clips refer to audio
     "samples":  [{"id": "q", "messages": […], "metadata": {…}, "turns": […], …}, …]          samples to clips
     "rollouts": [{"sample": 0, "group_id": "3/1", "index": 0, "segments": […]}, …]}          rollouts to both

    {"version": 2, "scores": [{"total": 1.0, "parts": {…}, "per_segment": [0.5, null], …}, null, …], …}

Tensors are base64 of little-endian values with their shape. A score of null means that the reward skipped the rollout.
JSON has no NaN: in the values of segments, where a NaN means "not defined here", it is null; anywhere else it is an
error. `audiorl.data.score_rows` writes scores; `audiorl.data.rollout_rows` writes the same fields as one
self-contained row a rollout.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from audiorl.audio import AudioClip
from audiorl.data.clip_files import cut_out, file_bytes, file_key, is_small_part
from audiorl.data.schema import FieldError, check
from audiorl.data.schema.rollouts import (
    ClipDocument,
    ContentDocument,
    MessageDocument,
    RolloutDocument,
    RolloutsDocument,
    SampleDocument,
    SegmentDocument,
    TurnDocument,
    VersionDocument,
)
from audiorl.data.tensor_rows import read_base64, read_tensors, tensor_rows
from audiorl.types import Message, Rollout, Sample, Segment, Turn

VERSION = 2
AudioMode = Literal["bytes", "path", "none"]
"""How audio is sent: its bytes, the names of files that both sides see, or not at all."""
NOT_SENT = "<audio that was not sent (RemoteReward(audio='none')) or not recorded>"
"""In place of a path: a reward that loads such a clip gets an error that says why there is no audio."""

T = TypeVar("T")


class SerializationError(ValueError):
    """A document with something missing or wrong; the message begins with the field."""


class PathNotAllowed(SerializationError):
    """Audio outside the folders from which the server may read."""


def digest(document: bytes) -> str:
    """Identifies a document; an answer names the digest of its request."""
    return hashlib.sha256(document).hexdigest()[:32]


# -- writing -----------------------------------------------------------------------------------------------------------


def serialize_rollouts(rollouts: Sequence[Rollout], audio: AudioMode = "bytes") -> bytes:
    """The JSON document of some rollouts, without their scores.

    With `audio` "bytes" each file is sent unchanged, once, however many clips refer to it. A clip that is less than
    half of its file is cut out at the file's own rate instead; such clips, and audio in memory, are sent as 32-bit
    float WAV, so that the server loads the same samples to the bit. With "path" only audio that is no file is sent.

    Raises ValueError naming the sample for metadata that JSON cannot hold, AudioError or OSError for unreadable audio.
    """
    writer = Writer(audio)
    rows = [writer.rollout(r) for r in rollouts]
    document = {"version": VERSION, "audio": writer.audio, "clips": writer.clips, "samples": writer.samples}
    # Escaped, since what a model writes may be half a character, which UTF-8 has no bytes for.
    return json.dumps(document | {"rollouts": rows}, allow_nan=False).encode()


class Writer:
    """Builds the tables of a document.

    `save`: writes audio that is not a file into one and returns its path, or None to leave the audio out; the document
    is then one for this machine, and texts that name files stay texts. `equivalents`: clips to write in place of
    others.
    """

    def __init__(
        self,
        mode: AudioMode,
        save: Callable[[AudioClip], str | None] | None = None,
        equivalents: Mapping[AudioClip, AudioClip] | None = None,
    ):
        self.mode = mode
        self.save = save
        self.equivalents = equivalents or {}
        self.audio: list[str] = []
        self.clips: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self._indices: dict[object, int] = {}

    def _once(self, key: object, table: list[T], make: Callable[[], T]) -> int:
        """The index in `table` of the entry for `key`, which `make` returns the first time."""
        if key not in self._indices:
            entry = make()  # may itself add to a table
            self._indices[key] = len(table)
            table.append(entry)
        return self._indices[key]

    def rollout(self, r: Rollout) -> dict[str, Any]:
        return {
            "sample": self._once(("sample", id(r.sample)), self.samples, lambda: self.sample(r.sample)),
            "segments": [self.segment(s) for s in r.segments],
            "group_id": r.group_id,
            "index": r.index,
            "spoken_audio": None if r.spoken_audio is None else self.clip(r.spoken_audio),
        }

    def sample(self, s: Sample) -> dict[str, Any]:
        as_clip = _as_clip if self.save is None else lambda key, value: value
        return {
            "id": s.id,
            "messages": [{"role": m.role, "content": [self.content(c) for c in m.content]} for m in s.messages],
            "references": list(s.references),
            "choices": list(s.choices),
            "task": s.task,
            "metadata": {
                key: self.value(as_clip(key, value), f"sample {s.id!r}: metadata[{key!r}]")
                for key, value in s.metadata.items()
            },
            "turns": [self.turn(t) for t in s.turns],
        }

    def content(self, part: str | AudioClip) -> dict[str, Any]:
        return {"text": part} if isinstance(part, str) else {"clip": self.clip(part)}

    def turn(self, t: Turn) -> dict[str, Any]:
        return {
            "audio": self.clip(t.audio),
            "end": t.end,
            "reference": t.reference,
            "source": t.source,
            "reference_seconds": t.reference_seconds,
            "speech": [self.clip(c) for c in t.speech],
        }

    def segment(self, s: Segment) -> dict[str, Any]:
        return {
            **tensor_rows(s),
            "text": s.text,
            "audio": [self.clip(c) for c in s.audio],
            "stop_reason": s.stop_reason,
            "policy_version": s.policy_version,
            "source_time": s.source_time,
            "emit_time": s.emit_time,
            **({} if s.decoder_passes is None else {"decoder_passes": s.decoder_passes}),
        }

    def value(self, value: Any, where: str) -> Any:
        """A metadata value: numbers, texts and lists as they are, everything else as an object that names its kind."""
        if value is None or isinstance(value, str | bool | int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, AudioClip):
            return {"clip": self.clip(value)}
        if isinstance(value, list | tuple):
            items = [self.value(v, where) for v in value]
            return items if isinstance(value, list) else {"tuple": items}
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {"dict": {key: self.value(v, where) for key, v in value.items()}}
        raise ValueError(
            f"{where} holds a {type(value).__name__}, which cannot be sent to a reward server; leave it out of the "
            "sample, or make it text or numbers"
        )

    def clip(self, clip: AudioClip) -> int:
        clip = self.equivalents.get(clip, clip)
        # The clip itself is the key, not its id: the id of a temporary one could be given to another clip.
        return self._once(clip, self.clips, lambda: self._clip(clip))

    def _clip(self, clip: AudioClip) -> dict[str, Any]:
        row: dict[str, Any] = {"path": None, "audio": None}
        if self.mode == "path" and clip.path is not None:
            row["path"] = os.path.abspath(clip.path)
        elif self.save is not None:
            row["path"] = self.save(clip)
        elif self.mode != "none":
            sent = clip = cut_out(clip) if is_small_part(clip) else clip
            row["audio"] = self._once(file_key(sent), self.audio, lambda: base64.b64encode(file_bytes(sent)).decode())
        return row | {name: getattr(clip, name) for name in ("sample_rate", "start", "duration", "context")}


def _as_clip(key: str, value: Any) -> Any:
    """A text in the metadata that is known to name a file is sent as audio."""
    return AudioClip(path=value) if key == "reference_audio" and isinstance(value, str) and value else value


# -- reading -----------------------------------------------------------------------------------------------------------


def deserialize_rollouts(document: bytes, folders: Sequence[Path] = ()) -> list[Rollout]:
    """What `serialize_rollouts` wrote; samples, clips and audio that were one object are one again.

    Audio by path must lie in one of `folders`, links followed; PathNotAllowed otherwise. SerializationError names the
    field that is missing or wrong.
    """
    try:
        with naming_fields():
            return Reader(json.loads(document, parse_constant=_not_json), folders).rollouts()
    except SerializationError:
        raise
    except RecursionError:
        raise SerializationError("document: nested too deeply") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise SerializationError(f"document: not JSON ({error})") from None


@contextmanager
def naming_fields() -> Iterator[None]:
    """Raise a FieldError of the block as a SerializationError."""
    try:
        yield
    except FieldError as error:
        raise SerializationError(f"{error.field or 'document'}: {error.message}") from None


def _not_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


class Reader:
    """Reads the tables of a document. Raises FieldError, PathNotAllowed.

    `folders`: where audio by path may lie; None reads any path, relative ones from `base`, for documents of this
    machine.
    """

    def __init__(self, root: Any, folders: Sequence[Path] | None, base: Path = Path()):
        check_version(root, "this server speaks")
        document = check(root, RolloutsDocument)
        self.folders = None if folders is None else [Path(os.path.realpath(f)) for f in folders]
        self.base = base
        self.audio = [read_base64(data, f"audio[{i}]") for i, data in enumerate(document.audio)]
        self.clips = [self.clip(clip, f"clips[{i}]") for i, clip in enumerate(document.clips)]
        self.samples = [self.sample(sample, f"samples[{i}]") for i, sample in enumerate(document.samples)]
        self._rollouts = document.rollouts

    def rollouts(self) -> list[Rollout]:
        return [self.rollout(row, f"rollouts[{i}]") for i, row in enumerate(self._rollouts)]

    def rollout(self, row: RolloutDocument, where: str) -> Rollout:
        spoken = row.spoken_audio
        return Rollout(
            sample=_entry(self.samples, row.sample, f"{where}.sample"),
            segments=tuple(self.segment(s, f"{where}.segments[{i}]") for i, s in enumerate(row.segments)),
            group_id=row.group_id,
            index=row.index,
            spoken_audio=None if spoken is None else _entry(self.clips, spoken, f"{where}.spoken_audio"),
        )

    def sample(self, row: SampleDocument, where: str) -> Sample:
        return Sample(
            id=row.id,
            messages=tuple(self.message(m, f"{where}.messages[{i}]") for i, m in enumerate(row.messages)),
            references=tuple(row.references),
            choices=tuple(row.choices),
            task=row.task,
            metadata={key: self.metadata(key, value, f"{where}.metadata.{key}") for key, value in row.metadata.items()},
            turns=tuple(self.turn(turn, f"{where}.turns[{i}]") for i, turn in enumerate(row.turns)),
        )

    def metadata(self, key: str, value: Any, where: str) -> Any:
        held = self.value(value, where)
        is_path = isinstance(_as_clip(key, held), AudioClip) and not isinstance(held, AudioClip)
        if is_path and self.folders is not None:
            raise FieldError(where, "is a text, expected a clip; a path must not get around --audio-root")
        return held

    def message(self, row: MessageDocument, where: str) -> Message:
        return Message(row.role, tuple(self.content(c, f"{where}.content[{i}]") for i, c in enumerate(row.content)))

    def content(self, row: ContentDocument, where: str) -> str | AudioClip:
        if row.text is not None:
            return row.text
        if row.clip is None:
            raise FieldError(where, "missing; give text or clip")
        return _entry(self.clips, row.clip, f"{where}.clip")

    def turn(self, row: TurnDocument, where: str) -> Turn:
        return Turn(
            audio=_entry(self.clips, row.audio, f"{where}.audio"),
            end=row.end,
            reference=row.reference,
            source=row.source,
            reference_seconds=row.reference_seconds,
            speech=self._clips(row.speech, f"{where}.speech"),
        )

    def segment(self, row: SegmentDocument, where: str) -> Segment:
        return Segment(
            **read_tensors(row, where),  # type: ignore[arg-type]
            text=row.text,
            audio=self._clips(row.audio, f"{where}.audio"),
            stop_reason=row.stop_reason,
            policy_version=row.policy_version,
            source_time=row.source_time,
            emit_time=row.emit_time,
            decoder_passes=row.decoder_passes,
        )

    def value(self, value: Any, where: str) -> Any:
        if isinstance(value, list):
            return [self.value(held, f"{where}[{i}]") for i, held in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if len(value) != 1:
            raise FieldError(where, "expected an object with one key that names its kind")
        ((kind, held),) = value.items()
        if kind == "float" and held in ("nan", "inf", "-inf"):
            return float(held)
        if kind == "clip" and type(held) is int:
            return _entry(self.clips, held, f"{where}.clip")
        if kind == "tuple" and isinstance(held, list):
            return tuple(self.value(held, where))
        if kind == "dict" and isinstance(held, dict):
            return {key: self.value(v, f"{where}.{key}") for key, v in held.items()}
        raise FieldError(where, f"{kind!r} is no kind of value")

    def clip(self, row: ClipDocument, where: str) -> AudioClip:
        if row.path is not None and row.audio is not None:
            raise FieldError(where, "has both path and audio")
        data = None if row.audio is None else _entry(self.audio, row.audio, f"{where}.audio")
        path = None if row.path is None else self._allowed(row.path, where)
        try:
            return AudioClip(
                path=NOT_SENT if path is None and data is None else path,
                data=data,
                sample_rate=row.sample_rate,
                start=row.start,
                duration=row.duration,
                context=row.context,
            )
        except ValueError as error:
            raise FieldError(where, str(error)) from None

    def _allowed(self, path: str, where: str) -> str:
        if self.folders is None:
            return os.path.join(self.base, path)
        real = Path(os.path.realpath(path))
        if not any(real.is_relative_to(folder) for folder in self.folders):
            allowed = ", ".join(map(str, self.folders)) or "none"
            raise PathNotAllowed(
                f"{where}.path: {path} lies outside the folders that may be read ({allowed}); start the server with "
                "--audio-root, or send audio='bytes'"
            )
        return str(real)

    def _clips(self, indices: Sequence[int], where: str) -> tuple[AudioClip, ...]:
        return tuple(_entry(self.clips, index, f"{where}[{i}]") for i, index in enumerate(indices))


def check_version(root: Any, other: str) -> None:
    """Raise FieldError for a document of another version than the one that `other` says."""
    version = check(root, VersionDocument, "document").version
    if version != VERSION:
        raise FieldError("document.version", f"is {version}, {other} {VERSION}; install the same audiorl")


def _entry(table: Sequence[T], index: int, where: str) -> T:
    if index >= len(table):
        raise FieldError(where, f"is {index}, there are {len(table)}")
    return table[index]
