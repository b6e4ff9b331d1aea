"""MMAU, MMAR and MMSU: multiple-choice questions about sound, music and speech.

    audiorl eval mmau --data mmau-test-mini.json --model MODEL --out results/mmau --blind silence
    audiorl eval mmau --score predictions.json

Writes to --out: predictions.jsonl (one row per question as it is answered; a second call continues from there),
predictions.json (the benchmark's own list with the model's outputs in the keys its scorer reads) and scores.json.
--blind asks every question once more without its audio: a model that answers as well without it guesses from the text.

A question counts as right by the official rule: `mmau_match` of `audiorl.eval.metrics.choice` for MMAU and MMAR,
`mmsu_match` for MMSU, whose responses are letters. Unlike the official scripts, which skip questions without a usable
output, those count as wrong here and are reported. --score also reads the *.evaluated.jsonl of MMAR-Rubrics.

Beside it stands the rule of rewards, `same_answer` of `audiorl.rewards.answers`, and where the two differ: the official
one of MMAU takes no letter ("B"), but any sentence with the words of the choice.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from audiorl.data.rows import BadRow
from audiorl.data.rows import read_rows as table_rows
from audiorl.data.schema import FieldError, check, check_limit
from audiorl.data.schema.results import BenchmarkRow
from audiorl.data.views import silence, text_only
from audiorl.eval._common import (
    InferenceOptions,
    Row,
    generate_all,
    print_table,
    run_evaluation,
    summarize,
    with_interval,
    write_scores,
)
from audiorl.eval.metrics.choice import mmau_match, mmsu_letter, mmsu_match, rubric_score, word_set
from audiorl.protocols import RolloutEngine
from audiorl.rewards.answers import extract_think, final_text, match_choice, same_answer

Kind = Literal["mmau", "mmar", "mmsu"]
BLIND = {"silence": silence, "text": text_only}
# Where a scorer looks for the output: MMAU's script reads the first, its README names the second.
PREDICTION_KEYS: dict[Kind, tuple[str, ...]] = {
    "mmau": ("model_output", "model_prediction"),
    "mmar": ("answer_prediction",),
    "mmsu": ("response",),
}
ANSWER_KEY: dict[Kind, str] = {"mmau": "answer", "mmar": "answer", "mmsu": "answer_gt"}
GROUPINGS = ("task", "task_name", "modality", "category", "sub-category", "sub-sub-category", "difficulty")


@dataclass(frozen=True, kw_only=True)
class MMAUOptions(InferenceOptions):
    """Evaluate a model on MMAU, MMAR or MMSU, or score an existing predictions file."""

    score: Path | None = None
    """Score this predictions file instead of running a model; with --data, questions it leaves out count as wrong."""
    kind: Kind = "mmau"
    """Which benchmark: decides on the keys that are read and written."""
    blind: Literal["silence", "text"] | None = None
    """Ask again without the audio and report the difference: with silence of the same length, or the text alone."""


def main(options: MMAUOptions, engine: RolloutEngine | None = None) -> dict[str, Any]:
    """Do what the options say and return the scores; empty when the data holds no answers to score against."""
    blind: list[Row] = []
    check_limit(options.limit)
    if options.score is not None:
        if options.blind is not None:
            raise ValueError("--blind asks a model: give --data, --model and --out, and leave out --score")
        rows = read_rows(options.score)
        if options.data is not None:
            keys = (*PREDICTION_KEYS[options.kind], "thinking_prediction", "raw_responses")
            by_id = {str(p["id"]): {k: p[k] for k in keys if k in p} for p in rows}
            rows = [row | by_id.get(str(row["id"]), {}) for row in read_rows(options.data)[: options.limit]]
    else:
        options.check()
        assert options.data and options.out
        rows, blind = predict(options, read_rows(options.data)[: options.limit], engine)
        predictions = json.dumps(rows, indent=2, ensure_ascii=False) + "\n"
        (options.out / "predictions.json").write_text(predictions, encoding="utf-8")
    if not any(row.get(ANSWER_KEY[options.kind]) for row in rows):
        where = "" if options.out is None else f" in {options.out / 'predictions.json'}"
        print(f"No answers in the data: nothing can be scored; the predictions to submit are{where}.", file=sys.stderr)
        return {}
    try:
        scores = score_rows(rows, options.kind, blind)
    except ValueError as error:
        raise ValueError(f"{options.data or options.score}: {error}") from error
    if options.out is not None:
        settings = {k: None if v is None else str(v) for k, v in dataclasses.asdict(options).items()}
        write_scores(options.out, {**scores, "options": settings})
    print_scores(scores, f"{options.kind.upper()} · {options.model or options.score}")
    return scores


def read_rows(path: Path) -> list[Row]:
    """Read a JSON list, JSON lines, a .parquet or .arrow file, or the folder of a saved dataset.

    Audio stays out of the rows but for its path. Raises ValueError for anything else, with the file, row and field.
    """
    rows: dict[str, Row] = {}
    for row in table_rows(path):
        if isinstance(row, BadRow):
            raise ValueError(str(row))
        try:
            check(row.data, BenchmarkRow)
        except FieldError as error:
            raise ValueError(str(BadRow.of(row, error))) from error
        audio, id = row.data.get("audio"), str(row.data["id"])
        named = {"audio_path": audio["path"]} if isinstance(audio, Mapping) and audio.get("path") else {}
        if id in rows:
            raise ValueError(f"{path}: the id {id!r} occurs more than once")
        rows[id] = named | {k: v for k, v in row.data.items() if k != "audio" or isinstance(v, str)}
    return list(rows.values())


def predict(
    options: MMAUOptions, rows: Sequence[Row], engine: RolloutEngine | None = None
) -> tuple[list[Row], list[Row]]:
    """Return (the rows with the model's outputs, the rows with its blind outputs, none without `options.blind`).

    Rows whose audio cannot be used stay without an output.
    """
    loaded = options.read()
    assert options.out
    wanted = {str(row["id"]) for row in rows}
    samples = [s for s in loaded.samples if s.id in wanted]
    if loaded.skipped:
        print(f"{len(loaded.skipped)} questions cannot be asked and count as wrong", file=sys.stderr)
    if not samples:
        raise ValueError(f"{options.data}: none of the {len(rows)} questions can be asked")
    engine = engine or options.engine()
    runs = {"predictions": samples}
    if options.blind is not None:
        runs[f"blind-{options.blind}"] = list(map(BLIND[options.blind], samples))
    answered: list[list[Row]] = []
    for name, prompts in runs.items():
        answers = generate_all(
            engine,
            prompts,
            options.out / f"{name}.jsonl",
            options.batch_size,
            describe=lambda r: {"prediction": final_text(r.text), "think": extract_think(r.text) or ""},
        )
        by_id = {a["id"]: a for a in answers}
        answered.append([])
        for row in rows:
            answer = by_id.get(str(row["id"]))
            if answer is not None:
                text = _as_letter(row, answer["prediction"]) if options.kind == "mmsu" else answer["prediction"]
                row = row | dict.fromkeys(PREDICTION_KEYS[options.kind], text)
                row |= {"thinking_prediction": answer["think"]} if options.kind == "mmar" else {}
            answered[-1].append(row)
    return answered[0], answered[1] if options.blind is not None else []


def _lettered(row: Row) -> dict[str, str]:
    """Return the choices of MMSU by letter."""
    return {letter: row.get(f"choice_{letter.lower()}") or "" for letter in "ABCD"}


def _as_letter(row: Row, prediction: str) -> str:
    """Return the letter of the choice that the prediction names; nothing for a prediction that names none.

    The official rule would take the first character of such a prediction for a letter.
    """
    letters = {text.strip(): letter for letter, text in reversed(_lettered(row).items()) if text.strip()}
    choices = list(reversed(letters))
    named = match_choice(prediction, choices)
    return "" if named is None else letters[choices[named]]


def judge(row: Row, kind: Kind) -> Row:
    """Judge by the official rule: {accuracy, rewarded, missing, unanswered, rubric?}; `rewarded` by that of rewards.

    Missing: no output at all. Unanswered: an output without a word, in MMSU a letter. Rubric: of a rated thought.
    """
    answer = row.get(ANSWER_KEY[kind])
    choices = list(filter(None, _lettered(row).values())) if kind == "mmsu" else row.get("choices")
    if not answer or not choices:
        field = ("choice_a" if kind == "mmsu" else "choices") if answer else ANSWER_KEY[kind]
        what = "choices" if answer else "answer"
        raise ValueError(f"question {row['id']!r}: no {what} to score against; give them in the field {field!r}")
    prediction = next((row[key] for key in PREDICTION_KEYS[kind] if row.get(key) is not None), None)
    if prediction is None:
        return {"accuracy": 0.0, "rewarded": 0.0, "missing": True, "unanswered": False}
    if kind == "mmsu":
        correct, unanswered = mmsu_match(answer, prediction, _lettered(row)), mmsu_letter(prediction) is None
        asked = list(_lettered(row).values())
    else:
        correct, unanswered = mmau_match(answer, prediction, choices), not word_set(prediction)
        asked = list(dict.fromkeys(filter(None, choices)))  # what a letter counts
    rewarded = same_answer(final_text(prediction), answer, asked)
    result: Row = {"accuracy": float(correct), "rewarded": float(rewarded)}
    result |= {"missing": False, "unanswered": unanswered}
    if row.get("raw_responses") is not None:
        if not row.get("rubric"):
            raise ValueError(f"question {row['id']!r}: ratings without a rubric; give --data MMAR-meta.jsonl")
        try:
            result["rubric"] = rubric_score(correct, row["raw_responses"], row["rubric"])
        except ValueError as error:
            raise ValueError(f"question {row['id']!r}, field 'raw_responses': {error}") from error
    return result


def score_rows(rows: Sequence[Row], kind: Kind = "mmau", blind: Sequence[Row] = ()) -> dict[str, Any]:
    """Return {"total": cell, "task": {"music": cell, …}, "category": …}, only groupings that the rows have.

    A cell holds accuracy, its 95% bootstrap interval [low, high], n, missing, unanswered and the accuracy `rewarded` by
    the rule of rewards; the total also, as `differ`, how many answers one rule alone takes, and the first ids. With the
    rows' `blind` outputs it also holds `blind`, and `difference` = accuracy − blind, each with its interval; that of
    the difference is paired by question. A question with a list of categories counts in each of them.
    """
    results, blind_results = ([judge(row, kind) for row in part] for part in (rows, blind))

    def cell(indices: Sequence[int]) -> Row:
        part = [results[i] for i in indices]
        right = [r["accuracy"] for r in part]
        values = summarize(right, "accuracy")
        values |= {name: sum(r[name] for r in part) for name in ("missing", "unanswered")}
        values["rewarded"] = summarize([r["rewarded"] for r in part], "accuracy")
        if rubric := [r["rubric"] for r in part if "rubric" in r]:
            values["rubric"] = summarize(rubric, "score")
        if blind:
            right_blind = [blind_results[i]["accuracy"] for i in indices]
            values["blind"] = summarize(right_blind, "accuracy")
            values["difference"] = summarize([a - b for a, b in zip(right, right_blind, strict=True)], "accuracy")
        return values

    scores: Row = {"total": cell(range(len(rows)))}
    scores["total"]["differ"] = {}
    for rule, sign in (("official", 1), ("rewarded", -1)):
        ids = [str(row["id"]) for row, r in zip(rows, results, strict=True) if r["accuracy"] - r["rewarded"] == sign]
        scores["total"]["differ"][rule] = {"n": len(ids), "ids": ids[:10]}
    for grouping in GROUPINGS:
        groups: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            names = _names(row.get(grouping))
            if kind == "mmsu" and grouping == "sub-category":  # one name stands in two categories
                names = [f"{category}, {name}" for category in _names(row.get("category")) for name in names]
            for name in names:
                groups.setdefault(name, []).append(i)
        if groups:
            scores[grouping] = {name: cell(indices) for name, indices in sorted(groups.items())}
    return scores


def _names(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return list(dict.fromkeys(str(v) for v in values if v not in (None, "")))


def print_scores(scores: Mapping[str, Any], title: str) -> None:
    """Print accuracies in percent with intervals; with blind answers also those, and the difference."""

    def percent(cell: Mapping[str, float], name: str = "accuracy") -> str:
        return with_interval(cell, ".2f", name, 100, "–" if cell["low"] >= 0 else " to ")

    cells = [("total", scores["total"])]
    for grouping in (name for name in scores if name != "total"):
        cells += [(f"{grouping}: {name}", cell) for name, cell in scores[grouping].items()]
    head = ["", "accuracy (95% interval)", "n", "missing", "unanswered", "as rewarded"]
    counts = ("n", "missing", "unanswered")
    rows = [
        [label, percent(c), *(str(c[name]) for name in counts), f"{100 * c['rewarded']['accuracy']:.2f}"]
        for label, c in cells
    ]
    if "rubric" in scores["total"]:
        head.append("rubric (95% interval)")
        for row, (_, cell) in zip(rows, cells, strict=True):
            row.append(percent(cell["rubric"], "score") if "rubric" in cell else "")
    print_table(head, [rows[0], [], *rows[1:]], title)
    for rule, what in (("official", "the official rule alone"), ("rewarded", "the rule of rewards alone")):
        differ = scores["total"]["differ"][rule]
        if differ["n"]:
            more = ", …" if differ["n"] > len(differ["ids"]) else ""
            print(f"right by {what}: {differ['n']} (ids {', '.join(differ['ids'])}{more})")
    if "blind" in scores["total"]:
        rows = [[label, *(percent(x) for x in (c, c["blind"], c["difference"])), str(c["n"])] for label, c in cells]
        print_table(["", "accuracy", "blind", "difference", "n"], [rows[0], [], *rows[1:]], "with audio and without")


if __name__ == "__main__":
    run_evaluation(sys.modules[__name__], sys.argv[1:])
