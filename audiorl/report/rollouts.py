"""Rollouts and held-out examples as HTML (assets/cards.html): questions, responses, answers of several evaluations.

question(sample, players)       the prompt, its audio, choices and gold answers; of a stream these are in its timeline
response(row, players, tokens, score)   one answer with its audio and its rewards; `tokens` stands in place of the text,
                                `score` in place of `score_chips`, which tells the sign of the advantage too
score_chips(row)                the total, the reward parts, whether it was cut, and the advantage
spoken_player(row, players)     a player for what a rollout spoke; "" for one that spoke nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from markupsafe import Markup

from audiorl.eval.metrics.prosody import MEASURES
from audiorl.report.audio import Players
from audiorl.report.kit import TEMPLATES, chips, differences, macros, marked
from audiorl.report.streams import Band, stream
from audiorl.report.summary import Row

Kind = Literal["stream", "spoken", "sound", "codec", "text"]
Side = tuple[str, Row, Players]
"""The name of an evaluation, what it recorded of an example, and what makes its players."""


def is_stream(sample: Row | None) -> bool:
    """Return whether a recorded sample has turns."""
    return bool(sample and sample.get("turns"))


def written_text(row: Row) -> str:
    """Return everything that the policy wrote."""
    return str(row.get("text") or "".join(str(s.get("text") or "") for s in row.get("segments") or ()))


def total(row: Row) -> float:
    """Return the reward of a rollout; 0 without one."""
    return float((row.get("score") or {}).get("total") or 0.0)


def advantage(row: Row) -> float | None:
    """Return the advantage of a rollout, rounded; None without one."""
    value = row.get("advantage")
    return None if value is None else round(float(value), 2) + 0.0  # no "-0.00"


def was_cut(row: Row) -> bool:
    """Return whether the rollout reached the length limit."""
    return (row.get("segments") or [{}])[-1].get("stop_reason") == "length"


for _of_templates in (is_stream, written_text, total, advantage, was_cut):
    TEMPLATES.globals[_of_templates.__name__] = _of_templates
TEMPLATES.globals["MEASURES"] = MEASURES
_cards = macros("cards.html")
question, response, score_chips, spoken_player = (
    getattr(_cards, name) for name in ("question", "response", "score_chips", "spoken_player")
)


# -- held-out examples -------------------------------------------------------------------------------------------------


def kind_of(row: Row) -> Kind:
    """Return what a held-out example is: a stream, a text that was spoken, another sound that was made, a recording
    after a codec, or an answer."""
    if is_stream(row.get("sample")):
        return "stream"
    if row.get("spoken_audio") is not None:
        if row.get("transcript") is not None and "cer" in row:
            return "spoken"
        if "correct" not in row:
            return "sound"
    return "codec" if "mel_distance" in row else "text"


def example_card(sides: Sequence[Side], kind: Kind, head: str = "", flag: str = "") -> Markup:
    """Return a card of a held-out example as several evaluations have it. Texts of two are compared word by word.

    `head` is HTML above it, `flag` a CSS class.
    """
    _, row, players = sides[-1]
    sample = row.get("sample") or row
    card: Markup
    if kind == "stream":
        named = {name for name, _, _ in sides}
        opened = {"before", "after"} & named or {sides[0][0]} if len(named) > 2 else named
        bands = []
        for name, held, _ in sides:
            rewards = chips((held.get("score") or {}).get("parts"))
            bands.append(Band(held, Markup("<b>{}</b>").format(name) + rewards, name, name in opened, total=False))
        timeline = stream(sample, bands, players)
        return Markup("<article class='card'><h3>{}</h3>{}</article>").format(sample.get("id"), timeline)
    if kind == "text":
        texts = [marked(written_text(held)) for _, held, _ in sides]
        if flag:
            texts = list(differences(*(written_text(held) for _, held, _ in sides)))
        card = _cards.example(sample, sides, texts, players, Markup(head), flag)
        return card
    reference = row.get("original" if kind == "codec" else "reference_audio")
    card = _cards.sound(row, reference, sides, players, kind)
    return card
