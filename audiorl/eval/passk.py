"""pass@k: how many questions a model can answer in k attempts, before and after training.

    audiorl eval passk --model BASE --trained RUN/checkpoints/grpo/step_000500 --data test.jsonl --out passk
    audiorl eval passk --model BASE --trained RUN --data test.jsonl --out passk --samples 64    (all steps of a run)

Samples n answers to each question from every model and estimates pass@k without bias for k up to n (Chen et al. 2021,
arXiv 2107.03374). RL often raises pass@1 and lowers pass@k for large k (Yue et al. 2025, arXiv 2504.13837): the output
says at which k the curves cross, and which questions only one of two models answers in n attempts.

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
from audiorl.config.checks import refuse
from audiorl.data.rows import write_json_lines
from audiorl.eval._common import (
    InferenceOptions,
    Row,
    check_settings,
    evaluation_config,
    print_table,
    question_policy,
    run_evaluation,
    summarize,
    with_interval,
    write_scores,
)
from audiorl.eval._questions import (
    question_article,
    read_questions,
    right_answers,
    sample_answers,
    tokenizer_digest,
)
from audiorl.eval.metrics.choice import crossings, pass_at_k
from audiorl.report.charts import PAGE, PassCurve, draw_passk, plot_passk, svg
from audiorl.report.kit import eval_page, number_table
from audiorl.rollout.hf import HFEngine
from audiorl.types import Sample

EXAMPLES = 5
"""Questions on the page that only the base model answers."""


@dataclass(frozen=True, kw_only=True)
class PassKOptions(InferenceOptions):
    """Sample answers to questions and compare the coverage of models."""

    newest: ClassVar[bool] = False

    model: str | None = None
    """The base model: a folder or hub id, `tiny`, or NAME=PATH to name its curve."""
    trained: tuple[str, ...] = ()
    """Checkpoints that are compared with the base model, written like it; a run folder stands for all of its own."""
    samples: int = 16
    """Answers to each question, n."""
    ks: tuple[int, ...] = ()
    """Attempts to report, each at most `samples`. By default 1, 2, 4, … and `samples`."""
    temperature: float = 1.0
    """Softmax temperature of the answers."""
    seed: int = 0
    """Seed of the answers."""


@dataclass(frozen=True)
class AnswerCounts:
    """How many of n answers to each question are right, of one model."""

    name: str
    path: str
    right: tuple[int, ...]
    answers: tuple[tuple[str, ...], ...]


def main(options: PassKOptions) -> Row:
    """Do what the options say and return the scores."""
    options.check()
    assert options.out is not None and options.model is not None
    n, temperature = options.samples, options.temperature
    outside = next((k for k in options.ks if not 1 <= k <= n), None)
    refuse(
        (n < 1, f"--samples {n}: give at least 1"),
        (
            not 0 < temperature < math.inf,
            f"--temperature {temperature:g}: all answers would be the same; give more than 0",
        ),
        (
            outside is not None,
            f"--ks {outside}: each question has {n} answers; give k from 1 to {n}, or more --samples",
        ),
    )
    ks = sorted(set(options.ks) or {*(2**i for i in range(n.bit_length())), n})
    named = named_models((options.model, *options.trained), options.phase)
    first, *_ = named.values()
    folders = {name: options.out / re.sub(r"[^\w.-]+", "-", name) for name in named}
    samples = read_questions(replace(options, model=first, out=next(iter(folders.values()))))
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=options.max_new_tokens)
    measured: list[AnswerCounts] = []
    tokenizer = ""
    for name, path in named.items():
        replace(options, model=path, out=folders[name]).check_settings()
        policy = question_policy(path, evaluation_config(options.device))
        tokenizer = tokenizer or tokenizer_digest(policy)
        if tokenizer_digest(policy) != tokenizer:
            raise ValueError(
                f"{path}: has another tokenizer than {first}, so it was not trained from it, and --max-new-tokens is "
                "another length of text; measure it in a call of its own"
            )
        check_settings(folders[name] / "sampling.json", {"temperature": temperature, "seed": options.seed})
        file, engine = folders[name] / "answers.jsonl", HFEngine(policy, sampling)
        answers = sample_answers(engine, samples, n, file, options.batch_size, options.seed)
        right = [sum(flags) for flags in right_answers(samples, answers)]
        measured.append(AnswerCounts(name, path, tuple(right), tuple(map(tuple, answers))))
    scores = passk_scores(measured, n, ks)
    rows = [
        {"id": s.id, "task": s.task, "samples": n, "right": {m.name: m.right[i] for m in measured}}
        for i, s in enumerate(samples)
    ]
    write_json_lines(options.out / "results.jsonl", rows)
    curves = []
    for name, model in scores["models"].items():
        columns = (tuple(cell[key] for cell in model["pass"].values()) for key in ("mean", "low", "high"))
        curves.append(PassCurve(name, tuple(ks), *columns))
    plot_passk(curves, options.out / "passk.png")
    tables, said = passk_tables(scores), sentences(scores)
    figure = Figure(figsize=(8.0, 3.6), layout="constrained")
    draw_passk(figure.subplots(), curves, PAGE)
    sections = [f"<div class='card'>{svg(figure)}</div>", number_table(*tables[0])]
    title = f"{options.data} · {len(samples)} questions, {n} answers each"
    print_table(*tables[0], f"pass@k · {title}", width=110)
    if len(measured) > 1:
        print_table(*tables[1], "coverage", width=110)
        sections += [f"<h2>Coverage</h2>{number_table(*tables[1])}", _lost(samples, measured[0], measured[-1])]
    page = eval_page("pass@k", ". ".join([title, *said]), sections)
    write_scores(options.out, {"data": str(options.data), "n": len(samples), **scores}, {"passk.html": page})
    for sentence in said:
        print(sentence)
    return scores


def named_models(given: Sequence[str], phase: str | None = None) -> dict[str, str]:
    """Return {name of the curve: model}, run folders replaced by their checkpoints, of `phase` where it is given.

    Raises ValueError for one name twice.
    """
    named: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or "/" in name:
            name, path = "", text
        found = Path(path).glob(f"checkpoints/{phase or '*'}/step_*")
        steps = sorted(found, key=lambda step: (step.stat().st_mtime, step.name))
        if (Path(path) / "checkpoints").is_dir() and not steps:
            raise ValueError(f"{path}: a run without checkpoints of {phase or 'any phase'}; train it, or name a model")
        for model in steps or [Path(path)]:
            inside = len(model.parts) > 2 and model.parts[-3] == "checkpoints"
            label = " ".join(model.parts[-2:]) if inside else model.name or path
            label = " ".join(filter(None, [name, label])) if steps else name or label
            model_path = str(model) if steps else path
            if label in named:
                raise ValueError(f"{named[label]} and {model_path} are both called {label!r}; write NAME=PATH")
            named[label] = model_path
    return named


def passk_scores(measured: Sequence[AnswerCounts], n: int, ks: Sequence[int]) -> Row:
    """Return {samples, ks, models: {name: {path, pass: {k: …}}}, against_base: {name: {…}}}.

    Cells are {mean, n, low, high}. A model against the base has `difference` by k; `crosses_at`, the k at which its
    curve goes from above the base model's to below it, or back; `coverage`, questions with a right answer among n of
    both models, of one only, of neither.
    """
    by_k = {m.name: {k: [pass_at_k(n, c, k) for c in m.right] for k in range(1, n + 1)} for m in measured}
    means = {name: [sum(values) / len(values) for values in columns.values()] for name, columns in by_k.items()}
    scores: Row = {"samples": n, "ks": list(ks), "models": {}, "against_base": {}}
    for m in measured:
        passed = {str(k): summarize(by_k[m.name][k], share=True) for k in ks}
        scores["models"][m.name] = {"path": m.path, "pass": passed}
    base = measured[0]
    for m in measured[1:]:
        pairs = {k: zip(by_k[m.name][k], by_k[base.name][k], strict=True) for k in ks}
        solved = [(c > 0, b > 0) for c, b in zip(m.right, base.right, strict=True)]
        kinds = {"both": (True, True), "only_base": (False, True), "only_trained": (True, False)}
        scores["against_base"][m.name] = {
            "difference": {str(k): summarize([a - b for a, b in both]) for k, both in pairs.items()},
            "crosses_at": crossings(means[m.name], means[base.name]),
            "coverage": {k: solved.count(kind) for k, kind in (kinds | {"neither": (False, False)}).items()},
        }
    return scores


def sentences(scores: Mapping[str, Any]) -> list[str]:
    """Say where each curve lies against the base model's."""
    base, n = next(iter(scores["models"])), scores["samples"]
    texts = []
    for name, against in scores["against_base"].items():
        text = f"the curves do not cross up to k = {n}"
        if against["crosses_at"]:
            text = f"the curves cross at k = {', '.join(map(str, against['crosses_at']))}"
        changes = list(against["difference"].items())
        ends = [f"{with_interval(change, '+.1%')} at k = {k}" for k, change in dict([changes[0], changes[-1]]).items()]
        texts.append(f"{name} against {base}: {text}; {', '.join(ends)}")
    return texts


