"""Streams for simultaneous interpretation: long source speech with a translation for each of its units.

A stream is cut into chunks of fixed length. A unit can be translated as soon as it has ended, so the reference of a
chunk, y*_t, holds the translations of the units that ended in it::

    source    |--one moment please--|     |--goodbye--|         Unit.start, Unit.end
    chunks    |    1    |    2    |    3    |    4    |    5    |
    y*_t           ""        ""    "un momento…"  ""    " adiós"
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from audiorl.audio import AudioClip
from audiorl.data.prompts import language_name
from audiorl.eval.metrics.latency import gap, join_texts, latency_unit, split_words
from audiorl.types import Message, Sample, Segment, Turn

MIN_SECONDS = 0.1
"""Minimum duration of a stream and of its last chunk."""
FRAME_SECONDS = 0.04
"""Duration of one audio token of Qwen2.5-Omni and Qwen2-Audio, the shortest possible chunk."""
SPEAKER_MARK = ">>"
"""Stands where another speaker begins, as in closed captions."""
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Unit:
    """A part of the source speech, from `start` to `end` seconds in the stream, and its translation `target`.

    `target_seconds`: duration of the spoken translation, None if unknown. `target_audio`: a recording of it. `speaker`:
    who says it, "" where the stream's speakers are not told apart.
    """

    start: float
    end: float
    target: str
    source: str = ""
    target_seconds: float | None = None
    target_audio: AudioClip | None = None
    speaker: str = ""


@dataclass(frozen=True, eq=False)
class Stream:
    """Source speech with its translation units, in order and without overlap.

    Raises ValueError, naming the stream and the unit, for units that are unsorted, overlap, have no duration or end
    after the audio, and for less than MIN_SECONDS of audio. A unit whose `target` is "" needs no translation. A stream
    without units has no reference: it can be interpreted, but neither trained on nor scored.
    """

    id: str
    audio: AudioClip
    seconds: float
    units: tuple[Unit, ...]
    source_language: str
    target_language: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.seconds >= MIN_SECONDS:
            least = f"give at least {MIN_SECONDS * 1000:.0f} ms of audio"
            raise ValueError(f"stream {self.id!r} lasts {self.seconds * 1000:.0f} ms; {least}")
        end = 0.0
        for number, unit in enumerate(self.units, 1):
            where = f"stream {self.id!r}: unit {number}"
            if not 0 <= unit.start < unit.end:
                raise ValueError(f"{where} lasts from {unit.start:g} to {unit.end:g} s; give start < end, from 0 on")
            if unit.start < end - _TOLERANCE:
                before = f"before the previous one ends at {end:g} s"
                raise ValueError(f"{where} begins at {unit.start:g} s, {before}; sort units")
            if unit.end > self.seconds + 0.1:
                raise ValueError(f"{where} ends at {unit.end:g} s, after the audio's {self.seconds:g} s; correct it")
            end = unit.end

    @property
    def reference(self) -> str:
        return join_texts([u.target for u in self.units], self.target_language)

    @property
    def transcript(self) -> str:
        return join_texts([u.source for u in self.units if u.source], self.source_language)


@dataclass(frozen=True)
class ChunkConfig:
    """How a stream is cut into chunks. Both values must be multiples of the audio encoder's frame (40 ms for Qwen).

    By default a chunk and its context together fill the 2 s window in which Qwen2.5-Omni's encoder attends.
    """

    seconds: float = 0.96
    """Duration of a chunk."""
    context: float = 1.04
    """Seconds of audio before a chunk that are encoded together with it."""

    def __post_init__(self) -> None:
        if not self.seconds >= FRAME_SECONDS - _TOLERANCE:
            raise ValueError(
                f"chunks of {self.seconds * 1000:g} ms are shorter than a frame of the audio encoder; "
                f"give a multiple of {FRAME_SECONDS * 1000:g} ms"
            )
        if not 0 <= self.context < float("inf"):
            raise ValueError(f"a context of {self.context:g} s before each chunk; give seconds, 0 or more")


def chunk_ends(seconds: float, chunk: float) -> list[float]:
    """Return the end of each chunk, in seconds, of a stream of `seconds`.

    A remainder shorter than MIN_SECONDS is dropped. It is too short for a chunk of its own, and cannot extend the chunk
    before, which a live interpreter has processed by then.
    """
    assert seconds >= min(MIN_SECONDS, chunk)
    full = int((seconds + _TOLERANCE) / chunk)
    rest = seconds - full * chunk
    ends = [(i + 1) * chunk for i in range(full)]
    if full and abs(rest) < _TOLERANCE:
        ends[-1] = seconds  # exactly: AL stops at the first word that is not before the source's end
    return ends if full and rest < MIN_SECONDS else [*ends, seconds]


def turns(stream: Stream, chunks: ChunkConfig = ChunkConfig(), lags: Sequence[int] = ()) -> tuple[Turn, ...]:
    """Return the stream chunk by chunk with references. `lags`: by how many chunks each unit's reference is delayed.

    Units keep their order, and none is delayed past the last chunk. Text after the first unit begins with the space
    between them, where there is one. The last turn ends with the stream, a dropped remainder included.
    """
    lags = lags or [0] * len(stream.units)
    ends = chunk_ends(stream.seconds, chunks.seconds)
    units_of_chunk: list[list[Unit]] = [[] for _ in ends]
    last = 0
    for unit, ready, lag in zip(stream.units, _ready(stream, ends), lags, strict=True):
        last = max(last, min(ready + lag, len(ends) - 1))
        units_of_chunk[last].append(unit)
    out, start, said = [], 0.0, ""
    # Latencies stop at the first word that is not before the source's end, so the last turn may not end before it.
    for end, read, units in zip(ends, [*ends[:-1], stream.seconds], units_of_chunk, strict=True):
        text = join_texts([u.target for u in units], stream.target_language)
        lengths = [u.target_seconds for u in units if u.target.strip()]
        spoken = None if not lengths or None in lengths else sum(x for x in lengths if x is not None)
        out.append(
            Turn(
                audio=_part_of_clip(stream.audio, start, end - start, min(chunks.context, start)),
                end=read,
                reference=gap(said, text, stream.target_language) + text,
                source=join_texts([u.source for u in units], stream.source_language),
                reference_seconds=spoken,
                speech=tuple(u.target_audio for u in units if u.target_audio is not None),
            )
        )
        start, said = end, text or said
    return tuple(out)


def _ready(stream: Stream, ends: Sequence[float]) -> list[int]:
    """Return the chunk, of those that end at `ends`, after which each unit can be said."""
    last = len(ends) - 1
    return [next((t for t, end in enumerate(ends) if end >= u.end - _TOLERANCE), last) for u in stream.units]


def random_lags(
    stream: Stream, rng: random.Random, most: int, least: int = 0, per: Literal["unit", "stream"] = "unit"
) -> list[int]:
    """Draw by how many chunks an interpreter is late with each unit, evenly from `least` to `most`.

    per: drawn for each unit, or once for the stream, as of interpreters with different habits. Raises ValueError unless
    0 <= least <= most.
    """
    if not 0 <= least <= most:
        raise ValueError(f"lags: need 0 <= least <= most, got {least} and {most}")
    if per == "unit":
        return [rng.randint(least, most) for _ in stream.units]
    return [rng.randint(least, most)] * len(stream.units)


def phrase_lags(stream: Stream, chunks: ChunkConfig = ChunkConfig(), pause: float = 0.15) -> list[int]:
    """Return by how many chunks an interpreter is late with each unit who waits for the end of every phrase.

    So are references that are known by the sentence only. A phrase ends where no unit follows within `pause` seconds.
    """
    ready = _ready(stream, chunk_ends(stream.seconds, chunks.seconds))
    lags, last = [0] * len(ready), len(ready) - 1
    for k in reversed(range(len(ready))):
        if k + 1 < len(ready) and stream.units[k + 1].start - stream.units[k].end > pause:
            last = k
        lags[k] = ready[last] - ready[k]
    return lags


def with_speaker_marks(stream: Stream) -> Stream:
    """Return the stream with SPEAKER_MARK before each unit whose speaker is not that of the one before.

    The first speaker has no mark. A unit without translation passes its mark on to the next one of its speaker.
    """
    units, before = [], ""
    for unit in stream.units:
        changed = bool(unit.target and before and unit.speaker and unit.speaker != before)
        if unit.target:
            before = unit.speaker or before
        units.append(replace(unit, target=f"{SPEAKER_MARK} {unit.target}") if changed else unit)
    return replace(stream, units=tuple(units))


def interpretation_sample(stream: Stream, chunks: ChunkConfig = ChunkConfig(), lags: Sequence[int] = ()) -> Sample:
    """Return the stream as a prompt: the instruction, then one turn a chunk; its reference is the stream's."""
    instruction = instruction_sample(stream.id, stream.source_language, stream.target_language)
    metadata = {"seconds": stream.seconds, "transcript": stream.transcript}
    return replace(
        instruction,
        references=(stream.reference,) if stream.units else (),
        metadata={**stream.metadata, **instruction.metadata, **metadata},
        turns=turns(stream, chunks, lags),
    )


