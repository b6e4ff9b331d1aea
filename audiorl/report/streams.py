"""Interpreted streams on a time axis: source speech, reference, what the policy wrote, and the rewards of each chunk.

Time runs to the right, one column per chunk. The waveform of a chunk stands in its own column. What happens at the end
of a chunk (the reference that becomes available, the segment that is written, the rewards for it) begins at the
column's right edge, which is that moment. Times are seconds of source speech.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

import numpy as np
from markupsafe import Markup, escape
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
    """One rollout of a stream. `head` introduces it, `name` says whose it is.

    open: whether the page shows it unfolded. total: show the sum of a chunk's rewards; leave it out where the parts are
    standardised within a batch, because sums of different batches are then not comparable.
    """

    row: Row
    head: Markup
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

    def cell(self, k: int, kind: str, strength: float, title: str, text: str, least: int = 0) -> str:
        """Return a coloured cell behind chunk k; `text` only where it is wider than `least`."""
        width = (*self.widths[1:], self.widths[0])[k] - 3
        style = f"--strength:{strength:.2f};width:{width}px"
        return f"<td><i class='cell {kind}' style='{style}' title='{title}'>{text if width > least else ''}</i></td>"

    def row(self, name: str, cells: Sequence[str], kind: str = "grid") -> str:
        """Return a row of the grid: the first column has no chunk before it."""
        rest = "<td></td>" * (len(self) - len(cells))
        return f"<tr class='{kind}'><th scope='row'>{escape(name)}</th><td></td>{''.join(cells)}{rest}</tr>"

    def table(self, caption: str, rows: str) -> str:
        """Return rows on the axis."""
        columns = "".join(f"<col style='width:{w}px'>" for w in (_NAMES, *self.widths, _TAIL))
        style = f"width:{_NAMES + sum(self.widths) + _TAIL}px"
        label = f"aria-label='{escape(caption)}' style='{style}'"
        return f"<table class='track' {label}><colgroup>{columns}</colgroup>{rows}</table>"


def stream(sample: Row, bands: Sequence[Band], players: Players) -> Markup:
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
    times = "".join(f"<td>{_seconds(t)}</td>" for t in (*starts, ends[-1]))  # at the left edges of the columns
    rows = f"<tr class='times'><th scope='row'>seconds</th>{times}</tr>"
    rows += _waveform(axis, players.samples(clip), "<audio" in player) + _references(axis, sample["turns"])
    name = escape(str(sample.get("id") or "stream"))
    return Markup(
        f"<div class='stream'><div class='audio'>{instructions}{player}</div>"
        f"<div class='scroll' tabindex='0' role='region' aria-label='timeline of {name}'><div class='inner'>"
        f"<div class='playhead' hidden></div>{axis.table('speech and reference', rows)}"
        f"{''.join(_band(b, axis, players) for b in bands)}</div></div></div>"
    )


# -- speech and reference ----------------------------------------------------------------------------------------------


def _waveform(axis: _Axis, wav: NDArray[np.float32] | None, playable: bool) -> str:
    """Draw the sound of each chunk as an outline in a box of _BINS x 2, mirrored at the middle."""
    rate, loudest = 0.0, 1.0
    if wav is not None and len(wav):
        rate, loudest = len(wav) / axis.ends[-1], max(float(np.abs(wav).max()), 1e-6)
    cells = ""
    for k, (start, end) in enumerate(zip(axis.starts, axis.ends, strict=True), 1):
        picture = ""
        if wav is not None and rate:
            chunk = np.abs(wav[round(start * rate) : round(end * rate)])
            edges = np.linspace(0, len(chunk), _BINS + 1).astype(int)
            heights = [max(0.015, float(chunk[a:b].max(initial=0.0)) / loudest) for a, b in pairwise(edges)]
            outline = [(0.0, heights[0]), *((i + 0.5, h) for i, h in enumerate(heights)), (float(_BINS), heights[-1])]
            points = [f"{x:g},{1 - h:.2f}" for x, h in outline] + [f"{x:g},{1 + h:.2f}" for x, h in outline[::-1]]
            box = f"<svg viewBox='0 0 {_BINS} 2' preserveAspectRatio='none' aria-hidden='true'>"
            picture = f"{box}<path d='M{' '.join(points)}Z'/></svg>"
        label = f"chunk {k}, {_seconds(start)} to {_seconds(end)} s"
        cell = f"<span class='chunk' title='{label}'>{picture}</span>"
        if playable:
            names = f"title='{label}: play from here' aria-label='{label}: play from here'"
            cell = f"<button type='button' data-at='{start:.3f}' data-end='{end:.3f}' {names}>{picture}</button>"
        cells += f"<td>{cell}</td>"
    return f"<tr class='wave'><th scope='row'>speech</th>{cells}<td></td></tr>"


def _references(axis: _Axis, turns: Sequence[Row]) -> str:
    boxes = {}
    for k, turn in enumerate(turns):
        text, source = (str(turn.get(name) or "").strip() for name in ("reference", "source"))
        if text or source:
            lasts = turn.get("reference_seconds")
            spoken = f", {lasts:.1f} s when spoken" if isinstance(lasts, int | float) else ""
            under = f"<small dir='auto'>{escape(source)}</small>" if source else ""
            title = f"available from {_seconds(axis.ends[k])} s on{spoken}"
            html = f"<div class='ref' dir='auto' title='{title}'>{escape(text)}{under}</div>"
            boxes[k] = html, max(text, source, key=len)
    return _lanes(axis, "reference", boxes)


# -- what the policy did -----------------------------------------------------------------------------------------------


def _band(band: Band, axis: _Axis, players: Players) -> str:
    """Draw READ (nothing was written) or WRITE after each chunk, how much wall-clock time passed until then, what was
    written, and the rewards: green gives, red takes, grey is zero, empty is undefined.

    Where the recorded times lie before the chunk's end the run did not wait for the speech, and no delay is shown.
    """
    score, segments = band.row.get("score") or {}, (band.row.get("segments") or ())[: len(axis)]
    actions, delays, boxes = [], [], {}
    for k, segment in enumerate(segments):
        text, cut = str(segment.get("text") or "").strip(), segment.get("stop_reason") == "length"
        word, title = "WRITE" if text else "READ", escape(_about(segment, axis.ends[k]))
        narrow = axis.widths[k + 1 if k + 1 < len(axis) else 0] <= 47
        actions.append(axis.cell(k, word.lower(), 0.6, title, word[0] if narrow else word))
        delay = float(segment.get("emit_time") or 0.0) - axis.ends[k]
        delays.append(axis.cell(k, "read", 0.6, title, show(delay)) if delay > 0 else "<td></td>")
        if text or cut:
            mark = "<small>cut at the length limit</small>" if cut else ""
            boxes[k] = f"<div class='output' dir='auto' title='{title}'>{marked(text)}{mark}</div>", text or "limit"
    rows = axis.row("policy", actions) if segments else ""
    rows += axis.row("delay (s)", delays) if any("<i" in cell for cell in delays) else ""
    nothing = f"<td colspan='{len(axis) + 1}'>{note('nothing (READ only)', 'span')}</td>"
    rows += _lanes(axis, "wrote", boxes) if boxes else f"<tr><th scope='row'>wrote</th>{nothing}</tr>"
    parts = dict(score.get("segment_parts") or {})
    if band.total and score.get("per_segment") is not None:
        parts["reward"] = score["per_segment"]
    for name, values in parts.items():
        cells = []
        for k, value in enumerate(values[: len(axis)]):
            if value is None or not math.isfinite(value):
                cells.append("<td></td>")
                continue
            value = round(float(value), 2) + 0.0
            title = escape(f"{name} of chunk {k + 1}, at {_seconds(axis.ends[k])} s: {show(value)}")
            cells.append(axis.cell(k, sign_of(value), min(1.0, abs(value)), title, show(value), 26))
        rows += axis.row(name, cells, "grid total" if name == "reward" else "grid")
    clip = band.row.get("spoken_audio")
    spoken = f"<div class='audio'>{players.player(clip)}</div>" if clip else ""
    return (
        f"<details class='band'{' open' if band.open else ''}><summary><span class='chips'>{band.head}</span></summary>"
        f"{axis.table(f'{band.name}: segments and rewards', rows)}{spoken}</details>"
    )


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


def _lanes(axis: _Axis, name: str, boxes: Mapping[int, tuple[str, str]]) -> str:
    """Table rows in which the box (HTML, text) of chunk k begins at the chunk's right edge and may reach to the next.

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
    rows, head = "", f"<th scope='row' rowspan='{len(lanes)}'>{name}</th>"
    for members in lanes:
        cells = f"<td colspan='{members[0] + 1 if members else len(axis) + 1}'></td>"
        cells += "".join(f"<td colspan='{b - a}'>{boxes[a][0]}</td>" for a, b in pairwise([*members, len(axis)]))
        rows += f"<tr>{'' if rows else head}{cells}</tr>"
    return rows


def _seconds(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
