"""Corpora as Kaldi, WebDataset, lhotse and the hub keep them: equal samples, and errors that name the row."""

from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from audiorl.data.corpus import Utterance
from audiorl.data.manifest import column_names, read_samples
from audiorl.recipes._common import read_sets
from audiorl.recipes.asr_grpo import ASRConfig
from tests.support.data_sources import (
    RATE,
    SOURCES,
    SPEAKERS,
    TEXTS,
    cut,
    encoded,
    kaldi,
    shar,
    wave,
    webdataset,
    write_lines,
    write_tar,
)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("AUDIORL_CACHE", str(folder))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "datasets"))
    return folder


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_samples(name: str, tmp_path: Path) -> None:
    if name in ("hub", "saved", "dataset"):
        pytest.importorskip("datasets")
    samples = read_samples(SOURCES[name](tmp_path), think=False, check_audio=True).samples
    assert [(s.id, s.references[0]) for s in samples] == list(TEXTS.items())
    for sample, key in zip(samples, TEXTS, strict=True):
        assert sample.metadata["speaker"] == SPEAKERS[key]
        (clip,) = sample.audio
        assert clip.path is not None and clip.data is None and clip.array is None  # nothing stays in memory
        expected = wave(key, 1.5)[RATE // 2 :] if name == "lhotse" else wave(key)
        np.testing.assert_allclose(clip.load(RATE), expected, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shar", [False, True], ids=["cuts", "shar"])
def test_lhotse_reads_the_same(shar: bool, speech: list[Utterance], tmp_path: Path) -> None:
    """What lhotse writes: whole recordings, parts of one, two speakers of one file, each channel of a stereo one."""
    lhotse = pytest.importorskip("lhotse")
    cuts = []
    for utterance in speech[:3]:
        recording = lhotse.Recording.from_file(utterance.clip.path)
        said = lhotse.SupervisionSegment(
            utterance.key, recording.id, 0.0, recording.duration, text=utterance.text, language="en", speaker="jane"
        )
        cuts.append(lhotse.MonoCut(utterance.key, 0.0, recording.duration, 0, supervisions=[said], recording=recording))
    cuts.append(cuts[0].truncate(offset=0.25, duration=0.5, preserve_id=False).with_id("jane/part"))
    soundfile.write(tmp_path / "two.wav", np.stack([wave("a", 2.0), wave("b", 2.0)], 1), RATE)
    stereo = lhotse.Recording.from_file(tmp_path / "two.wav")
    for channel, key in enumerate(TEXTS):
        said = lhotse.SupervisionSegment(key, stereo.id, 0.0, 1.0, channel, TEXTS[key], "en", SPEAKERS[key])
        cuts.append(lhotse.MonoCut(key, 0.5, 1.0, channel, supervisions=[said], recording=stereo))
    if shar:
        (tmp_path / "out").mkdir()
        writers = pytest.importorskip("lhotse.shar")
        with writers.SharWriter(str(tmp_path / "out"), {"recording": "flac"}, shard_size=2) as writer:
            for one in cuts:
                writer.write(one)
        path = tmp_path / "out"
        theirs = list(lhotse.CutSet.from_shar(in_dir=str(path)))
    else:
        path = tmp_path / "cuts.jsonl.gz"
        lhotse.CutSet.from_cuts(cuts).to_file(path)
        theirs = list(lhotse.CutSet.from_file(path))
    samples = read_samples(path, think=False, check_audio=True).samples
    assert len(samples) == len(theirs) == 6
    for sample, one in zip(samples, theirs, strict=True):
        (said,) = one.supervisions
        assert (sample.references[0], sample.metadata["speaker"]) == (said.text, said.speaker)
        (audio,) = one.load_audio()
        (clip,) = sample.audio
        np.testing.assert_allclose(clip.load(one.sampling_rate), audio, atol=1e-4)


@pytest.mark.slow
def test_webdataset_reads_the_same(speech: list[Utterance], tmp_path: Path) -> None:
    library = pytest.importorskip("webdataset")
    with library.TarWriter(str(tmp_path / "shard-000.tar")) as writer:
        for u in speech[:5]:
            sound = (
                {"flac": Path(str(u.clip.path)).read_bytes()}
                if u.key != speech[1].key
                else {"wav": encoded("a", kind="WAV")}
            )
            writer.write(
                {"__key__": f"en/{u.key}", "txt": u.text, "json": {"speaker": u.speaker, "language": "en"}} | sound
            )
    samples = read_samples(tmp_path / "shard-000.tar", think=False, check_audio=True).samples
    theirs = list(library.WebDataset(str(tmp_path / "shard-000.tar"), shardshuffle=False).decode())
    assert len(samples) == len(theirs) == 5
    for sample, row in zip(samples, theirs, strict=True):
        assert (sample.id, sample.references[0], sample.metadata["speaker"]) == (
            row["__key__"],
            row["txt"],
            row["json"]["speaker"],
        )
        audio, rate = soundfile.read(io.BytesIO(row.get("flac") or row["wav"]), dtype="float32")
        np.testing.assert_allclose(sample.audio[0].load(rate), audio, atol=1e-4)


def test_recordings_of_a_table_do_not_stay_in_memory(tmp_path: Path) -> None:
    """40 MB in row groups of 20 rows."""
    content = np.random.default_rng(0).integers(0, 256, 200_000, np.uint8).tobytes()
    rows = [{"audio": {"bytes": content + str(i).encode(), "path": "x.wav"}, "text": "a"} for i in range(200)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=20)
    del rows
    allocated = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        loaded = read_samples(tmp_path / "rows.parquet")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(loaded.samples) == 200 and peak < 10e6
    assert pa.total_allocated_bytes() - allocated < 10e6


def test_a_second_reading_stores_nothing(tmp_path: Path, cache: Path) -> None:
    path = webdataset(tmp_path)
    first = read_samples(path)
    before = sorted((p, p.stat().st_mtime_ns) for p in (cache / "audio").rglob("*.flac"))
    assert len(before) == 2
    second = read_samples(path)
    assert [s.audio[0].key for s in first.samples] == [s.audio[0].key for s in second.samples]
    assert sorted((p, p.stat().st_mtime_ns) for p in (cache / "audio").rglob("*") if p.is_file()) == before


def test_a_dataset_in_memory() -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"wav": [{"bytes": encoded("a"), "path": "a.flac"}, {"bytes": encoded("b"), "path": None}]}
    table = datasets.Dataset.from_dict(rows | {"said": list(TEXTS.values())}).cast_column("wav", datasets.Audio())
    loaded = read_samples(table, columns={"audio": "wav", "text": "said"}, check_audio=True)
    assert [s.references[0] for s in loaded.samples] == list(TEXTS.values())
    assert loaded.summary() == "dataset: 2 samples"


def test_columns_of_other_names(tmp_path: Path) -> None:
    (tmp_path / "a.flac").write_bytes(encoded("a"))
    row = {"wav": "a.flac", "prompt": "Who?", "options": ["Jane", "Joe"], "gold": 0, "text": "kept"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    given = ("audio=wav", "question=prompt", "choices=options", "answer=gold")
    config = ASRConfig(data=(str(tmp_path / "rows.jsonl"),), columns=given)
    ((_, (sample,)),) = read_sets(config.data, config, lambda _: [], read_samples, think=False)
    assert sample.references == ("Jane",) and sample.metadata["text"] == "kept"
    with pytest.raises(ValueError, match=r"row 1, field 'gone': missing; --columns names it, and the columns are wav"):
        read_samples(tmp_path / "rows.jsonl", columns={"audio": "gone"})
    for bad in ("audio", "audio=", "=wav"):
        with pytest.raises(ValueError, match="give WANTED=NAME once"):
            column_names((bad,))
    with pytest.raises(ValueError, match="columns of one name only"):
        read_sets(config.data, config, lambda _: [], lambda path: None)


def skipped(path: Path | str) -> list[str]:
    return [str(row) for row in read_samples(path, on_error="skip").skipped]


def test_kaldi_rows_that_cannot_be_used(tmp_path: Path) -> None:
    folder = kaldi(tmp_path)
    (folder / "wav.scp").write_text("rec sox both.wav -t wav - |\nark data/raw.ark:17\n")
    (folder / "segments").write_text("a rec 0.0 1.0\nb rec 2.0 1.0\nc ark 0 1\nd rec zero one\ne gone 0 1\n")
    (folder / "text").write_text("".join(f"{key} words\n" for key in "abcdef"))
    a, b, c, d, e, f = skipped(folder)
    assert "row 1, field 'wav.scp': line 1: a command, which is not run" in a
    assert "line 2: from 2 to 1 s; the end must lie after the start" in b
    assert "line 2: a part of the archive data/raw.ark" in c
    assert "line 4: 'rec zero one' is not `RECORDING START END" in d
    assert "no line for 'gone'; write `gone FILE`" in e
    assert "no line for 'f'; write `f RECORDING START END`" in f
    (folder / "text").unlink()
    with pytest.raises(ValueError, match=r"wav\.scp but no text"):
        read_samples(folder)


def test_archives_that_cannot_be_used(tmp_path: Path) -> None:
    members = {
        "a.txt": b"no audio",
        "b.flac": encoded("b"),
        "b.json": b"[1]",
        "c.flac": encoded("a"),
        "c.txt": b"\xff\xfe",
        "d.flac": encoded("a"),
        "d.txt": b"fine",
    }
    a, b, c = skipped(write_tar(tmp_path / "x.tar", members))
    assert "row 1, field 'audio': no audio file for 'a'" in a
    assert "row 2, field 'json': a JSON list, not an object" in b
    assert "row 3, field 'txt': not readable" in c
    whole = (tmp_path / "x.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.tar: broken or no tar archive"):
        read_samples(tmp_path / "cut.tar", on_error="skip")
    with pytest.raises(ValueError, match="holds no files"):
        read_samples(write_tar(tmp_path / "empty.tar", {}))


def test_cuts_that_cannot_be_used(tmp_path: Path) -> None:
    fine = {"type": "file", "source": str(tmp_path / "a.wav")}
    rows = [
        cut("a", {"type": "command", "source": "cat x.wav"}),
        cut("b", fine) | {"type": "MixedCut"},
        cut("a", fine) | {"start": -1},
    ]
    a, b, c = skipped(write_lines(tmp_path / "cuts.jsonl.gz", rows))
    assert "field 'recording.sources': of type 'command'; only a file is read" in a
    assert "field 'type': 'MixedCut'" in b and "field 'start': -1 is not a time" in c
    (tmp_path / "bad.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(ValueError, match="not readable as gzip"):
        read_samples(tmp_path / "bad.jsonl.gz")


def test_shards_and_recordings_must_agree(tmp_path: Path) -> None:
    folder = shar(tmp_path)
    write_tar(folder / "recording.000001.tar", {"other.flac": encoded("b")})
    (row,) = skipped(folder)
    assert "field 'id': no recording of 'b' in recording.000001.tar; leave the cut out" in row
    (folder / "recording.000001.tar").unlink()
    with pytest.raises(ValueError, match=r"recording\.000001\.tar: missing"):
        read_samples(folder)


def test_a_cut_without_its_recording_spoils_no_other(tmp_path: Path) -> None:
    """Ids in folders, of which one in the middle of the first shard has no recording."""
    placeholder = {"type": "shar", "channels": [0], "source": ""}
    ids = [["x/a", "x/b", "y/a"], ["y/b", "z/a"]]
    for number, shard in enumerate(ids):
        rows = [{**cut(id[-1], placeholder), "id": id} for id in shard]
        write_lines(tmp_path / f"cuts.{number:06d}.jsonl.gz", rows)
        members = {f"{id}.flac": encoded(id[-1]) for id in shard if id != "x/b"}
        write_tar(tmp_path / f"recording.{number:06d}.tar", members)
    loaded = read_samples(tmp_path, on_error="skip")
    assert [(row.row, row.field) for row in loaded.skipped] == [(2, "id")]
    assert [sample.id for sample in loaded.samples] == ["x/a", "y/a", "y/b", "z/a"]
    for sample in loaded.samples:
        np.testing.assert_allclose(sample.audio[0].load(RATE), wave(sample.id[-1]), atol=2e-4)
