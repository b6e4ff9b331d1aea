"""The speech of rollouts as waveforms: their codes through the codec.

Shapes: T samples, Q codebooks, F frames.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from audiorl.models.policy import AudioPolicy
from audiorl.models.speech import FrameLayout
from audiorl.types import Rollout, Segment
from tokenizers_audio.protocol import AudioTokenizer

Wave = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class CodecSpeechDecoder:
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
        waves = [wav for wav in self.by_segment(rollout) if len(wav)]
        return np.concatenate(waves) if waves else None

    def by_segment(self, rollout: Rollout) -> list[Wave]:
        """The speech of each segment, float32 [T]; T = 0 for none."""
        if rollout not in self._cache:
            self._cache[rollout] = [self.decode(s) for s in rollout.segments]
        return self._cache[rollout]

    def decode(self, segment: Segment) -> Wave:
        """The speech of one segment, float32 [T]; T = 0 for none."""
        if segment.codes is None:
            return np.zeros(0, np.float32)
        speeches = [codes for codes in self.layout.spoken(segment.codes) if codes.shape[1]]
        if not speeches:
            return np.zeros(0, np.float32)
        with torch.no_grad():
            waves = [self.codec.decode(codes[None])[0] for codes in speeches]
        return torch.cat(waves).float().cpu().numpy()
