"""What a run achieved: its held-out numbers as table rows, as plain values and in one sentence."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audiorl.report.run import Row, Run, read_json_object
from audiorl.run.records import UNSEEN

BASIC_ENTRIES = ("before", "after", "control")
_NOT_METRICS = ("n", "low", "high")
_LOWER_IS_BETTER = frozenset(
    (
        "wer",
        "cer",
        "laal",
        "stream_laal",
        "mel_distance",
        "stft_distance",
        "cut",
        "repetition",
        "ter",
        "perplexity",
        "nats_per_token",
        "bits_per_byte",
    )
)
_HIGHER_IS_BETTER = frozenset(
    (
        "accuracy",
        "as_written",
        "chrf",
        "chrf++",
        "bleu",
        "word_f1",
        "semantic",
        "comet",
        "format",
        "said",
        "vocabulary",
        "similarity",
        "dnsmos",
        "win_rate",
    )
)
_PERCENTAGES = frozenset(
    ("accuracy", "wer", "cer", "cut", "spoken", "low", "high", "as_written", "said", "vocabulary", "pauses")
)
_PROSODY = frozenset(("f0_range", "energy_range", "pauses"))
"""Of these neither more nor less is better, but training that makes the ranges smaller makes speech monotone."""
_NAMES = {
    "chrf": "chrF",
    "chrf++": "chrF++",
    "bleu": "BLEU",
    "ter": "TER",
    "word_f1": "word F1",
    "semantic": "similarity of sentence embeddings",
    "length_ratio": "length / reference",
    "wer": "WER",
    "cer": "CER",
    "cut": "cut at the length limit",
    "seconds": "duration (s)",
    "f0_range": "F0 range (semitones)",
    "energy_range": "level range (dB)",
    "mel_distance": "mel distance",
    "stft_distance": "STFT distance",
    "laal": "LAAL (s)",
    "stream_laal": "StreamLAAL (s)",
}


@dataclass(frozen=True)
class EvaluationRow:
    """One held-out number of a run at each of its evaluations, as a row of a table.

    metric: key of an entry of eval.json, for example "accuracy".
    task: the task or language to which the number is limited; "" for all samples.
    values: the number by evaluation, in the order of the columns; an evaluation without it is absent.
    samples: how many samples each evaluation measured it on, where eval.json says so.
    changes: (mean, low, high) of the paired differences from `before`, by evaluation, with 95% intervals.
    outside: no phase optimised the metric.
    """

    metric: str
    task: str
    values: Mapping[str, float]
    samples: Mapping[str, int] = field(default_factory=dict)
    changes: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    outside: bool = False

    @property
    def label(self) -> str:
        """The row's heading: ``accuracy``, or ``accuracy, English`` for a task."""
        name = metric_name(self.metric) + (f", {self.task}" if self.task else "")
        return name + (" (not optimised)" if self.outside else "")

    @property
    def change(self) -> float | None:
        """`after` minus `before`; None where one of them is absent or not finite."""
        difference = self.values.get("after", math.nan) - self.values.get("before", math.nan)
        return difference if math.isfinite(difference) else None

    @property
    def worse(self) -> bool:
        """Whether `after` is worse than `before`. False for a metric without a better direction, such as a length."""
        change = self.change or 0.0
        return change < 0 if self.metric in _HIGHER_IS_BETTER else change > 0 and self.metric in _LOWER_IS_BETTER

    def cell(self, entry: str) -> str:
        """The value at one evaluation as people read it; a dash where there is none."""
        return show(self.values[entry], self.metric) if entry in self.values else "–"

    def change_text(self) -> str:
        """``+12.5 points``, with the paired interval where there is one: ``+12.5 points (+8.1 to +16.9)``."""
        change = self.change
        if change is None:
            return "–"
        text = f"{signed(change, self.metric)}{' points' if is_percentage(self.metric) else ''}"
        if "after" in self.changes and re.search("[1-9]", text):
            low, high = (signed(bound, self.metric) for bound in self.changes["after"][1:])
            return f"{text} ({low} to {high})"
        return text if re.search("[1-9]", text) else "0"


def signed(change: float, metric: str) -> str:
    """``+12.5`` percentage points, ``−0.031``."""
    text = f"{abs(change) * 100:.1f}" if is_percentage(metric) else show(abs(change))
    return ("" if not re.search("[1-9]", text) else "+" if change > 0 else "−") + text


