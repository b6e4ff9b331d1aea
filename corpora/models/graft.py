"""A speech model from a text model and a Whisper encoder: a checkpoint of Qwen2.5-Omni's or Qwen2-Audio's own class.

The text model keeps its weights and gives the same logits; the encoder keeps Whisper's; only the projector between them
is new. Nothing is trained here: `corpora/recipes/align_speech.py` teaches the result to understand speech.

Why the classes hold other text models: a Llama layer is a Qwen2 layer whose q, k and v biases are zero. Qwen2-Audio's
decoder may also be a Qwen3 one in transformers, and vLLM builds its q and k norms where `qk_norm` is set.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperModel,
)

from audiorl.config import ModelConfig
from audiorl.models.attention import head_width
from audiorl.models.families import TEXT_MODEL_TYPES
from audiorl.models.families.generic import AudioLLM
from audiorl.models.families.qwen2_audio import Qwen2Audio
from audiorl.models.families.qwen_omni import QwenOmni, thinker_config
from audiorl.models.policy import AudioPolicy
from audiorl.models.tiny import SPECIAL
from audiorl.models.weights import naming_damage, silent_transformers

Family = Literal["qwen2.5-omni", "qwen2-audio"]
SAMPLE_RATE, HOP = 16_000, 160
"""Of all Whisper models: 16 kHz, a frame every 10 ms."""
TURN_TOKENS = ("<|im_start|>", "<|im_end|>")
"""The families write conversations in ChatML."""


def graft(
    llm: str | Path,
    encoder: str | Path,
    family: Family,
    *,
    encoder_layers: int = 0,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    seed: int = 0,
) -> AudioPolicy:
    """Make a policy of `family` from the text model `llm` and the Whisper model `encoder`.

    llm: a Llama, Qwen2 or Qwen3 model: a folder, a hub id, or a .gguf file (which needs the package gguf).
    encoder: a Whisper model: a folder or a hub id. encoder_layers: new transformer layers after Whisper's own, each the
    identity at first. dtype: of all weights; "auto" is the text model's. seed: of the new weights.

    The vocabulary grows by the tokens that the family needs; their embeddings start as the mean of all. Raises
    ValueError, naming the option and the reason, for a model that the family cannot hold.
    """
    tokenizer, text = read_text_model(llm, family, dtype)
    extractor, whisper = read_encoder(encoder)
    token_ids = add_tokens(llm, tokenizer, text)
    tokenizer = with_processor_names(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build = _omni if family == "qwen2.5-omni" else _qwen2_audio
        model = build(text, whisper, extractor, token_ids, encoder_layers)
    if family == "qwen2.5-omni":
        backbone: AudioLLM = QwenOmni(family, tokenizer)
    else:
        backbone = Qwen2Audio(family, tokenizer, Qwen2AudioProcessor(extractor, tokenizer))
    model.load_state_dict(_text_weights(text, backbone, model), strict=False)
    _copy_encoder(backbone.audio_encoder(model), whisper, encoder_layers)
    _scale_projector(backbone.projector(model)[0], text.get_input_embeddings().weight)
    model.generation_config = _generation(text, tokenizer)
    return AudioPolicy(model.to(text.dtype), tokenizer, extractor, backbone, ModelConfig())


def vllm_problem(policy: AudioPolicy) -> str | None:
    """Return why vLLM cannot load the policy's checkpoint; None where it can."""
    config = policy.backbone.decoder(policy.model).config
    width = config.hidden_size // config.num_attention_heads
    if config.head_dim * config.num_attention_heads == config.hidden_size:
        return None
    heads = f"heads of hidden_size / num_attention_heads = {width}"
    return f"its Qwen2 layers have {heads}, this text model of {config.head_dim}"


# -- the text model ----------------------------------------------------------------------------------------------------


