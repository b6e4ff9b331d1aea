"""How large a model is: its parameters, counted on the real classes without allocating them.

The model is built on torch's meta device, where a tensor has a shape but no data, and becomes an `AudioPolicy`: the
code that trains decides which weights count as trained. released.json holds the config.json of released models, without
what transformers' classes have as defaults, so that one can plan before downloading.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from audiorl.config import ModelConfig
from audiorl.models import AudioPolicy, FrameLayout, read_config
from audiorl.models.families.higgs import Higgs, add_routing
from audiorl.models.families.qwen2_audio import Qwen2Audio
from audiorl.models.families.qwen_omni import QwenOmni
from audiorl.models.families.text import MODELS, TextDecoder
from audiorl.models.families.whisper import WhisperBackbone, use_packed_decoder
from audiorl.models.speech import LAYOUT_KEY, add_branch
from audiorl.models.tiny import tiny_llama_tokenizer, tiny_tokenizer, tiny_whisper_tokenizer

RELEASED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "released.json").read_text())
"""config.json by the name that `audiorl doctor --plan` takes."""
_OMNI = (transformers.Qwen2_5OmniThinkerConfig, transformers.Qwen2_5OmniThinkerForConditionalGeneration, QwenOmni)
_OMNI3 = (
    transformers.Qwen3OmniMoeThinkerConfig,
    transformers.Qwen3OmniMoeThinkerForConditionalGeneration,
    partial(QwenOmni, "qwen3"),
)
_FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "qwen2_5_omni": _OMNI,
    "qwen2_5_omni_thinker": _OMNI,
    "qwen3_omni_moe": _OMNI3,
    "qwen3_omni_moe_thinker": _OMNI3,
    "qwen2_audio": (transformers.Qwen2AudioConfig, transformers.Qwen2AudioForConditionalGeneration, Qwen2Audio),
    "whisper": (transformers.WhisperConfig, transformers.WhisperForConditionalGeneration, WhisperBackbone),
    "higgs_audio_v2": (transformers.HiggsAudioV2Config, transformers.HiggsAudioV2ForConditionalGeneration, Higgs),
    **{kind: (model.config_class, model, TextDecoder) for kind, model in MODELS.items()},
}
_TOWER_RATES = {QwenOmni: (50.0, 0.0), Qwen2Audio: (50.0, 30.0), WhisperBackbone: (50.0, 30.0)}
"""Frames a second inside of an audio encoder, and the seconds that each clip is padded to."""


@dataclass(frozen=True)
class Tower:
    """An audio encoder: `frame_rate` frames a second; each clip is padded to `window` seconds, 0 where it is not."""

    layers: int
    hidden: int
    intermediate: int
    frame_rate: float
    window: float


@dataclass(frozen=True)
class Shape:
    """What memory depends on, other than the number of parameters. A decoder of `layers` equal layers.

    experts: feed-forward blocks, each `intermediate` wide, that a token goes through. codes: rows of the head of codes
    (codebooks x codes of each), 0 for a model that writes text only. qk_norm: queries and keys are normed, as in Qwen3.
    adapted: widths of the inputs of the linears with an adapter of `rank` that a token goes through in a layer.
    """

    kind: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 1
    codes: int = 0
    tower: Tower | None = None
    qk_norm: bool = False
    adapted: tuple[int, ...] = ()
    rank: int = 0


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters. `parts` add up to `total`, in which adapters count; tied weights count once.

    trained: trained weights of the model itself. adapters: low-rank ones, all trained. linears: matrices of the
    decoder's layers, which autocast copies. largest: the largest tensor. heads: trained weights of heads that no value
    depends on.
    """

    shape: Shape
    parts: dict[str, int]
    trained: int
    adapters: int = 0
    linears: int = 0
    largest: int = 0
    heads: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def in_layers(self) -> int:
        """Weights inside of the decoder's layers."""
        return self.adapters + sum(self.parts.get(name, 0) for name in ("decoder layers", "audio FFNs"))


@cache
def size_of(model: str, config: ModelConfig) -> ModelSize:
    """Return the size of a released model by name, or of a model folder (or hub id), when held as `config` says.

    Raises ValueError for a name or a model_type that is not known and for a config.json that its class does not take.
    """
    if model not in RELEASED and not Path(model).exists() and "/" not in model:
        raise ValueError(f"{model}: neither a model folder nor one of {', '.join(RELEASED)}")
    if (Path(model) / "adapter_config.json").exists():
        raise ValueError(f"{model}: holds an adapter; name its base model, and the adapter's --lora-rank")
    return count(skeleton(RELEASED[model] if model in RELEASED else read_config(model), config, model))


