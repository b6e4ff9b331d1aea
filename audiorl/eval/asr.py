"""Speech recognition and translation into English: errors by language and speaker, and what is written for silence.

    audiorl eval asr --data test.jsonl --model MODEL --out results/asr --normalizer english
    audiorl eval asr --data test.jsonl --model TRAINED --baseline START --silence 40 --out results/asr \\
        --known-speakers train.jsonl --recognisers judges/whisper-base
    audiorl eval asr --score results/asr/results.jsonl --baseline results/start/results.jsonl
    audiorl eval asr --data test.jsonl --model MODEL --out results/names --hotwords names.txt --distractors 20

Writes to --out: predictions.jsonl (responses as they come; a second call continues from there), results.jsonl
(reference, hypothesis, counts and rate per file), scores.json and worst.html (the worst files with audio to listen to).
Run it before and after training on another task: transcription is what audio RL runs lose first.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np

from audiorl.audio import seconds
from audiorl.config.checks import refuse
from audiorl.config.recipe import HotwordOptions
from audiorl.data import manifest
from audiorl.data.hotwords import read_hotwords, with_context
from audiorl.data.no_speech import no_speech_samples
from audiorl.data.prompts import TRANSLATE
from audiorl.data.rows import write_json_lines
from audiorl.eval._common import (
    FEWEST_CLUSTERS,
    InferenceOptions,
    Row,
    check_settings,
    complete_answers,
    distinct_rows,
    generate_all,
    greedy_engine,
    print_table,
    run_evaluation,
    with_interval,
    write_scores,
)
from audiorl.eval.metrics.corpus import Score, estimate, ratio, repeated, translation_counts
from audiorl.eval.metrics.text import (
    CorpusErrors,
    ErrorCounts,
    HotwordErrors,
    Normalizer,
    char_errors,
    check_normalizer,
    hotword_errors,
    normalize,
    number_words,
    units,
    word_errors,
)
from audiorl.languages import language_code
from audiorl.protocols import RolloutEngine
from audiorl.report.listening import article, clips_page
from audiorl.rewards.answers import final_text
from audiorl.rewards.asr import languages_of
from audiorl.speech_models import load_recogniser
from audiorl.types import Sample

Rows = Sequence[Mapping[str, Any]]
"""Rows {id, reference, hypothesis, language?, speaker?, group?, seconds?}."""
Systems = dict[str, Rows]
"""Rows by the name of the system that wrote their hypotheses, in equal order; the first is the evaluated one."""
NAMES = {"wer": "WER %", "cer": "CER %", "bleu": "BLEU", "chrf": "chrF"}
"""Names of the metrics in tables."""
HOTWORD_NAMES = {
    "b_wer": "B-WER %",
    "u_wer": "U-WER %",
    "recall": "recall %",
    "precision": "precision %",
    "false_alarms": "false alarms %",
}
"""Names of the metrics of rows with hotwords: errors in the listed words and in all others, the share of hotwords said
that are written and of those written that were said, and the share of listed words nobody said that are written."""
_COMPARED = ("reference", "hypothesis")
WORST = 30
"""Files that worst.html shows."""
_RATE = 16_000


@dataclass(frozen=True, kw_only=True)
class ASROptions(HotwordOptions, InferenceOptions):
    """Evaluate a model's transcripts or translations, or score an existing results file."""

    score: Path | None = None
    """Score this file (JSON lines with id, reference, hypothesis) instead of running a model."""
    baseline: str | None = None
    """Compare with this model, or with this results.jsonl, on the same rows: differences with paired intervals."""
    recognisers: tuple[str, ...] = ()
    """Recognisers that transcribe the same recordings, as `audiorl.speech_models.load_recogniser` reads them."""
    task: Literal["transcribe", "translate"] = "transcribe"
    """`translate`: into English, compared with the column `translation`; rows without one are left out."""
    question: str | None = None
    """Asked instead of the usual request, for a model that was trained with another one."""
    known_speakers: tuple[str, ...] = ()
    """Speakers that training used, or manifests with their rows; others are unseen. Rows need a column `speaker`."""
    silence: int = 0
    """Also ask for transcripts of so many clips of digital silence, noise, hum and clicks, at -60 to -20 dB."""
    music: Path | None = None
    """A folder of recordings without voices, such as music on hold, for `silence`."""
    kind: str = "asr"
    """How `read_samples` reads the data."""
    metric: Literal["wer", "cer"] = "wer"
    """Which errors results.jsonl and worst.html show: in words (WER) or characters (CER)."""
    normalizer: Normalizer = "basic"
    """What is left out before words are compared: english, basic, none, or FILE.py:FUNCTION; see
    `audiorl.eval.metrics.text.normalize`."""

    @property
    def context(self) -> Row:
        """Return the settings on which the prompts' hotwords depend."""
        if not self.changes_hotwords:
            return {}
        words = read_hotwords(self.hotwords) if self.hotwords else ()
        file = f"{len(words)} words, {sha256(repr(words).encode()).hexdigest()[:12]}"
        return {"hotwords": file, "distractors": self.distractors, "prompt_hotwords": self.prompt_hotwords}

    @property
    def recorded_baseline(self) -> bool:
        """Return whether the baseline is a results.jsonl."""
        return self.baseline is not None and self.baseline.endswith(".jsonl")


