"""Your own questions: accuracy with intervals, by any field, against another checkpoint, and without the audio.

    audiorl eval qa --data qa.jsonl --model runs/mine --out results/qa --by task language
    audiorl eval qa --data qa.jsonl --model runs/mine --baseline START --blind silence --out results/qa
    audiorl eval qa --data qa.jsonl --score answers.jsonl

A question has choices, of which the answer names one, or an open answer. An answer is right by the rule of rewards: it
names the right choice, or says what a reference says however it is written; `--judge` lets a chat model decide about
open ones. A row that cannot be asked ends the command with its file, row and field.

Writes to --out: predictions.jsonl (responses as they come; a second call goes on from there, and asks nothing again for
other fields), blind-VIEW.jsonl and baseline/predictions.jsonl, results.jsonl (a row for each question), scores.json and
qa.html (the numbers, and questions to listen to). Intervals are 95 % bootstrap intervals; questions about one recording
are drawn together.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from audiorl.config.checks import refuse
from audiorl.data.rows import write_json_lines
from audiorl.data.views import views_of
from audiorl.eval._common import (
    InferenceOptions,
    Row,
    distinct_rows,
    generate_all,
    greedy_engine,
    print_table,
    progress_display,
    run_evaluation,
    summarize,
    with_interval,
    write_scores,
)
from audiorl.eval._questions import ACCURACY, question_article, read_questions
from audiorl.protocols import Ended, Request, RolloutEngine
from audiorl.report.kit import eval_page, note, number_table
from audiorl.rewards.answers import final_text
from audiorl.rewards.chat import ChatEndpoint
from audiorl.rewards.llm_judge import JudgePrompt, OpenAIJudge
from audiorl.types import Rollout, Sample, Segment

OTHERS = {"blind": "difference", "baseline": "change"}
"""Further answers to the questions, and the name of the paired difference of the model's from them."""
EXAMPLES = 10
"""Questions in a section of the page."""
RUBRIC = (
    "1: the answer says what one of the right answers says, in whatever words. 0: it does not, or it also says "
    "something that contradicts the right answers."
)
JUDGED_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class QuestionOptions(InferenceOptions):
    """Options of evaluations that ask questions whose answers are right or wrong."""

    score: Path | None = None
    """Score these answers (JSON lines with id and text) instead of running a model."""
    blind: str | None = None
    """Ask again without the audio and report the difference: silence, noise, swap (the audio of another question), text
    (none), or FILE.py:FUNCTION, a function from a Sample to a Sample."""
    baseline: str | None = None
    """Compare with this model, or with the predictions.jsonl of one: differences with paired intervals."""

    def check(self) -> None:
        """Raise ValueError unless there are questions, and a model or answers to them."""
        if self.score is None:
            return super().check()
        missing = "--score: give the questions with their answers, too: --data FILE"
        refuse((self.data is None, missing), (self.model, "--score: the answers are there; leave --model out"))
        return None

    def check_settings(self, question: str | None = None) -> None:
        """Write out/settings.json where a model is asked, or raise ValueError for other settings there."""
        if self.score is None:
            super().check_settings(question)


@dataclass(frozen=True, kw_only=True)
class QAOptions(QuestionOptions):
    """Measure accuracy on your own questions about audio."""

    by: tuple[str, ...] = ()
    """Fields of the rows by which accuracy is shown, and `answer`, the right one; by default `task` and `language`."""
    clusters: str | None = None
    """Field whose rows are drawn together for the intervals, such as `speaker`; by default the recording."""
    judge: str | None = None
    """Chat model that decides about open answers, as the server at `judge_url` calls it."""
    judge_url: str = "http://127.0.0.1:8000/v1"
    """The OpenAI-compatible server of `judge`; its key is read from OPENAI_API_KEY."""


