"""One tiny codec of every family: the released structure, strides and flags, but narrow and with random weights.

A new family is a line in FAMILIES. Random networks are made to behave like trained ones where a test depends on it:
codebooks are drawn from the features of real speech, so that codes vary, and what is decoded has the level of speech.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    DacConfig,
    DacModel,
    EncodecConfig,
    EncodecModel,
    HiggsAudioV2TokenizerConfig,
    HubertConfig,
    HubertModel,
    MimiConfig,
    MimiModel,
    XcodecConfig,
    XcodecModel,
)

from audiorl.data.corpus import bundled_speech
from audiorl.models.tiny import seeded
from tokenizers_audio import prepare
from tokenizers_audio.codec import Backend, Codec
from tokenizers_audio.dac import Dac
from tokenizers_audio.encodec import Encodec
from tokenizers_audio.higgs import HiggsAudioV2TokenizerModel
from tokenizers_audio.mimi import Mimi
from tokenizers_audio.protocol import AudioTokenizer
from tokenizers_audio.unified import UnifiedConfig, UnifiedTokenizer
from tokenizers_audio.unified.codebooks import CodebookTrainer
from tokenizers_audio.xcodec import SemanticCodec


@dataclass(frozen=True)
class Family:
    name: str
    save: Callable[[Path], None]
    """Writes a tiny codec of the family that `tokenizers_audio.load` reads."""
    rounding: float = 1e-5
    """How much a sample may differ when float32 is rounded elsewhere."""


def speech(codec: AudioTokenizer, seconds: float = 1.0, key: str = "agent-alreadyon") -> Tensor:
    """The beginning of a human recording at the codec's rate, [T]."""
    return prepare(_recording(key), 16_000, codec)[: round(seconds * codec.sample_rate)]


@cache
def _recording(key: str) -> np.ndarray:
    return next(u for u in bundled_speech(("en",)) if u.key == key).clip.load(16_000)


def save_dac(path: Path, ratios: tuple[int, ...] = (2, 4, 8, 8), rate: int = 44_100) -> None:
    config = DacConfig(
        encoder_hidden_size=4, decoder_hidden_size=32, downsampling_ratios=list(ratios), n_codebooks=3,
        codebook_size=64, codebook_dim=4, sampling_rate=rate,
    )  # fmt: skip
    save(seeded(DacModel, config, 0), Dac, path)


def save_dac_16k(path: Path) -> None:
    save_dac(path, (2, 4, 5, 8), 16_000)


def save_encodec(path: Path, **changes: Any) -> None:
    settings: dict[str, Any] = dict(
        num_filters=4,
        hidden_size=16,
        codebook_size=64,
        num_lstm_layers=2,
        target_bandwidths=[0.9, 1.8],  # 2 and 4 codebooks of 6 bits at 75 frames/s
    )
    save(seeded(EncodecModel, EncodecConfig(**settings | changes), 0), Encodec, path)


def save_encodec_32k(path: Path) -> None:
    """MusicGen's: convolutions that look ahead."""
    rates = dict(sampling_rate=32_000, upsampling_ratios=[8, 5, 4, 4], target_bandwidths=[1.2])
    save_encodec(path, use_causal_conv=False, **rates)


def save_mimi(path: Path) -> None:
    config = MimiConfig(
        num_filters=4, hidden_size=32, upsample_groups=32, codebook_size=64, codebook_dim=16,
        vector_quantization_hidden_dimension=16, num_quantizers=4, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=64, sliding_window=6, layer_scale_initial_scale=0.5,
    )  # fmt: skip
    save(seeded(MimiModel, config, 0), Mimi, path)


HUBERT = HubertConfig(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, conv_dim=(8,) * 7,
    num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
).to_dict()  # fmt: skip


def save_xcodec(path: Path) -> None:
    config = XcodecConfig(
        target_bandwidths=[0.5, 1, 1.5, 2],
        acoustic_model_config=dict(encoder_hidden_size=4, decoder_hidden_size=32, hidden_size=16),
        semantic_model_config=dict(HUBERT),
    )
    save(seeded(XcodecModel, config, 0), lambda model: SemanticCodec("xcodec", model), path)


def save_higgs(path: Path) -> None:
    ratios = [8, 5, 4, 2, 3]
    config = HiggsAudioV2TokenizerConfig(
        target_bandwidths=[0.5, 1, 1.5, 2],
        codebook_dim=8,
        acoustic_model_config=dict(
            encoder_hidden_size=4,
            decoder_hidden_size=64,
            hidden_size=16,
            downsampling_ratios=ratios,
            upsampling_ratios=ratios,
        ),
        semantic_model_config=dict(HUBERT),
    )
    save(
        seeded(HiggsAudioV2TokenizerModel, config, 0),
        lambda model: SemanticCodec("higgs_audio_v2_tokenizer", model),
        path,
    )


def save(model: Any, backend: Callable[[Any], Backend], path: Path) -> None:
    torch.manual_seed(0)
    codec = Codec(backend(model))
    wav = speech(codec)
    with levelling(model):
        codec.encode(wav)  # levels the encoder, so that the second pass draws codebooks from features as they are
        draw_codebooks(model, codec, wav)
        codec.decode(codec.encode(wav))
    model.save_pretrained(path)


