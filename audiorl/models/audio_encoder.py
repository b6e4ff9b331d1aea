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
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from audiorl.audio import AudioClip, seconds
from audiorl.audio import name as clip_name
from audiorl.config import ModelConfig
from audiorl.distributed.local import gpu_work
from audiorl.models.attention import autocast, set_chunk_attention
from audiorl.models.backbone import Backbone
from audiorl.models.features import HOP, Features, check_extractor, to_weights
from tokenizers_audio.audio import prepare
from tokenizers_audio.batches import encode_all
from tokenizers_audio.protocol import AudioTokenizer

PASS_SECONDS = 120.0
"""Audio that goes through an encoder on a GPU in one pass."""
FEATURES_BYTES = 256 * 2**20
"""Memory for the features of clips that a trained encoder reads again, about 170 of 30 s."""
MIN_MS = 30
"""Encoders pool four 10 ms frames or more into one audio token; shorter clips give none."""
SLACK_MS = 10
"""Milliseconds that a clip may be longer than a family reads, which are not read: 30 s and a sample at 22.05 kHz,
resampled to 16 kHz, are 480,001 samples."""
_LOADERS = ThreadPoolExecutor(2, thread_name_prefix="audio")
T = TypeVar("T", Tensor, Features)
CODEC_BATCH = 2048
"""Clips that `ClipCodes.encode_all` holds in memory at a time."""


def _nbytes(value: Tensor | Features) -> int:
    return value.nbytes if isinstance(value, Tensor) else sum(x.nbytes for x in value.values())


