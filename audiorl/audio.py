"""Reading audio: any file that libsndfile or FFmpeg decodes becomes mono float32 [T] at the wanted rate, or one error.

libsndfile comes first: it is fast and seeks to `start` exactly. PyAV's FFmpeg takes over for the rest (m4a, webm,
G.722, the sound of a video). Unusable audio raises `AudioError`; nothing is repaired silently, since the metrics of a
policy that is trained on truncated clips do not show the reason.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from weakref import WeakKeyDictionary

import numpy as np

if TYPE_CHECKING:  # decoders are imported where they are used: importing a type should not load FFmpeg
    import av
    import soundfile

MAX_SECONDS = 600.0
"""Longest selection that `load_clip` decodes, unless told otherwise; an hour of audio as a prompt is a mistake."""
SLACK = 0.1
"""Seconds that a cut may reach past the end and that a container's declared duration may be off: manifests round."""
MIN_RATE, MAX_RATE = 1000, 1_000_000
"""Sampling rates in Hz of what passes as audio."""
MAX_AMPLITUDE = 16.0
"""Largest sample that passes as audio in [-1, 1], 24 dB above full scale: beyond it are unscaled integers or damage."""
FFMPEG_FORMATS = (
    "mov,matroska,webm,ogg,mpegts,mpeg,flv,avi,asf,rm,wav,w64,aiff,au,caf,flac,mp3,aac,ac3,eac3,dts,amr,ape,wv,tta,"
    "g722,gsm,sbc,tak,voc,xwma,mpc,mpc8"
)
"""Formats that FFmpeg may open: those that hold their audio. Playlists (concat, hls, …) name other files to read."""


class AudioError(ValueError):
    """Audio that cannot be used: missing, empty, broken, too long, or not what was declared."""


@dataclass(frozen=True, eq=False)
class AudioClip:
    """Audio by reference, decoded only by `load`.

    Exactly one of `path`, `data` (an encoded file's bytes) or `array` is set. `array` is float32, mono [T] or
    [T, channels], at `sample_rate` Hz. For `path` and `data` the file's own rate counts and `sample_rate` is what the
    manifest claims (checked on load). `start` and `duration` (seconds) select a part, `channel` a channel, counted from
    0, or the mean of several; by default it is the mean of all. `context` seconds before `start` are encoded with the
    part but give no tokens of their own: context for a chunk of a stream.

    >>> import numpy as np
    >>> from audiorl import AudioClip
    >>> AudioClip(array=np.zeros(16_000, np.float32), sample_rate=16_000, duration=0.5).load(24_000).shape
    (12000,)
    """

    path: str | None = None
    data: bytes | None = field(default=None, repr=False)
    array: np.ndarray | None = field(default=None, repr=False)
    sample_rate: int | None = None
    start: float = 0.0
    duration: float | None = None
    context: float = 0.0
    channel: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.start >= 0:
            raise ValueError(f"AudioClip: start must be >= 0, got {self.start}")
        if self.context and not 0 < self.context <= self.start:
            raise ValueError(f"AudioClip: context must be in 0..start, got {self.context} s before {self.start} s")
        if sum(x is not None for x in (self.path, self.data, self.array)) != 1:
            raise ValueError("AudioClip: give exactly one of path, data, array")
        if self.channel == () or min(self.channels, default=0) < 0:
            raise ValueError(f"AudioClip: channel must be a number from 0, or several of them, got {self.channel!r}")
        if self.array is not None and not self.sample_rate:
            raise ValueError("AudioClip: an array needs its sample_rate in Hz")
        if self.sample_rate is not None and not MIN_RATE <= self.sample_rate <= MAX_RATE:
            raise ValueError(f"AudioClip: sample_rate must be in Hz, {MIN_RATE} to {MAX_RATE}, got {self.sample_rate}")

    @property
    def channels(self) -> tuple[int, ...]:
        """Return the channels that are selected; empty for all of them."""
        return (self.channel,) if isinstance(self.channel, int) else self.channel or ()

    @property
    def part(self) -> dict[str, Any]:
        """Return what selects a part, as rows of JSON hold it: `start` and `duration`, and `channel`; empty for all."""
        span = {} if not self.start and self.duration is None else {"start": self.start, "duration": self.duration}
        return span if self.channel is None else {**span, "channel": self.channel}

    def load(self, sample_rate: int = 16_000) -> np.ndarray:
        """Mono float32 samples [T] at `sample_rate` Hz. Raises `AudioError` for unusable audio."""
        return load_clip(self, sample_rate)

    def with_context(self) -> AudioClip:
        """Return the part together with its context, as a clip of its own."""
        length = None if self.duration is None else self.duration + self.context
        return replace(self, start=self.start - self.context, duration=length, context=0.0)

    @property
    def key(self) -> str:
        """Path, or a hash of the content, with the selected part: equal exactly for clips of the same audio reference.

        Caches use it; hashing happens once per clip.
        """
        part = f"{float(self.start)}+{'end' if self.duration is None else float(self.duration)}"
        if self.context:
            part += f" after {float(self.context)}"
        if self.channels:
            part += f" channel {'+'.join(map(str, sorted(self.channels)))}"
        if self.path is not None:
            return f"{os.path.abspath(self.path)}#{part}"
        if self not in _content_keys:
            a = self.array
            head = "file " if a is None else f"{self.sample_rate} {a.dtype} {a.shape} "
            digest = hashlib.sha256(head.encode())
            digest.update((self.data or b"") if a is None else a.tobytes())
            _content_keys[self] = digest.hexdigest()[:32]
        return f"{_content_keys[self]}#{part}"

    def _repr_html_(self) -> str:
        """Return a player, for notebooks; the error in its place for unusable audio."""
        try:
            rate = probe(self).sample_rate
            content = base64.b64encode(wav_bytes(self.load(rate), rate)).decode("ascii")
        except AudioError as error:
            return f"<em>{html.escape(str(error))}</em>"
        return f'<audio controls src="data:audio/wav;base64,{content}"></audio>'


