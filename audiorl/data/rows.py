"""Rows of data as plain dictionaries, whatever holds them: JSON lines, a JSON list, CSV, TSV, Parquet, Arrow, a folder
that the `datasets` library saved or calls an audio folder, a dataset of the hub or in memory (extra: `hub`).

A row that cannot be read is a `BadRow` in the stream, so that the caller can skip it, count it or stop; a file that
cannot be read at all is a ValueError.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from audiorl.data.schema import FieldError, check_characters, parse_json
from audiorl.errors import install

T = TypeVar("T")
HUB = "hf://"
"""How the name of a dataset of the hub begins."""
CACHE = "AUDIORL_CACHE"
"""Environment variable: the folder where audio without a file of its own is kept; by default ~/.cache/audiorl."""
MOST_UNPACKED, MOST_RATIO = 2**28, 200
"""The most that an archive may become: so many bytes, or so many times its own size."""
_JSON = (".jsonl", ".json", ".ndjson")
_TABLES = (".csv", ".tsv")
_NUMBERS = {
    "start",
    "start_time",
    "offset",
    "end",
    "end_time",
    "duration",
    "seconds",
    "sample_rate",
    "sampling_rate",
    "channel",
    "channel_selector",
    "margin",
}
"""Columns of text files that hold numbers. What kind any other holds is not guessed: 007 and null are transcripts."""
_LISTS = {
    **dict.fromkeys(("choices", "multi_choice", "audios", "hotwords"), r"\["),
    **dict.fromkeys(("messages", "conversations", "conversation", "prompt", "history"), r"\["),
    **dict.fromkeys(("answer", "references", "solution", "images", "steps"), r'\[\s*["{]'),
    **dict.fromkeys(("chosen", "rejected", "completion"), r"\[\s*\{"),
    "labels": r"\[\s*(\d|true|false)",
}
"""Columns of text files that may hold a list, as JSON, and how it begins: an answer [music] or [1, 2] is a text."""
_COMMON_VOICE = {"path": "audio", "locale": "language", "client_id": "speaker"}
"""Columns of Common Voice's files and what they are called here."""
_VGGSOUND = ["youtube_id", "start_time", "label", "split"]
"""Columns of VGGSound's file, which has no line of their names."""
_BUFFER = 2**20
"""Bytes of a column of a Parquet file that are read at once."""


@dataclass(frozen=True)
class Row:
    """`number` counts from 1: the line of a JSON lines file, the entry of anything else."""

    file: str
    number: int
    data: Mapping[str, Any]


@dataclass(frozen=True)
class BadRow:
    """Why a row cannot be used: `message` says what to do; `field` is "" when the whole row is broken."""

    file: str
    row: int
    field: str
    message: str

    @classmethod
    def of(cls, row: Row, error: FieldError) -> BadRow:
        return cls(row.file, row.number, error.field, error.message)

    def __str__(self) -> str:
        where = f"row {self.row}, field {self.field!r}" if self.field else f"row {self.row}"
        return f"{self.file}: {where}: {self.message}"


@dataclass(frozen=True)
class LeftOut:
    """A sound row that is not meant to be used, and why: it is counted and is no error."""

    file: str
    row: int
    reason: str


AnyRow = Row | BadRow | LeftOut


def converted(rows: Iterable[AnyRow], convert: Callable[[Mapping[str, Any]], Any]) -> Iterator[AnyRow]:
    """Yield the rows with convert(columns) for their columns; where it raises FieldError, a BadRow."""
    for row in rows:
        if isinstance(row, Row):
            try:
                row = Row(row.file, row.number, convert(row.data))
            except FieldError as error:
                row = BadRow.of(row, error)
        yield row


