"""Our tokenizer: words and sound of speech in one row of codes.

Two encoders read the samples, an acoustic and (unless it is switched off) a semantic one. What they say of a frame is
put side by side, mapped to a small vector and quantised; from the codes one decoder predicts the semantic features, the
other the samples. The layout is that of X-Codec (arXiv 2408.17175) and Higgs Audio V2; all of it is causal, except that
the acoustic decoder waits for `lookahead` frames.

Shapes: B recordings, T samples, F frames, Q codebooks, D codebook_dim, D' semantic features.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from tokenizers_audio.checks import batch_of_wavs, check_codes
from tokenizers_audio.codec import codebooks
from tokenizers_audio.loading import check_finite_weights, find, identity, read_config
from tokenizers_audio.unified.acoustic import AcousticDecoder, AcousticEncoder
from tokenizers_audio.unified.config import MODEL_TYPE, UnifiedConfig
from tokenizers_audio.unified.layers import Cache
from tokenizers_audio.unified.patches import PatchDecoder, PatchEncoder, least_squares, principal_components
from tokenizers_audio.unified.quantizer import GroupedQuantizer, Quantized, ResidualQuantizer
from tokenizers_audio.unified.semantic import (
    MelStatistics,
    SemanticDecoder,
    SemanticEncoder,
    SpeechModelFeatures,
    build_speech_model,
)
from tokenizers_audio.unified.spectrum import LogMel
from tokenizers_audio.unified.streaming import UnifiedStreaming

WEIGHTS = "model.safetensors"
PIECE_SECONDS = 20.0
"""Recordings longer than this go through the networks piece by piece, so that memory does not grow with them."""


@dataclass(frozen=True)
class Reconstruction:
    """What a training step compares. wav [B, T], None where it is not needed; latents [B, D, F] before quantisation;
    features [B, D', F] as predicted and as they are, None without a semantic branch; mels [B, mels, steps] likewise,
    None for a decoder that does not say them."""

    wav: Tensor | None
    quantized: Quantized | None
    latents: Tensor
    predicted: Tensor | None
    features: Tensor | None
    mels: Tensor | None = None
    target_mels: Tensor | None = None


class UnifiedTokenizer(nn.Module):
    """An `AudioTokenizer`. Made for use: without gradients, until a trainer asks for them."""

    def __init__(self, config: UnifiedConfig, speech_model: PreTrainedModel | None = None):
        super().__init__()
        if (config.semantic == "model") != (speech_model is not None):
            raise ValueError('semantic="model" needs a speech model, and nothing else takes one')
        self.config = config
        self.levels = config.num_codebooks
        self.encoder = AcousticEncoder(config)
        self.decoder = AcousticDecoder(config)
        self.quantizer = (ResidualQuantizer if config.quantizer == "residual" else GroupedQuantizer)(config)
        self.features: MelStatistics | SpeechModelFeatures | None = None
        fused = config.acoustic_dim
        if config.semantic != "none":
            self.features = MelStatistics(config) if speech_model is None else SpeechModelFeatures(speech_model, config)
            self.semantic_encoder = SemanticEncoder(config, self.features.channels)
            self.semantic_decoder = SemanticDecoder(config, self.features.channels)
            self.to_semantic = nn.Linear(config.codebook_dim, config.semantic_dim)
            fused += config.semantic_dim
        self.fuse = nn.Linear(fused, config.codebook_dim)
        self.to_acoustic = nn.Linear(config.codebook_dim, config.acoustic_dim)
        self.mels: LogMel | None = None
        if config.phases == "peaks":
            self.mels = LogMel(config.window, config.sample_rate, config.mels)
            self.patch_encoder = PatchEncoder(config, self.mels)
            self.patch_decoder = PatchDecoder(config)
        self.eval().requires_grad_(False)

    # -- what every codec offers -------------------------------------------------------------------------------------

    @property
    def sample_rate(self) -> int:
        return self.config.sample_rate

    @property
    def frame_rate(self) -> float:
        return self.config.frame_rate

    @property
    def num_codebooks(self) -> int:
        """Codebooks in use, at most `config.num_codebooks`."""
        return self.levels

    @property
    def codebook_size(self) -> int:
        return self.config.codebook_size

    @property
    def codes_phases(self) -> bool:
        """Return whether a decoded sound has the phases of the recording, or such as the decoder makes up."""
        return self.config.spectrum_hop is None

    @property
    def identity(self) -> str:
        """Computed at every call, because weights may be in training."""
        return identity("unified", self.sample_rate, self.frame_rate, self.levels, self.codebook_size, self)

    def with_codebooks(self, count: int) -> UnifiedTokenizer:
        """Return the same tokenizer, weights shared, with only the first `count` codebooks in use: fewer bits."""
        if not 1 <= count <= self.config.num_codebooks:
            raise ValueError(f"{count} codebooks asked for, the tokenizer has {self.config.num_codebooks}")
        view = UnifiedTokenizer.__new__(UnifiedTokenizer)
        view.__dict__.update(self.__dict__)
        view.levels = count
        return view

    @torch.no_grad()
    def encode(self, wav: Tensor) -> Tensor:
        """[B, T] or [T] samples in [-1, 1] -> [B, Q, ceil(T / hop)] int64."""
        return self._encoded(wav, self.codes_of)

    @torch.no_grad()
    def latents(self, wav: Tensor) -> Tensor:
        """[B, T] or [T] samples in [-1, 1] -> [B, D, ceil(T / hop)] vectors before they are quantised."""
        return self._encoded(wav, lambda piece, cache: self.latents_of(piece, cache)[0])

    def _encoded(self, wav: Tensor, encode: Callable[[Tensor, Cache], Tensor]) -> Tensor:
        """Return what `encode` gives for the frames of recordings, which go through it piece by piece."""
        wav = batch_of_wavs(wav).to(self.fuse.weight)
        hop = self.config.hop
        frames = -(-wav.shape[-1] // hop)
        block, past, ahead = self.blocks
        whole = -(-frames // block) * block
        wav = pad(wav, (past, whole * hop + ahead - wav.shape[-1]))
        cache: Cache = {}
        piece = max(int(PIECE_SECONDS * self.frame_rate) // block, 1) * block
        parts = [
            encode(wav[:, at * hop : past + min(at + piece, whole) * hop + ahead], cache)
            for at in range(0, whole, piece)
        ]
        return torch.cat(parts, -1)[..., :frames]

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """[B, Q, F] -> [B, F · hop] float32 samples in [-1, 1]."""
        check_codes(codes, self.levels, self.codebook_size)
        if not codes.numel():
            return torch.zeros(len(codes), codes.shape[-1] * self.config.hop, device=self.device)
        return self.decode_latents(self.quantizer.decode(codes.to(self.device, torch.int64)))

    @torch.no_grad()
    def decode_latents(self, latents: Tensor) -> Tensor:
        """[B, D, F] -> [B, F · hop] float32 samples in [-1, 1], without quantisation; F is at least 1."""
        hop, skip = self.config.hop, self.config.lookahead
        cache: Cache = {}
        piece = max(int(PIECE_SECONDS * self.frame_rate), 1)
        parts = pad(latents.to(self.fuse.weight), (0, skip)).split(piece, -1)
        return torch.cat([self.wav_of(vectors, cache) for vectors in parts], -1)[:, skip * hop :]

    def streaming(self) -> UnifiedStreaming:
        """Return the fresh state of one stream."""
        return UnifiedStreaming(self)

    def train(self, mode: bool = True) -> UnifiedTokenizer:
        """Stays in eval mode, in training too: only a frozen speech model has dropout, and it would change codes."""
        return super().train(False)

    # -- pieces of recordings ----------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.fuse.weight.device

    @property
    def blocks(self) -> tuple[int, int, int]:
        """(block, past, ahead): codes are made `block` frames at a time, from samples around them; see `semantic`."""
        return (self.features.block, self.features.past, self.features.ahead) if self.features else (1, 0, 0)

    def codes_of(self, wav: Tensor, cache: Cache) -> Tensor:
        """[B, past + n · block · hop + ahead] the next samples -> [B, Q, n · block]"""
        return self.quantizer.encode(self.latents_of(wav, cache)[0], self.levels)

    def latents_of(self, wav: Tensor, cache: Cache | None) -> tuple[Tensor, Tensor | None]:
        """Return the same samples -> ([B, D, n · block] before quantisation, [B, D', n · block] semantic features or
        None)"""
        _, past, ahead = self.blocks
        sides = [self.encoder(wav[:, None, past : wav.shape[-1] - ahead], cache)]
        features = None
        if self.features is not None:
            features = self.features(wav)
            sides.append(self.semantic_encoder(features, cache))
        latents = self.fuse(torch.cat(sides, 1).transpose(1, 2))
        if self.mels is not None:
            latents = latents + self.patch_encoder(wav[:, past : wav.shape[-1] - ahead], cache)
        return latents.transpose(1, 2), features

    def wav_of(self, vectors: Tensor, cache: Cache) -> Tensor:
        """[B, D, F] the next quantised vectors -> [B, F · hop] samples, `lookahead` frames late"""
        return self._wav(vectors, cache).float().clamp(-1, 1)

    def reconstruct(self, wav: Tensor, levels: Tensor | None, sound: bool = True) -> Reconstruction:
        """Through the codes and back with gradients, for training. wav [B, F · hop]; levels [B] codebooks to use.

        Without `levels` nothing is quantised. A decoder that says log-mels makes samples of them only for `sound`.
        """
        hop, skip, (block, past, ahead) = self.config.hop, self.config.lookahead, self.blocks
        frames = wav.shape[-1] // hop
        assert frames * hop == wav.shape[-1]
        whole = -(-frames // block) * block
        latents, features = self.latents_of(pad(wav, (past, (whole - frames) * hop + ahead)), None)
        latents = latents[..., :frames]
        quantized = None if levels is None else self.quantizer(latents, levels)
        vectors = latents if quantized is None else quantized.vectors
        predicted = None
        if features is not None:
            features = features[..., :frames]
            predicted = self.semantic_decoder(self.to_semantic(vectors.transpose(1, 2)).transpose(1, 2))
        decoded = self._decoded(pad(vectors, (0, skip)), None)
        out = self.decoder.voice(decoded, None)[:, 0, skip * hop :] if sound or self.mels is None else None
        mels, target_mels = (None, None) if self.mels is None else self._compared(decoded, wav)
        return Reconstruction(out, quantized, latents, predicted, features, mels, target_mels)

    def _compared(self, decoded: Tensor, wav: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-mels [B, mels, steps] that the decoder predicts for wav [B, F · hop], and those that it
        has."""
        assert self.mels is not None and self.config.spectrum_hop is not None
        step, size = self.config.spectrum_hop, self.config.window
        with torch.no_grad():
            target_mels = self.mels(pad(wav, (0, size - step)).unfold(-1, size, step)).transpose(1, 2)
        return decoded[..., self.config.lookahead * self.config.hop // step :], target_mels

    @torch.no_grad()
    def begin(self, wav: Tensor, generator: torch.Generator) -> Tensor:
        """For a decoder that says log-mels: set the straight ways to their best on wav [B, F · hop], and the networks
        parallel to them to silence. Returns the latents [N, D] of these recordings."""
        if self.mels is None:
            raise ValueError("only a tokenizer whose decoder says log-mels has a beginning of its own")
        hop, late = self.config.hop, self.config.lookahead
        frames, lacking = wav.shape[-1] // hop, max(late, 1)
        if frames <= lacking:
            seconds = (lacking + 1) * hop / self.config.sample_rate
            raise ValueError(
                f"crops of {frames} frames are too short; give at least {seconds:g} s (codec.crop_seconds)"
            )
        _, past, ahead = self.blocks
        principal_components(self.patch_encoder.map, self.patch_encoder.patches(wav, None).flatten(0, 1), generator)
        self.fuse.weight.zero_()
        self.fuse.bias.zero_()
        self.decoder.silence()
        latents, _ = self.latents_of(pad(wav, (past, ahead)), None)
        pairs = self.patch_decoder.pairs(pad(latents, (1, late)))[:, late:]
        _, target_mels = self._compared(torch.zeros(0), wav)
        wanted = target_mels.unflatten(2, (-1, self.patch_decoder.steps)).permute(0, 2, 3, 1).flatten(2)
        # The last frames lack what comes after them.
        ends = frames - lacking
        least_squares(self.patch_decoder.map, pairs[:, :ends].flatten(0, 1), wanted[:, :ends].flatten(0, 1))
        return latents.transpose(1, 2).flatten(0, 1)

    def _decoded(self, vectors: Tensor, cache: Cache | None) -> Tensor:
        """Return what the decoder says before it has a voice."""
        decoded = self.decoder.layers(self.to_acoustic(vectors.transpose(1, 2)).transpose(1, 2), cache)
        return decoded if self.mels is None else decoded + self.patch_decoder(vectors, cache)

    def _wav(self, vectors: Tensor, cache: Cache | None) -> Tensor:
        return self.decoder.voice(self._decoded(vectors, cache), cache)[:, 0]

    # -- folders -----------------------------------------------------------------------------------------------------

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return what is learned by gradients, by name: all but a frozen speech model."""
        return {name: p for name, p in self.named_parameters() if not name.startswith("features.")}

    def save(self, path: str | Path) -> None:
        """Write config.json and model.safetensors. A frozen speech model is part of both: codes depend on it."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"model_type": MODEL_TYPE} | self.config.to_json()
        if isinstance(self.features, SpeechModelFeatures):
            config["speech_model"] = self.features.model.config.to_diff_dict()
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        state = {name: t.detach().cpu().contiguous() for name, t in self.state_dict().items()}
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy every weight by name, in place."""
        self.load_state_dict(weights)

    @torch.no_grad()
    def restore(self, path: str | Path) -> None:
        """Copy a saved tokenizer's weights into this one. Raises ValueError for another architecture."""
        if _configs(path)[0] != self.config:
            raise ValueError(f"{path}: a tokenizer of another configuration")
        file = find(path, WEIGHTS)
        try:
            saved = load_file(file)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file}: damaged or cut off ({error}); copy it again") from error
        own = self.state_dict()
        wrong = [n for n in {*own, *saved} if n not in own or n not in saved or own[n].shape != saved[n].shape]
        if wrong:
            raise ValueError(f"{file}: weight {min(wrong)!r} does not fit config.json; do the two belong together?")
        check_finite_weights(saved.items(), file)
        for name, t in own.items():
            t.copy_(saved[name])


def load(path: str | Path, num_codebooks: int | None = None, bandwidth: float | None = None) -> UnifiedTokenizer:
    """Return a saved tokenizer; with only its first `num_codebooks`, or as many as fit in `bandwidth` kbit/s."""
    config, speech = _configs(path)
    tokenizer = UnifiedTokenizer(config, None if speech is None else build_speech_model(speech, str(path)))
    tokenizer.restore(path)
    count = codebooks(config.num_codebooks, config.frame_rate, config.codebook_size, num_codebooks, bandwidth)
    return tokenizer.with_codebooks(count)


def _configs(path: str | Path) -> tuple[UnifiedConfig, dict[str, Any] | None]:
    """Return the tokenizer's configuration and its speech model's. Raises ValueError naming what is missing or
    wrong."""
    values = read_config(path)
    if values.pop("model_type") != MODEL_TYPE:
        raise ValueError(f"{path}: another codec, not {MODEL_TYPE!r}")
    speech = values.pop("speech_model", None)
    config = UnifiedConfig.from_json(values, str(find(path, "config.json")))
    if (config.semantic == "model") != isinstance(speech, dict):
        raise ValueError(f"{path}: config.json does not say which speech model the semantic branch has")
    return config, speech
