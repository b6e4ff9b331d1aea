"""Targets that are files of data: rows of every kind, tables, logs of streams, audio, codes."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import soundfile
import torch
import yaml

from audiorl.audio import MAX_SECONDS, SLACK, AudioClip, AudioError
from audiorl.data.manifest import Loaded, read_samples
from audiorl.data.preferences import read_judged, read_pairs, read_steps
from audiorl.data.text import read_passages, read_questions
from audiorl.tasks.simul.formats import read_streams
from audiorl.tasks.simul.logs import CONFIG, LOG, read_log
from audiorl.tasks.simul.talks import read_segments
from audiorl.tasks.tts.texts import read_utterances
from tests.support.attack.mutation import mutate_bytes, mutate_safetensors
from tests.support.attack.targets import SEEDS, Input, Target
from tokenizers_audio import CodeShards, load_codes

READERS = {
    "samples": lambda path: read_samples(path, on_error="skip"),
    "clips": lambda path: read_samples(path, on_error="skip", check_audio=True),
    "pairs": lambda path: read_pairs(path, on_error="skip"),
    "judged": lambda path: read_judged(path, on_error="skip"),
    "steps": lambda path: read_steps(path, on_error="skip"),
    "streams": lambda path: read_streams(path, on_error="skip"),
    "mustc": lambda path: read_streams(path, on_error="skip", source_language="en", target_language="es"),
    "realsi": lambda path: read_streams(path, on_error="skip"),
    "utterances": lambda path: read_utterances(path, on_error="skip"),
    "passages": read_passages,
    "questions": read_questions,
    "segments": read_segments,
}
"""By the first word of a seed's name, such as samples-mmau.jsonl."""
MADE_OF_SEVERAL = ("realsi", "mustc", "streams")
"""Readers whose samples are not one a row."""


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


