"""Clips for a model: log-mel features, the audio encoder's output and codec codes, each made once and cached.

Shapes: T samples, D audio encoder width, H decoder width, Q codebooks, F codec frames.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, WhisperFeatureExtractor

from audiorl.audio import AudioClip, seconds
from audiorl.audio import name as clip_name
from audiorl.config import ModelConfig
from audiorl.distributed.local import gpu_work
from audiorl.models.attention import autocast, set_chunk_attention
from audiorl.models.backbone import Backbone
from tokenizers_audio.audio import prepare
from tokenizers_audio.batches import encode_all
from tokenizers_audio.protocol import AudioTokenizer

PASS_SECONDS = 120.0
"""Audio that goes through an encoder on a GPU in one pass."""
MELS_BYTES = 256 * 2**20
"""Memory for the mel features of clips that a trained encoder reads again, about 170 of 30 s."""
MIN_FRAMES = 3
"""Encoders pool four 10 ms frames into one audio token; shorter clips give none."""
_LOADERS = ThreadPoolExecutor(2, thread_name_prefix="audio")
CODEC_BATCH = 2048
"""Clips that `ClipCodes.encode_all` holds in memory at a time."""


def log_mel(extractor: WhisperFeatureExtractor, wav: np.ndarray) -> Tensor:
    """Return `log_mels` of one clip."""
    return log_mels(extractor, [wav])[0]


def log_mels(
    extractor: WhisperFeatureExtractor, wavs: Sequence[np.ndarray], device: str | torch.device = "cpu"
) -> list[Tensor]:
    """Return [mel bins, ceil(T / hop)] float32, on `device`, of each of mono samples [T] at the extractor's rate.

    Equal to what the models' processors compute with the clip padded to 30 s and the padding cut off again, without
    paying for the 30 s. Give clips of similar length together. On a GPU it is computed there, to 1e-5 of that.
    """
    hop, device = extractor.hop_length, torch.device(device)
    frames = [math.ceil(len(wav) / hop) for wav in wavs]
    padded = np.zeros((len(wavs), (max(frames) + math.ceil(extractor.n_fft / hop) + 1) * hop), dtype=np.float32)
    for samples, wav in zip(padded, wavs, strict=True):
        samples[: len(wav)] = wav
    options = dict(sampling_rate=extractor.sampling_rate, padding=False, truncation=False, return_tensors="pt")
    # Under autocast its product with the mel filters would be bfloat16, which numpy lacks.
    with torch.autocast(device.type, enabled=False):
        if device.type == "cuda" and not extractor.dither:
            features = spectrogram(extractor, torch.from_numpy(padded).to(device, non_blocking=True))
        else:
            features = extractor(padded, **options)["input_features"].to(device)
    return [mel[:, :count] for mel, count in zip(features, frames, strict=True)]


def spectrogram(extractor: WhisperFeatureExtractor, wavs: Tensor) -> Tensor:
    """Return [clips, mel bins, frames] of wavs [clips, T], where these are: what the extractor computes, which copies
    its result to the host."""
    window = torch.hann_window(extractor.n_fft, device=wavs.device)
    spectrum = torch.stft(wavs, extractor.n_fft, extractor.hop_length, window=window, return_complex=True)
    filters = torch.from_numpy(extractor.mel_filters).to(wavs.device, torch.float64, non_blocking=True)
    # In float64: a product in TF32 would be off by a thousandth.
    mels = (filters.T @ (spectrum[..., :-1].abs() ** 2).double()).float()
    logs = mels.clamp(min=1e-10).log10()
    return (torch.maximum(logs, logs.amax((1, 2), keepdim=True) - 8.0) + 4.0) / 4.0


def padded_mel(mel: Tensor, frames: int) -> Tensor:
    """Return [mel bins, frames]: the clip's frames, then what the extractor gives for silence after it."""
    # The extractor clamps log10 to 8 decades below the loudest bin (and to 10^-10), then scales by (x + 4) / 4.
    padded = (mel.max() - 2.0).clamp(min=-1.5).repeat(mel.shape[0], frames)
    padded[:, : mel.shape[1]] = mel[:, :frames]
    return padded


