"""What a run achieved: its held-out numbers as table rows, as plain values and in one sentence."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audiorl.eval.metrics.corpus import UNSEEN, wilson

Row = dict[str, Any]
Evals = Mapping[str, Mapping[str, Any]]
"""The content of eval.json: numbers by evaluation."""
BASIC_ENTRIES = ("before", "after", "control")
_NOT_METRICS = ("n", "low", "high")
_METRICS: dict[str, tuple[str, int, bool]] = {
    **dict.fromkeys(("accuracy", "as_written", "said", "vocabulary"), ("", 1, True)),
    "heard": ("numbers heard", 1, True),
    "exact": ("all numbers heard", 1, True),
    "follows": ("arithmetic right", 1, True),
    "luck": ("right though misheard", 0, True),
    "chrf": ("chrF", 1, False),
    "chrf++": ("chrF++", 1, False),
    "bleu": ("BLEU", 1, False),
    "word_f1": ("word F1", 1, False),
    "semantic": ("similarity of sentence embeddings", 1, False),
    **dict.fromkeys(("comet", "format", "similarity", "dnsmos", "win_rate"), ("", 1, False)),
    "wer": ("WER", -1, True),
    "cer": ("CER", -1, True),
    "silent": ("nothing written for silence", 1, True),
    "cut": ("cut at the length limit", -1, True),
    "laal": ("LAAL (s)", -1, False),
    "stream_laal": ("StreamLAAL (s)", -1, False),
    "mel_distance": ("mel distance", -1, False),
    "stft_distance": ("STFT distance", -1, False),
    "flow_loss": ("flow matching loss", -1, False),
    "ter": ("TER", -1, False),
    **dict.fromkeys(("repetition", "perplexity", "nats_per_token", "bits_per_byte"), ("", -1, False)),
    **dict.fromkeys(("spoken", "low", "high", "pauses"), ("", 0, True)),
    "length_ratio": ("length / reference", 0, False),
    "seconds": ("duration (s)", 0, False),
    "f0_range": ("F0 range (semitones)", 0, False),
    "energy_range": ("level range (dB)", 0, False),
}
"""By metric: its name for people, "" for the same; 1 where more is better, -1 where less is; if it is a percentage.
Of prosody neither is better, but training that makes the ranges smaller makes speech monotone."""
_PROSODY = ("f0_range", "energy_range", "pauses")


# -- numbers as people read them ---------------------------------------------------------------------------------------


def _known(metric: str) -> tuple[str, int, bool]:
    return _METRICS.get(metric, ("", 0, False))


def metric_name(metric: str) -> str:
    """Return a metric as people write it: ``chrf`` is ``chrF``."""
    return _known(metric)[0] or metric


def is_percentage(metric: str) -> bool:
    """Return whether a metric is a share that people read in percent."""
    return _known(metric.rpartition("/")[2])[2]


def show(value: Any, metric: str = "") -> str:
    """Write a number as people read it: accuracies and error rates in percent, the rest with 3 significant digits."""
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


def signed(change: float, metric: str) -> str:
    """Write a change with its sign: ``+12.5`` percentage points, ``−0.031``, ``0``."""
    text = f"{abs(change) * 100:.1f}" if is_percentage(metric) else show(abs(change))
    return ("" if not re.search("[1-9]", text) else "+" if change > 0 else "−") + text


def numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an entry of eval.json."""
    return {k: v for k, v in entry.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Read a file with a JSON object; None where there is no file. Raises ValueError naming the file."""
    if not path.exists():
        return None
    if not path.is_file():  # a FIFO would be waited for
        raise ValueError(f"{path}: no regular file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


# -- the table of evaluations ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationRow:
    """One held-out number of a run at each of its evaluations, as a row of a table.

    metric: key of an entry of eval.json. task: the task or language it is limited to; "" for all samples. values: the
    number by evaluation, absent where there is none; samples: on how many samples. changes: (mean, low, high) of the
    paired differences from `before`, with 95% intervals. outside: no phase optimised the metric.
    """

    metric: str
    task: str
    values: Mapping[str, float]
    samples: Mapping[str, int] = field(default_factory=dict)
    changes: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    outside: bool = False

    @property
    def label(self) -> str:
        """Heading of the row: ``accuracy``, or ``accuracy, English`` for a task."""
        name = metric_name(self.metric) + (f", {self.task}" if self.task else "")
        return name + (" (not optimised)" if self.outside else "")

    @property
    def change(self) -> float:
        """`after` minus `before`; NaN where one of them is absent or not finite."""
        difference = self.values.get("after", math.nan) - self.values.get("before", math.nan)
        return difference if math.isfinite(difference) else math.nan

    @property
    def worse(self) -> bool:
        """True if `after` is worse than `before`. False for a metric without a better direction, such as a length."""
        return self.change * _known(self.metric)[1] < 0

    @property
    def surely_better(self) -> bool:
        """True if the interval of the change since `before` lies on the better side of 0."""
        _, low, high = self.changes["after"]
        return high < 0 if _known(self.metric)[1] < 0 else low > 0

    def cell(self, entry: str) -> str:
        """Return the value at one evaluation as people read it; a dash where there is none."""
        return show(self.values[entry], self.metric) if entry in self.values else "–"

    def change_text(self) -> str:
        """Return ``+12.5 points``, with the paired interval where there is one: ``+12.5 points (+8.1 to +16.9)``."""
        if math.isnan(self.change):
            return "–"
        text = signed(self.change, self.metric)
        if not re.search("[1-9]", text):
            return "0"
        text += " points" * is_percentage(self.metric)
        if "after" not in self.changes:
            return text
        low, high = (signed(bound, self.metric) for bound in self.changes["after"][1:])
        return f"{text} ({low} to {high})"


def evaluation_rows(run_folder: str | Path) -> list[EvaluationRow]:
    """Return the held-out numbers of a run folder, or of a folder of seeds; [] before the first evaluation has ended.

    The first row is the headline metric over all samples, then come its rows by task, then all other numbers;
    `entry_names(rows)` gives the columns. Raises ValueError for a damaged eval.json.
    """
    return rows_of_entries(read_entries(run_folder))


def seed_folders(folder: Path) -> list[Path]:
    """Return the run folders in a folder that is none itself, the runs of `audiorl train --seeds`; [] without any."""
    if not folder.is_dir() or any((folder / name).exists() for name in ("config.json", "metrics.jsonl", "eval.json")):
        return []
    found = [path for path in folder.iterdir() if (path / "config.json").is_file()]
    return sorted(found, key=lambda path: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", path.name)])


def read_entries(folder: str | Path) -> dict[str, Any]:
    """Return eval.json of a run folder, or of a folder of seeds the `mean_entries`; {} before the first evaluation."""
    seeds = seed_folders(Path(folder))
    each = [read_json_object(path / "eval.json") or {} for path in seeds or [Path(folder)]]
    return mean_entries(each) if seeds else each[0]


_STUDENT = (math.inf, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5% quantiles of Student's t by degrees of freedom; the last one for more."""


def mean_entries(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean over runs of the entries of eval.json that all of them have; runs without `after` wait for it.

    The interval of the headline and those of `changes` are 95% t-intervals over runs: how far another seed may lie.
    """

    each = [evals for evals in each if "after" in evals] or each

    def interval(values: Sequence[float], share: bool) -> tuple[float, float, float]:
        mean, count = statistics.mean(values), len(values)
        half = _STUDENT[min(count, 11) - 1] * statistics.stdev(values) / math.sqrt(count) if count > 1 else 0.0
        return mean, max(mean - half, 0.0) if share else mean - half, min(mean + half, 1.0) if share else mean + half

    def means(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        held = list(map(numbers, entries))
        shared = [k for k in held[0] if k not in ("low", "high") and all(k in h and math.isfinite(h[k]) for h in held)]
        tasks = [t for t in entries[0].get("by_task") or {} if all(t in (e.get("by_task") or {}) for e in entries)]
        result: dict[str, Any] = {
            k: held[0][k] if k == "n" else interval([h[k] for h in held], False)[0] for k in shared
        }
        outside = {"outside": entries[0]["outside"]} if "outside" in entries[0] else {}
        return result | outside | {"by_task": {t: means([e["by_task"][t] for e in entries]) for t in tasks}}

    names = [name for name in each[0] if all(isinstance(evals.get(name), Mapping) for evals in each)]
    result = {name: means([evals[name] for evals in each]) for name in names}
    metric, prefixes = headline(result), [name.removesuffix("before") for name in names if name.endswith("_before")]
    for name, entry in result.items():
        if metric in entry:
            _, entry["low"], entry["high"] = interval(
                [evals[name][metric] for evals in each], is_percentage(metric or "")
            )
        baseline = next((p for p in prefixes if name.startswith(p)), "") + "before"
        if name != baseline and baseline in result:
            shared = [k for k in numbers(entry) if k in result[baseline] and k not in _NOT_METRICS]
            differences = {k: [evals[name][k] - evals[baseline][k] for evals in each] for k in shared}
            entry["changes"] = {k: interval(values, False) for k, values in differences.items()}
    return result


def rows_of_entries(entries: Mapping[str, Any]) -> list[EvaluationRow]:
    """Return the `evaluation_rows` of the content of an eval.json.

    Where there is an entry NAME_before, entries NAME_… measure another set: they fill the columns before, after, … of
    rows whose `task` is NAME, or ``NAME: task``.
    """
    sets = _sets(entries)
    rows = []
    for name, columns in sets.items():
        tasks = dict.fromkeys(task for entry in columns.values() for task in entry.get("by_task") or {})
        for metric in dict.fromkeys(k for entry in columns.values() for k in numbers(entry) if k not in _NOT_METRICS):
            rows.append(_row(metric, name, columns))
            for task in tasks:
                cells = {entry: (values.get("by_task") or {}).get(task) or {} for entry, values in columns.items()}
                if any(metric in cell for cell in cells.values()):
                    rows.append(_row(metric, f"{name}: {task}" if name else task, cells))
    first = headline(sets[""])
    return sorted(rows, key=lambda row: row.metric != first)  # a stable sort: the headline's rows first


def _sets(entries: Mapping[str, Any]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Return {set: {before, after, …: numbers}}; "" is the held-out data."""
    prefixes = [name.removesuffix("before") for name in entries if name.endswith("_before")]
    sets: dict[str, dict[str, Mapping[str, Any]]] = {"": {}}
    for name, entry in entries.items():
        prefix = next((p for p in prefixes if name.startswith(p)), "")
        if isinstance(entry, Mapping):
            sets.setdefault(prefix.rstrip("_"), {})[name.removeprefix(prefix)] = entry
    return sets


def _row(metric: str, task: str, entries: Evals) -> EvaluationRow:
    having = {name: entry for name, entry in entries.items() if metric in numbers(entry)}
    return EvaluationRow(
        metric,
        task,
        values={name: float(entry[metric]) for name, entry in having.items()},
        samples={name: int(entry["n"]) for name, entry in having.items() if "n" in numbers(entry)},
        changes={name: e["changes"][metric] for name, e in having.items() if metric in e.get("changes", {})},
        outside=any(metric in entry.get("outside", {}) for entry in having.values()),
    )


def entry_names(rows: Sequence[EvaluationRow]) -> list[str]:
    """Return the columns of the rows: before, after and control first, then the others in the order of eval.json."""
    names = dict.fromkeys(name for row in rows for name in row.values)
    return [*(n for n in BASIC_ENTRIES if n in names), *(n for n in names if n not in BASIC_ENTRIES)]


# -- the headline ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """Value of the headline metric at one evaluation, with its 95% interval when there is one."""

    entry: str
    value: float
    n: int | None = None
    low: float | None = None
    high: float | None = None

    def text(self, metric: str) -> str:
        """Return ``63.5% (56.6–69.9%)``."""
        value = show(self.value, metric)
        if self.low is None or self.high is None:
            return value
        if is_percentage(metric):
            return f"{value} ({self.low * 100:.1f}–{self.high * 100:.1f}%)"
        return f"{value} ({show(self.low)}{' to ' if self.low < 0 else '–'}{show(self.high)})"


@dataclass(frozen=True)
class Point:
    """Latency and quality of one evaluation of an interpreter: LAAL in seconds, chrF out of 100."""

    entry: str
    latency: float
    quality: float


def headline(evals: Evals) -> str | None:
    """Return the metric that the page is about: accuracy, chrF, or else the first number that all entries share.

    Entries of other sets than the held-out data count where there are no others.
    """
    sets = _sets(evals)
    entries = [numbers(e) for e in (sets[""] or evals).values() if isinstance(e, Mapping)]
    shared = [k for k in entries[0] if k not in _NOT_METRICS and all(k in e for e in entries)] if entries else []
    return next((k for k in ("accuracy", "chrf", *shared) if k in shared), None)


def points(evals: Evals) -> list[Point]:
    """Return every entry that has both a finite `laal` and a finite `chrf`, those of `unseen_` speakers too."""
    entries = {name: numbers(e) for name, e in evals.items() if isinstance(e, Mapping)}
    both = [Point(name, e["laal"], e["chrf"]) for name, e in entries.items() if "laal" in e and "chrf" in e]
    return [p for p in both if math.isfinite(p.latency) and math.isfinite(p.quality)]


def measures(evals: Evals) -> list[Measure]:
    """Return the headline metric of every entry. An accuracy with its n but no interval gets Wilson's."""
    metric = headline(evals)
    result = []
    for name, entry in evals.items():
        if metric is None or not isinstance(entry, Mapping) or metric not in numbers(entry):
            continue
        n, low, high = (entry.get(key) for key in ("n", "low", "high"))
        if (low is None or high is None) and metric == "accuracy" and n:
            low, high = wilson(entry[metric], n)
        result.append(Measure(name, float(entry[metric]), n, low, high))
    return result


def sentence(evals: Evals) -> str:
    """Return ``Held-out accuracy rose from 41.0% (34.4–47.9%) to 63.5% (56.6–69.9%) on n = 200; …``.

    The numbers are those of eval.json. `doubts` says which did not follow.
    """
    by_entry, metric = {m.entry: m for m in measures(evals)}, headline(evals)
    if not by_entry or metric is None:
        return "No held-out evaluation has been recorded yet."
    before, after, control = (by_entry.get(name) for name in BASIC_ENTRIES)
    if before and after:
        named = [before, after]
        moved = "rose" if after.value > before.value else "fell"
        change = "stayed at" if after.value == before.value else f"{moved} from {before.text(metric)} to"
        text = f"Held-out {metric_name(metric)} {change} {after.text(metric)}"
        latency = {p.entry: p.latency for p in points(evals)}
        if metric == "chrf" and {"before", "after"} <= latency.keys():
            text += f", and LAAL went from {latency['before']:.2f} s to {latency['after']:.2f} s,"
    else:
        named = [after or before or next(iter(by_entry.values()))]
        text = f"Held-out {metric_name(metric)}, {named[0].entry}: {named[0].text(metric)}"
    named += [control] if control else []
    sizes = {m.n for m in named if m.n is not None}
    if len(sizes) == 1:
        text += f" on n = {sizes.pop()}"
    elif sizes:
        text += " on " + ", ".join(f"n = {m.n} ({m.entry})" for m in named if m.n is not None)
    return text + (f"; the control reached {control.text(metric)}." if control else ".")


@dataclass(frozen=True)
class Doubt:
    """Held-out numbers that did not get better although what training optimised did, and why that matters."""

    title: str
    why: str
    rows: tuple[EvaluationRow, ...]


def doubts(entries: Mapping[str, Any], metrics: Sequence[Row] = ()) -> tuple[str, list[Doubt]]:
    """Return (what rose: ``accuracy rose by +9.0 points (+4.0 to +14.0)``, the doubts in it).

    Doubtful are the headline itself if it did not surely get better; else measures that no phase optimised and sets of
    unseen speakers which did not, and ranges of prosody that got smaller; and always parts of the held-out data that
    lost. Where no phase optimises the headline, as with speech models that judge, the mean reward of `metrics`, the
    lines of metrics.jsonl, stands for it. ("", []) before there is an `after`.
    """
    rows, metric = rows_of_entries(entries), headline(entries)
    compared = [row for row in rows if "after" in row.changes and row.metric not in _PROSODY]
    own = [row for row in compared if not row.task and not row.outside and row.metric != "laal"]
    rise = _reward_rise(metrics) if compared and not own else ""
    if own and own[0].surely_better:
        rise = f"{own[0].label} {'rose' if own[0].change > 0 else 'fell'} by {own[0].change_text()}"
    unsure = [row for row in own[:1] if not rise] or [r for r in rows[:1] if r.worse and not r.changes]
    missed = [row for row in compared if rise and not row.surely_better]
    found = [
        ("The result itself", "Training was for this number. It fell, or it may not have moved: more held-out samples "
         "show which.", unsure),
        ("Voices that training never heard", "The gain may hold for the voices of the training data only.",
         [r for r in missed if r.task == UNSEEN and r.metric == own[0].metric] if own else []),
        ("Measures that nothing rewarded", "The model may have learned what the reward counts, not what it stands for.",
         [r for r in missed if r.outside and r.task in ("", UNSEEN)]),
        ("Speech that became flatter", "Nothing rewards a lively voice, so that monotone speech scores as well.",
         [r for r in rows if rise and r.metric in _PROSODY[:2] and r.changes.get("after", (0, 0, 0))[2] < 0]),
    ]  # fmt: skip
    named = [row for *_, held in found for row in held]
    lost = [row for row in rows if row.metric == metric and row.task and row.worse and row not in named]
    found.append(
        ("Parts that lost", "The number for all samples hides them.", sorted(lost, key=lambda r: -abs(r.change)))
    )
    return rise, [Doubt(title, why, tuple(held)) for title, why, held in found if held]


def _reward_rise(metrics: Sequence[Row], steps: int = 5) -> str:
    """``the mean reward rose by +0.11 (+0.05 to +0.17) from the first to the last 5 steps``; "" unless it surely did:
    by the normal approximation for the difference of two means of steps."""
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


def not_measured(entries: Mapping[str, Any], options: Container[str] | None = None) -> list[str]:
    """Say which of unseen speakers and outside measures a run lacks, of those that its recipe has `options` for; []
    before its `after`."""
    options = ("unseen", "outside_file") if options is None else options
    rows = rows_of_entries(entries)
    if not any(row.changes for row in rows):
        return []
    missing = []
    if "unseen" in options and not any(row.task == UNSEEN for row in rows):
        missing.append("unseen speakers: none were measured (--unseen)")
    if "outside_file" in options and not any(row.outside for row in rows):
        missing.append("a measure that no phase optimised: none was given (--outside-file)")
    return missing


def sign_test(gained: int, lost: int) -> float:
    """Return the two-sided p-value of gained versus lost under a fair coin (the exact form of McNemar's test)."""
    n = gained + lost
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n)
