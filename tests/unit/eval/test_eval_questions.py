"""Selected questions written as a manifest read as the same questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from audiorl.data.corpus import Utterance
from audiorl.data.manifest import read_samples
from audiorl.eval._common import InferenceOptions
from audiorl.eval._questions import read_questions, write_manifest
from audiorl.types import Sample


def options(data: Path | str, out: Path, **given: Any) -> InferenceOptions:
    return InferenceOptions(data=Path(data), model="m", out=out, **given)


def written(options: InferenceOptions, out: Path) -> tuple[list[Sample], list[Sample]]:
    """(the questions, the same after writing them with the column `share` and reading that)."""
    samples = read_questions(options)
    out.mkdir(exist_ok=True)
    write_manifest(out / "selected.jsonl", options, samples, {s.id: {"share": 0.5} for s in samples})
    return samples, list(read_samples(out / "selected.jsonl", think=False, check_audio=True).samples)


def same(a: Sample, b: Sample) -> bool:
    texts = [[c for m in s.messages for c in m.content if isinstance(c, str)] for s in (a, b)]
    sounds = [s.audio[0].load(16_000) for s in (a, b)]
    equal_audio = len(sounds[0]) == len(sounds[1]) and np.allclose(*sounds, atol=1e-3)
    return (a.id, a.references, a.choices, texts[0]) == (b.id, b.references, b.choices, texts[1]) and bool(equal_audio)


@pytest.fixture
def row(tmp_path: Path, speech: list[Utterance]) -> dict[str, Any]:
    soundfile.write(tmp_path / "a.wav", speech[0].clip.load(16_000), 16_000)
    return {"id": "one", "question": "What?\nReally?", "choices": ["yes", "no"], "answer": "no"}


def test_bundled_questions(tmp_path: Path) -> None:
    before, after = written(options("bundled", tmp_path / "out", limit=3), tmp_path / "out")
    assert len(after) == 3 and all(map(same, before, after))
    assert after[0].metadata["share"] == 0.5 and after[0].metadata["text"] == before[0].metadata["text"]


@pytest.mark.parametrize("name", ["native", "part", "mmsu", "avqa"])
def test_manifests(name: str, tmp_path: Path, row: dict[str, Any]) -> None:
    rows = {
        "native": {**row, "audio": "a.wav"},
        "part": {**row, "audio": "a.wav", "start": 0.2, "duration": 0.3},
        "mmsu": {"id": "m", "audio_path": "a.wav", "question": "Q", "choice_a": "x", "choice_b": "y", "answer_gt": "y"},
        "avqa": {"id": 7, "video_name": "a", "question_text": "Q", "multi_choice": ["x", "y"], "answer": 1},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[name]) + "\n")
    before, after = written(options(tmp_path / "rows.jsonl", tmp_path / "out"), tmp_path / "out")
    assert same(before[0], after[0])


def test_audio_inside_of_the_data(tmp_path: Path, row: dict[str, Any]) -> None:
    audio = {"bytes": (tmp_path / "a.wav").read_bytes(), "path": None}
    pq.write_table(pa.Table.from_pylist([{**row, "audio": audio, "start": 0.1}]), tmp_path / "rows.parquet")
    before, after = written(options(tmp_path / "rows.parquet", tmp_path / "out"), tmp_path / "out")
    assert same(before[0], after[0]) and (tmp_path / "out" / "selected-1.flac").exists()


def test_questions_without_answer_are_named(tmp_path: Path, row: dict[str, Any]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "audio": "a.wav", "answer": ""}) + "\n")
    given = options(tmp_path / "rows.jsonl", tmp_path / "out")
    with pytest.raises(ValueError, match=r"rows\.jsonl: sample 'one': no reference; give rows with answers"):
        read_questions(given)
    with pytest.raises(ValueError, match=r"rows\.jsonl: row 1, field 'answer': empty; give the text of the answer"):
        read_questions(given, on_error="raise")