def read_rows(path: Path) -> Iterator[Row | BadRow]:
    """Yield the rows of a file or saved dataset. Raises ValueError when it is missing, empty or no known kind."""
    if not path.exists():
        raise ValueError(f"{path}: missing; check the path")
    kind = path.suffix.lower()
    if kind == ".gz":
        kind = Path(path.stem).suffix.lower() or ".gz"
    if path.is_dir() or kind in (".parquet", ".arrow"):
        files = _dataset_files(path) if path.is_dir() else [path]
        number = 0
        for number, entry in enumerate(itertools.chain.from_iterable(map(_table, files)), 1):
            yield Row(str(path), number, entry)
        if number == 0:
            raise ValueError(f"{path}: holds no rows")
    elif kind in (*_JSON, *_TABLES, ""):
        content = gunzipped(path) if path.suffix.lower() == ".gz" else path.read_bytes()
        if not content.strip():
            raise ValueError(f"{path}: empty; write one {'sample' if kind in _TABLES else 'JSON object'} a line")
        yield from _delimited(path, content, kind) if kind in _TABLES else _objects(path, content)
    else:
        known = ".jsonl, .json, .csv, .tsv, .parquet, .arrow, .tar or a saved dataset"
        raise ValueError(f"{path}: no data file; give {known}")


def gunzipped(path: Path) -> bytes:
    """Return the content of a .gz file. Raises ValueError for a damaged file, and for one that becomes far too much."""
    try:
        with gzip.open(path) as file:
            content = file.read(most_unpacked(path) + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not readable as gzip ({error}); copy or download it again") from error
    check_unpacked(path, len(content))
    return content


def most_unpacked(path: Path) -> int:
    """Return how many bytes an archive may hold: text and silence shrink to a hundredth, zeros to a thousandth."""
    return max(MOST_UNPACKED, MOST_RATIO * path.stat().st_size)


def check_unpacked(path: Path, size: int) -> None:
    if size > most_unpacked(path):
        held = f"{path.stat().st_size:,} bytes become more than {most_unpacked(path):,}"
        raise ValueError(f"{path}: {held}, as no data do; unpack it yourself if you trust it")


def read_checked(path: Path, convert: Callable[[Mapping[str, Any]], T]) -> Iterator[tuple[int, T]]:
    """Yield (number, convert(columns)) of every row. Raises ValueError naming the first that cannot be used."""
    yield from checked(converted(read_rows(path), convert))


def checked(rows: Iterable[AnyRow]) -> Iterator[tuple[int, Any]]:
    """Yield (number, columns) of every row. Raises ValueError naming the first that cannot be used."""
    for row in rows:
        if not isinstance(row, Row):
            raise ValueError(str(row))
        yield row.number, row.data


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file by one line of JSON a row, in one step; half a surrogate pair becomes a question mark."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w", encoding="utf-8", errors="replace") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    os.replace(partial, path)


def _objects(path: Path, content: bytes) -> Iterator[Row | BadRow]:
    escapes = re.search(rb"\\u[dD][89a-fA-F]", content) is not None  # of halves of characters

    def row(number: int, entry: Any) -> Row | BadRow:
        if not isinstance(entry, dict):
            return BadRow(str(path), number, "", f"a JSON {type(entry).__name__}, not an object; write {{…}}")
        try:
            if escapes:
                check_characters(entry)
        except FieldError as error:
            return BadRow(str(path), number, error.field, error.message)
        return Row(str(path), number, entry)

    try:  # a list, or one object, perhaps over several lines
        entries = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if content.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            raise ValueError(f"{path}: not a JSON list ({error}); correct it, or write one object a line") from error
    else:
        if entries == []:
            raise ValueError(f"{path}: an empty list; give one object a sample")
        for number, entry in enumerate(entries if isinstance(entries, list) else [entries], 1):
            yield row(number, entry)
        return
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield row(number, json.loads(line.decode("utf-8-sig")))
        except UnicodeDecodeError as error:
            bad = f"byte {line[error.start]:#04x} at column {error.start + 1} is not UTF-8"
            yield BadRow(str(path), number, "", f"{bad}; save the file as UTF-8")
        except (ValueError, RecursionError) as error:
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            yield BadRow(str(path), number, "", f"not valid JSON ({reason}); write one object a line")


