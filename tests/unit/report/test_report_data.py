"""Reading, arranging and summarising, without drawing."""

import json
import math
import shlex

import pytest
from matplotlib.figure import Figure

from audiorl.eval.metrics.corpus import wilson
from audiorl.report import write_report
from audiorl.report.charts import PAGE, Series, draw_bars, offsets, own_steps, series
from audiorl.report.page import arrange, changed_pairs
from audiorl.report.run import load_run
from audiorl.report.summary import (
    Measure,
    doubts,
    entry_names,
    evaluation_rows,
    measures,
    sentence,
    sign_test,
)


def rows(phase, *steps, **values):
    return [{"phase": phase, "step": s, **values} for s in steps]


# ------------------------------------------------------------------------------------------------------ run folder


def test_the_command_is_the_one_that_started_the_run(run_dir, monkeypatch):
    monkeypatch.chdir(run_dir.parent)
    (run_dir.parent / "a b").symlink_to(run_dir)
    options = ["--rl.lr", "2e-5", "--title", "it's"]
    words = ["audiorl", "train", "recipes/think_qa.py", *options, "--out", "a b"]
    assert shlex.split(load_run("a b").command) == words
    (run_dir / "config.json").unlink()
    assert load_run("a b").command == ""


def test_a_supervised_run_does_not_lack_rollouts(run_dir):
    for file in (run_dir / "rollouts").iterdir():
        file.unlink()
    assert load_run(run_dir).missing == ("rollouts/: no rollouts were recorded",)
    (run_dir / "metrics.jsonl").write_text('{"seq": 0, "phase": "sft", "step": 1, "sft/loss": 1.0}\n')
    assert load_run(run_dir).missing == ()


def test_damage_and_absence_are_told_apart(run_dir, tmp_path):
    with pytest.raises(ValueError, match="no such run folder"):
        load_run(tmp_path / "nowhere")
    (run_dir / "eval.json").write_text("{")
    with pytest.raises(ValueError, match=r"eval\.json: not JSON"):
        load_run(run_dir)


# ---------------------------------------------------------------------------------------------------------- series


def test_phases_follow_one_another_and_the_control_branches():
    metrics = rows("sft", 1, 100) + rows("grpo", 1, 50) + rows("control", 1, 50)
    assert offsets(metrics) == {"sft": 0, "grpo": 100, "control": 100}


def test_phases_that_count_on_are_not_moved():
    assert offsets(rows("sft", 1, 100) + rows("grpo", 101, 150)) == {"sft": 0, "grpo": 0}


def test_series_skips_what_is_not_finite_and_keeps_the_last_of_a_repeated_step():
    metrics = rows("grpo", 2, kl=5.0) + rows("grpo", 1, kl=math.nan) + rows("grpo", 2, kl=1.0) + rows("grpo", 3, kl=2)
    assert series(metrics, "kl") == [Series("kl", "grpo", (2.0, 3.0), (1.0, 2.0))]


def test_one_phase_alone_counts_its_own_steps():
    shift = {"sft": 0.0, "grpo": 100.0, "control": 100.0}
    lines = [[Series("r", "grpo", (101, 102), (0, 1)), Series("r", "control", (101,), (0,))]]
    moved, label = own_steps(lines, shift)
    assert [one.x for one in moved[0]] == [(1, 2), (1,)]
    assert label == "grpo step"
    both = [[Series("r", "sft", (1,), (0,)), *lines[0]]]
    assert own_steps(both, shift) == (both, "step")


def test_the_end_of_a_curve_is_not_its_last_lucky_step():
    values = tuple([0.5] * 39 + [1.0])
    assert Series("r", "grpo", tuple(range(40)), values).end == pytest.approx(0.625)


# ---------------------------------------------------------------------------------------------------------- panels


def test_every_metric_lands_in_exactly_one_panel():
    names = ["reward/mean", "reward/accuracy", "reward/std", "kl", "kl/beta", "eval/accuracy", "eval/wer", "lr", "odd"]
    main, more = arrange(names)
    assert sorted(n for p in main + more for n in p.names) == sorted(names)
    panels = {p.title: p for p in main + more}
    assert panels["Reward parts"].names == ("reward/accuracy",)
    assert panels["KL to the reference"].names == ("kl",)
    assert panels["odd"].names == ("odd",)
    assert panels["Held-out accuracy"].style == "points"


