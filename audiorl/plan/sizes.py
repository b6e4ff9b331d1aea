"""How large a model is: its parameters, counted on the real classes without allocating them.

The model is built on torch's meta device, where a tensor has a shape but no data, and becomes an `AudioPolicy`. So the
code that trains decides which weights count as trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    HiggsAudioV2Config,
    HiggsAudioV2ForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from audiorl.config import ModelConfig
from audiorl.models import AudioPolicy, Backbone, FrameLayout, read_config
from audiorl.models.families.higgs import Higgs, add_routing
from audiorl.models.families.qwen2_audio import Qwen2Audio
from audiorl.models.families.qwen_omni import Qwen3Omni, QwenOmni
from audiorl.models.families.text import MODELS, TextDecoder
from audiorl.models.families.whisper import WhisperBackbone, use_packed_decoder
from audiorl.models.saving import ModelSource, planned_copy
from audiorl.models.speech import LAYOUT_KEY, add_branch
from audiorl.models.tiny import tiny_llama_tokenizer, tiny_tokenizer, tiny_whisper_tokenizer
from audiorl.plan.released import RELEASED

_OMNI = (Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration, QwenOmni)
_OMNI3 = (Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration, Qwen3Omni)
_FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "qwen2_5_omni": _OMNI,
    "qwen2_5_omni_thinker": _OMNI,
    "qwen3_omni_moe": _OMNI3,
    "qwen3_omni_moe_thinker": _OMNI3,
    "qwen2_audio": (Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, Qwen2Audio),
    "whisper": (WhisperConfig, WhisperForConditionalGeneration, WhisperBackbone),
    "higgs_audio_v2": (HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration, Higgs),
    **{kind: (model.config_class, model, TextDecoder) for kind, model in MODELS.items()},
}
_WITH_AUDIO = {
    QwenOmni: (50.0, 25.0, 0.0),
    Qwen3Omni: (12.5, 12.5, 0.0),
    Qwen2Audio: (50.0, 25.0, 30.0),
    WhisperBackbone: (50.0, 50.0, 30.0),
}
"""Frames a second inside of the tower, audio tokens a second, and the seconds that each clip is padded to."""


@dataclass(frozen=True)
class Tower:
    """An audio encoder: `frame_rate` frames a second of `hidden` numbers through `layers`, then `token_rate` tokens."""

    layers: int
    hidden: int
    intermediate: int
    frame_rate: float
    token_rate: float
    window: float
    """Seconds that every clip is padded to; 0 where it is not."""


@dataclass(frozen=True)
class Shape:
    """What memory depends on, other than the number of parameters. A decoder of `layers` equal layers."""

    kind: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 1
    """Feed-forward blocks, each `intermediate` wide, that a token goes through."""
    codes: int = 0
    """Rows of the head of codes (codebooks x codes of each); 0 for a model that writes text only."""
    tower: Tower | None = None
    qk_norm: bool = False
    """Whether queries and keys are normed, as in Qwen3."""
    adapted: tuple[int, ...] = ()
    """Widths of the inputs of the linears with an adapter that a token goes through in a layer."""
    rank: int = 0


@dataclass(frozen=True)
class Size:
    """Numbers of parameters. `parts` add up to `total`, in which adapters count; tied weights count once."""

    shape: Shape
    parts: dict[str, int]
    trained: int
    """Trained weights of the model itself."""
    adapters: int
    """Weights of low-rank adapters, all trained."""
    linears: int
    """Weights of the decoder's layers that are matrices: what autocast makes copies of."""
    largest: int
    """The largest single tensor."""
    heads: int
    """Trained weights of heads that no value depends on; 0 where the embedding is the head."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def size_of(model: str, config: ModelConfig, codebooks: int = 0, codebook_size: int = 1024) -> Size:
    """The size of a released model by name, or of a model folder (or hub id), when it is held as `config` says.

    With `codebooks` a decoder that writes text is counted as it would be after `dualize`. Raises ValueError for a name
    or a model_type that is not known and for a config.json that its class does not take.
    """
    return count(policy_of(model, config, codebooks, codebook_size))


def policy_of(model: str, config: ModelConfig, codebooks: int = 0, codebook_size: int = 1024) -> AudioPolicy:
    """The policy that `size_of` counts, on the device meta. Raises ValueError as it does."""
    return skeleton(_read(model), config, codebooks, codebook_size, model)


def skeleton(
    raw_config: dict[str, Any],
    config: ModelConfig,
    codebooks: int = 0,
    codebook_size: int = 1024,
    where: str = "config",
) -> AudioPolicy:
    """A policy of the real classes on the meta device, from the content of a config.json, with a stand-in tokenizer."""
    kind = str(raw_config.get("model_type"))
    if kind not in _FAMILIES:
        raise ValueError(f"{where}: model_type {kind!r} is not one that audiorl trains ({', '.join(_FAMILIES)})")
    config_class, model_class, backbone_class = _FAMILIES[kind]
    values = {k: v for k, v in raw_config.get("thinker_config", raw_config).items() if k != "model_type"}
    try:
        size = config_class(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}/config.json: {config_class.__name__} does not take it: {error}") from error
    with torch.device("meta"):
        model, backbone, speech = _build(size, model_class, backbone_class, raw_config, codebooks, codebook_size)
        tokenizer = backbone.tokenizer if hasattr(backbone, "tokenizer") else _stand_in()
        policy = AudioPolicy(model, tokenizer, None, backbone, config, speech)
    policy.source = ModelSource(copied=planned_copy(sum(tensor.numel for tensor in policy.source.copied.values())))
    return policy


def _read(model: str) -> dict[str, Any]:
    if model in RELEASED:
        return RELEASED[model]
    if not Path(model).exists() and "/" not in model:
        raise ValueError(f"{model}: neither a model folder nor one of {', '.join(RELEASED)}")
    if (Path(model) / "adapter_config.json").exists():
        raise ValueError(f"{model}: holds an adapter; name its base model, and the adapter's --lora-rank")
    return read_config(model)


def _build(
    size: Any, model_class: Any, backbone_class: Any, raw_config: dict[str, Any], codebooks: int, codebook_size: int
) -> tuple[PreTrainedModel, Backbone, FrameLayout | None]:
    if backbone_class is Higgs:
        model = model_class(size, use_text_head=True)
        add_routing(model)
        last = size.codebook_size - 1
        return model, Higgs(_llama_stand_in()), _layout(size.num_codebooks, last - 1)
    model = model_class(size)
    if backbone_class is WhisperBackbone:
        use_packed_decoder(model)
        return model, WhisperBackbone(_whisper_stand_in(), True), None
    backbone = TextDecoder(_stand_in()) if backbone_class is TextDecoder else backbone_class()
    speech = FrameLayout(**raw_config[LAYOUT_KEY]) if LAYOUT_KEY in raw_config else None
    if codebooks and speech is None:
        speech = _layout(codebooks, codebook_size)
    if speech is not None:
        add_branch(model, backbone.decoder(model), speech)
    return model, backbone, speech


@cache
def _stand_in() -> Any:
    return tiny_tokenizer([], 300)


@cache
def _llama_stand_in() -> Any:
    return tiny_llama_tokenizer([], 300)


@cache
def _whisper_stand_in() -> Any:
    return tiny_whisper_tokenizer([], 300)


def _layout(codebooks: int, codes: int) -> FrameLayout:
    return FrameLayout(codebooks, codes + 2, codes, codes + 1, 0, 0, 0, 0)


def count(policy: AudioPolicy) -> Size:
    """The size of a policy, real or on the meta device."""
    model, backbone = policy.model, policy.backbone
    decoder, head = backbone.decoder(model), backbone.head(model)
    embedding = decoder.get_input_embeddings()
    modules = {
        "projector": list(backbone.projector(model)),
        "audio tower": [backbone.audio_encoder(model)],
        "embeddings": [embedding, *(m for m in [getattr(decoder, "embed_audio_tokens", None)] if m is not None)],
        "text head": [head],
        "code head": [] if policy.speech is None else [policy.code_head],
        "audio FFNs": [
            m for layer in decoder.layers for name, m in layer.named_children() if name.startswith("audio_")
        ],
        "decoder layers": [decoder],
    }
    adapters = {id(p) for name, p in model.named_parameters() if ".lora_" in name}
    counted = set(adapters)
    parts: dict[str, int] = {}
    for name, owned in modules.items():  # the first that owns a weight counts it: the projector lies inside the tower
        own = {id(p): p.numel() for m in owned for p in m.parameters() if id(p) not in counted}
        counted |= set(own)
        parts[name] = sum(own.values())
    every = {id(p): p for p in model.parameters()}
    parts["rest"] = sum(p.numel() for key, p in every.items() if key not in counted)
    parts["adapters"] = sum(every[key].numel() for key in adapters)
    trained = {id(p): p.numel() for p in policy.trainable().values() if id(p) not in adapters}
    unread = [head.weight] if head.weight is not embedding.weight else []
    unread += [] if policy.speech is None else [policy.code_head.weight]
    layers = {id(p): p for layer in decoder.layers for p in layer.parameters()}
    return Size(
        shape=_shape(policy),
        parts={name: count for name, count in parts.items() if count},
        trained=sum(trained.values()),
        adapters=parts["adapters"],
        linears=sum(p.numel() for key, p in layers.items() if p.dim() > 1 and key not in adapters),
        largest=max(p.numel() for p in every.values()),
        heads=sum(trained.get(id(w), 0) for w in unread),
    )


def _shape(policy: AudioPolicy) -> Shape:
    decoder = policy.backbone.decoder(policy.model)
    c = decoder.config
    experts = int(getattr(c, "num_experts_per_tok", None) or 1)
    adapted = tuple(
        m.in_features
        for name, m in decoder.layers[0].named_modules()
        if isinstance(m, nn.Linear) and ".lora_A." in name and not name.startswith("audio_")
    )
    whisper = isinstance(policy.backbone, WhisperBackbone)  # what its config calls by these names is the encoder's
    heads = c.decoder_attention_heads if whisper else c.num_attention_heads
    wide = c.moe_intermediate_size if experts > 1 else c.decoder_ffn_dim if whisper else c.intermediate_size
    return Shape(
        kind=c.model_type,
        layers=len(decoder.layers),
        hidden=c.hidden_size,
        intermediate=wide,
        heads=heads,
        kv_heads=heads if whisper else c.num_key_value_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
        vocabulary=policy.backbone.head(policy.model).weight.shape[0],
        experts=experts,
        codes=0 if policy.speech is None else policy.code_head.weight.shape[0],
        tower=_tower(policy),
        qk_norm=hasattr(decoder.layers[0].self_attn, "q_norm"),
        adapted=adapted,
        rank=policy.config.lora.rank,
    )


def _tower(policy: AudioPolicy) -> Tower | None:
    rates = _WITH_AUDIO.get(type(policy.backbone))
    if rates is None:
        return None
    c = policy.backbone.audio_encoder(policy.model).config
    return Tower(c.encoder_layers, c.d_model, c.encoder_ffn_dim, *rates)
