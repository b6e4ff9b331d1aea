"""Interpreted streams on a time axis: source speech, reference, what the policy wrote, and the rewards of each chunk.

Time runs to the right, one column per chunk. The waveform of a chunk stands in its own column. What happens at the end
of a chunk (the reference that becomes available, the segment that is written, the rewards for it) begins at the
column's right edge, which is that moment. Times are seconds of source speech.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

import numpy as np

from audiorl.report.audio import Players
from audiorl.report.recordings import spoken_player
from audiorl.report.run import Row, Run
from audiorl.report.summary import show
from audiorl.report.text import chips, marked

_SHOWN = 4
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

    @property
    def lefts(self) -> list[int]:
        """Where columns begin, in px; the last is the one after the end."""
        return list(accumulate(self.widths, initial=0))


@dataclass(frozen=True)
class _Box:
    """A text that begins at the end of a chunk."""

    html: str
    text: str

    @property
    def width(self) -> float:
        """px that keep it to a few lines without breaking its longest word."""
        words = self.text.split() or [""]
        return max(max(map(len, words)) * _LETTER, len(self.text) * _LETTER / _LINES + 12) + 20


def is_stream(sample: Any) -> bool:
    """Whether a recorded sample has turns."""
    return isinstance(sample, Mapping) and bool(sample.get("turns"))


def held_out(run: Run, players: Players) -> str:
    """The first held-out streams with the output of each evaluation; empty where none were interpreted."""
    rows = {name: [r for r in answers if is_stream(r.get("sample"))] for name, answers in run.answers.items()}
    names = sorted((n for n, streams in rows.items() if streams), key=_order(run))
    if not names:
        return ""
    by_id = {name: {r["sample"].get("id"): r for r in rows[name]} for name in names}
    ids = list(dict.fromkeys(r["sample"].get("id") for name in names for r in rows[name]))
    cards = []
    for id in ids[:_SHOWN]:
        outputs = {name: by_id[name][id] for name in names if id in by_id[name]}
        opened = {"before", "after"} & outputs.keys() or {next(iter(outputs))}
        bands = [
            Band(row, f"<b>{escape(name)}</b>{_parts(row)}", name, name in opened, total=False)
            for name, row in outputs.items()
        ]
        sample = next(iter(outputs.values()))["sample"]
        cards.append(f"<article class='card'><h3>{escape(str(id))}</h3>{stream(sample, bands, players)}</article>")
    more = len(ids) - _SHOWN
    note = f"<p class='note'>{more} more streams in eval/{escape(names[0])}.jsonl</p>" if more > 0 else ""
    return f"<section><h2>Held-out streams</h2><p class='sub'>{_EXPLAIN}</p>{''.join(cards)}{note}</section>"


_EXPLAIN = (
    "Time runs to the right, one column per chunk. References, written segments and rewards begin at the end of their "
    "chunk: the moment up to which the source had been read. Click a chunk to play the speech from there."
)


def stream(sample: Row, bands: Sequence[Band], players: Players) -> str:
    """The speech and its reference above the bands, all on one time axis; scrolls sideways when it is long."""
    axis = _axis([float(t.get("end") or 0.0) for t in sample["turns"]])
    clips = sample.get("audio") or ()
    clip = _recording(clips, axis.ends[-1])
    instructions = "".join(players.player(c) for c in clips if c is not clip and c.get("path") and clip is not None)
    player = players.player(clip or {})
    wave = _envelopes(players.samples(clip) if clip else None, axis)
    top = _table(
        axis,
        "speech and reference",
        _times(axis) + _waveform(axis, wave, "<audio" in player) + _references(axis, sample["turns"]),
    )
    name = escape(str(sample.get("id") or "stream"))
    return (
        f"<div class='stream'><div class='audio'>{instructions}{player}</div>"
        f"<div class='scroll' tabindex='0' role='region' aria-label='timeline of {name}'><div class='inner'>"
        f"<div class='playhead' hidden></div>{top}{''.join(_band(b, axis, players) for b in bands)}</div></div></div>"
    )


def _band(band: Band, axis: _Axis, players: Players) -> str:
    score = band.row.get("score") or {}
    segments = band.row.get("segments") or ()
    rows = _actions(axis, segments) + _written(axis, segments)
    parts = dict(score.get("segment_parts") or {})
    if band.total and score.get("per_segment") is not None:
        parts["reward"] = score["per_segment"]
    rewards = "".join(_rewards(axis, part, values) for part, values in parts.items())
    table = _table(axis, f"{band.name}: segments and rewards", rows + rewards)
    return (
        f"<details class='band'{' open' if band.open else ''}><summary><span class='chips'>{band.head}</span></summary>"
        f"{table}{spoken_player(band.row, players)}</details>"
    )


def _parts(row: Row) -> str:
    return chips((row.get("score") or {}).get("parts") or {})


def _axis(ends: Sequence[float]) -> _Axis:
    starts = (0.0, *ends[:-1])
    lengths = [max(b - a, 0.0) for a, b in zip(starts, ends, strict=True)]
    usual = median(lengths) or 1.0
    width = min(max((_PAGE - _NAMES - _TAIL) // len(ends), _NARROW), _WIDE)
    return _Axis(starts, tuple(ends), tuple(max(_LEAST, round(width * min(x / usual, 4.0))) for x in lengths))


def _table(axis: _Axis, caption: str, rows: str) -> str:
    columns = "".join(f"<col style='width:{w}px'>" for w in (_NAMES, *axis.widths, _TAIL))
    width = _NAMES + sum(axis.widths) + _TAIL
    return (
        f"<table class='track' aria-label='{escape(caption, quote=True)}' style='width:{width}px'>"
        f"<colgroup>{columns}</colgroup>{rows}</table>"
    )


def _times(axis: _Axis) -> str:
    """The moments at the left edges of the columns; the end of the speech is that of the last one."""
    cells = "".join(f"<td>{_seconds(t)}</td>" for t in (*axis.starts, axis.ends[-1]))
    return f"<tr class='times'><th scope='row'>seconds</th>{cells}</tr>"


def _waveform(axis: _Axis, wave: Sequence[str], playable: bool) -> str:
    cells = []
    for k, (start, end, path) in enumerate(zip(axis.starts, axis.ends, wave, strict=True), 1):
        picture = (
            f"<svg viewBox='0 0 {_BINS} 2' preserveAspectRatio='none' aria-hidden='true'><path d='{path}'/></svg>"
            if path
            else ""
        )
        label = f"chunk {k}, {_seconds(start)} to {_seconds(end)} s"
        if playable:
            times = f"data-at='{start:.3f}' data-end='{end:.3f}'"
            label = f"{label}: play from here"
            cells.append(
                f"<td><button type='button' {times} title='{label}' aria-label='{label}'>{picture}</button></td>"
            )
        else:
            cells.append(f"<td><span class='chunk' title='{label}'>{picture}</span></td>")
    return f"<tr class='wave'><th scope='row'>speech</th>{''.join(cells)}<td></td></tr>"


def _references(axis: _Axis, turns: Sequence[Row]) -> str:
    boxes = {}
    for k, turn in enumerate(turns):
        text, source, lasts = (turn.get(name) for name in ("reference", "source", "reference_seconds"))
        if text or source:
            spoken = f", {lasts:.1f} s when spoken" if isinstance(lasts, int | float) else ""
            title = f"available from {_seconds(axis.ends[k])} s on{spoken}"
            under = f"<small dir='auto'>{escape(str(source))}</small>" if source else ""
            reference = str(text or "").strip()
            html = f"<div class='ref' dir='auto' title='{title}'>{escape(reference)}{under}</div>"
            boxes[k] = _Box(html, max(reference, str(source or ""), key=len))
    return _lanes(axis, "reference", boxes)


def _actions(axis: _Axis, segments: Sequence[Row]) -> str:
    """After each chunk READ (nothing was written) or WRITE, and how many seconds of wall-clock time passed until then.

    Where the recorded times lie before the chunk's end the run did not wait for the speech, and no delay is shown.
    """
    cells, late = ["<td></td>"], ["<td></td>"]
    for k, segment in enumerate(segments[: len(axis)]):
        width = (*axis.widths[1:], axis.widths[0])[k] - 3
        word = "WRITE" if str(segment.get("text") or "").strip() else "READ"
        style = f"style='--strength:0.6;width:{width}px'"
        title = escape(_about(segment, axis.ends[k]), quote=True)
        cells.append(
            f"<td><i class='cell {word.lower()}' {style} title='{title}'>{word if width > 44 else word[0]}</i></td>"
        )
        delay = float(segment.get("emit_time") or 0.0) - axis.ends[k]
        late.append(
            f"<td><i class='cell read' style='width:{width}px'>{show(delay)}</i></td>" if delay > 0 else "<td></td>"
        )
    if len(cells) == 1:
        return ""
    rows = [("policy", cells), ("delay (s)", late if any("<i" in cell for cell in late) else [])]
    return "".join(
        f"<tr class='grid'><th scope='row'>{name}</th>{''.join(row)}{'<td></td>' * (len(axis) + 1 - len(row))}</tr>"
        for name, row in rows
        if row
    )


def _written(axis: _Axis, segments: Sequence[Row]) -> str:
    boxes = {}
    for k, segment in enumerate(segments[: len(axis)]):
        text = str(segment.get("text") or "").strip()
        cut = segment.get("stop_reason") == "length"
        if text or cut:
            mark = "<small>cut at the length limit</small>" if cut else ""
            about = escape(_about(segment, axis.ends[k]), quote=True)
            html = f"<div class='output' dir='auto' title='{about}'>{marked(text)}{mark}</div>"
            boxes[k] = _Box(html, text or "limit")
    if boxes:
        return _lanes(axis, "wrote", boxes)
    nothing = "<span class='note'>nothing (READ only)</span>"
    return f"<tr><th scope='row'>wrote</th><td colspan='{len(axis) + 1}'>{nothing}</td></tr>"


def _about(segment: Row, end: float) -> str:
    """A segment in words: source time, wall-clock time, number of tokens, why it stopped."""
    source_time, emit_time = segment.get("source_time"), segment.get("emit_time")
    words = [f"written after {_seconds(end if source_time is None else float(source_time))} s of source"]
    if emit_time is not None:
        words.append(f"complete after {float(emit_time):.2f} s of wall-clock time")
    if segment.get("num_tokens") is not None:
        words.append(f"{segment['num_tokens']} tokens")
    if segment.get("stop_reason"):
        words.append(f"stopped by {segment['stop_reason']}")
    return ", ".join(words)


def _lanes(axis: _Axis, name: str, boxes: Mapping[int, _Box]) -> str:
    """Table rows in which the box of chunk k begins at the chunk's right edge.

    A box whose text would be squeezed by the next one pushes that down to a row of its own.
    """
    lefts = axis.lefts
    lanes: list[list[int]] = []
    free: list[float] = []
    for k in sorted(boxes):
        left = lefts[k + 1]
        lane = next((n for n, until in enumerate(free) if until <= left), len(free))
        if lane == _LANES:
            lane = min(range(_LANES), key=lambda n: free[n])
        if lane == len(free):
            lanes.append([])
            free.append(0.0)
        lanes[lane].append(k)
        free[lane] = left + boxes[k].width
    head = f"<th scope='row' rowspan='{max(1, len(lanes))}'>{name}</th>"
    rows = ["".join(_placed(axis, lane, boxes)) for lane in lanes] or ["".join(_placed(axis, [], boxes))]
    return "".join(f"<tr>{head if n == 0 else ''}{row}</tr>" for n, row in enumerate(rows))


def _placed(axis: _Axis, lane: Sequence[int], boxes: Mapping[int, _Box]) -> Iterator[str]:
    """The cells of a row; each box may reach to where the next one begins."""
    first = lane[0] + 1 if lane else len(axis) + 1
    yield f"<td colspan='{first}'></td>"
    for k, following in pairwise([*lane, len(axis)]):
        yield f"<td colspan='{following - k}'>{boxes[k].html}</td>"


def _rewards(axis: _Axis, name: str, values: Sequence[float | None]) -> str:
    """One row of the grid: green gives, red takes, grey is zero, empty is undefined."""
    cells = []
    for k, value in enumerate(values[: len(axis)]):
        width = (*axis.widths[1:], axis.widths[0])[k] - 3
        if value is None or not math.isfinite(value):
            cells.append("<td></td>")
            continue
        value = round(float(value), 2) + 0.0
        sign = "plus" if value > 0 else "minus" if value < 0 else "zero"
        title = escape(f"{name} of chunk {k + 1}, at {_seconds(axis.ends[k])} s: {show(value)}", quote=True)
        cells.append(
            f"<td><i class='cell {sign}' style='--strength:{min(1.0, abs(value)):.2f};width:{width}px' "
            f"title='{title}'>{show(value) if width > 26 else ''}</i></td>"
        )
    cells += ["<td></td>"] * (len(axis) - len(cells))
    kind = " total" if name == "reward" else ""
    return f"<tr class='grid{kind}'><th scope='row'>{escape(name)}</th><td></td>{''.join(cells)}</tr>"


def _recording(clips: Sequence[Row], end: float) -> Row | None:
    """The clip that the turns are parts of: the last one, if it is as long as they are."""
    if not clips or not clips[-1].get("path"):
        return None
    length = clips[-1].get("duration")
    return clips[-1] if length is None or abs(float(length) - end) < 0.2 else None


def _envelopes(wav: np.ndarray | None, axis: _Axis) -> list[str]:
    """Per chunk the outline of its sound in a box of _BINS x 2, "" without sound."""
    if wav is None or not len(wav):
        return [""] * len(axis)
    rate = len(wav) / axis.ends[-1]
    loudest = max(float(np.abs(wav).max()), 1e-6)
    return [
        _outline(wav[round(a * rate) : round(b * rate)], loudest) for a, b in zip(axis.starts, axis.ends, strict=True)
    ]


def _outline(wav: np.ndarray, loudest: float) -> str:
    """The greatest sample of each bin, mirrored at the middle."""
    edges = np.linspace(0, len(wav), _BINS + 1).astype(int)
    heights = [max(0.015, float(np.abs(wav[a:b]).max(initial=0.0)) / loudest) for a, b in pairwise(edges)]
    xs = [0.0, *(k + 0.5 for k in range(_BINS)), float(_BINS)]
    heights = [heights[0], *heights, heights[-1]]
    top = [f"{x:g},{1 - h:.2f}" for x, h in zip(xs, heights, strict=True)]
    bottom = [f"{x:g},{1 + h:.2f}" for x, h in zip(xs, heights, strict=True)]
    return f"M{' '.join([*top, *reversed(bottom)])}Z"


def _seconds(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _order(run: Run) -> Any:
    """Evaluations in the order of eval.json, others last."""
    places = {name: k for k, name in enumerate(run.evals)}
    return lambda name: (places.get(name, len(places)), name)
