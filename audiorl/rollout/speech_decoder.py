"""The speech of rollouts as waveforms: their codes through the codec.

Shapes: T samples, Q codebooks, F frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from audiorl.models.policy import AudioPolicy
from audiorl.models.speech import FrameLayout
from audiorl.protocols import SpeechDecoder
from audiorl.types import Rollout, Segment
from tokenizers_audio.batches import decode_all
from tokenizers_audio.protocol import AudioTokenizer

Wave = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class CodecSpeechDecoder(SpeechDecoder):
    """Decodes rollouts with a codec, each once; the waveforms are cached as long as the rollout exists.

    Speech that was cut off is decoded up to its last complete frame.
    """

    codec: AudioTokenizer
    layout: FrameLayout
    _cache: WeakKeyDictionary[Rollout, list[Wave]] = field(default_factory=WeakKeyDictionary, init=False, repr=False)

    @classmethod
    def of(cls, policy: AudioPolicy) -> CodecSpeechDecoder:
        """The decoder of a policy that speaks. Raises ValueError where it has no codec."""
        if policy.speech is None or policy.codec is None:
            raise ValueError(
                "the policy has no speech decoder: dualize it or take Higgs, and give it a codec (set_codec)"
            )
        return cls(policy.codec, policy.speech)

    @property
    def sample_rate(self) -> int:
        return self.codec.sample_rate

    def waveform(self, rollout: Rollout) -> Wave | None:
        """All speech of the rollout, float32 [T]; None if it has none."""
        return self.waveforms([rollout])[0]

    def waveforms(self, rollouts: Sequence[Rollout]) -> list[Wave | None]:
        """`waveform` of each. Speech of equally many frames goes through the codec together."""
        new = [r for r in dict.fromkeys(rollouts) if r not in self._cache]
        waves = iter(self._decoded([s for r in new for s in r.segments]))
        for rollout in new:
            self._cache[rollout] = [next(waves) for _ in rollout.segments]
        spoken = [[wav for wav in self._cache[r] if len(wav)] for r in rollouts]
        return [np.concatenate(parts) if parts else None for parts in spoken]

    def by_segment(self, rollout: Rollout) -> list[Wave]:
        """The speech of each segment, float32 [T]; T = 0 for none."""
        self.waveforms([rollout])
        return self._cache[rollout]

    def decode(self, segment: Segment) -> Wave:
        """The speech of one segment, float32 [T]; T = 0 for none."""
        return self._decoded([segment])[0]

    def _decoded(self, segments: Sequence[Segment]) -> list[Wave]:
        speeches = [
            (place, codes)
            for place, segment in enumerate(segments)
            if segment.codes is not None
            for codes in self.layout.speeches(segment.codes)
            if codes.shape[1]
        ]
        parts: list[list[Wave]] = [[] for _ in segments]
        for (place, _), wav in zip(speeches, decode_all(self.codec, [codes for _, codes in speeches]), strict=True):
            parts[place].append(wav.numpy())
        return [np.concatenate(p) if p else np.zeros(0, np.float32) for p in parts]
