"""Manifests in, samples out, with one clear line for every row that cannot be used.

    loaded = read_samples("train.jsonl")                              # the kind is found from the columns
    loaded = read_samples("rows.parquet", on_error="skip", check_audio=True)
    print(loaded.summary())                                           # rows.parquet: 998 samples, 2 rows skipped (…)

`audiorl.data.formats` and `audiorl.data.containers` read the kinds. Relative audio paths start from `audio_root`, by
default the manifest's folder. Audio is not opened unless `check_audio` is set.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack, get_args

from audiorl.audio import AudioClip, AudioError, load_clip, probe
from audiorl.data import containers
from audiorl.data.formats import (
    AUDIO_FIELDS,
    CONVERSATIONS,
    FORMATS,
    PICTURE_FIELDS,
    QUESTIONS_OF,
    TEXT_FIELDS,
    Style,
    detect,
    picture_column,
)
from audiorl.data.rows import (
    HUB,
    AnyRow,
    BadRow,
    LeftOut,
    Row,
    audio_folder,
    converted,
    dataset_rows,
    files_below,
    hub_rows,
    is_dataset,
    read_rows,
)
from audiorl.data.schema import FieldError, check_limit, parse_json
from audiorl.pictures import PictureError
from audiorl.types import Sample

Kind = Literal[
    "auto", "native", "avqa", "musicbench", "mmau", "mmar", "mmsu", "asr",
    "conversation", "librispeech", "wenetspeech", "kaldi", "shar", "webdataset",
]  # fmt: skip
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
    keep_conversations: bool
    """Leave conversations as they are; by default their last turn asks for the answer in tags, as questions do."""
    need_answer: bool
    """A question without an answer is an unusable row (default); otherwise its sample has no references."""
    columns: Mapping[str, str] | None
    """{column wanted here: its name in the data}."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The row that a sample came from, with what names the column that a fault is about."""

    file: str
    number: int
    columns: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    """The text of each column; "" where it has none."""


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """What a manifest holds, in order: usable samples (or what another reader makes of a row), and skipped rows.

    `left_out` counts the sound rows that its kind does not use, by the reason. `rows`: where each sample came from;
    empty where that is not known.
    """

    samples: tuple[T, ...]
    skipped: tuple[BadRow, ...]
    path: str
    left_out: Mapping[str, int] = field(default_factory=dict)
    rows: tuple[Origin, ...] = ()

    def fault(self, index: int, check: Callable[[T], None]) -> BadRow | None:
        """Return why `check` refuses a sample by a ValueError, as a row of its file; None where it does not."""
        sample = self.samples[index]
        try:
            check(sample)
            return None
        except FieldError as error:
            fault = error
        except ValueError as error:
            fault = FieldError("", str(error))
        named = getattr(sample, "sample", sample)
        id = getattr(named, "id", getattr(named, "name", None))
        row = self.rows[index] if self.rows else Origin(self.path, index + 1)
        return BadRow(row.file, row.number, _column(row, fault), fault.message.removeprefix(f"sample {id!r}: "))

    def checked(self, check: Callable[[T], None], on_error: str) -> Loaded[T]:
        """Return it without the samples that `check` refuses by a ValueError. Raises the first, unless they are to be
        skipped."""
        bad: dict[int, BadRow] = {}
        for index in range(len(self.samples)):
            if fault := self.fault(index, check):
                if on_error == "raise":
                    raise ValueError(str(fault))
                bad[index] = fault
        return replace(self.kept(lambda index: index not in bad), skipped=(*self.skipped, *bad.values()))

    def kept(self, wanted: Callable[[int], bool]) -> Loaded[T]:
        """Return it with the samples at the indices that are wanted."""
        samples = tuple(sample for i, sample in enumerate(self.samples) if wanted(i))
        return replace(self, samples=samples, rows=tuple(row for i, row in enumerate(self.rows) if wanted(i)))

    def summary(self) -> str:
        """One line: how many samples, what was left out, how many rows were skipped, and the first reason."""
        line = f"{self.path}: {len(self.samples)} sample{'' if len(self.samples) == 1 else 's'}"
        if self.left_out:
            line += f", left out: {', '.join(f'{count} ({reason})' for reason, count in self.left_out.items())}"
        if self.skipped:
            rows = f"{len(self.skipped)} row{'' if len(self.skipped) == 1 else 's'} skipped"
            line += f", {rows} (first: {self.skipped[0]})"
        return line

    def listing(self, most: int = 20) -> str:
        """Return the skipped rows, one line each; beyond `most` only their number."""
        lines = [f"  skipped {row}" for row in self.skipped[:most]]
        return "\n".join([*lines, f"  and {len(self.skipped) - most} more"] if len(self.skipped) > most else lines)


