"""Latency of simultaneous translation from the delays of the units of its output, as SimulEval 1.1.4 computes it.

A delay D_i is how much of the source had been read when unit i was written: milliseconds of speech, or words of a
written source. Elapsed times instead of delays (delay plus the time spent computing) give the computation-aware
variant of every metric here, named `AL_CA` and so on in tables. A unit is a word, a character of languages written
without spaces, or, in speech output, one chunk of speech. X is the length of the source in the unit of the delays.

Silence has no latency: every function raises ValueError where no unit was written.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import accumulate, groupby, takewhile
from typing import Literal

from audiorl.eval.metrics.text import UNSPACED_SCRIPTS, join_unspaced
from audiorl.languages import written_in

Unit = Literal["word", "char"]


def latency_unit(language: str) -> Unit:
    """Return the unit of a target language's delays: "char" for a script without spaces, else "word", also for ""."""
    return "char" if language and not UNSPACED_SCRIPTS.isdisjoint(written_in(language)) else "word"


def separator(language: str) -> str:
    """Return what stands between two texts of a language: a space, or nothing where the unit is the character."""
    return "" if latency_unit(language) == "char" else " "


def _writes_spaces(language: str) -> bool:
    """Tell whether a language writes spaces: Thai and its like part clauses by them, Chinese and Japanese nothing."""
    return not language or {"han", "kana"}.isdisjoint(written_in(language))


def gap(before: str, after: str, language: str) -> str:
    """Return what stands between two stripped texts of a language: a space, or nothing where one of them is empty.

    In Chinese and Japanese nothing stands beside a wide character either.
    """
    if not (before and after):
        return ""
    wide = any(unicodedata.east_asian_width(c) in "WF" for c in (before[-1], after[0]))
    return "" if wide and not _writes_spaces(language) else " "


def tidy(text: str, language: str) -> str:
    """Return the text with single spaces, in Chinese and Japanese none beside their characters."""
    text = " ".join(text.split())
    return text if _writes_spaces(language) else join_unspaced(text)


def text_units(text: str, unit: Unit) -> list[str]:
    """Split into the units that each need a delay: words between whitespace, or all characters but spaces."""
    return text.split() if unit == "word" else list(text.replace(" ", ""))


def split_words(text: str, language: str) -> list[str]:
    """Split into the units of a language."""
    return text_units(text, latency_unit(language))


def reference_length(reference: str, unit: Unit) -> int:
    """Return a reference's length as SimulEval counts: pieces between single spaces, or characters with their spaces.

    An empty reference counts as 1: every metric stays defined.
    """
    return max(1, len(reference.split(" ") if unit == "word" else reference.strip()))


def al(delays: Sequence[float], source_length: float, target_length: int) -> float:
    """Return average lagging: the mean of D_i - (i-1)/gamma up to the first unit written with the whole source read.

    gamma = target_length / source_length, the rate of an ideal translator; `target_length` is the length of the
    reference. When the first unit comes after the end of the source (elapsed times only), it is D_1.
    Source: Ma et al. 2019 (STACL), eq. 8 and 9.
    """
    check_delays(delays, source_length, target_length)
    if delays[0] > source_length:
        return float(delays[0])
    step = source_length / target_length
    total = 0.0
    for i, delay in enumerate(delays):
        total += delay - i * step
        if delay >= source_length:
            break
    return total / (i + 1)


def laal(delays: Sequence[float], source_length: float, target_length: int) -> float:
    """Return length-adaptive average lagging: AL with gamma = max(units written, reference length) / source_length.

    Writing more than the reference has no longer lowers the latency; AL <= LAAL.
    Source: Papi et al. 2022, "Over-Generation Cannot Be Rewarded"; Polák et al. 2022.
    """
    return al(delays, source_length, max(len(delays), target_length))


def ap(delays: Sequence[float], source_length: float, target_length: int) -> float:
    """Return average proportion: the sum of the delays over source length times reference length.

    1 for a translator that waits for the end and writes as much as the reference has. Source: Cho & Esipova 2016.
    """
    check_delays(delays, source_length, target_length)
    return sum(delays) / (source_length * target_length)


