"""MMAU, MMAR and MMSU: by hand, by the official rule, and end to end with a tiny model."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from audiorl import cli
from audiorl.audio import AudioClip
from audiorl.data.corpus import Utterance
from audiorl.data.manifest import read_samples
from audiorl.eval.mmau import MMAUOptions, judge, main, score_rows
from audiorl.types import Message, Sample
from tests.conftest import make_omni


def question(id: str, answer: str = "dog", **changes) -> dict[str, Any]:
    about = {"task": "sound", "category": "Perception", "sub-category": "Animals", "difficulty": "easy"}
    asked = {"id": id, "question": "What is heard?", "choices": ["dog", "cat", "big drum"], "answer": answer}
    return asked | about | changes


def test_scores_by_hand() -> None:
    rows = [
        question("1", model_output="dog"),
        question("2", model_output="cat", task="music", difficulty="hard"),
        question("3", model_output="", task="music"),
        question("4", model_prediction="A dog.", category=["Perception", "Reasoning"]),
        question("5", category=["Reasoning", "Reasoning"], difficulty=None),
        question("6", model_output=None, model_prediction="dog cat"),
    ]
    scores = score_rows(rows, "mmau", {"model": [judge(row, "mmau") for row in rows]})
    assert list(scores) == ["total", "task", "category", "sub-category", "difficulty"]

    def cells(name: str) -> dict[str, tuple]:
        part = {"total": scores["total"]} if name == "total" else scores[name]
        return {k: (c["accuracy"], c["n"], c["missing"], c["unanswered"]) for k, c in part.items()}

    assert cells("total") == {"total": (2 / 6, 6, 1, 1)}
    assert cells("task") == {"music": (0, 2, 0, 1), "sound": (2 / 4, 4, 1, 0)}
    assert cells("category") == {"Perception": (2 / 5, 5, 0, 1), "Reasoning": (1 / 2, 2, 1, 0)}
    assert cells("difficulty") == {"easy": (2 / 4, 4, 0, 1), "hard": (0, 1, 0, 0)}
    assert scores["total"]["low"] <= 2 / 6 <= scores["total"]["high"]


def test_where_the_two_rules_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = ["dog", "A", "I hear a dog", "(B) cat", *["**A**"] * 11]
    file = tmp_path / "predictions.json"
    file.write_text(json.dumps([question(f"q{i}", model_output=text) for i, text in enumerate(said)]))
    total = main(MMAUOptions(score=file))["total"]
    assert (total["accuracy"], total["rewarded"]["accuracy"]) == (2 / 15, 13 / 15)
    assert total["differ"]["official"] == {"n": 1, "ids": ["q2"]}
    assert total["differ"]["rewarded"] == {"n": 12, "ids": ["q1", *(f"q{i}" for i in range(4, 13))]}
    printed = " ".join(capsys.readouterr().out.split())
    assert "as rewarded" in printed and "86.67" in printed
    assert "the official rule alone: 1 (ids q2)" in printed and "rule of rewards alone: 12 (ids q1, q4," in printed
    assert total["unlisted"] == []
    file.write_text(json.dumps([question("q0", "Dog"), question("q1", "B"), question("q2", "a dog")]))
    assert main(MMAUOptions(score=file))["total"]["unlisted"] == ["q1", "q2"]
    assert "the answer is none of the choices: 2 (ids q1, q2); correct the data" in capsys.readouterr().err
    letters = {"choice_a": "dog", "choice_b": "", "choice_c": "cat", "choice_d": "", "answer_gt": "cat"}
    (tmp_path / "mmsu.json").write_text(json.dumps([letters | {"id": "1", "question": "?", "response": "C"}]))
    assert main(MMAUOptions(score=tmp_path / "mmsu.json", kind="mmsu"))["total"]["rewarded"]["accuracy"] == 1


def official_score(rows: list[dict]) -> tuple[dict[str, list[int]], int]:
    """The benchmark's scorer from its description: [correct, total] per task, and how many rows it skips."""

    def words(text: str) -> set[str]:
        return set("".join(c if c.isalnum() or c == "_" else " " for c in text.lower()).split())

    tasks: dict[str, list[int]] = {}
    skipped = 0
    for row in rows:
        if "model_output" not in row:
            skipped += 1
            continue
        given, gold = words(row["model_output"]), words(row["answer"])
        wrong = {w for c in row["choices"] for w in words(c) if w not in gold}
        counts = tasks.setdefault(row["task"], [0, 0])
        counts[0] += bool(given) and gold.issubset(given) and given.isdisjoint(wrong)
        counts[1] += 1
    return tasks, skipped


