"""The losses against independent formulas in float64, and the discriminator's by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from audiorl.eval.metrics.speech import mel_filters
from tests.support.unified_codec import clips
from tokenizers_audio.unified.discriminator import (
    Discriminator,
    adversarial_loss,
    discriminator_loss,
    feature_matching_loss,
)
from tokenizers_audio.unified.losses import SpectralLoss


def spectra(wav: np.ndarray, size: int) -> np.ndarray:
    """[frames, bins] of one recording with zeros around it, in float64."""
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)
    padded = np.pad(wav, size // 2)
    starts = range(0, len(padded) - size + 1, size // 4)
    return np.abs(np.fft.rfft(np.stack([padded[s : s + size] * window for s in starts])))


def test_spectral_losses_equal_their_formulas() -> None:
    x = clips(1, 4)
    y = x.roll(7, -1) * 0.7
    stft, mel = SpectralLoss(24_000, (256, 512), (512,), (40,))(x, y)
    expected = []
    for size in (256, 512):
        a, b = spectra(x[0].double().numpy(), size), spectra(y[0].double().numpy(), size)
        logs = np.abs(np.log(np.maximum(a, 1e-5)) - np.log(np.maximum(b, 1e-5))).mean()
        expected.append(np.linalg.norm(a - b) / np.linalg.norm(a) + logs)
    assert float(stft) == pytest.approx(np.mean(expected), rel=1e-4)
    filters = mel_filters(24_000, 512, 40).T
    a, b = a @ filters, b @ filters
    logs = np.log10(np.maximum(a, 1e-5)) - np.log10(np.maximum(b, 1e-5))
    assert float(mel) == pytest.approx(np.abs(logs).mean(), rel=1e-4)


def test_equal_recordings_have_no_distance_and_silence_has_finite_gradients() -> None:
    loss = SpectralLoss(24_000)
    x = clips(2, 4)
    stft, mel = loss(x, x.clone())
    assert float(stft) == 0 == float(mel)
    silent = torch.zeros_like(x).requires_grad_()
    (sum(loss(x, silent)) + sum(loss(torch.zeros_like(x), silent))).backward()  # type: ignore[union-attr]
    assert silent.grad is not None and silent.grad.isfinite().all()


def judgement(*scores: float, features: tuple[float, ...] = ()) -> list[list[Tensor]]:
    """One resolution a score, all with the same features."""
    return [[*(torch.tensor([f]) for f in features), torch.tensor([s])] for s in scores]


def test_hinge_losses_by_hand() -> None:
    real, fake = judgement(2.0, 0.5), judgement(-3.0, 0.25)
    # resolution 1: 0 + 0; resolution 2: 0.5 + 1.25
    assert float(discriminator_loss(real, fake)) == pytest.approx(1.75 / 2)
    assert float(adversarial_loss(fake)) == pytest.approx((4 + 0.75) / 2)


def test_feature_matching_by_hand() -> None:
    real, fake = judgement(0.0, features=(2.0, -4.0)), judgement(9.0, features=(1.0, -4.5))
    assert float(feature_matching_loss(real, fake)) == pytest.approx((1 / 2 + 0.5 / 4) / 2)


def test_the_discriminator_hears_every_resolution() -> None:
    torch.manual_seed(0)
    found = Discriminator((512, 256), channels=4)(clips(2, 4))
    assert len(found) == 2 and all(len(scale) == 6 and scale[-1].shape[:2] == (2, 1) for scale in found)
    frames = [scale[-1].shape[2] for scale in found]
    assert frames == [math.ceil((4 * 960 + 1) / 128), math.ceil((4 * 960 + 1) / 64)]