def main(options: QAOptions, engine: RolloutEngine | None = None) -> Row:
    """Do what the options say and return the scores."""
    refuse((options.score and options.blind, "--blind asks a model: give --model and --out, and leave out --score"))
    samples = read_questions(options, on_error="raise")
    if all(s.task == "asr" for s in samples):
        raise ValueError(f"{options.data}: transcripts, no questions; measure them with audiorl eval asr")
    groups = groups_of(samples, options.by)
    clusters: list[Hashable] = [tuple(clip.key for clip in s.audio) or s.id for s in samples]
    if options.clusters is not None:
        clusters = list(map(tuple, groups_of(samples, (options.clusters,))[options.clusters]))
    said = ask(options, samples, engine)
    results = {name: judged(samples, texts, options) for name, texts in said.items()}
    guesses = [1 / len(s.choices) for s in samples if s.choices]
    scores = score_results(results, groups, clusters)
    if guesses:
        scores["guessing"] = sum(guesses) / len(guesses)

    rows: list[Row] = []
    for i, s in enumerate(samples):
        row: Row = {"id": s.id, "references": list(s.references), **{name: groups[name][i] for name in groups}}
        for name, texts in said.items():
            prefix = "" if name == "model" else f"{name}_"
            row |= {f"{prefix}text": texts.get(s.id), f"{prefix}right": bool(results[name][i]["accuracy"])}
        rows.append(row)
    title = f"{options.data} · {options.model or options.score}"
    labels = {"exact": "word for word", "matched": "without judge"}
    if options.out is not None:
        settings = {name: None if value is None else str(value) for name, value in vars(options).items()}
        page = questions_page(title, scores, labels, samples, results, said)
        write_scores(options.out, {**scores, "options": settings}, {"qa.html": page})
        write_json_lines(options.out / "results.jsonl", rows)
    print_scores(scores, title, labels)
    if guesses:
        print(f"guessing among the choices: {scores['guessing']:.1%}")
    if options.out is not None:
        print(options.out / "qa.html")
    return scores


# -- answers -----------------------------------------------------------------------------------------------------------


def ask(
    options: QuestionOptions, samples: Sequence[Sample], engine: RolloutEngine | None = None
) -> dict[str, dict[str, str]]:
    """Return texts by id: of `model`, and where the options ask for them of `blind` and `baseline`.

    They are kept in OUT/predictions.jsonl, OUT/blind-VIEW.jsonl and OUT/baseline/predictions.jsonl; a model is loaded
    only where answers are missing there.
    """

    def written(load: Callable[[], RolloutEngine], prompts: Sequence[Sample], file: Path) -> dict[str, str]:
        rows = generate_all(_Loaded(load), prompts, file, options.batch_size, describe=_said)
        return {row["id"]: row["text"] for row in rows}

    if options.score is not None:
        said = {"model": recorded(options.score)}
    else:
        assert options.out is not None
        views = [] if options.blind is None else views_of(samples, options.blind)
        load = cache(lambda: engine or options.engine())
        said = {"model": written(load, samples, options.out / "predictions.jsonl")}
        if options.blind is not None:
            name = re.sub(r"[^\w.-]+", "_", options.blind.rpartition("/")[2])
            said["blind"] = written(load, views, options.out / f"blind-{name}.jsonl")
    if options.baseline is None:
        return said
    if options.baseline.endswith(".jsonl"):
        said["baseline"] = recorded(Path(options.baseline))
        if missing := [s.id for s in samples if s.id not in said["baseline"]]:
            raise ValueError(
                f"{options.baseline}: no row {missing[0]!r}; two models are compared on the same questions"
            )
        return said
    if options.out is None:
        raise ValueError("--baseline: with --score give the baseline's predictions.jsonl, or --out for its answers")
    other = replace(options, model=options.baseline, score=None, out=options.out / "baseline")
    other.check_settings()
    start = cache(lambda: greedy_engine(str(other.model), options.max_new_tokens, options.device))
    said["baseline"] = written(start, samples, options.out / "baseline" / "predictions.jsonl")
    return said


@dataclass(frozen=True)
class _Loaded:
    """An engine that is loaded when it is asked something."""

    load: Callable[[], RolloutEngine]

    def generate(self, requests: Sequence[Request], ended: Ended | None = None) -> list[Rollout]:
        return self.load().generate(requests)


def _said(rollout: Rollout) -> Row:
    return {"prediction": final_text(rollout.text)}


def recorded(path: Path) -> dict[str, str]:
    """Read answers by id: JSON lines with id and text. Raises ValueError naming the row for anything else."""
    answers = {str(row["id"]): row["text"] for row in distinct_rows(path, ("text",))}
    if not answers:
        raise ValueError(f"{path}: no rows")
    return answers


