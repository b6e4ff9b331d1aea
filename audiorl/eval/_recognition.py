"""Transcripts and translations in tables: by language, by speaker, and by whether training knew the speaker.

A row is {id, reference, hypothesis, language?, speaker?, group?, seconds?}. A slice is a part of the rows with a label.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from audiorl.eval.metrics.corpus import Score, estimate, ratio, repeated, translation_counts
from audiorl.eval.metrics.text import ErrorCounts, Normalizer, char_errors, normalize, units, word_errors

Row = Mapping[str, Any]
Task = Literal["transcribe", "translate"]
METRICS: dict[Task, tuple[str, str]] = {"transcribe": ("wer", "cer"), "translate": ("bleu", "chrf")}
LOWER_IS_BETTER = ("wer", "cer")
NAMES = {"wer": "WER %", "cer": "CER %", "bleu": "BLEU", "chrf": "chrF"}
"""Of the metrics, in tables."""
FEWEST_SPEAKERS = 3
"""Least number of speakers of an interval over speakers."""


def slices(rows: Sequence[Row]) -> Iterator[tuple[str, list[int]]]:
    """(label, indices) of all rows, then of each language, group, language of a group, and speaker that rows name.

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


def with_groups(rows: Sequence[Row], trained: frozenset[str]) -> list[dict[str, Any]]:
    """The rows with their group, "known speakers" for those in `trained` and "unseen speakers" for others.

    Raises ValueError for a row that names no speaker.
    """
    grouped = []
    for row in rows:
        if not row.get("speaker"):
            raise ValueError(f"row {row['id']!r} names no speaker; give the column, or leave --known-speakers out")
        grouped.append({**row, "group": "known speakers" if row["speaker"] in trained else "unseen speakers"})
    return grouped


def error_counts(row: Row, normalizer: Normalizer, language: str | None, metric: str) -> ErrorCounts:
    """Of one transcript, both texts normalised; `language` is used where the row names none."""
    for key in ("reference", "hypothesis"):
        if not isinstance(row.get(key), str):
            raise ValueError(f"row {row.get('id')!r}: {key} is {row.get(key)!r}, expected text")
    errors = word_errors if metric == "wer" else char_errors
    return errors(row["reference"], row["hypothesis"], normalizer, row.get("language") or language)


class Corpus:
    """The counts of one system's rows, from which the scores of any slice follow."""

    def __init__(self, rows: Sequence[Row], task: Task, normalizer: Normalizer = "basic", language: str | None = None):
        self.rows = rows
        self.metrics = METRICS[task]
        self.errors: dict[str, list[ErrorCounts]] = {}
        self._counts: dict[str, tuple[np.ndarray, Score]] = {}
        for metric in self.metrics:
            if task == "translate":
                hypotheses, references = ([row[key] for row in rows] for key in ("hypothesis", "reference"))
                self._counts[metric] = translation_counts(hypotheses, references, metric)
            else:
                counts = [error_counts(row, normalizer, language, metric) for row in rows]
                self.errors[metric] = counts
                self._counts[metric] = np.array([[c.errors, c.reference_length] for c in counts]), ratio
        texts = [
            [normalize(row[key], normalizer, row.get("language") or language) for key in ("hypothesis", "reference")]
            for row in rows
        ]
        self._lengths = np.array([[len(units(text)) for text in pair] for pair in texts])
        self._repeated = np.array([repeated(pair[0]) for pair in texts])

    def scores(self, indices: Sequence[int]) -> dict[str, Any]:
        """{files, METRIC: {value, low, high}, …, substitutions, insertions, deletions, length_ratio, repetition}.

        From FEWEST_SPEAKERS on, {low_speakers, high_speakers} is the interval over speakers. length_ratio: words
        written over words of the reference, None where nothing is said. repetition: share of the written three-word
        sequences that occurred before in the same output.
        """
        speakers = [self.rows[i].get("speaker") for i in indices]
        result: dict[str, Any] = {"files": len(indices)}
        for metric in self.metrics:
            counts, score = self._counts[metric]
            result[metric] = asdict(estimate(counts[indices], score))
            if None not in speakers and len(set(speakers)) >= FEWEST_SPEAKERS:
                over = estimate(counts[indices], score, clusters=speakers)
                result[metric] |= {"low_speakers": over.low, "high_speakers": over.high, "speakers": len(set(speakers))}
        if "wer" in self.errors:
            total = sum((self.errors["wer"][i] for i in indices), ErrorCounts())
            result |= {name: getattr(total, name) for name in ("substitutions", "insertions", "deletions")}
        written, spoken = self._lengths[indices].sum(0)
        result["length_ratio"] = float(written / spoken) if spoken else None
        result["repetition"] = ratio(self._repeated[indices].sum(0))
        return result

    def difference(self, baseline: Corpus, indices: Sequence[int]) -> dict[str, Any]:
        """{METRIC: {value, low, high}}: this system minus `baseline` on the same rows, with paired intervals."""
        result = {}
        for metric in self.metrics:
            counts, score = self._counts[metric]
            result[metric] = asdict(estimate(counts[indices], score, baseline_NK=baseline._counts[metric][0][indices]))
        return result


