"""Does a model listen? What the right audio adds to its answers, over silence, noise and the audio of other prompts.

    python -m eval.audit --model MODEL --data held_out.jsonl --out audits/model
    python -m eval.audit --model MODEL --data questions.jsonl --out audits/model --views silence text --filter 8

The answers are the references of the data, or with --answers model the model's own greedy ones. For each view the table
shows how many nats per token of the answer are lost when the audio is replaced, with a 95 % interval. The verdict is
listens, deaf or unclear. Every clip must also become as many audio tokens as its features have room for.

Writes to --out: scores.json, results.jsonl (a row for each answer) and examples.html (the answers that gain least and
most, to listen to).

--filter N answers every question N times with and without its audio. filter.jsonl has a row for each question with the
shares of right answers and one of three words: `text` (right without the audio in --max-blind of the answers or more),
`listening` (not so, and right more often with the audio) or `unanswered`. listening.jsonl holds the rows of the data
that need listening and whose share of right answers lies between --min-pass and --max-pass: a manifest to train on or
to measure with. The answers are kept, so the same command with other bounds selects without asking again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from audiorl.config import ModelConfig, SamplingConfig
from audiorl.data.views import views_of
from audiorl.eval._generate import check_settings
from audiorl.eval._listening import (
    DEFAULT_VIEWS,
    MIN_GAIN,
    Gain,
    Verdict,
    answered_by_reference,
    audio_gains,
    check_frames,
    gain_metrics,
    rows_of,
    verdict,
)
from audiorl.eval._options import InferenceOptions, run_script, write_scores
from audiorl.eval._questions import question_policy, read_questions, right_answers, sample_answers, write_manifest
from audiorl.eval._summaries import summarize
from audiorl.eval.metrics.corpus import bootstrap_interval
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example
from audiorl.protocols import Request
from audiorl.report.listening import article, clips_page
from audiorl.rollout.hf import HFEngine
from audiorl.types import Sample


@dataclass(frozen=True, kw_only=True)
class Options(InferenceOptions):
    """Measure whether a model uses its audio, and the right audio."""

    limit: int | None = 64
    """Only the first rows."""
    views: tuple[str, ...] = DEFAULT_VIEWS
    """What replaces the audio: silence, noise, swap (the audio of another prompt), text (none), transcript (its text),
    clean (the column clean_audio), or FILE.py:FUNCTION, a function from a Sample to a Sample."""
    answers: Literal["reference", "model"] = "reference"
    """Whose answers are measured: the data's, or the model's own."""
    min_gain: float = MIN_GAIN
    """Nats per token that the right audio must add over every view."""
    examples: int = 5
    """Answers with the least and with the greatest gain on the page, each."""
    filter: int = 0
    """Answers per question and view, sampled at temperature 1, by which questions that need listening are selected; 0:
    none are selected."""
    max_blind: float = 0.5
    """With --filter: a question needs no listening if this share of its answers, or more, is right under some view."""
    min_pass: float = 0.0
    """With --filter: select questions with at least this share of right answers with their audio."""
    max_pass: float = 1.0
    """With --filter: select questions with at most this share of right answers with their audio; 0.9 leaves out what
    the model can do already."""


def run(options: Options, policy: AudioPolicy | None = None) -> dict[str, Any]:
    """Do what the options say and return the scores."""
    for name in ("filter", "examples"):
        if getattr(options, name) < 0:
            raise ValueError(f"--{name}: give 0 or more")
    if not 0 < options.max_blind <= 1:
        raise ValueError(f"--max-blind {options.max_blind:g}: give a share above 0, at most 1")
    if not 0 <= options.min_pass <= options.max_pass <= 1:
        raise ValueError(
            f"--min-pass {options.min_pass:g} --max-pass {options.max_pass:g}: give shares with 0 <= min <= max <= 1"
        )
    if not options.views:
        raise ValueError("--views: give at least one")
    options.check()
    assert options.out is not None and options.model is not None
    samples = read_questions(options, need_answer=bool(options.filter) or options.answers == "reference")
    check_settings(options.out / "audit.json", {"views": options.views, "answers": options.answers})
    policy = policy or question_policy(options.model, ModelConfig(device=options.device))
    check_frames(policy, [clip for s in samples for clip in s.audio])
    answers = answers_of(policy, samples, options)
    gains = audio_gains(policy, answers, options.views)
    result = verdict(gains, options.min_gain)
    scores: dict[str, Any] = {
        "n": len(answers),
        "verdict": result.word,
        "reason": result.reason,
        "gains": {g.view: {"nats_per_token": g.nats, "interval": g.interval} for g in gains},
        "metrics": gain_metrics(gains, [s.task for s in samples]),
    }
    if options.filter:
        scores["filter"] = select(policy, samples, options)
    rows = rows_of(answers, gains)
    write_scores(options.out, scores, {"examples.html": examples_page(samples, rows, gains, result, options.examples)})
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (options.out / "results.jsonl").write_text(lines, encoding="utf-8")
    Console().print(table(gains, f"{options.model} · {options.data} · {len(answers)} answers"))
    print(f"{result.word}: {result.reason}")
    if options.filter:
        Console().print(filter_table(scores["filter"]))
        print(f"{scores['filter']['selected']} of {len(samples)} rows: {options.out / 'listening.jsonl'}")
    return scores


def answers_of(policy: AudioPolicy, samples: Sequence[Sample], options: Options) -> list[Example]:
    """Each sample with the answer that is measured."""
    if options.answers == "reference":
        return answered_by_reference(samples)
    sampling = SamplingConfig(temperature=0, max_new_tokens=options.max_new_tokens)
    rollouts = HFEngine(policy, sampling).generate([Request(s, greedy=True) for s in samples])
    return [Example(r.sample, r.text) for r in rollouts]


def select(policy: AudioPolicy, samples: Sequence[Sample], options: Options) -> dict[str, Any]:
    """Write filter.jsonl and listening.jsonl. Returns shares of right answers, and how many questions are of each kind.

    What is text-answerable is so for this model. A model that guesses is right by luck in the share `chance`.
    """
    assert options.out is not None
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=options.max_new_tokens))

    def shares(name: str, prompts: Sequence[Sample]) -> list[float]:
        path = options.out / f"answers-{name}.jsonl"  # type: ignore[operator]
        answers = sample_answers(engine, prompts, options.filter, path, options.batch_size)
        return [sum(right) / options.filter for right in right_answers(prompts, answers)]

    with_audio = shares("audio", samples)
    views = {view.rsplit(":")[-1]: views_of(samples, view) for view in options.views}
    without = {name: shares(name, prompts) for name, prompts in views.items()}
    rows: dict[str, dict[str, Any]] = {}
    selected = []
    for i, sample in enumerate(samples):
        blind = max(share[i] for share in without.values())
        kind = "text" if blind >= options.max_blind else "listening" if with_audio[i] > blind else "unanswered"
        rows[sample.id] = {"kind": kind, "with_audio": with_audio[i], "without_audio": blind}
        if kind == "listening" and options.min_pass <= with_audio[i] <= options.max_pass:
            selected.append(sample)
    lines = "".join(json.dumps({"id": id, **row}, ensure_ascii=False) + "\n" for id, row in rows.items())
    (options.out / "filter.jsonl").write_text(lines, encoding="utf-8")
    write_manifest(options.out / "listening.jsonl", options, selected, rows)
    count = len(samples)
    kinds = Counter(row["kind"] for row in rows.values())
    return {
        "answers_each": options.filter,
        "with_audio": sum(with_audio) / count,
        "interval": bootstrap_interval(with_audio),
        "without_audio": {view: sum(share) / count for view, share in without.items()},
        "chance": sum(1 / len(s.choices) if s.choices else 0 for s in samples) / count,
        **{
            name: {**summarize([float(row["kind"] == kind) for row in rows.values()], "share"), "n": kinds[kind]}
            for name, kind in (("text_answerable", "text"), ("need_listening", "listening"), ("rest", "unanswered"))
        },
        "selected": len(selected),
    }


def filter_table(result: Mapping[str, Any]) -> Table:
    shown = Table(title=f"questions by what answers them, {result['answers_each']} answers each")
    for column in ("", "questions", "share", "95 % interval"):
        shown.add_column(column, justify="right" if column else "left")
    for label, name in (
        ("text-answerable", "text_answerable"),
        ("need listening", "need_listening"),
        ("neither", "rest"),
    ):
        cell = result[name]
        interval = f"{cell['low']:.1%} to {cell['high']:.1%}"
        shown.add_row(label, str(cell["n"]), f"{cell['share']:.1%}", interval)
    return shown


def table(gains: Sequence[Gain], title: str) -> Table:
    shown = Table(title=title)
    for column in ("audio replaced by", "nats per token lost", "95 % interval"):
        shown.add_column(column)
    for g in gains:
        shown.add_row(g.view, f"{g.nats:.3f}", f"{g.interval[0]:.3f} to {g.interval[1]:.3f}")
    return shown


def examples_page(
    samples: Sequence[Sample], rows: Sequence[Mapping[str, Any]], gains: Sequence[Gain], result: Verdict, count: int
) -> str:
    """The `count` answers that gain least over their hardest view, and as many that gain most."""
    names = [g.name for g in gains]
    order = sorted(range(len(rows)), key=lambda i: min(rows[i][name] for name in names))
    shown = order if 2 * count >= len(order) else order[:count] + order[len(order) - count :]
    articles = [
        article(
            f"{rows[i]['id']}",
            samples[i].audio,
            [
                ("request", "\n".join(c for m in samples[i].messages for c in m.content if isinstance(c, str))),
                ("answer", str(rows[i]["answer"])),
                *((name.replace("gain_", "over "), f"{rows[i][name]:+.3f} nats per token") for name in names),
            ],
        )
        for i in shown
    ]
    return clips_page("What the audio adds", f"{result.word}: {result.reason}", articles, "No answers.")


if __name__ == "__main__":
    run_script(run, Options, __doc__)
