"""Speech recognition and translation into English: errors by language and speaker, and what is written for silence.

    python -m eval.asr --data test.jsonl --model MODEL --out results/asr --normalizer english
    python -m eval.asr --data test.jsonl --model TRAINED --baseline START --silence 40 --out results/asr \\
        --known-speakers train.jsonl --recognisers judges/whisper-base
    python -m eval.asr --data test.jsonl --model MODEL --task translate --out results/translation
    python -m eval.asr --score results/asr/results.jsonl --baseline results/start/results.jsonl

Writes to --out: predictions.jsonl (responses as they come; a second call goes on from there), results.jsonl (reference,
hypothesis, counts and rate per file), scores.json and worst.html (the worst files with audio to listen to). Run it
before and after training on another task: transcription is what audio RL runs lose first.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from audiorl.audio import AudioClip, seconds
from audiorl.data import manifest
from audiorl.data.no_speech import no_speech_samples
from audiorl.data.prompts import TRANSLATE
from audiorl.eval._generate import check_settings, complete_rows, generate_all, greedy_engine, read_rows
from audiorl.eval._options import InferenceOptions, run_script, write_scores
from audiorl.eval._recognition import (
    LOWER_IS_BETTER,
    NAMES,
    Corpus,
    Task,
    interval_text,
    no_speech_scores,
    paired_rows,
    slices,
    with_groups,
)
from audiorl.eval.metrics.text import CorpusErrors, Normalizer, normalize
from audiorl.protocols import RolloutEngine
from audiorl.report.listening import article, clips_page
from audiorl.rewards.asr import languages_of
from audiorl.rewards.tags import final_text
from audiorl.speech_models import load_recogniser
from audiorl.types import Rollout, Sample

Metric = Literal["wer", "cer"]
Row = dict[str, Any]
Systems = Mapping[str, Sequence[Mapping[str, Any]]]
"""Rows by the name of the system that wrote their hypotheses, in equal order; the first is the evaluated one."""
_RATE = 16_000


@dataclass(frozen=True, kw_only=True)
class Options(InferenceOptions):
    """Evaluate a model's transcripts or translations, or score an existing results file."""

    score: Path | None = None
    """Score this file (JSON lines with id, reference, hypothesis) instead of running a model."""
    baseline: str | None = None
    """Compare with this model, or with this results.jsonl, on the same rows: differences with paired intervals."""
    recognisers: tuple[str, ...] = ()
    """Recognisers that transcribe the same recordings for reference, as `audiorl.speech_models.load_recogniser`
    reads them."""
    task: Task = "transcribe"
    """`translate`: into English, compared with the column `translation`; rows without one are left out."""
    question: str | None = None
    """Asked in place of the usual request, for a model that was trained with another one."""
    known_speakers: tuple[str, ...] = ()
    """Names of the speakers that training used, or manifests with their rows; others are unseen. Rows need a column
    `speaker`."""
    silence: int = 0
    """Also ask for transcripts of so many clips without speech: digital silence, noise, hum and clicks, at -60 to -20
    dB."""
    music: Path | None = None
    """A folder of recordings without voices, such as music on hold, for `silence`."""
    kind: str = "asr"
    """How `read_samples` reads the data."""
    metric: Metric = "wer"
    """Errors in words (WER) or characters (CER): which of them results.jsonl and worst.html show."""
    normalizer: Normalizer = "basic"
    """What is left out before texts are compared: english (numbers, contractions, spelling), basic (case, punctuation)
    or none. BLEU and chrF compare the texts as they are."""
    language: str | None = None
    """For spelling digits out with the basic normaliser, where the data does not name the language itself."""
    worst: int = 30
    """How many files worst.html shows."""


# -- transcripts -------------------------------------------------------------------------------------------------------


def read(options: Options) -> tuple[list[Sample], int]:
    """The samples, their first reference the text to compare with, and how many entries had no usable audio."""
    question = options.question or (TRANSLATE if options.task == "translate" else None)
    loaded = options.read(question)
    samples = list(loaded.samples)
    if options.task == "translate":
        texts = [(s, s.metadata.get("translation")) for s in samples]
        samples = [replace(s, references=(text,)) for s, text in texts if isinstance(text, str) and text.strip()]
        if len(samples) < len(texts):
            print(f"{len(texts) - len(samples)} of {len(texts)} rows have no translation", file=sys.stderr)
    for sample in samples:
        if not sample.references:
            raise ValueError(f"{options.data}: {sample.id!r} has no reference transcript")
    if not samples:
        raise ValueError(f"{options.data}: nothing to {options.task}")
    return samples, len(loaded.skipped)


