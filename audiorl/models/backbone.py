"""What differs between model families: where the decoder lives, how audio is encoded, how a chat is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from audiorl.audio import AudioClip
from audiorl.models.saving import Source
from audiorl.types import Message


class Backbone(Protocol):
    """What a model family must provide. Its methods take the bare transformers model and keep no state.

    Shapes: D audio encoder width, H decoder width.
    """

    audio_token: ClassVar[str | None]
    """The placeholder of audio in a text; None for a model without an audio encoder."""
    answer_prefix: ClassVar[str]
    """What stands before every answer, as the model was trained to write it: Whisper's space."""
    processor_files: ClassVar[Mapping[str, Mapping[str, str]]]
    """Files of transformers' processor and the entries that name its classes."""

    def chat(self, messages: Sequence[Message]) -> list[str | AudioClip]:
        """The conversation as the model was trained to read it, ready for the assistant's turn."""
        ...

    def chunk(self, clip: AudioClip) -> list[str | AudioClip]:
        """A chunk of a stream between its delimiters, to be read inside of the assistant's turn."""
        ...

    def chat_template(self) -> str | None:
        """`chat` as a Jinja template for tokenizers and processors; None where the checkpoint's own is always there."""
        ...

    def save_model(self, model: PreTrainedModel, folder: str, source: Source) -> None:
        """Weights, config.json and generation config with the names of the released model, which other software reads.

        `source`: what the folder held that the model was loaded from; empty for a new one.
        """
        ...

    def weight_name(self, name: str) -> str:
        """What states, engines and `ModelConfig.only` call the parameter that is `name` in transformers' model.

        It is the same under all releases of transformers, and a name that is already so stays as it is.
        """
        ...

    def decoder(self, model: PreTrainedModel) -> Any:
        """The text model: takes inputs_embeds, position_ids [B, T], attention_mask; gives last_hidden_state."""
        ...

    def head(self, model: PreTrainedModel) -> nn.Linear: ...

    def audio_encoder(self, model: PreTrainedModel) -> Any: ...

    def projector(self, model: PreTrainedModel) -> Sequence[nn.Module]:
        """The modules between the audio encoder's last norm and the decoder."""
        ...

    def tokens(self, model: PreTrainedModel, frames: int) -> int:
        """How many audio tokens a clip of `frames` mel frames becomes."""
        ...

    def encode_audio(self, model: PreTrainedModel, mels: Sequence[Tensor]) -> list[Tensor]:
        """The audio encoder's output without the projector: one [tokens, D] per clip of [mel bins, frames]."""
        ...

    def project(self, model: PreTrainedModel, encoder_output: Tensor) -> Tensor:
        """[tokens, D] -> [tokens, H]."""
        ...
