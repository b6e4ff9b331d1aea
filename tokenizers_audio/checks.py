"""What goes into a codec: one clear error for audio and codes that it cannot mean."""

from __future__ import annotations

import torch
from torch import Tensor


def check_wav(wav: Tensor) -> None:
    """Finite floats in [-1, 1], of any shape. Raises ValueError."""
    if not wav.dtype.is_floating_point:
        raise ValueError(f"samples are {wav.dtype}; give floats in [-1, 1] (divide int16 by 32768)")
    if wav.numel() == 0:
        return
    peak = float(wav.detach().abs().max())  # NaN and infinity come through the maximum
    if not peak <= 1:
        finite = torch.isfinite(wav)
        if not finite.all():
            raise ValueError(f"{int((~finite).sum())} of {wav.numel()} samples are NaN or infinite; repair the audio")
        raise ValueError(
            f"samples reach {peak:.4g}, beyond [-1, 1]; scale them (int16 by 1/32768), or let tokenizers_audio.prepare "
            "cut off what resampling and lossy formats overshoot"
        )


def batch_of_wavs(wav: Tensor) -> Tensor:
    """[T] or [B, T] as [B, T], checked. Raises ValueError."""
    if wav.ndim not in (1, 2):
        raise ValueError(
            f"audio must be [T] or [B, T], mono, got {list(wav.shape)}; tokenizers_audio.prepare mixes down"
        )
    if wav.numel() == 0:
        raise ValueError(f"audio holds no samples (shape {list(wav.shape)}); leave it out")
    check_wav(wav)
    return wav if wav.ndim == 2 else wav[None]


def check_codes(codes: Tensor, num_codebooks: int, codebook_size: int, shape: str = "[B, Q, F]") -> None:
    """Codes of `shape` for a codec of this geometry. Raises ValueError."""
    if codes.ndim != shape.count(",") + 1:
        raise ValueError(f"codes must be {shape}, got {list(codes.shape)}")
    if codes.dtype.is_floating_point or codes.dtype is torch.bool:
        raise ValueError(f"codes must be integers, got {codes.dtype}")
    if codes.shape[-2] != num_codebooks:
        raise ValueError(f"codes {shape} are {list(codes.shape)}; this codec has Q = {num_codebooks} codebooks")
    if codes.numel() == 0:
        return
    low, high = int(codes.min()), int(codes.max())
    if low < 0 or high >= codebook_size:
        raise ValueError(
            f"codes reach from {low} to {high}, this codec's from 0 to {codebook_size - 1}; BOS and EOS of a delay "
            "pattern are taken off by tokenizers_audio.delay.deinterleave"
        )