def test_agrees_with_the_official_scorer_on_random_predictions() -> None:
    rng = random.Random(1)
    pool = ["dog", "cat", "big drum", "Hot-Dog", "café", "狗叫", "3/4 time", "man's voice", "x_y", "½", "İ", "dogs"]
    rows = []
    for i in range(4000):
        choices = rng.sample(pool, 4)
        answer, other = rng.choice(choices), rng.choice(pool)
        outputs = [answer, answer.upper(), f"It's the {answer}!", f"{answer} {answer}", f"{answer}, not {other}", other]
        outputs += ["", "...", answer[:2], "B", f"(B) {answer}", "\n", f"{answer}ly", "😀"]
        row = question(str(i), answer, choices=choices, task=rng.choice(["sound", "music", "speech"]))
        if rng.random() < 0.95:
            row["model_output"] = rng.choice(outputs)
        rows.append(row)
    expected, skipped = official_score(rows)
    scores = score_rows(rows, "mmau", {"model": [judge(row, "mmau") for row in rows]})
    assert scores["total"]["missing"] == skipped > 100
    for task, (correct, seen) in expected.items():
        cell = scores["task"][task]
        assert cell["n"] - cell["missing"] == seen
        assert cell["accuracy"] * cell["n"] == pytest.approx(correct)
    assert 500 < sum(c for c, _ in expected.values()) < 3500


def test_inference_writes_the_official_list_and_counts_unusable_audio_as_wrong(
    manifest, scripted, tmp_path, capsys
) -> None:
    data, out = tmp_path / "mini.json", tmp_path / "out"
    data.write_text(json.dumps([question("1"), question("2"), question("3"), question("4")]))
    manifest([Sample(id=i, messages=()) for i in ("1", "2", "3")], skipped=["4: no audio"])
    texts = {
        "1": "<think>barks</think><answer>dog</answer>",
        "2": "<answer>cat</answer>",
        "3": "<think>dog dog dog and so on",
    }
    options = MMAUOptions(data=data, model="m", out=out, batch_size=2)
    scores = main(options, engine=scripted(texts))
    assert (scores["total"]["accuracy"], scores["total"]["missing"], scores["total"]["unanswered"]) == (0.25, 1, 1)
    written = json.loads((out / "predictions.json").read_text())
    for key in ("model_output", "model_prediction"):
        assert [r.get(key) for r in written] == ["dog", "cat", "", None] and key not in written[3]
    assert json.loads((out / "scores.json").read_text())["total"] == scores["total"]
    assert "25.00" in capsys.readouterr().out

    assert main(MMAUOptions(score=out / "predictions.json")) == scores
    idle = scripted({})
    assert main(options, engine=idle) == scores and idle.asked == []
    with pytest.raises(ValueError, match="other settings"):
        main(dataclasses.replace(options, think=True), engine=idle)
    (tmp_path / "part.json").write_text(json.dumps(written[:1]))  # the others count as wrong
    assert main(MMAUOptions(data=data, score=tmp_path / "part.json"))["total"]["missing"] == 3


def test_mmar_keys_lines_and_limit(manifest, scripted, tmp_path) -> None:
    data = tmp_path / "mmar.jsonl"
    rows = [question(id, modality=m, task=None) for id, m in (("a", "sound"), ("b", "mix-music-speech"))]
    data.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    manifest([Sample(id=i, messages=()) for i in ("a", "b")])
    options = MMAUOptions(data=data, model="m", out=tmp_path / "out", kind="mmar", limit=1)
    scores = main(options, engine=scripted({"a": "<think>woof</think><answer>dog</answer>"}))
    (row,) = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert (row["answer_prediction"], row["thinking_prediction"]) == ("dog", "woof")
    assert scores["modality"]["sound"]["accuracy"] == 1.0 and "task" not in scores


def test_blind_answers_are_compared_question_by_question(manifest, scripted, tmp_path, capsys) -> None:
    data = tmp_path / "mini.json"
    data.write_text(json.dumps([question(str(i), task="music" if i == 3 else "sound") for i in range(4)]))
    clip = AudioClip(array=np.ones(8000, np.float32), sample_rate=8000)
    manifest([Sample(id=str(i), messages=(Message("user", (clip, "What?")),)) for i in range(4)])
    options = MMAUOptions(data=data, model="m", out=tmp_path / "out")
    main(options, engine=scripted({"0": "dog", "1": "dog", "2": "dog", "3": "cat"}))
    engine = scripted({"0": "dog", "1": "cat", "2": "cat", "3": "cat"})  # asked only what is not answered yet
    scores = main(dataclasses.replace(options, blind="silence"), engine=engine)
    assert engine.asked == ["0", "1", "2", "3"]
    total = scores["total"]
    assert (total["accuracy"], total["blind"]["accuracy"], total["difference"]["accuracy"]) == (0.75, 0.25, 0.5)
    assert total["difference"]["low"] == 0.0 and total["difference"]["high"] == 1.0
    assert scores["task"]["music"]["difference"]["accuracy"] == 0 and scores["task"]["sound"]["blind"]["n"] == 3
    assert "difference" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert [row["model_output"] for row in written] == ["dog", "dog", "dog", "cat"]
    assert (tmp_path / "out" / "blind-silence.jsonl").exists()
    with pytest.raises(ValueError, match="--blind and --baseline ask models"):
        main(MMAUOptions(score=tmp_path / "out" / "predictions.json", blind="text"))


