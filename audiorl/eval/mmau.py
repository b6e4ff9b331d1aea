"""MMAU, MMAR and MMSU: multiple-choice questions about sound, music and speech.

    python -m eval.mmau --data mmau-test-mini.json --model MODEL --out results/mmau
    python -m eval.mmau --data mmau-test-mini.json --model MODEL --out results/mmau --blind silence
    python -m eval.mmau --score predictions.json

Writes to --out: predictions.jsonl (one row per question as it is answered; a second call goes on from there),
predictions.json (the benchmark's own list with the model's outputs in the keys its scorer reads) and scores.json.

--blind asks every question once more without what is to be listened to, and writes blind-silence.jsonl or
blind-text.jsonl. The difference is what the audio is worth: a model that answers as well without it guesses from the
text.

A question counts as right by the official rule: `mmau_match` of `audiorl.eval.metrics.choice` for MMAU and MMAR,
`mmsu_match` for MMSU, whose responses are letters. Unlike the official scripts, which skip questions without a usable
output, those count as wrong here and are reported. Results on MMAU before and after version v05.15.25 are not
comparable.

MMAR-Rubrics: its official script rates the thoughts in predictions.json with a judge behind an API and writes
*.evaluated.jsonl; --score reads that file and adds the rubric scores with intervals.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from audiorl.data.rows import Row as DataRow
from audiorl.data.rows import read_rows as table_rows
from audiorl.data.schema import FieldError, check, check_limit, parse_json
from audiorl.data.schema.results import BenchmarkRow
from audiorl.data.views import View, silence, text_only
from audiorl.eval._generate import generate_all
from audiorl.eval._options import InferenceOptions, run_script, write_scores
from audiorl.eval._summaries import summarize
from audiorl.eval.metrics.choice import mmau_match, mmsu_letter, mmsu_match, rubric_score, word_set
from audiorl.protocols import RolloutEngine
from audiorl.rewards.choices import match_choice
from audiorl.rewards.tags import extract_think, final_text
from audiorl.types import Rollout

Kind = Literal["mmau", "mmar", "mmsu"]
Blind = Literal["silence", "text"]
BLIND: dict[Blind, View] = {"silence": silence, "text": text_only}
Row = dict[str, Any]

# Where a scorer looks for the output: MMAU's script reads the first, its README names the second.
PREDICTION_KEYS: dict[Kind, tuple[str, ...]] = {
    "mmau": ("model_output", "model_prediction"),
    "mmar": ("answer_prediction",),
    "mmsu": ("response",),
}
ANSWER_KEY: dict[Kind, str] = {"mmau": "answer", "mmar": "answer", "mmsu": "answer_gt"}
LETTERS = ("A", "B", "C", "D")
GROUPINGS = ("task", "task_name", "modality", "category", "sub-category", "sub-sub-category", "difficulty")


@dataclass(frozen=True, kw_only=True)
class Options(InferenceOptions):
    """Evaluate a model on MMAU, MMAR or MMSU, or score an existing predictions file."""

    score: Path | None = None
    """Score this predictions file instead of running a model; with --data, questions it leaves out count as wrong."""
    kind: Kind = "mmau"
    """Which benchmark: decides on the keys that are read and written."""
    blind: Blind | None = None
    """Ask again without the audio and report the difference. silence: the clip becomes silence of the same length.
    text: the prompt has no audio. By default this is not measured."""


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSON list, JSON lines, .parquet or .arrow file, or of a saved dataset's folder.

    ValueError for anything else, with the file, row and field.
    """
    if path.is_dir() or path.suffix in (".parquet", ".arrow"):
        rows = [_without_audio(row.data) for row in table_rows(path) if isinstance(row, DataRow)]
    else:
        content = path.read_bytes()
        listed = content.lstrip().startswith(b"[")
        try:
            lines = filter(bytes.strip, content.split(b"\n"))
            rows = parse_json(content) if listed else list(map(parse_json, lines))
        except ValueError as error:
            raise ValueError(f"{path}: neither a JSON list nor JSON lines ({error})") from error
    for number, row in enumerate(rows, 1):
        try:
            check(row, BenchmarkRow)
        except FieldError as error:
            field = f", field {error.field!r}" if error.field else ""
            raise ValueError(f"{path}: row {number}{field}: {error.message}") from error
    if not rows:
        raise ValueError(f"{path}: no questions")
    ids = [str(row["id"]) for row in rows]
    if len(set(ids)) < len(ids):
        raise ValueError(f"{path}: the id {max(ids, key=ids.count)!r} occurs more than once")
    return rows


def _without_audio(data: Mapping[str, Any]) -> Row:
    """A row of a data set's file with its audio by path only."""
    audio = data.get("audio")
    path = {"audio_path": audio["path"]} if isinstance(audio, Mapping) and audio.get("path") else {}
    return {**path, **{name: value for name, value in data.items() if name != "audio"}}


