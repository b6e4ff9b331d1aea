"""Announcements of single words: texts that no training stream has, blocks that are each other's translation."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from audiorl.audio import seconds
from audiorl.data.corpus import bundled_speech, corpus
from audiorl.data.silence import RATE
from audiorl.tasks.simul.streams import Stream, interpretation_sample
from corpora.announcements import WordVoice, announcement_streams, announcements, texts, voices_of, words


@pytest.fixture(scope="module")
def known() -> list[WordVoice]:
    return voices_of(bundled_speech(), "es", "en")


@pytest.fixture(scope="module")
def unseen() -> list[WordVoice]:
    return voices_of(corpus("unseen_speakers"), "es", "en")


def test_no_text_of_the_test_split_is_in_training_and_all_of_its_words_are(known: list[WordVoice]) -> None:
    for language in ("en", "es"):
        train, test = (texts(language, split) for split in ("train", "test"))
        assert train and test and not {*train} & {*test}
        assert {w for t in test for w in t.split()} <= {w for t in train for w in t.split()}
    held_out = {a.pair for kind in announcements() for a in kind} - {
        pair for pair in pairs_of(announcement_streams("train", known, count=300))
    }
    measured = pairs_of(announcement_streams("test", known, count=60, seed=7))
    assert measured and measured <= held_out


def pairs_of(streams: list[Stream]) -> set[str]:
    """Of the announcements in streams, by looking for each one's blocks."""
    by_blocks = {
        tuple(" ".join(words("es")[key] for key in block.es) for block in a.blocks): a.pair
        for kind in announcements()
        for a in kind
    }
    pairs = set()
    for stream in streams:
        rest = [u.source for u in stream.units]
        while rest:
            length = next(n for n in range(len(rest), 0, -1) if tuple(rest[:n]) in by_blocks)
            pairs.add(by_blocks[tuple(rest[:length])])
            rest = rest[length:]
    return pairs


def test_the_order_of_a_date_differs_and_its_day_waits_for_the_month() -> None:
    blocks = {
        tuple(" ".join(words(language)[key] for key in block.keys(language)) for language in ("es", "en"))
        for kind in announcements()
        for a in kind
        for block in a.blocks
    }
    assert {("cinco de noviembre", "november fifth"), ("treinta y uno de mayo", "may thirty first")} < blocks
    assert {("y siete", "seven"), ("veintisiete", "twenty seven"), ("usted tiene", "you have")} < blocks


def test_a_stream_holds_its_words_where_its_units_say(known: list[WordVoice]) -> None:
    for stream in announcement_streams("test", known, count=5):
        wav = stream.audio.load(RATE)
        speech = [(u.start, u.end) for u in stream.units]
        assert 6.0 <= stream.seconds <= 12.0 + 4.0
        for start, end in speech:
            assert np.abs(wav[round(start * RATE) : round(end * RATE)]).max() > 0.05
        for (_, end), (start, _) in pairwise(speech):
            assert start >= end and np.abs(wav[round(end * RATE) : round(start * RATE)]).max(initial=0) < 0.01
        for unit in stream.units:
            assert unit.target_audio and unit.target_seconds == pytest.approx(seconds(unit.target_audio))
        sample = interpretation_sample(stream)
        assert " ".join(t.reference.strip() for t in sample.turns if t.reference) == stream.reference


def test_streams_of_an_unseen_speaker_have_only_her_words_and_the_package_says_the_translation(
    unseen: list[WordVoice], known: list[WordVoice]
) -> None:
    (voice,) = unseen
    assert voice.name == "July E. Jiménez" and voice.source.keys() < known[0].source.keys()
    streams = announcement_streams("test", unseen, count=20)
    spoken = {w for s in streams for u in s.units for w in u.source.split()}
    assert spoken <= {w for key in voice.source for w in words("es")[key].split()}
    assert len({s.reference for s in streams}) == 20
    np.testing.assert_array_equal(voice.target["digits/7"], known[0].target["digits/7"])


def test_a_speaker_of_both_languages_is_translated_in_the_own_voice(known: list[WordVoice]) -> None:
    high = WordVoice("high", known[0].source, {key: 2 * wav for key, wav in known[0].target.items()})
    streams = announcement_streams("train", [known[0], high], count=12)
    levels = {s.metadata["speaker"]: [np.abs(u.target_audio.load(RATE)).max() for u in s.units] for s in streams}  # type: ignore[union-attr]
    assert min(levels["high"]) > 0.9 * max(levels["Allison Smith"])


def test_a_number_names_a_stream(known: list[WordVoice]) -> None:
    first, again = (announcement_streams("train", known, count=3) for _ in range(2))
    other = announcement_streams("train", known, count=3, seed=1)
    assert [s.reference for s in first] == [s.reference for s in again] != [s.reference for s in other]
    np.testing.assert_array_equal(first[2].audio.load(RATE), again[2].audio.load(RATE))


def test_english_into_spanish() -> None:
    voices = voices_of(bundled_speech(), "en", "es")
    streams = announcement_streams("train", voices, "es", "en", count=60)
    english, spanish = ({u.source for s in streams for u in s.units}, {u.target for s in streams for u in s.units})
    assert english & {"you have", "extension", "minutes"} and spanish & {"usted tiene", "minutos"}
    assert {(s.source_language, s.target_language) for s in streams} == {("en", "es")}


def test_what_cannot_be_said(known: list[WordVoice]) -> None:
    with pytest.raises(ValueError, match="composed in en and es, not in 'fr'"):
        announcement_streams("train", known, "fr", "es")
    with pytest.raises(ValueError, match="no voices"):
        announcement_streams("train", [])
    mute = WordVoice("mute", {"digits/2": known[0].source["digits/2"]}, known[0].target)
    with pytest.raises(ValueError, match="mute has the words of none"):
        announcement_streams("train", [mute])
    with pytest.raises(ValueError, match="seconds must be"):
        announcement_streams("train", known, seconds=(3.0, 2.0))


def test_speakers_take_turns_and_each_is_translated_in_the_own_voice(known: list[WordVoice]) -> None:
    low = WordVoice(
        "low", {k: 0.1 * w for k, w in known[0].source.items()}, {k: 0.1 * w for k, w in known[0].target.items()}
    )
    high = WordVoice("high", known[0].source, known[0].target)
    streams = announcement_streams("train", [low, high, known[0]], count=12, seconds=(8, 14), speakers=2)
    assert {len({u.speaker for u in s.units}) for s in streams} == {2} and not any(s.metadata for s in streams)
    assert len({frozenset(u.speaker for u in s.units) for s in streams}) == 3
    for unit in (u for s in streams for u in s.units):
        assert unit.target_audio is not None
        assert (np.abs(unit.target_audio.load(RATE)).max() < 0.11) == (unit.speaker == "low")
    with pytest.raises(ValueError, match="2 speakers a stream, but 1 voices; give 1 to 1"):
        announcement_streams("train", known, speakers=2)
