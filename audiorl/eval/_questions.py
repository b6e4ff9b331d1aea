"""Questions whose right answers are known: reading, sampling answers, probabilities of choices, writing selected ones.

Shapes: C choices of a question.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
import soundfile
from numpy.typing import NDArray

from audiorl.data.bundled import bundled_set
from audiorl.data.formats import PART, audio_field
from audiorl.data.manifest import column_names, read_values
from audiorl.data.rows import cache_folder
from audiorl.data.schema import check_limit
from audiorl.eval._common import InferenceOptions, Row, complete_answers
from audiorl.eval.metrics.choice import log_distribution
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, answer_logprobs, experience
from audiorl.protocols import Request, RolloutEngine
from audiorl.report.listening import question_card
from audiorl.rewards import AnswerAccuracy
from audiorl.types import Sample

ACCURACY = AnswerAccuracy(fallback="text")
"""When an answer is right: it names the reference's choice, or equals the reference; tags are not required."""
_RATE = 16_000


def read_questions(options: InferenceOptions, on_error: Literal["raise", "skip"] = "skip") -> list[Sample]:
    """Read the questions of `options.data`, a manifest or a bundled set by name, the first `options.limit` of them.

    on_error: what becomes of rows that cannot be asked. Raises ValueError where there are no questions, and for one
    without a reference.
    """
    options.check()
    if _bundled(options):
        check_limit(options.limit)
        options.check_settings()
        samples = bundled_set(str(options.data), options.think)[: options.limit]
    else:
        samples = list(options.read(on_error=on_error).samples)
    if not samples:
        raise ValueError(f"{options.data}: no questions")
    for sample in samples:
        if not sample.references:
            raise ValueError(f"{options.data}: sample {sample.id!r}: no reference; give rows with answers")
    return samples


def _bundled(options: InferenceOptions) -> bool:
    return str(options.data).startswith("bundled") and options.data is not None and not options.data.exists()


