"""The same questions by audio and by text: accuracy of both, and how far the answers differ.

    python -m eval.gap --model MODEL --data held_out.jsonl --out gaps/model
    python -m eval.gap --model TRAINED --data held_out.jsonl --out gaps/trained --baseline gaps/model

Every question is answered greedily twice: by its audio, and with its transcript (metadata `text`, the row's column
`text`) in place of the audio. The difference is what the model loses because it listens instead of reading. For
questions with choices the probabilities of the choices are compared, too: KL(text ‖ audio) and the Jensen-Shannon
divergence in nats, of each choice as the whole answer, after the thought that the model wrote.

Writes to --out: scores.json, results.jsonl (a row for each question) and gap.html (the numbers, and questions that only
the text view answers, to listen to). --baseline compares with the results of an earlier call on the same questions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from audiorl.config import SamplingConfig
from audiorl.data.views import views_of
from audiorl.eval._gap import MEASURES, gap_rows, gap_scores, tokenizer_digest
from audiorl.eval._generate import check_settings, evaluation_config, generate_all, read_rows
from audiorl.eval._options import InferenceOptions, run_script, write_scores
from audiorl.eval._questions import question_policy, read_questions
from audiorl.models import AudioPolicy
from audiorl.report.charts import PAGE, draw_bars, svg
from audiorl.report.kit import eval_page, number_table
from audiorl.report.listening import question_card
from audiorl.report.summary import Measure
from audiorl.rollout.hf import HFEngine
from audiorl.types import Sample

LABELS = {
    "right_audio": "accuracy by audio",
    "right_text": "accuracy by text",
    "gap": "text − audio",
    "alike": "answered alike",
    "kl": "KL(text ‖ audio), nats",
    "jsd": "Jensen-Shannon, nats",
    "choice_audio": "most probable choice right, by audio",
    "choice_text": "most probable choice right, by text",
    "choice_gap": "text − audio of the most probable choice",
}
NATS = ("kl", "jsd")


@dataclass(frozen=True, kw_only=True)
class Options(InferenceOptions):
    """Compare a model's answers by audio with its answers by text."""

    view: str = "transcript"
    """What stands for the audio: transcript, or FILE.py:FUNCTION, a function from a Sample to a Sample."""
    baseline: Path | None = None
    """The --out folder (or its results.jsonl) of another checkpoint on the same questions, such as before training: the
    differences are shown with paired intervals. By default nothing is compared."""
    examples: int = 10
    """Questions on the page that only the text view answers."""


def run(options: Options, policy: AudioPolicy | None = None) -> dict[str, Any]:
    """Do what the options say and return the scores."""
    if options.examples < 0:
        raise ValueError("--examples: give 0 or more")
    samples = read_questions(options)
    by_text = views_of(samples, options.view)
    assert options.out is not None and options.model is not None
    policy = policy or question_policy(options.model, evaluation_config(options.device))
    tokenizer = tokenizer_digest(policy)
    check_settings(options.out / "gap.json", {"view": options.view, "tokenizer": tokenizer})
    baseline = [] if options.baseline is None else read_baseline(options.baseline, tokenizer)
    engine = HFEngine(policy, SamplingConfig(temperature=0.0, max_new_tokens=options.max_new_tokens))
    answers = [
        [row["text"] for row in generate_all(engine, prompts, options.out / f"{name}.jsonl", options.batch_size)]
        for name, prompts in (("audio", samples), ("text", by_text))
    ]
    rows = gap_rows(policy, samples, by_text, *answers)
    try:
        scores = gap_scores(rows, baseline)
    except ValueError as error:
        raise ValueError(f"--baseline {options.baseline}: {error}") from error
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (options.out / "results.jsonl").write_text(lines, encoding="utf-8")
    settings = {name: None if value is None else str(value) for name, value in vars(options).items()}
    page = gap_page(options, samples, by_text, rows, scores)
    write_scores(options.out, {"n": len(rows), **scores, "options": settings}, {"gap.html": page})
    Console(width=max(Console().width, 110)).print(
        table(scores, f"{options.model} · {options.data} · {len(rows)} questions")
    )
    if "closed" in scores:
        print(f"{scores['closed']:.0%} of the baseline's gap is closed")
    return scores


