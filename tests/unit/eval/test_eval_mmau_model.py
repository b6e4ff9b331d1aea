"""MMAU and MMAR end to end: files of the published shape, real audio, a tiny model of a released class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import soundfile

from audiorl.cli import main
from audiorl.data.corpus import Utterance
from tests.conftest import make_omni

MMAU = [
    {
        "id": f"{task}-{difficulty}",
        "audio_id": f"./test-mini-audios/{i}.wav",
        "question": "Based on the given audio, who speaks?",
        "choices": ["Man", "Woman", "Child", "Child"] if i == 0 else ["Man", "Woman", "Child", "Robot"],
        "answer": "Woman",
        "dataset": "AudioSet",
        "task": task,
        "split": "test-mini",
        "category": "Reasoning",
        "sub-category": "Acoustic Source Inference",
        "difficulty": difficulty,
    }
    for i, (task, difficulty) in enumerate([("sound", "easy"), ("music", "medium"), ("speech", "hard")])
]
MMAR = [
    {
        "id": f"clip{i}",
        "audio_path": f"./test-mini-audios/{i}.wav",
        "question": "Who speaks?",
        "choices": ["Man", "Woman", ""],
        "answer": "Man",
        "modality": modality,
        "category": "Signal Layer",
        "sub-category": "Speaker Analysis",
        "language": "en",
        "source": "youtube",
        "url": "x",
        "timestamp": "00:00:01,00:00:02",
    }
    for i, modality in enumerate(["speech", "mix-sound-speech"])
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_omni().save(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, speech: list[Utterance]) -> Path:
    (tmp_path / "test-mini-audios").mkdir()
    for i, u in enumerate(speech[:3]):
        soundfile.write(tmp_path / f"test-mini-audios/{i}.wav", u.clip.load(16_000), 16_000)
    return tmp_path


def evaluate(folder: Path, model: Path, rows: list[dict[str, Any]], *options: str, lines: bool = False) -> Path:
    data = folder / "data.json"
    data.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
    command = ["eval", "mmau", "--data", str(data), "--model", str(model), "--out", str(folder / "out")]
    assert main([*command, "--max-new-tokens", "4", "--device", "cpu", *options]) == 0
    return folder / "out"


def test_mmau(folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = evaluate(folder, model, MMAU)
    written = json.loads((out / "predictions.json").read_text())
    assert [{k: row[k] for k in MMAU[0]} for row in written] == MMAU
    assert all(isinstance(row["model_output"], str) for row in written)
    scores = json.loads((out / "scores.json").read_text())
    assert (scores["total"]["n"], scores["total"]["missing"]) == (3, 0)
    assert list(scores["task"]) == ["music", "sound", "speech"]
    assert list(scores["difficulty"]) == ["easy", "hard", "medium"]
    assert scores["sub-category"]["Acoustic Source Inference"]["n"] == 3
    printed = capsys.readouterr().out
    assert "task: speech" in printed and "difficulty: hard" in printed


@pytest.mark.parametrize("blind", ["silence", "text"])
def test_mmau_blind(folder: Path, model: Path, blind: str) -> None:
    out = evaluate(folder, model, MMAU, "--blind", blind)
    scores = json.loads((out / "scores.json").read_text())
    assert scores["total"]["blind"]["n"] == 3 and "difference" in scores["difficulty"]["hard"]
    answers = [(out / f"{name}.jsonl").read_text().splitlines() for name in ("predictions", f"blind-{blind}")]
    assert [len(lines) for lines in answers] == [3, 3]


def test_mmau_test_without_answers_writes_what_is_submitted(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{k: v for k, v in row.items() if k != "answer"} for row in MMAU[:2]] + [{**MMAU[2], "answer": ""}]
    out = evaluate(folder, model, rows)
    written = json.loads((out / "predictions.json").read_text())
    assert [row["id"] for row in written] == [row["id"] for row in rows]
    assert all(isinstance(row[key], str) for row in written for key in ("model_output", "model_prediction"))
    assert not (out / "scores.json").exists()
    assert "nothing can be scored" in capsys.readouterr().err


def test_mmar(folder: Path, model: Path) -> None:
    out = evaluate(folder, model, MMAR, "--kind", "mmar", lines=True)
    written = json.loads((out / "predictions.json").read_text())
    assert all(isinstance(row["answer_prediction"], str) for row in written)
    scores = json.loads((out / "scores.json").read_text())
    assert scores["total"]["missing"] == 0 and list(scores["modality"]) == ["mix-sound-speech", "speech"]
