"""Rows of every kind of data file, and logs of streams."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import yaml

from audiorl.audio import AudioClip
from audiorl.data.manifest import Loaded, read_samples
from audiorl.data.preferences import read_judged, read_pairs, read_steps
from audiorl.data.text import read_passages, read_questions
from audiorl.tasks.simul.formats import read_streams
from audiorl.tasks.simul.logs import CONFIG, LOG, read_log
from audiorl.tasks.simul.talks import read_segments
from audiorl.tasks.tts.texts import read_utterances
from tests.support.attack.mutation import mutate_bytes
from tests.support.attack.targets import SEEDS, FileTarget, Input

LANGUAGES = {"source_language": "en", "target_language": "es"}
READERS = {
    "samples": lambda path: read_samples(path, on_error="skip"),
    "clips": lambda path: read_samples(path, on_error="skip", check_audio=True),
    "pairs": lambda path: read_pairs(path, on_error="skip"),
    "judged": lambda path: read_judged(path, on_error="skip"),
    "steps": lambda path: read_steps(path, on_error="skip"),
    "streams": lambda path: read_streams(path, on_error="skip"),
    "mustc": lambda path: read_streams(path, on_error="skip", **LANGUAGES),
    "realsi": lambda path: read_streams(path, on_error="skip"),
    "utterances": lambda path: read_utterances(path, on_error="skip"),
    "passages": read_passages,
    "questions": read_questions,
    "segments": read_segments,
}
"""By the first word of a seed's name, such as samples-mmau.jsonl."""


@cache
def recording() -> bytes:
    """Two seconds of sound as WAV."""
    file = io.BytesIO()
    soundfile.write(file, 0.3 * np.sin(np.arange(32_000) * 0.2), 16_000, format="WAV")
    return file.getvalue()


def _read(given: Input, folder: Path) -> Any:
    for name in ("a.wav", "b.wav"):
        (folder / name).write_bytes(recording())
    for other in (SEEDS / "rows" / "companions" / given.name).glob("*"):
        (folder / other.name).write_bytes(other.read_bytes())
    path = folder / given.name
    path.write_bytes(given.data)
    return READERS[given.name.partition("-")[0]](path)


# -- the judge ---------------------------------------------------------------------------------------------------------


def rows_of(data: bytes) -> list[Any]:
    """The rows of JSON text: the objects and what else is there; None for one that is not JSON."""
    text = data.removeprefix(b"\xef\xbb\xbf")
    try:
        value = json.loads(text)
        return value if isinstance(value, list) else [value]
    except (ValueError, RecursionError):
        return [_parsed(line) for line in text.split(b"\n") if line.strip()]


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None


def strings(value: Any) -> Iterator[str]:
    """Every text in a JSON value, and its finite numbers as text."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield str(key)
            yield from strings(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from strings(part)
    elif isinstance(value, str):
        yield value.strip()
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**64:
        yield str(value)
    elif isinstance(value, float) and math.isfinite(value):
        yield str(value)
        if value == int(value):
            yield str(int(value))


def texts_in(value: Any) -> Iterator[str]:
    """The texts in what a reader made of rows, metadata aside."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, AudioClip):
        yield value.path or ""
    elif isinstance(value, tuple | list):
        for part in value:
            yield from texts_in(part)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            if name != "metadata":
                yield from texts_in(getattr(value, name))


