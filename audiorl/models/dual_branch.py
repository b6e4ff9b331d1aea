"""Extending a text model so that it speaks: a second branch for frames (`dual_ffn.py`), code embeddings, a code head.

For a batch without frames the results stay the same bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from audiorl.models.backbone import Backbone
from audiorl.models.dual_ffn import CodeEmbedding, DualLayer
from audiorl.models.policy import AudioPolicy
from audiorl.models.speech import CONFIG_KEY, FrameLayout

DECODERS = ("llama", "qwen2", "qwen3", "qwen2_5_omni_text")
"""Decoders whose layers are norm, attention, norm, feed-forward, with nothing in between."""
_TOKENS = ("<|speech_bos|>", "<|speech|>", "<|speech_eos|>")


def dualize(policy: AudioPolicy, codebooks: int, codebook_size: int, seed: int = 0) -> AudioPolicy:
    """Teach `policy` to write `codebooks` of `codebook_size` codes (those of its codec), in place.

    Every layer gets norms and a feed-forward block for frames that begin as copies of the text's; the embeddings of
    codes and the head that writes them begin random, fixed by `seed`. Speech begins, goes on and ends with reserved
    tokens that the tokenizer has, or with new ones. Nothing else changes for prompts and answers without frames.
    Decoders of Llama, Qwen2, Qwen3 and Qwen2.5-Omni's thinker can be dualized, with or without an audio encoder.
    """
    if policy.speech is not None:
        raise ValueError("the model speaks already")
    if policy.adapter is not None:
        raise ValueError("the model has a low-rank adapter: dualize its base, save that, and load it with an adapter")
    begin, frame, end = _speech_tokens(policy)
    size = codebook_size + 2
    layout = FrameLayout(codebooks, size, size - 2, size - 1, begin, frame, frame, end)
    decoder = policy.backbone.decoder(policy.model)
    add_branch(policy.model, decoder, layout)
    _start(policy.model, decoder, seed)
    policy.set_speech(layout)
    return policy


def add_branch(model: Any, decoder: Any, layout: FrameLayout) -> None:
    """Dual layers, code embeddings and a code head in place of what `model` has. Raises ValueError where it cannot."""
    kind = decoder.config.model_type
    if kind not in DECODERS:
        raise ValueError(f"a decoder of type {kind!r} cannot be dualized; those of {', '.join(DECODERS)} can")
    for i, layer in enumerate(decoder.layers):
        parts = (layer.input_layernorm, layer.post_attention_layernorm, layer.mlp)
        decoder.layers[i] = DualLayer(layer, *(copy.deepcopy(part) for part in parts))
    weight = decoder.get_input_embeddings().weight
    with torch.random.fork_rng(devices=[]), torch.device(weight.device):
        decoder.embed_audio_tokens = CodeEmbedding(layout.codebooks, layout.size, weight.shape[1]).to(weight.dtype)
        model.audio_lm_head = nn.Linear(weight.shape[1], layout.codebooks * layout.size, bias=False).to(weight.dtype)
    setattr(model.config, CONFIG_KEY, dataclasses.asdict(layout))


def branch(backbone: Backbone, layout: FrameLayout | None) -> Callable[[Any], None] | None:
    """What makes a new model of this family one that speaks as `layout` says, before its weights are read."""
    if layout is None:
        return None
    return lambda model: add_branch(model, backbone.decoder(model), layout)


@torch.no_grad()
def _start(model: Any, decoder: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = decoder.get_input_embeddings().weight
    codes, head = decoder.embed_audio_tokens.embed_audio_tokens.weight, model.audio_lm_head.weight
    # A frame is a sum over codebooks: on average as long as the embedding of a token.
    scale = float(tokens.float().pow(2).mean().sqrt()) / (head.shape[0] / decoder.embed_audio_tokens.size) ** 0.5
    for weight, std in ((codes, scale), (head, float(decoder.config.initializer_range))):
        weight.copy_(torch.randn(weight.shape, generator=generator) * std)


@torch.no_grad()
def _speech_tokens(policy: AudioPolicy) -> tuple[int, ...]:
    """The ids that open speech, stand for a frame and close it."""
    tokenizer = policy.tokenizer
    reserved = {
        int(match[1]): t
        for t in tokenizer.get_added_vocab()
        if (match := re.fullmatch(r"<\|reserved_special_token_(\d+)\|>", t))
    }
    if len(reserved) >= len(_TOKENS):
        chosen = [reserved[number] for number in sorted(reserved)[-len(_TOKENS) :]]
        return tuple(int(tokenizer.convert_tokens_to_ids(t)) for t in chosen)
    tokenizer.add_tokens(list(_TOKENS), special_tokens=True)
    ids = tuple(int(tokenizer.convert_tokens_to_ids(t)) for t in _TOKENS)
    decoder = policy.backbone.decoder(policy.model)
    rows = decoder.get_input_embeddings().weight.shape[0]
    if max(ids) >= rows:  # large models have rows to spare
        policy.model.resize_token_embeddings(max(ids) + 1, mean_resizing=False)
        for weight in (decoder.get_input_embeddings().weight, policy.backbone.head(policy.model).weight):
            weight[rows:] = weight[:rows].mean(0)
    return ids