def dal(delays: Sequence[float], source_length: float) -> float:
    """Return differentiable average lagging: the mean of g_i - (i-1)/gamma, g_i = max(D_i, g_{i-1} + 1/gamma).

    g_1 = D_1, gamma = units written / source_length: lost time can't be made up by writing much together.
    Source: Arivazhagan et al. 2019, eq. 9 to 11.
    """
    check_delays(delays, source_length)
    step = source_length / len(delays)
    total = written = 0.0
    for i, delay in enumerate(delays):
        written = max(delay, written + step) if i else delay
        total += written - i * step
    return total / len(delays)


def yaal(delays: Sequence[float], source_length: float, target_length: int, end: float | None = None) -> float | None:
    """Return yet another average lagging: LAAL over the units written before `end` only; None where there is none.

    `end` is the end of the source unless given. LongYAAL passes the end of the recording: a unit that comes after its
    own segment but before the end of the recording counts. Source: Polák et al. 2025, "Better Late Than Never".
    """
    check_delays(delays, source_length)
    step = source_length / max(len(delays), target_length)
    end = source_length if end is None else end
    early = takewhile(lambda delay: delay < end, delays)
    lags = [delay - i * step for i, delay in enumerate(early)]
    return sum(lags) / len(lags) if lags else None


def start_offset(delays: Sequence[float]) -> float:
    """Return the delay of the first unit."""
    check_delays(delays)
    return float(delays[0])


def end_offset(ends: Sequence[float], source_length: float) -> float:
    """Return how long after the end of the source the output ends; negative where it ends before.

    `ends` are delays, or for speech the ends of the played intervals (see `ends`).
    """
    check_delays(ends, source_length)
    return ends[-1] - source_length


def flal(times: Sequence[float], shown: Sequence[str] | None = None) -> float:
    """Return first letter appearance lagging of a paragraph: when the first letter that stays was shown, ms.

    `times` are the moments of the outputs, counted from the start of the paragraph. A system that may retract also
    gives `shown`, the whole text on display after each of them; without it nothing is retracted and the value is the
    start offset. The papers that report FLAL (CLASI, Seed LiveInterpret 2.0) describe it in words; this formula is
    reconstructed: the start offset per paragraph of the first output that is not retracted.

    >>> flal([800, 1200, 1500], ["I", "Hel", "Hello"])
    1200.0
    """
    check_delays(times)
    if shown is None:
        return float(times[0])
    if len(shown) != len(times):
        raise ValueError(f"{len(times)} times but {len(shown)} texts shown: give one text per time")
    letter = shown[-1].lstrip()[:1]
    if not letter:
        raise ValueError("nothing is shown in the end: FLAL needs a letter that stays")
    first = len(shown) - 1
    while first > 0 and shown[first - 1].lstrip()[:1] == letter:
        first -= 1
    return float(times[first])


def wait_k(k: int, source_length: int, count: int) -> list[int]:
    """Return the delays of the wait-k policy, g(t) = min(k + t - 1, |X|) for t = 1 … count, in source units.

    Source: Ma et al. 2019 (STACL), eq. 4.
    """
    if k < 1 or source_length < 1 or count < 0:
        raise ValueError(f"wait-k needs k >= 1, a source and count >= 0, got {k}, {source_length} and {count}")
    return [min(k + t, source_length) for t in range(count)]


def check_delays(delays: Sequence[float], source_length: float = 1, target_length: int = 1) -> None:
    """Raise ValueError unless something was written and both lengths are positive."""
    if not len(delays):
        raise ValueError("no delays: latency needs at least one written unit")
    if not source_length > 0:
        raise ValueError(f"source_length must be positive, got {source_length}")
    if target_length < 1:
        raise ValueError(f"target_length must be at least 1, got {target_length}")


def join_texts(texts: Sequence[str], language: str) -> str:
    """Join texts of one language."""
    out = ""
    for text in (t.strip() for t in texts):
        out += gap(out, text, language) + text
    return out


def cut_text(text: str, pieces: Sequence[Sequence[str]]) -> list[str]:
    """Return the text in pieces, each with the space before it, given the units of each in the order of the text."""
    out, start = list[str](), 0
    for piece in pieces:
        end = start
        for unit in piece:
            end = text.index(unit, end) + len(unit)
        out.append(text[start:end])
        start = end
    return out