def tokenizer_digest(policy: AudioPolicy) -> str:
    """Return a text that is equal for tokenizers with one vocabulary."""
    vocabulary = json.dumps(sorted(policy.tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.sha256(vocabulary.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def sample_answers(
    engine: RolloutEngine, samples: Sequence[Sample], count: int, path: Path, batch_size: int = 8, seed: int = 0
) -> list[list[str]]:
    """Sample `count` answers to each question, in the order of `samples`.

    They are kept in `path` (JSON lines of id and answers), from which an interrupted run continues; a file with more
    answers is used as it is.
    """

    def answers(batch: Sequence[Sample]) -> list[Row]:
        texts = [r.text for r in engine.generate([Request(s, n=count, seed=seed) for s in batch])]
        return [{"id": s.id, "answers": texts[i * count : (i + 1) * count]} for i, s in enumerate(batch)]

    def is_current(sample: Sample, row: Row) -> bool:
        answers = row.get("answers")
        if not isinstance(answers, list) or not all(isinstance(a, str) for a in answers):
            raise ValueError(f"{path}: row {sample.id!r}: field 'answers' is no list of texts; choose another --out")
        return len(answers) >= count

    rows = complete_answers(path, samples, answers, batch_size, is_current)
    return [row["answers"][:count] for row in rows.values()]


def right_answers(samples: Sequence[Sample], answers: Sequence[Sequence[str]]) -> list[list[bool]]:
    """Return which answers are right, by `ACCURACY`."""
    return [[ACCURACY.correct(text, s) for text in texts] for s, texts in zip(samples, answers, strict=True)]


# -- probabilities of choices ------------------------------------------------------------------------------------------


def choice_logprobs(
    policy: AudioPolicy, samples: Sequence[Sample], answers: Sequence[str]
) -> list[NDArray[np.float64] | None]:
    """Return log-probs [C] of the choices as the answer to each question, in nats; None for one without choices.

    A choice is measured as a whole turn, in <answer> tags where the prompt asks for them, after the thought in
    `answers`, what the model wrote. The log-probs of a question's choices add up to 1.
    """
    written = []
    for sample, answer in zip(samples, answers, strict=True):
        tags = any("<answer>" in c for m in sample.messages for c in m.content if isinstance(c, str))
        thought = answer[: answer.index("<answer>")] if "<think>" in answer and "<answer>" in answer else ""
        written.append([thought + (f"<answer>{choice}</answer>" if tags else choice) for choice in sample.choices])
    totals = _turn_logprobs(policy, samples, written)
    return [log_distribution(totals_C) if len(totals_C) else None for totals_C in totals]


def most_probable_choices(
    policy: AudioPolicy, samples: Sequence[Sample], answered: Callable[[str], str] = "{}".format, budget: int = 8192
) -> list[str]:
    """Return the choice of each sample with the greatest sum of log-probs, the end of the turn included.

    Harnesses for text models call it ranking by log-likelihood. It is no measure of what a user gets: a model is right
    here that writes "Oulio" for the choice "Julio", if that is the nearest of the four.

    answered: the turn that gives a choice, with its tags. budget: row tokens in a pass. Raises ValueError for a sample
    without choices.
    """
    for sample in samples:
        if not sample.choices:
            raise ValueError(f"sample {sample.id!r}: no choices to compare; give rows with choices")
    totals = _turn_logprobs(policy, samples, [[answered(c) for c in s.choices] for s in samples], budget)
    return [s.choices[int(np.argmax(totals_C))] for s, totals_C in zip(samples, totals, strict=True)]


def _turn_logprobs(
    policy: AudioPolicy, samples: Sequence[Sample], turns: Sequence[Sequence[str]], budget: int = 8192
) -> list[NDArray[np.float64]]:
    """Return the log-prob of each turn of each sample, in nats; the turns of a sample share its prompt."""
    both = zip(samples, turns, strict=True)
    laid_out = [experience(policy, Example(s, turn), s.id, sampled=True) for s, own in both for turn in own]
    logprobs = answer_logprobs(policy, laid_out, budget, share_prompts=True)
    totals = iter([float(values.double().sum()) for values in logprobs])
    return [np.array([next(totals) for _ in own]) for own in turns]


# -- an article of a page, and a manifest of selected questions --------------------------------------------------------


def question_article(sample: Sample, shown: Sample, answers: Sequence[tuple[bool, str, str]]) -> str:
    """Return a card with the question as `shown` has it and the (right, title, text) of some answers, side by side."""
    sides = (
        f"<div class='side {'right' if right else 'wrong'}'><p class='when'>{escape(title)}</p>"
        f"<p class='written'>{escape(text)}</p></div>"
        for right, title, text in answers
    )
    return question_card(sample, shown, "".join(sides))


def write_manifest(
    path: Path, options: InferenceOptions, samples: Sequence[Sample], columns: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write the rows that `samples` were read from, with more `columns` by id, as JSON lines that recipes read.

    Audio paths become absolute. Audio that lies inside of the data is written to `path`'s folder.
    """
    fields: dict[str, str] = {}
    rows: dict[str, Mapping[str, Any]] = {}
    if _bundled(options):
        for s in samples:
            prompt = next(c for m in reversed(s.messages) for c in m.content if isinstance(c, str) and c)
            shown = {"question": prompt.partition("\n")[0], "choices": list(s.choices), "answer": s.references[0]}
            rows[s.id] = {"id": s.id, "audio": "", **shown, "task": s.task, **s.metadata}
    else:
        assert options.data is not None
        loaded = read_values(
            options.data,
            options.kind,
            lambda row, style, to_sample: ((sample := to_sample(row, style)), (sample.id, row)),
            think=options.think,
            audio_root=options.audio_root,
            on_error="skip",
            need_answer=False,
            columns=column_names(options.columns),
        )
        for id, row in loaded.samples:
            rows[id] = {**row.data, "id": id}
            fields[id] = audio_field(row)
    lines = []
    for number, sample in enumerate(samples, 1):
        field, row_out, clip = fields.get(sample.id, "audio"), dict(rows[sample.id]), sample.audio[0]
        field = "audio_path" if field == "video_name" else field
        if clip.path is not None and not Path(clip.path).is_relative_to(cache_folder()):
            row_out[field] = str(Path(clip.path).resolve())
        else:  # inside of the data, or in the cache, which may be emptied
            name = f"{path.stem}-{number}.flac"
            soundfile.write(path.parent / name, clip.load(_RATE), _RATE)
            row_out = {k: v for k, v in row_out.items() if k not in PART} | {field: name}
        try:
            lines.append(json.dumps({**row_out, **columns[sample.id]}, ensure_ascii=False) + "\n")
        except TypeError as error:
            raise ValueError(f"{options.data}: row {sample.id!r} cannot be written as JSON ({error})") from error
    path.write_text("".join(lines), encoding="utf-8")