def main(options: ASROptions, engine: RolloutEngine | None = None) -> Row:
    """Do what the options say and return the scores."""
    check_normalizer(options.normalizer)
    score, silence, recorded = options.score is not None, options.silence, options.recorded_baseline
    names = [Path(path).name for path in options.recognisers]
    recordings = "needs recordings; give --data, --model and --out instead of --score"
    same = len({*names, "model", "baseline"}) < len(names) + 2
    refuse(
        (score and names, f"--recognisers: {recordings}"),
        (score and silence, f"--silence: {recordings}"),
        (score and options.baseline and not recorded, "--baseline: with --score give the baseline's results.jsonl too"),
        (silence < 0 or (options.music and not silence), "--silence: give the number of clips, also with --music"),
        (options.changes_hotwords and options.task == "translate", "--hotwords: a translation has none; leave it out"),
        (score and options.distractors is not None, f"--distractors: {recordings}"),
        (options.distractors is not None and options.distractors < 0, "--distractors: give 0 or more"),
        (same, f"--recognisers: two of {', '.join(names)} have one name; rename a folder"),
    )
    samples: Sequence[Sample] = ()
    about: Row = {}
    if options.score is not None:
        file = {"hotwords": list(read_hotwords(options.hotwords))} if options.hotwords else {}
        systems: Systems = {"model": [file | row for row in distinct_rows(options.score, _COMPARED)]}
        if not systems["model"]:
            raise ValueError(f"{options.score}: no rows")
    else:
        samples, about["skipped"] = read(options)
        engine = engine or options.engine()
        systems = transcripts(options, engine, samples, "predictions")
    if options.baseline and recorded:
        start = paired_rows(systems["model"], distinct_rows(options.baseline, _COMPARED), options.baseline)
        given = [{"hotwords": row["hotwords"]} if "hotwords" in row else {} for row in systems["model"]]
        start = [{**row, **words} for row, words in zip(start, given, strict=True)]
        systems = {"model": systems["model"], "baseline": start, **systems}
    if options.known_speakers:
        systems = with_groups(systems, options)
    corpora = {name: SystemScores(rows, options) for name, rows in systems.items()}
    corpus, parts = corpora["model"], list(slices(systems["model"]))
    results = [dict(row) for row in corpus.rows]
    scores: Row = {"task": options.task, "files": len(results)}
    if options.task == "transcribe":
        results, scores = score_rows(corpus, options)
    scores["systems"] = {name: {label: c.scores(i) for label, i in parts} for name, c in corpora.items()}
    if "baseline" in corpora:
        scores["difference"] = {label: corpus.difference(corpora["baseline"], i) for label, i in parts}
    scores |= about
    if options.silence:
        assert engine is not None
        question, languages = options.question or "", languages_of(samples)
        silent = no_speech_samples(options.silence, music=options.music, question=question, languages=languages)
        written = transcripts(options, engine, silent, "no_speech")
        scores["no_speech"] = {name: no_speech_scores(rows) for name, rows in written.items()}
    if options.out is not None:
        pages = {"worst.html": worst_page(results, samples, scores)} if options.task == "transcribe" else {}
        write_scores(options.out, scores, pages)
        write_json_lines(options.out / "results.jsonl", results)
    print_scores(scores, f"{options.data or options.score} · {options.model or 'scored'}")
    return scores