def instruction_sample(id: str, source_language: str, target_language: str) -> Sample:
    """Return the instruction to interpret, without audio."""
    spoken, written = map(language_name, (source_language, target_language))
    return Sample(
        id=id,
        messages=(Message("user", (f"Translate the {spoken} speech into {written} while you hear it.",)),),
        task=f"{source_language}-{target_language}",
        metadata={"source_language": source_language, "target_language": target_language},
    )


def settled(segments: Sequence[Segment], language: str) -> str:
    """Return what is written, without a last word at which the policy was cut off: the next turn may complete it."""
    text = "".join(s.text for s in segments)
    cut = bool(segments) and segments[-1].stop_reason == "length" and latency_unit(language) == "word"
    return re.sub(r"\S+$", "", text) if cut else text


def completed(segments: Sequence[Segment], language: str) -> list[int]:
    """Return of each word the turn, from 0, that completed it; the number of turns for what the end of the source did.

    Complete is a word that no later turn adds to; of a turn that was cut off the last word is open until the next one.
    """
    final, turns = split_words("".join(s.text for s in segments), language), list[int]()
    for turn in range(len(segments)):
        words = split_words(settled(segments[: turn + 1], language), language)
        while len(turns) < len(words) and words[len(turns)] == final[len(turns)]:
            turns.append(turn)
    return turns + [len(segments)] * (len(final) - len(turns))


