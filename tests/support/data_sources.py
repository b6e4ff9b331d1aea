"""The same two utterances as each kind of corpus that `read_samples` reads, laid out as the kind's own tools do it."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

TEXTS = {"a": "good morning", "b": "good night"}
SPEAKERS = {"a": "jane", "b": "joe"}
RATE = 16_000


def wave(key: str, seconds: float = 1.0) -> np.ndarray:
    pitch = {"a": 220, "b": 330}[key]
    return (0.3 * np.sin(2 * np.pi * pitch * np.arange(int(RATE * seconds)) / RATE)).astype(np.float32)


def encoded(key: str, seconds: float = 1.0, kind: str = "FLAC") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave(key, seconds), RATE, format=kind)
    return file.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def kaldi(folder: Path) -> Path:
    """One recording with both utterances, a second each."""
    soundfile.write(folder / "both.wav", np.concatenate([wave("a"), wave("b")]), RATE)
    (folder / "wav.scp").write_text("rec both.wav\n")
    (folder / "segments").write_text("a rec 0.0 1.0\nb rec 1.0 2.0\n")
    (folder / "text").write_text("".join(f"{key} {text}\n" for key, text in TEXTS.items()))
    (folder / "utt2spk").write_text("a jane\nb joe\n")
    (folder / "utt2lang").write_text("a en\nb en\n")
    return folder


def webdataset(folder: Path) -> Path:
    members: dict[str, bytes] = {}
    for key, text in TEXTS.items():
        members |= {f"{key}.flac": encoded(key), f"{key}.txt": text.encode()}
        members[f"{key}.json"] = json.dumps({"language": "en", "speaker": SPEAKERS[key]}).encode()
    return write_tar(folder / "shard-000.tar", members)


def cut(key: str, source: dict[str, Any], start: float = 0.0) -> dict[str, Any]:
    supervision = dict(
        id=key, recording_id=key, start=0, duration=1.0, text=TEXTS[key], language="en", speaker=SPEAKERS[key]
    )
    recording = dict(id=key, sources=[source], sampling_rate=RATE, num_samples=RATE, duration=1.0, channel_ids=[0])
    return dict(
        id=key, start=start, duration=1.0, channel=0, supervisions=[supervision], recording=recording, type="MonoCut"
    )


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def lhotse(folder: Path) -> Path:
    rows = []
    for key in TEXTS:
        soundfile.write(folder / f"{key}.wav", wave(key, 1.5), RATE)
        source = {"type": "file", "channels": [0], "source": str(folder / f"{key}.wav")}
        rows.append(cut(key, source, start=0.5))
    return write_lines(folder / "cuts.jsonl.gz", rows)


def shar(folder: Path) -> Path:
    for number, key in enumerate(TEXTS):
        placeholder = {"type": "shar", "channels": [0], "source": ""}
        write_lines(folder / f"cuts.{number:06d}.jsonl.gz", [cut(key, placeholder)])
        members = {f"{key}.flac": encoded(key), f"{key}.json": b"{}"}
        write_tar(folder / f"recording.{number:06d}.tar", members)
    return folder


def hub(folder: Path) -> str:
    """A folder of the `audiofolder` kind, as the hub holds them, with columns of other names."""
    rows = []
    for key, text in TEXTS.items():
        (folder / f"{key}.flac").write_bytes(encoded(key))
        rows.append({"file_name": f"{key}.flac", "id": key, "sentence": text, "lang": "en", "speaker": SPEAKERS[key]})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"hf://{folder}:train"


def table() -> list[dict[str, Any]]:
    """Rows as `datasets` writes audio to tables: the bytes of a file with its name."""
    return [
        {"id": key, "audio": {"bytes": encoded(key), "path": f"{key}.flac"}, "text": text, "language": "en"}
        | {"speaker": SPEAKERS[key]}
        for key, text in TEXTS.items()
    ]


def parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(table()), folder / "rows.parquet")
    return folder / "rows.parquet"


def dataset(folder: Path) -> Any:
    """An object of `datasets` in memory, whose audio column decodes when it is asked."""
    import datasets

    return datasets.Dataset.from_list(table()).cast_column("audio", datasets.Audio())


def saved(folder: Path) -> Path:
    """The same, saved by `datasets`."""
    dataset(folder).save_to_disk(folder / "saved")
    return folder / "saved"


SOURCES: Mapping[str, Callable[[Path], Any]] = {
    source.__name__: source for source in (kaldi, webdataset, lhotse, shar, hub, parquet, saved, dataset)
}
