"""The hooks of a model family: where its parts are, how audio is encoded, how a chat is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from audiorl.audio import AudioClip
from audiorl.models.features import Features, log_mels
from audiorl.models.weights import ModelSource
from audiorl.pictures import Picture
from audiorl.types import Message


class Backbone:
    """A model family; one without an audio encoder, unless it says otherwise. Methods take the bare transformers model.

    Shapes: D audio encoder width, H decoder width.
    """

    name: str = "this model"
    """What messages call the family."""
    audio_token: str | None = None
    """The placeholder of audio in a text; None for a model without an audio encoder."""
    answer_prefix: str = ""
    """Text before every answer, as the model was trained to write it: Whisper's space."""
    turn_end: str | None = None
    """The token that ends an answer; None: ChatML's, or the tokenizer's end of text."""
    processor_files: Mapping[str, Mapping[str, Any]] = {}
    """Files of transformers' processor and the entries that name its classes."""

    image_token: str | None = None
    """The placeholder of a picture in a text; None for a model that reads none here."""
    mrope: bool = False
    """Whether a picture's tokens have positions on three axes (`mrope_positions`)."""

    def chat(self, messages: Sequence[Message]) -> Sequence[str | AudioClip | Picture]:
        """Write the conversation as the model was trained to read it, ready for the assistant's turn."""
        raise NotImplementedError

    def chunk(self, clip: AudioClip) -> list[str | AudioClip]:
        """Write a chunk of a stream between its delimiters, to be read inside of the assistant's turn."""
        raise ValueError("a text decoder reads no audio")

    def chat_template(self) -> str | None:
        """Return `chat` as a Jinja template; None where the checkpoint's own is always there."""
        return None

    def save_model(self, model: PreTrainedModel, folder: str, source: ModelSource) -> None:
        """Write weights, config.json and generation config with the released model's names, which other software reads.

        `source`: the contents of the folder that the model was loaded from; empty for a new one.
        """
        model.save_pretrained(folder)

    def weight_name(self, name: str) -> str:
        """Return what states, engines and `ModelConfig.only` call the parameter `name` of transformers' model.

        It is the same under all releases of transformers, and a name that is already so stays as it is.
        """
        return name

    def decoder(self, model: Any) -> Any:
        """Return the text model: takes inputs_embeds, position_ids [B, T], attention_mask; gives last_hidden_state."""
        return model.model

    def head(self, model: Any) -> nn.Linear:
        return model.lm_head

    def further_parts(self, model: Any) -> Sequence[nn.Module]:
        """Return what is trained with the decoder and its head, where these are not all."""
        return []

    def logit_divisor(self, model: Any) -> float:
        """Return what the head's outputs are divided by to be logits: Granite's `logits_scaling`."""
        return float(getattr(self.decoder(model).config, "logits_scaling", 1.0))

    def softcap(self, model: Any) -> float | None:
        """Return the s of logits s·tanh(logits / s), Gemma's `final_logit_softcapping`; None for logits as they are."""
        cap: float | None = getattr(self.decoder(model).config, "final_logit_softcapping", None)
        return cap

    def decoder_arguments(self, model: Any, ids: Tensor) -> dict[str, Any]:
        """Return arguments of the decoder that depend on the token ids [B, T], such as Gemma's `per_layer_inputs`."""
        return {}

    def embed_tokens(self, model: Any, ids: Tensor) -> Tensor:
        """Return [..., H]: the embeddings of ids [...]. Rows of audio placeholders are not used."""
        embeds: Tensor = self.decoder(model).get_input_embeddings()(ids)
        return embeds

    def audio_encoder(self, model: Any) -> Any:
        return nn.Module()

    def projector(self, model: Any) -> Sequence[nn.Module]:
        """Return the modules between the audio encoder's last norm and the decoder."""
        return []

    def max_seconds(self, model: Any, extractor: Any) -> float | None:
        """Return the length of the longest clip that is encoded; None for any. Longer ones are refused, never cut."""
        return None

    def tokens(self, model: Any, samples: int) -> int:
        """Return how many audio tokens a clip of `samples` becomes."""
        raise NotImplementedError

    def features(self, model: Any, extractor: Any, wavs: Sequence[np.ndarray], device: torch.device) -> list[Features]:
        """Return what `encode_audio` takes of clips, mono samples [T] at the extractor's rate, of similar length.

        `device`: where it is computed if that is faster there.
        """
        return [{"input_features": mel[None]} for mel in log_mels(extractor, wavs, device)]

    def encode_audio(self, model: Any, features: Sequence[Features]) -> list[Tensor]:
        """Return the audio encoder's output before the projector: one [tokens, D] per clip."""
        raise NotImplementedError

    def project(self, model: Any, encoder_output: Tensor) -> Tensor:
        """[tokens, D] -> [tokens, H]."""
        raise NotImplementedError

    def project_beside_picture(self, model: Any, encoder_output: Tensor) -> Tensor:
        """Return what `project` does, for a clip whose prompt has a picture: Phi-4 has another projector there."""
        return self.project(model, encoder_output)

    def vision_tower(self, config: Any) -> nn.Module | None:
        """Make the empty vision tower of a model's config; None for one that is a part of the policy's model."""
        return None

    def picture_processor(self, config: Any) -> tuple[type[Any], Mapping[str, Any]]:
        """Return transformers' image processor, and its arguments where the checkpoint's files say nothing."""
        raise NotImplementedError

    def picture_grid(self, processor: Any, width: int, height: int) -> tuple[int, int]:
        """Return rows and columns of the tokens of a picture. Raises ValueError for a shape that is not read."""
        raise NotImplementedError

    def encode_picture(self, model: Any, processed: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """Return [tokens, H] of a processed picture, then what the decoder's first layers add there (DeepStack).

        model: the policy's, or its `vision_tower`.
        """
        raise NotImplementedError
