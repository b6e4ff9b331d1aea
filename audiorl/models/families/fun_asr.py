"""Fun-ASR-Nano (Alibaba, arXiv 2509.12508): a SAN-M encoder and an adaptor before Qwen3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import SequenceFeatureExtractor
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from audiorl.models.families.generic import AudioLLM
from audiorl.models.features import HOP, RATE, Features

MELS, WINDOW, STACKED, STRIDE = 80, 400, 7, 6


class FunAsrNanoFeatureExtractor(SequenceFeatureExtractor):
    """Stand for transformers' class of this name, which only torchaudio can call."""

    model_input_names: ClassVar[list[str]] = ["input_features", "input_features_mask"]

    def __init__(self, feature_size: int = MELS, sampling_rate: int = RATE, padding_value: float = 0.0, **others: Any):
        super().__init__(feature_size, sampling_rate, padding_value, **others)


class FunASR(AudioLLM):
    """Kaldi's log-mel features, seven frames side by side at every sixth. Its encoder takes no clips together: eager
    attention adds a mask of truths."""

    has_processor = False
    extractor_class = FunAsrNanoFeatureExtractor

    def max_seconds(self, model: Any, extractor: Any) -> float:
        return (self.audio_encoder(model).config.max_position_embeddings - 1) * STRIDE * HOP / RATE

    def tokens(self, model: Any, samples: int) -> int:
        return -(-((max(samples, WINDOW) - WINDOW) // HOP + 1) // STRIDE)

    def features(self, model: Any, extractor: Any, wavs: Sequence[np.ndarray], device: torch.device) -> list[Features]:
        kaldi: dict[str, Any] = dict(mel_scale="kaldi", triangularize_in_mel_space=True)
        filters = mel_filter_bank(257, MELS, 20, RATE // 2, RATE, **kaldi)
        framed = window_function(WINDOW, "hamming", periodic=False), WINDOW, HOP, 512
        options: dict[str, Any] = dict(power=2.0, center=False, preemphasis=0.97, remove_dc_offset=True, log_mel="log")
        options |= dict(mel_filters=filters, mel_floor=float(np.finfo(np.float32).eps))
        out: list[Features] = []
        for wav in wavs:
            whole = np.pad(wav, (0, max(WINDOW - len(wav), 0)))
            mel = torch.from_numpy(spectrogram(whole, *framed, **options).T.astype(np.float32))
            first, rows = (STACKED - 1) // 2, -(-len(mel) // STRIDE)
            places = torch.arange(rows)[:, None] * STRIDE + torch.arange(STACKED) - first
            out.append({"input_features": mel[places.clamp(0, len(mel) - 1)].flatten(1)[None]})
        return out

    def encode_audio(self, model: Any, features: Sequence[Features]) -> list[Tensor]:
        encoder = self.audio_encoder(model)
        return [encoder(x, _all(x)).last_hidden_state[0] for x in (clip["input_features"] for clip in features)]

    def project(self, model: Any, encoder_output: Tensor) -> Tensor:
        projected: Tensor = self.projector(model)[0](encoder_output[None], _all(encoder_output[None]))[0]
        return projected


def _all(x: Tensor) -> Tensor:
    return torch.ones(x.shape[:2], dtype=torch.long, device=x.device)