def judged(samples: Sequence[Sample], texts: Mapping[str, str], options: QAOptions) -> list[Row]:
    """Judge every question: {accuracy, missing, unanswered, exact, matched?}.

    missing: there is no answer. unanswered: one without a word. exact: the answer is a reference, letter for letter.
    matched: right by the rule of rewards, where a judge decides.
    """
    rows: list[Row] = []
    for sample in samples:
        text = texts.get(sample.id)
        answer = final_text(text or "")
        right = float(text is not None and ACCURACY.correct(text, sample))
        row: Row = {"accuracy": right, "missing": text is None, "unanswered": text is not None and not answer.strip()}
        rows.append(row | {"exact": float(answer in sample.references)} | ({"matched": right} if options.judge else {}))
    if options.judge is None:
        return rows
    verdicts = None if options.out is None else str(options.out / "verdicts")
    endpoint = ChatEndpoint(options.judge, options.judge_url, cache=verdicts)
    # None may fail: an answer that is not judged is neither right nor wrong. The same command goes on from the cache.
    judge = OpenAIJudge(endpoint, JudgePrompt(RUBRIC), scale=(0, 1), max_failed=0)
    asked = [i for i, s in enumerate(samples) if not s.choices and final_text(texts.get(s.id, "")).strip()]
    nothing = torch.zeros(0)
    with progress_display() as display:
        bar = display.add_task(f"judge {options.judge}", total=len(asked))
        for start in range(0, len(asked), JUDGED_AT_ONCE):
            part = asked[start : start + JUDGED_AT_ONCE]
            segments = [Segment(nothing.long(), nothing.long(), nothing, texts[samples[i].id]) for i in part]
            rollouts = [Rollout(samples[i], (s,), samples[i].id) for i, s in zip(part, segments, strict=True)]
            for i, score in zip(part, judge(rollouts), strict=True):
                rows[i]["accuracy"] = float(score is not None and score.total >= 0.5)
            display.advance(bar, len(part))
    return rows


def groups_of(samples: Sequence[Sample], fields: Sequence[str]) -> dict[str, list[list[str]]]:
    """Return {field: the values of each sample as texts}; a list counts by each of its values, none as "(none)".

    Without `fields` those of task and language that tell samples apart. Raises ValueError for a field of no row.
    """
    rows = [{"answer": s.references[0], "task": s.task, **s.metadata} for s in samples]
    known = {name: None for row in rows for name, value in row.items() if isinstance(value, str | int | float | list)}
    for name in fields:
        if name not in known:
            raise ValueError(f"no row has the field {name!r}; there are {', '.join(known)}")
    names = fields or [n for n in ("task", "language") if len({str(row.get(n)) for row in rows}) > 1]
    return {name: [names_of(row.get(name)) or ["(none)"] for row in rows] for name in names}


def names_of(value: Any) -> list[str]:
    """Return the names in a field, each once: a text or a list of texts."""
    values = value if isinstance(value, list) else [value]
    return list(dict.fromkeys(str(v) for v in values if v not in (None, "")))


# -- scores ------------------------------------------------------------------------------------------------------------


def score_results(
    results: Mapping[str, Sequence[Row]],
    groups: Mapping[str, Sequence[Sequence[str]]],
    clusters: Sequence[Hashable] = (),
) -> Row:
    """Return {"total": cell, FIELD: {value: cell}}.

    results: of `model`, and as asked of OTHERS, what is known of each question: its `accuracy`, flags, other numbers.
    groups: the values of each question by field; it counts in each. A cell holds accuracy, its 95 % interval [low,
    high], n, the number of each flag, and the other numbers like the accuracy; `blind` and `difference` = accuracy −
    blind, `baseline` and `change` likewise, differences with intervals that are paired by question.
    """
    own = results["model"]

    def average(values: Mapping[int, float], name: str = "accuracy", share: bool = True) -> Row:
        drawn = [clusters[i] for i in values] if clusters else None
        return summarize([float(v) for v in values.values()], name, clusters=drawn, share=share)

    def cell(indices: Sequence[int]) -> Row:
        right = {i: own[i]["accuracy"] for i in indices}
        values = average(right)
        for name in dict.fromkeys(name for i in indices for name in own[i] if name != "accuracy"):
            column = {i: own[i][name] for i in indices if name in own[i]}
            flags = all(isinstance(value, bool) for value in column.values())
            values[name] = sum(column.values()) if flags else average(column)
        for name, difference in OTHERS.items():
            if name in results:
                other = {i: results[name][i]["accuracy"] for i in indices}
                values[name] = average(other)
                values[difference] = average({i: right[i] - other[i] for i in indices}, share=False)
        return values

    scores: Row = {"total": cell(range(len(own)))}
    for field, values in groups.items():
        members: dict[str, list[int]] = {}
        for i, names in enumerate(values):
            for name in names:
                members.setdefault(name, []).append(i)
        if members:
            scores[field] = {name: cell(indices) for name, indices in sorted(members.items())}
    return scores