_content_keys: WeakKeyDictionary[AudioClip, str] = WeakKeyDictionary()
_headers: WeakKeyDictionary[AudioClip, AudioInfo] = WeakKeyDictionary()


@dataclass(frozen=True)
class AudioInfo:
    """The whole file, before `start` and `duration` select a part. `sample_rate` is the file's own, in Hz."""

    seconds: float
    sample_rate: int
    channels: int


def load_clip(clip: AudioClip, sample_rate: int = 16_000, max_seconds: float | None = None) -> np.ndarray:
    """Return the clip's selected part as a new mono float32 array [T] at `sample_rate` Hz.

    Raises AudioError, also when the part is longer than `max_seconds` (default: MAX_SECONDS).
    """
    limit = MAX_SECONDS if max_seconds is None else max_seconds
    if clip.duration is not None and clip.duration <= 0:
        raise AudioError(f"{name(clip)}: duration must be > 0, got {clip.duration}")
    if clip.array is not None:
        wav, rate = _checked_array(clip), clip.sample_rate or 0
        start, frames = _selection(clip, len(wav) / rate, rate, limit)
        wav = wav[start : start + frames]
    else:
        with _open(clip) as file:
            rate = file.info.sample_rate
            # Opus is always coded at 48 kHz; its header only recalls the original rate, so a claim cannot be wrong.
            if clip.sample_rate and not file.is_opus and clip.sample_rate != rate:
                declared = f"declared as {clip.sample_rate} Hz but the file has {rate} Hz"
                raise AudioError(f"{name(clip)}: {declared}; correct sample_rate or resample the file")
            start, frames = _selection(clip, file.info.seconds, rate, limit)
            wav = file.read(start, frames)
            if len(wav) < frames - SLACK * rate:
                raise _truncated(clip, f"{len(wav) / rate:.2f} of {frames / rate:.2f} s decode")
    if wav.shape[0] == 0:
        raise AudioError(f"{name(clip)}: holds no samples; leave it out of the manifest")
    if clip.channels:
        if max(clip.channels) >= wav.shape[1]:
            wrong = f"channel {max(clip.channels)} of {wav.shape[1]}, which count from 0; correct the row's channel"
            raise AudioError(f"{name(clip)}: {wrong}")
        wav = wav[:, list(clip.channels)]
    mono = wav[:, 0] if wav.shape[1] == 1 else wav.mean(axis=1, dtype=np.float32)
    if not np.isfinite(mono).all():
        bad = int(np.count_nonzero(~np.isfinite(mono)))
        raise AudioError(f"{name(clip)}: {bad} of {len(mono)} samples are NaN or infinite; write the file again")
    peak = float(np.abs(mono).max())
    if peak > MAX_AMPLITUDE:
        raise AudioError(f"{name(clip)}: samples reach {peak:g}; give floats in [-1, 1] (divide int16 by 32768)")
    mono = np.array(mono, dtype=np.float32, order="C")
    if rate == sample_rate:
        return mono
    import soxr

    return soxr.resample(mono, rate, sample_rate)