def numbers_in(value: Any) -> Iterator[Any]:
    """The numbers in what a reader made of rows, metadata aside."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from numbers_in(part)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            if name not in ("metadata", "array"):
                yield from numbers_in(getattr(value, name))


TEXT = ("question", "question_text", "text", "transcript", "sentence", "chosen", "rejected", "language", "lang", "task")
TEXT += ("source_language", "target_language", "speaker", "source", "target", "prompt_text", "completion")
NUMBER = ("start", "offset", "duration", "seconds", "sample_rate", "sampling_rate")
LISTS = ("choices", "multi_choice", "units", "words", "steps", "labels", "references")


def wrong_fields(row: Mapping[str, Any], used: set[str]) -> Iterator[str]:
    """Fields of an accepted row whose value cannot be meant, of those that its reader uses."""
    for name in used & row.keys():
        value = row[name]
        if value is None:
            continue
        others = {"speaker": int, "task": int, "chosen": list, "rejected": list, "completion": list}
        if name in TEXT and type(value) not in (str, others.get(name)):
            yield f"{name} is {value!r}"
        if name in NUMBER and (type(value) not in (int, float) or not math.isfinite(value) or value < 0):
            yield f"{name} is {value!r}"
        if name in LISTS and not isinstance(value, list):
            yield f"{name} is {value!r}"
        if name == "id" and type(value) not in (str, int):
            yield f"id is {value!r}"
        if name == "margin" and (type(value) not in (int, float) or not math.isfinite(value)):
            yield f"margin is {value!r}"
        if name in ("desirable", "label") and value not in (True, False):
            yield f"{name} is {value!r}"


USED = {
    "samples": {"id", "question", "question_text", "choices", "multi_choice", "start", "duration", "sample_rate"},
    "pairs": {"id", "chosen", "rejected", "margin", "question", "choices", "start", "duration"},
    "judged": {"id", "completion", "desirable", "question", "choices"},
    "steps": {"id", "steps", "labels", "question"},
    "streams": {
        "id",
        "units",
        "source_language",
        "target_language",
        "start",
        "duration",
        "seconds",
        "source",
        "target",
    },
    "utterances": {"id", "text", "speaker", "language", "prompt_text", "start", "duration"},
}
USED["clips"] = USED["samples"] | {"text", "language"}


def _judge(given: Input, result: Any) -> Iterator[str]:
    reader = given.name.partition("-")[0]
    values: Sequence[Any] = result.samples if isinstance(result, Loaded) else result
    if isinstance(result, Mapping):  # segments by recording
        values = [segment for segments in result.values() for segment in segments]
    for text in texts_in(values):
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            yield f"half a character in {text[:50]!r}"
    for number in numbers_in(values):
        if not math.isfinite(number):
            yield f"a number is {number}"
    if not isinstance(result, Loaded) or given.name.endswith((".parquet", ".arrow", ".lst", ".txt", ".yaml", ".yml")):
        return
    rows = rows_of(given.data)
    if len(rows) == 1 and isinstance(rows[0], dict) and isinstance(rows[0].get("audios"), list):
        return  # WenetSpeech: a sample for each segment of each recording
    counted = reader in ("samples", "clips", "pairs", "judged", "steps", "utterances") and not result.left_out
    if counted and len(result.samples) + len(result.skipped) != len(rows):
        yield f"{len(result.samples)} accepted and {len(result.skipped)} skipped of {len(rows)} rows"
        return
    if reader == "realsi" or result.left_out or "published" in given.name:
        return  # streams and questions that are made of several rows
    places = _row_numbers(given.data, len(rows))
    skipped = {bad.row for bad in result.skipped}
    accepted = [row for place, row in zip(places, rows, strict=True) if place not in skipped]
    if len(accepted) != len(result.samples):
        yield f"{len(result.samples)} accepted, but {len(accepted)} rows are not listed as skipped"
        return
    for row, value in zip(accepted, result.samples, strict=True):
        if not isinstance(row, dict):
            yield f"accepted {row!r}"
            continue
        used = USED.get(reader, set())
        if reader == "utterances" and not any(row.get(name) for name in ("audio", "audio_path", "audio_filepath")):
            used = used - {"start", "duration"}
        yield from wrong_fields(row, used)
        yield from _judge_value(reader, row, value)


def _row_numbers(data: bytes, count: int) -> list[int]:
    """The numbers by which errors call the rows: lines of JSON lines, else entries."""
    text = data.removeprefix(b"\xef\xbb\xbf")
    try:
        json.loads(text)
        return list(range(1, count + 1))
    except (ValueError, RecursionError):
        if text.lstrip().startswith(b"["):
            return list(range(1, count + 1))
        return [number for number, line in enumerate(text.split(b"\n"), 1) if line.strip()]


def _clips(value: Any) -> Sequence[AudioClip]:
    audio = getattr(value, "audio", ())
    return (audio,) if isinstance(audio, AudioClip) else audio


def _judge_value(reader: str, row: Mapping[str, Any], value: Any) -> Iterator[str]:
    texts = set(strings(row))
    sample = getattr(value, "sample", value)
    for reference in getattr(sample, "references", ()):
        if not reference and row.get("task") != "no_speech":
            yield "an empty reference"
        if reference not in texts and reference:
            yield f"the reference {reference!r} is not in the row"
    choices = getattr(sample, "choices", ())
    if len(set(choices)) != len(choices):
        yield f"choices {choices}"
    if choices and sample.references and sample.references[0] not in choices:
        yield f"the answer {sample.references[0]!r} is not one of {choices}"
    if any(choice not in texts for choice in choices):
        yield f"choices {choices} are not in the row"
    for clip in _clips(sample):
        ends = [str(Path(text)) + suffix for text in texts if text for suffix in ("", ".wav", ".flac")]
        if clip.path is not None and not clip.path.endswith(tuple(ends)):
            yield f"audio {clip.path} is not in the row"
        if clip.array is not None and np.abs(clip.array).max(initial=0) > 16:
            yield "samples of unscaled integers"
    if reader == "streams":
        for unit in value.units:
            if not 0 <= unit.start < unit.end <= value.seconds + 0.11:
                yield f"a unit from {unit.start} to {unit.end} in {value.seconds} s"
    if reader == "steps" and not all(0 <= label <= 1 for label in value.labels):
        yield f"labels {value.labels}"


# -- logs of streams ---------------------------------------------------------------------------------------------------


def _read_log(given: Input, folder: Path) -> Any:
    for other in (SEEDS / "logs").glob("*"):
        if other.name.partition("-")[0] == given.name.partition("-")[0]:
            name = LOG if other.suffix == ".log" else CONFIG
            (folder / name).write_bytes(given.data if other.name == given.name else other.read_bytes())
    return read_log(folder)


def _judge_log(given: Input, result: Any) -> Iterator[str]:
    if given.name.endswith(".yaml"):
        config = yaml.safe_load(given.data)
        if config.get("source_type") not in ("speech", "text", "youtube"):
            yield f"source_type {config.get('source_type')!r}"
        return
    lines = given.data.decode().removesuffix("\n").split("\n")
    if len(lines) != len(result):
        yield f"{len(result)} instances of {len(lines)} lines"
        return
    for line, instance in zip(lines, result, strict=True):
        row = json.loads(line)
        for name in ("index", "prediction", "prediction_length", "source_length", "reference"):
            if getattr(instance, name) != row[name] or isinstance(row[name], bool):
                yield f"{name}: {row[name]!r} became {getattr(instance, name)!r}"
        for name in ("delays", "elapsed", "durations"):
            times = row.get(name) or []
            if any(type(t) not in (int, float) or not 0 <= t < math.inf for t in times):
                yield f"{name}: {times!r}"
            elif name != "durations" and times != sorted(times):
                yield f"{name} go backwards: {times!r}"
        for text in texts_in(instance):
            if any("\ud800" <= letter <= "\udfff" for letter in text):
                yield f"half a character in {text[:50]!r}"


TARGETS = [
    FileTarget("rows", _read, _judge, weight=4.0),
    FileTarget("tables", _read, _judge, mutate_bytes, weight=1.0),
    FileTarget("logs", _read_log, _judge_log, weight=1.0),
]