Table = tuple[str, list[str], list[list[str]]]
"""(title, head, rows)"""


def score_tables(scores: Mapping[str, Any], title: str, labels: Mapping[str, str]) -> list[Table]:
    """Return accuracies in percent with intervals, `labels` the columns of other numbers; then each of OTHERS."""

    def percent(cell: Mapping[str, float]) -> str:
        return with_interval(cell, ".2f", "accuracy", 100, "–" if cell["low"] >= 0 else " to ")

    cells = [("total", scores["total"])]
    for field, values in scores.items():
        if isinstance(values, Mapping) and field != "total":
            cells += [(f"{field}: {name}", cell) for name, cell in values.items()]
    counts = ["n", *(name for name in ("missing", "unanswered") if scores["total"][name])]
    shown = [name for name in labels if name in scores["total"]]
    rows = [
        [label, percent(c), *(str(c[n]) for n in counts), *(percent(c[n]) if n in c else "" for n in shown)]
        for label, c in cells
    ]
    tables = [(title, ["", "accuracy % (95 % interval)", *counts, *(labels[name] for name in shown)], rows)]
    for name, difference in OTHERS.items():
        if name in scores["total"]:
            rows = [[label, *(percent(x) for x in (c, c[name], c[difference])), str(c["n"])] for label, c in cells]
            against = {"blind": "with audio and without", "baseline": "against the baseline"}[name]
            tables.append((against, ["", "accuracy %", name, difference, "n"], rows))
    return tables


def print_scores(scores: Mapping[str, Any], title: str, labels: Mapping[str, str]) -> None:
    """Print the tables of `score_tables`."""
    for heading, head, rows in score_tables(scores, title, labels):
        print_table(head, [rows[0], [], *rows[1:]] if len(rows) > 1 else rows, heading, width=120)


def questions_page(
    title: str,
    scores: Mapping[str, Any],
    labels: Mapping[str, str],
    samples: Sequence[Sample],
    results: Mapping[str, Sequence[Row]],
    said: Mapping[str, Mapping[str, str]],
) -> str:
    """Return the page: the tables, then questions that the model and the others answer differently, or that are wrong.

    samples, results, said: in one order and by id; see `ask` and `judged`.
    """
    tables = score_tables(scores, title, labels)
    headings = ["Accuracy", *(heading.capitalize() for heading, _, _ in tables[1:])]
    both = zip(headings, tables, strict=True)
    sections = [f"<h2>{heading}</h2>{number_table(head, rows)}" for heading, (_, head, rows) in both]
    wanted: list[tuple[str, str, bool, bool]] = []
    if "baseline" in said:
        wanted += [("Right by the baseline, wrong now", "baseline", False, True)]
        wanted += [("Wrong by the baseline, right now", "baseline", True, False)]
    if "blind" in said:
        wanted += [("Right without the audio", "blind", True, True)]
    for heading, name, own, other in wanted or [("Wrong answers", "model", False, False)]:
        pairs = zip(results["model"], results[name], strict=True)
        found = [i for i, pair in enumerate(pairs) if [bool(r["accuracy"]) for r in pair] == [own, other]]
        articles = ""
        for sample in (samples[i] for i in found[:EXAMPLES]):
            sides = dict.fromkeys(((other, name), (own, "model")))
            written = [(right, who, said[who].get(sample.id, "")) for right, who in sides]
            gold = [] if own or other else [(True, "the answer", " | ".join(sample.references))]
            articles += question_article(sample, sample, [*gold, *written])
        first = f", the first {EXAMPLES}" if len(found) > EXAMPLES else ""
        sections.append(f"<h2>{heading}</h2>{note(f'{len(found)} of {len(samples)} questions{first}')}{articles}")
    total = scores["total"]
    lead = f"{title}: {with_interval(total, '.1%', 'accuracy')} of {total['n']} questions are right."
    return eval_page("Questions", lead, sections)


if __name__ == "__main__":
    run_evaluation(sys.modules[__name__], sys.argv[1:])
