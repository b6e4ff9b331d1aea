"""Does a model listen? What the right audio adds to its answers, over silence, noise and the audio of other prompts.

    audiorl eval audit --model MODEL --data held_out.jsonl --out audits/model
    audiorl eval audit --model MODEL --data questions.jsonl --out audits/model --views silence text --filter 8

The answers are the references of the data. For each view the table shows how many nats per token of the answer are lost
when the audio is replaced, with a 95 % interval. The verdict is listens, ignores_audio or unclear. Every clip must also
become as many audio tokens as its features have room for.

Writes to --out: scores.json, results.jsonl (a row for each answer) and examples.html (the answers that gain least and
most, to listen to). --filter N answers every question N times with and without its audio, and writes filter.jsonl
(shares of right answers, and what answers each question: text, listening or nothing) and listening.jsonl, a manifest of
the questions that need listening. The same command with other bounds selects without asking again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from audiorl.config import ModelConfig, SamplingConfig
from audiorl.config.checks import refuse
from audiorl.data.rows import write_json_lines
from audiorl.data.views import views_of
from audiorl.eval._common import (
    InferenceOptions,
    Row,
    check_settings,
    print_table,
    question_policy,
    run_evaluation,
    summarize,
    with_interval,
    write_scores,
)
from audiorl.eval._listening import DEFAULT_VIEWS, MIN_GAIN, audio_gains, check_frames, gain_metrics, verdict, view_name
from audiorl.eval._questions import read_questions, right_answers, sample_answers, write_manifest
from audiorl.eval.metrics.corpus import bootstrap_interval
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example
from audiorl.report.listening import article, clips_page
from audiorl.rollout.hf import HFEngine
from audiorl.types import Sample

EXAMPLES = 5
"""Answers with the least and with the greatest gain on the page, each."""


@dataclass(frozen=True, kw_only=True)
class AuditOptions(InferenceOptions):
    """Measure whether a model uses its audio, and the right audio."""

    limit: int | None = 64
    """Only the first rows."""
    views: tuple[str, ...] = DEFAULT_VIEWS
    """Views that replace the audio: silence, noise, swap (that of another prompt), text (none), transcript (its text),
    clean (the column clean_audio), or FILE.py:FUNCTION, a function from a Sample to a Sample."""
    min_gain: float = MIN_GAIN
    """Nats per token that the right audio must add over every view."""
    filter: int = 0
    """Answers per question and view by which questions that need listening are selected; 0: none are selected."""
    max_blind: float = 0.5
    """With --filter: questions need no listening of which this share of answers, or more, is right under some view."""
    min_pass: float = 0.0
    """With --filter: select questions with at least this share of right answers with their audio."""
    max_pass: float = 1.0
    """With --filter: select questions with at most this share of right answers with their audio."""


def main(options: AuditOptions, policy: AudioPolicy | None = None) -> Row:
    """Do what the options say and return the scores."""
    least, most = options.min_pass, options.max_pass
    names = ["audio", *map(view_name, options.views)]
    twice = next((name for name in names if names.count(name) > 1), None)
    refuse(
        (not 0 < options.max_blind <= 1, f"--max-blind {options.max_blind:g}: give a share above 0, at most 1"),
        (
            not 0 <= least <= most <= 1,
            f"--min-pass {least:g} --max-pass {most:g}: give shares with 0 <= min <= max <= 1",
        ),
        (not options.views, "--views: give at least one"),
        (twice, f"--views: two are called {twice!r}, beside the prompt's own 'audio'; rename a function"),
    )
    samples = read_questions(options)
    assert options.out is not None and options.model is not None
    check_settings(options.out / "audit.json", {"views": options.views})
    policy = policy or question_policy(options.model, ModelConfig(device=options.device))
    check_frames(policy, [clip for s in samples for clip in s.audio])
    gains = audio_gains(policy, [Example(s, s.references[0]) for s in samples], options.views)
    result = verdict(gains, options.min_gain)
    scores: Row = {
        "n": len(samples),
        "verdict": result.word,
        "reason": result.reason,
        "gains": {g.view: {"nats_per_token": g.nats, "interval": g.interval} for g in gains},
        "metrics": gain_metrics(gains, [s.task for s in samples]),
    }
    if options.filter:
        scores["filter"] = select(policy, samples, options)
    rows: list[Row] = []
    for i, s in enumerate(samples):
        row: Row = {"id": s.id, "task": s.task, "answer": s.references[0]}
        rows.append(row | {g.name: g.per_sample[i] for g in gains})
    order = sorted(range(len(rows)), key=lambda i: min(rows[i][g.name] for g in gains))
    shown = order if len(order) <= 2 * EXAMPLES else order[:EXAMPLES] + order[len(order) - EXAMPLES :]
    articles = []
    for i in shown:
        request = "\n".join(c for m in samples[i].messages for c in m.content if isinstance(c, str))
        added = [(g.name.replace("gain_", "over "), f"{g.per_sample[i]:+.3f} nats per token") for g in gains]
        entries = [("request", request), ("answer", str(rows[i]["answer"])), *added]
        articles.append(article(samples[i].id, samples[i].audio, entries))
    page = clips_page("What the audio adds", f"{result.word}: {result.reason}", articles, "No answers.")
    write_scores(options.out, scores, {"examples.html": page})
    write_json_lines(options.out / "results.jsonl", rows)
    cells = [[g.view, f"{g.nats:.3f}", f"{g.interval[0]:.3f} to {g.interval[1]:.3f}"] for g in gains]
    title = f"{options.model} · {options.data} · {len(samples)} answers"
    print_table(["audio replaced by", "nats per token lost", "95 % interval"], cells, title)
    print(f"{result.word}: {result.reason}")
    if options.filter:
        kinds = {"text_answerable": "text-answerable", "need_listening": "need listening", "rest": "neither"}
        found = [(label, scores["filter"][name]) for name, label in kinds.items()]
        cells = [[label, str(c["n"]), with_interval(c, ".1%", "share")] for label, c in found]
        title = f"questions by what answers them, {options.filter} answers each"
        print_table(["", "questions", "share (95 % interval)"], cells, title)
        print(f"{scores['filter']['selected']} of {len(samples)} rows: {options.out / 'listening.jsonl'}")
    return scores


def select(policy: AudioPolicy, samples: Sequence[Sample], options: AuditOptions) -> Row:
    """Write filter.jsonl and listening.jsonl. Return shares of right answers, and how many questions are of each kind.

    A question is text-answerable for this model, not for others. A model that guesses is right in the share `chance`.
    """
    out, count = options.out, len(samples)
    assert out is not None
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=options.max_new_tokens))

    def shares(name: str, prompts: Sequence[Sample]) -> list[float]:
        answers = sample_answers(engine, prompts, options.filter, out / f"answers-{name}.jsonl", options.batch_size)
        return [sum(right) / options.filter for right in right_answers(prompts, answers)]

    with_audio = shares("audio", samples)
    views = {view_name(view): views_of(samples, view) for view in options.views}
    without = {name: shares(name, prompts) for name, prompts in views.items()}
    rows: dict[str, Row] = {}
    selected = []
    for i, sample in enumerate(samples):
        blind = max(share[i] for share in without.values())
        kind = "text" if blind >= options.max_blind else "listening" if with_audio[i] > blind else "unanswered"
        rows[sample.id] = {"kind": kind, "with_audio": with_audio[i], "without_audio": blind}
        if kind == "listening" and options.min_pass <= with_audio[i] <= options.max_pass:
            selected.append(sample)
    write_json_lines(out / "filter.jsonl", [{"id": id, **row} for id, row in rows.items()])
    write_manifest(out / "listening.jsonl", options, selected, rows)
    kinds = Counter(row["kind"] for row in rows.values())
    result: Row = {
        "answers_each": options.filter,
        "with_audio": sum(with_audio) / count,
        "interval": bootstrap_interval(with_audio, share=True),
        "without_audio": {view: sum(share) / count for view, share in without.items()},
        "chance": sum(1 / len(s.choices) if s.choices else 0 for s in samples) / count,
    }
    for name, kind in (("text_answerable", "text"), ("need_listening", "listening"), ("rest", "unanswered")):
        column = [float(row["kind"] == kind) for row in rows.values()]
        result[name] = {**summarize(column, "share", share=True), "n": kinds[kind]}
    return result | {"selected": len(selected)}


if __name__ == "__main__":
    run_evaluation(sys.modules[__name__], sys.argv[1:])
