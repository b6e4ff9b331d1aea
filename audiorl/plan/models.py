"""How large a model is: its parameters, counted on the real classes without allocating them.

The model is built on torch's meta device, where a tensor has a shape but no data, and becomes an `AudioPolicy`: the
code that trains decides which weights count as trained. released.json holds the config.json of released models, without
what transformers' classes have as defaults, so that one can plan before downloading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from audiorl.config import ModelConfig
from audiorl.models import AudioPolicy, Backbone, FrameLayout, read_config
from audiorl.models.families import RECOGNISER_TYPES, audio_llm, generic, qwen_omni, recogniser
from audiorl.models.families.higgs import Higgs, add_routing
from audiorl.models.families.text import MODELS, TextDecoder
from audiorl.models.speech import LAYOUT_KEY, add_branch
from audiorl.models.tiny import tiny_llama_tokenizer, tiny_tokenizer, tiny_whisper_tokenizer

RELEASED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "released.json").read_text())
"""config.json by the name that `audiorl doctor --plan` takes."""
_FRAMES = {
    "audioflamingo3_encoder": (50.0, True),
    "glmasr_encoder": (50.0, True),
    "moonshine": (16_000 / 384, False),
    "parakeet_encoder": (12.5, False),
    "qwen2_5_omni_audio_encoder": (50.0, False),
    "qwen2_audio_encoder": (50.0, True),
    "qwen3_asr_encoder": (12.5, False),
    "qwen3_omni_moe_audio_encoder": (12.5, False),
    "voxtral_encoder": (50.0, True),
    "whisper": (50.0, True),
}
"""By model_type of an audio encoder: frames a second inside of it, and whether each clip is padded to its positions."""
_UNKNOWN = "whose memory the plan does not know; watch that of a short run"


@dataclass(frozen=True)
class Tower:
    """An audio encoder: `frame_rate` frames a second; each clip is padded to `window` seconds, 0 where it is not.

    kept, ends: numbers that a layer, and what comes before and after the layers, keep for each frame. together: a pass
    takes several clips.
    """

    layers: int
    hidden: int
    frame_rate: float
    window: float
    kept: float
    ends: float
    together: bool


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
    speech: FrameLayout | None = None
    backbone: Backbone
    with torch.device("meta"):
        if kind == "higgs_audio_v2":
            size = _made(transformers.HiggsAudioV2Config, raw_config, where)
            model = transformers.HiggsAudioV2ForConditionalGeneration(size, use_text_head=True)
            tokenizer, last = tiny_llama_tokenizer([], 300), size.codebook_size - 1
            backbone = Higgs(tokenizer)
            add_routing(model)
            speech = FrameLayout(size.num_codebooks, last + 1, last - 1, last, 0, 0, 0, 0)
            return AudioPolicy(model, tokenizer, None, backbone, config, speech)
        if kind in RECOGNISER_TYPES:
            family = recogniser(kind)
            model = family.model_class(_made(family.model_class.config_class, raw_config, where))
            tokenizer = tiny_whisper_tokenizer([], 300)
            tokenizer.add_tokens([str(family.audio_token)], special_tokens=True)
            recognises = family(tokenizer, None)
            recognises.use_packed_decoder(model)
            return AudioPolicy(model, tokenizer, None, recognises, config)
        tokenizer = tiny_tokenizer([], 300)
        if kind in MODELS:
            model_class, backbone = MODELS[kind], TextDecoder(tokenizer)
        else:
            omni = qwen_omni.family_of(kind)
            model_class = omni.thinker_class() if omni else generic.model_class(kind, audio_llm(kind), where=where)
            backbone = listens = (omni or audio_llm(kind))(kind, tokenizer)
            listens.audio_token = "<|AUDIO|>"
        made = _made(model_class.config_class, raw_config.get("thinker_config", raw_config), where)
        if getattr(made.get_text_config(), "num_kv_shared_layers", 0):
            raise ValueError(f"{where}: {kind} has layers that share keys and values, {_UNKNOWN}")
        model = model_class(made)
        if LAYOUT_KEY in raw_config:
            speech = FrameLayout(**raw_config[LAYOUT_KEY])
            add_branch(model, backbone.decoder(model), speech)
        policy = AudioPolicy(model, tokenizer, None, backbone, config, speech)
    if backbone.audio_token and _tower(policy) is None:
        raise ValueError(f"{where}: {kind} has an audio encoder, {_UNKNOWN}")
    return policy


def _made(config_class: Any, content: Mapping[str, Any], where: str) -> Any:
    try:
        return config_class(**{k: v for k, v in content.items() if k != "model_type"})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}/config.json: {config_class.__name__} does not take it: {error}") from error


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


def _first(config: Any, *names: str) -> Any:
    """Return the first of these values that a configuration has."""
    return next(value for name in names if (value := getattr(config, name, None)) is not None)


def _tower(policy: AudioPolicy) -> Tower | None:
    encoder: Any = getattr(policy.backbone.audio_encoder(policy.model), "config", None)
    if getattr(encoder, "model_type", None) not in _FRAMES:
        return None
    rate, padded = _FRAMES[encoder.model_type]
    window = _first(encoder, "max_source_positions", "max_position_embeddings") / rate if padded else 0.0
    layers = _first(encoder, "encoder_layers", "encoder_num_hidden_layers", "num_hidden_layers")
    width = _first(encoder, "d_model", "hidden_size")
    inner = _first(encoder, "encoder_ffn_dim", "intermediate_size")
    # Norms' inputs and outputs, queries, keys, values and the attention's output, and the feed-forward block before and
    # after its activation; the convolutions' inputs and outputs.
    kept, ends = 8 * width + 2 * inner, 6 * width
    if encoder.model_type == "parakeet_encoder":  # measured: two feed-forward blocks, convolutions over the spectrogram
        kept = 22 * width + 4 * inner
        ends = 4 * width + 10 * encoder.num_mel_bins * encoder.subsampling_conv_channels // 3
    elif encoder.model_type == "moonshine":  # measured: convolutions over the waveform, 384 samples a frame
        kept, ends = 10 * width + 2 * inner, 22 * width + 384
    together = encoder.model_type not in ("moonshine", "parakeet_encoder")
    return Tower(layers, width, rate, window, kept, ends, together)


def _shape(policy: AudioPolicy) -> Shape:
    decoder = policy.backbone.decoder(policy.model)
    c = decoder.config
    experts = int(getattr(c, "num_experts_per_tok", None) or 1)
    # What an encoder-decoder's config calls by the usual names may be the encoder's.
    heads = _first(c, "decoder_attention_heads", "decoder_num_attention_heads", "num_attention_heads")
    ffn = "moe_intermediate_size" if experts > 1 else "decoder_ffn_dim"
    return Shape(
        kind=policy.model.config.model_type,
        layers=len(decoder.layers),
        hidden=c.hidden_size,
        intermediate=_first(c, ffn, "intermediate_size"),
        heads=heads,
        kv_heads=getattr(c, "decoder_num_key_value_heads", None) or getattr(c, "num_key_value_heads", None) or heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
        vocabulary=policy.backbone.head(policy.model).weight.shape[0],
        experts=experts,
        codes=0 if policy.speech is None else policy.code_head.weight.shape[0],
        tower=_tower(policy),
        qk_norm=hasattr(decoder.layers[0].self_attn, "q_norm"),
        adapted=tuple(
            m.in_features
            for name, m in decoder.layers[0].named_modules()
            if isinstance(m, nn.Linear) and ".lora_A." in name and not name.startswith("audio_")
        ),
        rank=policy.config.lora.rank,
    )
