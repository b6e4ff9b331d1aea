"""Distances between two recordings that are differentiable: spectra at several resolutions.

Shapes: B recordings, T samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from tokenizers_audio.unified.spectrum import mel_filters

STFT_WINDOWS = (512, 1024, 2048)
MEL_WINDOWS = (32, 64, 128, 256, 512, 1024, 2048)
MEL_BANDS = (5, 10, 20, 40, 80, 160, 320)


class SpectralLoss(nn.Module):
    """One multi-scale STFT and one multi-scale mel loss, from the same spectra where windows coincide.

    stft (Yamamoto et al. 2020, arXiv 1910.11480), the mean over windows of

        ‖ |X| - |Y| ‖_F / ‖ |X| ‖_F  +  mean | ln |X| - ln |Y| |

    mel (Kumar et al. 2023, arXiv 2306.06546), the mean over windows of mean | log10 mel(X) - log10 mel(Y) |, with mel
    energies floored at 1e-5. X is the original, Y the reconstruction. Hann windows, a hop of a quarter.
    """

    def __init__(
        self,
        sample_rate: int,
        stft_windows: Sequence[int] = STFT_WINDOWS,
        mel_windows: Sequence[int] = MEL_WINDOWS,
        mel_bands: Sequence[int] = MEL_BANDS,
    ):
        super().__init__()
        if len(mel_windows) != len(mel_bands):
            raise ValueError(f"{len(mel_windows)} mel windows, but {len(mel_bands)} numbers of bands")
        self.stft_windows = tuple(stft_windows)
        self.mel_windows = tuple(mel_windows)
        for size in {*stft_windows, *mel_windows}:
            self.register_buffer(f"window_{size}", torch.hann_window(size), persistent=False)
        for size, bands in zip(mel_windows, mel_bands, strict=True):
            filters = mel_filters(sample_rate, size // 2 + 1, bands)
            self.register_buffer(f"filters_{size}", filters, persistent=False)

    def forward(self, original: Tensor, reconstruction: Tensor) -> tuple[Tensor, Tensor]:
        """(stft, mel) of [B, T] and [B, T], scalars in float32."""
        stft, mel = [], []
        for size in sorted({*self.stft_windows, *self.mel_windows}):
            with torch.no_grad():
                x = self._magnitudes(original.float(), size)
            y = self._magnitudes(reconstruction.float(), size)
            if size in self.stft_windows:
                convergence = torch.linalg.vector_norm(x - y) / torch.linalg.vector_norm(x).clamp_min(1e-5)
                logs = x.clamp_min(1e-5).log() - y.clamp_min(1e-5).log()
                stft.append(convergence + logs.abs().mean())
            if size in self.mel_windows:
                filters = cast(Tensor, self.get_buffer(f"filters_{size}"))[None]
                a, b = ((filters.mT @ s).clamp_min(1e-5).log10() for s in (x, y))
                mel.append((a - b).abs().mean())
        nothing = reconstruction.new_zeros(())
        return sum(stft, nothing) / max(len(stft), 1), sum(mel, nothing) / max(len(mel), 1)

    def _magnitudes(self, wav: Tensor, size: int) -> Tensor:
        """[B, size / 2 + 1, frames]"""
        window = self.get_buffer(f"window_{size}")
        spectra = torch.stft(wav, size, size // 4, window=window, pad_mode="constant", return_complex=True)
        # The root's slope is infinite at zero, where silence is.
        return (spectra.real.square() + spectra.imag.square()).clamp_min(1e-14).sqrt()
