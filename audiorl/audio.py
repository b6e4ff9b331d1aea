"""Reading audio: any file that libsndfile or FFmpeg decodes becomes mono float32 [T] at the wanted rate, or one error.

libsndfile comes first: it is fast and seeks to `start` exactly. PyAV's FFmpeg takes over for the rest (m4a, webm,
G.722, the sound of a video), and where a header does not know how long the file is. Unusable audio raises `AudioError`;
nothing is repaired silently, since the metrics of a policy that is trained on truncated clips do not show the reason.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import math
import mmap
import os
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

if TYPE_CHECKING:  # decoders are imported where they are used: importing a type should not load FFmpeg
    import av
    import soundfile

AUDIO_SUFFIXES = (".flac", ".wav", ".opus", ".ogg", ".mp3", ".m4a", ".aac", ".webm", ".aiff", ".g722")
"""Suffixes of recordings, by preference where only one is read."""
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
    # Stereo out of phase, of which the mean is 20 dB below the channels. Below -80 dB is silence.
    power, left = (float(np.mean(np.square(x, dtype=np.float64))) for x in (wav, mono))
    if left < 0.01 * power and power > 1e-8:
        cancelled = "its channels cancel each other out in their mean; select one of them with channel, such as 0"
        raise AudioError(f"{name(clip)}: {cancelled}")
    mono = np.array(mono, dtype=np.float32, order="C")
    if rate != sample_rate:
        import soxr

        mono = soxr.resample(mono, rate, sample_rate)
        if not len(mono):
            raise AudioError(f"{name(clip)}: {len(wav)} samples at {rate} Hz, none at {sample_rate} Hz; leave it out")
    return mono


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


def load_channels(clip: AudioClip, sample_rate: int | None = None) -> tuple[np.ndarray, int]:
    """Return (samples, Hz), by default at the clip's own rate: float32 [T] of one channel or of those that the clip
    selects, else [T, channels]. Raises `AudioError` for unusable audio."""
    info = probe(clip)
    rate = sample_rate or info.sample_rate
    if info.channels == 1 or clip.channel is not None:
        return clip.load(rate), rate
    return np.stack([replace(clip, channel=c).load(rate) for c in range(info.channels)], axis=1), rate


def name(clip: AudioClip) -> str:
    """Return what messages call a clip."""
    if clip.path is not None:
        return clip.path if clip.path.isprintable() else repr(clip.path)
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
        self.info = AudioInfo(file.frames / file.samplerate, file.samplerate, file.channels)
        # libsndfile shortens a cut file to what is there and says so only in its log.
        if "Seems to be a truncated file" in file.extra_info:  # of a .voc
            raise _truncated(clip, "its last block is cut")
        if match := re.search(r"Frame count read from 'COMM' chunk \((\d+)\) not equal", file.extra_info):  # AIFF
            claimed = int(match[1])  # or as many as fill the size that stands for an unknown one
            unknown = any(_placeholder(claimed * width) for width in range(1, 33))
            if claimed > file.frames + SLACK * file.samplerate and not unknown:
                raise _truncated(clip, f"{file.frames} of {claimed} samples are there")

    def read(self, start: int, frames: int) -> np.ndarray:
        """[frames, channels] float32, fewer frames if the file ends early."""
        # Frames of MP3 borrow bits of those before them; GSM 6.10 can only be read from its beginning.
        ahead = min(start, self.file.samplerate) if self.file.format == "MP3" else 0
        if self.file.seekable():
            self.file.seek(start - ahead)
        else:
            ahead = start
        return self.file.read(ahead + frames, dtype="float32", always_2d=True)[ahead:]


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
        if container.format.name == "mp3":  # only its decoder knows how much of the first and the last frame counts
            seconds = sum(frame.samples for frame in container.decode(self.stream)) / self.stream.rate
            container.seek(0)
        elif self.stream.duration and container.format.name not in RAW_STREAMS:
            seconds = float(self.stream.duration * self.tick)
        elif container.duration and container.format.name not in RAW_STREAMS:
            seconds = container.duration / 1_000_000
        else:  # add up the packets, which still decodes nothing
            seconds = _packet_seconds(container)
            container.seek(0)
        self.info = AudioInfo(seconds, self.stream.rate, self.stream.codec_context.channels)

    def read(self, start: int, frames: int) -> np.ndarray:
        """[frames, channels] float32, fewer frames if the file ends early."""
        import av

        rate, stop = self.info.sample_rate, start + frames
        pieces, position, first = [], 0, 0
        if start > rate and self.container.format.name != "mp3":  # whose places a false header would give
            # Times count from the first sound, which a codec's delay puts after the start time of the stream.
            first = next(self.container.decode(self.stream)).pts or 0
            # One second of run-up lets codecs with overlapping frames settle.
            self.container.seek(int((start / rate - 1) / self.tick), stream=self.stream)
            position = -1
        resampler = av.AudioResampler(format="fltp", layout=self.stream.layout, rate=rate)
        for frame in self.container.decode(self.stream):
            if position < 0:
                position = round(((frame.pts or 0) - first) * self.tick * rate)
            for planar in resampler.resample(frame):
                samples = planar.to_ndarray().T
                pieces.append(samples[max(0, start - position) : max(0, stop - position)])
                position += len(samples)
            if position >= stop:
                break
        return np.concatenate(pieces) if pieces else np.zeros((0, self.info.channels), np.float32)


class _Joined:
    """Whole files one after another in one, each decoded by itself: a chained Ogg stream, or what `cat` makes."""

    is_opus: bool
    info: AudioInfo

    def __init__(self, clip: AudioClip, parts: list[_SoundFile | _Container | _Joined]) -> None:
        self.parts, self.is_opus = parts, parts[0].is_opus
        channels = {part.info.channels for part in parts} - {1} or {1}
        if len(channels) > 1:
            several = f"recordings of {' and '.join(map(str, sorted(channels)))} channels follow one another"
            raise AudioError(f"{name(clip)}: {several}; give each its own file")
        whole = sum(part.info.seconds for part in parts)
        self.info = AudioInfo(whole, parts[0].info.sample_rate, channels.pop())

    def read(self, start: int, frames: int) -> np.ndarray:
        """[frames, channels] float32 at the rate of the first part, fewer frames if a part ends early."""
        import soxr

        pieces, position, rate = [], 0, self.info.sample_rate
        for part in self.parts:
            own = part.info.sample_rate
            length = round(part.info.seconds * rate)
            first, last = max(0, start - position), min(length, start + frames - position)
            if first < last:
                wav = part.read(0, round(part.info.seconds * own))
                wav = (wav if own == rate else soxr.resample(wav, own, rate))[first:last]
                pieces.append(np.broadcast_to(wav, (len(wav), self.info.channels)))
            position += length
        return np.concatenate(pieces)


RAW_STREAMS = ("aac", "ac3", "eac3", "dts", "amr", "amrnb", "amrwb", "flac", "g722", "gsm", "sbc", "loas")
"""FFmpeg's names of formats without an index, of which it guesses the length from the first frames."""


