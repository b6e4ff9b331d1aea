"""Rows of a data file as plain dictionaries, whatever the container: JSON lines, a JSON list, Parquet, Arrow, a folder
that the `datasets` library saved.

A row that cannot be read is a `BadRow` in the stream, so that the caller can skip it, count it or stop; a file that
cannot be read at all is a ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


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
    if path.is_dir():
        yield from _dataset_folder(path)
    elif path.suffix in (".parquet", ".arrow"):
        yield from _table(path)
    elif path.suffix in (".jsonl", ".json", ".ndjson", ""):
        content = path.read_bytes()
        if not content.strip():
            raise ValueError(f"{path}: empty; write one JSON object a line")
        yield from _objects(path, content)
    else:
        raise ValueError(f"{path}: no data file; give .jsonl, .json, .parquet, .arrow or a saved dataset's folder")


def json_document(path: Path) -> Any:
    """The parsed .json file, None if it holds JSON lines or is no such file."""
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


def _objects(path: Path, content: bytes) -> Iterator[Row | BadRow]:
    content = content.removeprefix(b"\xef\xbb\xbf")
    if content.lstrip().startswith(b"["):
        try:
            entries = json.loads(content)
        except ValueError as error:
            raise ValueError(f"{path}: not a JSON list ({error}); correct it, or write one object a line") from error
        if not entries:
            raise ValueError(f"{path}: an empty list; give one object a sample")
        for number, entry in enumerate(entries, 1):
            yield _row(path, number, entry)
        return
    try:
        entry = json.loads(content)
    except ValueError:
        pass
    else:  # one object, perhaps over several lines
        yield _row(path, 1, entry)
        return
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield _row(path, number, json.loads(line.decode("utf-8")))
        except UnicodeDecodeError as error:
            bad = f"byte {line[error.start]:#04x} at column {error.start + 1} is not UTF-8"
            yield BadRow(str(path), number, "", f"{bad}; save the file as UTF-8")
        except json.JSONDecodeError as error:
            message = f"not valid JSON ({error.msg} at column {error.colno}); write one object a line"
            yield BadRow(str(path), number, "", message)


def _row(path: Path, number: int, entry: Any) -> Row | BadRow:
    if not isinstance(entry, dict):
        return BadRow(str(path), number, "", f"a JSON {type(entry).__name__}, not an object; write {{…}}")
    return Row(str(path), number, entry)


def _table(path: Path) -> Iterator[Row]:
    number = 0
    for batch in _batches(path):
        for entry in batch.to_pylist():
            number += 1
            yield Row(str(path), number, entry)
    if number == 0:
        raise ValueError(f"{path}: holds no rows")


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                yield from file.iter_batches(batch_size=256)  # rows may carry whole audio files
            return
        with pa.memory_map(str(path)) as source:
            try:
                yield from pa.ipc.open_stream(source)  # what `datasets` writes
            except pa.ArrowInvalid:
                source.seek(0)
                reader = pa.ipc.open_file(source)
                yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not readable as {path.suffix[1:]} ({error}); write it again") from error


def _dataset_folder(path: Path) -> Iterator[Row]:
    import datasets  # takes a second to import, and most manifests are JSON

    if (path / "dataset_dict.json").exists():
        splits = ", ".join(json.loads((path / "dataset_dict.json").read_text())["splits"])
        raise ValueError(f"{path}: a dataset with the splits {splits}; name one of these folders inside it")
    if not (path / "state.json").exists():
        raise ValueError(f"{path}: neither a folder that datasets.save_to_disk wrote nor one with *.trans.txt files")
    dataset = datasets.load_from_disk(str(path))
    for column, feature in dataset.features.items():
        if isinstance(feature, datasets.Audio):
            dataset = dataset.cast_column(column, datasets.Audio(decode=False))  # decoding needs torchcodec
    for number, entry in enumerate(dataset, 1):
        yield Row(str(path), number, entry)