def skeleton(raw_config: dict[str, Any], config: ModelConfig, where: str = "config") -> AudioPolicy:
    """Build a policy of the real classes on the meta device from the content of a config.json."""
    kind = str(raw_config.get("model_type"))
    if kind not in _FAMILIES:
        raise ValueError(f"{where}: model_type {kind!r} is not one that audiorl trains ({', '.join(_FAMILIES)})")
    config_class, model_class, backbone_class = _FAMILIES[kind]
    values = {k: v for k, v in raw_config.get("thinker_config", raw_config).items() if k != "model_type"}
    try:
        size = config_class(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}/config.json: {config_class.__name__} does not take it: {error}") from error
    speech: FrameLayout | None = None
    with torch.device("meta"):
        model = model_class(size, use_text_head=True) if backbone_class is Higgs else model_class(size)
        tokenizer = tiny_tokenizer([], 300)
        if backbone_class is Higgs:
            tokenizer, last = tiny_llama_tokenizer([], 300), size.codebook_size - 1
            backbone: Any = Higgs(tokenizer)
            add_routing(model)
            speech = FrameLayout(size.num_codebooks, last + 1, last - 1, last, 0, 0, 0, 0)
        elif backbone_class is WhisperBackbone:
            tokenizer = tiny_whisper_tokenizer([], 300)
            backbone = WhisperBackbone(tokenizer, True)
            use_packed_decoder(model)
        else:
            backbone = TextDecoder(tokenizer) if backbone_class is TextDecoder else backbone_class()
            if LAYOUT_KEY in raw_config:
                speech = FrameLayout(**raw_config[LAYOUT_KEY])
                add_branch(model, backbone.decoder(model), speech)
        return AudioPolicy(model, tokenizer, None, backbone, config, speech)


def count(policy: AudioPolicy) -> ModelSize:
    """Count the weights of a policy, real or on the meta device."""
    model, backbone = policy.model, policy.backbone
    decoder, head = backbone.decoder(model), backbone.head(model)
    embedding = decoder.get_input_embeddings()
    code_heads = [] if policy.speech is None else [policy.code_head]
    # The first that owns a weight counts it: the projector lies inside of the tower, and all inside of the decoder.
    modules = {
        "projector": list(backbone.projector(model)),
        "audio tower": [backbone.audio_encoder(model)],
        "embeddings": [embedding, *(m for m in [getattr(decoder, "embed_audio_tokens", None)] if m is not None)],
        "text head": [head],
        "code head": code_heads,
        "audio FFNs": [m for layer in decoder.layers for name, m in layer.named_children() if name[:6] == "audio_"],
        "decoder layers": [decoder],
    }
    every = {id(p): p for p in model.parameters()}
    adapters = {id(p) for name, p in model.named_parameters() if ".lora_" in name}
    left = every.keys() - adapters
    parts: dict[str, int] = {}
    for name, owned in {**modules, "rest": [model]}.items():
        own = {id(p): p.numel() for m in owned for p in m.parameters() if id(p) in left}
        left -= own.keys()
        parts[name] = sum(own.values())
    parts["adapters"] = sum(every[key].numel() for key in adapters)
    trained = {id(p): p.numel() for p in policy.trainable().values() if id(p) not in adapters}
    unread = [m.weight for m in code_heads] + ([head.weight] if head.weight is not embedding.weight else [])
    layers = {id(p): p for layer in decoder.layers for p in layer.parameters()}
    return ModelSize(
        shape=_shape(policy),
        parts={name: number for name, number in parts.items() if number},
        trained=sum(trained.values()),
        adapters=parts["adapters"],
        linears=sum(p.numel() for key, p in layers.items() if p.dim() > 1 and key not in adapters),
        largest=max(p.numel() for p in every.values()),
        heads=sum(trained.get(id(weight), 0) for weight in unread),
    )


def _shape(policy: AudioPolicy) -> Shape:
    decoder = policy.backbone.decoder(policy.model)
    c = decoder.config
    experts = int(getattr(c, "num_experts_per_tok", None) or 1)
    whisper = isinstance(policy.backbone, WhisperBackbone)  # what its config calls by the usual names is the encoder's
    heads = c.decoder_attention_heads if whisper else c.num_attention_heads
    tower = None
    if type(policy.backbone) in _TOWER_RATES:
        t = policy.backbone.audio_encoder(policy.model).config
        rate, window = _TOWER_RATES[type(policy.backbone)]
        if getattr(policy.backbone, "generation", "") == "qwen3":
            rate /= 4
        tower = Tower(t.encoder_layers, t.d_model, t.encoder_ffn_dim, rate, window)
    return Shape(
        kind=c.model_type,
        layers=len(decoder.layers),
        hidden=c.hidden_size,
        intermediate=c.moe_intermediate_size if experts > 1 else c.decoder_ffn_dim if whisper else c.intermediate_size,
        heads=heads,
        kv_heads=heads if whisper else c.num_key_value_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
        vocabulary=policy.backbone.head(policy.model).weight.shape[0],
        experts=experts,
        codes=0 if policy.speech is None else policy.code_head.weight.shape[0],
        tower=tower,
        qk_norm=hasattr(decoder.layers[0].self_attn, "q_norm"),
        adapted=tuple(
            m.in_features
            for name, m in decoder.layers[0].named_modules()
            if isinstance(m, nn.Linear) and ".lora_A." in name and not name.startswith("audio_")
        ),
        rank=policy.config.lora.rank,
    )
