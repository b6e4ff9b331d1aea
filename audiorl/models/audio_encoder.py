"""Clips through a model's audio encoder: each clip once, cached, and in training once per update.

Shapes: D audio encoder width, H decoder width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import ceil

import torch
from torch import Tensor
from transformers import PreTrainedModel, WhisperFeatureExtractor

from audiorl.audio import AudioClip, seconds
from audiorl.audio import name as clip_name
from audiorl.config import ModelConfig
from audiorl.models.attention import set_chunk_attention
from audiorl.models.backbone import Backbone
from audiorl.models.clip_cache import ClipCache
from audiorl.models.features import log_mel
from audiorl.models.precision import autocast

PASS_SECONDS = 120.0
"""Audio that goes through an encoder on a GPU in one pass."""


MELS_BYTES = 256 * 2**20
"""Memory for the mel features of clips that a trained encoder reads again, about 170 of 30 s."""


class AudioEncoder:
    """Encodes clips: on the CPU one at a time, so that a result never depends on its batch, on a GPU several at once.

    The output of a frozen audio encoder is cached (up to `ModelConfig.audio_cache_mb`) for rollouts, log-probs and all
    epochs; that of a trained one is cached until the weights change, and its mel features longer (`MELS_BYTES`).
    """

    def __init__(
        self, model: PreTrainedModel, extractor: WhisperFeatureExtractor | None, backbone: Backbone, config: ModelConfig
    ):
        self.model, self.extractor, self.backbone, self.config = model, extractor, backbone, config
        self.cache = ClipCache(config.audio_cache_mb * 2**20)
        self.mels = ClipCache(MELS_BYTES)
        self.pass_seconds: float | None = None
        """Seconds of audio in one pass of the encoder; 0: one clip at a time. None: 0 on the CPU, where a clip's output
        shall have the same bits in every batch, so that a resumed run repeats the first; elsewhere PASS_SECONDS, since
        a GPU repeats no bits anyway and short clips leave it idle."""
        if extractor is not None:
            set_chunk_attention(backbone.audio_encoder(model), config.attention)
        self._update: dict[str, tuple[Tensor, Tensor]] | None = None
        """During an update: by clip, the encoder output with its graph, and the leaf that the passes differentiate."""

    @property
    def _device(self) -> torch.device:
        return self.backbone.head(self.model).weight.device

    def encode(self, clips: Sequence[AudioClip]) -> list[Tensor]:
        """One [tokens, H] per clip, as the decoder receives it; differentiable where the config trains it."""
        trained = self.config.audio != "frozen" and torch.is_grad_enabled()
        outputs = self.encoder_outputs(clips)
        with nullcontext() if trained else torch.no_grad():
            return [self.backbone.project(self.model, output) for output in outputs]

    def num_tokens(self, clip: AudioClip) -> int:
        """How many audio tokens the clip becomes. Encodes it, unless the model has no weights (device "meta")."""
        if self.extractor is None:
            raise ValueError("the model has no audio encoder")
        if self._device.type != "meta":
            return len(self.encoder_output(clip))
        mel, context_tokens = self.mel(clip)
        tokens = self.backbone.tokens(self.model, mel.shape[1]) - context_tokens
        if tokens < 1:
            raise ValueError(f"{clip_name(clip)}: the clip is too short for the audio encoder")
        return tokens

    def mel(self, clip: AudioClip) -> tuple[Tensor, int]:
        """[mel bins, frames] of the clip with its context, on the CPU, and how many audio tokens are the context's."""
        assert self.extractor is not None
        mel = self.mels.get(clip.key)
        if mel is None:
            mel = log_mel(self.extractor, clip.with_context().load(self.extractor.sampling_rate))
            if self.config.audio == "full":  # a frozen encoder reads each clip once
                self.mels.put(clip.key, mel)
        return mel, self._tokens_in(clip.context) if clip.context else 0

    def _tokens_in(self, duration: float) -> int:
        """Audio tokens of `duration` seconds."""
        assert self.extractor is not None
        hop = self.extractor.hop_length / self.extractor.sampling_rate
        return self.backbone.tokens(self.model, ceil(duration / hop - 1e-6))

    @contextmanager
    def once(self) -> Iterator[None]:
        """Around the passes of one update: a trained audio encoder runs forward and backward once per clip.

        The passes differentiate down to the encoder output. Their gradients are summed there and go through the audio
        encoder when the block ends. A frozen audio encoder runs once per clip with or without this block.
        """
        if self.config.audio != "full":
            yield
            return
        assert self._update is None, "one update at a time"
        self._update = {}
        try:
            yield
            reached = [(output, leaf.grad) for output, leaf in self._update.values() if leaf.grad is not None]
            if reached:
                torch.autograd.backward([output for output, _ in reached], [grad for _, grad in reached])
        finally:
            self._update = None

    def weights_changed(self) -> None:
        """Drop the cached output of a trained audio encoder; call after every update of the weights."""
        if self.config.audio == "full":
            self.cache.clear()

    def encoder_output(self, clip: AudioClip) -> Tensor:
        """[tokens, D] of the clip, from the cache where it is there."""
        return self.encoder_outputs([clip])[0]

    def encoder_outputs(self, clips: Sequence[AudioClip]) -> list[Tensor]:
        """One [tokens, D] per clip. Those that no cache has are encoded, each once."""
        if self.config.audio == "full" and torch.is_grad_enabled():
            if self._update is None:
                return self._run(clips)
            missing = {clip.key: clip for clip in clips if clip.key not in self._update}
            for key, output in zip(missing, self._run(list(missing.values())), strict=True):
                self._update[key] = output, output.detach().requires_grad_()
            return [self._update[clip.key][1] for clip in clips]
        cached = {clip.key: tensor for clip in clips if (tensor := self.cache.get(clip.key)) is not None}
        missing = {clip.key: clip for clip in clips if clip.key not in cached}
        with torch.no_grad():
            for key, encoded in zip(missing, self._run(list(missing.values())), strict=True):
                cached[key] = encoded.cpu()
                self.cache.put(key, cached[key])
        return [cached[clip.key].to(self._device) for clip in clips]

    def _run(self, clips: Sequence[AudioClip]) -> list[Tensor]:
        """One [tokens, D] per clip; its context is encoded with it and then cut off."""
        weight = next(self.backbone.audio_encoder(self.model).parameters())
        mels = [self.mel(clip) for clip in clips]
        outputs: list[Tensor] = []
        for part in self._passes([mel.shape[1] for mel, _ in mels]):
            batch = [mel.to(device=weight.device, dtype=weight.dtype) for mel, _ in mels[part]]
            with autocast(self.config, weight.device):
                outputs += [o.to(weight.dtype) for o in self.backbone.encode_audio(self.model, batch)]
        contexts = [context_tokens for _, context_tokens in mels]
        return [self._without_context(*item) for item in zip(clips, outputs, contexts, strict=True)]

    def _passes(self, frames: Sequence[int]) -> list[slice]:
        """Neighbouring clips that go through the encoder together."""
        assert self.extractor is not None
        limit = self.pass_seconds
        if limit is None:
            limit = 0.0 if self._device.type == "cpu" else PASS_SECONDS
        limit *= self.extractor.sampling_rate / self.extractor.hop_length
        passes: list[slice] = []
        total = 0
        for i, count in enumerate(frames):
            if passes and total + count <= limit:
                passes[-1] = slice(passes[-1].start, i + 1)
                total += count
            else:
                passes.append(slice(i, i + 1))
                total = count
        return passes

    def _without_context(self, clip: AudioClip, output: Tensor, context_tokens: int) -> Tensor:
        if not clip.context:
            return output
        tokens = self._tokens_in(seconds(clip))
        if context_tokens + tokens != len(output):
            raise ValueError(
                f"{clip_name(clip)}: {tokens} audio tokens after {context_tokens} of context are {len(output)} "
                f"together; make the context of {clip.context:g} s a multiple of the audio encoder's frame"
            )
        return output[context_tokens:]
