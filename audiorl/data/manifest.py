"""Manifests in, samples out, with one clear line for every row that cannot be used.

    loaded = read_samples("train.jsonl")                              # the kind is found from the columns
    loaded = read_samples("mmau-test-mini.json", audio_root="audio")
    loaded = read_samples("LibriSpeech/test-clean", think=False)
    loaded = read_samples("rows.parquet", on_error="skip", check_audio=True)
    print(loaded.summary())                                           # rows.parquet: 998 samples, 2 rows skipped (…)

A native manifest is JSON lines with a question or a transcript for each audio file::

    {"id": "q1", "audio": "clips/q1.wav", "question": "Which animal?", "choices": ["a dog", "a cat"], "answer": "a cat"}
    {"id": "u1", "audio": "clips/u1.flac", "text": "good morning", "language": "en"}

`audiorl.data.formats` and `audiorl.data.containers` list the other kinds and their columns. Relative audio paths start
from `audio_root`, by default the manifest's folder. Audio is not opened unless `check_audio` is set.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack, get_args

from audiorl.audio import AudioClip, AudioError, load_clip, probe
from audiorl.data.containers import (
    cut_columns,
    is_cut,
    is_kaldi,
    is_shar,
    kaldi_rows,
    librispeech_rows,
    shar_rows,
    webdataset_rows,
    wenetspeech_rows,
)
from audiorl.data.formats import FORMATS, QUESTIONS_OF, Style, audio_field, detect
from audiorl.data.rows import (
    HUB,
    AnyRow,
    BadRow,
    LeftOut,
    Row,
    converted,
    dataset_rows,
    hub_rows,
    is_dataset,
    json_document,
    read_rows,
)
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
    """The keyword arguments of `read_samples`."""

    think: bool
    """Ask for <think> before the answer (default: yes)."""
    audio_root: str | Path | None
    """Where relative audio paths start; by default the manifest's folder."""
    on_error: Literal["raise", "skip"]
    """Stop at the first unusable row (default), or skip, count and list it."""
    limit: int | None
    """Read no more samples."""
    check_audio: bool
    """Decode every clip now; a broken one is an unusable row."""
    question: str | None
    """Asked where a row brings no question of its own, or in place of the request for a transcript."""
    need_answer: bool
    """A question without an answer is an unusable row (default); otherwise its sample has no references."""
    columns: Mapping[str, str] | None
    """{column wanted here: its name in the data}."""


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
        """Return the skipped rows, one line each; beyond `most` only their number."""
        lines = [f"  skipped {row}" for row in self.skipped[:most]]
        return "\n".join([*lines, f"  and {len(self.skipped) - most} more"] if len(self.skipped) > most else lines)


def read_samples(path: str | Path | Any, kind: Kind | str = "auto", **options: Unpack[ReadOptions]) -> Loaded[Sample]:
    """Read the samples of a manifest, dataset or corpus folder, of `hf://NAME:SPLIT`, or of a `datasets.Dataset`.

    kind: which format it is, found from its columns when "auto"; "asr" stands for any corpus of transcripts. The other
    options: see `ReadOptions`.

    Raises ValueError naming file, row and field. A file that cannot be read at all raises whatever `on_error` says.
    """
    return read_values(path, kind, _itself, **options)


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
    **options: Unpack[ReadOptions],
) -> Loaded[T]:
    """Read what `value_of(row, style, format)` makes of each row, with the sample in it, as `read_samples` does.

    `value_of` raises FieldError for a row that cannot be used. detect: the kind of the first readable row, for "auto".
    repeats: an id may come again with the same prompt.
    """
    if unknown := options.keys() - ReadOptions.__annotations__.keys():
        raise TypeError(f"no option {', '.join(sorted(unknown))}; they are {', '.join(ReadOptions.__annotations__)}")
    on_error, limit, root = options.get("on_error", "raise"), options.get("limit"), options.get("audio_root")
    if kind not in get_args(Kind):
        raise ValueError(f"no kind of manifest is called {kind!r}; choose from {', '.join(get_args(Kind))}")
    if on_error not in ("raise", "skip"):
        raise ValueError(f'on_error must be "raise" or "skip", got {on_error!r}')
    check_limit(limit)
    if root is not None and not Path(root).is_dir():
        raise ValueError(f"audio_root {root}: no such folder")
    name, folder, rows, kind = _source(path, kind)
    if columns := options.get("columns"):
        rows = converted(rows, lambda data: _renamed(data, columns))
    if kind == "auto":
        kind, rows = _detected(name, rows, detect)
    rows, to_sample = QUESTIONS_OF.get(kind, iter)(rows), FORMATS[kind]
    style = Style(
        Path(root) if root is not None else folder,
        options.get("think", True),
        options.get("question"),
        options.get("need_answer", True),
    )

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
        bad = row if isinstance(row, BadRow) else None
        if isinstance(row, Row):
            try:
                sample, value = value_of(row, style, to_sample)
                _check_id(sample, first, repeats)
                if options.get("check_audio"):
                    _check_audio(row, sample, value)
            except FieldError as error:
                bad = BadRow.of(row, error)
            else:
                first.setdefault(sample.id, (row.number, sample))  # not the row, which may hold the recording
                values.append(value)
        if bad is not None and on_error == "raise":
            raise ValueError(str(bad))
        skipped += [] if bad is None else [bad]
    return Loaded(tuple(values), tuple(skipped), name, left_out)