def passk_tables(scores: Mapping[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """Return (head, rows) of pass@k, with a column for each model and each difference, and of the coverage."""
    models, against = scores["models"], scores["against_base"]
    rows = []
    for k in map(str, scores["ks"]):
        values = [with_interval(m["pass"][k], ".1%") for m in models.values()]
        rows.append([k, *values, *(with_interval(a["difference"][k], "+.1%") for a in against.values())])
    head = [f"answered in {scores['samples']} attempts by", "both", "only the base", "only the trained", "neither"]
    coverage = [[name, *map(str, a["coverage"].values())] for name, a in against.items()]
    return [(["k", *models, *(f"{name} − base" for name in against)], rows), (head, coverage)]


def _lost(samples: Sequence[Sample], base: AnswerCounts, last: AnswerCounts) -> str:
    """Return the section with questions that only the base model answers."""
    articles = ""
    for i in [i for i in range(len(samples)) if base.right[i] and not last.right[i]][:EXAMPLES]:
        right = right_answers([samples[i]], [base.answers[i]])[0].index(True)
        titles = (f"{m.name}, {m.right[i]} of {len(m.answers[i])}" for m in (base, last))
        sides = zip((True, False), titles, (base.answers[i][right], last.answers[i][0]), strict=True)
        articles += question_article(samples[i], samples[i], list(sides))
    nothing = "<p class='note'>There is no such question.</p>"
    return f"<h2>{escape(f'Answered by {base.name}, never by {last.name}')}</h2>{articles or nothing}"


if __name__ == "__main__":
    run_evaluation(sys.modules[__name__], sys.argv[1:])