# ---------------------------------------------------------------------------------------------------------- result


def test_wilson_by_known_values():
    low, high = wilson(0.8, 10)  # 8 of 10
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson(0.0, 5)[0] == pytest.approx(0.0, abs=1e-12) and wilson(1.0, 5)[1] == pytest.approx(1.0)


def test_sign_test_by_hand():
    assert sign_test(5, 0) == pytest.approx(2 / 32)
    assert sign_test(3, 1) == pytest.approx(2 * 5 / 16)
    assert sign_test(2, 2) == 1.0 and sign_test(0, 0) == 1.0


def test_bars_of_negative_values_go_to_the_left_of_zero():
    ax = Figure().subplots()
    bars = [Measure("before", -0.28, 20, -0.31, -0.26), Measure("after", -0.04, 20, -0.05, -0.03)]
    draw_bars(ax, bars, "reward", PAGE)
    low, high = ax.get_xlim()
    boxes = [bar.get_window_extent() for bar in ax.patches]
    assert low <= -0.31 and high > 0 and boxes[0].width == pytest.approx(7 * boxes[1].width)
    assert all(low < text.get_position()[0] < high for text in ax.texts), "the value stands beside its bar"
    assert bars[0].text("reward") == "-0.28 (-0.31 to -0.26)"


def test_sentence(run_dir):
    assert sentence(load_run(run_dir).evals) == (
        "Held-out accuracy rose from 40.0% (31.0–50.0%) to 70.0% (60.0–78.0%) on n = 100; "
        "the control reached 45.0% (36.0–55.0%)."
    )


@pytest.mark.parametrize(
    ("evals", "expected"),
    [
        ({}, "No held-out evaluation has been recorded yet."),
        ({"before": {"accuracy": 0.5}, "after": {"accuracy": 0.4}}, "Held-out accuracy fell from 50.0% to 40.0%."),
        ({"before": {"accuracy": 0.5}, "after": {"accuracy": 0.5}}, "Held-out accuracy stayed at 50.0%."),
        ({"before": {"accuracy": 0.5}}, "Held-out accuracy, before: 50.0%."),
        (
            {"before": {"wer": 0.41, "n": 9}, "after": {"wer": 0.3, "n": 9}},
            "Held-out WER fell from 41.0% to 30.0% on n = 9.",
        ),
        (
            {"before": {"wer": 0.5, "n": 9}, "after": {"wer": 0.3, "n": 8}},
            "Held-out WER fell from 50.0% to 30.0% on n = 9 (before), n = 8 (after).",
        ),
        (
            {"unseen_before": {"wer": 0.7, "n": 5}, "before": {"wer": 0.5, "n": 9}, "after": {"wer": 0.3, "n": 9}},
            "Held-out WER fell from 50.0% to 30.0% on n = 9.",
        ),
    ],
)
def test_sentences_of_other_runs(evals, expected):
    assert sentence(evals) == expected


BY_LANGUAGE = {
    "before": {
        "accuracy": 0.5,
        "n": 80,
        "by_task": {"English": {"accuracy": 0.95, "n": 40}, "French": {"accuracy": 0.05}},
    },
    "control": {"accuracy": 0.4, "n": 80},
    "after": {
        "accuracy": 0.6,
        "n": 80,
        "by_task": {"English": {"accuracy": 0.87, "n": 40}, "French": {"accuracy": 0.33}},
    },
}


def test_a_task_that_fell_is_named_although_the_whole_rose():
    assert sentence(BY_LANGUAGE).startswith("Held-out accuracy rose from 50.0%")
    _, (lost,) = doubts(BY_LANGUAGE)
    assert lost.title == "Parts that lost" and [row.label for row in lost.rows] == ["accuracy, English"]
    assert doubts({name: BY_LANGUAGE[name] for name in ("before", "control")}) == ("", [])