def read_baseline(path: Path, tokenizer: str) -> list[dict[str, Any]]:
    """The rows of an earlier call. Raises ValueError for a damaged file and for a model with another tokenizer."""
    file = path / "results.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"--baseline {path}: no results.jsonl there; give the --out folder of audiorl eval gap")
    settings = file.parent / "gap.json"
    if settings.is_file() and json.loads(settings.read_bytes()).get("tokenizer") != tokenizer:
        raise ValueError(
            f"--baseline {path}: measured with another tokenizer, so it is no checkpoint of the same model; give one "
            "that is"
        )
    rows = read_rows(file)
    for number, row in enumerate(rows, 1):
        for field in (name for name in MEASURES if name in row or name in MEASURES[:4]):
            value = row.get(field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{file}: row {number}, field {field!r}: {value!r} is no number; measure again")
    return rows


def cells(scores: Mapping[str, Any]) -> list[list[str]]:
    """A row for each measure: its name, its value with interval, and the baseline's with the change."""
    rows = []
    for name, label in LABELS.items():
        if name not in scores:
            continue
        row = [label, shown(scores[name], name)]
        if "baseline" in scores:
            change = scores["changes"].get(name)
            row.append(shown(scores["baseline"][name], name) if name in scores["baseline"] else "")
            row.append(shown(dict(zip(("mean", "low", "high"), change, strict=True)), name, "+") if change else "")
        rows.append(row)
    return rows


def shown(cell: Mapping[str, float], name: str, sign: str = "") -> str:
    form = f"{sign}.3f" if name in NATS else f"{'+' if 'gap' in name else sign}.1%"
    mean, low, high = (format(cell[key], form) for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def heads(scores: Mapping[str, Any]) -> list[str]:
    return ["", "value (95 % interval)", *(["baseline", "change"] if "baseline" in scores else [])]


def table(scores: Mapping[str, Any], title: str) -> Table:
    """The scores for people."""
    out = Table(title=title)
    for head in heads(scores):
        out.add_column(head, justify="right" if head else "left")
    for row in cells(scores):
        out.add_row(*row)
    return out


def gap_page(
    options: Options,
    samples: Sequence[Sample],
    by_text: Sequence[Sample],
    rows: Sequence[Mapping[str, Any]],
    scores: Mapping[str, Any],
) -> str:
    """Accuracies as bars, the table, and questions that only the text view answers."""
    figure = Figure(figsize=(8.0, 1.8), layout="constrained")
    names = {"right_text": "by text", "right_audio": "by audio"}
    bars = [(label, scores[name]) for name, label in names.items()]
    if "baseline" in scores:
        bars = [
            (f"{label}_{moment}", part[name])
            for name, label in names.items()
            for moment, part in (("before", scores["baseline"]), ("after", scores))
        ]
    measures = [Measure(label, cell["mean"], cell["n"], cell["low"], cell["high"]) for label, cell in bars]
    draw_bars(figure.subplots(), measures, "accuracy", PAGE)
    lost = [i for i, row in enumerate(rows) if row["gap"] > 0][: options.examples]
    articles = "".join(_article(samples[i], by_text[i], rows[i]) for i in lost)
    lead = (
        f"{options.model} on {len(rows)} questions of {options.data}, by their audio and with the view "
        f"{options.view} in its place. The gap is {shown(scores['gap'], 'gap')}."
    )
    nothing = "<p class='note'>The text view answers no question that the audio does not.</p>"
    sections = [
        f"<div class='card'>{svg(figure)}</div>",
        number_table(heads(scores), cells(scores)),
        f"<h2>Right by text, wrong by audio</h2>{articles or nothing}",
    ]
    return eval_page("Audio against text", lead, sections)


def _article(sample: Sample, by_text: Sample, row: Mapping[str, Any]) -> str:
    answers = "".join(
        f"<div class='side {'right' if row[f'right_{name}'] else 'wrong'}'><p class='when'>by {name}</p>"
        f"<p class='written'>{escape(str(row[f'answer_{name}']))}</p></div>"
        for name in ("text", "audio")
    )
    return question_card(sample, by_text, answers)


if __name__ == "__main__":
    run_script(run, Options, __doc__, "questions")
