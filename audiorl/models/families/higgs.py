"""Higgs Audio V2: a Llama decoder with a second branch for frames (DualFFN), a text head and a head of codes.

Its input and output audio goes through one codec: a clip in a prompt, for example the voice to speak in, is frames.
Its layers are replaced by ours with the same weights (`DualLayer`); checkpoints keep their names.

How it ends speech follows `tokenizers_audio.delay`. transformers' own generation differs in two points: a codebook's
EOS is forced one frame later than the delay pattern puts it: where the model does not write it by itself there is
one frame more, of noise; and BOS may be sampled in the middle of speech.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration, PreTrainedTokenizerBase

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig
from audiorl.models.backbone import Backbone
from audiorl.models.policy import AudioPolicy
from audiorl.models.speech import DualLayer, FrameLayout
from audiorl.models.tiny import seeded, tiny_decoder_sizes, tiny_llama_tokenizer
from audiorl.models.weights import load_model, load_tokenizer
from audiorl.types import Message

INSTRUCTION = "Generate audio following instruction."
"""The system message where there is none."""
_log = logging.getLogger(__name__)


class Higgs(Backbone):
    """Backbone of Higgs Audio V2.

    A system message is the instruction, then the scene: how it sounds there and who speaks, for example "SPEAKER0:"
    and that speaker's voice as a clip. Lines to be spoken begin with "[SPEAKER0] " where there are several speakers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def chat(self, messages: Sequence[Message]) -> list[str | AudioClip]:
        rest = list(messages)
        system = rest.pop(0) if rest and rest[0].role == "system" else Message("system", (INSTRUCTION,))
        instruction, *scene = (str(c) for c in system.content)
        text = f"{self.tokenizer.bos_token}{_header('system')}{instruction.strip()}{self._scene(scene)}<|eot_id|>"
        for message in rest:
            text += _header(message.role) + "".join(str(c).strip() for c in message.content) + "<|eot_id|>"
        return [text + _header("assistant")]

    def _scene(self, pieces: Sequence[str]) -> str:
        """Write a scene: the first text is a paragraph, every other a line with the speech that follows it."""
        text = ""
        for i, piece in enumerate(pieces):
            following = pieces[i + 1 : i + 2]
            if _is_speech(piece):
                text += f" {piece}" + "\n" * len(following)
            elif i == 0:
                text += piece.strip() + "\n\n" * len(following)
            else:
                text += piece.strip() + "\n" * sum(not _is_speech(p) for p in following)
        return f"\n\n<|scene_desc_start|>\n{text}\n<|scene_desc_end|>" if pieces else ""

    def chunk(self, clip: AudioClip) -> list[str | AudioClip]:
        raise ValueError("Higgs has no audio encoder for streams; dualize a model that has one")

    def head(self, model: Any) -> nn.Linear:
        return model.text_lm_head


def _header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def _is_speech(piece: str) -> bool:
    return piece.startswith("<|audio_out_bos|>")


def load(path: str | Path, config: ModelConfig) -> AudioPolicy:
    """Load Higgs Audio V2 from a local folder or a hub id.

    transformers trains and saves it without a text head unless told otherwise; the token embeddings then serve as one.
    """
    model = load_model(HiggsAudioV2ForConditionalGeneration, path, config, build=add_routing, fill=_tie_text_head)
    tokenizer = load_tokenizer(path)
    return _policy(model, tokenizer, config, str(path))


def add_routing(model: Any) -> None:
    """Put our layers and a text head into a Higgs of transformers."""
    layers = model.model.layers
    for i, layer in enumerate(layers):
        parts = (layer.audio_input_layernorm, layer.audio_post_attention_layernorm, layer.audio_mlp)
        layers[i] = DualLayer(layer, *parts)
    if model.text_lm_head is None:
        model.text_lm_head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)


@torch.no_grad()
def _tie_text_head(model: Any, name: str) -> bool:
    if name != "text_lm_head.weight":
        return False
    model.text_lm_head.weight.copy_(model.model.embed_tokens.weight)
    _log.warning("the checkpoint has no text head; the token embeddings take its place")
    return True


def _policy(model: Any, tokenizer: PreTrainedTokenizerBase, config: ModelConfig | None, where: str) -> AudioPolicy:
    c = model.config
    turn_end = c.eos_token_id[0] if isinstance(c.eos_token_id, list) else c.eos_token_id
    if tokenizer.eos_token_id != turn_end:  # Llama's tokenizer ends a text, the model a turn
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(turn_end)
    end = tokenizer.get_added_vocab().get("<|audio_eos|>", turn_end)
    layout = FrameLayout(
        codebooks=c.num_codebooks,
        size=c.codebook_size,
        bos=c.audio_stream_bos_id,
        eos=c.audio_stream_eos_id,
        begin_id=c.audio_bos_token_id,
        frame_id=c.audio_token_id,
        delay_id=c.audio_delay_token_id,
        end_id=end,
    )
    for id in (layout.begin_id, layout.frame_id, layout.delay_id, layout.end_id):
        token = str(tokenizer.convert_ids_to_tokens(id))
        if tokenizer.encode(token, add_special_tokens=False) != [id]:
            raise ValueError(
                f"{where}: the tokenizer has no special token {id}; do config.json and it belong together?"
            )
    return AudioPolicy(model, tokenizer, None, Higgs(tokenizer), config, layout)


def tiny(
    texts: Iterable[str] = (),
    *,
    hidden: int = 64,
    layers: int = 2,
    vocab_size: int = 400,
    codebooks: int = 4,
    codebook_size: int = 64,
    seed: int = 0,
    config: ModelConfig | None = None,
) -> AudioPolicy:
    """Make a random Higgs of the real class, small enough for two CPU cores, for codecs of that size."""
    tokenizer = tiny_llama_tokenizer(texts, vocab_size)

    def token(text: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(text))

    size = HiggsAudioV2Config(
        **tiny_decoder_sizes(tokenizer, hidden, layers, 4096),
        head_dim=hidden // 4,
        num_codebooks=codebooks,
        codebook_size=codebook_size + 2,
        audio_stream_bos_id=codebook_size,
        audio_stream_eos_id=codebook_size + 1,
        audio_token_id=token("<|AUDIO_OUT|>"),
        audio_bos_token_id=token("<|audio_out_bos|>"),
        audio_delay_token_id=token("<|reserved_special_token_6|>"),
    )
    model = seeded(HiggsAudioV2ForConditionalGeneration, size, seed, use_text_head=True)
    add_routing(model)
    return _policy(model, tokenizer, config, "tiny")
