"""What runs measure: held-out samples and unseen speakers, by the reward and by measures that nothing optimises."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from audiorl.cli.train import print_results
from audiorl.data.corpus import Utterance
from audiorl.data.prompts import asr_prompt
from audiorl.eval import _phases as phases
from audiorl.eval._common import paired_changes
from audiorl.eval._phases import ErrorRate, Evaluation, measures_of
from audiorl.eval.metrics.corpus import UNSEEN
from audiorl.models import AudioPolicy
from audiorl.recipes._common import check_unseen_speakers
from audiorl.report import write_report
from audiorl.report.summary import doubts, evaluation_rows, not_measured
from audiorl.rewards import CharAccuracy, Repetition, WeightedSum, WordAccuracy
from audiorl.run.folder import Run
from audiorl.types import Rollout, Sample, Segment
from tests.conftest import make_omni


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", "asr_grpo.py", [], {})


@pytest.fixture
def transcripts(speech: list[Utterance]) -> list[Sample]:
    return [Sample(u.id, asr_prompt(u.clip), (u.text,), (), "asr", {"speaker": u.speaker}) for u in speech]


def segment_of(text: str) -> Segment:
    return Segment(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long), torch.zeros(0), text)


def test_every_set_is_measured_with_its_changes(run: Run, transcripts: list[Sample], monkeypatch) -> None:
    samples = transcripts
    reward = WeightedSum.of(accuracy=WordAccuracy(), repetition=(Repetition(), 0.1))
    outside = WeightedSum.of(as_written=CharAccuracy("none"))
    evaluation = Evaluation(reward, samples[:3], 6, {UNSEEN: samples[-2:]}, outside)
    policy = make_omni()
    evaluation.measure(run, "before", policy)
    assert evaluation.probe(policy)()["accuracy"] == run.result("before")["accuracy"]
    entries = json.loads((run.dir / "eval.json").read_text())
    assert list(entries) == ["unseen_before", "before"]
    assert set(entries["before"]["outside"]) == {"as_written"} and "changes" not in entries["before"]
    row = json.loads((run.dir / "eval" / "unseen_before.jsonl").read_text().splitlines()[0])
    assert set(row["parts"]) == {"accuracy", "repetition"} and set(row["outside"]) == {"as_written"}

    # after "training" the policy says what is said for the first sample
    said = {samples[0].id: samples[0].references[0]}
    real = phases.answer

    def learned(policy: AudioPolicy, samples, reward, tokens, title):
        rollouts = [
            replace(r, segments=(replace(r.segments[0], text=said.get(r.sample.id, r.text)),))
            for r in real(policy, samples, reward, tokens)
        ]
        return [r.with_score(s) for r, s in zip(rollouts, reward(rollouts), strict=True)]

    monkeypatch.setattr(phases, "answer", learned)
    evaluation.measure(run, "after", policy)
    entries = json.loads((run.dir / "eval.json").read_text())
    mean, low, high = entries["after"]["changes"]["accuracy"]
    assert mean == pytest.approx(1 / 3) and (low, high) == pytest.approx((0, 1))
    assert entries["after"]["changes"]["as_written"][0] == pytest.approx(1 / 3, abs=0.1)
    assert entries["unseen_after"]["changes"]["accuracy"] == [0.0, 0.0, 0.0]
    written = (run.dir / "eval.json").read_text()
    evaluation.measure(run, "after", policy)  # a finished phase is not done again
    assert (run.dir / "eval.json").read_text() == written
    table = {row.label: row for row in evaluation_rows(run.dir)}
    assert {"accuracy", "accuracy, unseen", "as_written (not optimised)"} <= set(table)
    assert table["accuracy"].change_text() == "+33.3 points (0.0 to +100.0)"
    assert not_measured(entries) == []


def test_transcripts_are_reported_as_errors_by_language(run: Run, transcripts: list[Sample], monkeypatch) -> None:
    words = {"a": ("one two three", "de"), "b": ("four", "en"), "c": ("five six", "de"), "hum": ("", None)}
    a, b, c, hum = (
        replace(s, id=id, references=(text,), metadata={"language": language})
        for s, (id, (text, language)) in zip(transcripts, words.items(), strict=False)
    )
    said = {"a": "one two", "b": "four five six", "c": "five six", "hum": "noise"}

    def speaks(policy: object, samples, reward, tokens, title="") -> list[Rollout]:
        rollouts = [Rollout(s, (segment_of(said[s.id]),), s.id) for s in samples]
        return [r.with_score(score) for r, score in zip(rollouts, reward(rollouts), strict=True)]

    monkeypatch.setattr(phases, "answer", speaks)
    reward = WeightedSum.of(accuracy=WordAccuracy(), repetition=(Repetition(), 0.1))
    evaluation = Evaluation(reward, [a, b, c], 6, {"no_speech": [hum]}, errors=ErrorRate())
    policy = make_omni()
    evaluation.measure(run, "before", policy)
    assert evaluation.probe(policy)() == {"wer": 3 / 6, "de/wer": 1 / 5, "en/wer": 2}
    said |= {"b": "four five", "hum": ""}
    evaluation.measure(run, "after", policy)
    entries = json.loads((run.dir / "eval.json").read_text())
    before, after = entries["before"], entries["after"]
    assert (before["wer"], after["wer"], after["n"]) == (3 / 6, 2 / 6, 3) and "accuracy" not in after
    assert after["by_task"]["de"]["wer"] == 1 / 5 and after["by_task"]["en"]["changes"]["wer"] == [-1, -1, -1]
    assert after["changes"]["wer"][0] == pytest.approx(-1 / 6) and set(after["changes"]) == {"wer", "repetition"}
    assert (entries["no_speech_before"]["silent"], entries["no_speech_after"]["silent"]) == (0, 1)
    assert entries["no_speech_after"]["changes"]["silent"] == [1, 1, 1]
    rows = [json.loads(line) for line in (run.dir / "eval" / "after.jsonl").read_text().splitlines()]
    assert [row["correct"] for row in rows] == [False, False, True] and rows[1]["parts"]["wer"] == 1
    console = Console(record=True, width=160)
    print_results(run.dir, console)
    table = console.export_text()
    assert "WER, de" in table and "−16.7 points" in table and "nothing written for silence" in table
    page = write_report(run.dir).read_text()
    assert "Held-out WER fell from 50.0%" in page and "WER, en" in page and "accuracy" not in table


def test_hotwords_are_counted_against_the_reference_that_is_nearest() -> None:
    sample = Sample("a", (), ("call mister Kowalski", "call Mr Kowalski"), (), "asr", {"hotwords": ["Kowalski"]})
    row = ErrorRate().columns(Rollout(sample, (segment_of("call Mr Kowalsky"),), "g"))
    assert (row["errors"], row["b_wer"], row["u_wer"]) == (1, [1, 1], [0, 2])


def test_pairs_are_by_id_and_skipped_rows_do_not_count(tmp_path: Path) -> None:
    def written(name: str, *rows: tuple[str, float, dict[str, float]]) -> Path:
        lines = [json.dumps({"id": id, "parts": {"accuracy": a}, "outside": outside}) for id, a, outside in rows]
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        return tmp_path / name

    before = written("before.jsonl", ("a", 0.0, {"x": 0.5}), ("b", 1.0, {}))
    after = written("after.jsonl", ("c", 1.0, {"x": 1.0}), ("b", 1.0, {"x": 1.0}), ("a", 0.5, {"x": 0.25}))
    changes = paired_changes(measures_of(before), measures_of(after))
    assert changes == {"accuracy": [0.25, 0.0, 0.5], "x": [-0.25, -0.25, -0.25]}


def entries(unseen: list[float], outside: list[float], accuracy: tuple[float, ...] = (0.1, 0.05, 0.15)) -> dict:
    def entry(value: float, chrf: float, changes: dict) -> dict:
        return {"accuracy": value, "n": 100, "chrf": chrf, "outside": {"chrf": [0, 1]}, "changes": changes}

    return {
        "before": entry(0.5, 30.0, {}),
        "after": entry(0.5 + accuracy[0], 30.0 + outside[0], {"accuracy": list(accuracy), "chrf": outside}),
        "unseen_before": {"accuracy": 0.4, "n": 50},
        "unseen_after": {"accuracy": 0.4 + unseen[0], "n": 50, "changes": {"accuracy": unseen}},
        "unseen_control": {"accuracy": 0.4, "n": 50},
    }


def doubted(entries: dict[str, Any], steps: Sequence[dict[str, Any]] = ()) -> tuple[str, list[str]]:
    """What rose, and each doubt in a line."""
    rise, found = doubts(entries, steps)
    return rise, [f"{d.title}: {', '.join(f'{r.label} {r.change_text()}' for r in d.rows)}" for d in found]


def test_doubts_name_measures_and_numbers() -> None:
    rise = "accuracy rose by +10.0 points (+5.0 to +15.0)"
    assert doubted(entries([0.08, 0.02, 0.14], [3.0, 1.0, 5.0])) == (rise, [])
    unseen = "Voices that training never heard: accuracy, unseen"
    assert doubted(entries([0.01, -0.04, 0.06], [3.0, 1.0, 5.0])) == (rise, [f"{unseen} +1.0 points (−4.0 to +6.0)"])
    rise, both = doubted(entries([-0.1, -0.2, -0.01], [-3.0, -5.0, -1.0]))
    assert both[1:] == ["Measures that nothing rewarded: chrF (not optimised) −3 (−5 to −1)"]
    # Where the headline itself did not rise for sure, the others are not compared with it.
    rise, (itself, lost) = doubted(entries([-0.1, -0.2, -0.01], [-3.0, -5.0, -1.0], (0.02, -0.01, 0.05)))
    assert rise == "" and itself.startswith("The result itself: accuracy") and lost.startswith("Parts that lost:")
    assert doubts({"before": {"accuracy": 0.5, "n": 3}}) == doubts({}) == ("", [])
    worse = {"before": {"mel_distance": 4.0}, "after": {"mel_distance": 5.0}}
    assert doubted(worse) == ("", ["The result itself: mel distance +1"])


def test_speech_that_gets_monotone_is_named() -> None:
    before = {"accuracy": 0.5, "f0_range": 9.0, "energy_range": 20.0, "pauses": 0.1, "n": 9}
    changes = {"accuracy": [0.1, 0.05, 0.15], "f0_range": [-3.0, -4.0, -2.0], "energy_range": [-1.0, -3.0, 1.0]}
    after = {**before, "accuracy": 0.6, "f0_range": 6.0, "energy_range": 19.0, "changes": changes}
    rise, (line,) = doubted({"before": before, "after": after})
    assert line == "Speech that became flatter: F0 range (semitones) −3 (−4 to −2)" and rise.startswith("accuracy rose")
    livelier = {**after, "changes": {**changes, "f0_range": [3.0, 2.0, 4.0]}}
    assert doubted({"before": before, "after": livelier})[1] == []


def test_judges_of_speech_are_compared_with_the_reward() -> None:
    """Where all held-out measures are outside ones, what training optimised is the reward of its steps."""
    steps = [{"phase": "grpo", "reward/mean": 0.5 + 0.02 * i + 0.01 * (i % 2)} for i in range(20)]
    before = {"accuracy": 0.5, "n": 9, "outside": {"accuracy": [0, 1]}}
    measured = {"before": before, "after": before | {"accuracy": 0.52, "changes": {"accuracy": [0.02, -0.1, 0.1]}}}
    rise, (line,) = doubted(measured, steps)
    # means 0.544 and 0.846, both variances 0.00103: ± 1.96 sqrt(2 · 0.00103 / 5) = ± 0.040
    assert rise == "the mean reward rose by +0.302 (+0.262 to +0.342) from the first to the last 5 steps"
    assert line == "Measures that nothing rewarded: accuracy (not optimised) +2.0 points (−10.0 to +10.0)"
    assert doubted(measured, steps[::-1]) == doubted(measured, steps[:9]) == ("", [])
    measured["after"]["changes"] = {"accuracy": [0.02, 0.01, 0.03]}
    assert doubted(measured, steps)[1] == []


def test_report_and_terminal_show_it(run: Run) -> None:
    for name, entry in entries([-0.1, -0.2, -0.01], [-3.0, -5.0, -1.0]).items():
        run.write_result(name, entry)
    console = Console(record=True, width=160)
    print_results(run.dir, console)
    shown = " ".join(console.export_text().split())
    page = write_report(run.dir).read_text()
    for text in (shown, page):
        assert "What did not get better" in text and "ccuracy rose by +10.0 points (+5.0 to +15.0)" in text
        assert "−10.0 points (−20.0 to −1.0)" in text and "chrF (not optimised)" in text
    assert "unseen_control" not in shown  # a column of the set, not of its own
    assert "unseen speakers: none" not in page
    alone = {name: entry for name, entry in entries([0.1, 0, 0.2], [1, 0, 2]).items() if "unseen" not in name}
    alone["after"] = {"accuracy": 0.6, "n": 100, "changes": {"accuracy": [0.1, 0.05, 0.15]}}
    assert not_measured(alone) == ["unseen speakers: none were measured (--unseen)"]
    del alone["before"]["outside"]
    assert len(not_measured(alone)) == 2
    assert not_measured(alone, {"path": "new"}) == []  # a recipe without such options


def test_a_measure_that_the_reward_optimises_is_not_outside() -> None:
    reward = WeightedSum.of(accuracy=WordAccuracy())
    with pytest.raises(ValueError, match="outside measure 'words': the reward optimises it"):
        Evaluation(reward, [], 6, outside=WeightedSum.of(words=WordAccuracy()))
    Evaluation(reward, [], 6, outside=WeightedSum.of(words=WordAccuracy("english")))


def test_strangers_speak_in_no_training_row(transcripts: list[Sample], capsys) -> None:
    named = [(s.id, s.metadata["speaker"]) for s in transcripts]
    check_unseen_speakers(named[:1], [(id, speaker) for id, speaker in named if speaker != named[0][1]])
    with pytest.raises(ValueError, match=rf"--unseen: {named[1][0]!r} is spoken by .* in the training row"):
        check_unseen_speakers(named[:1], named[1:2])
    capsys.readouterr()
    check_unseen_speakers(named[:1], [("x", "")])
    assert capsys.readouterr().out.startswith("1 of 1 rows of --unseen name no speaker")
