"""Tiny random models of families whose sizes are not among those of `generic.tiny`, by their real classes."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerBase

from audiorl.config import ModelConfig
from audiorl.models import AudioPolicy
from audiorl.models.families import fun_asr, gemma, granite, phi4, vibevoice
from audiorl.models.prompts import chatml_template
from audiorl.models.tiny import seeded, tiny_decoder_sizes, tiny_tokenizer
from audiorl.types import Message
from tests.conftest import TEXTS

HIDDEN, RATE = 64, 16_000


def _tokenizer(
    token: str, others: Sequence[str] = (), template: str | None = None, image: str = ""
) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer(TEXTS, 400)
    tokenizer.add_tokens([*others, token], special_tokens=True)
    tokenizer.chat_template = template or chatml_template(token, default_system=None, image=image)
    return tokenizer


def _text(tokenizer: PreTrainedTokenizerBase, **options: Any) -> dict[str, Any]:
    return tiny_decoder_sizes(tokenizer, HIDDEN, 2, 2048) | {"head_dim": 16} | options


def alive(policy: AudioPolicy) -> AudioPolicy:
    """Give the audio side weights that keep a clip's loudness: the usual ones let it fade before it is a token."""
    generator = torch.Generator().manual_seed(0)
    for part in (policy.backbone.audio_encoder(policy.model), *policy.backbone.projector(policy.model)):
        for p in part.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=0.5 * p[0].numel() ** -0.5, generator=generator)
    return policy


def make_granite(config: ModelConfig | None = None, plus: bool = False) -> AudioPolicy:
    tokenizer = _tokenizer("<|audio|>")
    encoder: Any = dict(input_dim=160, num_layers=2, hidden_dim=32, num_heads=2, output_dim=10)
    encoder |= dict(context_size=40, max_pos_emb=64)
    model_class: Any = transformers.GraniteSpeechForConditionalGeneration
    if plus:
        from transformers.models.granite_speech_plus import configuration_granite_speech_plus as configuration

        model_class = transformers.GraniteSpeechPlusForConditionalGeneration
        encoder = configuration.GraniteSpeechPlusEncoderConfig(**encoder, cat_hidden_layers=[1])
    former = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    former |= dict(encoder_hidden_size=64 if plus else 32, cross_attention_frequency=1, model_type="blip_2_qformer")
    scales = dict(embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22, attention_multiplier=0.0625)
    whole = model_class.config_class(
        encoder_config=encoder,
        projector_config=former,
        text_config=_text(tokenizer, model_type="granite", **scales),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|audio|>"),
        has_lora_adapter=False,
    )
    backbone = granite.Granite(whole.model_type, tokenizer, None, whole)
    extractor = granite.GraniteSpeechFeatureExtractor()
    return alive(AudioPolicy(seeded(model_class, whole, 0), tokenizer, extractor, backbone, config))


def make_fun_asr(config: ModelConfig | None = None) -> AudioPolicy:
    tokenizer = _tokenizer("<|object_ref_start|>")
    encoder = dict(hidden_size=32, num_attention_heads=2, intermediate_size=64, num_hidden_layers=3)
    adaptor = dict(hidden_size=HIDDEN, num_attention_heads=2, intermediate_size=16, projector_hidden_size=64)
    whole = transformers.FunAsrNanoConfig(
        audio_config=encoder | {"num_timestamp_prediction_layers": 1},
        adaptor_config=adaptor,
        text_config=_text(tokenizer, model_type="qwen3"),
        audio_token_id=tokenizer.convert_tokens_to_ids("<|object_ref_start|>"),
    )
    model = seeded(transformers.FunAsrNanoForConditionalGeneration, whole, 0)
    backbone = fun_asr.FunASR("fun_asr_nano", tokenizer, None, whole)
    return AudioPolicy(model, tokenizer, fun_asr.FunAsrNanoFeatureExtractor(), backbone, config)


def make_vibevoice(config: ModelConfig | None = None) -> AudioPolicy:
    begin, end = "<|object_ref_start|>", "<|object_ref_end|>"
    clip = f"{begin}<|box_start|>{end}This is a <|AUDIO_DURATION|> seconds audio."
    template = chatml_template(clip, default_system=None)
    tokenizer = _tokenizer("<|box_start|>", [begin, end], template)
    ids = {
        f"audio_{name}token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in (("", "<|box_start|>"), ("bos_", begin), ("eos_", end))
    }
    encoder = dict(model_type="vibevoice_acoustic_tokenizer_encoder", num_filters=4, depths=[1] * 7)
    whole = transformers.VibeVoiceAsrConfig(
        acoustic_tokenizer_encoder_config=encoder | dict(hidden_size=16, vae_std=0.0),
        semantic_tokenizer_encoder_config=encoder | dict(hidden_size=24),
        text_config=_text(tokenizer, model_type="qwen2"),
        acoustic_tokenizer_chunk_size=32_000,
        **ids,
    )
    extractor = transformers.VibeVoiceAcousticTokenizerFeatureExtractor()
    processor = transformers.VibeVoiceAsrProcessor(extractor, tokenizer, chat_template=template)
    backbone = vibevoice.VibeVoiceASR("vibevoice_asr", tokenizer, processor, whole)
    model = seeded(transformers.VibeVoiceAsrForConditionalGeneration, whole, 0)
    return alive(AudioPolicy(model, tokenizer, extractor, backbone, config))


