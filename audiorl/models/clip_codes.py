"""Clips in the codes of a policy's codec."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from audiorl.audio import AudioClip
from audiorl.audio import name as clip_name
from audiorl.models.clip_cache import ClipCache
from tokenizers_audio.protocol import AudioTokenizer


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
            codes = self.precomputed[clip.key] if clip.key in self.precomputed else self._encode(clip)
            self._cache.put(clip.key, codes)
        return codes

    def _encode(self, clip: AudioClip) -> Tensor:
        from tokenizers_audio.audio import prepare

        rate = self.codec.sample_rate
        try:
            return self.codec.encode(prepare(clip.load(rate), rate, self.codec))[0].cpu()
        except ValueError as error:
            where = clip_name(clip)
            raise error if where in str(error) else ValueError(f"{where}: {error}") from error