def split_stream(stream: Stream, max_seconds: float) -> list[Stream]:
    """Return the stream in parts of at most `max_seconds`, cut where units begin; a part from START on is ID@START.

    Audio before the first unit is left out, and audio after the last unit of a part beyond `max_seconds`. A unit that
    is longer than that makes a longer part. A stream without units, or short enough, is returned unchanged.
    """
    if not stream.units or stream.seconds <= max_seconds:
        return [stream]
    groups: list[list[Unit]] = []
    for unit in stream.units:
        if groups and unit.end - groups[-1][0].start <= max_seconds:
            groups[-1].append(unit)
        else:
            groups.append([unit])
    out = []
    for group, following in zip(groups, [*groups[1:], None], strict=True):
        rest = stream.seconds if following is None else following[0].start
        end = min(rest, max(group[0].start + max_seconds, group[-1].end))
        end = min(max(end, group[0].start + MIN_SECONDS), stream.seconds)  # parts of MIN_SECONDS at least
        start = min(group[0].start, end - MIN_SECONDS)
        seconds, begin = round(end - start, 6), stream.audio.start + round(start, 6)
        units = tuple(replace(u, start=round(u.start - start, 6), end=round(u.end - start, 6)) for u in group)
        audio = replace(stream.audio, start=begin, duration=seconds, context=0.0)
        out.append(replace(stream, id=f"{stream.id}@{start:.2f}", audio=audio, seconds=seconds, units=units))
    return out


def _part_of_clip(clip: AudioClip, start: float, duration: float, context: float) -> AudioClip:
    """`duration` seconds from `start` on in the clip. Of an array only this part is kept, so that its key is cheap."""
    start = round(start, 6)
    if clip.array is None:
        return replace(clip, start=clip.start + start, duration=round(duration, 6), context=round(context, 6))
    assert clip.sample_rate is not None
    rate = clip.sample_rate
    first, begin = round((clip.start + start - context) * rate), round((clip.start + start) * rate)
    part = clip.array[first : round((clip.start + start + duration) * rate)]
    context = (begin - first) / rate
    length = len(part) / rate - context
    return replace(clip, array=part, start=context, duration=length, context=context)
