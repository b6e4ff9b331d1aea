"""What encoder-decoders that recognise speech share: a prompt is one recording with a request for its transcript.

The request that `asr_prompt` writes becomes the tokens that a family was trained with, those of language and task.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoFeatureExtractor, PreTrainedModel, PreTrainedTokenizerBase

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig
from audiorl.data.prompts import transcript_request
from audiorl.data.schema import FieldError
from audiorl.languages import language_code
from audiorl.models.backbone import Backbone
from audiorl.models.cross_attention import CrossAttentionDecoder
from audiorl.models.features import RATE, Features
from audiorl.models.policy import AudioPolicy
from audiorl.models.weights import load_model, load_processor, load_tokenizer
from audiorl.types import Message


class EncoderDecoder(Backbone):
    """Parts as transformers names them. Clips go through the encoder one by one: padding would change their rows."""

    name: str
    """What messages call the model."""
    model_class: type[PreTrainedModel]
    decoder_class: type[CrossAttentionDecoder]

    def __init__(self, tokenizer: PreTrainedTokenizerBase, extractor: Any):
        self.tokenizer, self.extractor = tokenizer, extractor

    def chat(self, messages: Sequence[Message]) -> list[str | AudioClip]:
        if len(messages) != 1 or messages[0].role != "user":
            raise ValueError(f"{self.name} reads one user turn, a recording and a request; it has no conversation")
        clips = [c for c in messages[0].content if isinstance(c, AudioClip)]
        request = "".join(c for c in messages[0].content if isinstance(c, str)).strip()
        if len(clips) != 1:
            raise ValueError(f"{self.name} reads one recording, got {len(clips)}")
        asked = transcript_request(request)
        if asked.language is None:
            return [clips[0], self.request(request)]
        return [clips[0], self.transcript(language_code(asked.language) if asked.language else "", asked.hotwords)]

    def transcript(self, language: str, hotwords: Sequence[str]) -> str:
        """Write the request for a transcript. language: an ISO 639 code, "" where the row names none."""
        raise NotImplementedError

    def request(self, text: str) -> str:
        """Write any other request."""
        raise NotImplementedError

    def check_language(self, language: str, known: bool) -> None:
        """Raise FieldError for a row without a language, and for one that the model does not know."""
        if not language:
            what = f'{self.name} needs the language of a recording: give the row "language", for example "es"'
            raise FieldError("language", what)
        if not known:
            raise FieldError("language", f"this {self.name} has no language {language!r}")

    def chunk(self, clip: AudioClip) -> list[str | AudioClip]:
        raise ValueError(f"{self.name} reads one recording before it writes; streams need a decoder-only model")

    def decoder(self, model: Any) -> Any:
        return model.model.decoder

    def head(self, model: Any) -> nn.Linear:
        return model.proj_out

    def audio_encoder(self, model: Any) -> Any:
        return model.model.encoder

    def tokens(self, model: Any, samples: int) -> int:
        count = self.positions(model, samples)
        if count < 1:
            raise ValueError(f"audio of {1000 * samples / RATE:.0f} ms is too short for {self.name}: leave it out")
        return count

    def positions(self, model: Any, samples: int) -> int:
        """Return the length of the encoder's output for a clip."""
        raise NotImplementedError

    def features(self, model: Any, extractor: Any, wavs: Sequence[np.ndarray], device: torch.device) -> list[Features]:
        made: list[Features] = []
        for wav in wavs:
            self.tokens(model, len(wav))
            with torch.autocast("cpu", enabled=False):
                inputs = extractor(wav, sampling_rate=extractor.sampling_rate, return_tensors="pt")
            made.append({name: x for name, x in inputs.items() if isinstance(x, Tensor)})
        return made

    def encode_audio(self, model: Any, features: Sequence[Features]) -> list[Tensor]:
        outs = [self.audio_encoder(model)(**clip) for clip in features]
        return [out.last_hidden_state[0, out.attention_mask[0].bool()] for out in outs]

    def project(self, model: Any, encoder_output: Tensor) -> Tensor:
        return encoder_output

    def use_packed_decoder(self, model: Any) -> None:
        """Give a model of transformers the decoder that takes packed batches."""
        model.model.decoder.__class__ = self.decoder_class

    def read_facts(self, model: Any) -> None:
        """Take from a loaded model what prompts depend on."""


def load(path: str | Path, config: ModelConfig, family: type[EncoderDecoder]) -> AudioPolicy:
    """Load a model of `family` from a local folder or a hub id."""
    tokenizer = load_tokenizer(path)
    extractor = load_processor(path, "feature extractor", AutoFeatureExtractor)
    backbone = family(tokenizer, extractor)
    model = load_model(family.model_class, path, config, backbone.use_packed_decoder)
    backbone.read_facts(model)
    return AudioPolicy(model, tokenizer, extractor, backbone, config)
