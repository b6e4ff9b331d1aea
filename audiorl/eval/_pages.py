"""Self-contained HTML pages with audio players."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

import soundfile

from audiorl.audio import AudioClip, AudioError
from audiorl.types import Sample

_RATE = 16_000
_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;"
    "padding:0 1rem}article{border-top:1px solid #8886;padding:1rem 0}h2{font-size:1rem;margin:0}"
    "audio{width:100%}dl{display:grid;grid-template-columns:7rem 1fr;margin:.5rem 0}dd{margin:0}dt{opacity:.7}"
)


def page(title: str, summary: str, articles: Sequence[str], nothing: str) -> str:
    """A page of articles (HTML); `title`, `summary` and `nothing`, which stands for no articles, are plain text."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><p>{escape(summary)}</p>"
        f"{''.join(articles) or f'<p>{escape(nothing)}</p>'}</body></html>\n"
    )


def article(title: str, clips: Sequence[AudioClip], entries: Sequence[tuple[str, str]]) -> str:
    """A title, a player for each clip, and (term, text) entries; a line break in a text stays one."""
    players = "".join(map(player, clips))
    listed = "".join(
        f"<dt>{escape(term)}</dt><dd>{escape(text).replace(chr(10), '<br>')}</dd>" for term, text in entries
    )
    return f"<article><h2>{escape(title)}</h2>{players}<dl>{listed}</dl></article>"


def player(clip: AudioClip) -> str:
    """The clip in FLAC inside of the page, at 16 kHz; of a file that cannot be read the error."""
    try:
        samples = clip.load(_RATE)
    except AudioError as error:
        return f"<p>{escape(str(error))}</p>"
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, _RATE, format="FLAC", subtype="PCM_16")
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<audio controls preload="none" src="data:audio/flac;base64,{data}"></audio>'


def question_card(sample: Sample, shown: Sample, answers: str) -> str:
    """A card of a question with its clips, the prompt's text as `shown` has it, and `answers` as HTML."""
    prompt = "\n".join(c for m in shown.messages for c in m.content if isinstance(c, str))
    return (
        f"<article class='card'><div class='question'><h3>{escape(sample.id)}</h3>"
        f"<div class='audio'>{''.join(map(player, sample.audio))}</div><p class='prompt'>{escape(prompt)}</p></div>"
        f"<div class='sides'>{answers}</div></article>"
    )
