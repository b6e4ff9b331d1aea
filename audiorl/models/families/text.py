"""Text decoders (Llama, Qwen2, Qwen3): policies without an audio encoder, for text prompts and comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen3ForCausalLM

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig
from audiorl.models.backbone import Backbone
from audiorl.models.policy import AudioPolicy
from audiorl.models.prompts import chatml, chatml_template
from audiorl.models.speech import FrameLayout, branch_builder
from audiorl.models.tiny import seeded, tiny_decoder_sizes, tiny_tokenizer
from audiorl.models.weights import load_model, load_tokenizer
from audiorl.pictures import Picture
from audiorl.types import Message

MODELS: dict[str, Any] = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}
"""By model_type."""


class TextDecoder(Backbone):
    """Backbone without an audio encoder. The tokenizer's template writes chats, or ChatML where it has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def chat(self, messages: Sequence[Message]) -> Sequence[str | AudioClip | Picture]:
        if any(isinstance(c, AudioClip) for m in messages for c in m.content):
            raise ValueError("a text decoder reads no audio; load a speech model, or drop the clips")
        if not getattr(self.tokenizer, "chat_template", None):
            return chatml(messages, default_system=None)
        turns = [{"role": m.role, "content": "".join(str(c) for c in m.content)} for m in messages]
        return [str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))]

    def chat_template(self) -> str | None:
        return chatml_template(default_system=None)


def load(path: str | Path, config: ModelConfig, kind: str, speech: FrameLayout | None = None) -> AudioPolicy:
    """Load a Llama or Qwen text decoder of model_type `kind` from a local folder or a hub id."""
    tokenizer = load_tokenizer(path)
    backbone = TextDecoder(tokenizer)
    model = load_model(MODELS[kind], path, config, branch_builder(backbone, speech))
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
    """Make a random Qwen2 decoder of the real class, small enough for tests."""
    tokenizer = tiny_tokenizer(texts, vocab_size)
    size = Qwen2Config(**tiny_decoder_sizes(tokenizer, hidden, layers, 2048))
    return AudioPolicy(seeded(Qwen2ForCausalLM, size, seed), tokenizer, None, TextDecoder(tokenizer), config)