def paired_rows(rows: Sequence[Row], baseline: Sequence[Row], name: str) -> list[Row]:
    """The rows of `baseline` in the order of `rows`. Raises ValueError for other ids or other references."""
    by_id = {row["id"]: row for row in baseline}
    for row in rows:
        if row["id"] not in by_id:
            raise ValueError(f"{name}: no row {row['id']!r}; two systems are compared on the same rows")
        if by_id[row["id"]].get("reference") != row.get("reference"):
            raise ValueError(
                f"{name}: row {row['id']!r} has another reference; two systems are compared on the same rows"
            )
    if len(by_id) > len(rows):
        other = next(id for id in by_id if id not in {row["id"] for row in rows})
        raise ValueError(f"{name}: row {other!r} is not among the others; two systems are compared on the same rows")
    return [by_id[row["id"]] for row in rows]


def no_speech_scores(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """By kind of sound, and "all": {clips, minutes, words, words_per_minute: {value, low, high}, clips_with_words}.

    Words are counted as written, without normalisation; in scripts without spaces a character is a word.
    """
    counts = np.array([[len(units(row["hypothesis"])), row["seconds"] / 60] for row in rows])
    kinds = ["all", *dict.fromkeys(row["kind"] for row in rows)]
    result = {}
    for kind in kinds:
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


def interval_text(value: Mapping[str, float], metric: str = "", signed: bool = False) -> str:
    """`12.3 (10.1–14.5)`, error rates in percent."""
    scale = 100 if metric in LOWER_IS_BETTER else 1
    numbers = [f"{scale * value[key]:{'+' if signed else ''}.1f}" for key in ("value", "low", "high")]
    return f"{numbers[0]} ({numbers[1]} to {numbers[2]})" if signed else f"{numbers[0]} ({numbers[1]}–{numbers[2]})"


def model_card_section(folder: Path) -> str:
    """What `audiorl eval asr --out FOLDER` measured, in Markdown: a row for each slice with the baseline.

    Raises ValueError for a folder whose scores.json holds no systems.
    """
    scores = json.loads((folder / "scores.json").read_text()) if (folder / "scores.json").is_file() else {}
    if "systems" not in scores:
        raise ValueError(f"{folder}: no scores of `audiorl eval asr` there; give its --out")
    systems = {Path(name).name: slices for name, slices in scores["systems"].items()}
    model = next(iter(systems.values()))
    columns = [(name, metric) for name in systems for metric in NAMES if metric in model["all"]]
    header = ["", "files", *(f"{name}: {NAMES[metric]}" for name, metric in columns)]
    rows = [
        [
            label,
            str(values["files"]),
            *(interval_text(systems[name][label][metric], metric) for name, metric in columns),
        ]
        for label, values in model.items()
    ]
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    title = {"transcribe": "Recognition", "translate": "Translation into English"}[scores.get("task", "transcribe")]
    return "\n".join([f"## {title}", "", *lines, "", "Values with 95 % bootstrap intervals over clips."])
