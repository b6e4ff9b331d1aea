"""What a waveform, a code and a voice are worth in numbers, against values computed by hand."""

import math

import numpy as np
import pytest

from audiorl.eval.metrics.codes import CodebookUse, bitrate, codebook_use, count_codes, entropy_bitrate
from audiorl.eval.metrics.speech import (
    VoiceCosines,
    clipped_share,
    cosine,
    duration_ratio,
    frame_levels,
    level,
    real_time_factor,
    silent_share,
    voice_cosines,
)

RATE = 8000
FRAME = 200  # samples in 25 ms


def test_levels_of_known_waves() -> None:
    square = np.where(np.arange(800) % 2, 0.5, -0.5)
    assert level(square) == pytest.approx(20 * math.log10(0.5))
    sine = np.sin(2 * np.pi * np.arange(8000) / 80)
    assert level(sine) == pytest.approx(-3.0103, abs=1e-4)
    assert level(np.zeros(10)) == -math.inf


def test_silence_is_counted_by_frames() -> None:
    wav = np.concatenate([np.full(2 * FRAME, 0.1), np.zeros(FRAME), np.full(FRAME, 1e-3)])  # -20, -20, -inf, -60 dB
    assert frame_levels(wav, RATE) == pytest.approx([-20, -20, -math.inf, -60])
    assert silent_share(wav, RATE) == 0.5
    assert silent_share(wav, RATE, threshold=-70) == 0.25
    tail = np.concatenate([np.full(FRAME, 0.1), np.full(3, 0.01)])
    assert frame_levels(tail, RATE) == pytest.approx([-20, -40])  # a short last frame has its own mean


def test_clipping_and_length() -> None:
    wav = np.array([0.0, 0.999, -1.0, 1.2, 0.5, 0.998, 0.0, 0.0], np.float32)
    assert clipped_share(wav) == 3 / 8
    assert clipped_share(wav, threshold=0.5) == 5 / 8


def test_nothing_is_defined() -> None:
    nothing = np.zeros(0, np.float32)
    assert (level(nothing), silent_share(nothing, RATE), clipped_share(nothing)) == (-math.inf, 1.0, 0.0)


@pytest.mark.parametrize("wav", [np.array([0.0, np.nan]), np.array([np.inf]), np.zeros((2, 3)), np.zeros(3, np.int16)])
def test_what_is_no_waveform_is_refused(wav: np.ndarray) -> None:
    with pytest.raises(ValueError, match="samples: "):
        level(wav)


@pytest.mark.parametrize(("a", "b", "ratio"), [(2, 2, 1), (1, 2, 0.5), (2, 1, 0.5), (0, 3, 0), (3, 0, 0), (0, 0, 1)])
def test_duration_ratio(a: float, b: float, ratio: float) -> None:
    assert duration_ratio(a, b) == ratio


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_durations_that_are_none(bad: float) -> None:
    with pytest.raises(ValueError, match="durations"):
        duration_ratio(1.0, bad)


def test_real_time_factor() -> None:
    assert real_time_factor(0.5, 2.0) == 0.25
    with pytest.raises(ValueError, match="0 s of audio"):
        real_time_factor(0.5, 0.0)


# -- codes -------------------------------------------------------------------------------------------------------------


def test_bitrates_of_published_codecs() -> None:
    assert bitrate(25, 8, 1024) == 2000.0  # Higgs Audio V2
    assert bitrate(12.5, 32, 2048) == 4400.0  # Mimi with all codebooks
    assert bitrate(75, 8, 1024) == 6000.0  # Encodec at 6 kbit/s


def test_codebook_use_by_hand() -> None:
    # codebook 0: four codes, once each of eight; codebook 1: 3/4 and 1/4
    codes = [np.array([[0, 1], [5, 5]]), np.array([[2, 3], [5, 0]])]
    counts = count_codes(codes, 2, 8)
    assert counts.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 3, 0, 0]]
    first, second = codebook_use(counts)
    assert (first.used, first.entropy, first.perplexity) == (0.5, 2.0, 4.0)
    entropy = 0.75 * math.log2(4 / 3) + 0.25 * 2
    assert (second.used, second.entropy) == (0.25, pytest.approx(entropy, abs=1e-12))
    assert entropy_bitrate(25, (first, second)) == pytest.approx(25 * (2 + entropy))
    assert codebook_use(np.array([[7, 0]]))[0] == CodebookUse(0.5, 0.0)


def test_empty_recordings_count_nothing() -> None:
    counts = count_codes([np.zeros((2, 0), np.int64)], 2, 4)
    assert counts.sum() == 0
    with pytest.raises(ValueError, match="codebook 0: no codes"):
        codebook_use(counts)


@pytest.mark.parametrize("codes", [np.array([[0, 8]]), np.array([[-1, 0]])])
def test_codes_out_of_range(codes: np.ndarray) -> None:
    with pytest.raises(ValueError, match="recording 1: codes from"):
        count_codes([np.array([[0]]), codes], 1, 8)


def test_wrong_number_of_codebooks() -> None:
    with pytest.raises(ValueError, match=r"recording 0: codes of shape \(1, 2\), expected \[3, F\]"):
        count_codes([np.array([[0, 1]])], 3, 8)


# -- voices ------------------------------------------------------------------------------------------------------------


def test_cosines_of_a_conversation() -> None:
    a, b = np.array([1.0, 0.0]), np.array([0.0, 2.0])
    between = np.array([3.0, 3.0])
    assert cosine(a, between) == pytest.approx(math.sqrt(0.5))
    # turns of A: a and between; turns of B: b twice
    cosines = voice_cosines([a, b, between, b], ["A", "B", "A", "B"])
    assert cosines.intra == pytest.approx((math.sqrt(0.5) + 1) / 2)
    assert cosines.inter == pytest.approx((0 + 0 + math.sqrt(0.5) + math.sqrt(0.5)) / 4)
    assert cosines.similarity == pytest.approx(math.sqrt(cosines.intra * (1 - cosines.inter)))


def test_a_turn_without_a_voice_counts_as_the_worst() -> None:
    a = np.array([1.0, 0.0])
    cosines = voice_cosines([a, None, a], ["A", "A", "A"])
    assert cosines.intra == pytest.approx((0 + 1 + 0) / 3)
    assert voice_cosines([a, None], ["A", "B"]).inter == 1.0


def test_similarity_stays_defined() -> None:
    assert VoiceCosines(1.0, -0.5).similarity == 1.0  # no better than unlike
    assert VoiceCosines(-0.2, 0.1).similarity == 0.0
    assert math.isnan(VoiceCosines(math.nan, 0.1).similarity)
    alone = voice_cosines([np.array([1.0]), np.array([2.0])], ["A", "A"])
    assert alone.intra == 1.0 and math.isnan(alone.inter) and math.isnan(alone.similarity)


def test_vectors_without_direction() -> None:
    with pytest.raises(ValueError, match="no direction"):
        cosine(np.zeros(3), np.ones(3))
    with pytest.raises(ValueError, match="same encoder"):
        cosine(np.ones(2), np.ones(3))
    with pytest.raises(ValueError, match="2 embeddings but 1 speakers"):
        voice_cosines([np.ones(2), np.ones(2)], ["A"])
