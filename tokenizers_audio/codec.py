"""The codec of every family: checks, durations, devices and streams. What differs is its `Backend`.

Rows of a batch are encoded at one length: padding is encoded as silence, not skipped. Encode recordings of different
length one by one where that matters.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenizers_audio.checks import batch_of_wavs, check_codes, check_wav
from tokenizers_audio.layers import Layer
from tokenizers_audio.loading import identity


class Backend(Protocol):
    """One family: between audio and codes lie D features a frame.

    `analysis` and `synthesis` are `analyse` and `synthesise` of one recording, piece by piece.
    """

    family: str
    model: nn.Module
    sample_rate: int
    hop: int
    """Samples per frame."""
    num_codebooks: int
    codebook_size: int

    def analyse(self, wav: Tensor) -> Tensor:
        """[B, 1, T] -> [B, D, ceil(T / hop)]"""
        ...

    def quantise(self, features: Tensor) -> Tensor:
        """[B, D, F] -> [B, Q, F], each frame by itself."""
        ...

    def dequantise(self, codes: Tensor) -> Tensor:
        """[B, Q, F] -> [B, D', F], each frame by itself."""
        ...

    def synthesise(self, features: Tensor) -> Tensor:
        """[B, D', F] -> [B, 1, about F · hop]; what is missing at the end is silence, what is too much is cut off."""
        ...

    def analysis(self) -> Layer: ...

    def synthesis(self) -> Layer: ...


class Codec(nn.Module):
    """An AudioTokenizer. It stays in eval mode and without gradients wherever it is put, and moves with `.to`."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.model = backend.model.eval().requires_grad_(False)
        self._identity: str | None = None

    @property
    def sample_rate(self) -> int:
        return self.backend.sample_rate

    @property
    def frame_rate(self) -> float:
        return self.backend.sample_rate / self.backend.hop

    @property
    def num_codebooks(self) -> int:
        return self.backend.num_codebooks

    @property
    def codebook_size(self) -> int:
        return self.backend.codebook_size

    @property
    def identity(self) -> str:
        if self._identity is None:
            geometry = self.sample_rate, self.frame_rate, self.num_codebooks, self.codebook_size
            self._identity = identity(self.backend.family, *geometry, self.model)
        return self._identity

    @torch.no_grad()
    def encode(self, wav: Tensor) -> Tensor:
        """[B, T] or [T] float in [-1, 1] -> [B, Q, ceil(T / hop)] int64. Raises ValueError for any other audio."""
        wav = batch_of_wavs(wav)
        codes = self.backend.quantise(self.latents(wav))
        frames = math.ceil(wav.shape[1] / self.backend.hop)
        assert codes.shape == (len(wav), self.num_codebooks, frames), f"{list(codes.shape)} for {frames} frames"
        return codes

    @torch.no_grad()
    def latents(self, wav: Tensor) -> Tensor:
        """[B, T] or [T] float in [-1, 1] -> [B, D, ceil(T / hop)] features before they are quantised."""
        return self.backend.analyse(self._tensor(batch_of_wavs(wav)[:, None]))

    @torch.no_grad()
    def decode_latents(self, latents: Tensor) -> Tensor:
        """[B, D, F] -> [B, F · hop] float32, without quantisation.

        Raises ValueError for a codec whose quantiser gives other features than it takes.
        """
        probe = torch.zeros(1, self.num_codebooks, 1, dtype=torch.int64, device=self._device)
        if (width := self.backend.dequantise(probe).shape[1]) != latents.shape[1]:
            raise ValueError(
                f"{self.backend.family}: latents have {latents.shape[1]} channels, its decoder reads {width}; only "
                "codecs whose quantiser changes no widths (unified, dac, encodec) decode latents"
            )
        return fit(self.backend.synthesise(self._tensor(latents))[:, 0].float(), latents.shape[2] * self.backend.hop)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """[B, Q, F] -> [B, F · hop] float32; F may be 0. Raises ValueError for codes of another codec."""
        check_codes(codes, self.num_codebooks, self.codebook_size)
        samples = codes.shape[2] * self.backend.hop
        if codes.numel() == 0:
            return torch.zeros(len(codes), samples, device=self._device)
        codes = codes.to(self._device, torch.int64)
        return fit(self.backend.synthesise(self.backend.dequantise(codes))[:, 0].float(), samples)

    def streaming(self) -> CodecStream:
        return CodecStream(self)

    def train(self, mode: bool = True) -> Codec:
        """Stays in eval mode: dropout would change codes."""
        return super().train(False)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _tensor(self, wav: Tensor) -> Tensor:
        return wav.to(self._device, next(self.model.parameters()).dtype)


class CodecStream:
    """The Streaming of a Codec."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._begin_encoding()
        self._begin_decoding()

    def _begin_encoding(self) -> None:
        self.analysis = self.codec.backend.analysis()
        self.samples_in = self.frames_out = 0

    def _begin_decoding(self) -> None:
        self.synthesis = self.codec.backend.synthesis()
        self.frames_in = self.samples_out = 0

    @torch.no_grad()
    def encode(self, wav: Tensor) -> Tensor:
        """[T'] -> [Q, F']; T' may be 0. Raises ValueError as the codec's `encode` does."""
        if wav.ndim != 1:
            raise ValueError(
                f"a stream takes mono audio [T], got {list(wav.shape)}; tokenizers_audio.prepare mixes down"
            )
        check_wav(wav)
        if len(wav) == 0:
            return self._no_codes()
        self.samples_in += len(wav)
        return self._quantise(self.analysis.push(self.codec._tensor(wav[None, None])))

    @torch.no_grad()
    def finish(self) -> Tensor:
        """[Q, F'']"""
        if self.samples_in == 0:
            return self._no_codes()
        codes = self._quantise(self.analysis.finish())
        assert self.frames_out == math.ceil(self.samples_in / self.codec.backend.hop)
        self._begin_encoding()
        return codes

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """[Q, F'] -> [T'] float32; F' may be 0. Raises ValueError as the codec's `decode` does."""
        check_codes(codes, self.codec.num_codebooks, self.codec.codebook_size, "[Q, F]")
        if codes.shape[1] == 0:
            return torch.zeros(0, device=self.codec._device)
        self.frames_in += codes.shape[1]
        features = self.codec.backend.dequantise(codes[None].to(self.codec._device, torch.int64))
        wav = self.synthesis.push(features)[0, 0].float()
        self.samples_out += len(wav)
        return wav

    @torch.no_grad()
    def flush(self) -> Tensor:
        """[T'']"""
        if self.frames_in == 0:
            return torch.zeros(0, device=self.codec._device)
        rest = self.synthesis.finish()[0, 0].float()
        rest = fit(rest, self.frames_in * self.codec.backend.hop - self.samples_out)
        self._begin_decoding()
        return rest

    def _no_codes(self) -> Tensor:
        return torch.zeros(self.codec.num_codebooks, 0, dtype=torch.int64, device=self.codec._device)

    def _quantise(self, features: Tensor) -> Tensor:
        self.frames_out += features.shape[2]
        return self.codec.backend.quantise(features)[0] if features.shape[2] else self._no_codes()


def fit(x: Tensor, length: int) -> Tensor:
    """Return the last axis cut off or filled with zeros at its end."""
    return F.pad(x, (0, max(0, length - x.shape[-1])))[..., :length]


def whole_frames(x: Tensor, hop: int) -> Tensor:
    """Audio [..., T] completed with silence to whole frames."""
    return fit(x, math.ceil(x.shape[-1] / hop) * hop)


def codebooks(
    available: int,
    frame_rate: float,
    codebook_size: int,
    num_codebooks: int | None,
    bandwidth: float | None,
) -> int:
    """Return how many codebooks a codec uses: `num_codebooks`, as many as fit into `bandwidth` (kbit/s), or all."""
    if num_codebooks is not None and bandwidth is not None:
        raise ValueError("give num_codebooks or bandwidth, not both")
    bits = frame_rate * math.log2(codebook_size)
    if bandwidth is not None:
        num_codebooks = math.floor(bandwidth * 1000 / bits + 1e-6)
    chosen = available if num_codebooks is None else num_codebooks
    if not 1 <= chosen <= available:
        wanted = f"bandwidth {bandwidth:g} kbit/s" if bandwidth is not None else f"num_codebooks {num_codebooks}"
        raise ValueError(
            f"{wanted} makes {chosen} codebooks; this codec has 1 to {available} of {bits / 1000:.3g} kbit/s each"
        )
    return chosen
