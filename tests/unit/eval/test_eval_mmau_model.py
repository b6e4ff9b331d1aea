"""MMAU and MMAR end to end: files of the published shape, real audio, a tiny model of a released class."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from audiorl import cli
from audiorl.data.corpus import Utterance
from audiorl.data.manifest import read_samples
from audiorl.eval.mmau import MMAUOptions, main
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


MMSU = [
    {
        "id": f"code_switch_question_answering_{i}",
        "question": "Who speaks?",
        "choice_a": "Man",
        "choice_b": "Woman",
        "choice_c": "Child" if i else "",
        "choice_d": "Robot" if i else "",
        "answer_gt": "Woman",
        "task_name": "speaker_identification",
        "category": ("Reasoning", "Perception")[i],
        "sub-category": "Paralinguistics",
        "sub-sub-category": "Speaker Traits",
        "linguistics_sub_discipline": "Paralinguistics",
    }
    for i in range(2)
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
    assert cli.main([*command, "--max-new-tokens", "4", "--device", "cpu", *options]) == 0
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


def test_mmsu_as_parquet(folder: Path, model: Path, scripted: Callable[..., Any], tmp_path: Path) -> None:
    files = sorted((folder / "test-mini-audios").glob("*.wav"))
    rows = [
        {**row, "audio": {"bytes": file.read_bytes(), "path": file.name}}
        for row, file in zip(MMSU, files[:2], strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    out = tmp_path / "out"
    words = ["--kind", "mmsu", "--data", str(folder / "train.parquet"), "--out", str(out), "--max-new-tokens", "4"]
    assert cli.main(["eval", "mmau", *words, "--model", str(model), "--device", "cpu"]) == 0
    written = json.loads((out / "predictions.json").read_text())
    assert [{k: row[k] for k in MMSU[0]} for row in written] == MMSU
    assert [row["audio_path"] for row in written] == ["0.wav", "1.wav"] and all("audio" not in row for row in written)
    scores = json.loads((out / "scores.json").read_text())
    assert list(scores["sub-category"]) == ["Perception, Paralinguistics", "Reasoning, Paralinguistics"]

    engine = scripted({MMSU[0]["id"]: "<answer>Woman</answer>", MMSU[1]["id"]: "<answer>A nice man</answer>"})
    options = MMAUOptions(data=folder / "train.parquet", model="m", out=tmp_path / "scripted", kind="mmsu")
    scores = main(options, engine)
    assert (scores["total"]["accuracy"], scores["total"]["unanswered"]) == (0.5, 1)
    written = json.loads((tmp_path / "scripted" / "predictions.json").read_text())
    assert [row["response"] for row in written] == ["B", ""]  # a text that names no choice gives no letter
    assert scores["total"] == main(MMAUOptions(score=tmp_path / "scripted" / "predictions.json", kind="mmsu"))["total"]


def test_mmsu_rows_that_cannot_be_asked(tmp_path: Path) -> None:
    row = {**MMSU[1], "audio_path": "a.wav"}
    for wrong, message in (
        ({"choice_a": " "}, "field 'choice_a'"),
        ({"answer_gt": "Alien"}, "field 'answer_gt': 'Alien' is not among the choices"),
        ({"answer_gt": None}, "field 'answer_gt'"),
        ({"choice_b": "Man", "choice_c": "", "choice_d": "", "answer_gt": "Man"}, "field 'choice_a'.*two or more"),
        ({"choices": "Man"}, "field 'choices'"),
        ({"question": ""}, "field 'question'"),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps({**row, **wrong}) + "\n")
        with pytest.raises(ValueError, match=f"rows.jsonl: row 1.*{message}"):
            read_samples(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (sample,) = read_samples(tmp_path / "rows.jsonl").samples  # the kind is detected
    assert sample.choices == ("Man", "Woman", "Child", "Robot") and sample.task == "speaker_identification"


def test_rated_thoughts_of_mmar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file that MMAR's evaluation_rubrics.py writes."""
    rubric = [{"name": "cue", "scoring_point": "…", "note": "…", "choices": [0, 1]}] * 2
    ratings = [
        json.dumps([{"name": "cue", "score": a}, {"name": "cue", "score": b}]) for a, b in ((1, 1), (0, 1), (0, 0))
    ]
    rows = [
        {**row, "answer_prediction": text, "rubric": rubric, "raw_responses": given, "score": 0.0}
        for row, text, given in zip(MMAR, ("Man", "Woman"), (ratings, []), strict=True)
    ]
    file = tmp_path / "predictions.json.evaluated.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = main(MMAUOptions(score=file, kind="mmar"))
    assert scores["total"]["accuracy"] == 0.5 and scores["total"]["rubric"]["score"] == 0.25
    assert scores["modality"]["speech"]["rubric"]["score"] == 0.5 and "rubric" in capsys.readouterr().out
    file.write_text(json.dumps({**rows[0], "raw_responses": ["good"]}) + "\n")
    with pytest.raises(ValueError, match=r"question 'clip0', field 'raw_responses': a rating is not JSON"):
        main(MMAUOptions(score=file, kind="mmar"))
    file.write_text(json.dumps({**rows[0], "rubric": [{"name": "cue"}]}) + "\n")
    with pytest.raises(ValueError, match=r"row 1, field 'rubric\[0\].choices': missing"):
        main(MMAUOptions(score=file, kind="mmar"))