def probe(clip: AudioClip) -> AudioInfo:
    """Duration, rate and channels of the whole file or array, from its header. Raises AudioError."""
    if clip.array is not None:
        array, rate = _checked_array(clip), clip.sample_rate or 0
        return AudioInfo(len(array) / rate, rate, array.shape[1])
    if clip not in _headers:
        with _open(clip) as file:
            _headers[clip] = file.info
    return _headers[clip]


def seconds(clip: AudioClip) -> float:
    """Length of the selected part in seconds, from the header. Raises AudioError."""
    if clip.duration is not None:
        return clip.duration
    return max(0.0, probe(clip).seconds - clip.start)


def name(clip: AudioClip) -> str:
    """Return what messages call a clip."""
    if clip.path is not None:
        return clip.path
    return f"<{len(clip.data)} bytes of audio>" if clip.data is not None else "<audio array>"


def _checked_array(clip: AudioClip) -> np.ndarray:
    """[T, channels] view of the clip's array."""
    array = np.asarray(clip.array)
    if array.dtype.kind != "f":
        raise AudioError(f"{name(clip)}: samples are {array.dtype}; give floats in [-1, 1] (divide int16 by 32768)")
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] > max(8, array.shape[0])):
        raise AudioError(f"{name(clip)}: shape {array.shape}; give [T] or [T, channels] (transpose [channels, T])")
    return array[:, None] if array.ndim == 1 else array


def _selection(clip: AudioClip, total: float, rate: int, limit: float) -> tuple[int, int]:
    """First frame and number of frames of the selected part; `total` is the whole length in seconds."""
    if total > 0 and clip.start >= total:
        raise AudioError(f"{name(clip)}: start {clip.start:g} s lies past the end at {total:.2f} s; correct the row")
    wanted = total - clip.start if clip.duration is None else clip.duration
    if clip.start + wanted > total + SLACK:
        part = f"the part from {clip.start:g} to {clip.start + wanted:g} s reaches past the end at {total:.2f} s"
        raise AudioError(f"{name(clip)}: {part}; correct start and duration")
    wanted = min(wanted, total - clip.start)
    if wanted > limit:
        remedy = "cut it with start and duration, or raise audiorl.audio.MAX_SECONDS"
        raise AudioError(f"{name(clip)}: {wanted:.0f} s is longer than the limit of {limit:g} s; {remedy}")
    return round(clip.start * rate), round(wanted * rate)


def _truncated(clip: AudioClip, detail: str) -> AudioError:
    return AudioError(f"{name(clip)}: truncated ({detail}); copy or download it again")


# -- decoders ----------------------------------------------------------------------------------------------------------


class _SoundFile:
    """An open file that libsndfile decodes."""

    def __init__(self, clip: AudioClip, file: soundfile.SoundFile) -> None:
        self.file, self.is_opus = file, file.subtype == "OPUS"
        self.info = AudioInfo(_claimed(clip, file.frames / file.samplerate), file.samplerate, file.channels)
        # libsndfile shortens a cut file to what is there and says so only in its log.
        if "Seems to be a truncated file" in file.extra_info:  # of a .voc
            raise _truncated(clip, "its last block is cut")
        for declared, present in re.findall(_SHORTENED, file.extra_info, re.M):
            if int(present) < int(declared) < 0xFFFF_FF00:  # writers to a pipe put 0 or the largest size there
                raise _truncated(clip, f"{present} of {declared} bytes are there")
        if match := re.search(r"Frame count read from 'COMM' chunk \((\d+)\) not equal", file.extra_info):  # AIFF
            raise _truncated(clip, f"{file.frames} of {match[1]} samples are there")

    def read(self, start: int, frames: int) -> np.ndarray:
        """[frames, channels] float32, fewer frames if the file ends early."""
        self.file.seek(start)
        return self.file.read(frames, dtype="float32", always_2d=True)


_SHORTENED = r"^\s*(?:data|SSND|riff|Data Size|Riff size)\s*: (\d+) \(should be (\d+)\)"