def evaluation_rows(run_folder: str | Path) -> list[EvaluationRow]:
    """The held-out numbers of a run folder, from its eval.json; empty before the first evaluation has finished.

    The first row is the headline metric over all samples, then come its rows by task, then all other numbers.
    `entry_names(rows)` gives the columns. Raises ValueError for a damaged eval.json.

    ::

        for row in evaluation_rows("runs/quickstart"):
            print(row.label, row.cell("before"), row.cell("after"), row.cell("control"), row.change_text())
        # accuracy 41.0% 63.5% 45.0% +22.5 points
    """
    return rows_of_entries(read_json_object(Path(run_folder) / "eval.json") or {})


def rows_of_entries(entries: Mapping[str, Any]) -> list[EvaluationRow]:
    """`evaluation_rows` of the content of an eval.json.

    Where there is an entry NAME_before, entries NAME_… measure another set: they fill the columns before, after, … of
    rows whose `task` is NAME, or ``NAME: task``.
    """
    prefixes = [name.removesuffix("before") for name in entries if name.endswith("_before")]
    sets: dict[str, dict[str, Mapping[str, Any]]] = {"": {}}
    for name, entry in entries.items():
        prefix = next((p for p in prefixes if name.startswith(p)), "")
        if isinstance(entry, Mapping):
            sets.setdefault(prefix.rstrip("_"), {})[name.removeprefix(prefix)] = entry
    first = headline(sets[""])
    rows = [row for name, columns in sets.items() for row in _rows_of_set(name, columns)]
    return sorted(rows, key=lambda row: row.metric != first)  # a stable sort: the headline's rows first


def _rows_of_set(name: str, columns: Mapping[str, Mapping[str, Any]]) -> list[EvaluationRow]:
    rows = []
    tasks = dict.fromkeys(task for entry in columns.values() for task in entry.get("by_task") or {})
    for metric in dict.fromkeys(k for entry in columns.values() for k in numbers(entry) if k not in _NOT_METRICS):
        rows.append(_row(metric, name, columns))
        for task in tasks:
            cells = {entry: (values.get("by_task") or {}).get(task) or {} for entry, values in columns.items()}
            if any(metric in cell for cell in cells.values()):
                rows.append(_row(metric, f"{name}: {task}" if name else task, cells))
    return rows


def entry_names(rows: Sequence[EvaluationRow]) -> list[str]:
    """The columns of the rows: before, after and control first, then the others in the order of eval.json."""
    names = dict.fromkeys(name for row in rows for name in row.values)
    return [*(n for n in BASIC_ENTRIES if n in names), *(n for n in names if n not in BASIC_ENTRIES)]


def _row(metric: str, task: str, entries: Mapping[str, Mapping[str, Any]]) -> EvaluationRow:
    having = {name: entry for name, entry in entries.items() if metric in numbers(entry)}
    samples = {name: int(entry["n"]) for name, entry in having.items() if "n" in numbers(entry)}
    changes = {name: entry["changes"][metric] for name, entry in having.items() if metric in entry.get("changes", {})}
    outside = any(metric in entry.get("outside", {}) for entry in having.values())
    values = {name: float(entry[metric]) for name, entry in having.items()}
    return EvaluationRow(metric, task, values, samples, changes, outside)


@dataclass(frozen=True)
class Measure:
    """The headline metric at one evaluation, with its 95% interval when there is one."""

    entry: str
    value: float
    n: int | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Changes:
    """Held-out samples whose correctness changed, as (row before, row after).

    fixed: wrong before, right after. broken: right before, wrong after. compared: samples that both files hold.
    """

    fixed: tuple[tuple[Row, Row], ...]
    broken: tuple[tuple[Row, Row], ...]
    compared: int

    @property
    def p_value(self) -> float:
        return sign_test(len(self.fixed), len(self.broken))


@dataclass(frozen=True)
class Point:
    """Latency and quality of one evaluation of an interpreter: LAAL in seconds, chrF out of 100."""

    entry: str
    latency: float
    quality: float