MMAR = [
    question(f"clip{i}", "Man", choices=["Man", "Woman", ""], modality=modality, answer_prediction=said)
    for i, (modality, said) in enumerate([("speech", "Man"), ("mix-sound-speech", "Woman")])
]
RUBRIC = [{"name": "cue", "scoring_point": "…", "note": "…", "choices": [0, 1]}] * 2


def test_rated_thoughts_of_mmar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file that MMAR's evaluation_rubrics.py writes."""
    scored = [[{"name": "cue", "score": a}, {"name": "cue", "score": b}] for a, b in ((1, 1), (0, 1), (0, 0))]
    ratings = (list(map(json.dumps, scored)), [])
    rows = [{**row, "rubric": RUBRIC, "raw_responses": r} for row, r in zip(MMAR, ratings, strict=True)]
    file = tmp_path / "predictions.json.evaluated.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = main(MMAUOptions(score=file, kind="mmar"))
    assert scores["total"]["accuracy"] == 0.5 and scores["total"]["rubric"]["accuracy"] == 0.25
    assert scores["modality"]["speech"]["rubric"]["accuracy"] == 0.5 and "rubric" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[{]", "not a JSON list"),
        ([1], "row 1: a JSON int, not an object"),
        ([], "an empty list"),
        ([{"id": 1}, {"id": "1"}], "the id '1' occurs more than once"),
        ([{"id": 1, "model_output": 3}], "row 1, field 'model_output': 3 is not a text"),
        ([{"id": 1, "answer": float("nan")}], "row 1, field 'answer': nan is not a text"),
        ([{"id": 1, "choices": 0}], "row 1, field 'choices': 0 is not a list of texts"),
        ([{"id": 1, "task": {}}], "row 1, field 'task': {} is not a name"),
        ([{"id": 1, "question": "\ud800"}], "half a character"),
        ([{"id": "7", "answer": "x", "model_output": "x"}], "question '7': no choices to score against"),
        ([question("6"), {"id": "7"}], "question '7': no answer"),
        ([{"id": "7"}], r"bad.json: no row has the field 'answer' to score against; give the questions as --data"),
        ([{"model_output": "x"}], r"row 1, field 'id': missing; give every row its own, a text or a whole number \("),
        ([MMAR[0] | {"rubric": RUBRIC, "raw_responses": ["good"]}], "'clip0', field 'raw_responses': a rating is not"),
        ([MMAR[0] | {"raw_responses": ["good"]}], "question 'clip0': ratings without a rubric"),
        ([MMAR[0] | {"rubric": [{"name": "cue"}]}], r"row 1, field 'rubric\[0\].choices': missing"),
    ],
)
def test_rows_that_cannot_be_scored(tmp_path: Path, content: Any, message: str) -> None:
    (tmp_path / "bad.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message):
        main(
            MMAUOptions(
                score=tmp_path / "bad.json", kind="mmar" if "clip" in message or "rubric" in message else "mmau"
            )
        )
    with pytest.raises(ValueError, match="--score"):
        main(MMAUOptions())


# -- with a tiny model -------------------------------------------------------------------------------------------------

MMAU = [
    question(f"{task}-{difficulty}", "Woman", task=task, difficulty=difficulty)
    | {"audio_id": f"./test-mini-audios/{i}.wav", "choices": ["Man", "Woman", "Child", "Robot" if i else "Child"]}
    for i, (task, difficulty) in enumerate([("sound", "easy"), ("music", "medium"), ("speech", "hard")])
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


def evaluate(data: Path, model: Path, *options: str) -> list[dict[str, Any]]:
    """Return predictions.json of DATA/../out."""
    out = data.parent / "out"
    command = ["eval", "mmau", "--data", str(data), "--model", str(model), "--out", str(out), "--max-new-tokens", "4"]
    assert cli.main([*command, "--device", "cpu", *options]) == 0
    return json.loads((out / "predictions.json").read_text())


def test_mmau_with_and_without_the_audio(folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "data.json").write_text(json.dumps(MMAU))
    written = evaluate(folder / "data.json", model, "--blind", "text")
    assert [{k: row[k] for k in MMAU[0]} for row in written] == MMAU
    assert all(isinstance(row["model_output"], str) for row in written)
    scores = json.loads((folder / "out" / "scores.json").read_text())
    assert (scores["total"]["n"], scores["total"]["missing"], scores["total"]["blind"]["n"]) == (3, 0, 3)
    assert list(scores["difficulty"]) == ["easy", "hard", "medium"] and "difference" in scores["difficulty"]["hard"]
    assert "task: speech" in capsys.readouterr().out
    answers = [(folder / "out" / f"{name}.jsonl").read_text().splitlines() for name in ("predictions", "blind-text")]
    assert [len(lines) for lines in answers] == [3, 3]


def test_mmau_test_without_answers_writes_what_is_submitted(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{k: v for k, v in row.items() if k != "answer"} for row in MMAU[:2]] + [{**MMAU[2], "answer": ""}]
    (folder / "data.json").write_text(json.dumps(rows))
    written = evaluate(folder / "data.json", model)
    assert [row["id"] for row in written] == [row["id"] for row in rows]
    assert all(isinstance(row[key], str) for row in written for key in ("model_output", "model_prediction"))
    assert not (folder / "out" / "scores.json").exists()
    assert "nothing can be scored" in capsys.readouterr().err


def test_mmsu_as_parquet(folder: Path, model: Path, scripted: Callable[..., Any], tmp_path: Path) -> None:
    audio = [(folder / f"test-mini-audios/{i}.wav").read_bytes() for i in range(2)]
    rows = [row | {"audio": {"bytes": audio[i], "path": f"{i}.wav"}} for i, row in enumerate(MMSU)]
    data = folder / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), data)
    written = evaluate(data, model, "--kind", "mmsu")
    assert [{k: row[k] for k in MMSU[0]} for row in written] == MMSU
    assert [row["audio_path"] for row in written] == ["0.wav", "1.wav"] and all("audio" not in row for row in written)
    scores = json.loads((folder / "out" / "scores.json").read_text())
    assert list(scores["sub-category"]) == ["Perception, Paralinguistics", "Reasoning, Paralinguistics"]

    engine = scripted({MMSU[0]["id"]: "<answer>Woman</answer>", MMSU[1]["id"]: "<answer>A nice man</answer>"})
    scores = main(MMAUOptions(data=data, model="m", out=tmp_path / "scripted", kind="mmsu"), engine)
    assert (scores["total"]["accuracy"], scores["total"]["unanswered"]) == (0.5, 1)
    predictions = tmp_path / "scripted" / "predictions.json"
    letters = [row["response"] for row in json.loads(predictions.read_text())]
    assert letters == ["B", ""]  # a text that names no choice gives no letter
    assert scores["total"] == main(MMAUOptions(score=predictions, kind="mmsu"))["total"]


