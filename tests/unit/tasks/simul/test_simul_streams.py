"""Chunks, and the reference of each: by hand, and as properties of any stream."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from audiorl.audio import AudioClip
from audiorl.audio import seconds as clip_seconds
from audiorl.data.corpus import Utterance
from audiorl.eval.metrics.latency import join_texts
from audiorl.tasks.simul.streams import (
    ChunkConfig,
    Stream,
    Unit,
    chunk_ends,
    interpretation_sample,
    phrase_lags,
    random_lags,
    split_stream,
    turns,
    with_speaker_marks,
)
from audiorl.types import Turn

RATE = 1000  # a thousand samples a second: sample numbers are milliseconds
STEP = 2.0**-16


def clip(seconds: float) -> AudioClip:
    """Every sample tells its own place, from 1, as a multiple of `STEP`."""
    return AudioClip(array=np.arange(1, round(seconds * RATE) + 1, dtype=np.float32) * STEP, sample_rate=RATE)


def stream(seconds: float, *units: Unit, target: str = "es", id: str = "s") -> Stream:
    return Stream(id, clip(seconds), seconds, units, "en", target)


def heard(turn: Turn) -> list[int]:
    """First and last sample of a turn's own part, and the first one of its context."""
    own, whole = turn.audio.load(RATE), turn.audio.with_context().load(RATE)
    assert np.array_equal(whole[len(whole) - len(own) :], own)
    return [round(float(x / STEP)) for x in (own[0], own[-1], whole[0])]


TALK = stream(
    5.0,
    Unit(0.0, 1.9, "un momento, por favor", "one moment please", 2.5),
    Unit(2.4, 3.2, "adiós", "goodbye", 0.8),
    Unit(3.3, 3.9, "gracias", "thanks", 0.7),
)


# ------------------------------------------------------------------------------------------------ references by hand


def test_a_unit_is_said_in_the_chunk_in_which_it_ends() -> None:
    said = turns(TALK, ChunkConfig(1.0, 0.0))
    assert [t.end for t in said] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [t.reference for t in said] == ["", "un momento, por favor", "", " adiós gracias", ""]
    assert [t.reference_seconds for t in said] == [None, 2.5, None, 1.5, None]
    assert [t.source for t in said] == ["", "one moment please", "", "goodbye thanks", ""]


def test_a_unit_that_ends_with_a_chunk_belongs_to_it() -> None:
    said = turns(stream(3.0, Unit(0.0, 0.96 * 2, "a"), Unit(2.0, 2.93, "b")), ChunkConfig(0.96))
    assert [t.reference for t in said] == ["", "a", "", " b"]
    assert [t.end for t in said] == pytest.approx([0.96, 1.92, 2.88, 3.0])


def test_lags_delay_units_but_never_reorder_them() -> None:
    def said(*lags: int) -> list[str]:
        return [t.reference for t in turns(TALK, ChunkConfig(1.0, 0.0), lags)]

    assert said(1, 0, 0) == ["", "", "un momento, por favor", " adiós gracias", ""]
    assert said(3, 0, 0)[4] == "un momento, por favor adiós gracias"
    assert said(0, 9, 0)[4] == " adiós gracias", "what is late is said at the end"


def test_an_interpreter_is_late_by_one_lag_a_stream_or_one_a_unit() -> None:
    rng = random.Random(0)
    of_streams = [tuple(random_lags(TALK, rng, 3, 1, per="stream")) for _ in range(50)]
    assert set(of_streams) == {(1, 1, 1), (2, 2, 2), (3, 3, 3)}
    of_units = [random_lags(TALK, rng, 3) for _ in range(50)]
    assert any(len(set(lags)) > 1 for lags in of_units)
    assert {lag for lags in of_units for lag in lags} == {0, 1, 2, 3}


def test_an_interpreter_who_waits_for_the_end_of_each_phrase() -> None:
    """The second phrase is "adiós gracias", with 0.1 s between its units."""
    talk = stream(
        5.0, Unit(0.0, 0.9, "un"), Unit(1.0, 1.9, "momento"), Unit(2.4, 3.2, "adiós"), Unit(3.3, 4.4, "gracias")
    )
    chunks = ChunkConfig(1.0, 0.0)
    assert phrase_lags(talk, chunks) == [1, 0, 1, 0]
    said = [t.reference for t in turns(talk, chunks, phrase_lags(talk, chunks))]
    assert said == ["", "un momento", "", "", " adiós gracias"]
    assert phrase_lags(talk, chunks, pause=0.05) == [0, 0, 0, 0] and phrase_lags(talk, chunks, pause=9) == [4, 3, 1, 0]
    assert phrase_lags(stream(2.0)) == []


