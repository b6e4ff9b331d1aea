"""Qwen2.5-Omni and Qwen3-Omni thinkers.

Inputs are built from the feature extractor and the tokenizer alone: the models' own processor also needs a video stack.
For text and audio the three rows of M-RoPE positions are equal, so plain positions serve.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as qwen3_omni

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig
from audiorl.models.audio_encoder import check_min_frames
from audiorl.models.backbone import Backbone
from audiorl.models.policy import AudioPolicy
from audiorl.models.prompts import DEFAULT_SYSTEM, chatml, chatml_template
from audiorl.models.speech import CODEC_KEY, LAYOUT_KEY, FrameLayout, branch_builder
from audiorl.models.tiny import SPECIAL, seeded, tiny_decoder_sizes, tiny_extractor, tiny_tokenizer
from audiorl.models.weights import (
    BASE_KEY,
    IN_CHECKPOINT,
    ModelSource,
    load_frontend,
    load_model,
    read_copied,
    remove_vision,
    silent_transformers,
    vision_tensors,
)
from audiorl.types import Message

_MOVED = re.compile(r"^model\.(?:(audio_tower\.|visual\.)|language_model\.)")
"""Since transformers 5.21 a thinker's encoders and decoder lie in its `model`; checkpoints keep the names of before."""


class QwenOmni(Backbone):
    """Backbone of the Omni thinkers: 25 audio tokens a second of Qwen2.5-Omni, 12.5 of Qwen3-Omni."""

    def __init__(self, generation: Literal["qwen2.5", "qwen3"] = "qwen2.5"):
        self.generation = generation
        image = {"image_processor_type": "Qwen2VLImageProcessor"}
        if generation == "qwen3":
            self.audio_token, self.bos, self.eos = "<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"
            self.default_system, processor = None, "Qwen3OmniMoeProcessor"
        else:
            self.audio_token, self.bos, self.eos = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
            self.default_system, processor = DEFAULT_SYSTEM, "Qwen2_5OmniProcessor"
        self.processor_files = {
            "preprocessor_config.json": {"processor_class": processor, **image},
            "video_preprocessor_config.json": {"video_processor_type": "Qwen2VLVideoProcessor"},
        }

    def chat(self, messages: Sequence[Message]) -> list[str | AudioClip]:
        return chatml(messages, lambda clip, _: [self.bos, clip, self.eos], self.default_system)

    def chunk(self, clip: AudioClip) -> list[str | AudioClip]:
        return [self.bos, clip, self.eos]

    def chat_template(self) -> str | None:
        return chatml_template(f"{self.bos}{self.audio_token}{self.eos}", self.default_system)

    def save_model(self, model: PreTrainedModel, folder: str, source: ModelSource) -> None:
        """Write a whole Omni model with this thinker and no talker: vLLM reads the thinker from such a config only."""
        kind = "Qwen3OmniMoe" if self.generation == "qwen3" else "Qwen2_5Omni"
        config_class = getattr(transformers, f"{kind}Config")
        model_class = getattr(transformers, f"{kind}ForConditionalGeneration")
        config = source.config
        thinker = model.config.to_dict()
        embedding = self.decoder(model).embed_tokens.weight
        thinker["text_config"]["tie_word_embeddings"] = self.head(model).weight is embedding
        others = {k: v for k, v in config.items() if k in ("talker_config", "token2wav_config", "code2wav_config")}
        with silent_transformers():  # a talker's config names token ids outside of its own vocabulary
            saved = config_class(thinker_config=thinker, enable_audio_output=False, dtype=model.dtype, **others)
        for key in (LAYOUT_KEY, CODEC_KEY):  # `read_config` looks for them here
            if hasattr(model.config, key):
                setattr(saved, key, getattr(model.config, key))
        if BASE_KEY in config:
            setattr(saved, BASE_KEY, config[BASE_KEY])
        with torch.device("meta"):
            whole: PreTrainedModel = model_class(saved)
        whole.thinker, whole.generation_config = model, model.generation_config
        # In their own type: no bit of what is not trained changes.
        copied = {f"thinker.{name}": tensor for name, tensor in read_copied(source.copied).items()}
        whole.save_pretrained(folder, state_dict={**whole.state_dict(), **copied})

    def weight_name(self, name: str) -> str:
        return _MOVED.sub(lambda match: match[1] or "model.", name)

    def decoder(self, model: Any) -> Any:
        return model.model if hasattr(model, "audio_tower") else model.model.language_model

    def audio_encoder(self, model: Any) -> Any:
        return model.audio_tower if hasattr(model, "audio_tower") else model.model.audio_tower

    def projector(self, model: Any) -> Sequence[nn.Module]:
        encoder = self.audio_encoder(model)
        return [encoder.proj1, encoder.proj2] if self.generation == "qwen3" else [encoder.proj]

    def project(self, model: Any, encoder_output: Tensor) -> Tensor:
        encoder = self.audio_encoder(model)
        if self.generation == "qwen3":
            return encoder.proj2(encoder.act(encoder.proj1(encoder_output)))
        return encoder.proj(encoder_output)

    def tokens(self, model: Any, frames: int) -> int:
        return int(self._tokens(model, torch.tensor([frames]))[0])

    def _tokens(self, model: Any, lengths: Tensor) -> list[int]:
        encoder = self.audio_encoder(model)
        if self.generation == "qwen3":
            return qwen3_omni._get_feat_extract_output_lengths(lengths, encoder.n_window).tolist()
        return encoder._get_feat_extract_output_lengths(lengths)[1].tolist()

    def encode_audio(self, model: Any, mels: Sequence[Tensor]) -> list[Tensor]:
        for mel in mels:
            check_min_frames(mel.shape[1])
        encoder = self.audio_encoder(model)
        features = torch.cat(list(mels), dim=1)  # clips side by side
        lengths = torch.tensor([mel.shape[1] for mel in mels]).to(features.device)
        arguments = {}
        if self.generation != "qwen3":
            arguments["aftercnn_lens"] = encoder._get_feat_extract_output_lengths(lengths)[0]
        outputs: list[Tensor] = []
        # The audio encoder has no call that stops before its projector: take what enters that.
        hook = self.projector(model)[0].register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
        try:
            encoder(features, feature_lens=lengths, **arguments)
        finally:
            hook.remove()
        return list(outputs[0].split(self._tokens(model, lengths)))


