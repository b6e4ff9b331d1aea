"""Qwen2-Audio (Alibaba, arXiv 2407.10759): a Whisper-style audio encoder over fixed windows of 30 s before Qwen2."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audiorl.models.families.generic import AudioLLM
from audiorl.models.families.generic import tiny as tiny_audio_llm
from audiorl.models.features import HOP, RATE, Features, log_mels


class Qwen2Audio(AudioLLM):
    """25 audio tokens a second, at most 30 s a clip. transformers has no `get_audio_features` for it."""

    def max_seconds(self, model: Any, extractor: Any) -> float | None:
        return self._window(model) / RATE

    def tokens(self, model: Any, samples: int) -> int:
        return int(self._lengths(model, torch.tensor(-(-samples // HOP)))[1])

    def features(self, model: Any, extractor: Any, wavs: Sequence[np.ndarray], device: torch.device) -> list[Features]:
        out: list[Features] = []
        for wav, mel in zip(wavs, log_mels(extractor, wavs, device, self._window(model)), strict=True):
            heard = torch.arange(mel.shape[1]) < -(-len(wav) // HOP)
            out.append({"input_features": mel[None], "feature_attention_mask": heard[None].long()})
        return out

    def encode_audio(self, model: Any, features: Sequence[Features]) -> list[Tensor]:
        windows = torch.cat([f["input_features"] for f in features])
        frames = torch.cat([f["feature_attention_mask"] for f in features]).sum(1)
        after_conv, tokens = self._lengths(model, frames)
        positions = windows.shape[2] // 2
        heard = torch.arange(positions, device=windows.device) < after_conv[:, None].to(windows.device)
        mask = heard[:, None, None, :].expand(-1, 1, positions, -1)
        hidden = self.audio_encoder(model)(windows, attention_mask=mask).last_hidden_state
        return [h[:count] for h, count in zip(hidden, tokens.tolist(), strict=True)]

    def _window(self, model: Any) -> int:
        """Return the samples of a window."""
        return 2 * int(self.audio_encoder(model).config.max_source_positions) * HOP

    def _lengths(self, model: Any, frames: Tensor) -> Any:
        """Return the frames after the convolutions, and the audio tokens."""
        return self.audio_encoder(model)._get_feat_extract_output_lengths(frames)


tiny = partial(tiny_audio_llm, "qwen2_audio", hidden=64, window=10)
