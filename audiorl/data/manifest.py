"""Manifests in, samples out, with one clear line for every row that cannot be used.

    loaded = read_samples("train.jsonl")                              # the kind is found from the columns
    loaded = read_samples("mmau-test-mini.json", audio_root="audio")
    loaded = read_samples("LibriSpeech/test-clean", think=False)
    loaded = read_samples("rows.parquet", on_error="skip", check_audio=True)
    print(loaded.summary())                                           # rows.parquet: 998 samples, 2 rows skipped (…)

A native manifest is JSON lines with a question or a transcript for each audio file::

    {"id": "q1", "audio": "clips/q1.wav", "question": "Which animal?", "choices": ["a dog", "a cat"], "answer": "a cat"}
    {"id": "u1", "audio": "clips/u1.flac", "text": "good morning", "language": "en"}

The other kinds and their columns are listed in `audiorl.data.formats` and `audiorl.data.folders`. Relative audio paths
start from `audio_root`, by default the manifest's folder. Audio is not opened unless `check_audio` is set.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack, get_args

from audiorl.audio import AudioClip, AudioError, load_clip, probe
from audiorl.data.archives import cut_rows, is_cut, is_shar, shar_rows, webdataset_rows
from audiorl.data.folders import librispeech_rows, wenetspeech_rows
from audiorl.data.formats import FORMATS, Style, audio_field, detect
from audiorl.data.hub import PREFIX, dataset_rows, hub_rows, is_dataset
from audiorl.data.kaldi import is_kaldi, kaldi_rows
from audiorl.data.published import AnyRow, avqa_rows, musicbench_rows
from audiorl.data.rows import BadRow, LeftOut, Row, json_document, read_rows
from audiorl.data.schema import FieldError, check_limit
from audiorl.types import Sample

Kind = Literal[
    "auto",
    "native",
    "avqa",
    "musicbench",
    "mmau",
    "mmar",
    "mmsu",
    "asr",
    "librispeech",
    "wenetspeech",
    "kaldi",
    "shar",
    "webdataset",
]
SkippedRow = BadRow
Format = Callable[[Row, Style], Sample]
T = TypeVar("T")


class ReadOptions(TypedDict, total=False):
    """The keyword arguments of `read_samples`, for readers that pass them on."""

    think: bool
    audio_root: str | Path | None
    on_error: Literal["raise", "skip"]
    limit: int | None
    check_audio: bool
    question: str | None
    need_answer: bool
    columns: Mapping[str, str] | None


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """What a manifest holds: usable samples in their order, and the rows that were skipped with the reason for each.

    `samples` are `Sample`s, or what another reader makes of each row (`audiorl.data.preferences`). `left_out` counts
    the sound rows that its kind does not use, by the reason.
    """

    samples: tuple[T, ...]
    skipped: tuple[SkippedRow, ...]
    path: str
    left_out: Mapping[str, int] = field(default_factory=dict)

    def summary(self) -> str:
        """One line: how many samples, what was left out, how many rows were skipped, and the first reason."""
        line = f"{self.path}: {len(self.samples)} sample{'' if len(self.samples) == 1 else 's'}"
        if self.left_out:
            line += f", left out: {', '.join(f'{count} ({reason})' for reason, count in self.left_out.items())}"
        if not self.skipped:
            return line
        rows = f"{len(self.skipped)} row{'' if len(self.skipped) == 1 else 's'} skipped"
        return f"{line}, {rows} (first: {self.skipped[0]})"

    def listing(self, most: int = 20) -> str:
        """The skipped rows, one line each; beyond `most` only their number."""
        lines = [f"  skipped {row}" for row in self.skipped[:most]]
        return "\n".join([*lines, f"  and {len(self.skipped) - most} more"] if len(self.skipped) > most else lines)


def read_samples(
    path: str | Path | Any,
    kind: Kind | str = "auto",
    *,
    think: bool = True,
    audio_root: str | Path | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    limit: int | None = None,
    check_audio: bool = False,
    question: str | None = None,
    need_answer: bool = True,
    columns: Mapping[str, str] | None = None,
) -> Loaded[Sample]:
    """Read the first `limit` samples of a manifest, dataset or corpus folder, of `hf://NAME:SPLIT`, or of a
    `datasets.Dataset`.

    kind: which format it is, found from its columns when "auto"; "asr" stands for any corpus of transcripts.
    think: ask for <think> before the answer. question: asked where a row brings no question of its own, or in place of
    the request for a transcript. on_error: stop at the first unusable row, or skip, count and list it. check_audio:
    decode every clip now; a broken one is an unusable row. need_answer: a question without an answer is an unusable
    row; otherwise its sample has no references. columns: {column wanted here: its name in the data}.

    Raises ValueError naming file, row and field. A file that cannot be read at all raises whatever on_error says.
    """
    return read_values(
        path,
        kind,
        _itself,
        think=think,
        audio_root=audio_root,
        on_error=on_error,
        limit=limit,
        check_audio=check_audio,
        question=question,
        need_answer=need_answer,
        columns=columns,
    )


def samples_from_rows(
    rows: Iterable[Mapping[str, Any]] | Any, kind: Kind | str = "auto", **options: Unpack[ReadOptions]
) -> Loaded[Sample]:
    """Make samples of dictionaries, or of a `datasets.Dataset`, as `read_samples` does of a file's rows.

    Relative audio paths start from `audio_root`, by default the working directory. Raises ValueError naming the row,
    counted from 1, and the field.
    """
    return read_values(rows, kind, _itself, **options)


def read_values(
    path: str | Path | Any,
    kind: Kind | str,
    value_of: Callable[[Row, Style, Format], tuple[Sample, T]],
    *,
    detect: Callable[[Row], str] = detect,
    repeats: bool = False,
    think: bool = True,
    audio_root: str | Path | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    limit: int | None = None,
    check_audio: bool = False,
    question: str | None = None,
    need_answer: bool = True,
    columns: Mapping[str, str] | None = None,
) -> Loaded[T]:
    """What `value_of(row, style, format)` makes of each row, with the sample in it; the rest is as in `read_samples`.

    `value_of` raises FieldError for a row that cannot be used. detect: the kind of the first readable row, for "auto".
    repeats: an id may come again with the same prompt.
    """
    if kind not in get_args(Kind):
        raise ValueError(f"no kind of manifest is called {kind!r}; choose from {', '.join(get_args(Kind))}")
    if on_error not in ("raise", "skip"):
        raise ValueError(f'on_error must be "raise" or "skip", got {on_error!r}')
    check_limit(limit)
    if audio_root is not None and not Path(audio_root).is_dir():
        raise ValueError(f"audio_root {audio_root}: no such folder")
    rows: Iterator[AnyRow] | None = None
    name, folder = str(path), Path()
    if is_dataset(path):
        name, rows = "dataset", dataset_rows(path)
    elif not isinstance(path, str | Path):
        name, rows = "rows", (Row("rows", number, row) for number, row in enumerate(path, 1))
    elif name.startswith(PREFIX):
        rows = hub_rows(name)
    else:
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        rows, kind = _rows_and_kind(path, kind)
    if columns:
        rows = renamed(rows, columns)
    if kind == "auto":
        kind, rows = _detected(name, rows, detect)
    rows, to_sample = QUESTIONS_OF.get(kind, iter)(rows), FORMATS[kind]
    style = Style(Path(audio_root) if audio_root is not None else folder, think, question, need_answer)

    values: list[T] = []
    skipped: list[SkippedRow] = []
    left_out: Counter[str] = Counter()
    first: dict[str, tuple[int, Sample]] = {}
    for row in rows:
        if limit is not None and len(values) >= limit:
            break
        if isinstance(row, LeftOut):
            left_out[row.reason] += 1
            continue
        result = (
            row if isinstance(row, BadRow) else _value(row, style, to_sample, value_of, first, repeats, check_audio)
        )
        if not isinstance(result, BadRow):
            values.append(result)
        elif on_error == "skip":
            skipped.append(result)
        else:
            raise ValueError(str(result))
    return Loaded(tuple(values), tuple(skipped), name, left_out)


def _itself(row: Row, style: Style, to_sample: Format) -> tuple[Sample, Sample]:
    sample = to_sample(row, style)
    return sample, sample


QUESTIONS_OF: Mapping[str, Callable[[Iterator[AnyRow]], Iterator[AnyRow]]] = {
    "avqa": avqa_rows,
    "musicbench": musicbench_rows,
}
"""What makes questions of a format's rows as published."""


