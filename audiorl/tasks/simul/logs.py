"""Logs of simultaneous translation as SimulEval 1.1.4 writes and reads them.

A folder holds `config.yaml` (`source_type`, `target_type`) and `instances.log`, one JSON object a line:

    {"index": 0, "prediction": "we go", "delays": [960, 1600], "elapsed": [1010.5, 1702.0], "prediction_length": 2,
     "reference": "we walk", "source": ["talk.wav", "samplerate: 16000 Hz"], "source_length": 2400.0}

Delays are ms of source audio (words of a text source) read before each word or character was written; elapsed adds the
time spent computing and holds zeros where it was not measured. Speech output adds `durations`, `intervals` and
`prediction_offset` in ms; its `prediction` is the path of a sound file, its `prediction_length` in seconds, its
`elapsed` empty, and it has one delay per chunk.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from msgspec import Meta, Struct
from msgspec.structs import asdict

from audiorl.audio import write_wav
from audiorl.data.schema import FieldError, check, parse_json
from audiorl.data.schema.types import AnyText, LogTime
from audiorl.eval.metrics.latency import Interval, play, text_units
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.types import Rollout


class LogLine(Struct):
    """A line of instances.log. Times in ms of audio, or in words of a text source."""

    index: Annotated[int, Meta(ge=0, le=2**53, description="a whole number from 0; number the instances")]
    prediction: AnyText
    delays: Annotated[list[LogTime], Meta(description="a list of numbers; give one a word or character")]
    elapsed: Annotated[list[LogTime], Meta(description="a list of numbers; give one a delay, or none")]
    prediction_length: LogTime
    reference: AnyText | None
    source: Annotated[str | list[str], Meta(description="text or a list of texts; name the source")]
    source_length: Annotated[
        Annotated[int, Meta(gt=0, le=10**12)] | Annotated[float, Meta(gt=0, le=1e12)],
        Meta(description="a length; give ms, more than 0"),
    ]


class SpeechLogLine(LogLine):
    """A line of instances.log whose output is speech."""

    durations: list[Annotated[float, Meta(gt=0, le=1e12, description="a duration; leave out chunks without sound")]]
    prediction_offset: LogTime
    intervals: Annotated[
        list[Annotated[tuple[LogTime, LogTime], Meta(description="[start, duration]; give both in ms")]],
        Meta(description="a list; give [start, duration] of each chunk"),
    ]


SourceType = Literal["speech", "text", "youtube"]
TargetType = Literal["speech", "text"]

LOG = "instances.log"
CONFIG = "config.yaml"
_SOURCES = ("speech", "text", "youtube")
_TARGETS = ("speech", "text")
_EPSILON = 1e-6  # ms; elapsed times and intervals are sums of floats


@dataclass(frozen=True)
class Instance:
    """One stream: its source, what was written, when, and what should have been. Times in ms; see the module.

    `reference` is None where the log has null (long streams with a separate segmentation). `durations`, `intervals`
    and `prediction_offset` are set for speech output only; `prediction_offset` is when the output starts.
    """

    index: int
    prediction: str
    delays: tuple[float, ...]
    elapsed: tuple[float, ...]
    prediction_length: float
    reference: str | None
    source: str | tuple[str, ...]
    source_length: float
    durations: tuple[float, ...] | None = None
    prediction_offset: float | None = None
    intervals: tuple[Interval, ...] | None = None

    @property
    def speech(self) -> bool:
        """Whether the output is speech."""
        return self.durations is not None

    @property
    def timed(self) -> bool:
        """Whether elapsed times were measured: SimulEval leaves them empty or zero where they were not."""
        return bool(self.elapsed) and any(self.elapsed)


def read_log(folder: str | Path) -> list[Instance]:
    """Return the instances of a log in the order of its lines.

    Raises ValueError naming file, line and field for a missing config or log, text that is not UTF-8, a line that is
    not a JSON object, missing or malformed fields, times that are negative, not finite or go backwards, elapsed below
    its delay, and a number of delays other than that of units, durations or intervals.
    """
    folder = Path(folder)
    _, target = read_types(folder)
    path = folder / LOG
    instances: list[Instance] = []
    lines: dict[int, int] = {}
    for number, line in enumerate(_text(path).removesuffix("\n").split("\n"), 1):
        where = f"{path}, line {number}"
        instance = _parse(line, where)
        if instance.speech and target == "text":
            raise ValueError(
                f"{where}: durations: speech output, but target_type in {CONFIG} is 'text'; set it to 'speech'"
            )
        if instances and instance.speech != instances[0].speech:
            raise ValueError(
                f"{where}: durations: speech and text outputs in one log; write each kind to its own folder"
            )
        if instance.index in lines:
            raise ValueError(
                f"{where}: index: {instance.index} is also that of line {lines[instance.index]}; "
                "keep one line per index (was a run appended to an old log?)"
            )
        lines[instance.index] = number
        instances.append(instance)
    return instances


def read_types(folder: str | Path) -> tuple[SourceType, TargetType]:
    """`source_type` and `target_type` of the folder's config.

    SimulEval 1.1.4 overwrites `target_type` with `source_type` whenever it runs or scores, so "speech" may stand for
    text: the instances tell (`Instance.speech`).
    """
    path = Path(folder) / CONFIG
    try:
        config = yaml.safe_load(_text(path))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(
            f"{path}: not YAML ({' '.join(str(error).split())}); write the lines source_type: … and target_type: …"
        ) from error
    if not isinstance(config, Mapping):
        raise ValueError(f"{path}: expected the lines source_type: … and target_type: …")
    for key, allowed in (("source_type", _SOURCES), ("target_type", (*_TARGETS, "youtube"))):
        if config.get(key) not in allowed:
            raise ValueError(f"{path}: {key}: {config.get(key)!r} is not one of {', '.join(allowed)}")
    source, target = config["source_type"], config["target_type"]
    return source, "speech" if target == "youtube" else target


def write_log(
    folder: str | Path, instances: Sequence[Instance], source_type: SourceType, target_type: TargetType
) -> None:
    """Write a log that SimulEval reads; replaces one that is there.

    Raises ValueError naming instance and field for what `read_log` would refuse, before anything is written.
    """
    if source_type not in _SOURCES:
        raise ValueError(f"source_type: {source_type!r} is not one of {', '.join(_SOURCES)}")
    if target_type not in _TARGETS:
        raise ValueError(f"target_type: {target_type!r} is not one of {', '.join(_TARGETS)}")
    if not instances:
        raise ValueError("instances: none to write; a log needs at least one")
    seen: set[int] = set()
    for instance in instances:
        where = f"instance {instance.index}"
        _check(_instance(_fields(instance), where), where)
        if instance.speech != (target_type == "speech"):
            raise ValueError(f"{where}: durations: given for speech output and only there, target_type: {target_type}")
        if instance.index in seen:
            raise ValueError(f"{where}: index: occurs twice; number the instances")
        seen.add(instance.index)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # ASCII escapes, as SimulEval opens the file in the encoding of its locale.
    lines = "".join(json.dumps(_fields(instance)) + "\n" for instance in instances)
    (folder / LOG).write_text(lines, encoding="utf-8")
    (folder / CONFIG).write_text(f"source_type: {source_type}\ntarget_type: {target_type}\n", encoding="utf-8")


def _fields(instance: Instance) -> dict[str, Any]:
    """Return the fields of a line; those of speech only for speech."""
    fields = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    spoken = ("durations", "prediction_offset", "intervals")
    return {name: value for name, value in fields.items() if instance.speech or name not in spoken}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ValueError(
            f"{path}: no such file; a log is a folder with {LOG} and {CONFIG} (source_type and target_type)"
        ) from error
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 ({error.reason}); save the file as UTF-8") from error


def _parse(line: str, where: str) -> Instance:
    if not line.strip():
        raise ValueError(f"{where}: empty; remove the line, or run again if nothing was logged")
    try:
        row = parse_json(line)
    except FieldError as error:
        raise ValueError(f"{where}: {error.field}: {error.message}") from error
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}); was the run interrupted? Remove the line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object with index, prediction, delays …")
    instance = _instance(row, where)
    _check(instance, where, pieces="prediction_spm" in row)
    return instance


def _instance(fields: Mapping[str, Any], where: str) -> Instance:
    """Return the instance of a line's fields. Raises ValueError naming the field that is missing or of another type."""
    try:
        line = check(fields, SpeechLogLine if "durations" in fields or "intervals" in fields else LogLine)
    except FieldError as error:
        raise ValueError(f"{where}: {error.field}: {error.message}") from error
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in asdict(line).items()}
    return Instance(**values)