def test_evaluation_rows_compare_before_after_and_control(tmp_path):
    assert evaluation_rows(tmp_path) == []
    (tmp_path / "eval.json").write_text(json.dumps(BY_LANGUAGE))
    rows = evaluation_rows(tmp_path)
    assert entry_names(rows) == ["before", "after", "control"]
    cells = {row.label: [row.cell("before"), row.cell("after"), row.cell("control"), row.change_text()] for row in rows}
    assert cells == {
        "accuracy": ["50.0%", "60.0%", "40.0%", "+10.0 points"],
        "accuracy, English": ["95.0%", "87.0%", "–", "−8.0 points"],
        "accuracy, French": ["5.0%", "33.0%", "–", "+28.0 points"],
    }
    assert [row.worse for row in rows] == [False, True, False]
    assert rows[1].samples == {"before": 40, "after": 40}


def test_an_error_rate_that_rises_is_worse_and_a_length_is_neither(tmp_path):
    entries = {"before": {"seconds": 1.0, "wer": 0.2}, "after": {"seconds": 2.0, "wer": 0.3, "chrf": None}}
    (tmp_path / "eval.json").write_text(json.dumps(entries))
    assert {row.label: (row.worse, row.change_text()) for row in evaluation_rows(tmp_path)} == {
        "duration (s)": (False, "+1"),
        "WER": (True, "+10.0 points"),
    }


def test_the_set_that_should_not_be_forgotten_has_rows_of_its_own(tmp_path):
    entries = {"retention_before": {"accuracy": 0.9}, "before": {"accuracy": 0.1}}
    entries |= {"after": {"accuracy": 0.5}, "retention_after": {"accuracy": 0.8}}
    (tmp_path / "eval.json").write_text(json.dumps(entries))
    whole, retained = evaluation_rows(tmp_path)
    assert (whole.label, whole.values) == ("accuracy", {"before": 0.1, "after": 0.5})
    assert (retained.label, retained.values, retained.worse) == (
        "accuracy, retention",
        {"before": 0.9, "after": 0.8},
        True,
    )


def test_an_accuracy_without_interval_gets_one_from_its_n():
    (m,) = measures({"after": {"accuracy": 0.8, "n": 10}})
    assert m.low == pytest.approx(0.4902, abs=1e-4)
    (m,) = measures({"after": {"wer": 0.8, "n": 10}})
    assert m.low is None, "a word error rate is no proportion"


def test_changes_pair_by_id_in_any_order():
    before = [{"id": i, "correct": c} for i, c in (("a", False), ("b", True), ("c", True), ("gone", False))]
    after = [{"id": i, "correct": c} for i, c in (("c", True), ("b", False), ("a", True))]
    fixed, broken, pairs = changed_pairs(*({row["id"]: row for row in rows} for rows in (before, after)))
    assert [b["id"] for b, _ in fixed] == ["a"] and [b["id"] for b, _ in broken] == ["b"] and len(pairs) == 3


@pytest.mark.parametrize(
    ("file", "fields", "field"),
    [
        ("eval.json", {"before": {"accuracy": 5.0, "n": 3}}, "'before': .*at `\\$.accuracy`"),
        ("eval.json", {"before": {"n": "many"}}, "at `\\$.n`"),
        ("eval.json", {"before": {"by_task": {"a": 3}}}, "at `\\$.by_task"),
        ("eval.json", {"before": {"chrf": 10**400}}, "out of range"),
        ("eval/after.jsonl", {"id": {"a": 1}}, "row 1: .*at `\\$.id`"),
        ("eval/after.jsonl", {"audio": [{"start": "soon"}]}, "row 1: .*at `\\$.audio"),
        ("rollouts/step_000001.jsonl", {"score": {"total": "good"}}, "row 1: .*at `\\$.score.total`"),
        ("rollouts/step_000001.jsonl", {"segments": 3}, "row 1: .*at `\\$.segments`"),
        ("rollouts/step_000001.jsonl", {"sample": {"turns": [{"end": -1}]}}, "row 1: .*at `\\$.sample.turns"),
        ("config.json", {"argv": 3}, "at `\\$.argv`"),
    ],
)
def test_a_field_of_another_type_is_named(run_dir, file, fields, field):
    path = run_dir / file
    row = json.loads(path.read_text().splitlines()[0] if path.suffix == ".jsonl" else path.read_text())
    path.write_text(json.dumps(row | fields) + "\n")
    with pytest.raises(ValueError, match=f"{file}: .*{field}"):
        write_report(run_dir)