def _packet_seconds(container: av.container.InputContainer) -> float:
    """Add up the packets of the first sound, which decodes nothing."""
    stream = container.streams.audio[0]
    return float(sum(packet.duration or 0 for packet in container.demux(stream)) * (stream.time_base or 0))


@contextmanager
def _open(clip: AudioClip) -> Iterator[_SoundFile | _Container | _Joined]:
    """Open the file; any failure while it is open is an AudioError that names the clip."""
    import av
    import soundfile

    with ExitStack() as stack:
        try:
            if clip.path is not None and not os.path.isfile(clip.path):
                missing = "missing; check the path, or the folder that relative paths start from (audio_root)"
                missing = "missing; write paths with /, not with \\" if "\\" in clip.path else missing
                missing = "a folder; name an audio file" if os.path.isdir(clip.path) else missing
                raise AudioError(f"{name(clip)}: {missing}")
            file = _decoder(clip, clip.data, stack)
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


def _decoder(clip: AudioClip, data: bytes | None, stack: ExitStack) -> _SoundFile | _Container | _Joined:
    """libsndfile for `data`, or else the clip's file; FFmpeg where it fails; `stack` closes it."""
    import av
    import soundfile

    path = clip.path if data is None else None
    size = os.path.getsize(path) if path is not None else len(data or b"")
    if size == 0:
        raise AudioError(f"{name(clip)}: empty (0 bytes); copy or download it again")
    layout = _file_layout(path, os.stat(path).st_mtime_ns, size) if path is not None else _layout(data or b"")
    if layout.fault is not None:
        raise _truncated(clip, layout.fault)
    if layout.parts != (0,):
        whole = Path(path).read_bytes() if path is not None else data or b""
        return _Joined(clip, [_decoder(clip, whole[a:b], stack) for a, b in pairwise((*layout.parts, size))])
    if layout.mends:  # in memory only
        content = bytearray(Path(path).read_bytes() if path is not None else data or b"")
        for place, mend in layout.mends:
            content[place : place + len(mend)] = mend
        path, data = None, bytes(content)
    source = path or io.BytesIO(data or b"")
    malformed = False
    decoder: _SoundFile | _Container | None = None
    try:
        # By its content alone: of a name libsndfile takes the ending for the format where it knows no other.
        sound = stack.enter_context(soundfile.SoundFile(os.open(path, os.O_RDONLY) if path else source))
        # libsndfile takes an .au or .snd with a damaged header for raw samples; of an odd number of blocks of GSM 6.10
        # in WAV it makes one more.
        foreign = (sound.format, sound.subtype) in (("RAW", "ULAW"), ("WAV", "GSM610"))
        if not foreign and layout.agrees(sound.frames / sound.samplerate):
            decoder = _SoundFile(clip, sound)
            if layout.claimed is None and layout.counted is not None:  # libsndfile guesses where no header says it
                decoder.info = replace(decoder.info, seconds=layout.counted)
    except soundfile.LibsndfileError as error:
        malformed = error.code == 3
    if decoder is None:
        try:
            source = path or io.BytesIO(data or b"")
            options = {"format_whitelist": FFMPEG_FORMATS}
            container = stack.enter_context(av.open(source, "r", options=options, metadata_errors="replace"))
        except av.FFmpegError as error:
            readable = "not readable as audio; convert it to wav, flac, ogg, mp3 or m4a"
            raise AudioError(f"{name(clip)}: {readable}") from error
        if malformed and container.format.name in ("caf", "aiff", "au", "w64", "wav", "voc"):
            raise _truncated(clip, "its header does not fit its content")  # FFmpeg decodes what there is of it
        decoder = _Container(clip, container)
    if decoder.info.seconds * (layout.declared - layout.present) > SLACK * layout.present:
        raise _truncated(clip, f"{layout.present} of {layout.declared} bytes are there")
    return decoder