def headline(evals: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The metric that the page is about: accuracy, chrF, or else the first number that all entries share."""
    entries = [e for e in evals.values() if isinstance(e, Mapping)]
    shared = [k for k in numbers(entries[0]) if all(k in numbers(e) for e in entries)] if entries else []
    shared = [k for k in shared if k not in _NOT_METRICS]
    return next((k for k in ("accuracy", "chrf") if k in shared), next(iter(shared), None))


def points(evals: Mapping[str, Mapping[str, Any]]) -> list[Point]:
    """Every entry that has both a finite `laal` and a finite `chrf`, those of `unseen_` speakers too."""
    entries = {name: numbers(e) for name, e in evals.items() if isinstance(e, Mapping)}
    both = [Point(name, e["laal"], e["chrf"]) for name, e in entries.items() if "laal" in e and "chrf" in e]
    return [p for p in both if math.isfinite(p.latency) and math.isfinite(p.quality)]


def measures(evals: Mapping[str, Mapping[str, Any]]) -> list[Measure]:
    """The headline metric of every entry. An accuracy with its n but no interval gets Wilson's."""
    metric = headline(evals)
    result = []
    for name, entry in evals.items():
        if metric is None or not isinstance(entry, Mapping):
            continue
        n = entry.get("n")
        low, high = entry.get("low"), entry.get("high")
        if (low is None or high is None) and metric == "accuracy" and n:
            low, high = wilson(entry[metric], n)
        result.append(Measure(name, float(entry[metric]), n, low, high))
    return result


def sentence(run: Run) -> str:
    """``Held-out accuracy rose from 41.0% (34.4–47.9%) to 63.5% (56.6–69.9%) on n = 200; …``

    The numbers are those of eval.json. `worse_tasks` says which tasks did not follow.
    """
    by_entry = {m.entry: m for m in measures(run.evals)}
    metric = headline(run.evals)
    if not by_entry or metric is None:
        return "No held-out evaluation has been recorded yet."
    before, after, control = (by_entry.get(name) for name in ("before", "after", "control"))
    if before and after:
        named = [before, after]
        verb = "stayed at" if before.value == after.value else "rose" if after.value > before.value else "fell"
        values = _with_interval(after, metric)
        if verb != "stayed at":
            values = f"from {_with_interval(before, metric)} to {values}"
        text = f"Held-out {metric_name(metric)} {verb} {values}"
        if metric == "chrf":
            text += _latency_change(points(run.evals))
    else:
        only = after or before or next(iter(by_entry.values()))
        named = [only]
        text = f"Held-out {metric_name(metric)}, {only.entry}: {_with_interval(only, metric)}"
    named += [control] if control else []
    sizes = {m.n for m in named if m.n is not None}
    if len(sizes) == 1:
        text += f" on n = {sizes.pop()}"
    elif sizes:
        text += " on " + ", ".join(f"n = {m.n} ({m.entry})" for m in named if m.n is not None)
    if control:
        text += f"; the control reached {_with_interval(control, metric)}"
    return f"{text}."


def worse_tasks(run: Run, limit: int = 3) -> str:
    """``Worse than before: English (95.0% to 87.0%).`` The greatest losses come first; "" where no task lost."""
    metric = headline(run.evals)
    lost = [row for row in rows_of_entries(run.evals) if row.metric == metric and row.task and row.worse]
    lost.sort(key=lambda row: -abs(row.change or 0.0))
    named = ", ".join(f"{row.task} ({row.cell('before')} to {row.cell('after')})" for row in lost[:limit])
    more = f" and {len(lost) - limit} more" if len(lost) > limit else ""
    return f"Worse than before: {named}{more}." if lost else ""


def disagreements(entries: Mapping[str, Any], metrics: Sequence[Row] = ()) -> list[str]:
    """``accuracy rose by +9.0 points (+5.1 to +12.9), but accuracy, unseen did not: +0.4 points (−2.1 to +2.9).``

    One sentence for each measure that no phase optimised, and for each set of strangers, that did not get better (the
    interval of its change reaches 0 or below) while the headline did, and for each range of prosody that got smaller.
    Where no phase optimises the headline either, as with judges of speech, the mean reward stands in its place, by
    `metrics`, the lines of metrics.jsonl.
    """
    rows = [row for row in rows_of_entries(entries) if "after" in row.changes]
    flattened = [r for r in rows if r.metric in _PROSODY - {"pauses"} and r.changes["after"][2] < 0]
    rows = [row for row in rows if row.metric not in _PROSODY]
    headlines = [row for row in rows if not row.task and not row.outside and row.metric != "laal"]
    if headlines and _better(headlines[0]):
        first = headlines[0]
        rise = f"{first.label} {'rose' if (first.change or 0.0) > 0 else 'fell'} by {first.change_text()}"
        optimised = first.metric
    elif not headlines and rows and (rise := _reward_rise(metrics)):
        optimised = ""
    else:
        return []
    outsiders = [
        row
        for row in rows
        if (row.outside and row.task in ("", UNSEEN)) or (row.task == UNSEEN and row.metric == optimised)
    ]
    return [
        *(f"{rise}, but {row.label} did not get better: {row.change_text()}." for row in outsiders if not _better(row)),
        *(f"{rise}, but {row.label} got smaller: {row.change_text()}." for row in flattened),
    ]


def _reward_rise(metrics: Sequence[Row], steps: int = 5) -> str:
    """``the mean reward rose by +0.11 (+0.05 to +0.17) from the first to the last 5 steps``; "" unless it surely did.

    The interval is the normal approximation for the difference of two means of steps.
    """
    rewards = [float(row["reward/mean"]) for row in metrics if isinstance(row.get("reward/mean"), int | float)]
    if len(rewards) < 2 * steps:
        return ""
    first, last = rewards[:steps], rewards[-steps:]
    rise = statistics.mean(last) - statistics.mean(first)
    half = 1.959964 * math.sqrt((statistics.variance(first) + statistics.variance(last)) / steps)
    if rise - half <= 0:
        return ""
    low, high = (signed(bound, "") for bound in (rise - half, rise + half))
    return f"the mean reward rose by {signed(rise, '')} ({low} to {high}) from the first to the last {steps} steps"


def _better(row: EvaluationRow) -> bool:
    """Whether the interval of the change since `before` lies on the better side of 0."""
    _, low, high = row.changes["after"]
    return high < 0 if row.metric in _LOWER_IS_BETTER else low > 0


def without_strangers(entries: Mapping[str, Any]) -> list[str]:
    """Which of strangers and outside measures a run lacks, in words for the page; [] before its `after`."""
    rows = rows_of_entries(entries)
    missing: list[str] = []
    if not any(row.changes for row in rows):
        return missing
    if not any(row.task == UNSEEN for row in rows):
        missing.append("unseen speakers: none were measured (--unseen)")
    if not any(row.outside for row in rows):
        missing.append("a measure that no phase optimised: none was given (--outside-file)")
    return missing


def changes(before: Sequence[Row], after: Sequence[Row]) -> Changes:
    """Pair the answers by sample id and keep the pairs whose correctness differs."""
    after_by_id = {row.get("id"): row for row in after}
    pairs = [(row, after_by_id[row.get("id")]) for row in before if row.get("id") in after_by_id]
    return Changes(
        fixed=tuple((b, a) for b, a in pairs if not b.get("correct") and a.get("correct")),
        broken=tuple((b, a) for b, a in pairs if b.get("correct") and not a.get("correct")),
        compared=len(pairs),
    )


def sign_test(gained: int, lost: int) -> float:
    """Two-sided p-value of gained versus lost under a fair coin (the exact form of McNemar's test)."""
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n
    return min(1.0, 2 * tail)


def wilson(p: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """95% score interval of a proportion (Wilson 1927)."""
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def metric_name(metric: str) -> str:
    """A metric as people write it: ``chrf`` is ``chrF``."""
    return _NAMES.get(metric, metric)


def is_percentage(metric: str) -> bool:
    """Whether a metric is a share that people read in percent."""
    return metric.rpartition("/")[2] in _PERCENTAGES


def show(value: Any, metric: str = "") -> str:
    """A number as people read it: accuracies and error rates in percent, the rest with three significant digits."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if is_percentage(metric):
        return f"{value:.1%}"
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    value += 0.0  # no "-0"
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an entry of eval.json."""
    return {k: v for k, v in entry.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def _latency_change(operating_points: Sequence[Point]) -> str:
    latency = {p.entry: p.latency for p in operating_points}
    if not {"before", "after"} <= latency.keys():
        return ""
    return f", and LAAL went from {latency['before']:.2f} s to {latency['after']:.2f} s,"


def _with_interval(m: Measure, metric: str) -> str:
    text = show(m.value, metric)
    if m.low is None or m.high is None:
        return text
    if is_percentage(metric):
        return f"{text} ({m.low * 100:.1f}–{m.high * 100:.1f}%)"
    return f"{text} ({show(m.low)}–{show(m.high)})"
