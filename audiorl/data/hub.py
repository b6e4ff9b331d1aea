"""Rows of the `datasets` library: a dataset of the hub as it streams, or one in memory. Extra: `hub`.

    --data hf://mozilla-foundation/common_voice_17_0:en:validation       NAME[:CONFIGURATION]:SPLIT
    read_samples(datasets.load_dataset("openslr/librispeech_asr", split="test.clean"))

Audio columns are not decoded: the encoded bytes are stored in a folder (`audiorl.data.stored`), a row at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from audiorl.data.rows import BadRow, Row
from audiorl.data.stored import stored

PREFIX = "hf://"


def hub_rows(name: str) -> Iterator[Row | BadRow]:
    """The rows of `hf://NAME[:CONFIGURATION]:SPLIT`, as they stream. Code of a dataset is never run.

    Raises ValueError for a name without split and for one that does not load, ImportError without `datasets`.
    """
    path, *rest = name.removeprefix(PREFIX).split(":")
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
    """Whether it is a `Dataset` or `IterableDataset`, without importing the library."""
    return type(value).__module__.partition(".")[0] == "datasets" and hasattr(value, "features")


def dataset_rows(dataset: Any, name: str = "dataset") -> Iterator[Row | BadRow]:
    """The rows of a dataset, with audio columns as paths."""
    datasets = _datasets()
    features = getattr(dataset, "features", None) or {}
    sounds = [column for column, feature in features.items() if isinstance(feature, datasets.Audio)]
    tables = dataset.with_format("arrow").iter(batch_size=1)  # decodes nothing
    for number, (entry,) in enumerate((table.to_pylist() for table in tables), 1):
        fault = None
        for column in sounds:
            try:
                entry[column] = _path(entry[column])
            except ValueError as error:
                fault = BadRow(name, number, column, str(error))
        yield fault or Row(name, number, entry)


def _path(value: Any) -> str | None:
    """Where an undecoded audio is: its file, or that of its stored bytes."""
    if value is None or value.get("bytes") is None:
        return None if value is None else value.get("path")
    return str(stored(value["bytes"], Path(value.get("path") or "").suffix))


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError("datasets of the hub need the library: pip install 'audiorl[hub]'") from error
    return datasets