def _rows_and_kind(path: Path, kind: str) -> tuple[Iterator[AnyRow], str]:
    """The rows of a file or folder, and the kind where the container decides it."""
    if not path.exists():
        raise ValueError(f"{path}: missing; check the path")
    transcribed = path.is_dir() and next(path.rglob("*.trans.txt"), None) is not None
    if kind == "librispeech" and not transcribed:
        raise ValueError(f"{path}: no *.trans.txt below it; name the folder of a LibriSpeech subset")
    if transcribed and kind in ("auto", "asr", "librispeech"):
        return librispeech_rows(path), "asr"
    if path.is_dir() and kind in ("auto", "asr", "kaldi", "shar"):
        if is_kaldi(path):
            return kaldi_rows(path), "asr"
        if is_shar(path):
            return shar_rows(path), "asr"
    if path.suffix == ".tar" or path.name.endswith((".tar.gz", ".tgz")):
        return webdataset_rows(path), "auto" if kind == "webdataset" else kind
    if kind in ("auto", "asr", "wenetspeech"):
        document = json_document(path)
        if isinstance(document, dict) and isinstance(document.get("audios"), list):
            return wenetspeech_rows(path, document), "asr"
        if kind == "wenetspeech":
            raise ValueError(f'{path}: no WenetSpeech file; it is one .json object with a list "audios"')
    if kind in ("kaldi", "shar", "webdataset"):
        raise ValueError(f"{path}: no {kind} data; give a folder with wav.scp, one with cuts.*.jsonl.gz, or a .tar")
    return read_rows(path), kind


