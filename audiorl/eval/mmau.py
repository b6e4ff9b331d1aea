"""MMAU, MMAR and MMSU: multiple-choice questions about sound, music and speech.

    audiorl eval mmau --data mmau-test-mini.json --model MODEL --out results/mmau --blind silence
    audiorl eval mmau --score predictions.json

It is `audiorl eval qa` with the benchmark's files and rules, and writes the same to --out; predictions.json is in
addition, the benchmark's own list with the model's outputs in the keys its scorer reads. --blind asks every question
once more without its audio: a model that answers as well without it guesses from the text.

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
from audiorl.eval import qa
from audiorl.eval._common import Row, run_evaluation, write_scores
from audiorl.eval.metrics.choice import mmau_match, mmsu_letter, mmsu_match, rubric_score, word_set
from audiorl.eval.qa import QuestionOptions
from audiorl.protocols import RolloutEngine
from audiorl.rewards.answers import extract_think, final_text, match_choice, same_answer
from audiorl.types import Sample

Kind = Literal["mmau", "mmar", "mmsu"]
# Where a scorer looks for the output: MMAU's script reads the first, its README names the second.
PREDICTION_KEYS: dict[Kind, tuple[str, ...]] = {
    "mmau": ("model_output", "model_prediction"),
    "mmar": ("answer_prediction",),
    "mmsu": ("response",),
}
PREDICTIONS = {key for keys in PREDICTION_KEYS.values() for key in keys}
ANSWER_KEY: dict[Kind, str] = {"mmau": "answer", "mmar": "answer", "mmsu": "answer_gt"}
OWN = {"audio", "audios", "messages", "conversations"}
"""Columns of rows that are no benchmark's."""
LABELS = {"rewarded": "as rewarded", "rubric": "rubric"}
GROUPINGS = ("task", "task_name", "modality", "category", "sub-category", "sub-sub-category", "difficulty")


@dataclass(frozen=True, kw_only=True)
class MMAUOptions(QuestionOptions):
    """Evaluate a model on MMAU, MMAR or MMSU, or score an existing predictions file."""

    score: Path | None = None
    """Score this predictions file instead of running a model; with --data, questions it leaves out count as wrong."""
    kind: Kind = "mmau"
    """Which benchmark: decides on the keys that are read and written."""


def main(options: MMAUOptions, engine: RolloutEngine | None = None) -> dict[str, Any]:
    """Do what the options say and return the scores; empty when the data holds no answers to score against."""
    check_limit(options.limit)
    if options.columns:
        raise ValueError("--columns: a benchmark's columns have its names; audiorl eval qa measures other questions")
    samples: dict[str, Sample] = {}
    said: dict[str, dict[str, str]] = {}
    if options.score is not None:
        if options.blind is not None or options.baseline is not None:
            raise ValueError("--blind and --baseline ask models: give --data, --model and --out, and leave out --score")
        rows = read_rows(options.score)
        if options.data is not None:
            keys = (*PREDICTION_KEYS[options.kind], "thinking_prediction", "raw_responses")
            by_id = {str(p["id"]): {k: p[k] for k in keys if k in p} for p in rows}
            rows = [row | by_id.get(str(row["id"]), {}) for row in read_rows(options.data)[: options.limit]]
        outputs = {"model": rows}
    else:
        options.check()
        assert options.data and options.out
        asked = read_rows(options.data)[: options.limit]
        samples = askable(options, asked)
        said = qa.ask(options, list(samples.values()), engine)
        outputs = {name: with_outputs(asked, texts, options.kind) for name, texts in said.items()}
        rows = outputs["model"]
        predictions = json.dumps(rows, indent=2, ensure_ascii=False) + "\n"
        (options.out / "predictions.json").write_text(predictions, encoding="utf-8")
    if not any(row.get(ANSWER_KEY[options.kind]) for row in rows):
        if options.score is not None:
            where, field = options.data or options.score, ANSWER_KEY[options.kind]
            raise ValueError(f"{where}: no row has the field {field!r} to score against; give the questions as --data")
        predictions = f"the predictions to submit are in {options.out}/predictions.json"
        print(f"No answers in the data: nothing can be scored; {predictions}.", file=sys.stderr)
        return {}
    try:
        results = {name: [judge(row, options.kind) for row in part] for name, part in outputs.items()}
    except ValueError as error:
        raise ValueError(f"{options.data or options.score}: {error}") from error
    scores, title = (
        score_rows(rows, options.kind, results),
        f"{options.kind.upper()} · {options.model or options.score}",
    )
    if options.out is not None:
        settings = {k: None if v is None else str(v) for k, v in dataclasses.asdict(options).items()}
        pages = {}
        if samples:
            there = [i for i, row in enumerate(rows) if str(row["id"]) in samples]
            shown = {name: [part[i] for i in there] for name, part in results.items()}
            page = qa.questions_page(title, scores, LABELS, [samples[str(rows[i]["id"])] for i in there], shown, said)
            pages = {"qa.html": page}
        write_scores(options.out, {**scores, "options": settings}, pages)
    qa.print_scores(scores, title, LABELS)
    for rule, what in (("official", "the official rule alone"), ("rewarded", "the rule of rewards alone")):
        differ = scores["total"]["differ"][rule]
        if differ["n"]:
            more = ", …" if differ["n"] > len(differ["ids"]) else ""
            print(f"right by {what}: {differ['n']} (ids {', '.join(differ['ids'])}{more})")
    if unlisted := scores["total"]["unlisted"]:
        some = ", ".join(unlisted[:10]) + (", …" if len(unlisted) > 10 else "")
        print(f"the answer is none of the choices: {len(unlisted)} (ids {some}); correct the data", file=sys.stderr)
    return scores


