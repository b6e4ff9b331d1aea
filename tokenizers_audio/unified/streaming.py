"""One stream through our tokenizer: samples to codes and codes to samples as they come, with bounded state."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from tokenizers_audio.checks import check_codes, check_wav
from tokenizers_audio.unified.config import UnifiedConfig
from tokenizers_audio.unified.layers import Cache


class BlockTokenizer(Protocol):
    """What streaming needs of `UnifiedTokenizer`, which documents these members."""

    config: UnifiedConfig
    fuse: Any
    quantizer: Any

    @property
    def device(self) -> torch.device: ...
    @property
    def num_codebooks(self) -> int: ...
    @property
    def codebook_size(self) -> int: ...
    @property
    def blocks(self) -> tuple[int, int, int]: ...
    def codes_of(self, wav: Tensor, cache: Cache) -> Tensor: ...
    def wav_of(self, vectors: Tensor, cache: Cache) -> Tensor: ...


class UnifiedStreaming:
    """A `Streaming`. Codes come a block of frames at a time (one frame, unless a speech model listens).

    State: the receptive fields of the layers, less than a block of samples, and what the semantic features look at
    around a block.
    """

    def __init__(self, tokenizer: BlockTokenizer):
        self.tokenizer = tokenizer
        self._buffer: Tensor
        self._samples: int
        self._frames: int
        self._start_encoding()
        self._start_decoding()

    @torch.no_grad()
    def encode(self, wav: Tensor) -> Tensor:
        """[T'] more samples -> [Q, F'] the codes that no later sample can change; F' may be 0."""
        if wav.ndim != 1:
            raise ValueError(f"a stream takes [T] samples, mono, got {list(wav.shape)}")
        check_wav(wav)
        self._buffer = torch.cat([self._buffer, wav.to(self._buffer)])
        self._samples += len(wav)
        block, past, ahead = self.tokenizer.blocks
        ready = (len(self._buffer) - past - ahead) // (block * self.tokenizer.config.hop)
        return self._codes(max(ready, 0) * block)

    @torch.no_grad()
    def finish(self) -> Tensor:
        """[Q, F''] the remaining codes, after the last samples."""
        hop = self.tokenizer.config.hop
        block, past, ahead = self.tokenizer.blocks
        left = -(-self._samples // hop) - self._frames
        whole = -(-left // block) * block
        self._buffer = torch.nn.functional.pad(self._buffer, (0, past + whole * hop + ahead - len(self._buffer)))
        codes = self._codes(whole)[:, :left]
        self._start_encoding()
        return codes

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """[Q, F'] more codes -> [T'] the samples that no later code can change; T' may be 0."""
        check_codes(codes, self.tokenizer.num_codebooks, self.tokenizer.codebook_size, "[Q, F]")
        if not codes.shape[1]:
            return torch.zeros(0, device=self.tokenizer.device)
        self._decoded = True
        return self._wav(self.tokenizer.quantizer.decode(codes[None].to(self.tokenizer.device, torch.int64)))

    @torch.no_grad()
    def flush(self) -> Tensor:
        """[T''] the remaining samples, after the last codes."""
        config, weight = self.tokenizer.config, self.tokenizer.fuse.weight
        wav = torch.zeros(0, device=self.tokenizer.device)
        if self._decoded and config.lookahead:
            wav = self._wav(weight.new_zeros(1, config.codebook_dim, config.lookahead))
        self._start_decoding()
        return wav

    def _codes(self, frames: int) -> Tensor:
        """Return the codes of the next `frames`, a whole number of blocks, all of whose samples are there."""
        tokenizer, (_, past, ahead) = self.tokenizer, self.tokenizer.blocks
        if not frames:
            return torch.zeros(tokenizer.num_codebooks, 0, dtype=torch.long, device=tokenizer.device)
        length = frames * tokenizer.config.hop
        codes = tokenizer.codes_of(self._buffer[None, : past + length + ahead], self._encoder_cache)[0]
        self._buffer = self._buffer[length:].clone()
        self._frames += frames
        return codes

    def _wav(self, vectors: Tensor) -> Tensor:
        wav = self.tokenizer.wav_of(vectors, self._decoder_cache)[0]
        cut = min(self._skip, len(wav))  # the look-ahead: samples before the recording
        self._skip -= cut
        return wav[cut:]

    def _start_encoding(self) -> None:
        self._encoder_cache: Cache = {}
        self._buffer = self.tokenizer.fuse.weight.new_zeros(self.tokenizer.blocks[1])
        self._samples = self._frames = 0

    def _start_decoding(self) -> None:
        self._decoder_cache: Cache = {}
        self._skip = self.tokenizer.config.lookahead * self.tokenizer.config.hop
        self._decoded = False
