"""How a rollout of several segments unfolded, as a table. Streams with their sound are drawn by `streams`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from audiorl.report.run import Row
from audiorl.report.text import marked

_LISTENS = "<span class='note'>nothing (listens)</span>"


def timeline(segments: Sequence[Row]) -> str:
    """What was written after how much source was heard; empty for a rollout of one segment."""
    if len(segments) < 2:
        return ""
    rows = "".join(
        f"<tr><td>{place}</td><td>{_seconds(s.get('source_time'))}</td><td>{_seconds(s.get('emit_time'))}</td>"
        f"<td>{escape(str(s.get('num_tokens', '')))}</td><td>{escape(str(s.get('stop_reason') or ''))}</td>"
        f"<td class='written'>{marked(str(s.get('text') or '')) or _LISTENS}</td></tr>"
        for place, s in enumerate(segments, 1)
    )
    return (
        "<table class='timeline'><thead><tr><th>#</th><th>source heard</th><th>emitted at</th><th>tokens</th>"
        f"<th>stopped by</th><th>text</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"