# -- transcripts -------------------------------------------------------------------------------------------------------


def read(options: ASROptions) -> tuple[list[Sample], int]:
    """Return the samples, their first reference the text to compare with, and how many had no usable audio."""
    loaded = options.read(options.question or (TRANSLATE if options.task == "translate" else None))
    samples = list(loaded.samples)
    if options.changes_hotwords:
        words = read_hotwords(options.hotwords) if options.hotwords else ()
        samples = with_context(samples, words, options.distractors, prompt=options.prompt_hotwords)
    if options.task == "translate":
        texts = [(s, str(s.metadata.get("translation") or "")) for s in samples]
        samples = [replace(s, references=(text,)) for s, text in texts if text.strip()]
        if len(samples) < len(texts):
            print(f"{len(texts) - len(samples)} of {len(texts)} rows have no translation", file=sys.stderr)
    for sample in samples:
        if not sample.references:
            raise ValueError(f"{options.data}: {sample.id!r} has no reference transcript")
    if not samples:
        raise ValueError(f"{options.data}: nothing to {options.task}")
    return samples, len(loaded.skipped)


def transcripts(options: ASROptions, engine: RolloutEngine, samples: Sequence[Sample], name: str) -> Systems:
    """Ask the model, the baseline model and the recognisers: OUT/NAME.jsonl and OUT/SYSTEM/NAME.jsonl.

    Rows are {id, reference, hypothesis, language, speaker}; of clips without speech {kind, seconds} too.
    """
    assert options.out

    def answers(engine: RolloutEngine, folder: Path) -> dict[str, str]:
        file, size = folder / f"{name}.jsonl", options.batch_size
        rows = generate_all(engine, samples, file, size, describe=lambda r: {"hypothesis": final_text(r.text)})
        return {row["id"]: row["hypothesis"] for row in rows}

    def folder_of(system: str, path: str) -> Path:
        """Return the folder of another system's transcripts; ValueError where those of a third one lie there."""
        assert options.out
        folder = options.out / re.sub(r"[^\w.-]+", "_", system)
        settings = {"model": path, "task": options.task, "question": options.question, **options.context}
        check_settings(folder / "settings.json", {**settings, "max_new_tokens": options.max_new_tokens})
        return folder

    written = {"model": answers(engine, options.out)}
    if options.baseline and not options.recorded_baseline:
        start = greedy_engine(options.baseline, options.max_new_tokens, options.device)
        written["baseline"] = answers(start, folder_of("baseline", options.baseline))
    for path in options.recognisers:
        system = Path(path).name
        written[system] = recognised(path, samples, options, folder_of(system, path) / f"{name}.jsonl")
    rows: dict[str, list[Row]] = {system: [] for system in written}
    for sample in samples:
        about = {name: sample.metadata.get(name) for name in ("language", "speaker", "kind")}
        more: Row = {name: value for name, value in about.items() if value} | {"language": about["language"]}
        if sample.metadata.get("hotwords"):
            more["hotwords"] = list(sample.metadata["hotwords"])
        if about["kind"]:
            more["seconds"] = sum(map(seconds, sample.audio))
        for system, texts in written.items():
            said = {"id": sample.id, "reference": sample.references[0], "hypothesis": texts[sample.id]}
            rows[system].append(said | more)
    return {**rows}


def recognised(path: str, samples: Sequence[Sample], options: ASROptions, out: Path) -> dict[str, str]:
    """Return what a recogniser writes, by id; each language with a recogniser for it. Kept in `out`."""
    hypotheses: dict[str, str] = {}
    for language in dict.fromkeys(s.metadata.get("language") for s in samples):
        recogniser = load_recogniser(path, language, options.device, options.batch_size, options.task)

        def transcribe(batch: Sequence[Sample]) -> list[Row]:
            waves = [sample.audio[0].load(_RATE) for sample in batch]
            texts = recogniser.transcribe(waves, _RATE)  # noqa: B023  called within this turn of the loop
            return [{"id": s.id, "hypothesis": text} for s, text in zip(batch, texts, strict=True)]

        spoken = [s for s in samples if s.metadata.get("language") == language]
        rows = complete_answers(out, spoken, transcribe, options.batch_size)
        hypotheses |= {id: row["hypothesis"] for id, row in rows.items()}
    return hypotheses