_LAYERS = dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=16)
_LAYERS |= dict(num_kv_shared_layers=2, hidden_size_per_layer_input=8, final_logit_softcapping=3.0)


def make_gemma4(config: ModelConfig | None = None) -> AudioPolicy:
    names = ["<|image|>", "<|video|>", "<|audio>", "<audio|>", "<|image>", "<image|>"]
    tokenizer = _tokenizer("<|audio|>", names, image="<|image|>")
    image, video, begin, end, begin_image, end_image = tokenizer.convert_tokens_to_ids(names)
    layers: Any = _LAYERS | dict(vocab_size_per_layer_input=len(tokenizer), global_head_dim=16)
    encoder = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, output_proj_dims=48)
    whole = transformers.Gemma4Config(
        text_config=_text(tokenizer, **layers),
        audio_config=encoder | dict(subsampling_conv_channels=[128, 4]),
        vision_config=dict(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            head_dim=16, position_embedding_size=1024,
        ),
        audio_token_id=tokenizer.convert_tokens_to_ids("<|audio|>"),
        image_token_id=image,
        video_token_id=video,
        boa_token_id=begin,
        eoa_token_index=end,
        boi_token_id=begin_image,
        eoi_token_id=end_image,
    )  # fmt: skip
    backbone = gemma.Gemma4("gemma4", tokenizer, None, whole)
    model = seeded(transformers.Gemma4ForConditionalGeneration, whole, 0)
    return AudioPolicy(model, tokenizer, transformers.Gemma4AudioFeatureExtractor(), backbone, config)


def make_gemma3n(config: ModelConfig | None = None) -> AudioPolicy:
    tokenizer = tiny_tokenizer(TEXTS, 400)
    tokenizer.add_tokens(["<start_of_audio>", "<start_of_image>"], special_tokens=True)
    begin, begin_image = tokenizer.convert_tokens_to_ids(["<start_of_audio>", "<start_of_image>"])
    text = len(tokenizer)  # the last ids are of pictures and of sound, 8 each
    tokenizer.add_tokens(["<image_soft_token>", *(f"<image {i}>" for i in range(7))], special_tokens=True)
    tokenizer.add_tokens(
        ["<end_of_audio>", "<audio_soft_token>", *(f"<audio {i}>" for i in range(6))], special_tokens=True
    )
    tokenizer.chat_template = chatml_template("<audio_soft_token>", default_system=None, image="<image_soft_token>")
    layers: Any = _LAYERS | dict(vocab_size_per_layer_input=text, laurel_rank=8)
    encoder = dict(hidden_size=32, conf_num_attention_heads=2, conf_num_hidden_layers=2, sscp_conv_channel_size=[8, 4])
    whole = transformers.Gemma3nConfig(
        text_config=_text(tokenizer, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0], **layers),
        audio_config=encoder | dict(vocab_size=8, vocab_offset=text + 8),
        vision_config=dict(architecture="resnet10t", hidden_size=512, vocab_size=8, vocab_offset=text),
        vision_soft_tokens_per_image=49,
        audio_token_id=text + 9,
        image_token_id=text,
        boa_token_id=begin,
        eoa_token_id=text + 8,
        boi_token_id=begin_image,
        eoi_token_id=text + 1,
    )
    backbone = gemma.Gemma3n("gemma3n", tokenizer, None, whole)
    model = seeded(transformers.Gemma3nForConditionalGeneration, whole, 0)
    return AudioPolicy(model, tokenizer, transformers.Gemma3nAudioFeatureExtractor(), backbone, config)


def make_phi4(config: ModelConfig | None = None) -> AudioPolicy:
    audio, image = "<|endoftext11|>", "<|endoftext10|>"
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}<|assistant|>"
    tokenizer = _tokenizer(audio, [image, "<|user|>", "<|end|>", "<|assistant|>", "<|system|>"], template)
    ids = tokenizer.convert_tokens_to_ids([audio, image])
    encoder = dict(hidden_size=32, intermediate_size=64, num_blocks=2, num_attention_heads=2, nemo_conv_channels=8)
    encoder |= dict(ext_pw_out_channel=32, depthwise_separable_out_channel=32, bias_max_distance=50)
    eyes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    eyes |= dict(image_size=448, patch_size=14, crop_size=448)  # a picture's tokens are counted for this size
    sizes = {name: size for name, size in _text(tokenizer).items() if name != "head_dim"}
    whole = transformers.Phi4MultimodalConfig(
        **sizes, audio_config=encoder | {"audio_token_id": ids[0]}, vision_config=eyes | {"image_token_id": ids[1]}
    )
    backbone = phi4.Phi4("phi4_multimodal", tokenizer, None, whole)
    model = seeded(transformers.Phi4MultimodalForCausalLM, whole, 0)
    return alive(AudioPolicy(model, tokenizer, transformers.Phi4MultimodalFeatureExtractor(), backbone, config))


