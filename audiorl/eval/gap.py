"""The same questions by audio and by text: accuracy of both, and how far the answers differ.

    audiorl eval gap --model TRAINED --data held_out.jsonl --out gaps/trained --baseline gaps/model

Every question is answered greedily twice: by its audio, and with its transcript (metadata `text`, the row's column
`text`) instead of the audio. The difference is what the model loses because it listens instead of reading. For
questions with choices the probabilities of the choices are compared, too: KL(text ‖ audio) and the Jensen-Shannon
divergence in nats, of each choice as the whole answer, after the thought that the model wrote.

Writes to --out: scores.json, results.jsonl (a row for each question) and gap.html (the numbers, and questions that only
the text view answers, to listen to). --baseline compares with the results of an earlier call on the same questions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from audiorl.config import SamplingConfig
from audiorl.data.rows import write_json_lines
from audiorl.data.views import views_of
from audiorl.eval._common import (
    InferenceOptions,
    Row,
    check_settings,
    evaluation_config,
    generate_all,
    paired_changes,
    print_table,
    question_policy,
    read_rows,
    run_evaluation,
    summarize,
    with_interval,
    write_scores,
)
from audiorl.eval._questions import (
    ACCURACY,
    choice_logprobs,
    question_article,
    read_questions,
    tokenizer_digest,
)
from audiorl.eval.metrics.choice import jensen_shannon, kl_divergence
from audiorl.models import AudioPolicy
from audiorl.report.kit import eval_page, number_table
from audiorl.rewards.answers import final_text, language_of, normalize_text, same_answer
from audiorl.rollout.hf import HFEngine
from audiorl.types import Sample

MEASURES = {
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
"""The measures of a question and their labels; those from `kl` on need choices."""
SHARES = ("right_audio", "right_text", "alike", "choice_audio", "choice_text")
EXAMPLES = 10
"""Questions on the page that only the text view answers."""


@dataclass(frozen=True, kw_only=True)
class GapOptions(InferenceOptions):
    """Compare a model's answers by audio with its answers by text."""

    view: str = "transcript"
    """What stands for the audio: transcript, or FILE.py:FUNCTION, a function from a Sample to a Sample."""
    baseline: Path | None = None
    """The --out folder (or its results.jsonl) of another checkpoint on the same questions, to compare with."""


def main(options: GapOptions, policy: AudioPolicy | None = None) -> Row:
    """Do what the options say and return the scores."""
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
    write_json_lines(options.out / "results.jsonl", rows)
    table = gap_table(scores)
    articles = ""
    for i in [i for i, row in enumerate(rows) if row["gap"] > 0][:EXAMPLES]:
        sides = [(bool(rows[i][f"right_{n}"]), f"by {n}", str(rows[i][f"answer_{n}"])) for n in ("text", "audio")]
        articles += question_article(samples[i], by_text[i], sides)
    lead = (
        f"{options.model} on {len(rows)} questions of {options.data}, by their audio and with the view "
        f"{options.view} in its place. The gap is {with_interval(scores['gap'], '+.1%')}."
    )
    nothing = "<p class='note'>The text view answers no question that the audio does not.</p>"
    lost = f"<h2>Right by text, wrong by audio</h2>{articles or nothing}"
    page = eval_page("Audio against text", lead, [number_table(*table), lost])
    settings = {name: None if value is None else str(value) for name, value in vars(options).items()}
    write_scores(options.out, {"n": len(rows), **scores, "options": settings}, {"gap.html": page})
    print_table(*table, f"{options.model} · {options.data} · {len(rows)} questions", width=110)
    if "closed" in scores:
        print(f"{scores['closed']:.0%} of the baseline's gap is closed")
    return scores


def read_baseline(path: Path, tokenizer: str) -> list[Row]:
    """Read the rows of an earlier call. Raises ValueError for a damaged file and a model with another tokenizer."""
    file = path / "results.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"--baseline {path}: no results.jsonl there; give the --out folder of audiorl eval gap")
    settings = file.parent / "gap.json"
    if settings.is_file() and json.loads(settings.read_bytes()).get("tokenizer") != tokenizer:
        raise ValueError(f"--baseline {path}: measured with another tokenizer; give a checkpoint of the same model")
    rows = read_rows(file)
    for number, row in enumerate(rows, 1):
        for field in ("right_audio", "right_text", "gap", "alike"):
            if type(row.get(field)) not in (int, float):
                raise ValueError(f"{file}: row {number}, field {field!r}: {row.get(field)!r} is no number")
    return rows