class _Container:
    """An open file that FFmpeg decodes."""

    def __init__(self, clip: AudioClip, container: av.container.InputContainer) -> None:
        self.container = container
        if not container.streams.audio:
            raise AudioError(f"{name(clip)}: a {container.format.name} file without sound; name an audio file")
        self.stream = container.streams.audio[0]
        if self.stream.codec_context is None:
            raise AudioError(f"{name(clip)}: its sound is in no known coding; convert it to wav, flac, ogg, mp3 or m4a")
        self.tick = self.stream.time_base or Fraction(1, self.stream.rate)  # seconds a pts unit
        self.is_opus = self.stream.codec_context.name == "opus"
        if self.stream.duration:
            seconds = float(self.stream.duration * self.tick)
        elif container.duration:
            seconds = container.duration / 1_000_000
        else:  # raw streams have no header: add up the packets, which still decodes nothing
            seconds = float(sum(packet.duration or 0 for packet in container.demux(self.stream)) * self.tick)
            container.seek(0)
        self.info = AudioInfo(_claimed(clip, seconds), self.stream.rate, self.stream.codec_context.channels)

    def read(self, start: int, frames: int) -> np.ndarray:
        """[frames, channels] float32, fewer frames if the file ends early."""
        import av

        rate, stop = self.info.sample_rate, start + frames
        pieces, position = [], 0
        if start > rate:
            # One second of run-up lets codecs with overlapping frames settle.
            self.container.seek(int((start / rate - 1) / self.tick), stream=self.stream)
            position = -1
        resampler = av.AudioResampler(format="fltp", layout=self.stream.layout, rate=rate)
        for frame in self.container.decode(self.stream):
            if position < 0:
                position = round(((frame.pts or 0) - (self.stream.start_time or 0)) * self.tick * rate)
            for planar in resampler.resample(frame):
                samples = planar.to_ndarray().T
                pieces.append(samples[max(0, start - position) : max(0, stop - position)])
                position += len(samples)
            if position >= stop:
                break
        return np.concatenate(pieces) if pieces else np.zeros((0, self.info.channels), np.float32)


@contextmanager
def _open(clip: AudioClip) -> Iterator[_SoundFile | _Container]:
    """Open the file; any failure while it is open is an AudioError that names the clip."""
    import av
    import soundfile

    with ExitStack() as stack:
        try:
            file = _decoder(clip, stack)
            rate = file.info.sample_rate
            if not MIN_RATE <= rate <= MAX_RATE:
                outside = f"{rate} Hz in its header, outside {MIN_RATE} to {MAX_RATE}"
                raise AudioError(f"{name(clip)}: {outside}; write it again")
            yield file
        except AudioError:
            raise
        except (av.FFmpegError, soundfile.LibsndfileError) as error:
            raise AudioError(f"{name(clip)}: broken or truncated ({error}); copy or download it again") from error
        except Exception as error:  # libraries raise many kinds for a damaged header
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise AudioError(f"{name(clip)}: cannot be decoded ({reason}); copy or download it again") from error


def _decoder(clip: AudioClip, stack: ExitStack) -> _SoundFile | _Container:
    """libsndfile, or else FFmpeg; `stack` closes it."""
    import av
    import soundfile

    if clip.path is not None and not os.path.isfile(clip.path):
        missing = "missing; check the path, or the folder that relative paths start from"
        missing = "missing; write paths with /, not with \\" if "\\" in clip.path else missing
        raise AudioError(f"{name(clip)}: {'a folder; name an audio file' if os.path.isdir(clip.path) else missing}")
    size = os.path.getsize(clip.path) if clip.path is not None else len(clip.data or b"")
    if size == 0:
        raise AudioError(f"{name(clip)}: empty (0 bytes); copy or download it again")
    content = io.BytesIO(clip.data or b"")
    if clip.path is None:
        fault = _page_fault(content, size)
        content.seek(0)
    else:
        fault = _file_fault(clip.path, os.stat(clip.path).st_mtime_ns, size)
    if fault is not None:
        raise _truncated(clip, fault)
    malformed = False
    try:
        # By its content alone: of a name libsndfile takes the ending for the format where it knows no other.
        source = content if clip.path is None else os.open(clip.path, os.O_RDONLY)
        file = stack.enter_context(soundfile.SoundFile(source))
        # libsndfile takes an .au or .snd with a damaged header for raw samples.
        if (file.format, file.subtype) != ("RAW", "ULAW"):
            return _SoundFile(clip, file)
    except soundfile.LibsndfileError as error:
        malformed = error.code == 3
    try:
        options = {"format_whitelist": FFMPEG_FORMATS}
        whole = clip.path or io.BytesIO(clip.data or b"")
        container = stack.enter_context(av.open(whole, "r", options=options, metadata_errors="replace"))
    except av.FFmpegError as error:
        raise AudioError(f"{name(clip)}: not readable as audio; convert it to wav, flac, ogg, mp3 or m4a") from error
    if malformed and container.format.name in ("caf", "aiff", "au", "w64", "wav", "voc"):
        raise _truncated(clip, "its header does not fit its content")  # FFmpeg decodes what there is of it
    return _Container(clip, container)