def load(
    path: str | Path, config: ModelConfig, kind: Literal["qwen2.5", "qwen3"], speech: FrameLayout | None = None
) -> AudioPolicy:
    """Load a thinker from a checkpoint of the whole model or of the thinker alone, local or by hub id."""
    model_class: type[PreTrainedModel] = (
        Qwen3OmniMoeThinkerForConditionalGeneration if kind == "qwen3" else Qwen2_5OmniThinkerForConditionalGeneration
    )
    backbone = QwenOmni(kind)
    copied = vision_tensors(path)
    add_speech = branch_builder(backbone, speech)

    def build(model: Any) -> None:
        if add_speech is not None:
            add_speech(model)
        if copied:
            numel = sum(tensor.numel for tensor in remove_vision(model).values())
            saved = sum(tensor.numel for tensor in copied.values())
            if numel != saved:
                raise ValueError(
                    f"{path}: the vision tower of the checkpoint has {saved:,} numbers, that of config.json {numel:,}; "
                    "do config.json and the weights belong together?"
                )

    with silent_transformers():
        model = load_model(model_class, path, config, build, ignored=IN_CHECKPOINT if copied else None)
        tokenizer, extractor = load_frontend(path)
    policy = AudioPolicy(model, tokenizer, extractor, backbone, config, speech)
    if copied:
        policy.source = ModelSource(copied=copied)
    return policy


def thinker_config(
    audio: Mapping[str, Any], text: Mapping[str, Any], ids: Mapping[str, int], user: int
) -> Qwen2_5OmniThinkerConfig:
    """Return the config of a Qwen2.5-Omni thinker with a vision tower of no use.

    audio, text: sizes of the audio encoder and the decoder. ids: of the tokens `SPECIAL`. user: `user_token_id`.
    """
    hidden = text["hidden_size"]
    return Qwen2_5OmniThinkerConfig(
        audio_config=dict(audio) | dict(output_dim=hidden),
        vision_config=dict(
            depth=1,
            hidden_size=16,
            intermediate_size=16,
            num_heads=2,
            out_hidden_size=hidden,
            fullatt_block_indexes=[0],
        ),
        text_config=dict(text),
        audio_token_index=ids["<|AUDIO|>"],
        image_token_index=ids["<|IMAGE|>"],
        video_token_index=ids["<|VIDEO|>"],
        audio_start_token_id=ids["<|audio_bos|>"],
        audio_end_token_id=ids["<|audio_eos|>"],
        vision_start_token_id=ids["<|vision_bos|>"],
        vision_end_token_id=ids["<|vision_eos|>"],
        user_token_id=user,
        tie_word_embeddings=text["tie_word_embeddings"],
    )


def tiny(
    texts: Iterable[str] = (),
    *,
    hidden: int = 256,
    layers: int = 4,
    vocab_size: int = 640,
    whisper: bool = True,
    seed: int = 0,
    config: ModelConfig | None = None,
) -> AudioPolicy:
    """Make a Qwen2.5-Omni thinker small enough for two CPU cores, of the same class as the real one.

    Its audio encoder is that of Whisper tiny.en (7.6 M parameters) when `whisper` is true, otherwise two random layers
    of width 32. Its tokenizer is a byte-level BPE learned from `texts`. Other weights depend on `seed` only.
    """
    tokenizer = tiny_tokenizer(texts, vocab_size)
    encoder = dict(d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536, num_mel_bins=80)
    if not whisper:
        encoder |= dict(d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64)
    rotary = hidden // 8
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [rotary - 2 * (rotary // 3), rotary // 3, rotary // 3],
    }
    ids = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in (*SPECIAL.values(), "user")}
    thinker = thinker_config(
        encoder | dict(n_window=100, max_source_positions=1500),
        tiny_decoder_sizes(tokenizer, hidden, layers, 4096) | dict(rope_parameters=rope),
        ids,
        ids["user"],
    )
    model = seeded(Qwen2_5OmniThinkerForConditionalGeneration, thinker, seed)
    if whisper:
        load_whisper_encoder(QwenOmni().audio_encoder(model))
    return AudioPolicy(model, tokenizer, tiny_extractor(), QwenOmni(), config)


def load_whisper_encoder(audio_encoder: nn.Module) -> None:
    """Fill an audio encoder of Whisper-tiny's shape with the bundled weights; the projector stays random."""
    with as_file(files("audiorl") / "assets" / "whisper_tiny_en" / "encoder.safetensors") as path:
        weights = load_file(path)
    missing, unexpected = audio_encoder.load_state_dict({k: v.float() for k, v in weights.items()}, strict=False)
    left = [name for name in missing if not name.startswith(("proj", "audio_bos_eos_token", "positional_embedding"))]
    assert not left and not unexpected, (left, unexpected)