def test_no_spaces_where_the_language_has_none() -> None:
    talk = stream(3.0, Unit(0, 0.5, "请稍等，"), Unit(0.6, 1.5, "再见。"), target="zh")
    assert [t.reference for t in turns(talk, ChunkConfig(1.0))] == ["请稍等，", "再见。", ""]
    assert talk.reference == "请稍等，再见。"
    latin = stream(
        4.0, *(Unit(k, k + 0.5, text) for k, text in enumerate(("我用 Python", "NumPy", "写。", "OK"))), target="zh"
    )
    assert [t.reference for t in turns(latin, ChunkConfig(1.0))] == ["我用 Python", " NumPy", "写。", "OK"]
    assert latin.reference == "我用 Python NumPy写。OK"
    thai = stream(3.0, Unit(0, 0.5, "ผมชื่อ John"), Unit(0.6, 1.5, "ขอบคุณ มาก"), target="th")
    assert thai.reference == "ผมชื่อ John ขอบคุณ มาก", "a space parts clauses"


def test_units_without_a_translation_or_a_length_and_streams_without_units() -> None:
    talk = stream(3.0, Unit(0, 0.5, "", "um", 0.4), Unit(0.6, 1.5, "sí", "yes", 0.5))
    said = turns(talk, ChunkConfig(1.0))
    assert [t.reference for t in said] == ["", "sí", ""]
    assert [t.reference_seconds for t in said] == [None, 0.5, None]
    unknown = stream(2.0, Unit(0, 0.5, "a", target_seconds=1.0), Unit(0.6, 0.9, "b"))
    assert turns(unknown, ChunkConfig(1.0))[0].reference_seconds is None
    sample = interpretation_sample(stream(2.0), ChunkConfig(1.0))
    assert sample.references == () and [t.reference for t in sample.turns] == ["", ""]


def test_the_prompt_names_both_languages() -> None:
    sample = interpretation_sample(TALK)
    assert sample.messages[0].content == ("Translate the English speech into Spanish while you hear it.",)
    assert sample.references == ("un momento, por favor adiós gracias",) and sample.task == "en-es"
    assert sample.metadata["transcript"] == "one moment please goodbye thanks" and sample.metadata["seconds"] == 5.0


# ---------------------------------------------------------------------------------------------------- chunks by hand


def test_chunks_hear_their_part_and_what_came_before() -> None:
    said = turns(TALK, ChunkConfig(2.0, 1.0))
    assert [heard(t) for t in said] == [[1, 2000, 1], [2001, 4000, 1001], [4001, 5000, 3001]]
    assert [t.audio.context for t in said] == [0.0, 1.0, 1.0]


def test_chunks_of_a_part_of_a_clip() -> None:
    part = AudioClip(array=clip(5.0).array, sample_rate=RATE, start=1.0, duration=2.5)
    talk = Stream("part", part, clip_seconds(part), (Unit(0, 1, "a"),), "en", "es")
    said = turns(talk, ChunkConfig(1.0, 0.5))
    assert [heard(t) for t in said] == [[1001, 2000, 1001], [2001, 3000, 1501], [3001, 3500, 2501]]


def test_chunks_of_a_channel() -> None:
    other = clip(5.0).array
    assert other is not None
    both = AudioClip(array=np.stack([-other, other], 1), sample_rate=RATE, start=1.0, duration=2.5, channel=1)
    said = turns(Stream("s", both, 2.5, (Unit(0, 1, "a"),), "en", "es"), ChunkConfig(1.0, 0.5))
    assert [heard(t) for t in said] == [[1001, 2000, 1001], [2001, 3000, 1501], [3001, 3500, 2501]]


