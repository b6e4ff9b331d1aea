"""Rollouts and held-out recordings as HTML: questions, responses with their rewards, spoken texts, codec copies."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from audiorl.eval.metrics.prosody import MEASURES
from audiorl.report.audio import Players
from audiorl.report.kit import NOTHING, chip, chips, fact, marked, note, prompt
from audiorl.report.summary import Row, metric_name, show

_TEXT = 4000  # characters of one response


def is_stream(sample: Row | None) -> bool:
    """Return whether a recorded sample has turns."""
    return bool(sample and sample.get("turns"))


def is_spoken(rows: Sequence[Row]) -> bool:
    """Return whether these rows are texts that the policy spoke and a recogniser transcribed."""
    return bool(rows) and rows[0].get("transcript") is not None and rows[0].get("spoken_audio") is not None


def is_codec_copy(rows: Sequence[Row]) -> bool:
    """Return whether these rows are recordings that went through a codec."""
    return bool(rows) and "mel_distance" in rows[0]


# -- rollouts ----------------------------------------------------------------------------------------------------------


def question(sample: Row, players: Players) -> str:
    """Return the prompt, its audio, choices and gold answers. Of a stream, audio and reference are in its timeline."""
    streams = is_stream(sample)
    audio = "".join(players.player(clip) for clip in (() if streams else sample.get("audio") or ()))
    facts = [
        fact(label, ", ".join(map(str, values)))
        for label, values in (
            ("reference", () if streams else sample.get("references")),
            ("choices", sample.get("choices")),
            ("task", [sample["task"]] if sample.get("task") else ()),
        )
        if values
    ]
    return (
        f"<div class='question'><p class='prompt'>{prompt(str(sample.get('prompt') or ''))}</p>"
        f"<div class='audio'>{audio}</div><p class='facts'>{''.join(facts)}</p></div>"
    )


def written_text(row: Row) -> str:
    """Return everything that the policy wrote."""
    return str(row.get("text") or "".join(str(s.get("text") or "") for s in row.get("segments") or ()))


def total(row: Row) -> float:
    """Return the reward of a rollout; 0 without one."""
    return float((row.get("score") or {}).get("total") or 0.0)


def parts(row: Row) -> dict[str, float]:
    """Return the reward parts of a rollout."""
    return (row.get("score") or {}).get("parts") or {}


def response(row: Row, players: Players, tokens: str = "", score: str | None = None) -> str:
    """Return one answer with its audio, its segments and its rewards.

    `tokens` is HTML in place of the text, `score` in place of `score_chips`, which tells the sign of the advantage too.
    """
    advantage = _advantage(row) or 0.0
    sign = "" if score is not None or not advantage else " up" if advantage > 0 else " down"
    audio = spoken_player(row, players)
    written = tokens or marked(written_text(row), _TEXT) or ("" if audio else NOTHING)
    return (
        f"<div class='response{sign}'><p class='written'>{written}</p>{audio}{timeline(row.get('segments') or ())}"
        f"<p class='chips'>{score_chips(row) if score is None else score}</p></div>"
    )


def score_chips(row: Row) -> str:
    """Return the total, the reward parts, whether it was cut, and the advantage."""
    segments, advantage = row.get("segments") or [], _advantage(row)
    line = [chip("total", total(row), "total")] if row.get("score") else []
    line.append(chips(parts(row)))
    if segments and segments[-1].get("stop_reason") == "length":
        line.append("<span class='fact'>cut at the length limit</span>")
    if advantage is not None:
        line.append(chip("advantage", advantage, "advantage", f"{advantage:+.2f}"))
    return "".join(line)


def _advantage(row: Row) -> float | None:
    value = row.get("advantage")
    return None if value is None else round(float(value), 2) + 0.0  # no "-0.00"


def timeline(segments: Sequence[Row]) -> str:
    """Return the segments of a rollout as a table: source time, wall-clock time, text; "" for a single segment."""
    if len(segments) < 2:
        return ""
    rows = ""
    for place, s in enumerate(segments, 1):
        times = ("–" if t is None else f"{t:.2f} s" for t in (s.get("source_time"), s.get("emit_time")))
        words = (str(place), *times, escape(str(s.get("num_tokens", ""))), escape(str(s.get("stop_reason") or "")))
        text = marked(str(s.get("text") or "")) or note("nothing (READ)", "span")
        rows += f"<tr>{''.join(f'<td>{word}</td>' for word in words)}<td class='written'>{text}</td></tr>"
    return (
        "<table class='timeline'><thead><tr><th>#</th><th>source time</th><th>emitted at</th><th>tokens</th>"
        f"<th>stopped by</th><th>text</th></tr></thead><tbody>{rows}</tbody></table>"
    )


# -- held-out recordings -----------------------------------------------------------------------------------------------


def spoken_player(row: Row, players: Players) -> str:
    """Return a player for what a rollout spoke; "" for one that spoke nothing."""
    clip = row.get("spoken_audio")
    return f"<div class='audio'>{players.player(clip)}</div>" if clip else ""


def reference_player(row: Row, players: Players) -> str:
    """Return a player for the text's recording, or the voice to imitate, with its contour; "" without one."""
    clip = row.get("reference_audio")
    if not clip:
        return ""
    return (
        f"<div class='audio'>{players.player(clip)}<span class='fact'>reference</span></div>"
        f"{players.contour(clip)}<p class='facts'>{_prosody_facts(row.get('reference_prosody') or {})}</p>"
    )


def spoken_side(name: str, row: Row, players: Players) -> str:
    """Return a text as one evaluation spoke it: its player, what the recogniser understood, and the error rate."""
    understood = escape(row.get("transcript") or "") or note("nothing was understood", "span")
    cer = float(row.get("cer") or 0.0)
    return (
        f"<div class='side {'wrong' if cer else 'right'}'><span class='when'>{escape(name)}</span>"
        f"{spoken_player(row, players)}{players.contour(row.get('spoken_audio'))}<p class='written'>{understood}</p>"
        f"<p class='facts'>{fact('CER', f'{cer:.0%}')}"
        f"<span class='fact'>{float(row.get('seconds') or 0):.2f} s</span>{_prosody_facts(row)}</p></div>"
    )


def codec_side(name: str, row: Row, players: Players) -> str:
    """Return a recording after the codec at one evaluation, with its distances."""
    values = "".join(fact(metric_name(key), show(row[key])) for key in ("mel_distance", "stft_distance"))
    return (
        f"<div class='side'><span class='when'>{escape(name)}</span>"
        f"<div class='audio'>{players.player(row.get('decoded'))}</div><p class='facts'>{values}</p></div>"
    )


def _prosody_facts(row: Row) -> str:
    return "".join(fact(metric_name(name), show(row[name], name)) for name in MEASURES if name in row)
