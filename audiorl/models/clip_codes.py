"""Clips in the codes of a policy's codec."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice

from torch import Tensor

from audiorl.audio import AudioClip
from audiorl.audio import name as clip_name
from audiorl.models.clip_cache import ClipCache
from tokenizers_audio.audio import prepare
from tokenizers_audio.batches import encode_all
from tokenizers_audio.protocol import AudioTokenizer

LOADED = 2048
"""Clips that `ClipCodes.encode_all` holds in memory at a time."""


class ClipCodes:
    """A codec and the codes of clips that it has encoded, up to `max_bytes` of them.

    `precomputed`: codes [Q, F] of this codec by `AudioClip.key`, such as `CodeShards`.
    """

    def __init__(self, codec: AudioTokenizer, max_bytes: int):
        self.codec = codec
        self.precomputed: Mapping[str, Tensor] = {}
        self._cache = ClipCache(max_bytes)

    def codes(self, clip: AudioClip) -> Tensor:
        """[Q, F] int64. Raises ValueError that names the clip where the codec cannot encode it."""
        codes = self._cache.get(clip.key)
        if codes is None:
            if clip.key in self.precomputed:
                codes = self.precomputed[clip.key]
            else:
                wav = self._prepared(clip)
                with _naming(clip):
                    codes = self.codec.encode(wav)[0].cpu()
            self._cache.put(clip.key, codes)
        return codes

    def encode_all(self, clips: Iterable[AudioClip]) -> None:
        """Encode the clips that are new, for `codes`: those of equal length go through the codec together."""
        new = {c.key: c for c in clips if c.key not in self.precomputed and self._cache.get(c.key) is None}
        waiting = iter(new.items())
        while part := dict(islice(waiting, LOADED)):
            codes = encode_all(self.codec, [self._prepared(clip) for clip in part.values()])
            for key, of_clip in zip(part, codes, strict=True):
                self._cache.put(key, of_clip)

    def _prepared(self, clip: AudioClip) -> Tensor:
        """[T] at the codec's rate."""
        rate = self.codec.sample_rate
        with _naming(clip):
            return prepare(clip.load(rate), rate, self.codec)


@contextmanager
def _naming(clip: AudioClip) -> Iterator[None]:
    """An error about a clip says which."""
    try:
        yield
    except ValueError as error:
        where = clip_name(clip)
        raise error if where in str(error) else ValueError(f"{where}: {error}") from error
