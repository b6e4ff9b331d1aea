"""Peak memory of reading a data set and decoding each of its clips once, by kind of source and number of clips.

    python bench/data_memory.py --clips 1000 10000 --folder /tmp/clips

Writes data sets of different clips of a second of noise (FLAC, 30 KB) to --folder, where it finds them again, and
reads each in a process of its own. "above" is what the process needs above one that has only imported the reader, and
"a clip" by how much that grows with each further clip: a sample with its path and text takes about 4 KB.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import soundfile
from rich.console import Console
from rich.table import Table

RATE = 16_000


def clips(count: int) -> Iterator[tuple[str, bytes]]:
    """(key, FLAC)."""
    for number in range(count):
        noise = 0.1 * np.random.default_rng(number).standard_normal(RATE)
        file = io.BytesIO()
        soundfile.write(file, noise.clip(-1, 1), RATE, format="FLAC")
        yield f"{number:06d}", file.getvalue()


def files(folder: Path, count: int) -> None:
    """Recordings that the other writers of this script refer to."""
    for key, content in clips(count):
        (folder / f"{key}.flac").write_bytes(content)


def keys(count: int) -> list[str]:
    return [f"{number:06d}" for number in range(count)]


def jsonl(folder: Path, count: int) -> Path:
    files(folder, count)
    rows = [json.dumps({"id": key, "audio": f"{key}.flac", "text": f"words {key}"}) for key in keys(count)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder / "rows.jsonl"


def kaldi(folder: Path, count: int) -> Path:
    files(folder, count)
    (folder / "wav.scp").write_text("".join(f"{key} {folder / key}.flac\n" for key in keys(count)))
    (folder / "text").write_text("".join(f"{key} words {key}\n" for key in keys(count)))
    return folder


def parquet(folder: Path, count: int) -> Path:
    """The recordings inside of the file, in row groups of 100, as `datasets` writes audio."""
    write_parquet(folder / "rows.parquet", clips(count))
    return folder / "rows.parquet"


def hub(folder: Path, count: int) -> str:
    """The same in files of 500 recordings, streamed by `datasets`, which holds one file at most."""
    recordings = clips(count)
    for start in range(0, count, 500):
        write_parquet(folder / f"train-{start:06d}.parquet", islice(recordings, 500))
    return f"hf://{folder}:train"


def write_parquet(path: Path, recordings: Iterator[tuple[str, bytes]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"id": key, "audio": {"bytes": data, "path": f"{key}.flac"}, "text": key} for key, data in recordings]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)


def write_tar(path: Path, members: Iterator[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def webdataset(folder: Path, count: int) -> Path:
    members = ((f"{key}.{s}", c) for key, data in clips(count) for s, c in (("flac", data), ("txt", key.encode())))
    return write_tar(folder / "shard.tar", members)


def cut(key: str, source: dict[str, object]) -> str:
    recording = dict(id=key, sources=[source], sampling_rate=RATE, num_samples=RATE, duration=1.0, channel_ids=[0])
    supervision = dict(id=key, recording_id=key, start=0, duration=1.0, text=f"words {key}")
    row = dict(id=key, start=0, duration=1.0, channel=0, supervisions=[supervision], recording=recording)
    return json.dumps(row | {"type": "MonoCut"}) + "\n"


def lhotse(folder: Path, count: int) -> Path:
    files(folder, count)
    sources = ({"type": "file", "channels": [0], "source": f"{folder / key}.flac"} for key in keys(count))
    lines = (cut(key, source) for key, source in zip(keys(count), sources, strict=True))
    (folder / "cuts.jsonl").write_text("".join(lines))
    return folder / "cuts.jsonl"


def shar(folder: Path, count: int) -> Path:
    placeholder: dict[str, object] = {"type": "shar", "channels": [0], "source": ""}
    (folder / "cuts.000000.jsonl").write_text("".join(cut(key, placeholder) for key in keys(count)))
    write_tar(folder / "recording.000000.tar", ((f"{key}.flac", data) for key, data in clips(count)))
    return folder


SOURCES: dict[str, Callable[[Path, int], Path | str]] = {
    "jsonl": jsonl,
    "kaldi": kaldi,
    "lhotse": lhotse,
    "parquet": parquet,
    "hub": hub,
    "webdataset": webdataset,
    "shar": shar,
}


def written(name: str, count: int, root: Path) -> str:
    """The data set with `count` clips, made unless it is there."""
    folder = root / f"{name}-{count}"
    if not (folder / "done").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        (root / f"{name}-{count}.source").write_text(str(SOURCES[name](folder, count)))
        (folder / "done").touch()
    return (root / f"{name}-{count}.source").read_text()


def read(source: str) -> None:
    """In a process of its own: print the peak in KiB (VmHWM) and the clips."""
    from audiorl.data.manifest import read_samples

    count = 0
    if source:
        for sample in read_samples(source, think=False).samples:
            count += len(sample.audio[0].load(RATE)) == RATE
    status = Path("/proc/self/status").read_text()
    print(status.partition("VmHWM:")[2].split()[0], count)


def measured(source: str, cache: Path) -> tuple[float, int]:
    """(MiB, clips)."""
    environment = os.environ | {"AUDIORL_CACHE": str(cache), "HF_DATASETS_CACHE": str(cache / "datasets")}
    command = [sys.executable, __file__, "--read", source]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    kib, count = done.stdout.split()
    return int(kib) / 1024, int(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", nargs=2, type=int, default=(1000, 10_000))
    parser.add_argument("--sources", nargs="+", choices=list(SOURCES), default=list(SOURCES))
    parser.add_argument("--folder", type=Path, default=Path("build/data_memory"))
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read is not None:
        return read(options.read)
    root = options.folder.resolve()
    nothing, _ = measured("", root / "cache")
    table = Table(title=f"peak memory, MiB; {nothing:.0f} before reading")
    few, many = options.clips
    for column in ("source", f"above, {few} clips", f"above, {many} clips", "KiB a clip"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for name in options.sources:
        peaks = []
        for count in (few, many):
            peak, clips = measured(written(name, count, root), root / "cache")
            assert clips == count, (name, clips)
            peaks.append(peak - nothing)
        table.add_row(name, *(f"{peak:.0f}" for peak in peaks), f"{(peaks[1] - peaks[0]) * 1024 / (many - few):.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