def parts_of(value: Any, skipped: tuple[str, ...] = ("metadata", "array")) -> Iterator[Any]:
    """Every text and number in a JSON value, or in what a reader made of rows, metadata aside."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from (key, *parts_of(part))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from parts_of(part)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            if name not in skipped:
                yield from parts_of(getattr(value, name))
    elif isinstance(value, str | int | float):
        yield value


def unsound(value: Any) -> Iterator[str]:
    """Half characters and numbers that are not finite: nothing that is accepted may hold them."""
    for part in parts_of(value):
        if isinstance(part, str) and any("\ud800" <= letter <= "\udfff" for letter in part):
            yield f"half a character in {part[:50]!r}"
        if isinstance(part, float) and not math.isfinite(part):
            yield f"a number is {part}"


def rows_of(data: bytes) -> dict[int, Any]:
    """The rows of JSON text by the numbers that errors give them; None for a line that is not JSON."""
    text = data.removeprefix(b"\xef\xbb\xbf")
    try:
        value = json.loads(text)
        return dict(enumerate(value if isinstance(value, list) else [value], 1))
    except (ValueError, RecursionError):
        lines = enumerate(text.split(b"\n"), 1)
        return {number: _parsed(line) for number, line in lines if line.strip()}


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None


def _judge_rows(given: Input, result: Any) -> Iterator[str]:
    """Each accepted row is an object, and the texts of its sample are in it."""
    reader, _, kind = given.name.partition("-")
    yield from unsound(list(result.values()) if isinstance(result, Mapping) else result)
    if not isinstance(result, Loaded) or not given.name.endswith((".json", ".jsonl")):
        return
    rows = rows_of(given.data)
    wenetspeech = any(isinstance(row, dict) and isinstance(row.get("audios"), list) for row in rows.values())
    if wenetspeech or result.left_out or "published" in kind or reader in MADE_OF_SEVERAL:
        return
    skipped = {bad.row for bad in result.skipped}
    accepted = [row for number, row in rows.items() if number not in skipped]
    if len(accepted) != len(result.samples):
        yield f"{len(result.samples)} accepted, but {len(accepted)} rows are not listed as skipped"
        return
    for row, value in zip(accepted, result.samples, strict=True):
        if not isinstance(row, dict):
            yield f"accepted {row!r}"
            continue
        texts = {str(part).strip() for part in parts_of(row, ())}
        texts |= {str(int(part)) for part in parts_of(row, ()) if isinstance(part, float) and part == part // 1}
        sample = getattr(value, "sample", value)
        choices, references = getattr(sample, "choices", ()), getattr(sample, "references", ())
        for text in (*choices, *references):
            if text not in texts and (text or row.get("task") != "no_speech"):
                yield f"{text!r} is not in the row"
        if len(set(choices)) != len(choices) or (choices and references and references[0] not in choices):
            yield f"choices {choices}, answer {references}"
        clips = getattr(sample, "audio", ())
        for clip in (clips,) if isinstance(clips, AudioClip) else clips:
            ends = tuple(str(Path(text)) + suffix for text in texts if text for suffix in ("", ".wav", ".flac"))
            if clip.path is not None and not clip.path.endswith(ends):
                yield f"audio {clip.path} is not in the row"
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
        source = yaml.safe_load(given.data).get("source_type")
        if source not in ("speech", "text", "youtube"):
            yield f"source_type {source!r}"
        return
    lines = given.data.decode().removesuffix("\n").split("\n")
    if len(lines) != len(result):
        yield f"{len(result)} instances of {len(lines)} lines"
        return
    yield from unsound(result)
    for line, instance in zip(lines, result, strict=True):
        row = json.loads(line)
        for name in ("index", "prediction", "prediction_length", "source_length", "reference"):
            if getattr(instance, name) != row[name] or isinstance(row[name], bool):
                yield f"{name}: {row[name]!r} became {getattr(instance, name)!r}"
        for name in ("delays", "elapsed"):
            if row.get(name) and row[name] != sorted(row[name]):
                yield f"{name} go backwards: {row[name]!r}"


# -- audio, compared with what containers say of their length ----------------------------------------------------------

RATE = 16_000


def _load(given: Input, folder: Path) -> Any:
    path = folder / given.name
    path.write_bytes(given.data)
    wav = AudioClip(path=str(path)).load(RATE)
    try:
        return wav, AudioClip(data=given.data).load(RATE)
    except AudioError as error:
        return wav, error


def _judge_audio(given: Input, result: Any) -> Iterator[str]:
    wav, from_bytes = result
    headerless = given.name.endswith((".g722", ".raw"))
    if isinstance(from_bytes, AudioError) and not headerless:
        yield f"loads by path, but not from bytes: {from_bytes}"
    elif not headerless and abs(len(wav) - len(from_bytes)) > SLACK * RATE:
        yield "path and bytes give different lengths"
    if wav.dtype != np.float32 or wav.ndim != 1 or not len(wav) or len(wav) > (MAX_SECONDS + 1) * RATE:
        yield f"samples of type {wav.dtype} and shape {wav.shape}"
    if not np.isfinite(wav).all() or np.abs(wav).max() > 20:
        yield "samples that are no audio"
    claimed = claimed_seconds(given.data)
    if claimed is not None and abs(claimed - len(wav) / RATE) > SLACK + 0.02:
        yield f"{len(wav) / RATE:.3f} s, but the container says {claimed:.3f} s"


def claimed_seconds(data: bytes) -> float | None:
    """The length that a container states, by parsers of their own; None where it states none."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return _wav(data)
    if data[:4] == b"fLaC" and len(data) >= 42 and not data[4] & 0x7F:
        packed = int.from_bytes(data[18:26], "big")
        rate, total = packed >> 44, packed & (2**36 - 1)
        return total / rate if rate and total else None
    if data[:4] == b"OggS":
        return _ogg(data)
    if data[:4] == b"FORM" and data[8:12] in (b"AIFF", b"AIFC"):
        return _aiff(data)
    if data[:2] in (b"\xff\xfb", b"\xff\xf3", b"\xff\xf2", b"\xff\xfa"):
        return _mp3(data)
    return None