SPEECH_TOKEN = 300.0  # ms


def atd(
    delays: Sequence[float],
    *,
    elapsed: Sequence[float] | None = None,
    durations: Sequence[float] | None = None,
    source_token: float = SPEECH_TOKEN,
    target_token: float | None = None,
) -> float:
    """Return average token delay: how long after its source token each target token ends; delays never fall.

    Tokens of speech are pieces of 300 ms. What was read between two writes is one chunk of source, cut into pieces of
    which the last may be shorter; what was written after it is the chunk of target with the same number. Target token t
    belongs to source token t, but t is lowered by max(0, y - x) for y target and x source tokens of all chunks before,
    so that tokens beyond the source's are not held against later chunks, and is at most the last one that was read.

    `durations` (ms per unit) mark speech output, whose tokens last `target_token` = 300 ms. Units of text take no time
    (`target_token` = 0) when the source is speech; when it is text, source and target tokens last 1 each. `elapsed`
    makes it computation-aware: the time spent on each unit is added to its end. Source: Kano et al. 2023, arXiv
    2211.13173; as SimulEval 1.1.4.
    """
    check_delays(delays)
    if durations is not None and not (len(durations) == len(delays) and min(durations) > 0):
        raise ValueError("durations: one positive number of milliseconds per delay")
    spent = [0.0] * len(delays)
    if elapsed is not None:
        overhead = [e - d for e, d in zip(elapsed, delays, strict=True)]
        spent = [now - before for now, before in zip(overhead, [0.0, *overhead], strict=False)]
    if target_token is None:
        target_token = SPEECH_TOKEN if durations is not None else 0.0

    source_ends = [0.0]
    lags: list[float] = []
    ended = 0.0  # when the last target token ended
    before = 0.0  # what had been read at the last write
    for delay, written in groupby(range(len(delays)), key=delays.__getitem__):
        units = list(written)
        allowance = max(0, len(lags) - (len(source_ends) - 1))
        source_ends += list(accumulate(_pieces(delay - before, source_token), initial=source_ends[-1]))[1:]
        before = delay
        if durations is None:
            tokens = [(target_token, spent[i]) for i in units]
        else:
            pieces = _pieces(sum(durations[i] for i in units), target_token)
            tokens = [(piece, sum(spent[i] for i in units) / len(pieces)) for piece in pieces]
        for length, computed in tokens:
            ended = max(delay, ended) + length + computed
            source = min(len(lags) + 1 - allowance, len(source_ends) - 1)
            lags.append(ended - source_ends[source])
    return sum(lags) / len(lags)


def _pieces(length: float, piece: float) -> list[float]:
    """Cut `length` into whole pieces and a shorter rest."""
    count, rest = divmod(length, piece)
    return [piece] * int(count) + ([rest] if rest else [])


Interval = tuple[float, float]
"""Start and duration of played speech, ms since the start of the source."""


def play(delays: Sequence[float], durations: Sequence[float]) -> list[Interval]:
    """Return the interval of each chunk of `durations[i]` ms that is ready at `delays[i]` ms.

    A chunk starts when it is ready and the chunk before it has been played.

    >>> play([1000, 2000, 2500], [1500, 200, 300])  # the second waits for the first, the third starts on the dot
    [(1000, 1500), (2500, 200), (2700, 300)]
    """
    intervals: list[Interval] = []
    end = 0.0
    for delay, duration in zip(delays, durations, strict=True):
        start = max(end, delay)
        intervals.append((start, duration))
        end = start + duration
    return intervals


def ends(intervals: Sequence[Interval]) -> list[float]:
    """Return the end of each interval."""
    return [start + duration for start, duration in intervals]


def discontinuity(intervals: Sequence[Interval]) -> dict[str, float]:
    """Return the pauses within the output: all together and their mean, ms, and their number; as SimulEval 1.1.4."""
    gaps = [start - end for end, (start, _) in zip(ends(intervals), intervals[1:], strict=False)]
    pauses = [gap for gap in gaps if gap > 0]
    mean = sum(pauses) / len(pauses) if pauses else 0.0
    return {"DiscontinuitySum": sum(pauses), "DiscontinuityAve": mean, "DiscontinuityNum": len(pauses)}
