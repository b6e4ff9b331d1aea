"""The stages of annotation, each on its own: hand-computed cases and real speech."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile

from audiorl.audio import AudioClip
from audiorl.data.corpus import Utterance
from audiorl.speech_models import load_speech_detector
from corpora.annotate import recordings
from corpora.annotate.recordings import Recording, Source
from corpora.annotate.speakers import clusters, speakers
from corpora.annotate.stages import (
    LanguageOfText,
    Sounds,
    SpeechSegments,
    bandwidth,
    most_probable,
    padded,
    snr,
    speech_spans,
)
from corpora.annotate.transcripts import distance, vote
from tests.support.annotation import RATE, spans_of

SEGMENTS = SpeechSegments(load_speech_detector(), threshold=0.5, pause=0.3, max_seconds=30.0, padding=0.0)


def recording(path: Path) -> Recording:
    return Recording(Source(path.name, AudioClip(path=str(path))), {})


# ------------------------------------------------------------------------------------------------------------- segments


def test_speech_begins_at_the_threshold_and_ends_below_it() -> None:
    probabilities = np.array([0.1, 0.6, 0.4, 0.9, 0.3, 0.2, 0.2, 0.2, 0.7, 0.7, 0.0])
    assert speech_spans(probabilities, 0.1, 0.5, 0.3, 30) == [(0.1, 0.4), pytest.approx((0.8, 1.0))]
    # The pause from 0.4 to 0.8 s is shorter than half a second.
    assert speech_spans(probabilities, 0.1, 0.5, 0.5, 30) == [pytest.approx((0.1, 1.0))]


def test_speech_that_reaches_the_end_and_speech_of_one_frame() -> None:
    assert speech_spans(np.array([0.0, 0.9, 0.9, 0.9]), 0.032, 0.5, 0.1, 30) == [pytest.approx((0.032, 0.128))]
    assert speech_spans(np.array([0.0, 0.9, 0.0]), 0.032, 0.5, 0.1, 30) == []
    assert speech_spans(np.zeros(0), 0.032, 0.5, 0.1, 30) == []


def test_long_speech_is_cut_where_speech_is_least_probable() -> None:
    probabilities = np.full(90, 0.9)
    probabilities[40], probabilities[5] = 0.6, 0.5  # 5 is not in the middle third
    assert speech_spans(probabilities, 0.1, 0.5, 0.3, 5.0) == [(0.0, 4.0), (4.0, 9.0)]
    pieces = speech_spans(np.full(1000, 0.9), 0.1, 0.5, 0.3, 7.0)
    assert max(b - a for a, b in pieces) <= 7.0 + 1e-9 and pieces[0][0] == 0 and pieces[-1][1] == 100
    assert all(before[1] == after[0] for before, after in pairwise(pieces))


def test_padding_stays_in_the_recording_and_neighbours_meet_half_way() -> None:
    assert padded([(0.05, 1.0), (1.1, 2.0)], 0.1, 2.05) == [(0.0, 1.05), (1.05, 2.05)]


def test_segments_of_real_speech_lie_where_the_clips_are(folder: Path, english: list[Utterance]) -> None:
    spans = SEGMENTS(recording(folder / "a.flac"))
    true = spans_of(english[:3])
    for start, end in true:  # a clip may hold a pause of its own
        inside = [s for s in spans if s[1] > start and s[0] < end]
        assert inside and abs(inside[0][0] - start) < 0.25 and abs(inside[-1][1] - end) < 0.35
    assert all(any(s[1] > start and s[0] < end for start, end in true) for s in spans)


def test_segments_do_not_depend_on_whether_the_recording_fits_in_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = SEGMENTS(recording(folder / "a.flac"))
    monkeypatch.setattr(recordings, "IN_MEMORY", 1.0)
    assert SEGMENTS(recording(folder / "a.flac")) == whole


@pytest.mark.parametrize("what", ["silence", "short", "music"])
def test_no_speech_has_no_segments(what: str, tmp_path: Path) -> None:
    time = np.arange(3 * RATE) / RATE
    chord = sum(np.sin(2 * np.pi * f * time) for f in (262, 330, 392)) * 0.1 * (1 + np.sin(2 * np.pi * 2 * time))
    wav = {"silence": np.zeros(3 * RATE), "short": np.full(800, 0.1), "music": chord}[what]
    soundfile.write(tmp_path / "x.wav", wav.astype(np.float32), RATE)
    assert SEGMENTS(recording(tmp_path / "x.wav")) == []


def test_sounds_are_what_is_neither_speech_nor_silent(tmp_path: Path) -> None:
    wav = np.zeros(10 * RATE, np.float32)
    wav[: 4 * RATE] = 0.1 * np.random.default_rng(0).standard_normal(4 * RATE)
    soundfile.write(tmp_path / "x.wav", wav, RATE)
    one = recording(tmp_path / "x.wav")
    one.results["segments"] = [(1.0, 2.0), (3.8, 8.0)]
    # 0 to 1 s and 2 to 3.8 s are noise, of which the second is cut into two; 8 to 10 s is silence.
    assert Sounds(max_seconds=1.0)(one) == [(0.0, 1.0), (2.0, 2.9), (2.9, 3.8)]


# ------------------------------------------------------------------------------------------------ language, transcripts


def test_the_language_of_a_recording_is_that_of_the_weighted_mean() -> None:
    probabilities = [{"en": 0.9, "es": 0.1}, {"en": 0.3, "es": 0.7}]
    spans = [(0.0, 1.0), (1.0, 4.0)]
    assert most_probable(probabilities, spans, False) == [("en", 0.9), ("es", 0.7)]
    # es: (0.1 * 1 + 0.7 * 3) / 4
    assert most_probable(probabilities, spans, True) == [("es", 0.55), ("es", 0.55)]
    assert most_probable([], [], True) == []


def test_the_language_of_a_text(folder: Path) -> None:
    one = recording(folder / "a.flac")
    texts = ["the weather is nice and we go to the park today", "el tiempo es bueno y vamos al parque hoy"]
    one.results.update({"segments": [(0, 1), (1, 2)], "transcripts x": texts})
    assert [code for code, _ in LanguageOfText("transcripts x", False)(one)] == ["en", "es"]
    same = LanguageOfText("transcripts x", True)(one)
    assert same[0] == same[1]
    one.results["transcripts x"] = ["da", ""]  # of all languages Indonesian and Serbian
    assert {code for code, _ in LanguageOfText("transcripts x", False, ("es", "English"))(one)} <= {"en", "es"}
    assert LanguageOfText("transcripts x", False, ("en",))(one) == [("en", 1.0)] * 2
    with pytest.raises(ValueError, match="py3langid does not identify aeb; give --language"):
        LanguageOfText("transcripts x", False, ("aeb", "en"))(one)


def test_the_transcript_that_the_others_agree_with_most() -> None:
    texts = ["the cut sat", "The cat sat.", "the cat sat", "a dog ran off"]
    # Normalised, the second and third are equal, and one edit of 11 characters from the first.
    assert distance(texts[0], texts[1]) == pytest.approx(1 / 11)
    assert distance(texts[1], texts[2]) == 0
    far = distance(texts[1], texts[3])
    result = vote(texts)
    assert result.index == 1 and result.agreement == pytest.approx(1 - (1 / 11 + 0 + far) / 3, abs=1e-4)


def test_votes_of_one_and_of_two_transcripts() -> None:
    assert (vote(["alone"]).index, vote(["alone"]).agreement) == (0, None)
    assert vote(["one", "two"]).index == 0  # as far from each other: the first is trusted more
    assert vote(["", ""]).agreement == 1 and vote(["", "words"]).agreement == 0
    with pytest.raises(ValueError, match="no transcripts"):
        vote([])


def test_numbers_and_scripts_without_spaces() -> None:
    assert distance("Chapter 2", "chapter two", "en") == 0
    assert distance("我 喜欢 音乐", "我喜欢音乐。") == 0


# -------------------------------------------------------------------------------------------------------------- quality


def test_snr_falls_with_noise(english: list[Utterance]) -> None:
    speech = english[0].clip.load(RATE)
    speech = np.concatenate([speech, np.zeros(RATE // 2, np.float32)])
    noise = np.random.default_rng(0).standard_normal(len(speech)).astype(np.float32)
    loud = 10 ** (np.percentile(20 * np.log10(np.abs(speech) + 1e-9), 95) / 20)
    estimates = [snr(speech + loud * 10 ** (-db / 20) * noise, RATE) for db in (40, 20, 10)]
    assert estimates[0] > estimates[1] + 10 > estimates[2] + 15
    assert snr(np.zeros(RATE, np.float32), RATE) == 0


def test_bandwidth_is_that_of_what_was_recorded(english: list[Utterance]) -> None:
    noise = np.random.default_rng(0).standard_normal(48_000)
    spectrum = np.fft.rfft(noise)
    spectrum[4000:] = 0  # bins of 1 Hz
    assert bandwidth(np.fft.irfft(spectrum).astype(np.float32), 48_000) == pytest.approx(4000, abs=250)  # five bins
    assert bandwidth(noise.astype(np.float32), 48_000) == pytest.approx(24_000, abs=100)
    assert bandwidth(np.zeros(10, np.float32), RATE) == 0


# ------------------------------------------------------------------------------------------------------------- speakers


def voices(counts: list[int], noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(embeddings [N, 32] around a random direction for each voice, shuffled; the voice of each)."""
    rng = np.random.default_rng(seed)
    centres = np.linalg.qr(rng.standard_normal((32, len(counts))))[0].T
    labels = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    points = centres[labels] + noise * rng.standard_normal((len(labels), 32))
    return points / np.linalg.norm(points, axis=1, keepdims=True), labels


