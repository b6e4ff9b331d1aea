"""The reference segmentation of long streams, as MuST-C, simulstream and OmniSTEval keep it.

A list of segments in YAML or JSON, or one JSON object a line (.jsonl): `wav` names the recording, `offset` and
`duration` are seconds. The references stand in the same rows under `reference`, or in a text file of their own, one
line per segment in the same order:

    - {wav: talk.wav, offset: 2.43, duration: 9.05, reference: Guten Morgen.}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from audiorl.data.schema import FieldError, check, check_characters, parse_json
from audiorl.data.schema.streams import ReferenceColumns
from audiorl.eval.metrics.longform import ReferenceSegment
from audiorl.tasks.simul.logs import Instance
from audiorl.tasks.simul.yaml_text import load_yaml

Recordings = Mapping[str, tuple[ReferenceSegment, ...]]


def read_segments(path: str | Path, references: str | Path | None = None) -> Recordings:
    """The segments of each recording in order of time, keyed by the recording's name as written in `wav`.

    Times become ms. Raises ValueError naming file, entry and field.
    """
    path = Path(path)
    rows = _rows(path)
    texts: Sequence[Any]
    if references is None:
        texts = [row.get("reference") if isinstance(row, Mapping) else None for row in rows]
    else:
        texts = _text(Path(references)).removesuffix("\n").split("\n")
        if len(texts) != len(rows):
            raise ValueError(
                f"{references}: {len(texts)} lines for {len(rows)} segments in {path}; write one line per segment"
            )
    recordings: dict[str, list[ReferenceSegment]] = {}
    for number, (row, text) in enumerate(zip(rows, texts, strict=True), 1):
        where = f"{path}, segment {number}"
        try:
            fields = check({**row, "reference": text} if isinstance(row, dict) else row, ReferenceColumns)
        except FieldError as error:
            raise ValueError(f"{where}: {error.field}: {error.message}") from error
        segment = ReferenceSegment(1000 * fields.offset, 1000 * fields.duration, fields.reference.strip())
        recordings.setdefault(fields.wav, []).append(segment)
    if not recordings:
        raise ValueError(f"{path}: no segments")
    return {name: tuple(sorted(segments, key=lambda s: s.start)) for name, segments in recordings.items()}


def match_segments(instances: Sequence[Instance], recordings: Recordings) -> dict[int, tuple[ReferenceSegment, ...]]:
    """The segments of each instance by its index; the recording is found by its path, file name or stem.

    Raises ValueError for an instance without segments, and for segments without an instance.
    """
    matched: dict[int, tuple[ReferenceSegment, ...]] = {}
    used: dict[str, int] = {}
    for instance in instances:
        source = instance.source if isinstance(instance.source, str) else "".join(instance.source[:1])
        name = next((n for key in (str, _file, _stem) for n in recordings if key(n) == key(source)), None)
        if name is None:
            raise ValueError(
                f"instance {instance.index}: source: no segments for {source!r}; the segmentation has "
                f"{', '.join(sorted(recordings))}"
            )
        if name in used:
            raise ValueError(f"instance {instance.index}: source: {source!r} is also that of instance {used[name]}")
        used[name] = instance.index
        matched[instance.index] = recordings[name]
    unused = sorted(set(recordings) - set(used))
    if unused:
        raise ValueError(f"the log has no output for {', '.join(unused)}; leave out their segments or translate them")
    return matched


def _file(name: str) -> str:
    return Path(name).name


def _stem(name: str) -> str:
    return Path(name).stem


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason}); save the file as UTF-8") from error


def _rows(path: Path) -> list[Any]:
    text = _text(path)
    try:
        if path.suffix == ".jsonl":
            return [parse_json(line) for line in text.split("\n") if line.strip()]
        if path.suffix == ".json":
            rows = parse_json(text)
        elif path.suffix in (".yaml", ".yml"):
            rows = load_yaml(text)
        else:
            raise ValueError("segments are read from .yaml, .json or .jsonl")
        check_characters(rows)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read as {path.suffix[1:]} ({' '.join(str(error).split())})") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of segments")
    return rows