def gap_rows(
    policy: AudioPolicy,
    by_audio: Sequence[Sample],
    by_text: Sequence[Sample],
    audio_answers: Sequence[str],
    text_answers: Sequence[str],
) -> list[Row]:
    """Return a row for each question: both answers, the measures of MEASURES, and the probabilities of the choices.

    kl is KL(text ‖ audio): the text view as the teacher. gap is text - audio: 1 where only the text view is right.
    """
    audio_logprobs = choice_logprobs(policy, by_audio, audio_answers)
    text_logprobs = choice_logprobs(policy, by_text, text_answers)
    rows = []
    for i, sample in enumerate(by_audio):
        audio, text = (float(ACCURACY.correct(answers[i], sample)) for answers in (audio_answers, text_answers))
        row: Row = {"id": sample.id, "task": sample.task}
        row |= {"answer_audio": audio_answers[i], "answer_text": text_answers[i]}
        row |= {"right_audio": audio, "right_text": text, "gap": text - audio}
        row["alike"] = float(_alike(audio_answers[i], text_answers[i], sample))
        p_C, q_C = text_logprobs[i], audio_logprobs[i]
        if p_C is not None and q_C is not None:
            best = [float(ACCURACY.correct(sample.choices[np.argmax(v_C)], sample)) for v_C in (q_C, p_C)]
            row |= {"kl": kl_divergence(p_C, q_C), "jsd": jensen_shannon(p_C, q_C)}
            row |= {"choice_audio": best[0], "choice_text": best[1], "choice_gap": best[1] - best[0]}
            row |= {"probabilities_audio": np.exp(q_C).tolist(), "probabilities_text": np.exp(p_C).tolist()}
        rows.append(row)
    return rows


def _alike(a: str, b: str, sample: Sample) -> bool:
    """Return whether two answers name one choice, or read the same; answers without a word are never alike."""
    a, b = final_text(a), final_text(b)
    return bool(normalize_text(a)) and same_answer(a, b, sample.choices, language=language_of(sample))


def gap_scores(rows: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]] = ()) -> Row:
    """Return {measure: {mean, low, high, n}} with 95 % intervals over questions; those of differences are paired.

    With a baseline's rows also `baseline`, the same of its rows, and `changes`: {measure: [mean, low, high]} of the
    paired differences. `closed` is the share of the baseline's gap that is gone, where that gap's interval lies above
    0. Raises ValueError for a question that the baseline lacks.
    """

    def summaries(rows: Sequence[Mapping[str, Any]]) -> Row:
        columns = {m: [float(row[m]) for row in rows if m in row] for m in MEASURES}
        return {m: summarize(column, share=m in SHARES) for m, column in columns.items() if column}

    scores = summaries(rows)
    if not baseline:
        return scores
    before = {str(row["id"]): row for row in baseline}
    for row in rows:
        if str(row["id"]) not in before:
            raise ValueError(f"no row {str(row['id'])!r}; measure both models on the same questions")
    compared = [before[str(row["id"])] for row in rows]
    scores["baseline"] = summaries(compared)
    scores["changes"] = paired_changes(
        *({str(row["id"]): {m: row[m] for m in MEASURES if m in row} for row in part} for part in (compared, rows))
    )
    if scores["baseline"]["gap"]["low"] > 0:
        scores["closed"] = 1 - scores["gap"]["mean"] / scores["baseline"]["gap"]["mean"]
    return scores


def gap_table(scores: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return (head, rows): of each measure its value with interval, and the baseline's with the change."""
    head, rows = ["", "value (95 % interval)", *(["baseline", "change"] if "baseline" in scores else [])], []
    for name, label in MEASURES.items():
        if name not in scores:
            continue
        form = ".3f" if name in ("kl", "jsd") else "+.1%" if "gap" in name else ".1%"
        row = [label, with_interval(scores[name], form)]
        if "baseline" in scores:
            before, change = scores["baseline"].get(name), scores["changes"].get(name)
            row.append(with_interval(before, form) if before else "")
            moved = dict(zip(("mean", "low", "high"), change, strict=True)) if change else {}
            row.append(with_interval(moved, f"+{form.removeprefix('+')}") if change else "")
        rows.append(row)
    return head, rows


if __name__ == "__main__":
    run_evaluation(sys.modules[__name__], sys.argv[1:])
