"""Audio whose header says another length than there is, and stereo whose channels cancel out."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from audiorl.audio import AudioClip, load_clip, probe
from audiorl.models.families import qwen2_audio, whisper
from audiorl.rewards.asr import Hallucination
from audiorl.types import Message, Rollout, Sample, Segment
from tests.cases import Case, Refused

RATE = 16_000
TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)).astype(np.float32)
PCM = (TONE * 32767).astype("<i2").tobytes()


def _file(format_: str, subtype: str | None = None, wav: np.ndarray = TONE, rate: int = RATE) -> bytearray:
    buffer = io.BytesIO()
    soundfile.write(buffer, wav, rate, format=format_, subtype=subtype)
    return bytearray(buffer.getvalue())


def _patched(content: bytes, mark: bytes, after: int, value: bytes) -> bytes:
    """The content with a value so many bytes after the beginning of a mark."""
    place = content.index(mark) + after
    return bytes(content[:place]) + value + bytes(content[place + len(value) :])


def _wav(size: int, content: bytes = PCM, coding: int = 1, bits: int = 16, tail: bytes = b"") -> bytes:
    width = bits // 8
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, coding, 1, RATE, RATE * width, width, bits)
    return b"RIFF" + struct.pack("<I", 36) + b"WAVE" + form + b"data" + struct.pack("<I", size) + content + tail


def _seconds(content: Callable[[], bytes | bytearray], suffix: str = "wav") -> Callable[[Path], Any]:
    """What `probe` says, what a file and its bytes load to, and whether three parts of it are those of the whole."""

    def run(folder: Path) -> Any:
        path = folder / f"a.{suffix}"
        path.write_bytes(content())
        info = probe(AudioClip(path=str(path)))
        rate = info.sample_rate
        whole = load_clip(AudioClip(path=str(path)), rate)
        np.testing.assert_array_equal(whole, load_clip(AudioClip(data=path.read_bytes()), rate))
        for start in (0.0, 0.3, 0.8 * info.seconds - 0.1):
            part = load_clip(AudioClip(path=str(path), start=start, duration=0.125), rate)
            np.testing.assert_allclose(part, whole[round(start * rate) :][: len(part)], atol=1e-3)
        return [round(info.seconds, 2), round(len(whole) / rate, 2)]

    return run


def _flac(total: int | None, cut: float = 1.0, wav: np.ndarray = TONE, rate: int = RATE) -> bytes:
    """A FLAC file whose header has this number of samples; None: not known."""
    content = _file("FLAC", wav=wav, rate=rate)
    content[21] &= 0xF0
    content[22:26] = struct.pack(">I", total or 0)
    return bytes(content[: int(len(content) * cut)])


def _overrun(folder: Path) -> float:
    """`overrun` of 40 words in a second."""
    (folder / "a.flac").write_bytes(_flac(None))
    clip = AudioClip(path=str(folder / "a.flac"))
    sample = Sample(id="a", messages=(Message("user", (clip,)),), references=("ten words",), task="asr")
    nothing = torch.zeros(0, dtype=torch.long)
    segment = Segment(nothing, nothing, nothing.float(), " ".join(["word"] * 40))
    return Hallucination()([Rollout(sample, (segment,), "a")])[0].parts["overrun"]


def _mp3(wav: np.ndarray, rate: int = RATE, mode: str = "CONSTANT") -> bytes:
    buffer = io.BytesIO()
    options = dict(format="MP3", subtype="MPEG_LAYER_III", bitrate_mode=mode, compression_level=0.5)
    with soundfile.SoundFile(buffer, "w", rate, 1 if wav.ndim == 1 else wav.shape[1], **options) as file:
        file.write(wav)
    return buffer.getvalue()


def _xing(content: bytes, frames: int | None) -> bytes:
    """The MP3 file with another number of frames in its Xing or Info header; None: without it."""
    mark = b"Xing" if b"Xing" in content else b"Info"
    if frames is None:
        return content[content.index(content[:2], content.index(mark)) :]
    return _patched(content, mark, 8, struct.pack(">I", frames))


def _plain_mp3(wav: np.ndarray = TONE, rate: int = RATE) -> bytes:
    """The MP3 file of a constant bit rate without its first frame, which says how long it is."""
    return _xing(_mp3(wav, rate), None)


def _bare_flac(rate: int = RATE) -> bytes:
    """The FLAC file with a STREAMINFO block alone, which is then marked as the last."""
    content, place = bytes(_file("FLAC", rate=rate)), 4
    while True:
        last, place = content[place] >> 7, place + 4 + int.from_bytes(content[place + 1 : place + 4], "big")
        if last:
            return b"fLaC\x80" + content[5:42] + content[place:]


def _rare(kind: str, subtype: str, half: bool) -> Callable[[Path], Any]:
    def content() -> bytes:
        whole = bytes(_file(kind, subtype, rate=8000 if kind == "WVE" else RATE))
        return whole[: len(whole) // 2 if half else None]

    return _seconds(content, kind.lower())


RARE = {
    "AVR": "PCM_16", "SVX": "PCM_16", "MAT4": "FLOAT", "MAT5": "PCM_16", "MPC2K": "PCM_16", "WVE": "ALAW",
    "NIST": "ULAW", "VOC": "PCM_U8", "W64": "PCM_24",
}  # fmt: skip
"""Kinds whose header says how long the sound is."""
LENGTHLESS = {"IRCAM": "PCM_16", "PAF": "PCM_16", "PVF": "PCM_16"}


def _noise() -> np.ndarray:
    """Four seconds, loud and quiet by turns, of which an encoder's bit rate varies."""
    rng = np.random.default_rng(0)
    levels = np.repeat(rng.random(40) ** 4, RATE // 10)
    return (0.2 * levels * rng.standard_normal(4 * RATE)).astype(np.float32)


def _level(channels: list[np.ndarray], **fields: Any) -> Callable[[Path], float]:
    def run(folder: Path) -> float:
        soundfile.write(folder / "a.wav", np.stack(channels, 1), RATE)
        wav = AudioClip(path=str(folder / "a.wav"), **fields).load(RATE)
        return round(float(np.sqrt(np.mean(wav**2))), 2)

    return run


def _tokens(policy: Callable[[], Any], samples: int, rate: int) -> Callable[[Path], int]:
    def run(folder: Path) -> int:
        wav = np.tile(TONE, 50)[:samples]
        return policy().audio.encoder_output(AudioClip(array=wav, sample_rate=rate)).shape[0]

    return run


ONE, TWO = [1.0, 1.0], [2.0, 2.0]
ID3 = b"ID3\3\0\0\0\0\1\0" + b"TIT2\0\0\0\x76\0\0\0" + b"Xing and Info" + bytes(104)
PICTURE = b"ID3 in a picture" + bytes(12_758)
ART = b"ID3\3\0\0\0\0\x64\0" + b"APIC" + struct.pack(">I", 12_790) + b"\0\0" + bytes(16) + PICTURE
LIST = b"LIST" + struct.pack("<I", 12) + b"INFOISFT\0\0\0\0"


def _w64(size: int) -> bytes:
    return _patched(_file("W64"), b"data\xf3\xac", 16, struct.pack("<Q", size))


def _rf64(size: int, samples: int = 0, magic: bytes = b"RF64") -> bytes:
    return magic + _patched(_file("RF64"), b"ds64", 16, struct.pack("<QQ", size, samples))[4:]


def _big_endian() -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, TONE, RATE, format="WAV", subtype="PCM_16", endian="BIG")
    return _patched(buffer.getvalue(), b"data", 4, bytes(4))