def _check(instance: Instance, where: str, *, pieces: bool = False) -> None:
    """ValueError naming the first field that cannot be. `pieces`: units are neither words nor characters."""
    _in_order(instance.delays, "delays", where)
    _in_order(instance.elapsed, "elapsed", where)
    count = len(instance.delays)
    if instance.elapsed and len(instance.elapsed) != count:
        raise ValueError(
            f"{where}: elapsed: {len(instance.elapsed)} times for {count} delays; one each, or none at all"
        )
    if instance.timed:
        for i, (delay, elapsed) in enumerate(zip(instance.delays, instance.elapsed, strict=True)):
            if elapsed < delay - _EPSILON:
                raise ValueError(
                    f"{where}: elapsed: {elapsed} is below delays[{i}] = {delay}; elapsed is the delay plus the time "
                    "spent computing, in ms (all zeros where it was not measured)"
                )
    if instance.durations is not None and instance.intervals is not None:
        _check_speech(instance.delays, instance.durations, instance.intervals, where)
        return
    if pieces:
        return
    words, characters = (len(text_units(instance.prediction, unit)) for unit in ("word", "char"))
    if count not in (words, characters):
        raise ValueError(
            f"{where}: delays: {count} for {words} words ({characters} characters) of prediction; give one delay per "
            "word, or per character but spaces for Chinese and Japanese"
        )
    if instance.prediction_length != count:
        raise ValueError(
            f"{where}: prediction_length: {instance.prediction_length}, but there are {count} delays; it is the number "
            "of units"
        )


