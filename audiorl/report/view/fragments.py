"""Rollouts, groups and evaluations as HTML (assets/view.html)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from markupsafe import Markup
from tokenizers import Tokenizer

from audiorl.data.rollout_rows import array_of
from audiorl.eval.metrics.corpus import UNSEEN
from audiorl.report.kit import macros
from audiorl.report.rollouts import Side, example_card, is_stream, kind_of, score_chips, total, written_text
from audiorl.report.run import checked_rows
from audiorl.report.streams import Band, stream
from audiorl.report.summary import Row, rows_of_entries
from audiorl.report.view.index import PAGE_SIZE, FollowedRun, Matches, RolloutIndex, RolloutPlace
from audiorl.report.view.sound import Sound

_PROMPT = 140  # characters in a list
CHANGES = {"changed": "answers that changed", "text": "texts that differ", "all": "all"}
_KINDS = {"fixed": "wrong → right", "broken": "right → wrong", "differs": "text differs", "same": "same text"}
_HALF = {"advantages": "advantage", "ratios": "ratio", "entropies": "entropy"}
"""Fields of a recorded segment that hold a 16-bit float a token, and their names on the page."""
_parts = macros("view.html")


# -- results -----------------------------------------------------------------------------------------------------------


def results(runs: Sequence[tuple[int, FollowedRun]]) -> str:
    """Return a table of the held-out numbers of numbered runs: the headline, that of unseen speakers, outside measures.

    It is "" before the first evaluation.
    """
    shown = []
    for number, run in runs:
        rows = rows_of_entries(run.evals())
        own = [row for row in rows if row.metric == rows[0].metric and row.task in ("", UNSEEN)]
        kept = own + [row for row in rows if row.outside and not row.task and row not in own]
        shown += [(number, run.name, kept)] if kept else []
    return str(_parts.results(shown)) if shown else ""


# -- rollouts ----------------------------------------------------------------------------------------------------------


def rollout_list(index: RolloutIndex, matches: Matches, page: int, sound: Sound) -> str:
    """Return a page of a search: a line above, the rollouts, and buttons for the pages before and after."""
    items = [_item(index, place, sound) for place in matches.places]
    return str(_parts.hits(matches, items, page, PAGE_SIZE))


def _item(index: RolloutIndex, place: RolloutPlace, sound: Sound) -> tuple[object, ...]:
    row, run = index.row(place), index.runs[place.run]
    sample = (row or {}).get("sample") or {}
    players = sound.players(run.path)
    clips = [(clip, "♪ input") for clip in (sample.get("audio") or ())[:3]]
    clips += [(row["spoken_audio"], "♪ spoken")] if row and row.get("spoken_audio") else []
    sources = [(re.search(r' src="([^"]*)"', players.player(clip)), label) for clip, label in clips]
    buttons = [(source[1], label) for source, label in sources if source]
    facts = " · ".join(filter(None, (f"step {place.step}", sample.get("task"), str(sample.get("id") or ""))))
    asks = str(sample.get("prompt") or "").strip()
    return place, run, row, buttons, facts, asks if len(asks) <= _PROMPT else asks[:_PROMPT] + "…"


def rollout_page(index: RolloutIndex, place: RolloutPlace, sound: Sound) -> str:
    """Return a rollout with the others of its group. Raises LookupError when it is not there any more."""
    rows = {p: row for p in index.group(place) if (row := index.row(p)) is not None}
    if place not in rows:
        raise LookupError("this rollout is not in the run folder any more")
    run, row = index.runs[place.run], rows[place]
    sample, players = row.get("sample") or {}, sound.players(run.path)
    where = f"{run.name} · {run.phase(place.step)} step {place.step} · group {row.get('group_id', '')}"
    order = sorted(rows, key=lambda p: (p != place, -total(rows[p]), p.row))
    timeline = None
    if is_stream(sample):
        bands = [Band(rows[p], score_chips(rows[p]), f"response {rows[p].get('index', '')}", p == place) for p in order]
        timeline, order = stream(sample, bands, players), [place]
    members = [(p, p == place, rows[p], tokens(rows[p], run.path)) for p in order]
    return str(_parts.rollout(where, sample, players, timeline, members))


def ask(rows: Sequence[Row], run_folder: Path, sound: Sound) -> str:
    """Return one or two answers to label: question and answers, without rewards, step and names of files."""
    sample, players = rows[0].get("sample") or {}, sound.players(run_folder)
    shown = {name: sample.get(name) for name in ("prompt", "audio", "choices")}
    gold = ", ".join(map(str, sample.get("references") or ()))
    return re.sub(r'(<audio[^>]*?) title="[^"]*"', r"\1", _parts.ask(shown, gold, rows, players))


# -- evaluations -------------------------------------------------------------------------------------------------------

Evaluated = tuple[FollowedRun, str]
"""A run and the name of one of its evaluations."""


def evaluation_page(left: Evaluated, right: Evaluated, show: str, page: int, sound: Sound) -> str:
    """Return answers of two evaluations side by side. ValueError for a damaged file, OSError for a lost one."""
    before_by_id, after_by_id = (
        {(row.get("sample") or row).get("id"): row for row in checked_rows(run.path / "eval" / f"{name}.jsonl")}
        for run, name in (left, right)
    )
    pairs = [(before, after_by_id[id]) for id, before in before_by_id.items() if id in after_by_id]
    by_kind: dict[str, list[tuple[Row, Row]]] = {kind: [] for kind in _KINDS}
    for before, after in pairs:
        right_before, right_after = bool(before.get("correct")), bool(after.get("correct"))
        texts = [row.get("transcript") or written_text(row) for row in (before, after)]
        kind = "same" if texts[0] == texts[1] else "differs"
        by_kind["fixed" if right_after > right_before else "broken" if right_before > right_after else kind].append(
            (before, after)
        )
    wanted = {"changed": ("fixed", "broken"), "text": ("fixed", "broken", "differs")}.get(show, tuple(_KINDS))
    chosen = [(kind, pair) for kind in wanted for pair in by_kind[kind]]
    everything = [(kind, pair) for kind in _KINDS for pair in by_kind[kind]]
    names = [name if left[0] is right[0] else f"{run.name}: {name}" for run, name in (left, right)]
    players, cards = [sound.players(run.path) for run, _ in (left, right)], []
    for kind, pair in (chosen or everything)[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]:
        sides: list[Side] = list(zip(names, pair, players, strict=True))
        head = Markup("<p class='flag {}'>{}</p>").format(kind, _KINDS[kind])
        cards.append(example_card(sides, kind_of(pair[0]), head, kind))
    pages = -(-len(chosen or everything) // PAGE_SIZE)
    return str(_parts.evaluation(len(pairs), by_kind, not chosen, cards, page, pages))


# -- tokens ------------------------------------------------------------------------------------------------------------


def tokens(row: Row, run_folder: Path) -> Markup:
    """Return the sampled tokens as `<span>`s with data-log-prob, data-advantage, …; "" where ids or tokenizer are
    missing.

    Where every token of the response has the same advantage, that of the row is given. The tokenizer is that of the
    newest checkpoint, which all checkpoints of a run share.
    """
    found = (file for file in run_folder.glob("checkpoints/*/*/tokenizer.json") if file.is_file())
    files = sorted(found, key=lambda file: file.stat().st_mtime)
    tokenizer = _load(files[-1], files[-1].stat().st_mtime_ns) if files else None
    segments = [segment for segment in row.get("segments") or () if isinstance(segment.get("ids"), dict)]
    if tokenizer is None:
        return Markup("")
    html = Markup("")
    try:
        for segment in segments:
            ids = array_of(segment["ids"])
            numbers = {"log-prob": array_of(segment["logprobs"]).reshape(len(ids), -1).sum(1)}
            if row.get("advantage") is not None:
                numbers["advantage"] = np.full(len(ids), float(row["advantage"]))
            numbers |= {name: array_of(segment[field]) for field, name in _HALF.items() if segment.get(field)}
            frames = [False] * len(ids)
            if segment.get("codes") is not None:
                frames = [bool((codes >= 0).any()) for codes in array_of(segment["codes"])]
            for i, text in enumerate(pieces(tokenizer, ids.tolist(), frames)):
                data = "".join(f" data-{name}='{float(values[i]):.4g}'" for name, values in numbers.items())
                html += Markup(f"<span class='token{' frame' * frames[i]}'{data}>{{}}</span>").format(text)
    except (ValueError, KeyError, TypeError, OverflowError, IndexError):
        return Markup("")  # edited or damaged: the plain text is shown
    return html


def pieces(tokenizer: Tokenizer, ids: Sequence[int], frames: Sequence[bool]) -> list[str]:
    """Return the text of each token. Of a character in several tokens the last has it; a codec frame is a square."""
    texts: list[str] = []
    pending: list[int] = []
    for token, is_frame in zip(ids, frames, strict=True):
        pending.append(token)
        text = "▪" if is_frame else tokenizer.decode(pending, skip_special_tokens=False)
        half = text.endswith("\ufffd") and len(pending) < 4
        texts.append("" if half else text)
        pending = pending if half else []
    return texts


@lru_cache(maxsize=8)
def _load(file: Path, _modified: int) -> Tokenizer | None:
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # tokenizers raises plain Exception for a damaged file
        return None
