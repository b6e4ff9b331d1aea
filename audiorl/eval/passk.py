"""pass@k: how many questions a model can answer in k attempts, before and after training.

    audiorl eval passk --model BASE --trained RUN/checkpoints/grpo/step_000500 --data test.jsonl --out passk
    audiorl eval passk --model BASE --trained RUN --data test.jsonl --out passk --samples 64    (all steps of a run)

Samples n answers to each question from every model and estimates pass@k without bias for k up to n (Chen et al. 2021,
arXiv 2107.03374). RL often raises pass@1 and lowers pass@k for large k, where the base model covers more questions (Yue
et al. 2025, arXiv 2504.13837): the output says at which k the curves cross, and which questions only one of two models
answers in n attempts.

Writes to --out: a folder for each model with its answers, from which an interrupted run continues; scores.json,
results.jsonl (right answers of each question and model), passk.png and passk.html. Intervals are 95 % bootstrap
intervals over questions, those of differences paired by question.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, ClassVar

from matplotlib.figure import Figure

from audiorl.config import SamplingConfig
from audiorl.data.rows import write_json_lines
from audiorl.eval._common import (
    InferenceOptions,
    Row,
    check_settings,
    evaluation_config,
    print_table,
    run_evaluation,
    summarize,
    with_interval,
    write_scores,
)
from audiorl.eval._questions import question_policy, read_questions, right_answers, sample_answers, tokenizer_digest
from audiorl.eval.metrics.choice import crossings, pass_at_k
from audiorl.report.charts import PAGE, PassCurve, draw_passk, plot_passk, svg
from audiorl.report.kit import eval_page, number_table
from audiorl.report.listening import question_card
from audiorl.rollout.hf import HFEngine
from audiorl.types import Sample


@dataclass(frozen=True, kw_only=True)
class PassKOptions(InferenceOptions):
    """Sample answers to questions and compare the coverage of models."""

    newest: ClassVar[bool] = False

    model: str | None = None
    """The base model: a folder or hub id, `tiny`, or NAME=PATH to name its curve."""
    trained: tuple[str, ...] = ()
    """Checkpoints that are compared with the base model, written like it. A run folder stands for all its
    checkpoints. By default only the base model is measured."""
    samples: int = 16
    """Answers to each question, n."""
    ks: tuple[int, ...] = ()
    """Attempts to report, each at most `samples`. By default 1, 2, 4, … and `samples`."""
    temperature: float = 1.0
    """Softmax temperature of the answers."""
    top_p: float = 1.0
    """Sample from the most probable tokens whose probabilities sum to this; 1 takes all."""
    seed: int = 0
    """Seed of the answers."""
    examples: int = 5
    """Questions on the page that only the base model answers."""


@dataclass(frozen=True)
class AnswerCounts:
    """How many of n answers to each question are right, of one model."""

    name: str
    path: str
    right: tuple[int, ...]
    answers: tuple[tuple[str, ...], ...]

    def per_question(self, n: int, k: int) -> list[float]:
        return [pass_at_k(n, c, k) for c in self.right]


def main(options: PassKOptions) -> Row:
    """Do what the options say and return the scores."""
    options.check()
    ks = checked_ks(options)
    assert options.out is not None and options.model is not None
    named = named_models((options.model, *options.trained))
    base, *_ = named
    folders = {name: options.out / re.sub(r"[^\w.-]+", "-", name) for name in named}
    samples = read_questions(replace(options, model=named[base], out=folders[base]))
    sampling = SamplingConfig(
        temperature=options.temperature, top_p=options.top_p, max_new_tokens=options.max_new_tokens
    )
    measured: list[AnswerCounts] = []
    tokenizer = ""
    for name, path in named.items():
        replace(options, model=path, out=folders[name]).check_settings()
        policy = question_policy(path, evaluation_config(options.device))
        tokenizer = tokenizer or tokenizer_digest(policy)
        if tokenizer_digest(policy) != tokenizer:
            raise ValueError(
                f"{path}: has another tokenizer than {named[base]}, so it was not trained from it, and "
                "--max-new-tokens is another length of text; measure it in a call of its own"
            )
        settings = {"temperature": options.temperature, "top_p": options.top_p, "seed": options.seed}
        check_settings(folders[name] / "sampling.json", settings)
        file = folders[name] / "answers.jsonl"
        engine = HFEngine(policy, sampling)
        answers = sample_answers(engine, samples, options.samples, file, options.batch_size, options.seed)
        right = [sum(flags) for flags in right_answers(samples, answers)]
        measured.append(AnswerCounts(name, path, tuple(right), tuple(map(tuple, answers))))
    scores = passk_scores(measured, options.samples, ks)
    rows = [
        {"id": s.id, "task": s.task, "samples": options.samples, "right": {m.name: m.right[i] for m in measured}}
        for i, s in enumerate(samples)
    ]
    write_json_lines(options.out / "results.jsonl", rows)
    curves = [curve(m.name, scores) for m in measured]
    plot_passk(curves, options.out / "passk.png")
    page = passk_page(options, samples, measured, curves, scores)
    write_scores(options.out, {"data": str(options.data), "n": len(samples), **scores}, {"passk.html": page})
    title = f"{options.data} · {len(samples)} questions, {options.samples} answers each"
    print_table(*pass_rows(scores), f"pass@k · {title}", width=110)
    if len(measured) > 1:
        print_table(*coverage_rows(scores), "coverage", width=110)
    for sentence in sentences(scores):
        print(sentence)
    return scores


def checked_ks(options: PassKOptions) -> tuple[int, ...]:
    """Return the k to report, ascending. Raises ValueError for options out of range."""
    n = options.samples
    if n < 1:
        raise ValueError(f"--samples {n}: give at least 1")
    if options.examples < 0:
        raise ValueError("--examples: give 0 or more")
    if not options.temperature > 0 or not math.isfinite(options.temperature):
        raise ValueError(f"--temperature {options.temperature:g}: all answers would be the same; give more than 0")
    for k in options.ks:
        if not 1 <= k <= n:
            raise ValueError(f"--ks {k}: each question has {n} answers; give k from 1 to {n}, or more --samples")
    return tuple(sorted(set(options.ks) or {*(2**i for i in range(n.bit_length())), n}))


def named_models(given: Sequence[str]) -> dict[str, str]:
    """Return {name of the curve: model}, run folders replaced by their checkpoints. ValueError for one name twice."""
    named: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or "/" in name:
            name, path = "", text
        steps = sorted(Path(path).glob("checkpoints/*/step_*"), key=lambda step: (step.stat().st_mtime, step.name))
        if (Path(path) / "checkpoints").is_dir() and not steps:
            raise ValueError(f"{path}: a run without checkpoints; train it, or name a model folder")
        for model in map(str, steps) if steps else [path]:
            label = _label(model) if steps else name or _label(model)
            label = f"{name} {label}" if steps and name else label
            if label in named:
                raise ValueError(f"{named[label]} and {model} are both called {label!r}; write NAME=PATH")
            named[label] = model
    return named


def _label(model: str) -> str:
    parts = Path(model).parts
    return " ".join(parts[-2:]) if len(parts) > 2 and parts[-3] == "checkpoints" else Path(model).name or model


def passk_scores(measured: Sequence[AnswerCounts], n: int, ks: Sequence[int]) -> Row:
    """Return {samples, ks, models: {name: {path, pass: {k: …}}}, against_base: {name: {…}}}.

    Cells are {mean, n, low, high}. A model against the base has `difference` by k; `crosses_at`, the k at which its
    curve goes from above the base model's to below it, or back; `coverage`, questions with a right answer among n of
    both models, of one only, of neither.
    """
    base = measured[0]
    scores: Row = {"samples": n, "ks": list(ks), "models": {}, "against_base": {}}
    means: dict[str, list[float]] = {}
    for m in measured:
        cells = {str(k): summarize(m.per_question(n, k)) for k in ks}
        scores["models"][m.name] = {"path": m.path, "pass": cells}
        means[m.name] = [sum(m.per_question(n, k)) / len(m.right) for k in range(1, n + 1)]
    for m in measured[1:]:
        difference = {}
        for k in ks:
            pairs = zip(m.per_question(n, k), base.per_question(n, k), strict=True)
            difference[str(k)] = summarize([a - b for a, b in pairs])
        solved = [(c > 0, b > 0) for c, b in zip(m.right, base.right, strict=True)]
        scores["against_base"][m.name] = {
            "difference": difference,
            "crosses_at": crossings(means[m.name], means[base.name]),
            "coverage": {
                "both": solved.count((True, True)),
                "only_base": solved.count((False, True)),
                "only_trained": solved.count((True, False)),
                "neither": solved.count((False, False)),
            },
        }
    return scores


def curve(name: str, scores: Mapping[str, Any]) -> PassCurve:
    """Return the curve of a model."""
    cells = [scores["models"][name]["pass"][str(k)] for k in scores["ks"]]
    mean, low, high = (tuple(cell[key] for cell in cells) for key in ("mean", "low", "high"))
    return PassCurve(name, tuple(scores["ks"]), mean, low, high)


def sentences(scores: Mapping[str, Any]) -> list[str]:
    """Say where each curve lies against the base model's."""
    base, n = next(iter(scores["models"])), scores["samples"]
    first, last = str(scores["ks"][0]), str(scores["ks"][-1])
    texts = []
    for name, against in scores["against_base"].items():
        change = against["difference"]
        if against["crosses_at"]:
            text = f"the curves cross at k = {', '.join(map(str, against['crosses_at']))}"
        else:
            text = f"the curves do not cross up to k = {n}"
        ends = [f"{with_interval(change[k], '+.1%')} at k = {k}" for k in dict.fromkeys((first, last))]
        texts.append(f"{name} against {base}: {text}; {', '.join(ends)}")
    return texts


