"""Rollouts, groups and evaluations as HTML. All text from runs is escaped here or in `audiorl.report`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from audiorl.report.audio import Players
from audiorl.report.recordings import (
    codec_side,
    is_codec_copy,
    is_spoken,
    spoken_audio,
    spoken_player,
    spoken_side,
    transcript,
)
from audiorl.report.rollouts import question, response, score_chips, written_text
from audiorl.report.run import Row, checked_rows
from audiorl.report.schema import Answer
from audiorl.report.streams import Band, is_stream, stream
from audiorl.report.text import chips, differences, marked, prompt
from audiorl.report.view.follow import FollowedRun
from audiorl.report.view.index import PAGE, Matches, Place, RolloutIndex
from audiorl.report.view.sound import Sound
from audiorl.report.view.tokens import tokens

_TEXT, _PROMPT = 420, 140  # characters in a list
_NOTHING = "<span class='note'>wrote nothing</span>"
CHANGES = {"changed": "answers that changed", "text": "texts that differ", "all": "all"}


def rollout_list(index: RolloutIndex, matches: Matches, page: int, sound: Sound) -> str:
    """A page of a search: a line above, the rollouts, and buttons for the pages before and after."""
    mean = "" if matches.mean_reward is None else f" · mean reward <b>{matches.mean_reward:.3f}</b>"
    first = page * PAGE
    shown = f" · {first + 1:,} to {first + len(matches.places):,}" if matches.count > PAGE else ""
    items = "".join(_item(index, place, sound) for place in matches.places)
    return (
        f"<p class='sub count'><b>{matches.count:,}</b> rollouts{mean}{shown}</p><div class='hits'>{items}</div>"
        + _moves(page, matches.count)
    )


def _item(index: RolloutIndex, place: Place, sound: Sound) -> str:
    row = index.row(place)
    if row is None:
        return "<div class='hit'><p class='note'>not in the run folder any more</p></div>"
    run, sample, text = index.runs[place.run], row.get("sample") or {}, written_text(row)
    players = sound.players(run.path)
    buttons = "".join(
        _play(players, clip, label)
        for clip, label in (
            *((clip, "♪ input") for clip in (sample.get("audio") or ())[:3]),
            (spoken_audio(row), "♪ spoken"),
        )
        if clip
    )
    facts = " · ".join(filter(None, (f"step {place.step}", sample.get("task"), str(sample.get("id") or ""))))
    cut = f" <span class='note'>… {len(text) - _TEXT} more</span>" if len(text) > _TEXT else ""
    asks = str(sample.get("prompt") or "").strip()
    asks = asks if len(asks) <= _PROMPT else asks[:_PROMPT] + "…"
    return (
        f"<article class='hit' data-rollout='{place}' tabindex='0' role='link'><p class='facts'><i class='dot' "
        f"data-run='{place.run}'></i><span>{escape(run.name)}</span><span>{escape(facts)}</span>{buttons}</p>"
        f"<p class='asks'>{prompt(asks)}</p>"
        f"<p class='written'>{marked(text[:_TEXT]) or _NOTHING}{cut}</p>"
        f"<p class='chips'>{score_chips(row)}</p></article>"
    )


def _play(players: Players, clip: Row, label: str) -> str:
    """A small button that plays a clip; empty where there is none to play."""
    source = re.search(r' src="([^"]*)"', players.player(clip))
    return f'<button type="button" class="play" data-source="{source[1]}">{label}</button>' if source else ""


def rollout_page(index: RolloutIndex, place: Place, sound: Sound) -> str:
    """A rollout with the others of its group. Raises LookupError when it is not there any more."""
    rows = {p: row for p in index.group(place) if (row := index.row(p)) is not None}
    if place not in rows:
        raise LookupError("this rollout is not in the run folder any more")
    run, row = index.runs[place.run], rows[place]
    sample, players = row.get("sample") or {}, sound.players(run.path)
    where = f"{run.name} · {run.phase(place.step)} step {place.step} · group {row.get('group_id', '')}"
    order = sorted(rows, key=lambda p: (p != place, -(float((rows[p].get("score") or {}).get("total") or 0.0)), p.row))
    if is_stream(sample):
        bands = [Band(rows[p], score_chips(rows[p]), f"response {rows[p].get('index', '')}", p == place) for p in order]
        body = f"<div class='card'>{stream(sample, bands, players)}</div>"
        coloured = tokens(row, run.path)
        body += f"<div class='card'><h3>Tokens</h3><p class='written'>{coloured}</p></div>" if coloured else ""
    else:
        body = "".join(
            f"<div class='card member{' chosen' if p == place else ''}' data-rollout='{p}'>"
            f"{response(rows[p], players, tokens(rows[p], run.path))}</div>"
            for p in order
        )
        body = f"<div class='members'>{body}</div>"
    return (
        f"<p class='over'>{escape(where)}</p><article class='card'>{question(sample, players)}"
        f"<p class='note'>{escape(str(sample.get('id') or ''))}</p></article>{body}"
    )


def evaluation_page(
    left: tuple[FollowedRun, str], right: tuple[FollowedRun, str], show: str, page: int, sound: Sound
) -> str:
    """Held-out answers of two evaluations side by side. ValueError for a damaged file, OSError for a lost one."""
    rows = [
        {_id(row): row for row in checked_rows(run.path / "eval" / f"{name}.jsonl", Answer)}
        for run, name in (left, right)
    ]
    pairs = [(before, rows[1][id]) for id, before in rows[0].items() if id in rows[1]]
    kinds = [_change(before, after) for before, after in pairs]
    counts = {kind: kinds.count(kind) for kind in ("fixed", "broken", "differs", "same")}
    wanted = {"changed": ("fixed", "broken"), "text": ("fixed", "broken", "differs")}.get(show, tuple(counts))
    chosen = [(kind, *pair) for kind, pair in zip(kinds, pairs, strict=True) if kind in wanted]
    note = "" if chosen else "<p class='note'>None of these; all are shown.</p>"
    chosen = chosen or [(kind, *pair) for kind, pair in zip(kinds, pairs, strict=True)]
    chosen.sort(key=lambda item: list(counts).index(item[0]))
    shown = chosen[page * PAGE : (page + 1) * PAGE]
    cards = "".join(_compared(kind, before, after, left, right, sound) for kind, before, after in shown)
    return (
        f"<p class='sub count'>Of <b>{len(pairs)}</b> examples in both, <b class='up'>{counts['fixed']}</b> went from "
        f"wrong to right, <b class='down'>{counts['broken']}</b> from right to wrong; <b>{counts['differs']}</b> more "
        "texts differ.</p>"
        f"{note}{cards}{_moves(page, len(chosen))}"
    )


def _id(row: Row) -> object:
    return (row.get("sample") or row).get("id")


def _change(before: Row, after: Row) -> str:
    right = bool(before.get("correct")), bool(after.get("correct"))
    if right[0] != right[1]:
        return "fixed" if right[1] else "broken"
    texts = [transcript(row) or written_text(row) for row in (before, after)]
    return "same" if texts[0] == texts[1] else "differs"


def _compared(
    kind: str, before: Row, after: Row, left: tuple[FollowedRun, str], right: tuple[FollowedRun, str], sound: Sound
) -> str:
    names = [name if left[0] is right[0] else f"{run.name}: {name}" for run, name in (left, right)]
    flag = {"fixed": "wrong → right", "broken": "right → wrong", "differs": "text differs", "same": "same text"}[kind]
    players = [sound.players(run.path) for run, _ in (left, right)]
    head = f"<p class='flag {kind}'>{flag}</p>"
    sample = before.get("sample") or before
    if is_stream(sample):
        bands = [
            Band(row, f"<b>{escape(name)}</b>{chips((row.get('score') or {}).get('parts') or {})}", name, total=False)
            for row, name in ((before, names[0]), (after, names[1]))
        ]
        return f"<article class='card'><h3>{escape(str(_id(before)))}</h3>{stream(sample, bands, players[0])}</article>"
    if is_spoken([before, after]) or is_codec_copy([before, after]):
        side = spoken_side if is_spoken([before]) else codec_side
        title = f"<p class='prompt'>{escape(str(before.get('text') or before.get('id') or ''))}</p>"
        original = players[0].player(before["original"]) if before.get("original") else ""
        body = "".join(side(n, row, p) for n, row, p in zip(names, (before, after), players, strict=True))
        head = f"<div class='question'>{title}{original}</div>"
        return f"<article class='card'>{head}<div class='sides'>{body}</div></article>"
    texts = differences(written_text(before), written_text(after))
    body = "".join(
        f"<div class='side {'right' if row.get('correct') else 'wrong'}'><span class='when'>{escape(name)}</span>"
        f"<p class='written'>{text or _NOTHING}</p><p class='chips'>{chips(row.get('parts') or {})}</p></div>"
        for name, row, text in zip(names, (before, after), texts, strict=True)
    )
    return f"<article class='card {kind}'>{head}{question(sample, players[0])}<div class='sides'>{body}</div></article>"


def ask(rows: Sequence[Row], run_folder: Path, sound: Sound) -> str:
    """One or two answers to label: the question and the answers, without rewards, step and names of files."""
    sample, players = rows[0].get("sample") or {}, sound.players(run_folder)
    shown = {name: sample.get(name) for name in ("prompt", "audio", "choices")}
    gold = ", ".join(map(str, sample.get("references") or ()))
    reference = f"<details><summary>reference (R)</summary><p>{escape(gold)}</p></details>" if gold else ""
    answers = "".join(
        f"<div class='card option'><h3>{letter if len(rows) > 1 else 'Answer'}</h3>"
        f"<p class='written'>{marked(written_text(row))}</p>{spoken_player(row, players)}</div>"
        for letter, row in zip("AB", rows, strict=False)
    )
    page = f"<article class='card'>{question(shown, players)}{reference}</article><div class='members'>{answers}</div>"
    return re.sub(r'(<audio[^>]*?) title="[^"]*"', r"\1", page)


def _moves(page: int, count: int) -> str:
    """Buttons for the page before and the next; empty where one page holds all."""
    pages = -(-count // PAGE)
    buttons = "".join(
        f"<button type='button' data-page='{target}'{'' if 0 <= target < pages else ' disabled'}>{label}</button>"
        for target, label in ((page - 1, "◀ previous"), (page + 1, "next ▶"))
    )
    return f"<p class='moves'>{buttons}</p>" if pages > 1 else ""
