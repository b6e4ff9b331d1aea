"""Rows of a data file as plain dictionaries, whatever the container: JSON lines, a JSON list, Parquet, Arrow, a folder
that the `datasets` library saved.

A row that cannot be read is a `BadRow` in the stream, so that the caller can skip it, count it or stop; a file that
cannot be read at all is a ValueError.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Meta, Struct, field

from audiorl.data.schema import FieldError, check, check_characters, parse_json

T = TypeVar("T")


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

    def __str__(self) -> str:
        where = f"row {self.row}, field {self.field!r}" if self.field else f"row {self.row}"
        return f"{self.file}: {where}: {self.message}"


@dataclass(frozen=True)
class LeftOut:
    """A sound row that is not meant to be used, and why: it is counted and is no error."""

    file: str
    row: int
    reason: str


def read_rows(path: Path) -> Iterator[Row | BadRow]:
    """The rows of a file or saved dataset, in order. Raises ValueError when it is missing, empty or no known kind."""
    if not path.exists():
        raise ValueError(f"{path}: missing; check the path")
    if path.is_dir() or path.suffix in (".parquet", ".arrow"):
        files = _dataset_files(path) if path.is_dir() else [path]
        number = 0
        for number, entry in enumerate(itertools.chain.from_iterable(map(_table, files)), 1):
            yield Row(str(path), number, entry)
        if number == 0:
            raise ValueError(f"{path}: holds no rows")
    elif path.with_suffix("").suffix in _JSON if path.suffix == ".gz" else path.suffix in (*_JSON, ""):
        content = _unpacked(path) if path.suffix == ".gz" else path.read_bytes()
        if not content.strip():
            raise ValueError(f"{path}: empty; write one JSON object a line")
        yield from _objects(path, content)
    else:
        raise ValueError(
            f"{path}: no data file; give .jsonl, .json, .parquet, .arrow, .tar or a saved dataset's folder"
        )


_JSON = (".jsonl", ".json", ".ndjson")
_BUFFER = 2**20
"""Bytes of a column of a Parquet file that are read at once."""


def _unpacked(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not readable as gzip ({error}); copy or download it again") from error


def read_checked(path: Path, schema: type[T]) -> Iterator[tuple[int, T]]:
    """(number, fields) of every row. Raises ValueError naming file, row and field of the first that cannot be used."""
    for row in read_rows(path):
        if isinstance(row, BadRow):
            raise ValueError(str(row))
        try:
            yield row.number, check(row.data, schema)
        except FieldError as error:
            raise ValueError(str(BadRow(row.file, row.number, error.field, error.message))) from error


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file by one line of JSON a row, in one step. Half a surrogate pair, which UTF-8 cannot hold, becomes
    a question mark."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w", encoding="utf-8", errors="replace") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    os.replace(partial, path)


def json_document(path: Path) -> Any:
    """The parsed .json file, None if it holds JSON lines or is no such file."""
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        return parse_json(path.read_bytes())
    except ValueError:
        return None


def _objects(path: Path, content: bytes) -> Iterator[Row | BadRow]:
    content = content.removeprefix(b"\xef\xbb\xbf")
    escapes = re.search(rb"\\u[dD][89a-fA-F]", content) is not None
    if content.lstrip().startswith(b"["):
        try:
            entries = json.loads(content.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not a JSON list ({error}); correct it, or write one object a line") from error
        if not entries:
            raise ValueError(f"{path}: an empty list; give one object a sample")
        for number, entry in enumerate(entries, 1):
            yield _row(path, number, entry, escapes)
        return
    try:
        entry = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        pass
    else:  # one object, perhaps over several lines
        yield _row(path, 1, entry, escapes)
        return
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield _row(path, number, json.loads(line.decode("utf-8")), escapes)
        except UnicodeDecodeError as error:
            bad = f"byte {line[error.start]:#04x} at column {error.start + 1} is not UTF-8"
            yield BadRow(str(path), number, "", f"{bad}; save the file as UTF-8")
        except (ValueError, RecursionError) as error:
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            yield BadRow(str(path), number, "", f"not valid JSON ({reason}); write one object a line")


def _row(path: Path, number: int, entry: Any, escapes: bool) -> Row | BadRow:
    """`escapes`: whether the file has escapes of surrogates."""
    if not isinstance(entry, dict):
        return BadRow(str(path), number, "", f"a JSON {type(entry).__name__}, not an object; write {{…}}")
    try:
        if escapes:
            check_characters(entry)
    except FieldError as error:
        return BadRow(str(path), number, error.field, error.message)
    return Row(str(path), number, entry)


def _table(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet or Arrow file."""
    try:
        for batch in _batches(path):
            batch.validate(full=True)  # offsets and lengths: beyond the data they would end the process
            yield from batch.to_pylist()
    except (pa.ArrowException, ValueError, OSError, OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not readable as {path.suffix[1:]} ({reason}); write it again") from error


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    if path.suffix == ".parquet":
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


class _DataFile(Struct):
    filename: Annotated[str, Meta(pattern=r"^[^/\\]+$", description="the name of a file in the folder; save it again")]


class _SavedDataset(Struct):
    """state.json of a folder that `datasets.save_to_disk` wrote."""

    data_files: list[_DataFile] = field(name="_data_files")


class _SavedSplits(Struct):
    """dataset_dict.json."""

    splits: list[str]


def _dataset_files(path: Path) -> list[Path]:
    """The arrow files of a saved dataset, in order. They hold audio as {"bytes", "path"}, not decoded."""
    if (path / "dataset_dict.json").exists():
        splits = ", ".join(_document(path / "dataset_dict.json", _SavedSplits).splits)
        raise ValueError(f"{path}: a dataset with the splits {splits}; name one of these folders inside it")
    if not (path / "state.json").exists():
        raise ValueError(f"{path}: neither a folder that datasets.save_to_disk wrote nor one with *.trans.txt files")
    return [path / file.filename for file in _document(path / "state.json", _SavedDataset).data_files]


def _document(path: Path, schema: type[T]) -> T:
    try:
        return check(parse_json(path.read_bytes()), schema)
    except FieldError as error:
        raise ValueError(f"{path}: field {error.field!r}: {error.message}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); save the dataset again") from error