def predict(options: Options, rows: Sequence[Row], engine: RolloutEngine | None = None) -> tuple[list[Row], list[Row]]:
    """(the rows with the model's outputs, the rows with its blind outputs, which are none without `options.blind`).

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
    answered = []
    for name, prompts in runs.items():
        file = options.out / f"{name}.jsonl"
        answers = generate_all(engine, prompts, file, batch_size=options.batch_size, describe=_describe)
        by_id = {a["id"]: a for a in answers}
        answered.append([_with_prediction(row, by_id.get(str(row["id"])), options.kind) for row in rows])
    return answered[0], answered[1] if options.blind is not None else []


def _describe(rollout: Rollout) -> Mapping[str, Any]:
    return {"prediction": final_text(rollout.text), "think": extract_think(rollout.text) or ""}


def _with_prediction(row: Row, answer: Row | None, kind: Kind) -> Row:
    if answer is None:
        return row
    thinking = {"thinking_prediction": answer["think"]} if kind == "mmar" else {}
    prediction = _as_letter(row, answer["prediction"]) if kind == "mmsu" else answer["prediction"]
    return {**row, **dict.fromkeys(PREDICTION_KEYS[kind], prediction), **thinking}


def _lettered(row: Row) -> dict[str, str]:
    """The choices of MMSU by letter."""
    return {letter: row.get(f"choice_{letter.lower()}") or "" for letter in LETTERS}


def _as_letter(row: Row, prediction: str) -> str:
    """The letter of the choice that the prediction names; nothing for a prediction that names none.

    The official rule would take the first character of such a prediction for a letter.
    """
    letters = {text.strip(): letter for letter, text in reversed(_lettered(row).items()) if text.strip()}
    choices = list(reversed(letters))
    named = match_choice(prediction, choices)
    return "" if named is None else letters[choices[named]]


@dataclass(frozen=True)
class Verdict:
    """One question: was it right, and if not, was there anything to judge? `rubric`: the score of its thought, in MMAR
    that was rated."""

    correct: bool
    missing: bool
    unanswered: bool
    rubric: float | None = None


def judge(row: Row, kind: Kind) -> Verdict:
    """Right by the official rule. Missing: no output at all. Unanswered: an output without a word in it, in MMSU
    without a letter."""
    answer = row.get(ANSWER_KEY[kind])
    choices = list(filter(None, _lettered(row).values())) if kind == "mmsu" else row.get("choices")
    if not answer or not choices:
        field = ("choice_a" if kind == "mmsu" else "choices") if answer else ANSWER_KEY[kind]
        what = "choices" if answer else "answer"
        raise ValueError(f"question {row['id']!r}: no {what} to score against; give them in the field {field!r}")
    prediction = next((row[key] for key in PREDICTION_KEYS[kind] if row.get(key) is not None), None)
    if prediction is None:
        return Verdict(correct=False, missing=True, unanswered=False)
    if kind == "mmsu":
        correct, unanswered = mmsu_match(answer, prediction, _lettered(row)), mmsu_letter(prediction) is None
    else:
        correct, unanswered = mmau_match(answer, prediction, choices), not word_set(prediction)
    return Verdict(correct, missing=False, unanswered=unanswered, rubric=_rubric(row, correct))


def _rubric(row: Row, correct: bool) -> float | None:
    if row.get("raw_responses") is None:
        return None
    if not row.get("rubric"):
        raise ValueError(f"question {row['id']!r}: ratings without a rubric; give --data MMAR-meta.jsonl")
    try:
        return rubric_score(correct, row["raw_responses"], row["rubric"])
    except ValueError as error:
        raise ValueError(f"question {row['id']!r}, field 'raw_responses': {error}") from error


def score_rows(rows: Sequence[Row], kind: Kind = "mmau", blind: Sequence[Row] = ()) -> dict[str, Any]:
    """{"total": cell, "task": {"music": cell, …}, "category": …}, only groupings that the rows have.

    A cell holds accuracy, its 95% bootstrap interval [low, high], n, missing and unanswered. With the rows' `blind`
    outputs it also holds `blind`, and `difference` = accuracy − blind, each with its interval; that of the difference
    is paired by question. A question with a list of categories counts in each of them.
    """
    verdicts = [judge(row, kind) for row in rows]
    blind_verdicts = [judge(row, kind) for row in blind]
    scores: dict[str, Any] = {"total": _cell(verdicts, blind_verdicts)}
    for grouping in GROUPINGS:
        groups: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            names = _names(row.get(grouping))
            if kind == "mmsu" and grouping == "sub-category":  # one name stands in two categories
                names = [f"{category}, {name}" for category in _names(row.get("category")) for name in names]
            for name in names:
                groups.setdefault(name, []).append(i)
        if groups:
            scores[grouping] = {
                name: _cell([verdicts[i] for i in groups[name]], [blind_verdicts[i] for i in groups[name] if blind])
                for name in sorted(groups)
            }
    return scores


def _names(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return list(dict.fromkeys(str(v) for v in values if v not in (None, "")))


def _cell(verdicts: Sequence[Verdict], blind: Sequence[Verdict]) -> dict[str, Any]:
    right = [float(v.correct) for v in verdicts]
    cell = {
        **summarize(right, "accuracy"),
        "missing": sum(v.missing for v in verdicts),
        "unanswered": sum(v.unanswered for v in verdicts),
    }
    rubric = [v.rubric for v in verdicts if v.rubric is not None]
    if rubric:
        cell["rubric"] = summarize(rubric, "score")
    if blind:
        right_blind = [float(v.correct) for v in blind]
        cell["blind"] = summarize(right_blind, "accuracy")
        cell["difference"] = summarize([a - b for a, b in zip(right, right_blind, strict=True)], "accuracy")
    return cell


def table(scores: Mapping[str, Any], title: str) -> Table:
    """The scores for people: accuracy in percent with its interval."""
    columns = ["accuracy", "95% interval", "n", "missing", "unanswered"]
    if "rubric" in scores["total"]:
        columns += ["rubric", "95% interval"]
    return _table(
        scores,
        title,
        columns,
        lambda c: (*_percent(c), c["n"], c["missing"], c["unanswered"], *_rubric_cells(c)),
    )


def _rubric_cells(cell: Mapping[str, Any]) -> tuple[str, ...]:
    rubric = cell.get("rubric")
    return () if rubric is None else _percent({**rubric, "accuracy": rubric["score"]})


def blind_table(scores: Mapping[str, Any], blind: Blind) -> Table:
    """Accuracy with and without the audio in percent, and the difference with its paired interval."""
    title = "with audio and with silence" if blind == "silence" else "with audio and without"
    return _table(
        scores,
        title,
        ("accuracy", "blind", "difference", "95% interval", "n"),
        lambda c: (_percent(c)[0], _percent(c["blind"])[0], *_percent(c["difference"]), c["n"]),
    )


def _table(
    scores: Mapping[str, Any], title: str, headings: Sequence[str], columns: Callable[[Any], Sequence[Any]]
) -> Table:
    """A row a cell of the scores, the total first."""
    out = Table(title=title)
    out.add_column("")
    for heading in headings:
        out.add_column(heading, justify="right", no_wrap=True)
    for grouping, cells in scores.items():
        for name, cell in ({"total": cells} if grouping == "total" else cells).items():
            label = name if grouping == "total" else f"{grouping}: {name}"
            out.add_row(label, *map(str, columns(cell)), end_section=grouping == "total")
    return out


def _percent(cell: Mapping[str, float]) -> tuple[str, str]:
    """(accuracy, its interval) in percent."""
    low, high = (f"{100 * cell[key]:.2f}" for key in ("low", "high"))
    return f"{100 * cell['accuracy']:.2f}", f"{low}–{high}" if cell["low"] >= 0 else f"{low} to {high}"


def merge(rows: Sequence[Row], predictions: Sequence[Row], kind: Kind) -> list[Row]:
    """The benchmark's rows with the outputs of a predictions file joined by id."""
    keys = (*PREDICTION_KEYS[kind], "thinking_prediction", "raw_responses")
    by_id = {str(p["id"]): {k: p[k] for k in keys if k in p} for p in predictions}
    return [{**row, **by_id.get(str(row["id"]), {})} for row in rows]