def pass_rows(scores: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return (head, rows): a row for each k, a column for each model and each difference."""
    models, against = scores["models"], scores["against_base"]
    rows = [
        [
            str(k),
            *(with_interval(m["pass"][str(k)], ".1%") for m in models.values()),
            *(with_interval(a["difference"][str(k)], "+.1%") for a in against.values()),
        ]
        for k in scores["ks"]
    ]
    return ["k", *models, *(f"{name} − base" for name in against)], rows


def coverage_rows(scores: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return (head, rows): a row for each trained model, how many questions it, the base, or both answer."""
    head = [f"answered in {scores['samples']} attempts by", "both", "only the base", "only the trained", "neither"]
    return head, [[name, *map(str, a["coverage"].values())] for name, a in scores["against_base"].items()]


def passk_page(
    options: PassKOptions,
    samples: Sequence[Sample],
    measured: Sequence[AnswerCounts],
    curves: Sequence[PassCurve],
    scores: Mapping[str, Any],
) -> str:
    """Return a page: the curves, the tables, and questions that only the base model answers."""
    figure = Figure(figsize=(8.0, 3.6), layout="constrained")
    draw_passk(figure.subplots(), curves, PAGE)
    lead = f"{options.data}: {len(samples)} questions, {options.samples} answers each. {'. '.join(sentences(scores))}"
    sections = [f"<div class='card'>{svg(figure)}</div>", number_table(*pass_rows(scores))]
    if len(measured) > 1:
        sections.append(f"<h2>Coverage</h2>{number_table(*coverage_rows(scores))}")
        base, last = measured[0], measured[-1]
        lost = [i for i in range(len(samples)) if base.right[i] and not last.right[i]][: options.examples]
        articles = "".join(_article(samples[i], base, last, i) for i in lost)
        nothing = "<p class='note'>There is no such question.</p>"
        heading = escape(f"Answered by {base.name}, never by {last.name}")
        sections.append(f"<h2>{heading}</h2>{articles or nothing}")
    return eval_page("pass@k", lead, sections)


def _article(sample: Sample, base: AnswerCounts, last: AnswerCounts, i: int) -> str:
    right = right_answers([sample], [base.answers[i]])[0].index(True)
    answers = "".join(
        f"<div class='side {kind}'><p class='when'>{escape(m.name)}, {m.right[i]} of {len(m.answers[i])}</p>"
        f"<p class='written'>{escape(text)}</p></div>"
        for m, kind, text in ((base, "right", base.answers[i][right]), (last, "wrong", last.answers[i][0]))
    )
    return question_card(sample, sample, answers)


if __name__ == "__main__":
    run_evaluation(sys.modules[__name__], sys.argv[1:])