def rows_of(samples: Sequence[Sample], hypotheses: Mapping[str, str]) -> list[Row]:
    """{id, reference, hypothesis, language, speaker} of each sample; of one without speech {kind, seconds} too."""
    rows = []
    for sample in samples:
        row = {"id": sample.id, "reference": sample.references[0], "hypothesis": hypotheses[sample.id]}
        about = {name: sample.metadata.get(name) for name in ("language", "speaker", "kind")}
        row |= {name: value for name, value in about.items() if value} | {"language": about["language"]}
        rows.append(row if not about["kind"] else row | {"seconds": sum(map(seconds, sample.audio))})
    return rows


def answers(engine: RolloutEngine, samples: Sequence[Sample], out: Path, batch_size: int) -> dict[str, str]:
    """What a model writes, by id; kept in `out`, from which a later call goes on."""
    rows = generate_all(engine, samples, out, batch_size=batch_size, describe=_describe)
    return {row["id"]: row["hypothesis"] for row in rows}


def _describe(rollout: Rollout) -> Mapping[str, Any]:
    return {"hypothesis": final_text(rollout.text)}


def recognised(path: str, samples: Sequence[Sample], options: Options, out: Path) -> dict[str, str]:
    """What a recogniser writes, by id; each language with a recogniser for it. Kept in `out` like `answers`."""
    hypotheses: dict[str, str] = {}
    for language in dict.fromkeys(s.metadata.get("language") for s in samples):
        recogniser = load_recogniser(path, language, options.device, options.batch_size, options.task)

        def transcribe(batch: Sequence[Sample]) -> list[Row]:
            waves = [sample.audio[0].load(_RATE) for sample in batch]
            texts = recogniser.transcribe(waves, _RATE)  # noqa: B023  called before the loop goes on
            return [{"id": s.id, "hypothesis": text} for s, text in zip(batch, texts, strict=True)]

        spoken = {s.id: s for s in samples if s.metadata.get("language") == language}
        rows = complete_rows(out, spoken, transcribe, options.batch_size)
        hypotheses |= {id: row["hypothesis"] for id, row in rows.items()}
    return hypotheses


def transcripts(options: Options, engine: RolloutEngine | None, samples: Sequence[Sample], name: str) -> Systems:
    """What the model, the baseline model and the recognisers write: OUT/NAME.jsonl and OUT/SYSTEM/NAME.jsonl."""
    assert options.out
    engine = engine or options.engine()
    file = options.out / f"{name}.jsonl"
    systems: dict[str, list[Row]] = {"model": rows_of(samples, answers(engine, samples, file, options.batch_size))}
    if options.baseline and not _is_file(options.baseline):
        start = greedy_engine(options.baseline, options.max_new_tokens, options.device)
        file = _folder(options, "baseline", options.baseline) / f"{name}.jsonl"
        systems["baseline"] = rows_of(samples, answers(start, samples, file, options.batch_size))
    for path in options.recognisers:
        file = _folder(options, Path(path).name, path) / f"{name}.jsonl"
        systems[Path(path).name] = rows_of(samples, recognised(path, samples, options, file))
    return systems


def _folder(options: Options, system: str, path: str) -> Path:
    """Where the transcripts of another system are kept. Raises ValueError where those of a third one lie there."""
    assert options.out
    folder = options.out / re.sub(r"[^\w.-]+", "_", system)
    settings = {"model": path, "task": options.task, "question": options.question}
    check_settings(folder / "settings.json", {**settings, "max_new_tokens": options.max_new_tokens})
    return folder


def _is_file(baseline: str) -> bool:
    return baseline.endswith(".jsonl")


def known_speakers(options: Options) -> frozenset[str]:
    """The names, and those in the rows of manifests."""
    names: set[str] = set()
    for given in options.known_speakers:
        if not Path(given).exists():
            if "/" in given or Path(given).suffix:
                raise ValueError(f"--known-speakers {given}: missing; give a manifest that exists, or a speaker's name")
            names.add(given)
            continue
        rows = manifest.read_samples(given, kind=options.kind, on_error="skip").samples
        speakers = {row.metadata.get("speaker") for row in rows} - {None, ""}
        if not speakers:
            raise ValueError(f"--known-speakers {given}: no row of this manifest names a speaker")
        names |= {str(speaker) for speaker in speakers}
    return frozenset(names)