def _delimited(path: Path, content: bytes, kind: str) -> Iterator[Row | BadRow]:
    """Yield the rows of a .csv, or of a .tsv, in which quotes are characters like others, as Common Voice writes it."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start].split(b"\n")
        bad = f"line {len(before)}: byte {content[error.start]:#04x} at column {len(before[-1]) + 1} is not UTF-8"
        raise ValueError(f"{path}, {bad}; save the file as UTF-8") from error
    style = {"delimiter": ","} if kind == ".csv" else {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    entries = csv.reader(io.StringIO(text, newline=""), strict=True, **style)  # type: ignore[arg-type]
    try:
        names = [name.strip() for name in next(entries, [])]
        nameless = [names] if len(names) == 4 and names[1].isdecimal() and names[3] in ("train", "test") else []
        names = _VGGSOUND if nameless else names
        if len(set(names)) < len(names):
            raise ValueError(f"{path}: two columns of one name in {', '.join(names)}; rename one")
        if common_voice := "audio" not in names and {"path", "sentence"} <= set(names):
            renamed = {name: new for name, new in _COMMON_VOICE.items() if new not in names}
            names = [renamed.get(name, name) for name in names]
        for number, entry in enumerate((entry for entry in itertools.chain(nameless, entries) if entry), 1):
            if len(entry) != len(names):
                message = f"{len(entry)} fields under {len(names)} names ({', '.join(names)}); give one each"
                yield BadRow(str(path), number, "", message)
                continue
            data: dict[str, Any] = {name: value for name, value in zip(names, entry, strict=True) if value.strip()}
            for name in data.keys() & _NUMBERS:
                value = data[name]
                if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value.strip()):  # or else no field takes it
                    data[name] = int(value) if value.strip().isdecimal() else float(value)
            if fault := _parse_lists(data):
                yield BadRow(str(path), number, fault.field, fault.message)
                continue
            if common_voice and (path.parent / "clips" / data.get("audio", "")).is_file():  # it leaves out the folder
                data["audio"] = f"clips/{data['audio']}"
            yield Row(str(path), number, data)
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {entries.line_num}: not readable as {kind[1:]} ({error}); correct it"
        ) from error


def _parse_lists(data: dict[str, Any]) -> FieldError | None:
    """Replace the texts that begin as JSON lists do, in columns that may hold lists; return a fault that one has."""
    for name in sorted(_LISTS.keys() & data.keys()):
        if re.match(_LISTS[name], data[name].lstrip()):
            try:
                data[name] = parse_json(data[name])
            except ValueError as error:
                return FieldError(name, f'not a JSON list ({error}); write ["…", "…"]')
    return None


def files_below(folder: Path, *endings: str) -> list[Path]:
    """Return the files below a folder with one of the endings, in any case, sorted; without `._name` and __MACOSX."""
    files = (file for file in folder.rglob("*") if file.name.lower().endswith(endings) and file.is_file())
    return sorted(file for file in files if not of_macos(file.relative_to(folder)))


def file_below(folder: Path, name: str) -> Path:
    """Return folder/NAME. Raises ValueError for the name of a recording or a text that leads out of the folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name!r} is no name of a file below {folder}; give it another id")
    return folder / name


def steps_in(folder: Path, ending: str = "") -> dict[int, Path]:
    """Return {N: folder/step_N}, sorted by number: as text, step_1000000 comes before step_999999."""
    paths = ((re.fullmatch(rf"step_(\d+){re.escape(ending)}", path.name), path) for path in folder.glob("step_*"))
    return dict(sorted((int(match[1]), path) for match, path in paths if match))


def of_macos(path: PurePath) -> bool:
    """Tell if macOS keeps in this file what other systems have no place for: it is no file of the user's."""
    return path.name.startswith("._") or path.name == ".DS_Store" or "__MACOSX" in path.parts


