"""Granite Speech and Granite Speech Plus (IBM, arXiv 2505.08699): a Conformer, a Q-Former over windows, Granite.

transformers' class does not divide the logits by `logits_scaling`, as GraniteForCausalLM and vLLM do. We divide: those
that are not divided are 8 times too sharp, with the same most probable tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import SequenceFeatureExtractor
from transformers.audio_utils import mel_filter_bank

from audiorl.models.families.generic import AudioLLM
from audiorl.models.features import HOP, RATE, Features

MELS, BINS, WINDOW = 80, 257, 400


class GraniteSpeechFeatureExtractor(SequenceFeatureExtractor):
    """Stand for transformers' class of this name, which only torchaudio can make."""

    model_input_names: ClassVar[list[str]] = ["input_features"]

    def __init__(self, feature_size: int = MELS, sampling_rate: int = RATE, padding_value: float = 0.0, **others: Any):
        super().__init__(feature_size, sampling_rate, padding_value, **others)


class Granite(AudioLLM):
    """Two frames of 80 mels side by side; `downsample_rate` encoder frames become a token, in whole windows."""

    audio_encoder_at = "model.encoder"
    projector_at = ("model.projector",)
    has_processor = False
    extractor_class = GraniteSpeechFeatureExtractor

    def tokens(self, model: Any, samples: int) -> int:
        window = model.config.window_size
        return -(-((samples // HOP + 1) // 2) // window) * (window // model.config.downsample_rate)

    def features(self, model: Any, extractor: Any, wavs: Sequence[np.ndarray], device: torch.device) -> list[Features]:
        filters = torch.from_numpy(mel_filter_bank(BINS, MELS, 0, RATE // 2, RATE, mel_scale="htk")).float().to(device)
        window = torch.hann_window(WINDOW, device=device)
        out: list[Features] = []
        for wav in wavs:
            samples = torch.from_numpy(wav).to(device)
            power = torch.stft(samples, 2 * (BINS - 1), HOP, WINDOW, window, return_complex=True).abs() ** 2
            logs = (power.T @ filters).clamp(min=1e-10).log10()
            scaled = torch.maximum(logs, logs.max() - 8) / 4 + 1
            out.append({"input_features": scaled[: len(scaled) // 2 * 2].reshape(1, -1, 2 * MELS)})
        return out

    def encode_audio(self, model: Any, features: Sequence[Features]) -> list[Tensor]:
        window, rate = model.config.window_size, model.config.downsample_rate
        rows = [self.audio_encoder(model)(clip["input_features"]).last_hidden_state[0] for clip in features]
        return [pad(x, (0, 0, 0, -len(x) % window)).reshape(-1, rate * x.shape[1]) for x in rows]

    def project(self, model: Any, encoder_output: Tensor) -> Tensor:
        frames = encoder_output.unflatten(1, (model.config.downsample_rate, -1)).flatten(0, 1)
        projected: Tensor = self.projector(model)[0](frames[None])[0]
        return projected
