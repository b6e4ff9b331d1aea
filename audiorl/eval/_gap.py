"""The same questions by audio and by text: what a speech model loses because it listens instead of reading.

Shapes: C choices of a question.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audiorl.eval._questions import ACCURACY, choice_turn
from audiorl.eval._summaries import paired_changes, summarize
from audiorl.eval._text import answer_logprobs
from audiorl.eval.metrics.choice import jensen_shannon, kl_divergence, log_distribution
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, experience
from audiorl.rewards.choices import match_choice, normalize_text
from audiorl.rewards.tags import final_text
from audiorl.types import Sample

Row = Mapping[str, Any]
MEASURES = ("right_audio", "right_text", "gap", "alike", "kl", "jsd", "choice_audio", "choice_text", "choice_gap")
"""What each question is measured by; those from `kl` on need choices."""


def choice_logprobs(
    policy: AudioPolicy, samples: Sequence[Sample], answers: Sequence[str], budget: int = 8192
) -> list[NDArray[np.float64] | None]:
    """Log-probs [C] of the choices as the answer to each question, in nats; None for a question without choices.

    A choice is measured as a whole turn, in the tags that the prompt asks for, after the thought in `answers`, what the
    model wrote. The log-probs of a question's choices add up to 1.
    """
    turns = [
        experience(policy, Example(sample, _thought(answer) + choice_turn(sample, choice)), sample.id)
        for sample, answer in zip(samples, answers, strict=True)
        for choice in sample.choices
    ]
    totals = iter(
        [float(values.double().sum()) for values in answer_logprobs(policy, turns, budget, share_prompts=True)]
    )
    return [log_distribution(np.array([next(totals) for _ in s.choices])) if s.choices else None for s in samples]


def _thought(answer: str) -> str:
    return answer[: answer.index("<answer>")] if "<think>" in answer and "<answer>" in answer else ""


def gap_rows(
    policy: AudioPolicy,
    by_audio: Sequence[Sample],
    by_text: Sequence[Sample],
    audio_answers: Sequence[str],
    text_answers: Sequence[str],
) -> list[dict[str, Any]]:
    """A row for each question: both answers, the measures of MEASURES, and the probabilities of the choices.

    kl is KL(text ‖ audio): the text view as the teacher. gap is text - audio: 1 where only the text view is right.
    """
    audio_logprobs = choice_logprobs(policy, by_audio, audio_answers)
    text_logprobs = choice_logprobs(policy, by_text, text_answers)
    rows = []
    for i, sample in enumerate(by_audio):
        audio, text = (float(ACCURACY.correct(answers[i], sample)) for answers in (audio_answers, text_answers))
        row: dict[str, Any] = {
            "id": sample.id,
            "task": sample.task,
            "answer_audio": audio_answers[i],
            "answer_text": text_answers[i],
            "right_audio": audio,
            "right_text": text,
            "gap": text - audio,
            "alike": float(_alike(audio_answers[i], text_answers[i], sample)),
        }
        p_C, q_C = text_logprobs[i], audio_logprobs[i]
        if p_C is not None and q_C is not None:
            right_text, right_audio = (_right(logprobs_C, sample) for logprobs_C in (p_C, q_C))
            row |= {"kl": kl_divergence(p_C, q_C), "jsd": jensen_shannon(p_C, q_C)}
            row |= {"choice_audio": right_audio, "choice_text": right_text, "choice_gap": right_text - right_audio}
            row |= {"probabilities_audio": np.exp(q_C).tolist(), "probabilities_text": np.exp(p_C).tolist()}
        rows.append(row)
    return rows


def _right(logprobs_C: NDArray[np.float64], sample: Sample) -> float:
    return float(sample.choices[int(np.argmax(logprobs_C))] in sample.references)


def _alike(a: str, b: str, sample: Sample) -> bool:
    """Whether two answers name one choice, or read the same; answers without a word are never alike."""
    a, b = final_text(a), final_text(b)
    named = [match_choice(text, sample.choices) for text in (a, b)] if sample.choices else [None, None]
    if named[0] is not None or named[1] is not None:
        return named[0] == named[1]
    return bool(normalize_text(a)) and normalize_text(a) == normalize_text(b)


def gap_scores(rows: Sequence[Row], baseline: Sequence[Row] = ()) -> dict[str, Any]:
    """{measure: {mean, low, high, n}} with 95 % bootstrap intervals over questions; those of differences are paired.

    With a baseline's rows also `baseline`, the same of its rows, and `changes`: {measure: [mean, low, high]} of the
    paired differences. `closed` is the share of the baseline's gap that is gone, where that gap's interval lies above
    0. Raises ValueError for a question that the baseline lacks.
    """
    scores = _summaries(rows)
    if not baseline:
        return scores
    before = {str(row["id"]): row for row in baseline}
    for row in rows:
        if str(row["id"]) not in before:
            raise ValueError(f"no row {str(row['id'])!r}; measure both models on the same questions")
    compared = [before[str(row["id"])] for row in rows]
    scores["baseline"] = _summaries(compared)
    scores["changes"] = paired_changes(
        *({str(row["id"]): {m: row[m] for m in MEASURES if m in row} for row in part} for part in (compared, rows))
    )
    if scores["baseline"]["gap"]["low"] > 0:
        scores["closed"] = 1 - scores["gap"]["mean"] / scores["baseline"]["gap"]["mean"]
    return scores


def _summaries(rows: Sequence[Row]) -> dict[str, Any]:
    columns = {m: [float(row[m]) for row in rows if m in row] for m in MEASURES}
    return {m: summarize(column) for m, column in columns.items() if column}


def tokenizer_digest(policy: AudioPolicy) -> str:
    """Equal for tokenizers with one vocabulary."""
    vocabulary = json.dumps(sorted(policy.tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.sha256(vocabulary.encode("utf-8", "surrogatepass")).hexdigest()[:16]