# -- scores ------------------------------------------------------------------------------------------------------------


def score_rows(rows: Sequence[Mapping[str, Any]], corpus: Corpus, options: Options) -> tuple[list[Row], dict[str, Any]]:
    """The rows with their normalised texts, counts and rate, and the scores of the corpus.

    A file whose reference is empty after normalisation (a reference of pure filler, silence) has no length: its
    insertions count in the corpus rate, and its own rate is 0 or 1. `empty_references` tells how many there are.
    """
    counts = corpus.errors[options.metric]
    results = []
    for row, count in zip(rows, counts, strict=True):
        language = row.get("language") or options.language
        texts = {
            f"normalized_{key}": normalize(row[key], options.normalizer, language)
            for key in ("reference", "hypothesis")
        }
        results.append({**row, **texts, "rate": count.rate, **dataclasses.asdict(count)})
    errors = CorpusErrors(tuple(counts))
    scores = {
        "metric": options.metric,
        "normalizer": options.normalizer,
        options.metric: errors.rate,
        f"mean_{options.metric}": errors.mean,
        "files": len(rows),
        "reference_length": errors.total.reference_length,
        **dataclasses.asdict(errors.total),
        "exact": sum(c.errors == 0 for c in counts),
        "empty_references": sum(c.reference_length == 0 for c in counts),
    }
    return results, scores


def compare(systems: Systems, options: Options) -> tuple[dict[str, Corpus], dict[str, Any]]:
    """The corpus of each system, and {systems: {NAME: {SLICE: scores}}, difference: {SLICE: {METRIC: interval}}}."""
    if options.known_speakers:
        trained = known_speakers(options)
        systems = {name: with_groups(rows, trained) for name, rows in systems.items()}
    corpora = {n: Corpus(rows, options.task, options.normalizer, options.language) for n, rows in systems.items()}
    first, *_ = corpora.values()
    parts = list(slices(first.rows))
    scores: dict[str, Any] = {
        "systems": {name: {label: c.scores(i) for label, i in parts} for name, c in corpora.items()}
    }
    if "baseline" in corpora:
        scores["difference"] = {label: first.difference(corpora["baseline"], i) for label, i in parts}
    return corpora, scores


def worst_page(results: Sequence[Row], samples: Sequence[Sample], scores: Mapping[str, Any], count: int) -> str:
    """The `count` files with the highest rates as a self-contained HTML page, audio included."""
    clips = {s.id: s.audio for s in samples}
    worst = sorted((r for r in results if r["rate"] > 0), key=lambda r: (-r["rate"], str(r["id"])))[:count]
    metric = scores["metric"]
    articles = [_article(row, clips.get(row["id"], ()), metric) for row in worst]
    summary = (
        f"{metric.upper()} {100 * scores[metric]:.2f}% over {scores['files']} files "
        f"({scores['substitutions']} substitutions, {scores['insertions']} insertions, {scores['deletions']} deletions)"
    )
    return clips_page("Worst transcripts", summary, articles, "No errors.")


