"""Speech and codes in numbers: by hand, against torch's STFT, other mel filters, and the ITU's own scale."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from audiorl.data.corpus import Utterance
from audiorl.eval.metrics.codes import CodebookUse, bitrate, codebook_use, count_codes, entropy_bitrate
from audiorl.eval.metrics.speech import (
    PESQ_WORST,
    SI_SDR_RANGE,
    clipped_share,
    cosine,
    duration_ratio,
    frame_levels,
    level,
    magnitudes,
    mel_distance,
    mel_filters,
    pesq_wb,
    real_time_factor,
    si_sdr,
    silent_share,
    stft_distance,
    stoi,
    voice_cosines,
)

LOW_RATE = 8000
FRAME = 200  # samples in 25 ms


def test_levels_of_known_waves() -> None:
    square = np.where(np.arange(800) % 2, 0.5, -0.5)
    assert level(square) == pytest.approx(20 * math.log10(0.5))
    sine = np.sin(2 * np.pi * np.arange(8000) / 80)
    assert level(sine) == pytest.approx(-3.0103, abs=1e-4)
    assert level(np.zeros(10)) == -math.inf
    nothing = np.zeros(0, np.float32)
    assert (level(nothing), silent_share(nothing, LOW_RATE), clipped_share(nothing)) == (-math.inf, 1.0, 0.0)


def test_silence_is_counted_by_frames() -> None:
    wav = np.concatenate([np.full(2 * FRAME, 0.1), np.zeros(FRAME), np.full(FRAME, 1e-3)])  # -20, -20, -inf, -60 dB
    assert frame_levels(wav, LOW_RATE) == pytest.approx([-20, -20, -math.inf, -60])
    assert silent_share(wav, LOW_RATE) == 0.5
    assert silent_share(wav, LOW_RATE, threshold=-70) == 0.25
    tail = np.concatenate([np.full(FRAME, 0.1), np.full(3, 0.01)])
    assert frame_levels(tail, LOW_RATE) == pytest.approx([-20, -40])  # a short last frame has its own mean


def test_clipping_and_length() -> None:
    wav = np.array([0.0, 0.999, -1.0, 1.2, 0.5, 0.998, 0.0, 0.0], np.float32)
    assert clipped_share(wav) == 3 / 8
    assert clipped_share(wav, threshold=0.5) == 5 / 8
    for a, b, ratio in ((2, 2, 1), (1, 2, 0.5), (2, 1, 0.5), (0, 3, 0), (3, 0, 0), (0, 0, 1)):
        assert duration_ratio(a, b) == ratio


def test_codebook_use_by_hand() -> None:
    rates = [bitrate(*codec) for codec in ((25, 8, 1024), (12.5, 32, 2048), (75, 8, 1024))]
    assert rates == [2000, 4400, 6000]  # Higgs Audio V2, Mimi with all codebooks, Encodec at 6 kbit/s
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


def test_cosines_of_a_conversation() -> None:
    a, b, between = np.array([1.0, 0.0]), np.array([0.0, 2.0]), np.array([3.0, 3.0])
    half = math.sqrt(0.5)
    assert cosine(a, between) == pytest.approx(half)
    # turns of A: a and between; turns of B: b twice
    cosines = voice_cosines([a, b, between, b], ["A", "B", "A", "B"])
    assert cosines == pytest.approx(((half + 1) / 2, (0 + 0 + half + half) / 4))
    # a turn without a voice counts as the worst
    assert voice_cosines([a, None, a], ["A", "A", "A"])[0] == pytest.approx((0 + 1 + 0) / 3)
    assert voice_cosines([a, None], ["A", "B"])[1] == 1.0
    assert math.isnan(voice_cosines([a, a], ["A", "A"])[1])


RATE = 16_000


@pytest.fixture(scope="module")
def pair() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    wav = 0.3 * np.sin(2 * np.pi * 220 * np.arange(9001) / RATE) + 0.05 * rng.standard_normal(9001)
    return wav, 0.8 * wav + 0.02 * rng.standard_normal(9001)


def torch_magnitudes(wav: np.ndarray, window: int) -> torch.Tensor:
    wave = torch.from_numpy(np.asarray(wav, np.float64))
    hann = torch.hann_window(window, dtype=torch.float64)  # periodic
    return torch.stft(wave, window, window // 4, window=hann, center=True, return_complex=True).abs()


def torch_distance(x: torch.Tensor, y: torch.Tensor) -> float:
    logs = torch.nn.functional.l1_loss(x.clamp(1e-5).pow(2).log10(), y.clamp(1e-5).pow(2).log10())
    return float(logs + torch.nn.functional.l1_loss(x, y))


def test_stft_distance_against_torch(pair: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = pair
    wanted = sum(torch_distance(torch_magnitudes(x, w), torch_magnitudes(y, w)) for w in (2048, 512))
    assert stft_distance(x, y) == pytest.approx(wanted, abs=1e-10)
    assert wanted > 0.1


def test_stft_distance_of_a_scaled_copy_has_a_closed_form(pair: tuple[np.ndarray, np.ndarray]) -> None:
    """Halving adds log10 4 per window in the logarithms and half of each magnitude."""
    x = pair[0]
    wanted = sum(math.log10(4) + magnitudes(x, w).mean() / 2 for w in (2048, 512))
    assert stft_distance(x, x / 2) == pytest.approx(wanted, abs=1e-9)
    assert stft_distance(x, x) == 0.0
    for short in (np.full(length, 0.1) for length in (1, 2, 100, 1025)):
        assert math.isfinite(stft_distance(short, -short)) and mel_distance(short, short, RATE) == 0.0


def test_mel_distance_against_torch(pair: tuple[np.ndarray, np.ndarray]) -> None:
    wanted = 0.0
    for window, bands in ((2048, 150), (512, 80)):
        filters = torch.from_numpy(mel_filters(RATE, window, bands))
        wanted += torch_distance(*(filters @ torch_magnitudes(wav, window) for wav in pair))
    assert mel_distance(*pair, RATE) == pytest.approx(wanted, abs=1e-10)


def test_si_sdr_by_hand() -> None:
    """A sine with a tenth of its amplitude in cosine, which is orthogonal: 20 dB, whatever the scale and the mean."""
    time = np.arange(8000) / 8000
    sine, cosine = np.sin(2 * np.pi * 50 * time), np.cos(2 * np.pi * 50 * time)
    assert si_sdr(sine, sine + 0.1 * cosine) == pytest.approx(20.0, abs=1e-9)
    assert si_sdr(sine, 7 * (sine + 0.1 * cosine) + 3) == pytest.approx(20.0, abs=1e-9)
    assert si_sdr(sine, cosine) == SI_SDR_RANGE[0]
    assert si_sdr(sine, sine + cosine) == pytest.approx(0.0, abs=1e-9)
    assert si_sdr(sine, sine) == SI_SDR_RANGE[1] and si_sdr(sine, np.zeros(8000)) == SI_SDR_RANGE[0]
    assert math.isnan(si_sdr(np.full(8000, 0.5), sine))


# -- by the libraries --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spoken(speech: list[Utterance]) -> np.ndarray:
    return max(speech, key=lambda u: u.duration).clip.load(RATE)


def noisy(wav: np.ndarray, decibels: float) -> np.ndarray:
    noise = np.random.default_rng(0).standard_normal(len(wav))
    return wav + noise * np.sqrt(np.mean(wav**2) / np.mean(noise**2)) * 10 ** (-decibels / 20)


def test_stoi_falls_with_noise(spoken: np.ndarray) -> None:
    pytest.importorskip("pystoi")
    values = [stoi(spoken, noisy(spoken, decibels), RATE) for decibels in (40, 10, 0, -20)]
    assert stoi(spoken, spoken, RATE) == pytest.approx(1.0, abs=1e-6)
    assert values == sorted(values, reverse=True) and values[0] > 0.95 and values[-1] < 0.4
    assert stoi(spoken, noisy(spoken, 0), RATE, extended=True) < stoi(spoken, noisy(spoken, 0), RATE)
    assert stoi(spoken, np.zeros_like(spoken), RATE) == pytest.approx(0.0, abs=0.05)
    blip = np.sin(np.arange(1600) / 3)  # too little speech
    assert math.isnan(stoi(np.zeros(RATE), np.ones(RATE), RATE)) and math.isnan(stoi(blip, blip, RATE))


def test_pesq_spans_its_scale(spoken: np.ndarray) -> None:
    pytest.importorskip("pesq")
    assert pesq_wb(spoken, spoken, RATE) == pytest.approx(4.644, abs=1e-3)  # the top of ITU-T P.862.2's mapping
    values = [pesq_wb(spoken, noisy(spoken, decibels), RATE) for decibels in (40, 15, 0)]
    assert values == sorted(values, reverse=True) and values[0] > 3.5 and values[-1] < 1.5
    faster = np.repeat(spoken, 3)[::2]
    assert pesq_wb(faster, faster, 24_000) > 4.6
    assert math.isnan(pesq_wb(np.zeros(RATE), np.ones(RATE), RATE))
    assert math.isnan(pesq_wb(spoken[:2000], spoken[:2000], RATE))
    assert pesq_wb(spoken, np.zeros_like(spoken), RATE) == PESQ_WORST


GOOD = np.zeros(100)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: count_codes([np.array([[0]]), np.array([[0, 8]])], 1, 8), "broadcast"),
        (lambda: count_codes([np.array([[-1, 0]])], 1, 8), "negative"),
        (lambda: codebook_use(count_codes([np.zeros((2, 0), np.int64)], 2, 4)), "codebook 0: no codes"),
        (lambda: duration_ratio(1.0, math.nan), "durations"),
        (lambda: duration_ratio(-1.0, 1.0), "durations"),
        (lambda: real_time_factor(0.5, 0.0), "0 s of audio"),
        (lambda: cosine(np.zeros(3), np.ones(3)), "no direction"),
        (lambda: cosine(np.ones(2), np.ones(3)), "same encoder"),
        (lambda: level(np.array([np.nan])), "samples: "),
        (lambda: level(np.zeros((2, 3))), "samples: "),
        (lambda: level(np.zeros(3, int)), "samples: "),
        (lambda: si_sdr(GOOD, GOOD[1:]), "reference has 100 samples, estimate 99"),
        (lambda: stft_distance(GOOD, np.where(np.arange(100) == 3, np.nan, 0.0)), "estimate: 1 of 100 samples are NaN"),
        (lambda: si_sdr(GOOD[:0], GOOD[:0]), "reference has 0 samples"),
        (lambda: mel_distance(np.zeros((100, 2)), GOOD, RATE), r"reference: float64 of shape \(100, 2\)"),
    ],
)
def test_bad_input(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