def _itself(row: Row, style: Style, to_sample: Format) -> tuple[Sample, Sample]:
    sample = to_sample(row, style)
    return sample, sample


def _source(path: Any, kind: str) -> tuple[str, Path, Iterator[AnyRow], str]:
    """(name, folder, rows, kind where the container decides it) of what a user names."""
    if is_dataset(path):
        return "dataset", Path(), dataset_rows(path), kind
    if not isinstance(path, str | Path):
        return "rows", Path(), (Row("rows", number, row) for number, row in enumerate(path, 1)), kind
    if str(path).startswith(HUB):
        return str(path), Path(), hub_rows(str(path)), kind
    file = Path(path)
    rows, kind = _rows_and_kind(file, kind)
    return str(path), file if file.is_dir() else file.parent, rows, kind


def _rows_and_kind(path: Path, kind: str) -> tuple[Iterator[AnyRow], str]:
    """Return the rows of a file or folder, and the kind where the container decides it."""
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


def _renamed(data: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns under the names wanted here: {wanted: in the data}."""
    for name in columns.values():
        if name not in data:
            raise FieldError(name, f"missing; --columns names it, and the columns are {', '.join(data)}")
    rest = {name: value for name, value in data.items() if name not in {*columns.values(), *columns}}
    return {**{wanted: data[name] for wanted, name in columns.items()}, **rest}


def _detected(path: str, rows: Iterator[AnyRow], detect: Callable[[Row], str]) -> tuple[str, Iterator[AnyRow]]:
    """(the format of the first readable row, all rows)."""
    seen: list[AnyRow] = []
    for row in rows:
        seen.append(row)
        if isinstance(row, Row):
            all_rows = itertools.chain(seen, rows)
            return ("asr", converted(all_rows, cut_columns)) if is_cut(row) else (detect(row), all_rows)
    raise ValueError(f"{path}: no readable row; {seen[0] if seen else 'the file holds none'}")


def _check_id(sample: Sample, first: Mapping[str, tuple[int, Sample]], repeats: bool) -> None:
    if sample.id not in first:
        return
    earlier, same = first[sample.id]
    if not repeats or _prompt(same) != _prompt(sample):
        own = "prompt" if repeats else "row"
        raise FieldError("id", f"{sample.id!r} also names row {earlier}; give every {own} its own id")


def _check_audio(row: Row, sample: Sample, value: Any) -> None:
    """Decode the clips of the prompt, and those that are answers."""
    of_prompt = [(audio_field(row), clip) for clip in sample.audio]
    spoken = [(column, answer) for column, answer in vars(value).items() if isinstance(answer, AudioClip)]
    for column, clip in (*of_prompt, *spoken):
        try:
            check_clip(clip)
        except AudioError as error:
            raise FieldError(column, str(error)) from error


def _prompt(sample: Sample) -> list[tuple[str, list[str]]]:
    """Return what two samples share exactly when they ask the same."""
    return [(m.role, [c if isinstance(c, str) else c.key for c in m.content]) for m in sample.messages]


def check_clip(clip: AudioClip) -> None:
    """Decode it. Raises AudioError for a clip that cannot be used."""
    load_clip(clip, probe(clip).sample_rate)