def test_chunks_of_a_file_are_read_from_it(speech: list[Utterance], tmp_path: Path) -> None:
    whole = speech[0].clip.load()
    path = tmp_path / "speech.flac"
    soundfile.write(path, whole, 16_000, subtype="PCM_16")
    talk = Stream("file", AudioClip(path=str(path)), len(whole) / 16_000, (), "en", "es")
    said = turns(talk, ChunkConfig(0.4, 0.4))
    written = talk.audio.load()
    assert len(written) == len(whole) and all(t.audio.path == str(path) for t in said)
    assert np.array_equal(np.concatenate([t.audio.load() for t in said]), written)
    assert np.array_equal(said[1].audio.with_context().load(), written[:12_800])


@pytest.mark.parametrize(
    ("seconds", "chunk", "ends"),
    [
        (3.0, 1.0, [1.0, 2.0, 3.0]),
        (3.05, 1.0, [1.0, 2.0, 3.0]),  # 50 ms are not heard
        (3.1, 1.0, [1.0, 2.0, 3.0, 3.1]),
        (0.5, 1.0, [0.5]),
        (0.1, 1.0, [0.1]),
        (0.3, 0.1, [0.1, 0.2, 0.3]),
        (0.1, 0.04, [0.04, 0.08]),
    ],
)
def test_where_chunks_end(seconds: float, chunk: float, ends: list[float]) -> None:
    assert chunk_ends(seconds, chunk) == pytest.approx(ends)


def test_the_last_of_whole_chunks_ends_when_the_stream_does() -> None:
    """To the last bit: AL ends with the first word written at the source's end."""
    for count in range(1, 400):
        seconds = count * 15_360 / 16_000
        ends = chunk_ends(seconds, 0.96)
        assert len(ends) == count and ends[-1] == seconds


NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: random_lags(TALK, random.Random(0), 1, 2), "lags: need 0 <= least <= most, got 2 and 1"),
        (lambda: random_lags(TALK, random.Random(0), 0, -1), "lags: need 0 <= least <= most, got -1 and 0"),
        (lambda: ChunkConfig(0.02), "shorter than a frame of the audio encoder; give a multiple of 40 ms"),
        (lambda: ChunkConfig(NAN), "shorter than a frame"),
        (lambda: ChunkConfig(1.0, -0.1), r"a context of -0.1 s before each chunk; give seconds, 0 or more"),
        (lambda: ChunkConfig(1.0, float("inf")), "a context of inf s"),
        (lambda: ChunkConfig(1.0, NAN), "a context of nan s"),
        (lambda: stream(0.03), "stream 's' lasts 30 ms; give at least 100 ms of audio"),
    ],
)
def test_lags_chunks_and_streams_that_cannot_be(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
    ChunkConfig(0.04, 0.0)


@pytest.mark.parametrize(
    ("units", "said"),
    [
        ([Unit(1, 2, "a"), Unit(0, 1, "b")], "unit 2 begins at 0 s, before the previous one ends at 2 s"),
        ([Unit(0, 1.2, "a"), Unit(1, 2, "b")], "unit 2 begins at 1 s, before the previous one ends at 1.2 s"),
        ([Unit(1, 1, "a")], "unit 1 lasts from 1 to 1 s; give start < end"),
        ([Unit(-1, 1, "a")], "unit 1 lasts from -1 to 1 s"),
        ([Unit(0, float("nan"), "a")], "unit 1 lasts from 0 to nan s"),
        ([Unit(0, 5.2, "a")], "unit 1 ends at 5.2 s, after the audio's 5 s"),
    ],
)
def test_units_that_cannot_be(units: list[Unit], said: str) -> None:
    with pytest.raises(ValueError, match=f"stream 's': {said}"):
        stream(5.0, *units)


# ------------------------------------------------------------------------------------------------------------ pieces


def test_a_talk_in_pieces() -> None:
    talk = stream(30.0, Unit(1, 4, "a"), Unit(5, 9, "b"), Unit(11, 19.5, "c"), Unit(20, 21, "d"))
    pieces = split_stream(talk, 9.0)
    assert [p.id for p in pieces] == ["s@1.00", "s@11.00", "s@20.00"]
    assert [p.seconds for p in pieces] == [9.0, 9.0, 9.0], "until the next piece begins, but no longer than asked"
    assert [[(u.start, u.end, u.target) for u in p.units] for p in pieces] == [
        [(0, 3, "a"), (4, 8, "b")],
        [(0, 8.5, "c")],
        [(0, 1, "d")],
    ]
    assert round(float(pieces[1].audio.load(RATE)[0] / STEP)) == 11_001
    assert [clip_seconds(p.audio) for p in pieces] == [p.seconds for p in pieces]


def test_long_units_are_pieces_of_their_own_and_short_streams_stay_whole() -> None:
    pieces = split_stream(stream(30.0, Unit(0, 4, "a"), Unit(5, 17, "b"), Unit(20, 21, "c")), 9.0)
    assert [p.seconds for p in pieces] == [5.0, 12.0, 9.0]
    short, bare = stream(5.0, Unit(1, 2, "a")), stream(30.0)
    assert split_stream(short, 9.0) == [short] and split_stream(bare, 9.0) == [bare]


# -------------------------------------------------------------------------------------------------------- properties


@st.composite
def streams(draw: st.DrawFn) -> tuple[Stream, ChunkConfig, tuple[int, ...]]:
    """Any units with any gaps, any chunk of whole frames, any context, lags for some."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 1500), st.integers(1, 4000)), max_size=8))
    units, at = [], 0
    for k, (gap, length) in enumerate(lengths):
        target = draw(st.sampled_from([f"t{k}", f"t{k} more", ""]))
        units.append(
            Unit((at + gap) / RATE, (at + gap + length) / RATE, target, f"s{k}", draw(st.sampled_from([None, 0.5])))
        )
        at += gap + length
    seconds = max(at + draw(st.integers(0, 2000)), 100) / RATE
    chunks = ChunkConfig(draw(st.integers(1, 60)) * 0.04, draw(st.integers(0, 60)) * 0.04)
    lags = draw(st.sampled_from([(), tuple(draw(st.integers(0, 3)) for _ in units)]))
    return stream(seconds, *units), chunks, lags


@given(streams())
def test_chunks_partition_the_audio(drawn: tuple[Stream, ChunkConfig, tuple[int, ...]]) -> None:
    """But for a rest of less than 0.1 s, which is not heard. The context of each is what came just before."""
    talk, chunks, lags = drawn
    said = turns(talk, chunks, lags)
    assert talk.audio.array is not None
    own = np.concatenate([t.audio.load(RATE) for t in said])
    assert np.array_equal(own, talk.audio.array[: len(own)])
    assert said[-1].end == talk.seconds
    assert len(own) > len(talk.audio.array) - 100
    assert all(a.end < b.end for a, b in pairwise(said))
    for start, turn in zip([0.0, *(t.end for t in said)], said, strict=False):
        first, _, before = heard(turn)
        assert first == round(start * RATE) + 1
        assert first - before == round(min(chunks.context, start) * RATE)


@given(streams())
def test_every_text_appears_once_in_order_and_not_too_early(drawn: tuple[Stream, ChunkConfig, tuple[int, ...]]) -> None:
    """Without lags nothing waits longer than one chunk."""
    talk, chunks, lags = drawn
    said, prompt = turns(talk, chunks, lags), turns(talk, chunks)
    assert "".join(t.reference for t in said) == talk.reference
    assert join_texts([t.source for t in said], "en") == talk.transcript
    for unit in talk.units:
        (end,) = [t.end for t in said if unit.source in t.source.split()]
        assert end >= min(unit.end, said[-1].end) - 1e-6
        assert next(t.end for t in prompt if unit.source in t.source.split()) - unit.end < chunks.seconds + 0.1


@given(streams(), st.integers(1, 12))
def test_pieces_hold_every_unit_once(drawn: tuple[Stream, ChunkConfig, tuple[int, ...]], most: int) -> None:
    talk = drawn[0]
    pieces = split_stream(talk, float(most))
    assert [u.source for p in pieces for u in p.units] == [u.source for u in talk.units]
    assert all(p.seconds <= max(most, *(u.end - u.start for u in p.units), 0) + 1e-6 for p in pieces if p.units)


def test_another_speaker_is_marked_where_the_translation_begins() -> None:
    said = [("a", "one"), ("a", "two"), ("b", ""), ("b", "three"), ("", "four"), ("b", "five"), ("a", "six")]
    units = tuple(Unit(k, k + 0.5, text, speaker=speaker) for k, (speaker, text) in enumerate(said))
    marked = with_speaker_marks(Stream("s", AudioClip(path="s.wav"), 7.0, units, "es", "en"))
    assert marked.reference == "one two >> three four five >> six"
    assert [u.speaker for u in marked.units] == [u.speaker for u in units]