def _wav(data: bytes) -> float | None:
    position, rate, width = 12, 0, 0
    while position + 8 <= len(data):
        name, (size,) = data[position : position + 4], struct.unpack("<I", data[position + 4 : position + 8])
        body = data[position + 8 : position + 8 + size]
        if name == b"fmt " and len(body) >= 16:
            tag, channels, rate, _, _, bits = struct.unpack("<HHIIHH", body[:16])
            width = channels * ((bits + 7) // 8) if tag in (1, 3, 0xFFFE) else 0
        if name == b"data":
            if size == 0 or size >= 0xFFFF_FF00:  # written to a pipe
                size = len(data) - position - 8
            return size / width / rate if width and rate else None
        position += 8 + size + size % 2
    return None


def _ogg(data: bytes) -> float | None:
    """By the last page of a single stream whose pages are all there; infinite where one is missing or cut."""
    position, pages = 0, []
    while data[position : position + 4] == b"OggS" and len(data) >= position + 27:
        count = data[position + 26]
        end = position + 27 + count + sum(data[position + 27 : position + 27 + count])
        pages.append(data[position:end])
        position = end
    if len({page[14:18] for page in pages}) > 1:
        return None
    numbers = [int.from_bytes(page[18:22], "little") for page in pages]
    complete = numbers == list(range(numbers[0], numbers[0] + len(numbers))) and pages[-1][5] & 4
    if position > len(data) or not complete:
        return math.inf
    first = pages[0][27 + pages[0][26] :]
    granule = int.from_bytes(pages[-1][6:14], "little", signed=True)
    if first[:8] == b"OpusHead" and len(first) >= 12:
        return (granule - int.from_bytes(first[10:12], "little")) / 48_000
    rate = int.from_bytes(first[12:16], "little") if first[:7] == b"\x01vorbis" else 0
    return granule / rate if rate else None


def _aiff(data: bytes) -> float | None:
    position = 12
    while position + 8 <= len(data):
        size = int.from_bytes(data[position + 4 : position + 8], "big")
        if data[position : position + 4] == b"COMM" and size >= 18:
            body = data[position + 8 : position + 26]
            exponent, mantissa = int.from_bytes(body[8:10], "big") & 0x7FFF, int.from_bytes(body[10:18], "big")
            rate = mantissa * 2.0 ** (exponent - 16383 - 63) if exponent < 16_500 else 0.0
            return int.from_bytes(body[2:6], "big") / rate if rate >= 1 else None
        position += 8 + size + size % 2
    return None


def _mp3(data: bytes) -> float | None:
    """By the number of frames in a Xing or Info header, whose encoder's delay is part of them."""
    version, index, mono = data[1] >> 3 & 3, data[2] >> 2 & 3, data[3] >> 6 == 3
    place = 4 + ((17 if mono else 32) if version == 3 else (9 if mono else 17))
    if data[place : place + 4] not in (b"Xing", b"Info") or not data[place + 7] & 1 or version == 1 or index == 3:
        return None
    rate = (44_100, 48_000, 32_000)[index] // {3: 1, 2: 2, 0: 4}[version]
    samples = 1152 if version == 3 else 576
    seconds = int.from_bytes(data[place + 8 : place + 12], "big") * samples / rate - 0.08
    # Nothing, or less than 2 kbit/s: the number is damaged, not the audio.
    return seconds if 0 < seconds * 250 < len(data) else None


# -- codes -------------------------------------------------------------------------------------------------------------

CODEC: Any = SimpleNamespace(identity="attacked codec 3 x 64", num_codebooks=3, codebook_size=64)


def _codes(given: Input, folder: Path) -> Any:
    (folder / "00000.safetensors").write_bytes(given.data)
    if given.name.startswith("shard"):
        shards = CodeShards(folder, CODEC)
        return {name: shards[name] for name in shards}
    return {"codes": load_codes(folder / "00000.safetensors", CODEC)}


def _judge_codes(given: Input, result: Any) -> Iterator[str]:
    (size,) = struct.unpack("<Q", given.data[:8])
    metadata = json.loads(given.data[8 : 8 + size])["__metadata__"]
    if metadata.get("tokenizer") != CODEC.identity:
        yield f"codes of {metadata.get('tokenizer')!r}"
    if given.name.startswith("shard") and list(result) != json.loads(metadata["ids"]):
        yield "other ids than the header's"
    for name, codes in result.items():
        if not isinstance(name, str):
            yield f"an id {name!r}"
        if codes.dtype != torch.int64 or codes.ndim not in (2, 3) or codes.shape[-2] != CODEC.num_codebooks:
            yield f"{name!r}: codes {codes.dtype} {tuple(codes.shape)}"
        elif codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < CODEC.codebook_size:
            yield f"{name!r}: codes from {int(codes.min())} to {int(codes.max())}"


TARGETS = [
    Target("rows", _read, _judge_rows, weight=4.0),
    Target("tables", _read, _judge_rows, mutate_bytes),
    Target("logs", _read_log, _judge_log),
    Target("audio", _load, _judge_audio, mutate_bytes, weight=4.0),
    Target("codes", _codes, _judge_codes, mutate_safetensors),
]
