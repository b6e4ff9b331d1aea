"""metrics.jsonl survives crashes and resumes; the progress display says what matters."""

import io
import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console

from audiorl.run import progress as progress_module
from audiorl.run.metrics_log import MetricsLog, numbered_rows, read_metrics
from audiorl.run.progress import Progress


def test_a_line_is_readable_as_soon_as_it_is_written(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    log.write({"seq": 0, "phase": "grpo", "step": 1, "kl": torch.tensor(0.5), "acc": np.float32(0.25)})
    (row,) = read_metrics(log.path)
    assert (row["kl"], row["acc"], row["phase"]) == (0.5, 0.25, "grpo")
    assert row["time"] >= 0
    for value in (torch.zeros(2), np.zeros(3), [1.0]):
        with pytest.raises(ValueError, match=r"'loss': expected (one|a) number"):
            log.write({"loss": value})


def test_nan_and_inf_survive_in_strictly_valid_json(tmp_path):
    MetricsLog(tmp_path / "m.jsonl", 0).write({"seq": 0, "phase": "nan", "a": math.nan, "b": -math.inf})

    def refuse(name):
        raise AssertionError(f"not strict JSON: {name}")

    json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    (row,) = read_metrics(tmp_path / "m.jsonl")
    assert math.isnan(row["a"]) and row["b"] == -math.inf
    assert row["phase"] == "nan"


def test_only_a_torn_last_line_is_forgiven(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"seq": 0}\n{"seq": 1}\n{"seq": 2, "re')
    assert [row["seq"] for _, row in numbered_rows(path)] == [0, 1]
    path.write_text('{"seq": 0}\n{"seq": \n{"seq": 2}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl:2: not JSON"):
        read_metrics(path)
    path.write_text('{"seq": 0}\n[1]\n')
    with pytest.raises(ValueError, match=r"m\.jsonl:2: expected a JSON object, found list"):
        read_metrics(path)


@pytest.mark.parametrize(("tail", "seq"), [('{"seq": 1, "x', 1), ('{"seq": 1}', 2), ('{"seq": 1}\n{"seq": 2}\n', 1)])
def test_opening_repairs_the_tail_before_appending(tmp_path, tail, seq):
    path = tmp_path / "m.jsonl"
    first = '{"seq": 0, "time": 100.0, "note": "é"}\n'
    path.write_text(first + tail, encoding="utf-8")
    MetricsLog(path, seq).write({"seq": seq})
    assert [row["seq"] for row in read_metrics(path)] == list(range(seq + 1))
    assert path.read_text(encoding="utf-8").startswith(first) and [f.name for f in tmp_path.iterdir()] == ["m.jsonl"]
    assert 100.0 <= read_metrics(path)[-1]["time"] < 110.0, "the clock goes on"


@pytest.mark.parametrize(
    ("lines", "seq", "message"),
    [
        ('{"seq": 1}\n{"seq": 0}\n', 2, ":2: damaged: seq is 0 where 2 belongs"),
        ('{"seq": 3}\n{"seq": 1}\n', 2, ":2: damaged: seq is 1 where 3 belongs"),
        ('{"seq": 3}\n', 5, ": damaged: 1 of the 5 lines"),
        ("", 1, ": damaged: 0 of the 1 lines"),
        ('{"seq": 0}\n{"step": 1}\n', 1, ':2: no integer "seq"'),
        ('{"seq": 0}\n', 2, ": damaged: 1 of the 2 lines"),
    ],
)
def test_lines_that_do_not_belong_together_are_damage(tmp_path, lines, seq, message):
    path = tmp_path / "m.jsonl"
    path.write_text(lines)
    with pytest.raises(ValueError, match=f"^{path}{message}"):
        MetricsLog(path, seq)
    assert path.read_text() == lines


def test_a_run_whose_file_was_removed_goes_on_without_its_history(tmp_path):
    path = tmp_path / "m.jsonl"
    for seq, left in ((5, [5, 6]), (5, [5, 6]), (7, [5, 6, 7, 8]), (3, [3, 4])):  # the last: a checkpoint was removed
        log = MetricsLog(path, seq)
        log.write({"seq": seq})
        log.write({"seq": seq + 1})
        log.close()
        assert [row["seq"] for row in read_metrics(path)] == left


def plain_console(width=200):
    return Console(width=width, force_terminal=False, file=io.StringIO())


def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


def test_plain_progress_prints_now_and_then_and_at_the_end(monkeypatch):
    now, console = clock(monkeypatch), plain_console()
    with Progress("grpo", total=4, interval=10.0, console=console) as progress:
        for step, at in ((1, 1.0), (2, 5.0), (3, 12.0), (4, 13.0)):
            now[0] = at
            progress.update(step, {"reward/mean": step / 4})
    lines = console.file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["grpo 1/4", "grpo 3/4", "grpo 4/4"]


def test_progress_line_shows_values_and_time_left(monkeypatch):
    now = clock(monkeypatch)
    with Progress("grpo", total=110, start=10, interval=1e9, console=plain_console()) as progress:
        now[0] = 20.0  # ten steps in 20 s: 90 steps are left, three minutes
        progress.update(20, {"reward/mean": 0.5, "reward/accuracy": 0.25, "kl": 0.01, "tokens_per_s": 900.4})
        assert progress.line() == "grpo 20/110  reward 0.500  acc 25.0%  KL 0.0100  tok/s 900  left 3:00"
        progress.update(21, {"reward/mean": 0.6})
        assert "KL 0.0100" in progress.line(), "a value that was not reported keeps its last reading"


def test_progress_of_a_phase_that_time_ends(monkeypatch):
    now = clock(monkeypatch)
    with Progress("control", total=8000, interval=1e9, spent=0.1, console=plain_console()) as progress:
        now[0] = 20.0
        progress.update(10, {}, 0.3)  # a fifth of the limit in 20 s: for seven tenths, 70 s
        assert progress.line() == "control 10  left 1:10"
        progress.update(8000, {}, 0.4)
        assert progress.line() == "control 8000"


def test_live_progress_draws_on_a_terminal():
    console = Console(force_terminal=True, width=120, file=io.StringIO())
    with Progress("sft", total=2, console=console) as progress:
        progress.update(2, {"loss": 1.5})
    assert "2/2" in console.file.getvalue() and "1.500" in console.file.getvalue()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"seq": 1, "time": {}}', "at `$.time`"),
        ('{"seq": 1, "time": "soon"}', "at `$.time`"),
        ('{"seq": 1, "loss": [1]}', "at `$[...]`"),
        ('{"seq": 1, "loss": 1' + "0" * 400 + "}", "out of range"),
        ('{"seq": true}', "at `$.seq`"),
        ('{"seq": 1, "time": null}', "at `$.time`"),
        ('{"seq": 1, "step": "\\ud800"}', "surrogates not allowed"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_line_that_holds_something_else_is_named(tmp_path, line, reason):
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"seq": 0, "step": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=f"^{path}:2: ") as error:
        read_metrics(path)
    assert reason in str(error.value)
