"""The same questions by audio and by text, on a tiny model that learned to read and not to listen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from audiorl import cli
from audiorl.algos.packing import pack_experiences
from audiorl.data.corpus import Utterance
from audiorl.data.manifest import read_samples
from audiorl.data.views import views_of
from audiorl.eval._questions import choice_logprobs
from audiorl.eval.gap import GapOptions, gap_rows, gap_scores, main
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, experience
from audiorl.types import Sample
from tests.conftest import make_omni
from tests.support.learning import learn

CHOICES = ("yes", "no", "why")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, speech: list[Utterance]) -> Path:
    """rows.jsonl: six questions, each with a transcript that its answer is in."""
    folder = tmp_path_factory.mktemp("questions")
    rows = []
    for i in range(6):
        soundfile.write(folder / f"{i}.wav", speech[25 * i].clip.load(16_000), 16_000)
        answer = CHOICES[i % 3]
        row = {"id": f"q{i}", "audio": f"{i}.wav", "question": "What is said?", "choices": CHOICES, "answer": answer}
        rows.append({**row, "text": f"who says {answer} {answer}"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Sample]:
    return list(read_samples(folder / "rows.jsonl", think=False).samples)


@pytest.fixture(scope="module")
def reader(samples: list[Sample]) -> AudioPolicy:
    """A model that learned the answers from the transcripts alone."""
    policy = make_omni()
    views = views_of(samples[:3], "transcript")
    learn(policy, [Example(s, f"<answer>{s.references[0]}</answer>") for s in views], steps=60)
    return policy


def options(folder: Path, out: Path, **other: object) -> GapOptions:
    settings = {"data": folder / "rows.jsonl", "model": "m", "out": out, "max_new_tokens": 16, "device": "cpu"}
    return GapOptions(**{**settings, **other})  # type: ignore[arg-type]


def test_reads_but_does_not_listen(
    folder: Path, samples: list[Sample], reader: AudioPolicy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = main(options(folder, tmp_path / "reader"), reader)
    assert scores["right_text"]["mean"] == scores["choice_text"]["mean"] == 1.0
    assert scores["gap"]["mean"] == pytest.approx(1 - scores["right_audio"]["mean"]) and scores["gap"]["low"] > 0
    assert scores["alike"]["mean"] == pytest.approx(scores["right_audio"]["mean"])  # every text answer is right
    assert scores["jsd"]["mean"] > 0.05 and "text − audio" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "reader" / "results.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [s.id for s in samples]
    assert all(sum(row["probabilities_text"]) == pytest.approx(1) for row in rows)
    page = (tmp_path / "reader" / "gap.html").read_text()
    assert page.count("<audio") == sum(row["gap"] > 0 for row in rows) > 0

    untrained = main(options(folder, tmp_path / "after", baseline=tmp_path / "reader"), make_omni())
    change = untrained["changes"]["right_text"]
    assert change[0] == pytest.approx(untrained["right_text"]["mean"] - 1) and change[1] <= change[0] <= change[2]
    assert untrained["closed"] == pytest.approx(1 - untrained["gap"]["mean"] / scores["gap"]["mean"])
    same = main(options(folder, tmp_path / "same", baseline=tmp_path / "reader" / "results.jsonl"), reader)
    assert same["changes"]["gap"] == [0, 0, 0] and same["closed"] == 0


def test_probabilities_of_choices_by_hand(samples: list[Sample], reader: AudioPolicy) -> None:
    (logprobs_C,) = choice_logprobs(reader, samples[:1], [""])
    totals = []
    for choice in CHOICES:
        turn = experience(reader, Example(samples[0], f"<answer>{choice}</answer>"))
        with torch.no_grad():
            totals.append(float(reader.forward(pack_experiences([turn])).logprobs.sum()))
    assert logprobs_C is not None
    assert np.exp(logprobs_C) == pytest.approx(np.exp(totals) / np.exp(totals).sum(), abs=1e-4)
    (thoughtful,) = choice_logprobs(reader, samples[:1], ["<think>why</think><answer>no</answer>"])
    assert thoughtful is not None and not np.allclose(thoughtful, logprobs_C)


def test_equal_views_have_no_gap(samples: list[Sample], reader: AudioPolicy) -> None:
    answers = ["<answer>yes</answer>", "why", "", "no", "<answer>B</answer>", "?"]
    rows = gap_rows(reader, samples, samples, answers, answers)
    scores = gap_scores(rows)
    assert scores["gap"]["mean"] == 0 and abs(scores["kl"]["mean"]) < 1e-6 and scores["choice_gap"]["mean"] == 0
    assert [row["alike"] for row in rows] == [1, 1, 0, 1, 1, 0]  # no word, no agreement
    assert [row["right_audio"] for row in rows] == [1, 0, 0, 0, 1, 0]
    open_ended = [replace(s, choices=()) for s in samples]
    assert "kl" not in gap_scores(gap_rows(reader, open_ended, open_ended, answers, answers))


def test_bad_input(folder: Path, reader: AudioPolicy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    silent = [{**r, "text": "" if i == 4 else "x"} for i, r in enumerate(rows)]
    unanswered = [{k: v for k, v in r.items() if k != "answer"} for r in rows]
    for name, written in (("silent", silent), ("open", unanswered)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in written))
    main(options(folder, tmp_path / "fewer", limit=2), reader)
    main(options(folder, tmp_path / "other", limit=2), reader)
    settings = tmp_path / "other" / "gap.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "tokenizer": "another"}))
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text('{"id": "q0", "right_audio": 1, "right_text": "1", "gap": 0, "alike": 1}\n')
    for number, (given, message) in enumerate(
        (
            ({"data": folder / "silent.jsonl"}, "sample 'q4': no transcript"),
            ({"data": folder / "open.jsonl"}, r"open\.jsonl: sample 'q0': no reference; give rows with answers"),
            ({"baseline": tmp_path}, r"no results\.jsonl there"),
            ({"baseline": tmp_path / "fewer"}, "no row 'q2'; measure both models on the same questions"),
            ({"baseline": tmp_path / "other", "limit": 2}, "measured with another tokenizer"),
            ({"baseline": damaged}, r"damaged\.jsonl: row 1, field 'right_text': '1' is no number"),
        )
    ):
        with pytest.raises(ValueError, match=message):
            main(options(folder, tmp_path / str(number), **given), reader)
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(SystemExit):
        words = ("--data", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out"))
        cli.main(["eval", "gap", "--model", "tiny", *words])
    assert "rows.jsonl: empty; write one JSON object a line" in capsys.readouterr().err