def read_text_model(llm: str | Path, family: Family, dtype: str) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Read the tokenizer and the model. Raises ValueError for one that `family` cannot hold."""
    place, options = str(llm), dict[str, Any](trust_remote_code=False)  # else transformers may ask whether to run it
    if place.endswith(".gguf"):
        place, options = str(Path(llm).parent), {"gguf_file": Path(llm).name, **options}
    try:
        config = AutoConfig.from_pretrained(place, **options)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, **options)
    except ImportError as error:
        raise ValueError(f"--llm {llm}: a .gguf file needs the package gguf: pip install gguf") from error
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--llm {llm}: not a text model that transformers reads ({error})") from error
    check_text_model(llm, config, family)
    if not tokenizer.chat_template:
        raise ValueError(
            f"--llm {llm}: its tokenizer has no chat template, so this is a base model that answers no questions; "
            "give an instruction-tuned model"
        )
    with silent_transformers(), naming_damage(llm):
        text: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            place, dtype="auto" if dtype == "auto" else getattr(torch, dtype), **options
        )
    rows = len(text.get_input_embeddings().weight)
    if len(tokenizer) > rows:
        raise ValueError(
            f"--llm {llm}: the tokenizer has {len(tokenizer)} tokens and the model embeddings for {rows}; "
            "do they belong together?"
        )
    return tokenizer, text


def check_text_model(llm: str | Path, config: Any, family: Family) -> None:
    """Raise ValueError where `family` cannot hold a text model of this config."""
    kind = config.model_type
    if kind not in TEXT_MODEL_TYPES:
        raise ValueError(
            f"--llm {llm}: model_type {kind!r} is not one of {', '.join(TEXT_MODEL_TYPES)}, whose layers the families "
            "hold"
        )
    layers = getattr(config, "layer_types", None) or ()
    window = getattr(config, "use_sliding_window", False) and config.sliding_window is not None
    omni, rope = family == "qwen2.5-omni", config.rope_parameters["rope_type"]
    for obstacle, reason in (
        (
            window or any(layer != "full_attention" for layer in layers),
            "some of its layers attend to a sliding window, which neither engines nor packing here can do",
        ),
        (
            getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False),
            "its output or MLP layers have biases, for which the family's layers have no place",
        ),
        (config.hidden_act != "silu", f"its activation is {config.hidden_act!r}; the family's layers have silu"),
        (
            omni and kind == "qwen3",
            "Qwen2.5-Omni's layers lack the q and k norms of Qwen3; --family qwen2-audio holds it",
        ),
        (
            omni and rope != "default",
            f"Qwen2.5-Omni has no place for its scaled positions ({rope}); --family qwen2-audio holds them",
        ),
    ):
        if obstacle:
            raise ValueError(f"--llm {llm}: {reason}")


def add_tokens(llm: str | Path, tokenizer: PreTrainedTokenizerBase, text: PreTrainedModel) -> dict[str, int]:
    """Give the tokenizer and the text model the family's tokens. Returns their ids by text.

    Embeddings that no token uses yet are used first; then the vocabulary grows.
    """
    tokenizer.add_tokens([t for t in (*SPECIAL.values(), *TURN_TOKENS) if t not in tokenizer.get_vocab()], True)
    tokenizer.eos_token = "<|im_end|>"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    embedding = text.get_input_embeddings().weight
    used = len(embedding)
    if len(tokenizer) > used:
        mean, head_mean = embedding.detach().mean(0), text.lm_head.weight.detach().mean(0)
        text.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        with torch.no_grad():
            text.get_input_embeddings().weight[used:] = mean
            text.lm_head.weight[used:] = head_mean
    ids = {t: int(tokenizer.convert_tokens_to_ids(t)) for t in (*SPECIAL.values(), *TURN_TOKENS)}
    assert max(ids.values()) < len(text.get_input_embeddings().weight), f"{llm}: {ids}"
    return ids


def with_processor_names(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the tokenizer with the attributes that transformers' processors read (`audio_token`, …).

    It adds no token in front of every text, which ChatML lacks.
    """
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        after = backend["post_processor"] or {"type": "Sequence", "processors": []}
        steps = after["processors"] if after["type"] == "Sequence" else [after]
        steps = [step for step in steps if step["type"] != "TemplateProcessing"]
        backend["post_processor"] = {"type": "Sequence", "processors": steps} if steps else None
        tokenizer.backend_tokenizer.post_processor = Tokenizer.from_str(json.dumps(backend)).post_processor
    tokenizer.chat_template = None  # the family's is written when the model is saved
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        file = Path(folder) / "tokenizer_config.json"
        config = json.loads(file.read_text()) | {"extra_special_tokens": SPECIAL, "add_bos_token": False}
        file.write_text(json.dumps(config))
        named: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return named