@torch.no_grad()
def _level(layer: Any, _: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
    """Sets weight and bias of a layer such that each output channel has mean 0 and the deviation of speech, or 0.35."""
    if hasattr(layer, "levelled"):
        return outputs
    transposed = isinstance(layer, nn.ConvTranspose1d) and layer.groups == 1
    by_channel = outputs.flatten(0, 1) if isinstance(layer, nn.Linear) else outputs.transpose(1, 2).flatten(0, 1)
    deviation = by_channel.std(0)
    if not (deviation > 1e-6).all():
        return outputs  # behind codebooks that are still empty
    layer.levelled = True
    mean = by_channel.mean(0) if layer.bias is not None else torch.zeros(by_channel.shape[1])
    scale = (0.2 if by_channel.shape[1] == 1 else 0.35) / deviation
    weight = layer.weight * scale.view((1, -1, 1) if transposed else (-1, *[1] * (layer.weight.ndim - 1)))
    if nn.utils.parametrize.is_parametrized(layer, "weight"):
        layer.weight = weight
    else:
        layer.weight.copy_(weight)
    if layer.bias is not None:
        layer.bias.copy_((layer.bias - mean) * scale)
    levelled = (by_channel - mean) * scale
    if isinstance(layer, nn.Linear):
        return levelled.view_as(outputs)
    return levelled.unflatten(0, (len(outputs), -1)).transpose(1, 2)


def draw_codebooks(model: Any, codec: Codec, wav: Tensor) -> None:
    """Entries of each codebook are vectors that it is asked to quantise, a little moved."""
    patched = []
    for module in model.modules():
        table = getattr(module, "embed_sum", None)
        if table is None and isinstance(getattr(module, "embed", None), Tensor):
            table = module.embed
        if table is not None:
            module.encode = _drawing(module, table)
            patched.append(module)
    codec.encode(wav)
    for module in patched:
        del module.encode


def _drawing(module: Any, table: Tensor) -> Callable[[Tensor], Tensor]:
    def encode(features: Tensor) -> Tensor:
        rows = features.reshape(-1, features.shape[-1])
        chosen = rows[torch.randint(len(rows), (len(table),))]
        table.copy_(chosen + 0.3 * rows.std() * torch.randn_like(chosen))
        module._embed = None
        return type(module).encode(module, features)

    return encode


def save_unified(path: Path) -> None:
    torch.manual_seed(0)
    config = UnifiedConfig(
        num_codebooks=4, codebook_size=16, codebook_dim=8, channels=(4, 8, 8, 16, 16, 16), dilations=(1, 3),
        acoustic_dim=16, semantic_dim=16, mels=20,
    )  # fmt: skip
    save_levelled(UnifiedTokenizer(config), path)


def save_unified_on_spectra(path: Path) -> None:
    torch.manual_seed(0)
    config = UnifiedConfig(
        num_codebooks=4, codebook_size=16, codebook_dim=8, spectrum_hop=240, strides=(2, 2), channels=(16, 16, 16),
        dilations=(1, 3), activation="elu", acoustic_dim=16, semantic="model", semantic_dim=16, semantic_block=3,
    )  # fmt: skip
    save_levelled(UnifiedTokenizer(config, HubertModel(HubertConfig(**HUBERT))), path)


def save_unified_on_peaks(path: Path) -> None:
    """Not levelled: its straight ways begin at what recordings say, its networks at random beside them."""
    torch.manual_seed(0)
    config = UnifiedConfig(
        num_codebooks=4, codebook_size=16, codebook_dim=8, spectrum_hop=240, phases="peaks", strides=(2, 2),
        channels=(16, 16, 16), dilations=(1, 3), activation="elu", acoustic_dim=16, semantic_dim=16, mels=20,
    )  # fmt: skip
    tokenizer = UnifiedTokenizer(config)
    wavs = torch.stack([speech(tokenizer, 1.2, key) for key in ("agent-alreadyon", "conf-locked")])
    generator = torch.Generator().manual_seed(0)
    latents = tokenizer.begin(wavs, generator)
    with torch.no_grad():
        for p in (tokenizer.fuse.weight, tokenizer.decoder.layers[-1].conv.parametrizations.weight.original0):
            p.normal_(std=0.05)
    CodebookTrainer(tokenizer.quantizer).start(latents, generator)
    tokenizer.save(path)


def save_levelled(tokenizer: UnifiedTokenizer, path: Path) -> None:
    wavs = torch.stack([speech(tokenizer, 1.2, key) for key in ("agent-alreadyon", "conf-locked")])
    with levelling(tokenizer), torch.no_grad():
        for _ in range(2):  # levels first, then gives latents as they will be
            latents = tokenizer.reconstruct(wavs, None).latents
        vectors = latents.transpose(1, 2).flatten(0, 1)
        CodebookTrainer(tokenizer.quantizer).start(vectors, torch.Generator().manual_seed(0))
        tokenizer.decode(tokenizer.encode(wavs))
    tokenizer.save(path)


@contextmanager
def levelling(model: nn.Module) -> Iterator[None]:
    """Inside, the first pass through a layer levels it."""
    layers = nn.Conv1d | nn.ConvTranspose1d | nn.Linear
    hooks = [module.register_forward_hook(_level) for module in model.modules() if isinstance(module, layers)]
    yield
    for hook in hooks:
        hook.remove()


FAMILIES = [
    Family("higgs", save_higgs),
    Family("mimi", save_mimi),
    Family("dac", save_dac),
    Family("dac-16k", save_dac_16k),
    Family("encodec", save_encodec),
    Family("encodec-32k", save_encodec_32k),
    Family("xcodec", save_xcodec),
    Family("unified", save_unified),
    Family("unified-spectra", save_unified_on_spectra),
    Family("unified-peaks", save_unified_on_peaks, rounding=1e-3),  # phases add up from frame to frame
]