def test_own_questions_are_sent_to_qa(folder: Path) -> None:
    for row in ({"audio": "0.wav", "question": "?", "answer": "x"}, {"id": 1, "audios": ["0.wav"], "messages": []}):
        (folder / "own.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(
            ValueError, match=r"own.jsonl: row 1: a question of your own; audiorl eval qa measures them"
        ):
            main(MMAUOptions(data=folder / "own.jsonl", model="m", out=folder / "out"))


def test_mmsu_rows_that_cannot_be_asked(tmp_path: Path) -> None:
    file, row = tmp_path / "rows.jsonl", {**MMSU[1], "audio_path": "a.wav"}
    for wrong, message in (
        ({"choice_a": " "}, "field 'choice_a'"),
        ({"answer_gt": "Alien"}, "field 'answer_gt': 'Alien' is not among the choices"),
        ({"answer_gt": None}, "field 'answer_gt'"),
        ({"choice_b": "Man", "choice_c": "", "choice_d": "", "answer_gt": "Man"}, "field 'choice_a'.*two or more"),
        ({"choices": "Man"}, "field 'choices'"),
        ({"question": ""}, "field 'question'"),
    ):
        file.write_text(json.dumps({**row, **wrong}) + "\n")
        with pytest.raises(ValueError, match=f"rows.jsonl: row 1.*{message}"):
            read_samples(file)
    file.write_text(json.dumps(row) + "\n")
    (sample,) = read_samples(file).samples  # the kind is detected
    assert sample.choices == ("Man", "Woman", "Child", "Robot") and sample.task == "speaker_identification"
