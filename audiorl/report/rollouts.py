"""Rollouts and held-out examples as HTML: questions, responses with their rewards, answers of several evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Literal

from audiorl.eval.metrics.prosody import MEASURES
from audiorl.report.audio import Players
from audiorl.report.kit import NOTHING, chip, chips, differences, fact, marked, note, prompt
from audiorl.report.streams import Band, stream
from audiorl.report.summary import Row, metric_name, show

_TEXT = 4000  # characters of one response
Kind = Literal["stream", "spoken", "codec", "text"]
Side = tuple[str, Row, Players]
"""The name of an evaluation, what it recorded of an example, and what makes its players."""


def is_stream(sample: Row | None) -> bool:
    """Return whether a recorded sample has turns."""
    return bool(sample and sample.get("turns"))


# -- rollouts ----------------------------------------------------------------------------------------------------------


def question(sample: Row, players: Players) -> str:
    """Return the prompt, its audio, choices and gold answers. Of a stream, audio and reference are in its timeline."""
    shown = {} if is_stream(sample) else sample
    audio = "".join(players.player(clip) for clip in shown.get("audio") or ())
    facts = {"reference": shown.get("references"), "choices": sample.get("choices"), "task": [sample.get("task")]}
    named = "".join(fact(name, ", ".join(map(str, held))) for name, held in facts.items() if held and any(held))
    return (
        f"<div class='question'><p class='prompt'>{prompt(str(sample.get('prompt') or ''))}</p>"
        f"<div class='audio'>{audio}</div><p class='facts'>{named}</p></div>"
    )


def written_text(row: Row) -> str:
    """Return everything that the policy wrote."""
    return str(row.get("text") or "".join(str(s.get("text") or "") for s in row.get("segments") or ()))


def total(row: Row) -> float:
    """Return the reward of a rollout; 0 without one."""
    return float((row.get("score") or {}).get("total") or 0.0)


def response(row: Row, players: Players, tokens: str = "", score: str | None = None) -> str:
    """Return one answer with its audio and its rewards.

    `tokens` is HTML in place of the text, `score` in place of `score_chips`, which tells the sign of the advantage too.
    """
    advantage = _advantage(row) or 0.0
    sign = "" if score is not None or not advantage else " up" if advantage > 0 else " down"
    audio = spoken_player(row, players)
    written = tokens or marked(written_text(row), _TEXT) or ("" if audio else NOTHING)
    chips = score_chips(row) if score is None else score
    return f"<div class='response{sign}'><p class='written'>{written}</p>{audio}<p class='chips'>{chips}</p></div>"


def score_chips(row: Row) -> str:
    """Return the total, the reward parts, whether it was cut, and the advantage."""
    segments, advantage = row.get("segments") or [], _advantage(row)
    line = chip("total", total(row), "total") if row.get("score") else ""
    line += chips((row.get("score") or {}).get("parts"))
    if segments and segments[-1].get("stop_reason") == "length":
        line += "<span class='fact'>cut at the length limit</span>"
    return line + ("" if advantage is None else chip("advantage", advantage, "advantage", f"{advantage:+.2f}"))


def _advantage(row: Row) -> float | None:
    value = row.get("advantage")
    return None if value is None else round(float(value), 2) + 0.0  # no "-0.00"


def spoken_player(row: Row, players: Players) -> str:
    """Return a player for what a rollout spoke; "" for one that spoke nothing."""
    clip = row.get("spoken_audio")
    return f"<div class='audio'>{players.player(clip)}</div>" if clip else ""


# -- held-out examples -------------------------------------------------------------------------------------------------


def kind_of(row: Row) -> Kind:
    """Return what a held-out example is: a stream, a text that was spoken, a recording after a codec, or an answer."""
    if is_stream(row.get("sample")):
        return "stream"
    if row.get("transcript") is not None and row.get("spoken_audio") is not None:
        return "spoken"
    return "codec" if "mel_distance" in row else "text"


def example_card(sides: Sequence[Side], kind: Kind, head: str = "", flag: str = "") -> str:
    """Return a card of a held-out example as several evaluations have it. Texts of two are compared word by word.

    `head` is HTML above it, `flag` a CSS class.
    """
    _, row, players = sides[-1]
    sample = row.get("sample") or row
    if kind == "stream":
        named = {name for name, _, _ in sides}
        opened = {"before", "after"} & named or {sides[0][0]} if len(named) > 2 else named
        bands = []
        for name, held, _ in sides:
            rewards = chips((held.get("score") or {}).get("parts"))
            bands.append(Band(held, f"<b>{escape(name)}</b>{rewards}", name, name in opened, total=False))
        title = f"<h3>{escape(str(sample.get('id')))}</h3>"
        return f"<article class='card'>{title}{stream(sample, bands, players)}</article>"
    if kind == "text":
        texts = [marked(written_text(held)) for _, held, _ in sides]
        if flag:
            texts = list(differences(*(written_text(held) for _, held, _ in sides)))
        body = "".join(
            f"<div class='side {'right' if held.get('correct') else 'wrong'}'><span class='when'>{escape(name)}</span>"
            f"<p class='written'>{text or NOTHING}</p><p class='chips'>{chips(held.get('parts'))}</p></div>"
            for (name, held, _), text in zip(sides, texts, strict=True)
        )
        return (
            f"<article class='card {flag}'>{head}{question(sample, players)}<div class='sides'>{body}</div></article>"
        )
    reference = row.get("original" if kind == "codec" else "reference_audio")
    audio = (
        f"<div class='audio'>{players.player(reference)}<span class='fact'>reference</span></div>" if reference else ""
    )
    if reference and kind == "spoken":
        audio += f"{players.contour(reference)}<p class='facts'>{_prosody(row.get('reference_prosody') or {})}</p>"
    title = f"<p class='prompt'>{escape(str(row.get('text') or row.get('id') or ''))}</p>"
    body = "".join((_codec_side if kind == "codec" else _spoken_side)(*side) for side in sides)
    return f"<article class='card'><div class='question'>{title}{audio}</div><div class='sides'>{body}</div></article>"


def _spoken_side(name: str, row: Row, players: Players) -> str:
    """Show a text as one evaluation spoke it: its player, what the recogniser understood, and the error rate."""
    understood = escape(row.get("transcript") or "") or note("nothing was understood", "span")
    cer = float(row.get("cer") or 0.0)
    return (
        f"<div class='side {'wrong' if cer else 'right'}'><span class='when'>{escape(name)}</span>"
        f"{spoken_player(row, players)}{players.contour(row.get('spoken_audio'))}<p class='written'>{understood}</p>"
        f"<p class='facts'>{fact('CER', f'{cer:.0%}')}"
        f"<span class='fact'>{float(row.get('seconds') or 0):.2f} s</span>{_prosody(row)}</p></div>"
    )


def _codec_side(name: str, row: Row, players: Players) -> str:
    """Show a recording after the codec at one evaluation, with its distances."""
    values = "".join(fact(metric_name(k), show(row[k])) for k in ("mel_distance", "stft_distance") if k in row)
    return (
        f"<div class='side'><span class='when'>{escape(name)}</span>"
        f"<div class='audio'>{players.player(row.get('decoded'))}</div><p class='facts'>{values}</p></div>"
    )


def _prosody(row: Row) -> str:
    return "".join(fact(metric_name(name), show(row[name], name)) for name in MEASURES if name in row)