def _check_speech(
    delays: Sequence[float], durations: Sequence[float], intervals: Sequence[Interval], where: str
) -> None:
    for name, values in (("durations", durations), ("intervals", intervals)):
        if len(values) != len(delays):
            raise ValueError(f"{where}: {name}: {len(values)} for {len(delays)} delays; one per chunk of speech")
    end = 0.0
    for i, ((start, duration), delay) in enumerate(zip(intervals, delays, strict=True)):
        if start < max(end, delay) - _EPSILON:
            raise ValueError(
                f"{where}: intervals: chunk {i} starts at {start}, before it is ready ({delay}) or the one before it "
                f"has ended ({end}); times are ms since the start of the source"
            )
        end = start + duration


def _in_order(values: Sequence[float], name: str, where: str) -> None:
    for i, (before, value) in enumerate(pairwise(values), 1):
        if value < before:
            raise ValueError(
                f"{where}: {name}: {value} after {before} (entry {i}) goes backwards; units stand in the "
                "order in which they were written"
            )


def playback_track(rollout: Rollout, speech_decoder: CodecSpeechDecoder) -> tuple[np.ndarray, list[Interval]]:
    """Return the interpreter's track, float32 [T] from the source's beginning on, and the interval of each turn (ms)::

        |chunk 1|chunk 2|chunk 3|chunk 4|        source
                |un momento…|  |adiós|    a turn's speech begins after its chunk and after the speech before it

    A turn without speech has no interval; without any speech the track is empty.
    """
    waves = speech_decoder.by_segment(rollout)
    spoken = [(s.source_time or 0.0, wav) for s, wav in zip(rollout.segments, waves, strict=True) if len(wav)]
    rate = speech_decoder.sample_rate
    intervals = play([1000 * time for time, _ in spoken], [1000 * len(wav) / rate for _, wav in spoken])
    starts = [round(start / 1000 * rate) for start, _ in intervals]
    track = np.zeros(max((at + len(wav) for at, (_, wav) in zip(starts, spoken, strict=True)), default=0), np.float32)
    for at, (_, wav) in zip(starts, spoken, strict=True):
        track[at : at + len(wav)] += wav
    return track, intervals


def write_speech_log(
    folder: Path, rollouts: Sequence[Rollout], speech_decoder: CodecSpeechDecoder, sources: Sequence[str] = ()
) -> list[Path]:
    """folder/wavs/INDEX_pred.wav, the tracks, and SimulEval's log of speech output, its delays those of the chunks.

    A stream without speech is in the log without delays. `sources`: names of the recordings, by default the ids.
    Returns the paths of the tracks.
    """
    instances, paths = [], []
    for index, rollout in enumerate(rollouts):
        track, intervals = playback_track(rollout, speech_decoder)
        path = folder / "wavs" / f"{index}_pred.wav"
        write_wav(path, track, speech_decoder.sample_rate)
        paths.append(path)
        turns = [s for s, wav in zip(rollout.segments, speech_decoder.by_segment(rollout), strict=True) if len(wav)]
        sample = rollout.sample
        instances.append(
            Instance(
                index=index,
                prediction=str(path),
                delays=tuple(1000 * (s.source_time or 0.0) for s in turns),
                elapsed=(),
                prediction_length=len(track) / speech_decoder.sample_rate,
                reference=" ".join(sample.references) or None,
                source=sources[index] if sources else sample.id,
                source_length=1000 * float(sample.metadata.get("seconds", sample.turns[-1].end)),
                durations=tuple(duration for _, duration in intervals),
                prediction_offset=intervals[0][0] if intervals else 0.0,
                intervals=tuple(intervals),
            )
        )
    write_log(folder, instances, "speech", "speech")
    return paths