def with_groups(systems: Systems, options: ASROptions) -> Systems:
    """Add "group" to rows: known or unseen speakers. Raises ValueError for a row that names no speaker."""
    known: set[object] = set()
    for given in options.known_speakers:
        speakers: set[object] = {given}
        if Path(given).exists():
            rows = manifest.read_samples(given, kind=options.kind, on_error="skip").samples
            speakers = {row.metadata.get("speaker") for row in rows} - {None, ""}
        elif "/" in given or Path(given).suffix:
            raise ValueError(f"--known-speakers {given}: missing; give a manifest that exists, or a speaker's name")
        if not speakers:
            raise ValueError(f"--known-speakers {given}: no row of this manifest names a speaker")
        known |= speakers
    grouped: dict[str, list[Row]] = {system: [] for system in systems}
    for system, row in ((system, row) for system, rows in systems.items() for row in rows):
        if not row.get("speaker"):
            raise ValueError(f"row {row['id']!r} names no speaker; give the column, or leave --known-speakers out")
        grouped[system].append({**row, "group": f"{'known' if row['speaker'] in known else 'unseen'} speakers"})
    return {**grouped}


def paired_rows(rows: Rows, baseline: Rows, name: str) -> Rows:
    """Return the rows of `baseline` in the order of `rows`. Raises ValueError for other ids or other references."""
    others, own = ({row["id"]: row.get("reference") for row in part} for part in (baseline, rows))
    same = "two systems are compared on the same rows"
    for id in own | others:
        if id not in others or id not in own:
            where = f"no row {id!r}" if id in own else f"row {id!r} is not among the others"
            raise ValueError(f"{name}: {where}; {same}")
        if others[id] != own[id]:
            raise ValueError(f"{name}: row {id!r} has another reference; {same}")
    by_id = {row["id"]: row for row in baseline}
    return [by_id[row["id"]] for row in rows]


# -- scores ------------------------------------------------------------------------------------------------------------


def slices(rows: Rows) -> Iterator[tuple[str, list[int]]]:
    """Yield (label, indices) of all rows, then of each language, group, language of a group, and speaker in the rows.

    Languages, and languages of a group, that would repeat an earlier slice are left out.
    """
    yielded = [list(range(len(rows)))]
    yield "all", yielded[0]
    for columns in (("language",), ("group",), ("group", "language"), ("language", "speaker")):
        labels: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            if row.get(columns[-1]):
                labels.setdefault(", ".join(str(row[c]) for c in columns if row.get(c)), []).append(i)
        for label, indices in sorted(labels.items()):
            if indices not in yielded or columns in (("group",), ("language", "speaker")):
                yielded.append(indices)
                yield label, indices


def error_counts(row: Mapping[str, Any], normalizer: Normalizer, language: str | None, metric: str) -> ErrorCounts:
    """Count the errors of a transcript, both texts normalised; `language` is used where the row names none."""
    errors = word_errors if metric == "wer" else char_errors
    try:
        return errors(row["reference"], row["hypothesis"], normalizer, row.get("language") or language)
    except ValueError as error:
        raise ValueError(f"row {row.get('id')!r}: {error}") from error


