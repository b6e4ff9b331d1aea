"""What the stages said about a recording, in one JSON file each, so that nothing is computed twice.

    OUT/stages/3f/3f9c….json    {"source": {…}, "results": {"segments": {"key": "a1…", "value": […]}, …}}

A result holds as long as its key does: a hash of the recording, of the stage's settings and of the keys of what the
stage reads. So a changed option redoes its stage and those that depend on it, and nothing else. The file is replaced
after each stage; whoever kills the process loses the stage in hand.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from audiorl.audio import AudioError
from corpora.annotate.recordings import Recording, Source


class Stage(Protocol):
    """A step of the annotation of one recording. It loads its models at the first call."""

    @property
    def name(self) -> str:
        """Under which its result is stored, its own in each list of stages."""
        ...

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of earlier stages whose results it reads."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """JSON values that its result depends on, besides the recording and `needs`."""
        ...

    def __call__(self, recording: Recording) -> Any:
        """Return the result, a JSON value: of most stages a list with an entry for each segment. AudioError for audio
        that cannot be used."""
        ...


@dataclass(frozen=True)
class Annotated:
    """The results of all stages for a recording; or why there are none."""

    results: Mapping[str, Any]
    problem: str = ""


def keys(source: Source, stages: Sequence[Stage]) -> dict[str, str]:
    """Return the key of each stage's result, by the stage's name."""
    keys: dict[str, str] = {}
    mark = source.mark
    for stage in stages:
        content = [stage.name, mark, dict(stage.settings), [keys[name] for name in stage.needs]]
        keys[stage.name] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
    return keys


def stored_results(folder: Path, source: Source, stages: Sequence[Stage]) -> dict[str, Any]:
    """Return the results that still hold, by the stage's name. Of a damaged file there are none."""
    record = _read(_file(folder, source))
    return {name: record[name]["value"] for name, key in keys(source, stages).items() if _key(record, name) == key}


def annotate(folder: Path, source: Source, stages: Sequence[Stage]) -> Annotated:
    """Run the stages whose results do not hold, and store each at once. A recording that cannot be used has a
    `problem` that names it."""
    file = _file(folder, source)
    record, wanted = _read(file), keys(source, stages)
    recording = Recording(source, {})
    try:
        for stage in stages:
            key = wanted[stage.name]
            if _key(record, stage.name) != key:
                record[stage.name] = {"key": key, "value": stage(recording)}
                _write(file, source, record)
            recording.results[stage.name] = record[stage.name]["value"]
    except AudioError as error:
        return Annotated({}, str(error))
    return Annotated(recording.results)


def _file(folder: Path, source: Source) -> Path:
    clip = source.clip
    name = " ".join(map(str, (os.path.abspath(str(clip.path)), clip.start, clip.duration, *clip.channels)))
    digest = hashlib.sha256(name.encode()).hexdigest()[:24]
    return folder / digest[:2] / f"{digest}.json"


def _key(record: Mapping[str, Any], name: str) -> str | None:
    entry = record.get(name)
    return entry.get("key") if isinstance(entry, dict) and "value" in entry else None


def _read(file: Path) -> dict[str, Any]:
    try:
        results = json.loads(file.read_bytes())["results"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        return {}  # damaged: the results are computed again
    return results if isinstance(results, dict) else {}


def _write(file: Path, source: Source, results: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.part")
    content = json.dumps({"source": source.mark, "results": results}, ensure_ascii=False)
    with open(partial, "w", encoding="utf-8") as handle:
        handle.write(content)
    os.replace(partial, file)
