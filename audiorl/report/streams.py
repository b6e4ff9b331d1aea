"""Interpreted streams on a time axis: source speech, reference, what the policy wrote, and the rewards of each chunk.

Time runs to the right, one column per chunk. The waveform of a chunk stands in its own column. What happens at the end
of a chunk (the reference that becomes available, the segment that is written, the rewards for it) begins at the
column's right edge, which is that moment. Times are seconds of source speech.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from statistics import median

import numpy as np
from numpy.typing import NDArray

from audiorl.report.audio import Players
from audiorl.report.kit import marked, note, sign_of
from audiorl.report.summary import Row, show

STREAM_LEAD = (
    "Time runs to the right, one column per chunk. References, written segments and rewards begin at the end of their "
    "chunk: the moment up to which the source had been read. Click a chunk to play the speech from there."
)
_NAMES, _TAIL, _PAGE = 104, 190, 1070  # px: the column of names, room after the end, what fits without scrolling
_NARROW, _WIDE, _LEAST = 58, 104, 30  # px: of a chunk
_BINS = 24
_LANES, _LINES, _LETTER = 4, 3, 8.2  # of text: rows at most, lines in a box if there is room, px of a letter


@dataclass(frozen=True)
class Band:
    """One rollout of a stream. `head` is HTML that introduces it, `name` says whose it is.

    open: whether the page shows it unfolded. total: show the sum of a chunk's rewards; leave it out where the parts are
    standardised within a batch, because sums of different batches are then not comparable.
    """

    row: Row
    head: str
    name: str
    open: bool = True
    total: bool = True


@dataclass(frozen=True)
class _Axis:
    """Where chunks begin and end in seconds, and how wide each is in px."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    widths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ends)

    def cell_width(self, k: int) -> int:
        """Return the width of what stands behind chunk k."""
        return (*self.widths[1:], self.widths[0])[k] - 3


Boxes = Mapping[int, tuple[str, str]]
"""(HTML, text) of a box that begins at the end of a chunk, by the chunk's number."""