def run(options: Options, engine: RolloutEngine | None = None) -> dict[str, Any]:
    """Do what the options say and return the scores; empty when the data holds no answers to score against."""
    blind: list[Row] = []
    check_limit(options.limit)
    if options.score is not None:
        if options.blind is not None:
            raise ValueError("--blind asks a model: give --data, --model and --out, and leave out --score")
        rows = read_rows(options.score)
        if options.data is not None:
            rows = merge(read_rows(options.data)[: options.limit], rows, options.kind)
    else:
        options.check()
        assert options.data and options.out
        rows, blind = predict(options, read_rows(options.data)[: options.limit], engine)
        options.out.mkdir(parents=True, exist_ok=True)
        predictions = json.dumps(rows, indent=2, ensure_ascii=False) + "\n"
        (options.out / "predictions.json").write_text(predictions, encoding="utf-8")
    if not any(row.get(ANSWER_KEY[options.kind]) for row in rows):
        where = "" if options.out is None else f" in {options.out / 'predictions.json'}"
        Console(stderr=True).print(
            f"No answers in the data: nothing can be scored; the predictions to submit are{where}."
        )
        return {}
    try:
        scores = score_rows(rows, options.kind, blind)
    except ValueError as error:
        raise ValueError(f"{options.data or options.score}: {error}") from error
    if options.out is not None:
        settings = {k: None if v is None else str(v) for k, v in dataclasses.asdict(options).items()}
        write_scores(options.out, {**scores, "options": settings})
    Console().print(table(scores, f"{options.kind.upper()} · {options.model or options.score}"))
    if options.blind is not None:
        Console().print(blind_table(scores, options.blind))
    return scores


if __name__ == "__main__":
    run_script(run, Options, __doc__, "questions")
