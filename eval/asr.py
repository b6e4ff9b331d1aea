"""Speech recognition: WER or CER of a model on a manifest or a folder of transcribed audio.

    python -m eval.asr --data test.jsonl --model MODEL --out results/asr --normalizer english
    python -m eval.asr --score results/asr/results.jsonl --metric cer

Writes to --out: predictions.jsonl (responses as they come; a second call goes on from there), results.jsonl (reference,
hypothesis, counts and rate per file), scores.json (corpus rate and its counts, mean rate per file) and worst.html (the
worst files with audio to listen to). Run it before and after training on another task: transcription is what audio RL
runs lose first.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import soundfile
from rich.console import Console
from rich.table import Table

from audiorl.audio import AudioClip, AudioError
from audiorl.evaluation.generate import generate_all, read_rows
from audiorl.evaluation.options import InferenceOptions, run_script, write_scores
from audiorl.metrics.text import CorpusErrors, ErrorCounts, Normalizer, char_errors, normalize, word_errors
from audiorl.rewards.tags import final_text
from audiorl.types import Rollout, RolloutEngine, Sample

Metric = Literal["wer", "cer"]
Row = dict[str, Any]
_RATE = 16_000


@dataclass(frozen=True, kw_only=True)
class Options(InferenceOptions):
    """Evaluate a model's transcripts, or score an existing results file."""

    score: Path | None = None
    """Score this file (JSON lines with id, reference, hypothesis) instead of running a model."""
    kind: str = "asr"
    """How `read_samples` reads the data."""
    metric: Metric = "wer"
    """Errors in words (WER) or characters (CER)."""
    normalizer: Normalizer = "basic"
    """What is left out before texts are compared: english (numbers, contractions, spelling), basic (case, punctuation)
    or none."""
    language: str | None = None
    """For spelling digits out with the basic normaliser, where the data does not name the language itself."""
    worst: int = 30
    """How many files worst.html shows."""


def transcribe(options: Options, engine: RolloutEngine | None = None) -> tuple[list[Row], Sequence[Sample], int]:
    """Rows {id, reference, hypothesis, language}, their samples, and how many entries had no usable audio."""
    loaded = options.read()
    assert options.out
    samples = loaded.samples
    for sample in samples:
        if not sample.references:
            raise ValueError(f"{options.data}: {sample.id!r} has no reference transcript")
    if not samples:
        raise ValueError(f"{options.data}: nothing to transcribe")
    engine = engine or options.engine()
    answers = generate_all(
        engine, samples, options.out / "predictions.jsonl", batch_size=options.batch_size, describe=_describe
    )
    rows = [
        {
            "id": sample.id,
            "reference": sample.references[0],
            "hypothesis": answer["hypothesis"],
            "language": sample.metadata.get("language"),
        }
        for sample, answer in zip(samples, answers, strict=True)
    ]
    return rows, samples, len(loaded.skipped)


def _describe(rollout: Rollout) -> Mapping[str, Any]:
    return {"hypothesis": final_text(rollout.text)}


def score_rows(rows: Sequence[Row], options: Options) -> tuple[list[Row], dict[str, Any]]:
    """The rows with their normalised texts, counts and rate, and the scores of the corpus.

    A file whose reference is empty after normalisation (a reference of pure filler, silence) has no length: its
    insertions count in the corpus rate, and its own rate is 0 or 1. `empty_references` tells how many there are.
    """
    errors = word_errors if options.metric == "wer" else char_errors
    results = []
    counts: list[ErrorCounts] = []
    for row in rows:
        texts = [_text(row, key) for key in ("reference", "hypothesis")]
        language = row.get("language") or options.language
        reference, hypothesis = (normalize(text, options.normalizer, language) for text in texts)
        count = errors(reference, hypothesis)
        counts.append(count)
        results.append(
            {
                **row,
                "normalized_reference": reference,
                "normalized_hypothesis": hypothesis,
                "rate": count.rate,
                **dataclasses.asdict(count),
            }
        )
    corpus = CorpusErrors(tuple(counts))
    scores = {
        "metric": options.metric,
        "normalizer": options.normalizer,
        options.metric: corpus.rate,
        f"mean_{options.metric}": corpus.mean,
        "files": len(rows),
        "reference_length": corpus.total.reference_length,
        **dataclasses.asdict(corpus.total),
        "exact": sum(c.errors == 0 for c in counts),
        "empty_references": sum(c.reference_length == 0 for c in counts),
    }
    return results, scores