def renamed(rows: Iterator[AnyRow], columns: Mapping[str, str]) -> Iterator[AnyRow]:
    """The rows with the columns that `columns` names under the names wanted here: {wanted: in the data}."""
    for row in rows:
        if not isinstance(row, Row):
            yield row
            continue
        missing = next((name for name in columns.values() if name not in row.data), None)
        if missing is not None:
            there = ", ".join(row.data)
            yield BadRow(row.file, row.number, missing, f"missing; --columns names it, and the columns are {there}")
            continue
        replaced = {*columns.values(), *columns}
        rest = {name: value for name, value in row.data.items() if name not in replaced}
        yield Row(row.file, row.number, {**{wanted: row.data[name] for wanted, name in columns.items()}, **rest})


def _detected(path: str, rows: Iterator[AnyRow], detect: Callable[[Row], str]) -> tuple[str, Iterator[AnyRow]]:
    """(the format of the first readable row, all rows)."""
    seen: list[AnyRow] = []
    for row in rows:
        seen.append(row)
        if isinstance(row, Row):
            all_rows = itertools.chain(seen, rows)
            return ("asr", cut_rows(all_rows)) if is_cut(row) else (detect(row), all_rows)
    raise ValueError(f"{path}: no readable row; {seen[0] if seen else 'the file holds none'}")


def _value(
    row: Row,
    style: Style,
    to_sample: Format,
    value_of: Callable[[Row, Style, Format], tuple[Sample, T]],
    first: dict[str, tuple[int, Sample]],
    repeats: bool,
    check_audio: bool,
) -> T | SkippedRow:
    try:
        sample, value = value_of(row, style, to_sample)
        if sample.id in first:
            earlier, same = first[sample.id]
            if not repeats or _prompt(same) != _prompt(sample):
                own = "prompt" if repeats else "row"
                raise FieldError("id", f"{sample.id!r} also names row {earlier}; give every {own} its own id")
        if check_audio:
            of_prompt = [(audio_field(row), clip) for clip in sample.audio]
            spoken = [(column, answer) for column, answer in vars(value).items() if isinstance(answer, AudioClip)]
            for column, clip in (*of_prompt, *spoken):
                try:
                    check_clip(clip)
                except AudioError as error:
                    raise FieldError(column, str(error)) from error
    except FieldError as error:
        return SkippedRow(row.file, row.number, error.field, error.message)
    first.setdefault(sample.id, (row.number, sample))  # not the row, which may hold the recording
    return value


def _prompt(sample: Sample) -> list[tuple[str, list[str]]]:
    """What two samples share exactly when they ask the same."""
    return [(m.role, [c if isinstance(c, str) else c.key for c in m.content]) for m in sample.messages]


def check_clip(clip: AudioClip) -> None:
    """Decode it. Raises AudioError for a clip that cannot be used."""
    load_clip(clip, probe(clip).sample_rate)