def check_window(frames: int, window: int, encoder: str) -> int:
    """Return how many of a clip's frames an encoder with a fixed window reads; ValueError, in seconds, for too many.

    One frame more is not read: resampled to 16 kHz, 30 s and a sample at 22.05 kHz are 480,001 samples.
    """
    if frames > window + 1:
        raise ValueError(
            f"audio of {frames / 100:g} s is longer than the {window / 100:.0f} s that {encoder} encodes; "
            "cut the clip with start and duration"
        )
    return min(frames, window)


def check_min_frames(frames: int) -> None:
    """Raise ValueError for a clip that gives no audio token."""
    if frames < MIN_FRAMES:
        least = f"at least {MIN_FRAMES * 10} ms"
        raise ValueError(f"audio of {frames * 10} ms is too short; {least} make an audio token: leave it out")


class ClipCache:
    """Tensors by `AudioClip.key`, bounded in bytes; the least recently used is dropped first."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self._bytes = max_bytes, 0
        self._tensors: OrderedDict[str, Tensor] = OrderedDict()

    def get(self, key: str) -> Tensor | None:
        if key in self._tensors:
            self._tensors.move_to_end(key)
            return self._tensors[key]
        return None

    def clear(self) -> None:
        self._tensors.clear()
        self._bytes = 0

    def put(self, key: str, tensor: Tensor) -> None:
        self._tensors[key] = tensor
        self._bytes += tensor.nbytes
        while self._bytes > self._max_bytes and len(self._tensors) > 1:
            _, dropped = self._tensors.popitem(last=False)
            self._bytes -= dropped.nbytes


class AudioEncoder:
    """Encode clips: on the CPU one at a time, so a result never depends on its batch; on a GPU several together.

    The output of a frozen encoder is cached (`ModelConfig.audio_cache_mb`); that of a trained one until the weights
    change, and its mel features longer (`MELS_BYTES`).
    """

    def __init__(
        self, model: PreTrainedModel, extractor: WhisperFeatureExtractor | None, backbone: Backbone, config: ModelConfig
    ):
        self.model, self.extractor, self.backbone, self.config = model, extractor, backbone, config
        self.cache = ClipCache(config.audio_cache_mb * 2**20)
        self.mels = ClipCache(MELS_BYTES)
        self._counts: dict[int, int] = {}
        self.loading: dict[str, Future[np.ndarray]] = {}
        """Samples of clips that `load_ahead` reads, by key."""
        self.pass_seconds: float | None = None
        """Seconds of audio in one pass of the encoder; 0: one clip at a time. None: 0 on the CPU, where a clip must
        have the same bits in every batch for a resumed run to repeat the first; PASS_SECONDS elsewhere, since a
        GPU repeats no bits anyway and short clips leave it idle."""
        if extractor is not None:
            set_chunk_attention(backbone.audio_encoder(model), config.attention)
        self._update: dict[str, tuple[Tensor, Tensor]] | None = None
        """During an update: by clip, the encoder output with its graph, and the leaf that the passes differentiate."""

    @property
    def _device(self) -> torch.device:
        return self.backbone.head(self.model).weight.device

    def encode(self, clips: Sequence[AudioClip]) -> list[Tensor]:
        """Return one [tokens, H] per clip, as the decoder receives it; differentiable where the config trains it."""
        trained = self.config.audio != "frozen" and torch.is_grad_enabled()
        outputs = self.encoder_outputs(clips)
        with nullcontext() if trained else torch.no_grad():
            return [self.backbone.project(self.model, output) for output in outputs]

    def num_tokens(self, clip: AudioClip) -> int:
        """Count the clip's audio tokens. Encodes it, unless the model has no weights (device "meta")."""
        if self._device.type != "meta":
            return len(self.encoder_output(clip))
        mel, context_tokens = self.mel(clip)
        tokens = self.backbone.tokens(self.model, mel.shape[1]) - context_tokens
        if tokens < 1:
            raise ValueError(f"{clip_name(clip)}: the clip is too short for the audio encoder")
        return tokens

    def expected_tokens(self, clip: AudioClip) -> int:
        """Return `num_tokens` by the clip's header. Raises ValueError for one that the encoder cannot read."""
        length = seconds(clip)
        check_min_frames(self._frames(clip.context + length))
        return self._tokens_in(clip.context + length) - (self._tokens_in(clip.context) if clip.context else 0)

    def mel(self, clip: AudioClip) -> tuple[Tensor, int]:
        """Return [mel bins, frames] of the clip with its context, on the CPU, and the context's audio tokens."""
        assert self.extractor is not None
        mel = self.mels.get(clip.key)
        if mel is None:
            mel = log_mel(self.extractor, self._wave(clip))
            if self.config.audio == "full":  # a frozen encoder reads each clip once
                self.mels.put(clip.key, mel)
        return mel, self._tokens_in(clip.context) if clip.context else 0

    def load_ahead(self, clips: Iterable[AudioClip]) -> None:
        """Begin to decode clips that will be encoded next, in threads, while the GPU works. Their errors are raised
        when they are encoded."""
        new = {c.key: c for c in clips if self.cache.get(c.key) is None and self.mels.get(c.key) is None}
        self.loading = {key: self.loading[key] for key in new if key in self.loading}  # drops what nobody asked for
        self.loading |= {key: _LOADERS.submit(self._load, c) for key, c in new.items() if key not in self.loading}

    def _load(self, clip: AudioClip) -> np.ndarray:
        assert self.extractor is not None
        return clip.with_context().load(self.extractor.sampling_rate)

    def _wave(self, clip: AudioClip) -> np.ndarray:
        loading = self.loading.pop(clip.key, None)
        return self._load(clip) if loading is None else loading.result()

    def _mels(self, clips: Sequence[AudioClip], device: torch.device) -> list[tuple[Tensor, int]]:
        """Return `mel` of each clip; on a GPU those of several clips are computed there together."""
        if device.type == "cuda":
            assert self.extractor is not None
            missing = {c.key: c for c in clips if self.mels.get(c.key) is None}
            wavs = {key: self._wave(c) for key, c in missing.items()}
            found: dict[str, Tensor] = {}
            most = PASS_SECONDS * self.extractor.sampling_rate
            ordered = sorted(wavs, key=lambda key: len(wavs[key]))
            while ordered:
                count = max(sum((i + 1) * len(wavs[key]) <= most for i, key in enumerate(ordered)), 1)
                part, ordered = ordered[:count], ordered[count:]
                found |= zip(part, log_mels(self.extractor, [wavs[key] for key in part], device), strict=True)
            if self.config.audio == "full":
                for key, mel in found.items():
                    self.mels.put(key, mel.cpu())
            known = [found[c.key] if c.key in found else self.mel(c)[0] for c in clips]
            return [(mel, self._tokens_in(c.context) if c.context else 0) for mel, c in zip(known, clips, strict=True)]
        return [self.mel(clip) for clip in clips]

    def _tokens_in(self, duration: float) -> int:
        """Return the number of audio tokens of `duration` seconds."""
        frames = self._frames(duration)
        if frames not in self._counts:
            self._counts[frames] = self.backbone.tokens(self.model, frames)
        return self._counts[frames]

    def _frames(self, duration: float) -> int:
        assert self.extractor is not None
        return math.ceil(duration * self.extractor.sampling_rate / self.extractor.hop_length - 1e-6)

    @contextmanager
    def once(self) -> Iterator[None]:
        """Run a trained audio encoder forward and backward once per clip during the passes of one update.

        Their gradients are summed at the encoder output and go through the encoder when the block ends.
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

    @property
    def in_update(self) -> bool:
        """Whether `once` keeps what is encoded."""
        return self._update is not None

    def weights_changed(self) -> None:
        """Drop the cached output of a trained audio encoder; call after every update of the weights."""
        if self.config.audio == "full":
            self.cache.clear()

    def encoder_output(self, clip: AudioClip) -> Tensor:
        """Return [tokens, D] of the clip, from the cache where it is there."""
        return self.encoder_outputs([clip])[0]

    def encoder_outputs(self, clips: Sequence[AudioClip]) -> list[Tensor]:
        """Return one [tokens, D] per clip. Clips that no cache has are encoded, each once."""
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
            encoded = self._run(list(missing.values()))
            copies: Sequence[Tensor] = encoded
            if encoded and self._device.type == "cuda":  # the host waits once for all
                copies = [x.clone() for x in torch.cat(encoded).cpu().split([len(x) for x in encoded])]
            for key, copy in zip(missing, copies, strict=True):
                self.cache.put(key, copy.cpu())
            cached |= zip(missing, encoded, strict=True)
        return [cached[clip.key].to(self._device, non_blocking=True) for clip in clips]

    def _run(self, clips: Sequence[AudioClip]) -> list[Tensor]:
        """Return one [tokens, D] per clip; its context is encoded with it and then cut off."""
        assert self.extractor is not None
        weight = next(self.backbone.audio_encoder(self.model).parameters())
        limit = self.pass_seconds
        if limit is None:
            limit = 0.0 if self._device.type == "cpu" else PASS_SECONDS
        limit *= self.extractor.sampling_rate / self.extractor.hop_length
        mels = self._mels(clips, weight.device)
        passes: list[list[Tensor]] = []
        total = 0
        for mel, _ in mels:
            if not passes or total + mel.shape[1] > limit:
                passes.append([])
                total = 0
            passes[-1].append(mel)
            total += mel.shape[1]
        outputs: list[Tensor] = []
        for batch in passes:
            batch = [mel.to(device=weight.device, dtype=weight.dtype, non_blocking=True) for mel in batch]
            with autocast(self.config, weight.device), gpu_work():
                outputs += [o.to(weight.dtype) for o in self.backbone.encode_audio(self.model, batch)]
        for i, (clip, (_, context)) in enumerate(zip(clips, mels, strict=True)):
            if not clip.context:
                continue
            tokens = self._tokens_in(seconds(clip))
            if context + tokens != len(outputs[i]):
                raise ValueError(
                    f"{clip_name(clip)}: {tokens} audio tokens after {context} of context are {len(outputs[i])} "
                    f"together; make the context of {clip.context:g} s a multiple of the audio encoder's frame"
                )
            outputs[i] = outputs[i][context:]
        return outputs


class ClipCodes:
    """A codec and the codes of clips that it has encoded, up to `max_bytes` of them.

    `precomputed`: codes [Q, F] of this codec by `AudioClip.key`, such as `CodeShards`.
    """

    def __init__(self, codec: AudioTokenizer, max_bytes: int):
        self.codec = codec
        self.precomputed: Mapping[str, Tensor] = {}
        self._cache = ClipCache(max_bytes)

    def codes(self, clip: AudioClip) -> Tensor:
        """Return [Q, F] int64. Raises ValueError that names the clip where the codec cannot encode it."""
        codes = self._cache.get(clip.key)
        if codes is None:
            codes = self.precomputed.get(clip.key)
            if codes is None:
                with _naming_clip(clip):
                    codes = self.codec.encode(self._prepared(clip))[0].cpu()
            self._cache.put(clip.key, codes)
        return codes

    def encode_all(self, clips: Iterable[AudioClip]) -> None:
        """Encode clips that will be read often, those of equal length together, which is faster than one by one."""
        new = {c.key: c for c in clips if c.key not in self.precomputed and self._cache.get(c.key) is None}
        waiting = iter(new.items())
        while part := dict(islice(waiting, CODEC_BATCH)):
            codes = encode_all(self.codec, [self._prepared(clip) for clip in part.values()])
            for key, clip_codes in zip(part, codes, strict=True):
                self._cache.put(key, clip_codes)

    def _prepared(self, clip: AudioClip) -> Tensor:
        """Return [T] at the codec's rate."""
        with _naming_clip(clip):
            return prepare(clip.load(self.codec.sample_rate), self.codec.sample_rate, self.codec)


@contextmanager
def _naming_clip(clip: AudioClip) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        where = clip_name(clip)
        raise error if where in str(error) else ValueError(f"{where}: {error}") from error