def _text(row: Row, key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise ValueError(f"row {row.get('id')!r}: {key} is {value!r}, expected text")
    return value


def worst_page(results: Sequence[Row], samples: Sequence[Sample], scores: Mapping[str, Any], count: int) -> str:
    """The `count` files with the highest rates as a self-contained HTML page, audio included."""
    clips = {s.id: s.audio for s in samples}
    worst = sorted((r for r in results if r["rate"] > 0), key=lambda r: (-r["rate"], str(r["id"])))[:count]
    metric = scores["metric"]
    cards = "".join(_card(row, clips.get(row["id"], ()), metric) for row in worst)
    summary = (
        f"{metric.upper()} {100 * scores[metric]:.2f}% over {scores['files']} files "
        f"({scores['substitutions']} substitutions, {scores['insertions']} insertions, {scores['deletions']} deletions)"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Worst transcripts</title><style>'
        ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;"
        "padding:0 1rem}article{border-top:1px solid #8886;padding:1rem 0}h2{font-size:1rem;margin:0}"
        "audio{width:100%}dl{display:grid;grid-template-columns:7rem 1fr;margin:.5rem 0}dd{margin:0}dt{opacity:.7}"
        f"</style></head><body><h1>Worst transcripts</h1><p>{escape(summary)}</p>"
        f"{cards or '<p>No errors.</p>'}</body></html>\n"
    )


def _card(row: Row, clips: Sequence[AudioClip], metric: str) -> str:
    counts = f"{row['substitutions']} sub, {row['insertions']} ins, {row['deletions']} del"
    players = "".join(_player(clip) for clip in clips)
    return (
        f"<article><h2>{escape(str(row['id']))} · {metric.upper()} {100 * row['rate']:.1f}% ({counts})</h2>{players}"
        f"<dl><dt>reference</dt><dd>{escape(row['reference'])}</dd>"
        f"<dt>hypothesis</dt><dd>{escape(row['hypothesis'])}</dd>"
        f"<dt>compared</dt><dd>{escape(row['normalized_reference'])}<br>{escape(row['normalized_hypothesis'])}</dd></dl>"
        "</article>"
    )


def _player(clip: AudioClip) -> str:
    try:
        samples = clip.load(_RATE)
    except AudioError as error:  # the page is for reading errors; one more unreadable file belongs on it
        return f"<p>{escape(str(error))}</p>"
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, _RATE, format="FLAC", subtype="PCM_16")
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<audio controls preload="none" src="data:audio/flac;base64,{data}"></audio>'


def table(scores: Mapping[str, Any], title: str) -> Table:
    """The scores for people: rates in percent, counts of each kind of error."""
    metric = scores["metric"]
    out = Table(title=title, show_header=False)
    out.add_row(f"{metric.upper()} (corpus)", f"{100 * scores[metric]:.2f}%")
    out.add_row(f"{metric.upper()} (mean over files)", f"{100 * scores[f'mean_{metric}']:.2f}%")
    for key in ("substitutions", "insertions", "deletions", "reference_length", "files", "exact", "skipped"):
        if key in scores:
            out.add_row(key.replace("_", " "), str(scores[key]))
    return out


def run(options: Options, engine: RolloutEngine | None = None) -> dict[str, Any]:
    """Do what the options say and return the scores."""
    samples: Sequence[Sample] = ()
    skipped = None
    if options.score is not None:
        rows = read_rows(options.score)
    else:
        rows, samples, skipped = transcribe(options, engine)
    if not rows:
        raise ValueError(f"{options.score}: no rows")
    results, scores = score_rows(rows, options)
    if skipped is not None:
        scores["skipped"] = skipped
    if options.out is not None:
        page = worst_page(results, samples, scores, options.worst)
        write_scores(options.out, scores, {"worst.html": page})
        lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in results)
        (options.out / "results.jsonl").write_text(lines, encoding="utf-8")
    Console().print(table(scores, f"{options.data or options.score} · {options.model or 'scored'}"))
    return scores


if __name__ == "__main__":
    run_script(run, Options, __doc__, "files")
