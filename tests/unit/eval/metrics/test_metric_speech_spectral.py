"""Distances between waveforms against torch's STFT, other mel filters, closed forms, and the ITU's own scale."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.audio_utils import mel_filter_bank

from audiorl.data.corpus import Utterance
from audiorl.eval.metrics.speech import (
    PESQ_WORST,
    SI_SDR_RANGE,
    magnitudes,
    mel_distance,
    mel_filters,
    pesq_wb,
    si_sdr,
    stft_distance,
    stoi,
)

RATE = 16_000


@pytest.fixture(scope="module")
def pair() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    wav = 0.3 * np.sin(2 * np.pi * 220 * np.arange(9001) / RATE) + 0.05 * rng.standard_normal(9001)
    return wav, 0.8 * wav + 0.02 * rng.standard_normal(9001)


def torch_magnitudes(wav: np.ndarray, window: int) -> torch.Tensor:
    wave = torch.from_numpy(np.asarray(wav, np.float64))
    hann = torch.hann_window(window, dtype=torch.float64)  # periodic
    return torch.stft(
        wave, window, window // 4, window=hann, center=True, pad_mode="reflect", return_complex=True
    ).abs()


def torch_distance(x: torch.Tensor, y: torch.Tensor) -> float:
    logs = torch.nn.functional.l1_loss(x.clamp(1e-5).pow(2).log10(), y.clamp(1e-5).pow(2).log10())
    return float(logs + torch.nn.functional.l1_loss(x, y))


@pytest.mark.parametrize("window", [64, 512, 2048])
def test_magnitudes_are_those_of_torch(pair: tuple[np.ndarray, np.ndarray], window: int) -> None:
    wanted = torch_magnitudes(pair[0], window).T.numpy()
    np.testing.assert_allclose(magnitudes(pair[0], window), wanted, atol=1e-10)


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


def test_the_floor_bounds_silence() -> None:
    """Both below 1e-5 count as equal in the logarithms."""
    quiet = np.full(4096, 1e-12)
    assert stft_distance(quiet, np.zeros(4096)) < 1e-8


@pytest.mark.parametrize(("rate", "window", "bands"), [(16_000, 512, 80), (24_000, 2048, 150), (44_100, 1024, 40)])
def test_mel_filters_are_slaneys(rate: int, window: int, bands: int) -> None:
    wanted = mel_filter_bank(window // 2 + 1, bands, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney").T
    np.testing.assert_allclose(mel_filters(rate, window, bands), wanted, atol=1e-12)


def test_mel_distance_against_torch(pair: tuple[np.ndarray, np.ndarray]) -> None:
    wanted = 0.0
    for window, bands in ((2048, 150), (512, 80)):
        filters = torch.from_numpy(
            mel_filter_bank(window // 2 + 1, bands, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney").T
        )
        wanted += torch_distance(*(filters @ torch_magnitudes(wav, window) for wav in pair))
    assert mel_distance(*pair, RATE) == pytest.approx(wanted, abs=1e-10)


def test_mel_distance_wants_bands_for_each_window(pair: tuple[np.ndarray, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="2 windows but 1 numbers of bands"):
        mel_distance(*pair, RATE, bands=(80,))


def test_short_recordings_have_a_distance() -> None:
    for length in (1, 2, 100, 1025):
        wav = np.full(length, 0.1)
        assert math.isfinite(stft_distance(wav, -wav)) and mel_distance(wav, wav, RATE) == 0.0


def test_si_sdr_by_hand() -> None:
    """A sine with a tenth of its amplitude in cosine, which is orthogonal: 20 dB, whatever the scale and the mean."""
    time = np.arange(8000) / 8000
    sine, cosine = np.sin(2 * np.pi * 50 * time), np.cos(2 * np.pi * 50 * time)
    assert si_sdr(sine, sine + 0.1 * cosine) == pytest.approx(20.0, abs=1e-9)
    assert si_sdr(sine, 7 * (sine + 0.1 * cosine) + 3) == pytest.approx(20.0, abs=1e-9)
    assert si_sdr(sine, cosine) == SI_SDR_RANGE[0]
    assert si_sdr(sine, sine + cosine) == pytest.approx(0.0, abs=1e-9)


def test_si_sdr_at_its_ends() -> None:
    wav = np.random.default_rng(0).standard_normal(1000)
    assert si_sdr(wav, wav) == SI_SDR_RANGE[1]
    assert si_sdr(wav, np.zeros(1000)) == SI_SDR_RANGE[0]
    assert math.isnan(si_sdr(np.full(1000, 0.5), wav))


@given(st.floats(0.01, 100), st.integers(0, 1000))
def test_si_sdr_does_not_depend_on_scale(scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, noise = rng.standard_normal(500), rng.standard_normal(500)
    assert si_sdr(x, scale * (x + noise)) == pytest.approx(si_sdr(x, x + noise), abs=1e-6)


@pytest.mark.parametrize("measure", [stft_distance, si_sdr, lambda x, y: mel_distance(x, y, RATE)])
def test_what_cannot_be_compared(measure) -> None:
    good = np.zeros(100)
    with pytest.raises(ValueError, match="reference has 100 samples, estimate 99"):
        measure(good, good[1:])
    with pytest.raises(ValueError, match="estimate: 1 of 100 samples are NaN"):
        measure(good, np.where(np.arange(100) == 3, np.nan, 0.0))
    with pytest.raises(ValueError, match=r"reference: shape \(0,\)"):
        measure(np.zeros(0), np.zeros(0))
    with pytest.raises(ValueError, match=r"reference: shape \(100, 2\)"):
        measure(np.zeros((100, 2)), good)


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


def test_stoi_of_too_little_speech_is_undefined() -> None:
    pytest.importorskip("pystoi")
    assert math.isnan(stoi(np.zeros(RATE), np.ones(RATE), RATE))
    blip = np.sin(np.arange(1600) / 3)
    assert math.isnan(stoi(blip, blip, RATE))


def test_pesq_spans_its_scale(spoken: np.ndarray) -> None:
    pytest.importorskip("pesq")
    assert pesq_wb(spoken, spoken, RATE) == pytest.approx(4.644, abs=1e-3)  # the top of ITU-T P.862.2's mapping
    values = [pesq_wb(spoken, noisy(spoken, decibels), RATE) for decibels in (40, 15, 0)]
    assert values == sorted(values, reverse=True) and values[0] > 3.5 and values[-1] < 1.5
    high = max(0, 3 * len(spoken) // 2)
    assert pesq_wb(np.repeat(spoken, 3)[::2][:high], np.repeat(spoken, 3)[::2][:high], 24_000) > 4.6


def test_pesq_without_speech(spoken: np.ndarray) -> None:
    pytest.importorskip("pesq")
    assert math.isnan(pesq_wb(np.zeros(RATE), np.ones(RATE), RATE))
    assert math.isnan(pesq_wb(spoken[:2000], spoken[:2000], RATE))
    assert pesq_wb(spoken, np.zeros_like(spoken), RATE) == PESQ_WORST
