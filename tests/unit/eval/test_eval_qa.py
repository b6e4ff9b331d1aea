"""Your own questions: asked of tiny checkpoints, with a baseline, blind, by field, judged, and scored from a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soundfile

from audiorl import cli
from audiorl.data.corpus import Utterance
from audiorl.data.manifest import read_samples
from audiorl.eval.metrics.corpus import bootstrap_interval
from audiorl.eval.qa import QAOptions, main
from audiorl.models.examples import Example
from audiorl.rewards.chat import JudgeError
from tests.conftest import make_omni
from tests.support.chat_servers import ChatServer
from tests.support.learning import learn
from tests.support.reward_servers import serving

LANGUAGES = ("de", "en", "de", "en", "de", "fr")


def rows() -> list[dict[str, Any]]:
    """Two questions each about three recordings; the last one is open."""
    asked = [
        {"id": f"q{i}", "audio": f"{i // 2}.wav", "question": f"Which {i}?", "language": LANGUAGES[i], "score": i % 3}
        for i in range(6)
    ]
    answers = ("yes", "yes", "no", "no", "yes", "why")
    return [
        row | {"answer": answer} | ({} if i == 5 else {"choices": ["yes", "no"]})
        for i, (row, answer) in enumerate(zip(asked, answers, strict=True))
    ]


def write(folder: Path, content: list[dict[str, Any]], name: str = "qa.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, speech: list[Utterance]) -> Path:
    """qa.jsonl with its recordings."""
    folder = tmp_path_factory.mktemp("qa")
    for i in range(3):
        soundfile.write(folder / f"{i}.wav", speech[25 * i].clip.load(16_000), 16_000)
    write(folder, rows())
    return folder


@pytest.fixture(scope="module")
def models(folder: Path) -> Path:
    """The models `start`, and `trained`, which has learned the answers but the last."""
    samples = read_samples(folder / "qa.jsonl", think=False).samples
    policy = make_omni()
    policy.save(folder / "start")
    learn(policy, [Example(s, s.references[0]) for s in samples[:5]], steps=40)
    policy.save(folder / "trained")
    return folder


def options(folder: Path, out: Path | None, **given: Any) -> QAOptions:
    return QAOptions(**{"data": folder / "qa.jsonl", "out": out, "max_new_tokens": 4, "device": "cpu", **given})


@pytest.mark.slow
def test_checkpoint_against_its_start_and_blind(models: Path, tmp_path: Path, capsys) -> None:
    command = ["eval", "qa", "--data", models / "qa.jsonl", "--model", models / "trained", "--out", tmp_path]
    command += ["--baseline", models / "start", "--blind", "silence", "--by", "language", "score", "--device", "cpu"]
    assert cli.main([*map(str, command), "--max-new-tokens", "4"]) == 0
    scores = json.loads((tmp_path / "scores.json").read_text())
    total = scores["total"]
    assert total["accuracy"] == pytest.approx(5 / 6) and total["clusters"] == 3 and total["low"] < 5 / 6
    assert total["baseline"]["accuracy"] == 0 and total["change"]["accuracy"] == pytest.approx(5 / 6)
    assert total["difference"]["accuracy"] == pytest.approx(5 / 6 - total["blind"]["accuracy"])
    assert {name: (c["accuracy"], c["n"]) for name, c in scores["language"].items()} == {
        "de": (1, 3), "en": (1, 2), "fr": (0, 1)
    }  # fmt: skip
    assert list(scores["score"]) == ["0", "1", "2"] and scores["guessing"] == 0.5
    printed = capsys.readouterr().out
    assert (
        "language: fr" in printed
        and "against the baseline" in printed
        and "guessing among the choices: 50.0%" in printed
    )
    page = (tmp_path / "qa.html").read_text()
    assert "Wrong by the baseline, right now" in page and page.count("<audio") >= 5 and "language: de" in page
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["right"] for row in results] == [True] * 5 + [False] and results[0]["language"] == ["de"]

    # The same command with other fields asks nothing again, and needs no model; another model is refused.
    moved = options(models, tmp_path, model=str(models / "trained"), by=("answer",))
    assert list(main(moved, engine=None)["answer"]) == ["no", "why", "yes"]
    with pytest.raises(ValueError, match="belongs to a run with other settings"):
        main(replace(moved, model=str(models / "start")))
    # What was answered is what others' answers are compared with.
    recorded = str(tmp_path / "predictions.jsonl")
    again = main(options(models, None, score=tmp_path / "baseline" / "predictions.jsonl", baseline=recorded))
    assert again["total"]["change"]["accuracy"] == pytest.approx(-5 / 6)


def test_an_interrupted_call_goes_on(folder: Path, tmp_path: Path, scripted: Callable[..., Any]) -> None:
    texts = {f"q{i}": "<answer>yes</answer>" for i in range(6)}
    given = options(folder, tmp_path, model="m", batch_size=2)
    with pytest.raises(KeyboardInterrupt):
        main(given, engine=scripted(texts, fail_after=2))
    engine = scripted(texts)
    total = main(given, engine=engine)["total"]
    assert engine.asked == ["q2", "q3", "q4", "q5"] and total["accuracy"] == 0.5 and total["exact"]["accuracy"] == 0.5


def test_scores_by_hand(folder: Path, tmp_path: Path, capsys) -> None:
    said = {"q0": "Yes.", "q1": "<think>it is</think> (B)", "q2": "no", "q3": "", "q5": "**Why?**"}
    file = write(tmp_path, [{"id": id, "text": text} for id, text in said.items()], "said.jsonl")
    scores = main(options(folder, None, score=file, by=("language", "score"), clusters="language"))
    total = scores["total"]
    assert (total["accuracy"], total["missing"], total["unanswered"]) == (0.5, 1, 1)
    assert total["exact"]["accuracy"] == pytest.approx(1 / 6) and total["clusters"] == 3
    # Languages have 2 of 3, 0 of 2 and 1 of 1: three times the same one is 1 draw of 27.
    assert (total["low"], total["high"]) == (0, 1)
    fewer = main(options(folder, None, score=file, clusters="score", limit=2))["total"]
    fewest = main(options(folder, None, score=file, limit=1))["total"]
    assert (fewest["accuracy"], fewest["low"], fewest["high"]) == (1, pytest.approx(0.2065, abs=1e-4), 1)
    assert "clusters" not in fewer and (fewer["low"], fewer["high"]) == bootstrap_interval([1, 0])
    assert "word for word" in capsys.readouterr().out


def test_open_answers_by_a_judge(folder: Path, tmp_path: Path) -> None:
    """A judge decides about open answers alone, once each; without a verdict the command ends."""
    file = write(
        tmp_path, [{"id": f"q{i}", "text": "for some reason" if i == 5 else "yes"} for i in range(6)], "a.jsonl"
    )
    server = ChatServer(lambda answer: float(answer == ["for some reason"]))
    with serving(server.app) as url:
        given = options(folder, tmp_path / "out", score=file, judge="judge", judge_url=f"{url}/v1")
        total = main(given)["total"]
        assert (total["accuracy"], total["matched"]["accuracy"]) == (pytest.approx(4 / 6), 0.5)
        assert main(given)["total"] == total and len(server.bodies) == 1
        with pytest.raises(JudgeError, match="status 404"):
            main(replace(given, out=tmp_path / "other", judge_url=f"{url}/v2"))


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        ({"answer": None}, {}, r"bad.jsonl: row 2, field 'answer': empty"),
        ({"answer": "maybe"}, {}, r"bad.jsonl: row 2, field 'answer': 'maybe' is not among the choices"),
        ({"audio": "none.wav"}, {}, r"bad.jsonl: row 2, field 'audio': .*none.wav"),
        ({}, {"by": ("lang",)}, r"no row has the field 'lang'; there are answer, task, language, score"),
        ({}, {"clusters": "speaker"}, r"no row has the field 'speaker'"),
        ({}, {"blind": "darkness"}, r"no view is called 'darkness'"),
        ({}, {"score": "said.jsonl", "model": "m"}, r"--score: the answers are there; leave --model out"),
        ({}, {"score": "said.jsonl", "blind": "silence", "model": None}, r"--blind asks a model"),
        ({}, {"score": "said.jsonl", "model": None}, r"said.jsonl: row 2, field 'text': missing"),
        ({}, {"model": None}, r"give --data, --model and --out to run a model"),
        ({}, {"data": None}, r"give --data, --model and --out"),
    ],
)
def test_what_cannot_be_measured(
    folder: Path,
    tmp_path: Path,
    scripted: Callable[..., Any],
    change: dict[str, Any],
    given: dict[str, Any],
    message: str,
) -> None:
    data = write(folder, [row | (change if i == 1 else {}) for i, row in enumerate(rows())], "bad.jsonl")
    said = write(tmp_path, [{"id": "q0", "text": "yes"}, {"id": "q1", "answer": "no"}], "said.jsonl")
    given = given | ({"score": said} if "score" in given else {})
    with pytest.raises(ValueError, match=message):
        main(options(folder, tmp_path / "out", **{"data": data, "model": "m", **given}), engine=scripted({}))


def test_columns_of_other_names(folder: Path, tmp_path: Path) -> None:
    other = [{"wav": "0.wav", "prompt": "?", "answer": "yes"}]
    file = write(tmp_path, [{"id": "0.wav", "text": "Yes"}], "said.jsonl")
    given = options(folder, None, data=write(folder, other, "other.jsonl"), score=file)
    assert main(replace(given, columns=("audio=wav", "question=prompt")))["total"]["accuracy"] == 1
    with pytest.raises(ValueError, match="--columns 'wav': give WANTED=NAME"):
        main(replace(given, columns=("wav",)))


def test_transcripts_are_sent_to_asr(folder: Path, tmp_path: Path) -> None:
    data = write(folder, [{"audio": "0.wav", "text": "hello"}], "asr.jsonl")
    with pytest.raises(ValueError, match=r"asr.jsonl: transcripts, no questions; measure them with audiorl eval asr"):
        main(options(folder, tmp_path / "out", data=data, model="m"))