def _article(row: Row, clips: Sequence[AudioClip], metric: str) -> str:
    counts = f"{row['substitutions']} sub, {row['insertions']} ins, {row['deletions']} del"
    entries = [
        ("reference", row["reference"]),
        ("hypothesis", row["hypothesis"]),
        ("compared", f"{row['normalized_reference']}\n{row['normalized_hypothesis']}"),
    ]
    return article(f"{row['id']} · {metric.upper()} {100 * row['rate']:.1f}% ({counts})", clips, entries)


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(scores: Mapping[str, Any], title: str) -> Iterator[Table]:
    """The scores for people: the evaluated system by slice, then all systems, then clips without speech."""
    (name, evaluated), *others = scores["systems"].items()
    metrics = [metric for metric in NAMES if metric in evaluated["all"]]
    out = Table(title=title)
    columns = ["", "files", *(NAMES[m] for m in metrics), "sub", "ins", "del", "length", "repeated %"]
    for column in columns if metrics[0] in LOWER_IS_BETTER else [c for c in columns if c not in ("sub", "ins", "del")]:
        out.add_column(column, justify="right" if column else "left")
    for label, values in evaluated.items():
        counts = [str(values[key]) for key in ("substitutions", "insertions", "deletions") if key in values]
        length = "–" if values["length_ratio"] is None else f"{values['length_ratio']:.2f}"
        rates = [interval_text(values[m], m) for m in metrics]
        out.add_row(label, str(values["files"]), *rates, *counts, length, f"{100 * values['repetition']:.1f}")
    yield out
    if others:
        metric = metrics[0]
        out = Table(title=f"{NAMES[metric]} on the same rows")
        difference = scores.get("difference")
        for column in ("", name, *(["model − baseline"] if difference else []), *(other for other, _ in others)):
            out.add_column(column, justify="right" if column else "left")
        for label, values in evaluated.items():
            cells = [interval_text(values[metric], metric)]
            cells += [interval_text(difference[label][metric], metric, signed=True)] if difference else []
            out.add_row(label, *cells, *(interval_text(slices[label][metric], metric) for _, slices in others))
        yield out
    if "no_speech" in scores:
        out = Table(title="words written per minute without speech")
        for column in ("", "clips", "minutes", *scores["no_speech"]):
            out.add_column(column, justify="right" if column else "left")
        for kind, values in next(iter(scores["no_speech"].values())).items():
            cells = [interval_text(kinds[kind]["words_per_minute"]) for kinds in scores["no_speech"].values()]
            out.add_row(kind, str(values["clips"]), f"{values['minutes']:.1f}", *cells)
        yield out


def check(options: Options) -> None:
    """Raise ValueError for options that do not go together."""
    if options.score is not None:
        needing = {"recognisers": options.recognisers, "silence": options.silence}
        for name in (name for name, value in needing.items() if value):
            raise ValueError(f"--{name}: needs recordings; give --data, --model and --out instead of --score")
        if options.baseline and not _is_file(options.baseline):
            raise ValueError("--baseline: with --score give the baseline's results.jsonl too")
    if options.silence < 0 or (options.music and not options.silence):
        raise ValueError("--silence: give the number of clips, 1 or more; --music adds parts of recordings to them")
    names = [Path(path).name for path in options.recognisers]
    if len({*names, "model", "baseline"}) < len(names) + 2:
        raise ValueError(f"--recognisers: two of {', '.join(names)} have one name; rename a folder")


def run(options: Options, engine: RolloutEngine | None = None) -> dict[str, Any]:
    """Do what the options say and return the scores."""
    check(options)
    samples: Sequence[Sample] = ()
    skipped = None
    if options.score is not None:
        systems: Systems = {"model": read_rows(options.score)}
        if not systems["model"]:
            raise ValueError(f"{options.score}: no rows")
    else:
        samples, skipped = read(options)
        engine = engine or options.engine()
        systems = transcripts(options, engine, samples, "predictions")
    if options.baseline and _is_file(options.baseline):
        baseline = paired_rows(systems["model"], read_rows(options.baseline), options.baseline)
        systems = {"model": systems["model"], "baseline": baseline, **systems}
    corpora, compared = compare(systems, options)
    results = [dict(row) for row in corpora["model"].rows]
    scores: dict[str, Any] = {"task": options.task, "files": len(results)}
    if options.task == "transcribe":
        results, scores = score_rows(corpora["model"].rows, corpora["model"], options)
    scores |= compared
    if skipped is not None:
        scores["skipped"] = skipped
    if options.silence:
        silent = no_speech_samples(
            options.silence, music=options.music, question=options.question or "", languages=languages_of(samples)
        )
        written = transcripts(options, engine, silent, "no_speech")
        scores["no_speech"] = {name: no_speech_scores(rows) for name, rows in written.items()}
    if options.out is not None:
        pages = {}
        if options.task == "transcribe":
            pages["worst.html"] = worst_page(results, samples, scores, options.worst)
        write_scores(options.out, scores, pages)
        lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in results)
        (options.out / "results.jsonl").write_text(lines, encoding="utf-8")
    console = Console(width=max(Console().width, 120))  # narrower, the cells of a file's log would be cut
    for table in tables(scores, f"{options.data or options.score} · {options.model or 'scored'}"):
        console.print(table)
    return scores


if __name__ == "__main__":
    run_script(run, Options, __doc__, "files")