def _table(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet or Arrow file."""
    names: dict[str, list[str]] | None = None
    try:
        for batch in _batches(path):
            batch.validate(full=True)  # offsets and lengths: beyond the data they would end the process
            names = _label_names(batch.schema) if names is None else names
            yield from (_with_names(row, names) for row in batch.to_pylist())
    except (pa.ArrowException, ValueError, OSError, OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not readable as {path.suffix[1:].lower()} ({reason}); write it again") from error


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    if path.suffix.lower() == ".parquet":
        # Rows may carry whole recordings. Without a buffer a row group is read at once, and batches of several groups
        # keep those before them.
        with pq.ParquetFile(path, page_checksum_verification=True, buffer_size=_BUFFER) as file:
            for group in range(file.num_row_groups):
                yield from file.iter_batches(batch_size=32, row_groups=[group])
        return
    with pa.OSFile(str(path)) as source:  # a mapped file that was cut ends the process
        if source.read(6) == b"ARROW1":  # read as a stream it would be a length of 1.3 GB
            source.seek(0)
            batches = pa.ipc.open_file(source)
            yield from (batches.get_batch(i) for i in range(batches.num_record_batches))
        else:
            source.seek(0)
            yield from pa.ipc.open_stream(source)  # what `datasets` writes
            source.seek(max(source.size() - 8, 0))
            if source.read() != b"\xff\xff\xff\xff\0\0\0\0":
                raise ValueError("cut: no end-of-stream marker")


def _label_names(schema: pa.Schema) -> dict[str, list[str]]:
    """Return the names that a table of `datasets` has for the numbers in a column. Raises ValueError for damage."""
    written = (schema.metadata or {}).get(b"huggingface")
    try:
        return class_names(parse_json(written or b"{}").get("info", {}).get("features", {}))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the features of `datasets` in its metadata are damaged: {error!r}") from error


def class_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of each column of class labels, or of lists of them, for features as `datasets` writes them.

    >>> class_names({"label": {"names": ["cat", "bird"], "_type": "ClassLabel"}, "text": {"_type": "Value"}})
    {'label': ['cat', 'bird']}
    """
    names = {}
    for column, feature in features.items():
        while isinstance(feature, list) or feature.get("_type") in ("Sequence", "List", "LargeList"):
            feature = feature[0] if isinstance(feature, list) else feature["feature"]
        if feature.get("_type") == "ClassLabel":
            names[column] = [str(name) for name in feature["names"]]
    return names


def _with_names(row: dict[str, Any], names: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the row with the names of its classes. Of an answer whose name is no choice the number stays, the index
    of a choice, as in MMLU, where the names are A to D."""

    def named(value: Any, of: list[str]) -> Any:
        if isinstance(value, list):
            return [named(each, of) for each in value]
        if not isinstance(value, int):  # of a column that another program has made texts of
            return value
        return of[value] if 0 <= value < len(of) else None  # -1 is no label

    new = row | {column: named(row[column], of) for column, of in names.items() if column in row}
    choices = new.get("choices") or new.get("multi_choice")
    if "answer" in names and isinstance(choices, list) and choices and new.get("answer") not in [*choices, None]:
        new["answer"] = row["answer"]
    return new


def audio_folder(folder: Path) -> Path | None:
    """Return the metadata file of an audio folder of `datasets`, in it or one level down; None where there is none.

    Raises ValueError that names the splits where there are several.
    """
    endings = (".jsonl", ".csv", ".parquet")
    found = [path for end in endings for path in (folder / f"metadata{end}",) if path.is_file()]
    found = found or [path for end in endings for path in sorted(folder.glob(f"*/metadata{end}"))]
    if len(found) > 1:
        names = ", ".join(str(path.relative_to(folder)) for path in found)
        raise ValueError(f"{folder}: an audio folder with {names}; name one of these files")
    return found[0] if found else None


def _dataset_files(path: Path) -> list[Path]:
    """Return the arrow files of a saved dataset, in order. They hold audio as {"bytes", "path"}, not decoded."""
    document = next((path / name for name in ("dataset_dict.json", "state.json") if (path / name).exists()), None)
    if document is None:
        known = "metadata.csv, .jsonl or .parquet, *.trans.txt, wav.scp, or what datasets.save_to_disk wrote"
        raise ValueError(f"{path}: a folder without {known}; name a data file")
    try:
        state = parse_json(document.read_bytes())
        splits = ", ".join(state["splits"]) if document.name == "dataset_dict.json" else ""
        if splits and ", " not in splits:
            return _dataset_files(path / splits)
        names = [] if splits else [Path(file["filename"]) for file in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{document}: damaged ({error!r}); save the dataset again") from error
    if splits:
        raise ValueError(f"{path}: a dataset with the splits {splits}; name one of these folders inside it")
    if outside := [str(name) for name in names if name.name != str(name)]:
        raise ValueError(f"{document}: {outside[0]!r} is not the name of a file in the folder; save it again")
    return [path / name for name in names]


# -- the `datasets` library --------------------------------------------------------------------------------------------


def hub_rows(name: str) -> Iterator[Row | BadRow]:
    """Yield the rows of `hf://NAME[:CONFIGURATION]:SPLIT`, as they stream. Code of a dataset is never run."""
    path, *rest = name.removeprefix(HUB).split(":")
    if not path or not 1 <= len(rest) <= 2 or not all(rest):
        raise ValueError(f"{name}: give hf://NAME:SPLIT or hf://NAME:CONFIGURATION:SPLIT, such as hf://me/talks:train")
    datasets = _datasets()
    try:
        dataset = datasets.load_dataset(path, *rest[:-1], split=rest[-1], streaming=True)
    except Exception as error:  # the library raises errors of many libraries
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name}: does not load ({reason}); check name, split and network") from error
    return dataset_rows(dataset, name)


def is_dataset(value: Any) -> bool:
    """Return whether it is a dataset or a dictionary of splits, without importing the library."""
    kinds = ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict")
    return any(c.__module__.partition(".")[0] == "datasets" and c.__name__ in kinds for c in type(value).__mro__)


def dataset_rows(dataset: Any, name: str = "dataset") -> Iterator[Row | BadRow]:
    """Yield the rows of a dataset, or of the only split of a dictionary.

    Audio is not decoded: encoded bytes are stored (`stored`), a row at a time. Class labels get their names. Raises
    ValueError for several splits.
    """
    if isinstance(dataset, Mapping):
        if len(dataset) != 1:
            splits = ", ".join(dataset)
            raise ValueError(f"{name}: a {type(dataset).__name__} with the splits {splits}; give one, dataset[SPLIT]")
        dataset = next(iter(dataset.values()))
    datasets = _datasets()
    features = getattr(dataset, "features", None) or datasets.Features()
    sounds = [column for column, feature in features.items() if isinstance(feature, datasets.Audio)]
    names = class_names(features.to_dict())
    tables = dataset.with_format("arrow").iter(batch_size=1)  # decodes nothing
    for number, (entry,) in enumerate((table.to_pylist() for table in tables), 1):
        entry = _with_names(entry, names)
        row: Row | BadRow = Row(name, number, entry)
        for column in sounds:
            value = entry[column] or {}
            try:
                data, path = value.get("bytes"), value.get("path")
                entry[column] = path if data is None else str(stored(data, Path(path or "").suffix))
            except ValueError as error:
                row = BadRow(name, number, column, str(error))
        yield row


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"datasets of the hub need the library: {install('hub')}") from error
    return datasets


# -- audio without a file of its own -----------------------------------------------------------------------------------


def cache_folder() -> Path:
    return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "audiorl")


def stored(data: bytes, suffix: str) -> Path:
    """Return the file that holds encoded audio, kept by its content. Several processes may store the same at once."""
    name = hashlib.sha256(data).hexdigest()[:40] + suffix.lower()
    path = cache_folder() / "audio" / name[:2] / name
    if path.is_file() and path.stat().st_size == len(data):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as error:
        raise ValueError(f"{path}: audio cannot be stored there ({error}); set {CACHE} to another folder") from error
    return path
