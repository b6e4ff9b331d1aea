"""Perplexity and questions of a model without audio, against transformers and by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from audiorl.data.text import bundled_questions, read_passages, read_questions
from audiorl.eval.text import TextOptions, TextResults, main, measure_text
from tests.conftest import make_omni, make_text

PASSAGES = ["What is said? Which language is it, and who speaks?", "yes no why English Spanish French yes"]


def test_perplexity_is_that_of_transformers() -> None:
    policy = make_text()
    result = measure_text(policy, PASSAGES, [])
    nats, tokens = 0.0, 0
    for text in PASSAGES:
        ids = torch.tensor([policy.tokenizer.encode(text, add_special_tokens=False)])
        with torch.no_grad():
            loss = policy.model(input_ids=ids, labels=ids).loss  # the mean over all tokens but the first
        nats += float(loss) * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    scores = result.scores()
    assert result.passages[:, 1].sum() == tokens
    assert scores["perplexity"]["value"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert scores["nats_per_token"]["value"] == pytest.approx(nats / tokens, rel=1e-5)
    assert "accuracy" not in scores


def test_a_speech_model_reads_text_and_packing_changes_nothing() -> None:
    policy = make_omni()
    questions = bundled_questions()[::12]
    together, alone = measure_text(policy, PASSAGES, questions), [measure_text(policy, [p], []) for p in PASSAGES]
    np.testing.assert_allclose(together.passages, np.concatenate([r.passages for r in alone]), rtol=1e-4)
    one = [measure_text(policy, [], [q]).correct[0] for q in questions]
    assert together.correct.tolist() == one


def test_a_model_that_knows_the_answers(monkeypatch) -> None:
    """The most probable choice wins."""
    questions = bundled_questions()[:8]
    totals = [-1.0 if (c == q.answer) != (q is questions[0]) else -2.0 for q in questions for c in q.choices]
    monkeypatch.setattr(
        "audiorl.eval.text.answer_logprobs", lambda _, answers: [torch.tensor([t]) for t in totals] if answers else []
    )
    assert measure_text(make_text(), [], questions).correct.tolist() == [0.0] + [1.0] * 7


def test_changes_are_paired() -> None:
    before = TextResults(np.array([[20.0, 10, 40], [40.0, 10, 40]]), np.array([1.0, 0.0, 1.0, 1.0]))
    after = TextResults(before.passages + np.array([10, 0, 0]), np.array([1.0, 0.0, 0.0, 1.0]))
    change = after.scores(before)["change"]
    assert {name: round(c["value"], 6) for name, c in change.items()} == {
        "nats_per_token": 1.0,
        "bits_per_byte": round(20 / math.log(2) / 80, 6),
        "accuracy": -0.25,
    }
    assert (change["nats_per_token"]["low"], change["nats_per_token"]["high"]) == pytest.approx((1.0, 1.0))
    assert change["accuracy"]["low"] < -0.25 < change["accuracy"]["high"] <= 0
    right = TextResults(before.passages, np.ones(10)).scores()["accuracy"]
    assert (right["value"], right["low"], right["high"]) == pytest.approx((1.0, 0.72, 1.0), abs=0.01)  # Wilson's


def test_bundled_text() -> None:
    passages, questions = read_passages("bundled"), read_questions("bundled")
    assert len(passages) > 50 and len(questions) == len({q.id for q in questions}) == 107
    assert all(len(set(q.choices)) == 4 and q.answer in q.choices for q in questions)
    by_text = {q.question: q.answer for q in questions}
    assert by_text["Which day comes after Sunday?"] == "Monday" and by_text["How much is two plus one?"] == "three"
    assert read_passages("bundled", 3) == passages[:3]


def test_files_and_their_errors(tmp_path: Path) -> None:
    file, rows = tmp_path / "text.txt", tmp_path / "rows.jsonl"
    file.write_text("One\nline.\n\n\nAnother one.\n")
    assert read_passages(file) == ["One line.", "Another one."]
    rows.write_text('{"text": " a b "}\n')
    assert read_passages(rows) == ["a b"]
    good = {"question": "Why?", "choices": ["a", "b"], "answer": "b"}
    for bad, message in (
        ({"question": ""}, "row 1, field 'question'"),
        ({"choices": ["a"]}, "row 1, field 'choices'"),
        ({"answer": "c"}, "row 1, field 'answer': 'c' is not among"),
    ):
        rows.write_text(json.dumps(good | bad) + "\n")
        with pytest.raises(ValueError, match=message):
            read_questions(rows)
    file.write_text("\n\n")
    for call, message in (
        (lambda: read_passages(rows), "row 1, field 'text': missing; give a passage"),
        (lambda: read_passages(file), "no passage of text"),
        (lambda: measure_text(make_text(), ["a"], []), "passage 1: 'a' is one token"),
        (lambda: main(TextOptions(model="m", text="none", questions="none")), "nothing to measure"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_command(tmp_path: Path, capsys) -> None:
    for name, seed in (("start", 0), ("trained", 1)):
        make_omni(seed=seed).save(tmp_path / name)
    trained, start = (str(tmp_path / name) for name in ("trained", "start"))
    scores = main(TextOptions(model=trained, baseline=start, limit=4, out=tmp_path / "out"))
    assert scores["passages"] == scores["questions"] == 4
    assert set(scores["change"]) == {"nats_per_token", "bits_per_byte", "accuracy"}
    change = scores["nats_per_token"]["value"] - scores["baseline"]["nats_per_token"]["value"]
    assert scores["change"]["nats_per_token"]["value"] == pytest.approx(change)
    assert json.loads((tmp_path / "out" / "scores.json").read_text()) == scores
    assert "model − baseline" in capsys.readouterr().out