def same_groups(a: np.ndarray, b: np.ndarray) -> bool:
    return len(set(zip(a.tolist(), b.tolist(), strict=True))) == len(set(a.tolist())) == len(set(b.tolist()))


def test_voices_far_from_each_other_are_clusters() -> None:
    embeddings, labels = voices([12, 7, 3], 0.05)
    assert same_groups(clusters(embeddings, np.ones(22), 0.4), labels)
    assert len(set(clusters(embeddings, np.ones(22), 1.5))) == 1
    assert clusters(embeddings[:1], np.ones(1), 0.4).tolist() == [0]


def test_blocks_give_the_same_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, labels = voices([30, 20, 10], 0.05)
    monkeypatch.setattr("corpora.annotate.speakers.BLOCK", 16)
    assert same_groups(clusters(embeddings, np.ones(60), 0.4), labels)


def test_the_first_speaker_speaks_longest_and_short_segments_join_the_nearest() -> None:
    embeddings, labels = voices([4, 6], 0.05)
    seconds = np.where(labels == 0, 9.0, 2.0)
    seconds[-1] = 0.4
    assigned = np.array(speakers(embeddings, seconds, 0.4))
    assert same_groups(assigned, labels) and set(assigned[labels == 0]) == {0}
    assert speakers(np.zeros((0, 32)), [], 0.4) == []
    assert len(set(speakers(embeddings, np.full(10, 0.5), 0.4))) == 2  # all are short
