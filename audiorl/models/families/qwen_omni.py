"""Qwen2.5-Omni and Qwen3-Omni thinkers.

Inputs are built from the feature extractor and the tokenizer alone: the models' own processor also needs a video stack.
For text and audio the three rows of M-RoPE positions are equal, so plain positions serve.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniVisionEncoder
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as qwen3_omni

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig
from audiorl.models.backbone import Backbone
from audiorl.models.families.generic import AudioLLM, left_out
from audiorl.models.features import HOP, Features
from audiorl.models.policy import AudioPolicy
from audiorl.models.prompts import chatml_template
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

_MOVED = re.compile(r"^model\.(?:(audio_tower\.|visual\.)|language_model\.)")
"""Since transformers 5.21 a thinker's encoders and decoder lie in its `model`; checkpoints keep the names of before."""


class QwenOmni(AudioLLM):
    """Qwen2.5-Omni: 25 audio tokens a second."""

    audio_token: str = "<|AUDIO|>"
    image_token = "<|IMAGE|>"
    mrope = True
    ends: ClassVar[tuple[str, str]] = "<|audio_bos|>", "<|audio_eos|>"
    """What stands before and after a clip."""
    template = chatml_template("<|audio_bos|><|AUDIO|><|audio_eos|>", image="<|vision_bos|><|IMAGE|><|vision_eos|>")
    has_processor = False
    projector_at: ClassVar[tuple[str, ...]] = ("proj",)
    """In the audio encoder."""
    whole = "Qwen2_5Omni"
    """What transformers' classes of the whole model begin with."""

    @classmethod
    def thinker_class(cls) -> type[PreTrainedModel]:
        model_class: type[PreTrainedModel] = getattr(transformers, f"{cls.whole}ThinkerForConditionalGeneration")
        return model_class

    @property
    def processor_files(self) -> Mapping[str, Mapping[str, Any]]:  # type: ignore[override]
        names = {"processor_class": f"{self.whole}Processor", "image_processor_type": "Qwen2VLImageProcessor"}
        video = {"video_processor_type": "Qwen2VLVideoProcessor"}
        return {"preprocessor_config.json": names, "video_preprocessor_config.json": video}

    def chunk(self, clip: AudioClip) -> list[str | AudioClip]:
        return [self.ends[0], clip, self.ends[1]]

    def save_model(self, model: PreTrainedModel, folder: str, source: ModelSource) -> None:
        """Write a whole Omni model with this thinker and no talker: vLLM reads the thinker from such a config only."""
        config_class = getattr(transformers, f"{self.whole}Config")
        model_class = getattr(transformers, f"{self.whole}ForConditionalGeneration")
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
        return [getattr(self.audio_encoder(model), name) for name in self.projector_at]

    def features(self, model: Any, extractor: Any, wavs: Sequence[np.ndarray], device: torch.device) -> list[Features]:
        return Backbone.features(self, model, extractor, wavs, device)

    def tokens(self, model: Any, samples: int) -> int:
        return int(self._lengths(model, torch.tensor([-(-samples // HOP)]))[1][0])

    def _lengths(self, model: Any, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Return the frames after the convolutions, and the audio tokens."""
        lengths: tuple[Tensor, Tensor] = self.audio_encoder(model)._get_feat_extract_output_lengths(frames)
        return lengths

    def encode_audio(self, model: Any, features: Sequence[Features]) -> list[Tensor]:
        encoder = self.audio_encoder(model)
        mels = [f["input_features"][0] for f in features]
        frames = torch.tensor([mel.shape[1] for mel in mels]).to(mels[0].device)
        after_conv, tokens = self._lengths(model, frames)
        reads_both = "aftercnn_lens" in inspect.signature(encoder.forward).parameters
        with left_out(self.projector(model)):
            arguments = {"aftercnn_lens": after_conv} if reads_both else {}
            rows = encoder(torch.cat(mels, dim=1), feature_lens=frames, **arguments).last_hidden_state
        return list(rows.split(tokens.tolist()))

    def vision_tower(self, config: Any) -> nn.Module:
        return Qwen2_5OmniVisionEncoder._from_config(config.vision_config)

    def picture_processor(self, config: Any) -> tuple[type[Any], Mapping[str, Any]]:
        eyes = config.vision_config
        sizes = dict(patch_size=eyes.patch_size, temporal_patch_size=eyes.temporal_patch_size)
        return Qwen2VLImageProcessorPil, sizes | {"merge_size": eyes.spatial_merge_size}

    def picture_grid(self, processor: Any, width: int, height: int) -> tuple[int, int]:
        side, size = processor.patch_size * processor.merge_size, processor.size
        rows, columns = smart_resize(height, width, side, size["shortest_edge"], size["longest_edge"])
        return rows // side, columns // side

    def encode_picture(self, model: Any, processed: Mapping[str, Tensor]) -> Sequence[Tensor]:
        out = model(processed["pixel_values"], grid_thw=processed["image_grid_thw"])
        return [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]


class Qwen3Omni(QwenOmni):
    """Qwen3-Omni: 12.5 audio tokens a second, and no system message where none is given."""

    audio_token = "<|audio_pad|>"
    image_token = "<|image_pad|>"
    ends = "<|audio_start|>", "<|audio_end|>"
    template = chatml_template(
        "<|audio_start|><|audio_pad|><|audio_end|>", None, image="<|vision_start|><|image_pad|><|vision_end|>"
    )
    projector_at = ("proj1", "act", "proj2")
    whole = "Qwen3OmniMoe"

    def _lengths(self, model: Any, frames: Tensor) -> tuple[Tensor, Tensor]:
        tokens = qwen3_omni._get_feat_extract_output_lengths(frames, self.audio_encoder(model).n_window)
        return tokens, tokens

    def vision_tower(self, config: Any) -> nn.Module:
        return qwen3_omni.Qwen3OmniMoeVisionEncoder._from_config(config.vision_config)


def family_of(kind: str) -> type[QwenOmni] | None:
    """Return the class of a `model_type`, of the whole model or its thinker; None for one of another family."""
    for name, family in (("qwen2_5_omni", QwenOmni), ("qwen3_omni_moe", Qwen3Omni)):
        if kind in (name, f"{name}_thinker"):
            return family
    return None


def load(path: str | Path, config: ModelConfig, kind: str, speech: FrameLayout | None = None) -> AudioPolicy:
    """Load a thinker from a checkpoint of the whole model or of the thinker alone, local or by hub id.

    kind: a model_type, of Qwen3-Omni one that begins with qwen3.
    """
    family = Qwen3Omni if kind.startswith("qwen3") else QwenOmni
    with silent_transformers():
        tokenizer, extractor = load_frontend(path)
    backbone, copied = family(kind, tokenizer), vision_tensors(path)
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
        model = load_model(family.thinker_class(), path, config, build, ignored=IN_CHECKPOINT if copied else None)
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
    model, backbone = seeded(Qwen2_5OmniThinkerForConditionalGeneration, thinker, seed), QwenOmni("tiny", tokenizer)
    if whisper:
        load_whisper_encoder(backbone.audio_encoder(model))
    return AudioPolicy(model, tokenizer, tiny_extractor(), backbone, config)


def load_whisper_encoder(audio_encoder: nn.Module) -> None:
    """Fill an audio encoder of Whisper-tiny's shape with the bundled weights; the projector stays random."""
    with as_file(files("audiorl") / "assets" / "whisper_tiny_en" / "encoder.safetensors") as path:
        weights = load_file(path)
    missing, unexpected = audio_encoder.load_state_dict({k: v.float() for k, v in weights.items()}, strict=False)
    left = [name for name in missing if not name.startswith(("proj", "audio_bos_eos_token", "positional_embedding"))]
    assert not left and not unexpected, (left, unexpected)