def _aiff(size: int, samples: int) -> bytes:
    content = _patched(_file("AIFF"), b"SSND", 4, struct.pack(">I", size))
    return _patched(content, b"COMM", 10, struct.pack(">I", samples))


def _caf(size: int) -> bytes:
    return _patched(_file("CAF"), b"data", 4, struct.pack(">q", size))


def _au(size: int) -> bytes:
    return _patched(_file("AU"), b".snd", 8, struct.pack(">I", size))


SOX, EMPTY = "kaldi-asr/kaldi#1567", "holds no samples"

CASES = [
    Case("A8", "libsndfile/libsndfile#1038", "FLAC without a length, 1 s", _seconds(lambda: _flac(None)), ONE),
    Case("A8", "bastibe/python-soundfile#450", "40 words heard in 1 s of it", _overrun, 1.0),
    Case("A8", "own", "such a FLAC in stereo at 44.1 kHz, 2.5 s",
         _seconds(lambda: _flac(None, 1.0, np.tile(TONE, 7)[:110_250, None].repeat(2, 1) * [1, 0.5], 44_100), "flac"),
         [2.5, 2.5]),
    Case("A8", "own", "such a FLAC cut in half", _seconds(lambda: _flac(None, 0.5)), Refused("copy or download")),
    Case("A8", "own", "FLAC that says 0.5 s and holds 1 s", _seconds(lambda: _flac(RATE // 2)), ONE),
    Case("A8", "own", "FLAC that says 6 ms too much", _seconds(lambda: _flac(RATE + 100)), ONE),
    Case("A8", "own", "FLAC that says 2 s and holds 1 s", _seconds(lambda: _flac(2 * RATE)),
         Refused("truncated (1.00 of 2.00 s are there)")),
    *(
        Case("A9", source, f"WAV, data size 0x{size:X}", _seconds(lambda size=size: _wav(size)), ONE)
        for source, size in (
            ("rs1729/RS#39", 0x7FFF_F000),
            ("EliasOenal/multimon-ng#196", 0x7FFF_FFDB),
            ("Borewit/music-metadata#707", 0x8000_0000),
            ("kkroening/ffmpeg-python#118", 0xFFFF_FFFF),
            ("TooTallNate/node-wav#20", 0),
            ("own", 0x7FFF_FFD3),
        )
    ),
    Case("A9", SOX, "AIFF, sizes 0", _seconds(lambda: _aiff(0, 0), "aiff"), ONE),
    Case("A9", SOX, "CAF, size -1", _seconds(lambda: _caf(-1), "caf"), ONE),
    Case("A9", "own", "AIFF as SoX writes to a pipe", _seconds(lambda: _aiff(0x7F00_0008, 0x3F80_0000), "aiff"), ONE),
    Case("A9", "own", "24-bit WAV, size 0", _seconds(lambda: _patched(_file("WAV", "PCM_24"), b"data", 4, bytes(4))),
         ONE),
    Case("A9", "own", "WAVE_FORMAT_EXTENSIBLE of floats, 0x7FFFF000",
         _seconds(lambda: _patched(_file("WAVEX", "FLOAT"), b"data", 4, struct.pack("<I", 0x7FFF_F000))), ONE),
    Case("A9", "own", "mu-law WAV at 8 kHz, size 0",
         _seconds(lambda: _patched(_file("WAV", "ULAW", TONE, 8000), b"data", 4, bytes(4))), TWO),
    Case("A9", "own", "size 0, the recording begins with silence", _seconds(lambda: _wav(0, bytes(16_000) + PCM)),
         [1.5, 1.5]),
    Case("A9", "own", "AU, size 0", _seconds(lambda: _au(0), "au"), ONE),
    Case("A9", "own", "AU, size 2^31", _seconds(lambda: _au(2**31), "au"), ONE),
    Case("A9", "own", "AU, size -1", _seconds(lambda: _au(2**32 - 1), "au"), ONE),
    Case("A9", "own", "RF64 as FFmpeg writes to a pipe, sizes 0", _seconds(lambda: _rf64(0)), ONE),
    Case("A9", "own", "RF64, size -1", _seconds(lambda: _rf64(2**64 - 1)), ONE),
    Case("A9", "own", "BW64, size -1", _seconds(lambda: _rf64(2**64 - 1, 0, b"BW64")), ONE),
    Case("A9", "own", "W64, size 0", _seconds(lambda: _w64(0), "w64"), ONE),
    Case("A9", "own", "CAF, size 0", _seconds(lambda: _caf(0), "caf"), ONE),
    Case("A9", "own", "WAV without a sample", _seconds(lambda: _wav(0, b"")), Refused(EMPTY)),
    Case("A9", "own", "WAV without a sample, but a title", _seconds(lambda: _wav(0, LIST)), Refused(EMPTY)),
    Case("A9", "own", "AIFF without a sample", _seconds(lambda: _file("AIFF", wav=TONE[:0]), "aiff"), Refused(EMPTY)),
    *(
        Case("A10", source, f"WAV, data size {more} too large", _seconds(lambda more=more: _wav(32_000 + more)), ONE)
        for source, more in (("llfbandit/record#96", 44), ("cjcliffe/CubicSDR#616", 16), ("own", 1), ("own", 3000))
    ),
    Case("A10", "own", "AIFF 44 bytes too large", _seconds(lambda: _aiff(32_052, RATE + 22), "aiff"), ONE),
    Case("A10", "own", "CAF 44 bytes too large", _seconds(lambda: _caf(32_048), "caf"), ONE),
    Case("A10", "own", "RF64 44 bytes too large", _seconds(lambda: _rf64(32_044)), ONE),
    Case("A10", "own", "AU 24 bytes too large", _seconds(lambda: _au(32_024), "au"), ONE),
    Case("A10", "own", "WAV cut in half", _seconds(lambda: _wav(64_000)),
         Refused("truncated (32000 of 64000 bytes are there)")),
    Case("A10", "own", "WAV cut by 0.2 s", _seconds(lambda: _wav(38_400)), Refused("truncated")),
    Case("A10", "own", "RF64 cut in half", _seconds(lambda: _rf64(64_000)), Refused("truncated")),
    Case("A10", "own", "CAF cut by 0.2 s", _seconds(lambda: _caf(38_404), "caf"), Refused("truncated")),
    Case("A11", "libsndfile/libsndfile#753", "GSM 6.10 in WAV",
         _seconds(lambda: _file("WAV", "GSM610", TONE[:8000], 8000)), ONE),
    Case("A11", "own", "GSM 6.10 in WAV, 5 s",
         _seconds(lambda: _file("WAV", "GSM610", np.tile(TONE, 3)[:40_000], 8000)), [5.0, 5.0]),
    Case("A11", "own", "GSM 6.10 in AIFF", _seconds(lambda: _file("AIFF", "GSM610", TONE[:16_000], 8000), "aiff"), TWO),
    Case("A11", "own", "GSM 6.10 in WAV from a pipe",
         _seconds(lambda: _patched(_file("WAV", "GSM610", TONE, 8000), b"data", 4, struct.pack("<I", 0x7FFF_EFF4))),
         TWO),
    Case("A11", "own", "GSM 6.10 in W64", _seconds(lambda: _file("W64", "GSM610", TONE, 8000), "w64"), TWO),
    Case("A27", "m-bain/whisperX#750", "stereo out of phase", _level([TONE, -TONE]), Refused("cancel each other out")),
    Case("A27", "pytorch/audio#877", "one channel of it", _level([TONE, -TONE], channel=1), 0.35),
    Case("A27", "own", "stereo nearly out of phase", _level([TONE, -0.9 * TONE]), Refused("cancel each other out")),
    Case("A27", "own", "four channels that cancel out in pairs", _level([TONE, -TONE, TONE[::-1], -TONE[::-1]]),
         Refused("cancel each other out")),
    Case("A27", "own", "one silent channel", _level([TONE, 0 * TONE]), 0.18),
    Case("A27", "own", "two tones", _level([TONE, np.sin(np.arange(RATE) * 0.3)]), 0.40),
    Case("A27", "own", "silence with noise of the last bit", _level([TONE * 1e-4, TONE * -1e-4]), 0.0),
    Case("A28", "own", "30 s + 1 sample at 22.05 kHz for Qwen2-Audio",
         _tokens(lambda: qwen2_audio.tiny(window=30), 30 * 22_050 + 1, 22_050), 750),
    Case("A28", "own", "30 s + 2 samples at 48 kHz for Whisper, a window of 10 s",
         _tokens(whisper.tiny, 10 * 48_000 + 2, 48_000), 500),
    Case("A28", "own", "30.02 s for Qwen2-Audio", _tokens(lambda: qwen2_audio.tiny(window=30), 480_320, RATE),
         Refused("audio of 30.02 s is longer than the 30 s")),
    Case("C1", "own", "MP3 of 4 s whose Info header counts 10 frames",
         _seconds(lambda: _xing(_mp3(_noise()), 10), "mp3"), [4.0, 4.0]),
    Case("C1", "own", "MP3 of 4 s whose Xing header counts 100 of 114 frames",
         _seconds(lambda: _xing(_mp3(_noise(), mode="VARIABLE"), 100), "mp3"), [4.0, 4.0]),
    Case("C1", "own", "MP3 whose header counts twice its frames", _seconds(lambda: _xing(_mp3(_noise()), 228), "mp3"),
         Refused("truncated (4.10 of 8.21 s are there)")),
    Case("C1", "own", "MP3 whose header counts 2^32 - 1 frames", _seconds(lambda: _xing(_mp3(TONE), 2**32 - 1), "mp3"),
         [1.01, 1.01]),
    Case("C1", "own", "MP3 of a variable bit rate without a header",
         _seconds(lambda: _xing(_mp3(_noise(), mode="VARIABLE"), None), "mp3"), [4.1, 4.1]),
    Case("C1", "own", "MP3 of an average bit rate without a header",
         _seconds(lambda: _xing(_mp3(_noise(), mode="AVERAGE"), None), "mp3"), [4.1, 4.1]),
    Case("C1", "own", "MP3 of a constant bit rate without a header",
         _seconds(lambda: _xing(_mp3(_noise()), None), "mp3"), [4.1, 4.1]),
    Case("C1", "own", "parts of a good MP3 of a variable bit rate",
         _seconds(lambda: _mp3(_noise(), mode="VARIABLE"), "mp3"), [4.0, 4.0]),
    Case("C1", "own", "MP3 cut in half", _seconds(lambda: _mp3(_noise())[:16_000], "mp3"), Refused("truncated")),
    *(
        Case("C2", "own", f"two Ogg {subtype} files in one, {what}",
             _seconds(lambda subtype=subtype, second=second: _file("OGG", subtype) + _file("OGG", subtype, *second),
                      "ogg"), right)
        for subtype in ("VORBIS", "OPUS")
        for what, second, right in (
            ("of one rate", (), TWO),
            ("of 16 and 8 kHz", (TONE, 8000), [3.0, 3.0]),
            ("the second stereo", (np.stack([TONE, 0.5 * TONE], 1),), TWO),
        )
    ),
    Case("C2", "own", "an Ogg file twice", _seconds(lambda: _file("OGG") * 2, "ogg"), TWO),
    Case("C2", "own", "two Ogg files, the second cut", _seconds(lambda: (_file("OGG") + _file("OGG"))[:-2000], "ogg"),
         Refused("Ogg page")),
    Case("C2", "own", "two Ogg files, the first cut", _seconds(lambda: _file("OGG")[:-2000] + _file("OGG"), "ogg"),
         Refused("Ogg page")),
    Case("C3", "own", "two MP3 files in one", _seconds(lambda: _mp3(_noise()) + _mp3(TONE), "mp3"), [5.0, 5.0]),
    Case("C3", "own", "two short MP3 files in one, of 16 and 8 kHz",
         _seconds(lambda: _mp3(TONE) + _mp3(TONE, 8000), "mp3"), [3.0, 3.0]),
    Case("C3", "own", "two MP3 files with tags in one", _seconds(lambda: (ID3 + _mp3(_noise())) * 2, "mp3"),
         [8.0, 8.0]),
    Case("C3", "own", "two MP3 files without headers in one",
         _seconds(lambda: _xing(_mp3(_noise(), mode="VARIABLE"), None) * 2, "mp3"), [8.21, 8.21]),
    Case("C3", "own", "two FLAC files in one", _seconds(lambda: _file("FLAC") * 2, "flac"), TWO),
    Case("C3", "own", "two WAV files in one", _seconds(lambda: _file("WAV") * 2), TWO),
    Case("C3", "own", "two AIFF files in one", _seconds(lambda: _file("AIFF") * 2, "aiff"), TWO),
    Case("C3", "own", "WAV with a title after its sound", _seconds(lambda: _wav(32_000, PCM + LIST)), ONE),
    Case("A10", "own", "NIST SPHERE cut in half", _seconds(lambda: _file("NIST")[:17_000], "sph"),
         Refused("truncated (15976 of 32000 bytes are there)")),
    Case("A10", "own", "NIST SPHERE", _seconds(lambda: _file("NIST"), "sph"), ONE),
    Case("A9", "own", "RIFX, size 0", _seconds(lambda: _big_endian()), ONE),
    Case("C3", "own", "an MP3 file whose tag holds a large picture", _seconds(lambda: ART + _mp3(_noise()), "mp3"),
         [4.0, 4.0]),
    Case("C3", "own", "two such files in one", _seconds(lambda: (ART + _mp3(_noise())) * 2, "mp3"), [8.0, 8.0]),
    *(
        Case("C4", "own", f"{kind} {subtype}{' cut in half' if half else ''}", _rare(kind, subtype, half),
             Refused("truncated") if half else TWO if kind == "WVE" else [0.99, 0.99] if kind == "VOC" else ONE)
        for kind, subtype in RARE.items() for half in (False, True)
    ),
    Case("C4", "own", "a MAT5 file cut after 19 samples", _seconds(lambda: bytes(_file("MAT5"))[:302], "mat5"),
         Refused("truncated")),
    *(
        Case("C4", "own", f"{kind}, whose header says no length", _rare(kind, subtype, half=False), ONE)
        for kind, subtype in LENGTHLESS.items()
    ),
    *(
        Case("C5", "own", f"MP3 files without headers in one, {what}", _seconds(lambda make=make: make(), "mp3"), right)
        for what, make, right in (
            ("of 16 and 8 kHz", lambda: _plain_mp3() + _plain_mp3(TONE, 8000), [3.24, 3.24]),
            ("of 16 and 44.1 kHz", lambda: _plain_mp3() + _plain_mp3(np.tile(TONE, 3), 44_100), [2.2, 2.2]),
            ("the second stereo", lambda: _plain_mp3() + _plain_mp3(np.stack([TONE, 0.5 * TONE], 1)), [2.16, 2.16]),
            ("each with a tag", lambda: (ID3 + _plain_mp3()) * 2, [2.16, 2.16]),
        )
    ),
    Case("C5", "own", "two FLAC files with the least header in one", _seconds(lambda: _bare_flac() * 2, "flac"), TWO),
    Case("C5", "own", "two such files of 16 and 8 kHz", _seconds(lambda: _bare_flac() + _bare_flac(8000), "flac"),
         [3.0, 3.0]),
    Case("C5", "own", "two FLAC files with tags in one", _seconds(lambda: (ID3 + _file("FLAC")) * 2, "flac"), TWO),
    Case("C5", "own", "a WAV file after a tag", _seconds(lambda: ID3 + _file("WAV")), ONE),
]  # fmt: skip