# -- how many tokens transformers' extractors say ----------------------------------------------------------------------


def granite_tokens(policy: AudioPolicy, samples: int) -> int:
    extractor = SimpleNamespace(
        melspec_kwargs={"hop_length": 160}, projector_window_size=15, projector_downsample_rate=5
    )
    count = transformers.GraniteSpeechFeatureExtractor._get_num_audio_features
    return int(count(extractor, [samples])[0])  # type: ignore[arg-type]


def gemma4_tokens(policy: AudioPolicy, samples: int) -> int:
    frames = int(np.asarray(policy.extractor([np.zeros(samples, np.float32)])["input_features_mask"]).sum())
    return (frames + 3) // 4


# -- what transformers' forward takes beside ids -----------------------------------------------------------------------


def own_features(policy: AudioPolicy, wav: np.ndarray) -> dict[str, Any]:
    """The family's features, where its extractor needs torchaudio; see `test_features`."""
    features = dict(policy.backbone.features(policy.model, policy.extractor, [wav], torch.device("cpu"))[0])
    if isinstance(policy.backbone, fun_asr.FunASR):
        features["input_features_mask"] = torch.ones(features["input_features"].shape[:2], dtype=torch.long)
    return features


def of_gemma(policy: AudioPolicy, wav: np.ndarray) -> dict[str, Any]:
    out = policy.extractor([wav], return_tensors="pt")
    return {"input_features": out["input_features"].float(), "input_features_mask": out["input_features_mask"].bool()}


def of_phi4(policy: AudioPolicy, wav: np.ndarray) -> dict[str, Any]:
    out = policy.extractor([wav], sampling_rate=RATE, return_tensors="pt")
    return {"audio_input_features": out["audio_input_features"], "audio_embed_sizes": out["audio_embed_sizes"]}


# -- prompts that no chat template writes ------------------------------------------------------------------------------


def written_by_mistral(policy: AudioPolicy, messages: Sequence[Message]) -> list[int]:
    """Voxtral's prompt by Mistral's tokenizer of version 7, over bytes, in the ids of the policy's."""
    pytest.importorskip("mistral_common", reason="comes with vLLM")
    from mistral_common.audio import Audio
    from mistral_common.protocol.instruct.chunk import AudioChunk, TextChunk
    from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
    from mistral_common.protocol.instruct.request import InstructRequest
    from mistral_common.tokens.tokenizers import audio, tekken
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy, SpecialTokens, TokenizerVersion
    from mistral_common.tokens.tokenizers.instruct import InstructTokenizerV7

    special: list[Any] = [
        {"rank": i, "token_str": token.value, "is_control": True} for i, token in enumerate(SpecialTokens)
    ]
    vocabulary: list[Any] = [
        {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)
    ]
    window = policy.extractor.chunk_length
    sound = audio.AudioConfig(RATE, 12.5, audio.AudioSpectrogramConfig(80, 160, 400), chunk_length_s=window)
    sizes: Any = (256 + len(special), len(special), TokenizerVersion.v7)
    tokenizer = tekken.Tekkenizer(vocabulary, special, ".", *sizes, audio_config=sound)
    begin, token = (tokenizer.get_special_token(t) for t in ("[BEGIN_AUDIO]", "[AUDIO]"))
    ids = audio.SpecialAudioIDs(token, begin, streaming_pad=None, text_to_audio=None, audio_to_text=None)
    writer: Any = InstructTokenizerV7(tokenizer, audio_encoder=audio.AudioEncoder(sound, ids))
    turns: list[Any] = []
    for m in messages:
        parts = [
            TextChunk(text=c) if isinstance(c, str) else AudioChunk.from_audio(Audio(c.load(RATE), RATE, "wav"))
            for c in m.content
        ]
        turns.append(UserMessage(content=parts) if m.role == "user" else AssistantMessage(content=parts[0].text))
    text = tokenizer.decode(writer.encode_instruct(InstructRequest(messages=turns)).tokens, SpecialTokenPolicy.KEEP)
    written = text.removeprefix("<s>").replace("</s>", str(policy.tokenizer.eos_token))
    return list(policy.tokenizer.encode(written, add_special_tokens=False))
