"""Targets that are files of data: rows of every kind, tables, logs of streams, audio, codes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import struct
import zlib
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
TONE = 0.3 * np.sin(np.arange(32_000) * 0.2)
MADE_OF_SEVERAL = ("realsi", "mustc", "streams")
"""Readers whose samples are not one a row."""


def _read(given: Input, folder: Path) -> Any:
    for name in ("a.wav", "b.wav"):
        soundfile.write(folder / name, TONE, 16_000)
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
        rows: dict[int, Any] = {}
        for number, line in enumerate(text.split(b"\n"), 1):
            if line.strip():
                rows[number] = None
                with contextlib.suppress(ValueError, RecursionError):
                    rows[number] = json.loads(line.decode("utf-8"))
        return rows


def judge_rows(given: Input, result: Any) -> Iterator[str]:
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


# -- audio, compared with what containers say of themselves ------------------------------------------------------------

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
    if wav.dtype != np.float32 or wav.ndim != 1 or not 0 < len(wav) <= (MAX_SECONDS + 1) * RATE:
        yield f"samples of type {wav.dtype} and shape {wav.shape}"
    if not np.isfinite(wav).all() or np.abs(wav).max() > 20:
        yield "samples that are no audio"
    data, claimed, original = given.data, None, {seed.name: seed.data for seed in _sounds()}[given.name]
    if original.startswith(data) and not given.name.endswith((".g722", ".raw")):
        whole = len(AudioClip(data=original).load(RATE))
        if len(wav) < whole - SLACK * RATE:
            yield f"cut to {len(data)} of {len(original)} bytes, {len(wav)} of {whole} samples"
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        claimed = _wav(data)
    elif data[:4] == b"fLaC" and len(data) >= 42 and not data[4] & 0x7F:
        packed = int.from_bytes(data[18:26], "big")
        rate, total = packed >> 44, packed & (2**36 - 1)
        claimed = total / rate if rate and total else None
        if claimed is not None and len(wav) / RATE > claimed:  # a total below the frames, all of which are read
            claimed = None
        yield from _flac(data, original)
    elif data[:4] == b"OggS":
        claimed, faults = _ogg(data)
        yield from faults
    if claimed is not None and abs(claimed - len(wav) / RATE) > SLACK + 0.02:
        yield f"{len(wav) / RATE:.3f} s, but the container says {claimed:.3f} s"


@cache
def _sounds() -> tuple[Input, ...]:
    """The files of seeds, and kinds of files that few write."""
    files = (file for file in sorted((SEEDS / "audio").glob("*")) if file.is_file())
    return (*(Input(file.name, file.read_bytes()) for file in files), *_rare_sounds())


def _rare_sounds() -> Iterator[Input]:
    kinds = {"AVR": "PCM_16", "SVX": "PCM_S8", "MAT4": "PCM_16", "MAT5": "PCM_16", "MPC2K": "PCM_16", "WVE": "ALAW",
             "NIST": "ULAW", "VOC": "PCM_16", "SDS": "PCM_16", "HTK": "PCM_16", "RF64": "PCM_16"}  # fmt: skip
    for kind, subtype in kinds.items():
        file = io.BytesIO()
        soundfile.write(file, TONE[:6000], 8000 if kind == "WVE" else RATE, format=kind, subtype=subtype)
        yield Input(f"tone.{kind.lower()}", file.getvalue())


def _wav(data: bytes) -> float | None:
    position, rate, width = 12, 0, 0
    while position + 8 <= len(data):
        name, (size,) = data[position : position + 4], struct.unpack("<I", data[position + 4 : position + 8])
        body = data[position + 8 : position + 8 + size]
        if name == b"fmt " and len(body) >= 16:
            tag, channels, rate, _, _, bits = struct.unpack("<HHIIHH", body[:16])
            width = channels * ((bits + 7) // 8) if tag in (1, 3, 0xFFFE) else 0
        if name == b"data":
            rest = len(data) - position - 8
            if size == 0 or size >= 0xFFFF_FF00 or (size > rest and size >> 16 in (0x7EFF, 0x7F00, 0x7FFF, 0x8000)):
                size = rest  # written to a pipe
            following = data[position + 8 + size + size % 2 :]
            return None if following[:4] == b"RIFF" or not width or not rate else size / width / rate
        position += 8 + size + size % 2
    return None


def _flac(data: bytes, original: bytes) -> Iterator[str]:
    """The MD5 of 16-bit samples, which the header holds, computed again; samples that have not changed are sound."""
    total = int.from_bytes(original[18:26], "big") & (2**36 - 1)  # of which soundfile would read no more
    packed = int.from_bytes(data[18:26], "big") >> 36 << 36 | total
    data = data[:18] + packed.to_bytes(8, "big") + data[26:]
    stated, bits = data[26:42], ((data[20] & 1) << 4 | data[21] >> 4) + 1
    if bits != 16 or not any(stated):
        return
    try:
        samples, unchanged = (soundfile.read(io.BytesIO(x), dtype="int16")[0] for x in (data, original))
    except soundfile.LibsndfileError:
        return
    if not np.array_equal(samples, unchanged) and hashlib.md5(samples.astype("<i2").tobytes()).digest() != stated:
        yield "the samples do not have the MD5 that the header states"


REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def page_crc(page: bytes) -> int:
    """The CRC-32 of an Ogg page: zlib's polynomial, but the highest bit first and without its inversions."""
    content = (page[:22] + bytes(4) + page[26:]).translate(REVERSED)
    return int(f"{zlib.crc32(content, 0xFFFF_FFFF) ^ 0xFFFF_FFFF:032b}"[::-1], 2)


def _ogg(data: bytes) -> tuple[float | None, list[str]]:
    """(seconds of a single stream, what is wrong with the pages)."""
    position, pages = 0, []
    while data[position : position + 4] == b"OggS" and len(data) >= position + 27:
        count = data[position + 26]
        end = position + 27 + count + sum(data[position + 27 : position + 27 + count])
        pages.append(data[position:end])
        position = end
    numbers = [int.from_bytes(page[18:22], "little") for page in pages]
    single = len({page[14:18] for page in pages}) == 1 and sum(page[5] & 2 for page in pages) == 2  # not chained
    ended = bool(pages[-1][5] & 4)
    faults = {
        "bytes that are no Ogg page": position < len(data) and not ended,  # after the end tags may follow
        "the last page is cut": position > len(data),
        "a page with a wrong checksum": any(page_crc(p) != int.from_bytes(p[22:26], "little") for p in pages),
        "pages are missing": single and numbers != list(range(numbers[0], numbers[0] + len(numbers))),
        "the end of the stream is missing": single and not ended,
    }
    first, granule = pages[0][27 + pages[0][26] :], int.from_bytes(pages[-1][6:14], "little", signed=True)
    seconds = None
    if single and first[:8] == b"OpusHead" and len(first) >= 12:
        seconds = (granule - int.from_bytes(first[10:12], "little")) / 48_000
    elif single and first[:7] == b"\x01vorbis" and (rate := int.from_bytes(first[12:16], "little")):
        seconds = granule / rate
    return seconds, [fault for fault, found in faults.items() if found]


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
    Target("rows", _read, judge_rows, weight=4.0),
    Target("tables", _read, judge_rows, mutate_bytes),
    Target("logs", _read_log, _judge_log),
    Target("audio", _load, _judge_audio, mutate_bytes, weight=4.0, more_seeds=lambda: list(_rare_sounds())),
    Target("codes", _codes, _judge_codes, mutate_safetensors),
]
