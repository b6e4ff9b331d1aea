"""Gemma 3n (Google) and Gemma 4: Conformer encoders, and decoders whose layers read embeddings of the ids, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from audiorl.models.families.generic import AudioLLM
from audiorl.models.features import Features


class Gemma4(AudioLLM):
    """Two convolutions halve the frames. Its processor would cut a clip at 30 s, silently."""

    projector_at = ("model.embed_audio",)
    has_processor = False

    @cached_property
    def image_token(self) -> str | None:  # type: ignore[override]
        # With it the tokens of a picture see one another both ways, which packed rows do not do.
        both_ways = getattr(self.config.text_config, "use_bidirectional_attention", None)
        blind = both_ways or self.config.vision_config is None
        return None if blind else str(self.tokenizer.convert_ids_to_tokens(self.config.image_token_id))

    def _tokens(self, *ids: int) -> tuple[str, str]:
        begin, end = self.tokenizer.convert_ids_to_tokens(list(ids))
        return str(begin), str(end)

    @cached_property
    def _around(self) -> tuple[str, str]:
        end = getattr(self.config, "eoa_token_id", None) or self.config.eoa_token_index
        return self._tokens(self.config.boa_token_id, end)

    @property
    def _around_picture(self) -> tuple[str, str]:
        return self._tokens(self.config.boi_token_id, self.config.eoi_token_id)

    def max_seconds(self, model: Any, extractor: Any) -> float:
        return 30.0

    def tokens(self, model: Any, samples: int) -> int:
        frame, hop = 320, 160
        frames = (samples + frame // 2 - frame - 1) // hop + 1
        return -(-frames // 4)

    def features(self, model: Any, extractor: Any, wavs: Sequence[np.ndarray], device: torch.device) -> list[Features]:
        clips = [extractor([wav], return_tensors="pt") for wav in wavs]
        # Without its padding a clip needs no mask.
        return [{"input_features": x["input_features"][x["input_features_mask"].bool()][None].float()} for x in clips]

    def encode_audio(self, model: Any, features: Sequence[Features]) -> list[Tensor]:
        return [self._encoded(model, clip["input_features"], True) for clip in features]

    def _encoded(self, model: Any, x: Tensor, valid: bool) -> Tensor:
        mask = torch.full(x.shape[:2], valid, dtype=torch.bool, device=x.device)
        rows: Tensor = self.audio_encoder(model)(x, mask).last_hidden_state[0]
        return rows

    def project(self, model: Any, encoder_output: Tensor) -> Tensor:
        projected: Tensor = self.projector(model)[0](inputs_embeds=encoder_output)
        return projected

    def picture_processor(self, config: Any) -> tuple[type[Any], Mapping[str, Any]]:
        eyes = config.vision_config
        return Gemma4ImageProcessorPil, dict(patch_size=eyes.patch_size, pooling_kernel_size=eyes.pooling_kernel_size)

    def picture_grid(self, processor: Any, width: int, height: int) -> tuple[int, int]:
        patch, pool = processor.patch_size, processor.pooling_kernel_size
        most = processor.max_soft_tokens * pool**2
        rows, columns = get_aspect_ratio_preserving_size(height, width, patch, most, pool)
        return rows // (patch * pool), columns // (patch * pool)

    def encode_picture(self, model: Any, processed: Mapping[str, Tensor]) -> Sequence[Tensor]:
        taken = {k: processed[k] for k in ("pixel_values", "image_position_ids") if k in processed}
        return [model.model.get_image_features(**taken, return_dict=True).pooler_output[0]]

    def _text_ids(self, model: Any, ids: Tensor) -> Tensor:
        """Return the ids with padding in place of audio and pictures."""
        config = model.config
        others = [config.audio_token_id, config.image_token_id, config.video_token_id]
        return torch.where(torch.isin(ids, ids.new_tensor(others)), config.text_config.pad_token_id, ids)

    def embed_tokens(self, model: Any, ids: Tensor) -> Tensor:
        return super().embed_tokens(model, self._text_ids(model, ids))

    def decoder_arguments(self, model: Any, ids: Tensor) -> dict[str, Any]:
        decoder = self.decoder(model)
        if not decoder.config.hidden_size_per_layer_input:
            return {}
        return {"per_layer_inputs": decoder.get_per_layer_inputs(self._text_ids(model, ids), None)}


class Gemma3n(Gemma4):
    """A clip always has 188 tokens: behind its own, an embedding for padding, which `encode_audio` gives as zeros."""

    @cached_property
    def _around(self) -> tuple[str, str]:
        begin, end = super()._around
        return f"\n\n{begin}", f"{end}\n\n"

    @property
    def _around_picture(self) -> tuple[str, str]:
        begin, end = super()._around_picture
        return f"\n\n{begin}", f"{end}\n\n"

    def picture_processor(self, config: Any) -> tuple[type[Any], Mapping[str, Any]]:
        return SiglipImageProcessorPil, dict(size=dict(height=768, width=768), do_normalize=False)

    def picture_grid(self, processor: Any, width: int, height: int) -> tuple[int, int]:
        return 1, int(self.config.vision_soft_tokens_per_image)

    def tokens(self, model: Any, samples: int) -> int:
        return int(model.config.audio_soft_tokens_per_image)

    def encode_audio(self, model: Any, features: Sequence[Features]) -> list[Tensor]:
        most = self.tokens(model, 0)
        rows = [self._encoded(model, clip["input_features"], False) for clip in features]  # it is told what is padding
        return [pad(x, (0, 0, 0, most - len(x))) for x in rows]

    def project(self, model: Any, encoder_output: Tensor) -> Tensor:
        embed: Any = self.projector(model)[0]
        last = torch.tensor([embed.vocab_offset + embed.vocab_size - 1], device=encoder_output.device)
        is_padding = (encoder_output == 0).all(1, keepdim=True)
        return torch.where(is_padding, embed(input_ids=last), embed(inputs_embeds=encoder_output))

    def embed_tokens(self, model: Any, ids: Tensor) -> Tensor:
        """Ids above the text's are embedded by tables of pictures and sound, such as the end of a clip."""
        embeds = AudioLLM.embed_tokens(self, model, ids)
        for other in (model.model.embed_vision, model.model.embed_audio):
            first, last = other.vocab_offset, other.vocab_offset + other.vocab_size - 1
            inside = (ids >= first) & (ids <= last)
            embeds = torch.where(inside[..., None], other(input_ids=torch.where(inside, ids, last)), embeds)
        return embeds

    def decoder_arguments(self, model: Any, ids: Tensor) -> dict[str, Any]:
        decoder = self.decoder(model)
        known = ids < decoder.config.vocab_size_per_layer_input
        return {"per_layer_inputs": decoder.get_per_layer_inputs(torch.where(known, ids, 0))}