def read_samples(data: Any, kind: Kind | str = "auto", **options: Unpack[ReadOptions]) -> Loaded[Sample]:
    """Read the samples of a manifest, corpus folder, `hf://NAME:SPLIT`, `datasets.Dataset`, or of row
    dictionaries. Audio paths of rows in memory start from `audio_root`, by default the working directory.

    kind: which format it is, found from its columns when "auto"; "asr" stands for any corpus of transcripts. Raises
    ValueError naming file, row and field; of a file that cannot be read at all whatever `on_error` says.
    """

    def sample_twice(row: Row, style: Style, to_sample: Format) -> tuple[Sample, Sample]:
        sample = to_sample(row, style)
        return sample, sample

    return read_values(data, kind, sample_twice, **options)


def read_values(
    data: Any,
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
    name, folder, rows, kind = _source(data, kind)
    if renamed := options.get("columns"):
        rows = converted(rows, lambda row: _renamed(row, renamed))
    if kind == "auto":
        seen: list[AnyRow] = []
        for row in rows:
            seen.append(row)
            if isinstance(row, Row):
                kind = "cut" if containers.is_cut(row) else detect(row)
                break
        else:
            raise ValueError(f"{name}: no readable row; {seen[0] if seen else 'the file holds none'}")
        rows = itertools.chain(seen, rows)
        if kind == "cut":
            kind, rows = "asr", converted(rows, containers.cut_columns)
    rows, to_sample = QUESTIONS_OF.get(kind, iter)(rows), FORMATS[kind]
    think, question = options.get("think", True), options.get("question")
    style = Style(
        folder if root is None else Path(root),
        think,
        question,
        options.get("need_answer", True),
        options.get("keep_conversations", False),
    )

    values: list[T] = []
    origins: list[Origin] = []
    names: dict[tuple[str, ...], tuple[str, ...]] = {}  # one tuple for all rows alike: there may be millions
    skipped: list[BadRow] = []
    left_out: Counter[str] = Counter()
    first: dict[str, tuple[int, Sample]] = {}  # not the row, which may hold the recording
    for row in rows:
        if limit is not None and len(values) >= limit:
            break
        if isinstance(row, LeftOut):
            left_out[row.reason] += 1
            continue
        if isinstance(row, Row):
            try:
                sample, value = value_of(row, style, to_sample)
                earlier, same = first.get(sample.id, (row.number, sample))
                if same is not sample and "id" not in row.data and _prompt(same) != _prompt(sample):
                    # Another question about a clip whose path is the id of an earlier row.
                    row = replace(row, data={**row.data, "id": f"{sample.id}:{row.number}"})
                    sample, value = value_of(row, style, to_sample)
                    earlier, same = first.get(sample.id, (row.number, sample))
                if same is not sample and not (repeats and _prompt(same) == _prompt(sample)):
                    own = "prompt" if repeats else "row"
                    raise FieldError("id", f"{sample.id!r} also names row {earlier}; give every {own} its own id")
                if options.get("check_audio"):
                    _check_audio(row, sample, value)
            except FieldError as error:
                row = BadRow.of(row, error)
            else:
                first[sample.id] = (earlier, same)
                values.append(value)
                texts = {k: "" if k in _UNSEARCHED else _texts(v) for k, v in row.data.items() if v is not None}
                columns = names.setdefault(tuple(texts), tuple(texts))
                origins.append(Origin(row.file, row.number, columns, tuple(texts.values())))
                continue
        if on_error == "raise":
            raise ValueError(str(row))
        skipped.append(row)
    return Loaded(tuple(values), tuple(skipped), name, left_out, tuple(origins))


def _source(data: Any, kind: str) -> tuple[str, Path, Iterator[AnyRow], str]:
    """(name, folder, rows, kind where the container decides it) of what a user names."""
    if is_dataset(data):
        return "dataset", Path(), dataset_rows(data), kind
    if not isinstance(data, str | Path):
        if isinstance(data, Mapping) or hasattr(data, "columns") or not isinstance(data, Iterable):
            what = "a file, a folder, a list of row dictionaries, or a datasets.Dataset"
            raise ValueError(f"{type(data).__name__}: not read as data; give {what}")
        return "rows", Path(), _rows_in_memory(data), kind
    if str(data).startswith(HUB):
        return str(data), Path(), hub_rows(str(data)), kind
    file = Path(data)
    if file.is_dir() and kind in ("auto", *FORMATS) and (metadata := audio_folder(file)):
        file = metadata
    rows, kind = _rows_and_kind(file, kind)
    return str(data), file if file.is_dir() else file.parent, rows, kind


def _rows_in_memory(data: Iterable[Any]) -> Iterator[AnyRow]:
    for number, row in enumerate(data, 1):
        wrong = f"a {type(row).__name__}, not a dictionary of columns; give {{…}}"
        yield Row("rows", number, row) if isinstance(row, Mapping) else BadRow("rows", number, "", wrong)


def _rows_and_kind(path: Path, kind: str) -> tuple[Iterator[AnyRow], str]:
    """Return the rows of a file or folder, and the kind where the container decides it."""
    if not path.exists():
        raise ValueError(f"{path}: missing; check the path")
    transcribed = path.is_dir() and bool(files_below(path, ".trans.txt"))
    for name, rows_of, fits in (
        ("librispeech", containers.librispeech_rows, transcribed),
        ("kaldi", containers.kaldi_rows, containers.is_kaldi(path)),
        ("shar", containers.shar_rows, containers.is_shar(path)),
    ):
        if fits and kind in ("auto", "asr", name):
            return rows_of(path), "asr"
    if path.name.lower().endswith((".tar", ".tar.gz", ".tgz")):
        return containers.webdataset_rows(path), "auto" if kind == "webdataset" else kind
    if kind in ("auto", "asr", "wenetspeech") and path.suffix.lower() == ".json" and path.is_file():
        try:
            document = parse_json(path.read_bytes())
        except ValueError:
            document = None  # JSON lines, perhaps
        if isinstance(document, dict) and isinstance(document.get("audios"), list):
            return containers.wenetspeech_rows(path, document), "asr"
    wanted = {
        "librispeech": "*.trans.txt below it; name the folder of a LibriSpeech subset",
        "wenetspeech": 'WenetSpeech file; it is one .json object with a list "audios"',
        "kaldi": "Kaldi data; give a folder with wav.scp",
        "shar": "Shar data; give a folder with cuts.*.jsonl.gz",
        "webdataset": "archive; give a .tar",
    }
    if kind in wanted:
        raise ValueError(f"{path}: no {wanted[kind]}")
    return read_rows(path), kind


def _renamed(data: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns under the names wanted here: {wanted: in the data}."""
    for name in columns.values():
        if name not in data:
            raise FieldError(name, f"missing; --columns names it, and the columns are {', '.join(data)}")
    rest = {name: value for name, value in data.items() if name not in {*columns.values(), *columns}}
    return {**{wanted: data[name] for wanted, name in columns.items()}, **rest}


def column_names(given: Sequence[str]) -> dict[str, str]:
    """Return {wanted: name in the data} of the option `--columns WANTED=NAME …`. Raises ValueError for another form."""
    names: dict[str, str] = {}
    for pair in given:
        wanted, equals, name = pair.partition("=")
        if not (wanted and equals and name) or wanted in names:
            raise ValueError(f"--columns {pair!r}: give WANTED=NAME once for each column, such as audio=wav")
        names[wanted] = name
    return names


def _texts(value: Any) -> str:
    """Return the texts in a column, without numbers and recordings, which are large."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return "\n".join(filter(None, map(_texts, value))) if value and isinstance(value[0], str | Mapping) else ""
    return value if isinstance(value, str) else ""


_UNSEARCHED = (*AUDIO_FIELDS, *PICTURE_FIELDS, "id", "language")
"""Columns whose texts are no prompt and no answer."""


def _column(row: Origin, fault: FieldError) -> str:
    """Return the column that a fault of a sample is about: by the text that it holds, else by the part's usual name."""
    if fault.field == "audio":
        return _audio_column(row.columns)
    if fault.field == "images":
        return picture_column(row.columns)
    if fault.holding:
        wanted, texts = fault.holding.strip(), {k: v.strip() for k, v in zip(row.columns, row.texts, strict=True)}
        held = [k for k, v in texts.items() if v and (wanted in v or v in fault.holding)]
        if held:
            return max(held, key=lambda column: (texts[column] == wanted, len(texts[column])))
    usual = {"prompt": (*CONVERSATIONS, "question"), "answer": ("answer", *TEXT_FIELDS)}.get(fault.field, ())
    return next((column for column in usual if column in row.columns), fault.field)


def _audio_column(columns: Collection[str]) -> str:
    """Return which of the columns that a row fills names its clips: of a conversation perhaps that of its turns."""
    usual = ("audios", *AUDIO_FIELDS, "video_name", *CONVERSATIONS)
    return next((column for column in usual if column in columns), "audio")


def _check_audio(row: Row, sample: Sample, value: Any) -> None:
    """Decode the clips of the prompt, and those that are answers."""
    column = _audio_column([name for name, value in row.data.items() if value is not None])
    several = isinstance(row.data.get(column), list | tuple) and column not in CONVERSATIONS
    of_prompt = [(f"{column}[{i}]" if several else column, clip) for i, clip in enumerate(sample.audio)]
    spoken = [(column, answer) for column, answer in vars(value).items() if isinstance(answer, AudioClip)]
    for column, clip in (*of_prompt, *spoken):
        try:
            check_clip(clip)
        except AudioError as error:
            raise FieldError(column, str(error)) from error
    for picture in sample.images:
        try:
            picture.load()
        except PictureError as error:
            columns = [name for name, value in row.data.items() if value is not None]
            raise FieldError(picture_column(columns), str(error)) from error


def _prompt(sample: Sample) -> list[tuple[str, list[str]]]:
    """Return what two samples share exactly when they ask the same."""
    return [(m.role, [c if isinstance(c, str) else c.key for c in m.content]) for m in sample.messages]


def check_clip(clip: AudioClip) -> None:
    """Decode it. Raises AudioError for a clip that cannot be used."""
    load_clip(clip, probe(clip).sample_rate)
