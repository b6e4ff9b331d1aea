"""The hooks of a model family: where its parts are, how audio is encoded, how a chat is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from audiorl.audio import AudioClip
from audiorl.models.weights import ModelSource
from audiorl.types import Message


class Backbone:
    """A model family; one without an audio encoder, unless it says otherwise. Methods take the bare transformers model.

    Shapes: D audio encoder width, H decoder width.
    """

    audio_token: str | None = None
    """The placeholder of audio in a text; None for a model without an audio encoder."""
    answer_prefix: str = ""
    """Text before every answer, as the model was trained to write it: Whisper's space."""
    processor_files: Mapping[str, Mapping[str, str]] = {}
    """Files of transformers' processor and the entries that name its classes."""

    def chat(self, messages: Sequence[Message]) -> list[str | AudioClip]:
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

    def audio_encoder(self, model: Any) -> Any:
        return nn.Module()

    def projector(self, model: Any) -> Sequence[nn.Module]:
        """Return the modules between the audio encoder's last norm and the decoder."""
        return []

    def tokens(self, model: Any, frames: int) -> int:
        """Return how many audio tokens a clip of `frames` mel frames becomes."""
        raise NotImplementedError

    def encode_audio(self, model: Any, mels: Sequence[Tensor]) -> list[Tensor]:
        """Return the audio encoder's output before the projector: one [tokens, D] per clip of [mel bins, frames]."""
        raise NotImplementedError

    def project(self, model: Any, encoder_output: Tensor) -> Tensor:
        """[tokens, D] -> [tokens, H]."""
        raise NotImplementedError