class SystemScores:
    """Counts of one system's rows, from which the scores of any slice follow."""

    def __init__(self, rows: Rows, options: ASROptions):
        self.rows = rows
        self.errors: dict[str, list[ErrorCounts]] = {}
        self.counts: dict[str, tuple[np.ndarray, Score]] = {}
        if options.task == "translate":
            hypotheses, references = ([row[key] for row in rows] for key in ("hypothesis", "reference"))
            for metric in ("bleu", "chrf"):
                self.counts[metric] = translation_counts(hypotheses, references, metric)
        else:
            for metric in ("wer", "cer"):
                counts = [error_counts(row, options.normalizer, None, metric) for row in rows]
                self.errors[metric] = counts
                self.counts[metric] = np.array([[c.errors, c.reference_length] for c in counts]), ratio
        self.hotwords: list[HotwordErrors | None] = []
        if options.task == "transcribe" and any(row.get("hotwords") for row in rows):
            self.hotwords = [_hotwords_of(row, options.normalizer) for row in rows]
            columns = np.array([_hotword_counts(errors) for errors in self.hotwords])
            for metric, places in zip(HOTWORD_NAMES, ([0, 1], [2, 3], [4, 5], [4, 6], [7, 8]), strict=True):
                self.counts[metric] = columns[:, places], ratio
        languages = ["en" if options.task == "translate" else row.get("language") for row in rows]
        self.texts = [
            [normalize(row[key], options.normalizer, language) for key in _COMPARED]
            for row, language in zip(rows, languages, strict=True)
        ]
        self._lengths = np.array([[len(units(text)) for text in pair] for pair in self.texts])
        self._repeated = np.array([repeated(hypothesis) for _, hypothesis in self.texts])

    def scores(self, indices: Sequence[int]) -> Row:
        """Return {files, METRIC: {value, low, high}, …, substitutions, …, length_ratio, repetition} of a slice.

        From FEWEST_CLUSTERS on, {low_speakers, high_speakers} is the interval over speakers. length_ratio: words
        written over words of the reference, None where nothing is said. repetition: share of the written three-word
        sequences that occurred before in the same output.
        """
        speakers = [self.rows[i].get("speaker") for i in indices]
        result: Row = {"files": len(indices)}
        for metric, (counts, score) in self._measured(indices).items():
            result[metric] = asdict(estimate(counts[indices], score))
            if None not in speakers and len(set(speakers)) >= FEWEST_CLUSTERS:
                over = estimate(counts[indices], score, clusters=speakers)
                result[metric] |= {"low_speakers": over.low, "high_speakers": over.high, "speakers": len(set(speakers))}
        if "wer" in self.errors:
            total = sum((self.errors["wer"][i] for i in indices), ErrorCounts())
            result |= {name: getattr(total, name) for name in ("substitutions", "insertions", "deletions")}
        spoken, written = self._lengths[indices].sum(0)
        result["length_ratio"] = float(written / spoken) if spoken else None
        result["repetition"] = ratio(self._repeated[indices].sum(0))
        return result

    def difference(self, baseline: SystemScores, indices: Sequence[int]) -> Row:
        """Return {METRIC: {value, low, high}}: this system minus `baseline` on the same rows, with paired intervals."""
        return {
            metric: asdict(estimate(counts[indices], score, baseline_NK=baseline.counts[metric][0][indices]))
            for metric, (counts, score) in self._measured(indices).items()
            if metric in baseline._measured(indices)
        }

    def _measured(self, indices: Sequence[int]) -> dict[str, tuple[np.ndarray, Score]]:
        """Return the metrics of a slice: those of hotwords only where it has what they are a share of."""
        return {m: v for m, v in self.counts.items() if m not in HOTWORD_NAMES or v[0][indices, 1].any()}


def _hotwords_of(row: Mapping[str, Any], normalizer: Normalizer) -> HotwordErrors | None:
    """Return the hotwords of a row's texts; None for a row without any."""
    if not row.get("hotwords"):
        return None
    try:
        return hotword_errors(row["reference"], row["hypothesis"], row["hotwords"], normalizer, row.get("language"))
    except ValueError as error:
        raise ValueError(f"row {row['id']!r}: {error}") from error


def _hotword_counts(found: HotwordErrors | None) -> list[int]:
    """Return errors in hotwords and words of the reference in them, the same of other words, hotwords found, said and
    written, listed words that are not said but written, and all that are not said."""
    if found is None:
        return [0] * 9
    counts = [n for of in (found.biased, found.unbiased) for n in (of.errors, of.reference_length)]
    heard = len(found.said) - len(found.missed)
    alarms = len(set(found.unsaid) & set(found.written))
    return [*counts, heard, len(found.said), len(found.written), alarms, len(found.unsaid)]


