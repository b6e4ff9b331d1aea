"""From waveforms to the log-mel frames that Whisper-style audio encoders take."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor


def log_mel(extractor: WhisperFeatureExtractor, wav: np.ndarray) -> Tensor:
    """[mel bins, frames] float32 for mono samples [T] at the extractor's rate; frames = ceil(T / hop).

    Equal to what the models' processors compute with the clip padded to 30 s and the padding cut off again, without
    paying for the 30 s: only the zeros that reach into the last analysis window are added.
    """
    return log_mels(extractor, [wav])[0]


def log_mels(extractor: WhisperFeatureExtractor, wavs: Sequence[np.ndarray], device: str = "cpu") -> list[Tensor]:
    """`log_mel` of each, on the CPU; those of similar length are best given together. device: where it is computed."""
    hop = extractor.hop_length
    frames = [math.ceil(len(wav) / hop) for wav in wavs]
    padded = np.zeros((len(wavs), (max(frames) + math.ceil(extractor.n_fft / hop) + 1) * hop), dtype=np.float32)
    for row, wav in zip(padded, wavs, strict=True):
        row[: len(wav)] = wav
    # Under autocast its product with the mel filters would be bfloat16, which numpy lacks.
    with torch.autocast(torch.device(device).type, enabled=False):
        out = extractor(
            padded,
            sampling_rate=extractor.sampling_rate,
            padding=False,
            truncation=False,
            return_tensors="pt",
            device=device,
        )
    return [mel[:, :count] for mel, count in zip(out["input_features"], frames, strict=True)]


def padded_mel(mel: Tensor, frames: int) -> Tensor:
    """[mel bins, frames]: the clip's frames and then what the extractor gives for silence, as with padded samples."""
    # That is 10^-10, at most 8 decades below the loudest bin, then (x + 4) / 4.
    padded = (mel.max() - 2.0).clamp(min=-1.5).repeat(mel.shape[0], frames)
    padded[:, : mel.shape[1]] = mel
    return padded


def require_in_window(frames: int, window: int, encoder: str) -> None:
    """Raise ValueError, in seconds, for a clip of more frames than an encoder with a fixed window reads."""
    if frames > window:
        raise ValueError(
            f"audio of {frames / 100:.1f} s is longer than the {window / 100:.0f} s that {encoder} encodes; "
            "cut the clip with start and duration"
        )


def flat_mels(mels: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Clips side by side, as the Omni audio encoders take them: ([mel bins, all frames], lengths [clips])."""
    return torch.cat(list(mels), dim=1), torch.tensor([m.shape[1] for m in mels])