def stream(sample: Row, bands: Sequence[Band], players: Players) -> str:
    """Return the speech and its reference above the bands, on one time axis; it scrolls sideways when it is long."""
    ends = [float(t.get("end") or 0.0) for t in sample["turns"]]
    starts = (0.0, *ends[:-1])
    lengths = [max(b - a, 0.0) for a, b in zip(starts, ends, strict=True)]
    usual = median(lengths) or 1.0
    width = min(max((_PAGE - _NAMES - _TAIL) // len(ends), _NARROW), _WIDE)
    axis = _Axis(starts, tuple(ends), tuple(max(_LEAST, round(width * min(x / usual, 4.0))) for x in lengths))
    # The turns are parts of the last clip, if it is as long as they are.
    clips = sample.get("audio") or ()
    clip = clips[-1] if clips and clips[-1].get("path") else None
    if clip and clip.get("duration") is not None and abs(float(clip["duration"]) - ends[-1]) >= 0.2:
        clip = None
    instructions = "".join(players.player(c) for c in clips if c is not clip and c.get("path") and clip is not None)
    player = players.player(clip)
    wave = _envelopes(players.samples(clip), axis)
    rows = _times(axis) + _waveform(axis, wave, "<audio" in player) + _references(axis, sample["turns"])
    top = _table(axis, "speech and reference", rows)
    name = escape(str(sample.get("id") or "stream"))
    return (
        f"<div class='stream'><div class='audio'>{instructions}{player}</div>"
        f"<div class='scroll' tabindex='0' role='region' aria-label='timeline of {name}'><div class='inner'>"
        f"<div class='playhead' hidden></div>{top}{''.join(_band(b, axis, players) for b in bands)}</div></div></div>"
    )


def _band(band: Band, axis: _Axis, players: Players) -> str:
    score, segments = band.row.get("score") or {}, band.row.get("segments") or ()
    parts = dict(score.get("segment_parts") or {})
    if band.total and score.get("per_segment") is not None:
        parts["reward"] = score["per_segment"]
    rewards = "".join(_rewards(axis, part, values) for part, values in parts.items())
    rows = _actions(axis, segments) + _written(axis, segments) + rewards
    table = _table(axis, f"{band.name}: segments and rewards", rows)
    clip = band.row.get("spoken_audio")
    spoken = f"<div class='audio'>{players.player(clip)}</div>" if clip else ""
    return (
        f"<details class='band'{' open' if band.open else ''}><summary><span class='chips'>{band.head}</span></summary>"
        f"{table}{spoken}</details>"
    )


def _table(axis: _Axis, caption: str, rows: str) -> str:
    columns = "".join(f"<col style='width:{w}px'>" for w in (_NAMES, *axis.widths, _TAIL))
    width = _NAMES + sum(axis.widths) + _TAIL
    return (
        f"<table class='track' aria-label='{escape(caption)}' style='width:{width}px'>"
        f"<colgroup>{columns}</colgroup>{rows}</table>"
    )


# -- speech and reference ----------------------------------------------------------------------------------------------


def _times(axis: _Axis) -> str:
    """Draw the moments at the left edges of the columns; the end of the speech is that of the last one."""
    cells = "".join(f"<td>{_seconds(t)}</td>" for t in (*axis.starts, axis.ends[-1]))
    return f"<tr class='times'><th scope='row'>seconds</th>{cells}</tr>"


def _waveform(axis: _Axis, wave: Sequence[str], playable: bool) -> str:
    cells = ""
    for k, (start, end, path) in enumerate(zip(axis.starts, axis.ends, wave, strict=True), 1):
        box = f"<svg viewBox='0 0 {_BINS} 2' preserveAspectRatio='none' aria-hidden='true'>"
        picture = f"{box}<path d='{path}'/></svg>" if path else ""
        label = f"chunk {k}, {_seconds(start)} to {_seconds(end)} s"
        if playable:
            names = f"title='{label}: play from here' aria-label='{label}: play from here'"
            button = f"<button type='button' data-at='{start:.3f}' data-end='{end:.3f}' {names}>{picture}</button>"
            cells += f"<td>{button}</td>"
        else:
            cells += f"<td><span class='chunk' title='{label}'>{picture}</span></td>"
    return f"<tr class='wave'><th scope='row'>speech</th>{cells}<td></td></tr>"


def _references(axis: _Axis, turns: Sequence[Row]) -> str:
    boxes = {}
    for k, turn in enumerate(turns):
        text, source = (str(turn.get(name) or "") for name in ("reference", "source"))
        if text or source:
            lasts = turn.get("reference_seconds")
            spoken = f", {lasts:.1f} s when spoken" if isinstance(lasts, int | float) else ""
            under = f"<small dir='auto'>{escape(source)}</small>" if source else ""
            title = f"available from {_seconds(axis.ends[k])} s on{spoken}"
            html = f"<div class='ref' dir='auto' title='{title}'>{escape(text.strip())}{under}</div>"
            boxes[k] = html, max(text.strip(), source, key=len)
    return _lanes(axis, "reference", boxes)


def _envelopes(wav: NDArray[np.float32] | None, axis: _Axis) -> list[str]:
    """Outline the sound of each chunk in a box of _BINS x 2, mirrored at the middle; "" without sound."""
    if wav is None or not len(wav):
        return [""] * len(axis)
    rate, loudest = len(wav) / axis.ends[-1], max(float(np.abs(wav).max()), 1e-6)
    outlines = []
    for start, end in zip(axis.starts, axis.ends, strict=True):
        chunk = np.abs(wav[round(start * rate) : round(end * rate)])
        edges = np.linspace(0, len(chunk), _BINS + 1).astype(int)
        heights = [max(0.015, float(chunk[a:b].max(initial=0.0)) / loudest) for a, b in pairwise(edges)]
        outline = list(zip((k + 0.5 for k in range(_BINS)), heights, strict=True))
        outline = [(0.0, heights[0]), *outline, (float(_BINS), heights[-1])]
        top = [f"{x:g},{1 - height:.2f}" for x, height in outline]
        bottom = [f"{x:g},{1 + height:.2f}" for x, height in reversed(outline)]
        outlines.append(f"M{' '.join([*top, *bottom])}Z")
    return outlines


# -- what the policy did -----------------------------------------------------------------------------------------------


def _actions(axis: _Axis, segments: Sequence[Row]) -> str:
    """After each chunk READ (nothing was written) or WRITE, and how many seconds of wall-clock time passed until then.

    Where the recorded times lie before the chunk's end the run did not wait for the speech, and no delay is shown.
    """
    actions, delays, empty = ["<td></td>"], ["<td></td>"], "<td></td>"
    for k, segment in enumerate(segments[: len(axis)]):
        width, word = axis.cell_width(k), "WRITE" if str(segment.get("text") or "").strip() else "READ"
        style, title = f"style='--strength:0.6;width:{width}px'", escape(_about(segment, axis.ends[k]))
        shown = word if width > 44 else word[0]
        actions.append(f"<td><i class='cell {word.lower()}' {style} title='{title}'>{shown}</i></td>")
        delay = float(segment.get("emit_time") or 0.0) - axis.ends[k]
        late = f"<td><i class='cell read' style='width:{width}px'>{show(delay)}</i></td>"
        delays.append(late if delay > 0 else empty)
    if not segments:
        return ""
    rows = [("policy", actions)] + [("delay (s)", delays)] * any("<i" in cell for cell in delays)
    return "".join(
        f"<tr class='grid'><th scope='row'>{name}</th>{''.join(cells)}{empty * (len(axis) + 1 - len(cells))}</tr>"
        for name, cells in rows
    )


def _written(axis: _Axis, segments: Sequence[Row]) -> str:
    boxes = {}
    for k, segment in enumerate(segments[: len(axis)]):
        text, cut = str(segment.get("text") or "").strip(), segment.get("stop_reason") == "length"
        if text or cut:
            mark = "<small>cut at the length limit</small>" if cut else ""
            title = escape(_about(segment, axis.ends[k]))
            boxes[k] = f"<div class='output' dir='auto' title='{title}'>{marked(text)}{mark}</div>", text or "limit"
    if boxes:
        return _lanes(axis, "wrote", boxes)
    nothing = note("nothing (READ only)", "span")
    return f"<tr><th scope='row'>wrote</th><td colspan='{len(axis) + 1}'>{nothing}</td></tr>"


def _about(segment: Row, end: float) -> str:
    """Put a segment in words: source time, wall-clock time, number of tokens, why it stopped."""
    source_time, emit_time = segment.get("source_time"), segment.get("emit_time")
    words = [f"written after {_seconds(end if source_time is None else float(source_time))} s of source"]
    if emit_time is not None:
        words.append(f"complete after {float(emit_time):.2f} s of wall-clock time")
    if segment.get("num_tokens") is not None:
        words.append(f"{segment['num_tokens']} tokens")
    if segment.get("stop_reason"):
        words.append(f"stopped by {segment['stop_reason']}")
    return ", ".join(words)


def _lanes(axis: _Axis, name: str, boxes: Boxes) -> str:
    """Table rows in which the box of chunk k begins at the chunk's right edge and may reach to the next one.

    A box whose text would be squeezed by the next one pushes that down to a row of its own.
    """
    lefts = list(accumulate(axis.widths, initial=0))
    lanes: list[list[int]] = [[]]
    free = [0.0]
    for k in sorted(boxes):
        lane = next((n for n, until in enumerate(free) if until <= lefts[k + 1]), len(free))
        if lane == _LANES:
            lane = min(range(_LANES), key=lambda n: free[n])
        if lane == len(free):
            lanes.append([])
            free.append(0.0)
        lanes[lane].append(k)
        words = boxes[k][1].split() or [""]
        # px that keep the text to a few lines without breaking its longest word
        wide = max(max(map(len, words)) * _LETTER, len(boxes[k][1]) * _LETTER / _LINES + 12) + 20
        free[lane] = lefts[k + 1] + wide
    rows = []
    for members in lanes:
        cells = [f"<td colspan='{members[0] + 1 if members else len(axis) + 1}'></td>"]
        cells += [f"<td colspan='{after - k}'>{boxes[k][0]}</td>" for k, after in pairwise([*members, len(axis)])]
        rows.append("".join(cells))
    head = f"<th scope='row' rowspan='{len(lanes)}'>{name}</th>"
    return "".join(f"<tr>{head if n == 0 else ''}{row}</tr>" for n, row in enumerate(rows))


def _rewards(axis: _Axis, name: str, values: Sequence[float | None]) -> str:
    """One row of the grid: green gives, red takes, grey is zero, empty is undefined."""
    cells = []
    for k, value in enumerate(values[: len(axis)]):
        width = axis.cell_width(k)
        if value is None or not math.isfinite(value):
            cells.append("<td></td>")
            continue
        value = round(float(value), 2) + 0.0
        title = escape(f"{name} of chunk {k + 1}, at {_seconds(axis.ends[k])} s: {show(value)}")
        style, shown = f"--strength:{min(1.0, abs(value)):.2f};width:{width}px", show(value) if width > 26 else ""
        cells.append(f"<td><i class='cell {sign_of(value)}' style='{style}' title='{title}'>{shown}</i></td>")
    cells += ["<td></td>"] * (len(axis) - len(cells))
    kind = " total" if name == "reward" else ""
    return f"<tr class='grid{kind}'><th scope='row'>{escape(name)}</th><td></td>{''.join(cells)}</tr>"


def _seconds(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