def no_speech_scores(rows: Rows) -> dict[str, Row]:
    """Return {clips, minutes, words, words_per_minute: {value, low, high}, clips_with_words} by kind, and of "all".

    Words are counted as written, without normalisation; in scripts without spaces a character is a word.
    """
    counts = np.array([[len(units(row["hypothesis"])), row["seconds"] / 60] for row in rows])
    result = {}
    for kind in ["all", *dict.fromkeys(row["kind"] for row in rows)]:
        indices = [i for i, row in enumerate(rows) if kind in ("all", row["kind"])]
        words, minutes = counts[indices].sum(0)
        result[kind] = {
            "clips": len(indices),
            "minutes": float(minutes),
            "words": int(words),
            "words_per_minute": asdict(estimate(counts[indices], ratio)),
            "clips_with_words": float(np.mean(counts[indices, 0] > 0)),
        }
    return result


def numbers_of(rows: Rows, normalizer: Normalizer) -> dict[str, str]:
    """Return how numbers were compared, by the language of rows: spelled out as "words", or as "digits"."""
    languages = sorted({str(row.get("language") or "") for row in rows}) if normalizer in ("basic", "english") else []
    if normalizer == "english":  # which `normalize` takes for English alone
        languages = [name for name in languages if name and language_code(name) != "en"]
    return {name or "unknown": "words" if name and number_words(name) else "digits" for name in languages}


def score_rows(corpus: SystemScores, options: ASROptions) -> tuple[list[Row], Row]:
    """Return the rows with their normalised texts, counts and rate, and the scores of the corpus.

    A file whose reference is empty after normalisation (a reference of pure filler, silence) has no length: its
    insertions count in the corpus rate, and its own rate is 0 or 1. `empty_references` tells how many there are.
    """
    errors = CorpusErrors(tuple(corpus.errors[options.metric]))
    results = []
    for row, texts, count in zip(corpus.rows, corpus.texts, errors.utterances, strict=True):
        normalized = {f"normalized_{key}": text for key, text in zip(_COMPARED, texts, strict=True)}
        results.append({**row, **normalized, "rate": count.rate, **asdict(count)})
    for result, found in zip(results, corpus.hotwords, strict=False):
        if found is not None:
            result |= {"missed_hotwords": list(found.missed), "false_hotwords": list(found.false)}
    scores = {
        "metric": options.metric,
        "normalizer": options.normalizer,
        "numbers": numbers_of(corpus.rows, options.normalizer),
        options.metric: errors.rate,
        f"mean_{options.metric}": errors.mean,
        "files": len(results),
        "reference_length": errors.total.reference_length,
        **asdict(errors.total),
        "exact": sum(c.errors == 0 for c in errors.utterances),
        "empty_references": sum(c.reference_length == 0 for c in errors.utterances),
    }
    return results, scores


# -- tables and the page -----------------------------------------------------------------------------------------------


def worst_page(results: Sequence[Row], samples: Sequence[Sample], scores: Mapping[str, Any]) -> str:
    """Return the files with the highest rates as a self-contained HTML page, audio included."""
    clips = {s.id: s.audio for s in samples}
    metric = scores["metric"]
    articles = []
    for row in sorted((r for r in results if r["rate"] > 0), key=lambda r: (-r["rate"], str(r["id"])))[:WORST]:
        counts = f"{row['substitutions']} sub, {row['insertions']} ins, {row['deletions']} del"
        compared = f"{row['normalized_reference']}\n{row['normalized_hypothesis']}"
        entries = [("reference", row["reference"]), ("hypothesis", row["hypothesis"]), ("compared", compared)]
        names = {"missed_hotwords": "hotwords missed", "false_hotwords": "hotwords nobody said"}
        entries += [(name, ", ".join(row[column])) for column, name in names.items() if row.get(column)]
        title = f"{row['id']} · {metric.upper()} {100 * row['rate']:.1f}% ({counts})"
        articles.append(article(title, clips.get(row["id"], ()), entries))
    summary = (
        f"{metric.upper()} {100 * scores[metric]:.2f}% over {scores['files']} files "
        f"({scores['substitutions']} substitutions, {scores['insertions']} insertions, {scores['deletions']} deletions)"
    )
    measured = next(iter(scores["systems"].values()))["all"]
    found = [f"{name} {interval_text(measured[m], m)}" for m, name in HOTWORD_NAMES.items() if m in measured]
    summary += f"; hotwords: {', '.join(found)}" if found else ""
    return clips_page("Worst transcripts", summary, articles, "No errors.")


