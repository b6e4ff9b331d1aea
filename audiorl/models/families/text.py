"""Text decoders (Llama, Qwen2, Qwen3): policies without an audio encoder, for text prompts and comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig
from audiorl.models.chatml import chatml, chatml_template
from audiorl.models.dual_branch import branch
from audiorl.models.loading import load_model, load_tokenizer
from audiorl.models.policy import AudioPolicy
from audiorl.models.saving import Source
from audiorl.models.speech import FrameLayout
from audiorl.models.tiny import tiny_tokenizer
from audiorl.types import Message

MODELS: dict[str, Any] = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}
"""By model_type."""


class TextDecoder:
    """Backbone without an audio encoder. The tokenizer's template writes chats, or ChatML where it has none."""

    audio_token: ClassVar[str | None] = None
    answer_prefix: ClassVar[str] = ""
    processor_files: ClassVar[Mapping[str, Mapping[str, str]]] = {}

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def chat(self, messages: Sequence[Message]) -> list[str | AudioClip]:
        if any(isinstance(c, AudioClip) for m in messages for c in m.content):
            raise ValueError("a text decoder reads no audio; load a speech model, or drop the clips")
        if not getattr(self.tokenizer, "chat_template", None):
            return chatml(messages, lambda clip, _: [clip], default_system=None)
        turns = [{"role": m.role, "content": "".join(str(c) for c in m.content)} for m in messages]
        return [str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))]

    def chunk(self, clip: AudioClip) -> list[str | AudioClip]:
        raise ValueError("a text decoder reads no audio")

    def chat_template(self) -> str | None:
        return chatml_template(default_system=None)

    def save_model(self, model: PreTrainedModel, folder: str, source: Source) -> None:
        model.save_pretrained(folder)

    def weight_name(self, name: str) -> str:
        return name

    def decoder(self, model: Any) -> Any:
        return model.model

    def head(self, model: Any) -> nn.Linear:
        return model.lm_head

    def audio_encoder(self, model: Any) -> Any:
        return nn.Module()

    def projector(self, model: Any) -> Sequence[nn.Module]:
        return []

    def tokens(self, model: Any, frames: int) -> int:
        raise ValueError("a text decoder reads no audio")

    def encode_audio(self, model: Any, mels: Sequence[Tensor]) -> list[Tensor]:
        raise ValueError("a text decoder reads no audio")

    def project(self, model: Any, encoder_output: Tensor) -> Tensor:
        raise ValueError("a text decoder reads no audio")


def load(path: str | Path, config: ModelConfig, kind: str, speech: FrameLayout | None = None) -> AudioPolicy:
    """A Llama or Qwen text decoder of model_type `kind` from a local folder or a hub id."""
    tokenizer = load_tokenizer(path)
    backbone = TextDecoder(tokenizer)
    model = load_model(MODELS[kind], path, config, branch(backbone, speech))
    return AudioPolicy(model, tokenizer, None, backbone, config, speech)


def tiny(
    texts: Iterable[str] = (),
    *,
    hidden: int = 64,
    layers: int = 2,
    vocab_size: int = 400,
    seed: int = 0,
    config: ModelConfig | None = None,
) -> AudioPolicy:
    """A random Qwen2 decoder of the real class, small enough for tests."""
    tokenizer = tiny_tokenizer(texts, vocab_size)
    size = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(size)
    return AudioPolicy(model, tokenizer, None, TextDecoder(tokenizer), config)
