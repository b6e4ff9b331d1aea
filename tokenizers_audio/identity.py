"""Which codec made some codes: another one would decode them to noise."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def identity(
    family: str, sample_rate: int, frame_rate: float, num_codebooks: int, codebook_size: int, model: nn.Module
) -> str:
    """One line, e.g. `mimi 24000 Hz 12.5 frames/s 8x2048 3f2a9c04d1b7e658`: family, geometry, hash of all weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    geometry = f"{sample_rate} Hz {frame_rate:.6g} frames/s {num_codebooks}x{codebook_size}"
    return f"{family} {geometry} {digest.hexdigest()[:16]}"