def interval_text(value: Mapping[str, float], metric: str = "", signed: bool = False) -> str:
    """Return `12.3 (10.1–14.5)`, error rates in percent."""
    scale = 100 if metric in ("wer", "cer", *HOTWORD_NAMES) else 1
    return with_interval(value, "+.1f" if signed else ".1f", "value", scale, " to " if signed else "–")


def print_scores(scores: Mapping[str, Any], title: str) -> None:
    """Print the evaluated system by slice, then all systems, then clips without speech."""
    evaluated = next(iter(scores["systems"].values()))
    metrics = [metric for metric in NAMES if metric in evaluated["all"]]
    counted = [key for key in ("substitutions", "insertions", "deletions") if key in evaluated["all"]]
    rows = []
    for label, values in evaluated.items():
        length = "–" if values["length_ratio"] is None else f"{values['length_ratio']:.2f}"
        cells = [interval_text(values[m], m) for m in metrics] + [str(values[key]) for key in counted]
        rows.append([label, str(values["files"]), *cells, length, f"{100 * values['repetition']:.1f}"])
    head = ["", "files", *(NAMES[m] for m in metrics), *(key[:3] for key in counted), "length", "repeated %"]
    print_table(head, rows, title, width=120)  # narrower, the cells of a file's log would be cut
    if len(scores["systems"]) > 1:
        head, rows = system_table(scores)
        if "difference" in scores:
            head.append("model − baseline")
            for row in rows:
                row.append(interval_text(scores["difference"][row[0]][metrics[0]], metrics[0], signed=True))
        print_table(head, rows, "on the same rows", width=150)
    head, rows = hotword_table(scores)
    if rows:
        print_table(head, rows, "hotwords: errors in listed words (B-WER) and in others (U-WER)", width=150)
    if "no_speech" in scores:
        rows = []
        for kind, values in next(iter(scores["no_speech"].values())).items():
            cells = [interval_text(kinds[kind]["words_per_minute"]) for kinds in scores["no_speech"].values()]
            rows.append([kind, str(values["clips"]), f"{values['minutes']:.1f}", *cells])
        head = ["", "clips", "minutes", *scores["no_speech"]]
        print_table(head, rows, "words written per minute without speech", width=120)


def system_table(scores: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return (head, rows): a row for each slice, a column for each system and metric."""
    model = next(iter(scores["systems"].values()))
    columns = [(name, metric) for name in scores["systems"] for metric in NAMES if metric in model["all"]]
    rows = []
    for label, values in model.items():
        cells = (interval_text(scores["systems"][name][label][metric], metric) for name, metric in columns)
        rows.append([label, str(values["files"]), *cells])
    return ["", "files", *(f"{name}: {NAMES[metric]}" for name, metric in columns)], rows


def hotword_table(scores: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return (head, rows): a row for each slice and system with hotwords, and the difference from the baseline."""
    rows = []
    systems = dict(scores["systems"]) | ({"model − baseline": scores["difference"]} if "difference" in scores else {})
    for label in next(iter(scores["systems"].values())):
        for name, by_slice in systems.items():
            cells = by_slice[label]
            if any(metric in cells for metric in HOTWORD_NAMES):
                signed = name not in scores["systems"]
                texts = [interval_text(cells[m], m, signed) if m in cells else "–" for m in HOTWORD_NAMES]
                rows.append([label, name, *texts])
    return ["", "system", *HOTWORD_NAMES.values()], rows


def model_card_section(folder: Path) -> str:
    """Write what `audiorl eval asr --out FOLDER` measured in Markdown: a row for each slice with the baseline.

    Raises ValueError for a folder whose scores.json holds no systems.
    """
    scores = json.loads((folder / "scores.json").read_text()) if (folder / "scores.json").is_file() else {}
    if "systems" not in scores:
        raise ValueError(f"{folder}: no scores of `audiorl eval asr` there; give its --out")
    head, rows = system_table(scores)
    tables = [table for table in ((head, rows), hotword_table(scores)) if table[1]]
    lines = []
    for head, rows in tables:
        lines += ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)] + [""]
    title = {"transcribe": "Recognition", "translate": "Translation into English"}[scores.get("task", "transcribe")]
    return "\n".join([f"## {title}", "", *lines, "Values with 95 % bootstrap intervals over clips."])


if __name__ == "__main__":
    run_evaluation(sys.modules[__name__], sys.argv[1:])