@dataclass(frozen=True)
class _Layout:
    """Compare what a file says of its length with what is there."""

    fault: str | None = None
    """The damage, such as a missing or a cut part; None where there is none."""
    parts: tuple[int, ...] = (0,)
    """Where whole files begin that follow one another; what precedes the first is no sound."""
    mends: tuple[tuple[int, bytes], ...] = ()
    """(place, content): sizes that were not known when they were written, or that go beyond the end."""
    declared: int = 0
    present: int = 0
    """Bytes of sound; 0 where nothing is missing or the size is not known."""
    claimed: float | None = None
    counted: float | None = None
    tolerance: float = SLACK
    """Seconds of a FLAC or MP3 file by its header, and by its frames; libsndfile ends where the header says."""

    def agrees(self, seconds: float) -> bool:
        """Tell if the header, or else libsndfile, which finds `seconds`, knows of all frames."""
        says = seconds if self.claimed is None else self.claimed
        return self.counted is None or abs(says - self.counted) <= self.tolerance


@lru_cache(maxsize=65_536)
def _file_layout(path: str, changed: int, size: int) -> _Layout:
    """`_layout` of a file as it is at this moment: the chunks of a stream need not read all of it each time."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _layout(content, path)


def _layout(content: bytes | mmap.mmap, path: str | None = None) -> _Layout:
    """Look at what decoders believe or skip."""
    magic, tagged = content[:4], _after_tag(content, 0)
    if tagged and content[tagged : tagged + 4] in (b"fLaC", b"OggS", *_CHUNKS):
        return _Layout(parts=(tagged,))  # libsndfile takes the length of the tag off the sound
    if magic == b"OggS":
        return _ogg_layout(content)
    declared = int.from_bytes(content[4:8], "little") + 8
    if magic == b"RIFF" and content[8:12] == b"AVI ":
        cut = len(content) < declared < 0xFFFF_FF00
        return _Layout(f"{len(content)} of {declared} bytes are there" if cut else None)
    if magic in (*_CHUNKS, b".snd", b"dns."):
        return _chunk_layout(content)
    if magic == b"fLaC":
        parts = [0, *(match.start() for match in re.finditer(rb"fLaC[\0\x80]\0\0\x22", content) if match.start())]
        packed = int.from_bytes(content[18:26], "big")
        rate, total = packed >> 44, packed & (2**36 - 1)
        claimed, tolerance = total / rate if rate and total else None, 0.5 / max(rate, 1)
    elif tagged or (len(magic) > 1 and magic[0] == 0xFF and magic[1] & 0xE6 == 0xE2):
        (parts, claimed), tolerance = _xing(content), SLACK / 2
    else:
        begin, end = _rare_layout(content)
        return _Layout(declared=end - begin, present=max(0, len(content) - begin))
    if len(parts) > 1:
        return _Layout(parts=tuple(parts))
    import av

    try:
        options = {"format_whitelist": "flac,mp3"}
        source = path if path is not None else io.BytesIO(content)
        with av.open(source, "r", options=options, metadata_errors="replace") as container:
            mp3 = container.format.name == "mp3"
            parts, counted = _mp3_packets(container) if mp3 else (parts, _packet_seconds(container))
    except (av.FFmpegError, IndexError):
        return _Layout()
    if len(parts) > 1:
        return _Layout(parts=tuple(parts))
    if claimed is not None and claimed - counted > SLACK:
        return _Layout(f"{counted:.2f} of {claimed:.2f} s are there")
    return _Layout(claimed=claimed, counted=counted, tolerance=tolerance)


def _rare_layout(content: bytes | mmap.mmap) -> tuple[int, int]:
    """(begin, end) of the sound by the header of kinds that libsndfile shortens without a word; (0, 0) of others."""
    head, size = content[:1024], len(content)
    if head[:4] == b"NIST":  # SPHERE
        fields = dict(re.findall(rb"(?m)^(\w+) -(?:i|s\d+) (\w+)", head))
        counts = (int(fields.get(key, b"0")) for key in (b"sample_count", b"channel_count", b"sample_n_bytes"))
        return int(head[8:16]), int(head[8:16]) + math.prod(counts)
    if head[:4] == b"2BIT":  # AVR
        stereo, bits, frames = struct.unpack_from(">HH10xI", head, 12)
        return 128, 128 + frames * (2 if stereo else 1) * bits // 8
    if re.match(rb"\x01\x04[ -~\0]{17}", head):  # Akai MPC 2000, with a name
        return 42, 42 + 2 * int.from_bytes(head[30:34], "little") * (1 + head[21])
    if head.startswith(b"ALawSoundFile**"):  # Psion
        return 32, 32 + int.from_bytes(head[18:22], "big")
    if head[20:30] == b"samplerate":  # MATLAB 4: two matrices, (type, rows, columns, imaginary, length of the name)
        order = "<" if head[:2] == b"\0\0" and head[16] else ">"
        kind, rows, columns, _, name = struct.unpack_from(f"{order}5I", head, 39)
        return 59 + name, 59 + name + rows * columns * (8, 4, 4, 2, 2, 1)[kind // 10 % 10]
    if head.startswith(b"MATLAB 5"):  # elements, (type, bytes)
        order, last, place = "<" if head[126:128] == b"IM" else ">", 128, 128
        while place + 8 <= size:
            last, place = place, place + 8 + struct.unpack_from(f"{order}I", content, place + 4)[0]
        return last + 64, place  # after the sizes and the name of the matrix
    if head.startswith(b"Creative Voice File"):  # blocks, (type, bytes)
        place = int.from_bytes(head[20:22], "little")
        while place + 4 <= size and content[place]:
            place += 4 + int.from_bytes(content[place + 1 : place + 4], "little")
        return 0, place
    return 0, 0


def _after_tag(content: bytes | mmap.mmap, place: int) -> int:
    """Return where an ID3 tag at `place` ends; `place` where there is none."""
    tag = re.match(rb"ID3[\2-\4][^\xff].([\0-\x7f]{4})", content[place : place + 10], re.DOTALL)
    return place + 10 + sum(b << 21 - 7 * k for k, b in enumerate(tag[1])) if tag else place


def _mp3_packets(container: av.container.InputContainer) -> tuple[list[int], float]:
    """Return the places where frames of another rate or number of channels begin, as those of a file of its own do,
    which decoders play too fast or too slow, and the seconds of all frames."""
    stream = container.streams.audio[0]
    packets = [(p.pos, p.duration or 0, bytes(memoryview(p)[:4])) for p in container.demux(stream)]
    kinds = [(head[1] & 0x18, head[2] & 0x0C, head[3] >> 6 == 3) for _, _, head in packets if len(head) == 4]
    parts, kind = [0], kinds[0] if kinds else None
    for (place, *_), *following in zip(packets, kinds, kinds[1:], strict=False):
        if following[0] != kind and following[0] == following[1]:  # one alone is a false header
            kind = following[0]
            parts.append(place or 0)
    return parts, float(sum(duration for _, duration, _ in packets) * (stream.time_base or 0))


def _xing(content: bytes | mmap.mmap) -> tuple[list[int], float | None]:
    """Where the files of an MP3 file begin, by their tags and their Xing or Info headers; the seconds that the first
    header claims."""
    parts, claimed, header = [0], None, False
    tags, after = dict[int, int](), 0  # where they begin, by where they end
    for match in re.finditer(b"ID3", content):
        if match.start() >= after and (end := _after_tag(content, match.start())) > match.start():
            after, tags[end] = end, match.start()
    for match in re.finditer(rb"Xing|Info", content):
        for side in (32, 17, 9):  # bytes of side information between the head of a frame and the header
            start = max(0, match.start() - 4 - side)
            head = content[start : start + 4]
            version, mono, rate_index = head[1] >> 3 & 3, head[3] >> 6 == 3, head[2] >> 2 & 3
            right = (17 if mono else 32) if version == 3 else (9 if mono else 17)
            if head[0] != 0xFF or head[1] & 0xE6 != 0xE2 or version == 1 or rate_index == 3 or side != right:
                continue
            start = tags.get(start, start)
            flags, frames = struct.unpack(">II", content[match.end() : match.end() + 8].ljust(8, b"\0"))
            # More than a frame since the last header; or sound without one before the first, which no tag explains.
            if start - parts[-1] > 1500 if header else start > 4096 and content[0] == 0xFF:
                parts.append(start)
            elif not header and flags & 1 and 0 < frames < 0xFFFF_FF00:
                samples, rate = (1152, 44_100) if version == 3 else (576, 22_050 >> (version == 0))
                claimed = frames * samples / (rate, rate * 480 // 441, rate * 320 // 441)[rate_index]
            header = True
    followed = (
        place for end, place in tags.items() if re.match(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb]", content[end : end + 2])
    )
    return sorted({*parts, *followed}), claimed


_CHUNKS = {
    b"RIFF": (12, "<4sI", 2, b"data", 0, 0),
    b"RIFX": (12, ">4sI", 2, b"data", 0, 0),
    b"RF64": (12, "<4sI", 2, b"data", 0, 0),
    b"BW64": (12, "<4sI", 2, b"data", 0, 0),
    b"FORM": (12, ">4sI", 2, b"SSND", 0, 8),
    b"caff": (8, ">4sQ", 1, b"data", 0, 4),
    b"riff": (40, "<16sQ", 8, b"data\xf3\xac\xd3\x11\x8c\xd1\x00\xc0\x4f\x8e\xdb\x8a", 24, 0),
}
"""The places of WAV, AIFF, CAF and W64: where the first chunk begins; the head of a chunk; what places are multiples
of; the name of the chunk with the sound; how much of its head a size counts; what precedes the sound in its chunk."""


def _chunk_layout(content: bytes | mmap.mmap) -> _Layout:
    """Compare the size of the sound with what is there; whoever writes to a pipe does not know it."""
    size, parts, follows, wide = len(content), [0], False, 0
    if content[:4] in (b".snd", b"dns."):
        field, code, more = 8, ">I" if content[:4] == b".snd" else "<I", 0
        body, stored = (struct.unpack(code, content[k : k + 4].ljust(4, b"\0"))[0] for k in (4, 8))
    else:
        first, head, multiple, sound, counted, before = _CHUNKS[content[:4]]
        if content[8:12] in (b"8SVX", b"16SV"):
            sound, before = b"BODY", 0
        width = struct.calcsize(head)

        def chunks(place: int) -> Iterator[tuple[int, bytes, int]]:
            while place + width <= size:
                chunk, length = struct.unpack_from(head, content, place)
                yield place, chunk, length
                place = -(-(place + max(width, width + length - counted)) // multiple) * multiple

        for place, chunk, stored in chunks(first):  # noqa: B007
            if chunk == sound:
                break
            if chunk == b"ds64":
                wide = place + width + 8
        else:
            return _Layout()
        body, more = place + width + before, before + counted
        field, code = place + len(chunk), head[0] + head[-1]
        if wide and stored == 0xFFFF_FFFF:
            field, code = wide, "<Q"
            (stored,) = struct.unpack_from(code, content, wide)
        rest = list(chunks(-(-(body + max(0, stored - more)) // multiple) * multiple))
        parts += [place for place, chunk, _ in rest if chunk[:4] == content[:4]][:1]
        # A recording without samples may have other chunks after them.
        follows = bool(rest) and all(re.match(rb"[ -~]{4}", chunk) for _, chunk, _ in rest)
        follows = follows and rest[-1][0] + width + rest[-1][2] - counted <= size + 1
    declared, present = stored - more, max(0, size - body)
    unknown = _placeholder(stored) or (declared <= 0 and not follows)
    if len(parts) > 1 or (declared <= present and not unknown):
        return _Layout(parts=tuple(parts))
    if present == 0 and not unknown:
        return _Layout(f"0 of {declared} bytes are there")
    mend = struct.pack(code, min(present + more, 0xFFFF_FFFF))
    return _Layout(mends=((field, mend),), declared=present if unknown else declared, present=present)


def _placeholder(size: int) -> bool:
    """Tell if a size stands for one that is not known: about 2^31, 2^32 or beyond, whatever headers and blocks are off.

    FFmpeg writes 2^32 - 1, SoX 0x7FFFF000 and to AIFF 0x7F000000, ALSA 2^31, CAF -1.
    """
    near = any(abs(size - known) <= 0xFFFF for known in (2**31, 0x7F00_0000))
    return near or 2**32 - 256 <= size < 2**32 or size >= 2**63 - 256


def _ogg_layout(content: bytes | mmap.mmap) -> _Layout:
    """Check the pages of an Ogg file (RFC 3533, section 6): decoders skip what is missing, or take it for the end."""
    place, flags, parts, numbers = 0, None, [0], dict[bytes, int]()  # numbers: of a stream's last page, by its serial
    while len(header := content[place : place + 27]) == 27 and header.startswith(b"OggS"):
        segments = content[place + 27 : place + 27 + header[26]]
        body = content[place + 27 + len(segments) : place + 27 + len(segments) + sum(segments)]
        if len(segments) < header[26] or len(body) < sum(segments):
            return _Layout("the last Ogg page is cut")
        serial, number = header[14:18], int.from_bytes(header[18:22], "little")
        # CRC-32 from the highest bit on, without inversion: zlib's, whose bits run the other way, of reversed bytes.
        page = header[:22] + bytes(4) + header[26:] + segments + body
        checksum = zlib.crc32(page.translate(_REVERSED), 0xFFFF_FFFF) ^ 0xFFFF_FFFF
        if checksum.to_bytes(4, "big").translate(_REVERSED) != header[22:26]:
            return _Layout(f"the checksum of Ogg page {number} is wrong")
        if flags is not None and header[5] & 2 and not flags & 2:  # a first page after others: a new file
            if not flags & 4:
                return _Layout(f"the last Ogg page before byte {place} is missing")
            parts.append(place)
            numbers.clear()
        if number != numbers.get(serial, number - 1) + 1:
            return _Layout(f"Ogg page {number} does not follow page {numbers[serial]}")
        flags, numbers[serial] = header[5], number
        place += 27 + len(segments) + len(body)
    if flags is not None and (header.startswith(b"OggS") or not flags & 4):
        return _Layout("the last Ogg page is missing")
    return _Layout(parts=tuple(parts))


_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def wav_bytes(wav: np.ndarray, sample_rate: int) -> bytes:
    """Mono float32 [T] in [-1, 1], clipped, as a WAV file of 16 bits."""
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, wav.clip(-1, 1), sample_rate, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def write_wav(path: str | Path, wav: np.ndarray, sample_rate: int, subtype: str = "PCM_16") -> None:
    """Write float32 [T] or [T, channels] in [-1, 1] to a file, in a folder that is made for it. Of 16 bits samples are
    rounded; with subtype "FLOAT" they are read back bit for bit."""
    import soundfile

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, wav, sample_rate, subtype=subtype)
