"""Phi-4-multimodal (Microsoft, arXiv 2503.01743): the audio encoder and its projector are inside of the decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu

from audiorl.models.families.generic import AudioLLM
from audiorl.models.features import Features


class Phi4(AudioLLM):
    """Clips are encoded one by one: beside a longer one its padding would stay visible."""

    model_class = "Phi4MultimodalForCausalLM"
    decoder_at = "model"
    audio_encoder_at = "model.embed_tokens_extend.audio_embed.encoder"
    projector_at = (
        "model.embed_tokens_extend.audio_embed.up_proj_for_speech",
        "model.embed_tokens_extend.audio_embed.down_proj_for_speech",
    )
    has_processor = False

    @cached_property
    def image_token(self) -> str:  # type: ignore[override]
        return str(self.tokenizer.convert_ids_to_tokens(self.config.vision_config.image_token_id))

    def tokens(self, model: Any, samples: int) -> int:
        return -(-((samples - 400) // 160 + 1) // 8)

    def features(self, model: Any, extractor: Any, wavs: Sequence[np.ndarray], device: torch.device) -> list[Features]:
        rate = extractor.sampling_rate
        found = [extractor([wav], sampling_rate=rate, return_tensors="pt")["audio_input_features"] for wav in wavs]
        return [{"input_features": x.float()} for x in found]

    def encode_audio(self, model: Any, features: Sequence[Features]) -> list[Tensor]:
        return [self.audio_encoder(model)(clip["input_features"], None)[0] for clip in features]

    def project(self, model: Any, encoder_output: Tensor) -> Tensor:
        up, down = self.projector(model)
        projected: Tensor = down(gelu(up(encoder_output)))
        return projected

    def project_beside_picture(self, model: Any, encoder_output: Tensor) -> Tensor:
        embed = model.model.embed_tokens_extend.audio_embed
        projected: Tensor = embed.down_proj_for_vision_speech(gelu(embed.up_proj_for_vision_speech(encoder_output)))
        return projected

    def picture_processor(self, config: Any) -> tuple[type[Any], Mapping[str, Any]]:
        if find_spec("torchvision") is None:
            raise ValueError("Phi-4-multimodal's pictures need torchvision; pip install torchvision")
        from transformers.models.phi4_multimodal import image_processing_phi4_multimodal as processing

        return processing.Phi4MultimodalImageProcessor, {}

    def picture_grid(self, processor: Any, width: int, height: int) -> tuple[int, int]:
        """A picture is cut in crops, the last of which are padded; a row and a column of the padding have no tokens."""
        side, patch, most = processor.size["height"], processor.patch_size, processor.dynamic_hd
        columns, rows = math.ceil(width / side), math.ceil(height / side)
        if columns * rows > most:
            few = [(i, j) for i in range(1, most + 1) for j in range(1, most // i + 1)]
            few.sort(key=lambda crops: crops[0] * crops[1])
            columns, rows = processor.find_closest_aspect_ratio(width / height, few, width, height, side)
        scales = columns * side / width, rows * side / height
        wide, high = columns * side, rows * side
        if scales[0] < scales[1]:
            high = int(height * scales[0])
        else:
            wide = int(width * scales[1])
        if min(wide, high) < 10:
            raise ValueError(f"{width} x {height} is too long and narrow")
        whole = side // patch  # patches of a crop, of which two by two are a token
        wide, high = ((n * whole - (n * side - x) // patch + 1) // 2 for n, x in ((columns, wide), (rows, high)))
        return 1, whole // 2 * (whole // 2 + 1) + 1 + high * (wide + 1)

    def encode_picture(self, model: Any, processed: Mapping[str, Tensor]) -> Sequence[Tensor]:
        eyes = model.model.embed_tokens_extend.image_embed
        ids = torch.full((1, int(processed["num_img_tokens"][0])), eyes.config.vision_config.image_token_id)
        pixels = processed["image_pixel_values"]
        places = pixels.new_zeros(*ids.shape, eyes.config.hidden_size)
        rows = eyes(ids.to(pixels.device), places, pixels, processed["image_sizes"], processed["image_attention_mask"])
        return [rows[0]]