def _claimed(clip: AudioClip, seconds: float) -> float:
    """Return the length that the Xing or Info header of an MP3 file claims, where that is more than rounding explains.

    Decoders compare it with what is there only where the rest of the header is in order.
    """
    with open(clip.path, "rb") if clip.path is not None else io.BytesIO(clip.data or b"") as file:
        head = file.read(64).ljust(64, b"\0")
    version, rate_index = head[1] >> 3 & 3, head[2] >> 2 & 3
    side = {(3, False): 32, (3, True): 17, (2, False): 17, (2, True): 9}.get((version, head[3] >> 6 == 3))
    if head[0] != 0xFF or side is None or rate_index == 3 or head[4 + side : 8 + side] not in (b"Xing", b"Info"):
        return seconds
    frames = int.from_bytes(head[12 + side : 16 + side], "big") if head[11 + side] & 1 else 0
    samples, rate = (1152, 44_100) if version == 3 else (576, 22_050)
    # Encoder and decoder delay by two frames, which players cut off.
    claimed = (frames - 2) * samples / (rate, rate * 480 // 441, rate * 320 // 441)[rate_index]
    return claimed if claimed > seconds + SLACK else seconds


@lru_cache(maxsize=65_536)
def _file_fault(path: str, changed: int, size: int) -> str | None:
    """`_page_fault` of a file as it is at this moment: the chunks of a stream need not read all of it each time."""
    with open(path, "rb") as file:
        return _page_fault(file, size)


def _page_fault(file: BinaryIO, size: int) -> str | None:
    """Name what is damaged, missing or cut of the pages of an Ogg file (RFC 3533, section 6) or of an AVI file.

    Decoders skip what is missing, and take the length from what is there.
    """
    flags, numbers = None, dict[bytes, int]()  # numbers: of the last page, by the stream's serial number
    while len(header := file.read(27)) == 27 and header.startswith(b"OggS"):
        segments = file.read(header[26])
        body = file.read(sum(segments))
        if len(segments) < header[26] or len(body) < sum(segments):
            return "the last Ogg page is cut"
        flags, serial, number = header[5], header[14:18], int.from_bytes(header[18:22], "little")
        if number != numbers.get(serial, number - 1) + 1:
            return f"Ogg page {number} does not follow page {numbers[serial]}"
        # CRC-32 from the highest bit on, without inversion: zlib's, whose bits run the other way, of reversed bytes.
        page = header[:22] + bytes(4) + header[26:] + segments + body
        checksum = zlib.crc32(page.translate(_REVERSED), 0xFFFF_FFFF) ^ 0xFFFF_FFFF
        if checksum.to_bytes(4, "big").translate(_REVERSED) != header[22:26]:
            return f"the checksum of Ogg page {number} is wrong"
        numbers[serial] = number
    if flags is not None and (header.startswith(b"OggS") or not flags & 4):
        return "the last Ogg page is missing"
    declared = int.from_bytes(header[4:8], "little") + 8
    if header[:4] == b"RIFF" and header[8:12] == b"AVI " and size < declared < 0xFFFF_FF00:
        return f"{size} of {declared} bytes are there"
    return None


_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def wav_bytes(wav: np.ndarray, sample_rate: int) -> bytes:
    """Mono float32 [T] in [-1, 1], clipped, as a WAV file of 16 bits."""
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, wav.clip(-1, 1), sample_rate, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def write_wav(path: str | Path, wav: np.ndarray, sample_rate: int) -> None:
    """Mono float32 [T] in [-1, 1] as a file of 16 bits, in a folder that is made for it."""
    import soundfile

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, wav, sample_rate, subtype="PCM_16")