class ClipCache(Generic[T]):
    """Tensors or features by `AudioClip.key`, bounded in bytes; the least recently used is dropped first."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self._bytes = max_bytes, 0
        self._values: OrderedDict[str, T] = OrderedDict()

    def get(self, key: str) -> T | None:
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        return None

    def clear(self) -> None:
        self._values.clear()
        self._bytes = 0

    def put(self, key: str, value: T) -> None:
        replaced = self._values.pop(key, None)
        self._values[key] = value
        self._bytes += _nbytes(value) - (0 if replaced is None else _nbytes(replaced))
        while self._bytes > self._max_bytes and len(self._values) > 1:
            _, dropped = self._values.popitem(last=False)
            self._bytes -= _nbytes(dropped)


class AudioEncoder:
    """Encode clips: on the CPU one at a time, so a result never depends on its batch; on a GPU several together.

    The output of a frozen encoder is cached (`ModelConfig.audio_cache_mb`); that of a trained one until the weights
    change, and the features longer (`FEATURES_BYTES`).
    """

    def __init__(self, model: PreTrainedModel, extractor: Any, backbone: Backbone, config: ModelConfig):
        self.model, self.extractor, self.backbone, self.config = model, extractor, backbone, config
        self.cache = ClipCache[Tensor](config.audio_cache_mb * 2**20)
        self.known_features = ClipCache[Features](FEATURES_BYTES)
        self._counts: dict[int, int] = {}
        self.loading: dict[str, Future[np.ndarray]] = {}
        """Samples of clips that `load_ahead` reads, by key."""
        self.pass_seconds: float | None = None
        """Seconds of audio in one pass of the encoder; 0: one clip at a time. None: 0 on the CPU, where a clip must
        have the same bits in every batch for a resumed run to repeat the first; PASS_SECONDS elsewhere, since a
        GPU repeats no bits anyway and short clips leave it idle."""
        if extractor is not None:
            check_extractor(extractor, backbone.audio_encoder(model), model.name_or_path)
            set_chunk_attention(backbone.audio_encoder(model), config.attention)
        self._update: dict[str, tuple[Tensor, Tensor]] | None = None
        """During an update: by clip, the encoder output with its graph, and the leaf that the passes differentiate."""

    @property
    def _device(self) -> torch.device:
        return self.backbone.head(self.model).weight.device

    def encode(self, clips: Sequence[AudioClip], beside_picture: Sequence[bool] = ()) -> list[Tensor]:
        """Return one [tokens, H] per clip, as the decoder receives it; differentiable where the config trains it.

        beside_picture: of each clip whether its prompt has pictures; (): none has.
        """
        trained = self.config.audio != "frozen" and torch.is_grad_enabled()
        outputs = self.encoder_outputs(clips)
        project = self.backbone.project, self.backbone.project_beside_picture
        with nullcontext() if trained else torch.no_grad():
            beside = beside_picture or [False] * len(clips)
            return [project[there](self.model, output) for output, there in zip(outputs, beside, strict=True)]

    def num_tokens(self, clip: AudioClip) -> int:
        """Count the clip's audio tokens. Encodes it, unless the model has no weights (device "meta")."""
        if self._device.type != "meta":
            return len(self.encoder_output(clip))
        samples, context = self._samples(len(self._wave(clip)) / self._rate), self.context_tokens(clip)
        tokens = self.backbone.tokens(self.model, samples) - context
        if tokens < 1:
            raise ValueError(f"{clip_name(clip)}: the clip is too short for the audio encoder")
        return tokens

    def expected_tokens(self, clip: AudioClip) -> int:
        """Return `num_tokens` by the clip's header. Raises ValueError for one that the encoder cannot read."""
        return self._tokens_in(clip.context + seconds(clip)) - self.context_tokens(clip)

    def features(self, clip: AudioClip) -> Features:
        """Return the features of the clip with its context, on the CPU."""
        return self._features([clip], torch.device("cpu"))[0]

    def context_tokens(self, clip: AudioClip) -> int:
        """Return how many of the clip's first audio tokens are of its context."""
        return self._tokens_in(clip.context) if clip.context else 0

    def load_ahead(self, clips: Iterable[AudioClip]) -> None:
        """Begin to decode clips that will be encoded next, in threads, while the GPU works. Their errors are raised
        when they are encoded."""
        new = {c.key: c for c in clips if self.cache.get(c.key) is None and self.known_features.get(c.key) is None}
        self.loading = {key: self.loading[key] for key in new if key in self.loading}  # drops what nobody asked for
        self.loading |= {key: _LOADERS.submit(self._load, c) for key, c in new.items() if key not in self.loading}

    @property
    def _rate(self) -> int:
        assert self.extractor is not None
        return int(self.extractor.sampling_rate)

    def _load(self, clip: AudioClip) -> np.ndarray:
        return clip.with_context().load(self._rate)

    def _wave(self, clip: AudioClip) -> np.ndarray:
        loading = self.loading.pop(clip.key, None)
        return self._load(clip) if loading is None else loading.result()

    def _features(self, clips: Sequence[AudioClip], device: torch.device) -> list[Features]:
        """Return `features` of each clip; on a GPU those of several clips are computed there together."""
        missing = {c.key: c for c in clips if self.known_features.get(c.key) is None}
        wavs = {key: self._read(self._wave(c)) for key, c in missing.items()}
        found = {c.key: known for c in clips if (known := self.known_features.get(c.key)) is not None}
        most = PASS_SECONDS * self._rate if device.type == "cuda" else 0
        ordered = sorted(wavs, key=lambda key: len(wavs[key]))
        while ordered:
            count = max(sum((i + 1) * len(wavs[key]) <= most for i, key in enumerate(ordered)), 1)
            part, ordered = ordered[:count], ordered[count:]
            computed = self.backbone.features(self.model, self.extractor, [wavs[key] for key in part], device)
            for key, features in zip(part, computed, strict=True):
                found[key] = features
                if self.config.audio == "full":  # a frozen encoder reads each clip once
                    self.known_features.put(key, {name: x.cpu() for name, x in features.items()})
        return [found[clip.key] for clip in clips]

    def _read(self, wav: np.ndarray) -> np.ndarray:
        """Return what the encoder reads of samples [T]: all but `SLACK_MS`."""
        return wav[: self._samples(len(wav) / self._rate)]

    def _tokens_in(self, duration: float) -> int:
        """Return the number of audio tokens of `duration` seconds."""
        samples = self._samples(duration)
        if samples not in self._counts:
            self._counts[samples] = self.backbone.tokens(self.model, samples)
        return self._counts[samples]

    def _samples(self, duration: float) -> int:
        """Return how many samples of a clip are read. Raises ValueError for one too short or too long to be encoded."""
        if duration * 1000 <= MIN_MS - 10:
            what = f"audio of {math.ceil(duration * 100 - 1e-6) * 10} ms is too short"
            raise ValueError(f"{what}; at least {MIN_MS} ms make an audio token: leave it out")
        longest = self.backbone.max_seconds(self.model, self.extractor)
        if longest is not None and duration > longest + SLACK_MS / 1000:
            what = f"audio of {duration:g} s is longer than the {longest:g} s that {self.backbone.name} encodes"
            raise ValueError(f"{what}; cut the clip with start and duration")
        return math.ceil(min(duration, math.inf if longest is None else longest) * self._rate - 1e-4)

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
        weight = next(self.backbone.audio_encoder(self.model).parameters())
        limit = self.pass_seconds
        if limit is None:
            limit = 0.0 if self._device.type == "cpu" else PASS_SECONDS
        passes: list[list[Features]] = []
        total = 0.0
        for clip, features in zip(clips, self._features(clips, weight.device), strict=True):
            length = clip.context + seconds(clip) if limit else math.inf
            mels, bins = features.get("input_features"), getattr(self.extractor, "feature_size", 0)
            if limit and mels is not None and bins:  # what the encoder reads: Whisper pads a clip of a second to thirty
                length = max(length, mels.numel() / bins * HOP / self._rate)
            total += length
            if not passes or total > limit:
                passes.append([])
                total = length
            passes[-1].append(to_weights(features, weight))
        outputs: list[Tensor] = []
        for batch in passes:
            with autocast(self.config, weight.device), gpu_work():
                outputs += [o.to(weight.dtype) for o in self.backbone.encode_audio(self.model, batch)]
        for i, clip in enumerate(clips):
            if not clip.context:
                continue
            context, tokens = self.context_tokens(clip), self._tokens_in(seconds(clip))
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
        self._cache = ClipCache[Tensor](max_bytes)

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
