"""Logs of simultaneous translation as SimulEval 1.1.4 writes and reads them.

A folder holds `config.yaml` (`source_type`, `target_type`) and `instances.log`, one JSON object a line. Delays are ms
of source audio (words of a text source) read before each word or character was written; elapsed adds the time spent
computing and holds zeros where it was not measured. Speech output adds `durations`, `intervals` and `prediction_offset`
in ms; its `prediction` is the path of a sound file, its `prediction_length` in seconds, its `elapsed` empty, and it has
one delay per chunk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import numpy as np
import yaml
from msgspec import Meta

from audiorl.audio import write_wav
from audiorl.data.schema import FieldError, check, parse_json
from audiorl.data.schema.types import AnyText, LogTime
from audiorl.eval.metrics.latency import Interval, Unit, play, text_units
from audiorl.types import Rollout

if TYPE_CHECKING:
    from audiorl.rollout.speech import CodecSpeechDecoder

SourceType = Literal["speech", "text", "youtube"]
TargetType = Literal["speech", "text"]

LOG = "instances.log"
CONFIG = "config.yaml"
SPOKEN = ("durations", "prediction_offset", "intervals")
"""Fields of speech output alone."""
_EPSILON = 1e-6  # ms; elapsed times and intervals are sums of floats

_Index = Annotated[int, Meta(ge=0, le=2**53, description="a whole number from 0; number the instances")]
_Length = Annotated[int, Meta(gt=0, le=10**12)] | Annotated[float, Meta(gt=0, le=1e12)]
_Duration = Annotated[float, Meta(gt=0, le=1e12, description="a duration; leave out chunks without sound")]
_Interval = Annotated[tuple[LogTime, LogTime], Meta(description="[start, duration]; give both in ms")]


@dataclass(frozen=True)
class Instance:
    """One stream: its source, what was written, when, and what should have been. Times in ms; see the module.

    `reference` is None where the log has null (long streams with a separate segmentation). `durations`, `intervals`
    and `prediction_offset` are set for speech output only; `prediction_offset` is when the output starts.
    """

    index: _Index
    prediction: AnyText
    delays: Annotated[tuple[LogTime, ...], Meta(description="a list of numbers; give one a word or character")]
    elapsed: Annotated[tuple[LogTime, ...], Meta(description="a list of numbers; give one a delay, or none")]
    prediction_length: LogTime
    reference: AnyText | None
    source: Annotated[str | tuple[str, ...], Meta(description="text or a list of texts; name the source")]
    source_length: Annotated[_Length, Meta(description="a length; give ms, more than 0")]
    durations: tuple[_Duration, ...] | None = None
    prediction_offset: LogTime | None = None
    intervals: Annotated[tuple[_Interval, ...], Meta(description="a list; give [start, duration] each")] | None = None

    @property
    def speech(self) -> bool:
        """Tell if the output is speech."""
        return self.durations is not None

    def units(self, unit: Unit) -> list[str]:
        """Return the words or characters of the prediction, each of which has a delay.

        Words stand between blanks of any kind, as in SimulEval. Where their number is another one they stand between
        spaces: other programs keep "10\u202f000" and "Bonjour\u00a0!" together.
        """
        units = text_units(self.prediction, unit)
        others = self.prediction.split(" ") if unit == "word" else self.prediction
        others = [part for part in others if part.strip()]
        return others if len(units) != len(self.delays) == len(others) else units

    @property
    def timed(self) -> bool:
        """Tell if elapsed times were measured: SimulEval leaves them empty or zero where they were not."""
        return any(self.elapsed)


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
            message = f"durations: speech output, but target_type in {CONFIG} is 'text'; set it to 'speech'"
            raise ValueError(f"{where}: {message}")
        if instances and instance.speech != instances[0].speech:
            raise ValueError(f"{where}: durations: speech and text outputs in one log; write each to its own folder")
        if instance.index in lines:
            raise ValueError(
                f"{where}: index: {instance.index} is also that of line {lines[instance.index]}; "
                "keep one line per index (was a run appended to an old log?)"
            )
        lines[instance.index] = number
        instances.append(instance)
    return instances


def read_types(folder: str | Path) -> tuple[SourceType, TargetType]:
    """Return `source_type` and `target_type` of the folder's config.

    SimulEval 1.1.4 overwrites `target_type` with `source_type` whenever it runs or scores, so "speech" may stand for
    text: the instances tell (`Instance.speech`).
    """
    path = Path(folder) / CONFIG
    try:
        config = yaml.safe_load(_text(path))
    except (yaml.YAMLError, RecursionError) as error:
        config = f"not YAML ({' '.join(str(error).split())})"
    if not isinstance(config, Mapping):
        raise ValueError(f"{path}: write the lines source_type: … and target_type: …, got {config}")
    for key in ("source_type", "target_type"):
        if config.get(key) not in get_args(SourceType):
            allowed = ", ".join(get_args(SourceType))
            raise ValueError(f"{path}: {key}: {config.get(key)!r} is not one of {allowed}")
    source, target = config["source_type"], config["target_type"]
    return source, "speech" if target == "youtube" else target


def write_log(
    folder: str | Path, instances: Sequence[Instance], source_type: SourceType, target_type: TargetType
) -> None:
    """Write a log that SimulEval reads; replaces one that is there.

    Raises ValueError naming instance and field for times and numbers of units that `read_log` would refuse.
    """
    assert len({instance.index for instance in instances}) == len(instances) > 0
    assert all(instance.speech == (target_type == "speech") for instance in instances)
    lines = []
    for instance in instances:
        _check(instance, f"instance {instance.index}")
        row = {f.name: getattr(instance, f.name) for f in fields(instance) if instance.speech or f.name not in SPOKEN}
        lines.append(json.dumps(row) + "\n")  # ASCII escapes, as SimulEval opens it in the encoding of its locale
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOG).write_text("".join(lines), encoding="utf-8")
    (folder / CONFIG).write_text(f"source_type: {source_type}\ntarget_type: {target_type}\n", encoding="utf-8")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        needed = f"a log is a folder with {LOG} and {CONFIG} (source_type and target_type)"
        raise ValueError(f"{path}: no such file; {needed}") from error
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 ({error.reason}); save the file as UTF-8") from error


def _parse(line: str, where: str) -> Instance:
    if not line.strip():
        raise ValueError(f"{where}: empty; remove the line, or run again if nothing was logged")
    try:
        row = parse_json(line)
        instance = check(row, Instance) if isinstance(row, dict) else None
    except FieldError as error:
        raise ValueError(f"{where}: {error.field}: {error.message}") from error
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}); was the run interrupted? Remove the line") from error
    if instance is None:
        raise ValueError(f"{where}: expected a JSON object with index, prediction, delays …")
    missing = [name for name in SPOKEN if getattr(instance, name) is None]
    if missing and len(missing) < len(SPOKEN):
        raise ValueError(f"{where}: {missing[0]}: missing; speech output has {', '.join(SPOKEN)}")
    # Pieces of SentencePiece are neither words nor characters.
    _check(instance, where, counted="prediction_spm" not in row)
    return instance


def _check(instance: Instance, where: str, counted: bool = True) -> None:
    """Raise ValueError naming the first field that cannot be."""
    delays, elapsed, count = instance.delays, instance.elapsed, len(instance.delays)
    for name, times in (("delays", delays), ("elapsed", elapsed)):
        for i, (before, value) in enumerate(pairwise(times), 1):
            if value < before:
                order = "goes backwards; units stand in the order in which they were written"
                raise ValueError(f"{where}: {name}: {value} after {before} (entry {i}) {order}")
    if elapsed and len(elapsed) != count:
        raise ValueError(f"{where}: elapsed: {len(elapsed)} times for {count} delays; one each, or none at all")
    for i, (delay, value) in enumerate(zip(delays, elapsed, strict=True) if instance.timed else ()):
        if value < delay - _EPSILON:
            raise ValueError(
                f"{where}: elapsed: {value} is below delays[{i}] = {delay}; elapsed is the delay plus the time "
                "spent computing, in ms (all zeros where it was not measured)"
            )
    if instance.durations is not None and instance.intervals is not None:
        for name, given in (("durations", len(instance.durations)), ("intervals", len(instance.intervals))):
            if given != count:
                raise ValueError(f"{where}: {name}: {given} for {count} delays; one per chunk of speech")
        end = 0.0
        for i, ((start, duration), delay) in enumerate(zip(instance.intervals, delays, strict=True)):
            if start < max(end, delay) - _EPSILON:
                raise ValueError(
                    f"{where}: intervals: chunk {i} starts at {start}, before it is ready ({delay}) or the one before "
                    f"it has ended ({end}); times are ms since the start of the source"
                )
            end = start + duration
    elif counted:
        words, characters = len(instance.units("word")), len(instance.units("char"))
        if count not in (words, characters):
            raise ValueError(
                f"{where}: delays: {count} for {words} words ({characters} characters) of prediction; give one delay "
                "per word, or per character but spaces for languages without spaces"
            )
        if (length := instance.prediction_length) != count:
            problem = f"{length}, but there are {count} delays; it is the number of units"
            raise ValueError(f"{where}: prediction_length: {problem}")


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
    """Write folder/wavs/INDEX_pred.wav, the tracks, and SimulEval's log of speech output; its delays are the chunks'.

    A stream without speech is in the log without delays. `sources`: names of the recordings, by default the ids.
    Returns the paths of the tracks.
    """
    instances, paths = [], []
    rate = speech_decoder.sample_rate
    for index, rollout in enumerate(rollouts):
        track, intervals = playback_track(rollout, speech_decoder)
        paths.append(folder / "wavs" / f"{index}_pred.wav")
        write_wav(paths[-1], track, rate)
        turns = [s for s, wav in zip(rollout.segments, speech_decoder.by_segment(rollout), strict=True) if len(wav)]
        sample = rollout.sample
        instances.append(
            Instance(
                index=index,
                prediction=str(paths[-1]),
                delays=tuple(1000 * (s.source_time or 0.0) for s in turns),
                elapsed=(),
                prediction_length=len(track) / rate,
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
