"""Held-out recordings at every evaluation: texts as the policy spoke them, or recordings that went through a codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from audiorl.eval.metrics.prosody import MEASURES
from audiorl.report.audio import Players
from audiorl.report.contour import CONTOUR_NOTE
from audiorl.report.run import Row, Run
from audiorl.report.summary import metric_name, show

_SHOWN = 8

Rows = Mapping[str, Mapping[Any, Row]]  # evaluation name -> sample id -> row of eval/NAME.jsonl
Side = Callable[[str, Row, Players], str]  # (evaluation name, row, players) -> HTML


def is_spoken(rows: Sequence[Row]) -> bool:
    """Whether these rows are texts that the policy spoke and a recogniser transcribed."""
    return bool(rows) and transcript(rows[0]) is not None and spoken_audio(rows[0]) is not None


def is_codec_copy(rows: Sequence[Row]) -> bool:
    """Whether these rows are recordings that went through a codec."""
    return bool(rows) and "mel_distance" in rows[0]


def spoken_audio(row: Row) -> Row | None:
    """The clip that a rollout spoke. Runs of audiorl 0.1 call it "said"."""
    return row.get("spoken_audio") or row.get("said")


def transcript(row: Row) -> str | None:
    """What the recogniser understood. Runs of audiorl 0.1 call it "heard"."""
    return row.get("transcript", row.get("heard"))


def spoken_player(row: Row, players: Players) -> str:
    """A player for what a rollout spoke; empty for one that spoke nothing."""
    clip = spoken_audio(row)
    return f"<div class='audio'>{players.player(clip)}</div>" if clip else ""


def spoken_texts(run: Run, players: Players) -> str:
    """Held-out texts as each evaluation spoke them, greatest change of the error rate first; empty without any."""
    spoken = {name: {row.get("id"): row for row in rows} for name, rows in run.answers.items() if is_spoken(rows)}
    if not spoken:
        return ""
    names = list(spoken)
    first, last = ("before", "after") if {"before", "after"} <= spoken.keys() else (names[0], names[-1])
    shared = [i for i in spoken[last] if i in spoken[first]]
    ids = sorted(shared, key=lambda i: -abs(_cer(spoken[first][i]) - _cer(spoken[last][i])))
    cards = ""
    for i in ids[:_SHOWN]:
        row = spoken[last][i]
        cards += _card(str(row.get("text") or ""), reference_player(row, players), i, spoken, spoken_side, players)
    note = f"<p class='note'>{len(ids) - _SHOWN} more in eval/</p>" if len(ids) > _SHOWN else ""
    return (
        "<section><h2>Spoken texts</h2><p class='sub'>The same held-out texts as each evaluation spoke them, with what "
        "the recogniser understood. Texts whose character error rate (CER) changed the most come first. "
        f"{CONTOUR_NOTE}</p>"
        f"{cards}{note}</section>"
    )


def reference_player(row: Row, players: Players) -> str:
    """A player for the text's recording, or the voice to imitate, with its contour; empty without one."""
    clip = row.get("reference_audio")
    if not clip:
        return ""
    return (
        f"<div class='audio'>{players.player(clip)}<span class='fact'>reference</span></div>"
        f"{players.contour(clip)}<p class='facts'>{_prosody_facts(row.get('reference_prosody') or {})}</p>"
    )


def codec_copies(run: Run, players: Players) -> str:
    """Held-out recordings next to what the codec made of them; empty where no audio was kept."""
    copies = {name: {row["id"]: row for row in rows} for name, rows in run.answers.items() if is_codec_copy(rows)}
    last = next(reversed(copies.values()), {})
    cards = ""
    for row in [row for row in last.values() if row.get("decoded")][:_SHOWN]:
        original = f"<div class='audio'>{players.player(row.get('original') or {})}</div>"
        cards += _card(str(row.get("text") or row["id"]), original, row["id"], copies, codec_side, players)
    note = "<p class='sub'>Held-out recordings, and the same after encoding and decoding.</p>"
    return f"<section><h2>Through the codec</h2>{note}{cards}</section>" if cards else ""


def _card(title: str, audio: str, id: Any, rows: Rows, side: Side, players: Players) -> str:
    sides = "".join(side(name, by_id[id], players) for name, by_id in rows.items() if id in by_id)
    question = f"<div class='question'><p class='prompt'>{escape(title)}</p>{audio}</div>"
    return f"<article class='card'>{question}<div class='sides'>{sides}</div></article>"


def spoken_side(name: str, row: Row, players: Players) -> str:
    """A text as one evaluation spoke it: its player, what the recogniser understood, and the error rate."""
    understood = escape(transcript(row) or "") or "<span class='note'>nothing was understood</span>"
    mark = "right" if _cer(row) == 0 else "wrong"
    return (
        f"<div class='side {mark}'><span class='when'>{escape(name)}</span>{spoken_player(row, players)}"
        f"{players.contour(spoken_audio(row) or {})}<p class='written'>{understood}</p>"
        f"<p class='facts'><span class='fact'>CER <b>{_cer(row):.0%}</b></span>"
        f"<span class='fact'>{float(row.get('seconds') or 0):.2f} s</span>{_prosody_facts(row)}</p></div>"
    )


def codec_side(name: str, row: Row, players: Players) -> str:
    """A recording after the codec at one evaluation, with its distances."""
    values = "".join(
        f"<span class='fact'>{label} <b>{show(row[key])}</b></span>"
        for label, key in (("mel distance", "mel_distance"), ("STFT distance", "stft_distance"))
    )
    player = players.player(row.get("decoded") or {})
    return (
        f"<div class='side'><span class='when'>{escape(name)}</span><div class='audio'>{player}</div>"
        f"<p class='facts'>{values}</p></div>"
    )


def _prosody_facts(row: Row) -> str:
    return "".join(
        f"<span class='fact'>{metric_name(name)} <b>{show(row[name], name)}</b></span>"
        for name in MEASURES
        if name in row
    )


def _cer(row: Row) -> float:
    return float(row.get("cer") or 0.0)