def read_rows(path: Path) -> list[Row]:
    """Read a JSON list, JSON lines, a .parquet or .arrow file, or the folder of a saved dataset.

    Audio stays out of the rows but for its path. Raises ValueError for anything else, with the file, row and field.
    """
    rows: dict[str, Row] = {}
    for row in table_rows(path):
        if isinstance(row, BadRow):
            raise ValueError(str(row))
        if OWN & row.data.keys() and not {"audio_id", "audio_path", "choice_a", *PREDICTIONS} & row.data.keys():
            raise ValueError(f"{path}: row {row.number}: a question of your own; audiorl eval qa measures them")
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


def askable(options: MMAUOptions, rows: Sequence[Row]) -> dict[str, Sample]:
    """Return by id the questions of `rows` whose audio can be used."""
    loaded = options.read()
    wanted = {str(row["id"]) for row in rows}
    samples = {s.id: s for s in loaded.samples if s.id in wanted}
    if loaded.skipped:
        print(f"{len(loaded.skipped)} questions cannot be asked and count as wrong", file=sys.stderr)
    if not samples:
        raise ValueError(f"{options.data}: none of the {len(rows)} questions can be asked")
    return samples


def with_outputs(rows: Sequence[Row], texts: Mapping[str, str], kind: Kind) -> list[Row]:
    """Return the rows with what a model wrote in the benchmark's keys; those it was not asked as they are."""
    written = []
    for row in rows:
        text = texts.get(str(row["id"]))
        if text is not None:
            answer = final_text(text)
            row = row | dict.fromkeys(PREDICTION_KEYS[kind], _as_letter(row, answer) if kind == "mmsu" else answer)
            row |= {"thinking_prediction": extract_think(text) or ""} if kind == "mmar" else {}
        written.append(row)
    return written


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


def _listed(row: Row, kind: Kind) -> bool:
    """Return whether the answer is one of the choices, as the official rule compares them."""
    if kind == "mmsu":
        return row[ANSWER_KEY[kind]] in _lettered(row).values()
    return word_set(row[ANSWER_KEY[kind]]) in map(word_set, row["choices"])


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


def score_rows(rows: Sequence[Row], kind: Kind, results: Mapping[str, Sequence[Row]]) -> Row:
    """Return the scores of `qa.score_results`, by the groupings that the rows have.

    The total also holds, as `differ`, how many answers the official rule or that of rewards alone takes, and the first
    ids; and as `unlisted` the ids of questions whose answer is none of their choices, so that no choice is right. A
    question with a list of categories counts in each of them.
    """
    groups: dict[str, list[list[str]]] = {}
    for grouping in GROUPINGS:
        groups[grouping] = [qa.names_of(row.get(grouping)) for row in rows]
        if kind == "mmsu" and grouping == "sub-category":  # one name stands in two categories
            categories = [qa.names_of(row.get("category")) for row in rows]
            both = zip(categories, groups[grouping], strict=True)
            groups[grouping] = [
                [f"{category}, {name}" for category in first for name in names] for first, names in both
            ]
    scores = qa.score_results(results, groups)
    scores["total"]["differ"] = {}
    for rule, sign in (("official", 1), ("rewarded", -1)):
        own = zip(rows, results["model"], strict=True)
        ids = [str(row["id"]) for row, r in own if r["accuracy"] - r["rewarded"] == sign]
        scores["total"]["differ"][rule] = {"n": len(ids), "ids": ids[:10]}
    scores["total"]["unlisted"] = [str(row["id"]) for row in rows if not _listed(row, kind)]
    return scores


if __name__ == "__main__":
    run_evaluation(sys.modules[__name__], sys.argv[1:])
