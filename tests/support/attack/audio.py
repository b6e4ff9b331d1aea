"""Audio files, compared with what their containers say of their length, and files of codes."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import soundfile
import torch

from audiorl.audio import MAX_SECONDS, SLACK, AudioClip, AudioError, probe
from tests.support.attack.mutation import mutate_bytes, mutate_safetensors
from tests.support.attack.targets import SEEDS, FileTarget, Input
from tokenizers_audio import CodeShards, load_codes

RATE = 16_000


def _load(given: Input, folder: Path) -> Any:
    path = folder / given.name
    path.write_bytes(given.data)
    clips = {"path": AudioClip(path=str(path)), "data": AudioClip(data=given.data)}
    results: dict[str, Any] = {}
    for kind, clip in clips.items():
        try:
            results[kind] = (probe(clip), clip.load(RATE))
        except AudioError as error:
            results[kind] = error
    if isinstance(results["path"], AudioError):
        raise results["path"]
    return results


def _judge(given: Input, results: Any) -> Iterator[str]:
    _, wav = results["path"]
    if isinstance(results["data"], AudioError):
        if not given.name.endswith((".g722", ".raw")):
            yield f"loads by path, but not from bytes: {results['data']}"
    elif abs(len(wav) - len(results["data"][1])) > SLACK * RATE and not given.name.endswith(".g722"):
        yield "path and bytes give different lengths"
    if wav.dtype != np.float32 or wav.ndim != 1 or not len(wav):
        yield f"samples of type {wav.dtype} and shape {wav.shape}"
    if not np.isfinite(wav).all() or np.abs(wav).max() > 20:
        yield "samples that are no audio"
    seconds = len(wav) / RATE
    if seconds > MAX_SECONDS + 1:
        yield f"{seconds:.0f} s"
    yield from container(given.data, seconds, (SEEDS / "audio" / given.name).read_bytes())


# -- what containers say -----------------------------------------------------------------------------------------------


def container(data: bytes, seconds: float, original: bytes) -> Iterator[str]:
    """Where audio of this length is not what the bytes of its file say, by parsers of their own."""
    claimed = None
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        claimed, missing = _wav(data)
        if missing:
            yield f"{missing} bytes of the data chunk are missing"
    elif data[:4] == b"fLaC":
        claimed = _flac(data)
        yield from _flac_md5(data, original)
    elif data[:4] == b"OggS":
        claimed, faults = _ogg(data)
        yield from faults
    elif data[:4] == b"FORM" and data[8:12] in (b"AIFF", b"AIFC"):
        claimed = _aiff(data)
    elif data[:2] in (b"\xff\xfb", b"\xff\xf3", b"\xff\xf2", b"\xff\xfa"):
        claimed = _mp3(data)
    if claimed is not None and abs(claimed - seconds) > SLACK + 0.02:
        yield f"{seconds:.3f} s, but the container says {claimed:.3f} s"


def _wav(data: bytes) -> tuple[float | None, int]:
    """(seconds, bytes that are missing)."""
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
            missing = max(0, size - (len(data) - position - 8))
            return (size / width / rate if width and rate else None), missing
        position += 8 + size + size % 2
    return None, 0


def _flac(data: bytes) -> float | None:
    if len(data) < 42 or data[4] & 0x7F:
        return None
    packed = int.from_bytes(data[18:26], "big")
    rate, total = packed >> 44, packed & (2**36 - 1)
    return total / rate if rate and total else None


def _flac_md5(data: bytes, original: bytes) -> Iterator[str]:
    """The samples' MD5, which the header holds, computed again; samples that have not changed are sound."""
    stated = data[26:42]
    if not any(stated) or data[4] & 0x7F:
        return
    bits = ((data[20] & 1) << 4 | data[21] >> 4) + 1
    if bits not in (16, 24):
        return
    try:
        samples, _ = soundfile.read(io.BytesIO(data), dtype="int32", always_2d=True)
    except soundfile.LibsndfileError:
        return
    if np.array_equal(samples, soundfile.read(io.BytesIO(original), dtype="int32", always_2d=True)[0]):
        return
    samples = samples >> (32 - bits)
    content = samples.astype("<i2").tobytes() if bits == 16 else b"".join(_int24(x) for x in samples.ravel().tolist())
    if hashlib.md5(content).digest() != stated:
        yield "the samples do not have the MD5 that the header states"


def _int24(value: int) -> bytes:
    return (value & 0xFFFFFF).to_bytes(3, "little")


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte << 24
        for _ in range(8):
            value = (value << 1) ^ (0x04C11DB7 if value & 0x8000_0000 else 0)
        table.append(value & 0xFFFF_FFFF)
    return table


_CRC = _crc_table()


def _page_crc(page: bytes) -> int:
    value = 0
    for byte in page[:22] + bytes(4) + page[26:]:
        value = ((value << 8) & 0xFFFF_FFFF) ^ _CRC[(value >> 24) ^ byte]
    return value


def _ogg(data: bytes) -> tuple[float | None, list[str]]:
    """(seconds, what is wrong with the pages)."""
    faults: list[str] = []
    position, pages = 0, []
    while data[position : position + 4] == b"OggS" and len(data) >= position + 27:
        count = data[position + 26]
        end = position + 27 + count + sum(data[position + 27 : position + 27 + count])
        pages.append(data[position:end])
        position = end
    if position < len(data) and not (pages and pages[-1][5] & 4):  # after the end of the stream tags may follow
        faults.append(f"{len(data) - position} bytes that are no Ogg page")
    if position > len(data):
        faults.append("the last page is cut")
    if any(_page_crc(page) != int.from_bytes(page[22:26], "little") for page in pages):
        faults.append("a page with a wrong checksum")
    if len({page[14:18] for page in pages}) > 1:
        return None, faults
    numbers = [int.from_bytes(page[18:22], "little") for page in pages]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        faults.append("pages are missing")
    if not pages[-1][5] & 4:
        faults.append("the end of the stream is missing")
    first = pages[0][27 + pages[0][26] :]
    granule = int.from_bytes(pages[-1][6:14], "little", signed=True)
    if first[:8] == b"OpusHead" and len(first) >= 12:
        return (granule - int.from_bytes(first[10:12], "little")) / 48_000, faults
    if first[:7] == b"\x01vorbis" and len(first) >= 16:
        rate = int.from_bytes(first[12:16], "little")
        return (granule / rate if rate else None), faults
    return None, faults


def _aiff(data: bytes) -> float | None:
    position = 12
    while position + 8 <= len(data):
        size = int.from_bytes(data[position + 4 : position + 8], "big")
        if data[position : position + 4] == b"COMM" and size >= 18:
            body = data[position + 8 : position + 26]
            frames = int.from_bytes(body[2:6], "big")
            exponent, mantissa = int.from_bytes(body[8:10], "big") & 0x7FFF, int.from_bytes(body[10:18], "big")
            rate = mantissa * 2.0 ** (exponent - 16383 - 63) if exponent < 16_500 else 0.0
            return frames / rate if rate >= 1 else None
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
    FileTarget("audio", _load, _judge, mutate_bytes, weight=4.0),
    FileTarget("codes", _codes, _judge_codes, mutate_safetensors, weight=1.0),
]
