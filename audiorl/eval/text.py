"""Text without audio: perplexity and questions, to see what training on speech cost the text model.

    python -m eval.text --model runs/asr/checkpoints/grpo/step_000200 --baseline START --out results/text
    python -m eval.text --model MODEL --text essays.txt --questions none --out results/essays

Without files it takes passages of Python's documentation and 107 simple questions in English, whose four choices are
compared by their probability. Writes scores.json to --out. Perplexity depends on the tokenizer and, with the bundled
passages, on the version of Python; compare models on one machine, with --baseline.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from audiorl.data.text import BUNDLED, read_passages, read_questions
from audiorl.eval._generate import evaluation_config
from audiorl.eval._options import run_script, write_scores
from audiorl.eval._text import TextResults, measure_text
from audiorl.models import load_policy

NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure a model on text alone, and compare it with the one before training."""

    model: str
    """A Hugging Face model folder or hub id, a checkpoint, or a run folder (its newest checkpoint)."""
    baseline: str | None = None
    """The model before training: differences with paired intervals."""
    text: str = BUNDLED
    """Passages for the perplexity: `bundled`, a .txt file divided by empty lines, rows with `text`, or `none`."""
    questions: str = BUNDLED
    """Questions: `bundled`, rows with question, choices and answer, or `none`."""
    limit: int | None = None
    """Only the first passages and questions."""
    out: Path | None = None
    """Folder for scores.json."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""


def run(options: Options) -> dict[str, Any]:
    """Do what the options say and return the scores."""
    if options.limit is not None and options.limit < 1:
        raise ValueError("--limit: give at least 1")
    if (options.text, options.questions) == (NONE, NONE):
        raise ValueError("--text and --questions are both none: nothing to measure")
    passages = [] if options.text == NONE else read_passages(options.text, options.limit)
    questions = [] if options.questions == NONE else read_questions(options.questions, options.limit)

    def measured(model: str) -> TextResults:
        return measure_text(load_policy(model, evaluation_config(options.device)), passages, questions)

    baseline = None if options.baseline is None else measured(options.baseline)
    scores = measured(options.model).scores(baseline)
    scores |= {"text": options.text, "questions_from": options.questions, "python": platform.python_version()}
    if baseline is not None:
        scores["baseline"] = baseline.scores()
    if options.out is not None:
        write_scores(options.out, scores)
    Console(width=max(Console().width, 100)).print(table(scores, options.model))
    return scores


def table(scores: dict[str, Any], title: str) -> Table:
    """The scores for people, with intervals."""
    out = Table(title=f"{title} · {scores['passages']} passages, {scores['questions']} questions")
    columns = ["", "model", *(["baseline", "model − baseline"] if "baseline" in scores else [])]
    for column in columns:
        out.add_column(column, justify="right" if column else "left")
    for name in ("perplexity", "nats_per_token", "bits_per_byte", "accuracy"):
        if name not in scores:
            continue
        cells = [_interval(scores[name])]
        if "baseline" in scores:
            change = scores["change"].get(name)
            cells += [_interval(scores["baseline"][name]), "" if change is None else _interval(change, "+")]
        out.add_row(name.replace("_", " "), *cells)
    return out


def _interval(value: dict[str, float], sign: str = "") -> str:
    number, low, high = (f"{value[key]:{sign}.3f}" for key in ("value", "low", "high"))
    return f"{number} ({low} to {high})"


if __name__ == "__main__":
    run_script(run, Options, __doc__, "texts")