def _generation(text: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """Turns end at ChatML's token and at those of the text model."""
    before = text.generation_config.eos_token_id if text.generation_config else None
    ends = set(before if isinstance(before, list) else [before]) | {tokenizer.eos_token_id}
    return GenerationConfig(eos_token_id=sorted(i for i in ends if i is not None), pad_token_id=tokenizer.pad_token_id)


def _text_weights(text: PreTrainedModel, backbone: Any, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the text model's weights by the names in `model`, with zero biases where the family's layers have one."""
    decoder, head = backbone.decoder(model), backbone.head(model)
    modules = {id(module): name for name, module in model.named_modules()}
    weights = dict(text.model.state_dict())
    placed = decoder.state_dict()
    weights |= {name: torch.zeros_like(p) for name, p in placed.items() if name not in weights and "bias" in name}
    assert weights.keys() == placed.keys(), weights.keys() ^ placed.keys()
    renamed = {f"{modules[id(decoder)]}.{name}": tensor for name, tensor in weights.items()}
    return renamed | {f"{modules[id(head)]}.weight": text.lm_head.weight.detach()}


# -- the encoder -------------------------------------------------------------------------------------------------------


def read_encoder(encoder: str | Path) -> tuple[WhisperFeatureExtractor, nn.Module]:
    """Read the feature extractor and Whisper's encoder. Raises ValueError for another model or another input."""
    try:
        config = AutoConfig.from_pretrained(str(encoder), trust_remote_code=False)
        extractor = WhisperFeatureExtractor.from_pretrained(str(encoder))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--encoder {encoder}: not a Whisper model that transformers reads ({error})") from error
    if not isinstance(config, WhisperConfig):
        raise ValueError(f"--encoder {encoder}: model_type {config.model_type!r}; only Whisper's encoder fits here")
    where = f"--encoder {encoder}: preprocessor_config.json"
    if extractor.feature_size != config.num_mel_bins:
        raise ValueError(
            f"{where} gives {extractor.feature_size} mel bins and the encoder takes {config.num_mel_bins}; do they "
            "belong together?"
        )
    if (extractor.sampling_rate, extractor.hop_length) != (SAMPLE_RATE, HOP):
        raise ValueError(
            f"--encoder {encoder}: its features are of {extractor.sampling_rate} Hz, one every "
            f"{extractor.hop_length} samples; the families read {SAMPLE_RATE} Hz, one every {HOP}"
        )
    if extractor.nb_max_frames != 2 * config.max_source_positions:
        raise ValueError(
            f"{where} pads to {extractor.nb_max_frames} frames and the encoder takes "
            f"{2 * config.max_source_positions}; do they belong together?"
        )
    with silent_transformers(), naming_damage(encoder):
        whisper: nn.Module = WhisperModel.from_pretrained(str(encoder), dtype=torch.float32).encoder
    return extractor, whisper


def _encoder_sizes(whisper: Any, new_layers: int) -> dict[str, Any]:
    shared = ("d_model", "encoder_attention_heads", "encoder_ffn_dim", "num_mel_bins", "max_source_positions")
    names = (*shared, "activation_function", "scale_embedding")
    sizes = {name: getattr(whisper.config, name) for name in names}
    return sizes | {"encoder_layers": whisper.config.encoder_layers + new_layers}


def _copy_encoder(audio_encoder: Any, whisper: nn.Module, new_layers: int) -> None:
    """Copy Whisper's weights; a new layer adds nothing to its input at first."""
    last_norm = "ln_post." if hasattr(audio_encoder, "ln_post") else "layer_norm."
    weights = {re.sub(r"^layer_norm\.", last_norm, name): w for name, w in whisper.state_dict().items()}
    positions = weights.get("embed_positions.weight")
    computed = getattr(getattr(audio_encoder, "positional_embedding", None), "positional_embedding", None)
    if computed is not None and positions is not None:
        if not torch.allclose(computed, positions.float(), atol=2e-3):
            raise ValueError(
                "--encoder: its position embeddings are not Whisper's sinusoids, which Qwen2.5-Omni computes; "
                "--family qwen2-audio holds them"
            )
        del weights["embed_positions.weight"]
    _, unexpected = audio_encoder.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    if new_layers:
        with torch.no_grad():
            for layer in list(audio_encoder.layers)[-new_layers:]:
                for last in (layer.self_attn.out_proj, layer.fc2):
                    last.weight.zero_()
                    last.bias.zero_()


def _scale_projector(projector: Any, embeddings: Tensor) -> None:
    """Draw random weights that make a projected frame as large as a token's embedding (inputs have variance 1)."""
    linear = projector if isinstance(projector, nn.Linear) else projector.linear
    with torch.no_grad():
        size = embeddings.float().pow(2).mean().sqrt() / linear.in_features**0.5
        linear.weight.normal_(0.0, float(size))
        linear.bias.zero_()


# -- the families ------------------------------------------------------------------------------------------------------


def _text_sizes(text: Any, tokens: Mapping[str, int]) -> dict[str, Any]:
    config = text.config
    shared = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names = (*shared, "max_position_embeddings", "rms_norm_eps", "initializer_range", "tie_word_embeddings")
    return {name: getattr(config, name) for name in names} | dict(
        head_dim=head_width(config),
        vocab_size=len(text.get_input_embeddings().weight),
        rope_parameters=dict(config.rope_parameters),
        bos_token_id=None,
        eos_token_id=tokens["<|im_end|>"],
        pad_token_id=tokens["<|im_end|>"],
    )


def _omni(
    text: Any, whisper: Any, extractor: WhisperFeatureExtractor, tokens: Mapping[str, int], encoder_layers: int
) -> PreTrainedModel:
    sizes = _text_sizes(text, tokens)
    half = sizes["head_dim"] // 2
    sizes["rope_parameters"]["mrope_section"] = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    window = min(whisper.config.max_source_positions, extractor.nb_max_frames // 2)
    audio = _encoder_sizes(whisper, encoder_layers) | dict(n_window=window)
    config = thinker_config(audio, sizes, tokens, tokens["<|im_start|>"])
    with silent_transformers():
        return Qwen2_5OmniThinkerForConditionalGeneration(config)


def _qwen2_audio(
    text: Any, whisper: Any, extractor: WhisperFeatureExtractor, tokens: Mapping[str, int], encoder_layers: int
) -> PreTrainedModel:
    sizes = _text_sizes(text, tokens)
    if text.config.model_type == "qwen3":
        # vLLM's Qwen2 layer has biases, and q and k norms where `qk_norm` says so.
        sizes |= dict(model_type="qwen3", attention_bias=True, qk_norm=True)
    else:
        sizes |= dict(model_type="qwen2")
    sizes["tie_word_embeddings"] = False  # the class cannot tie them: the head becomes a copy of the embedding
    config = Qwen2AudioConfig(
        audio_config=_encoder_sizes(whisper, encoder_layers) | dict(model_type="qwen2_audio_encoder"),
        text_config=sizes,
        audio_token_index=tokens["<|AUDIO|>"],
        tie_word_embeddings=False,
    )
    with silent_transformers():
        return Qwen2AudioForConditionalGeneration(config)
