"""What rollouts said, as sound: their codes through the codec.

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
    """Decodes rollouts, each once and for as long as it is kept. It is the `SpeechDecoder` of `audiorl.rewards.speech`.

    Speech that was cut off is heard up to its last complete frame.
    """

    codec: AudioTokenizer
    layout: FrameLayout
    _kept: WeakKeyDictionary[Rollout, list[Wave]] = field(default_factory=WeakKeyDictionary, init=False, repr=False)

    @classmethod
    def of(cls, policy: AudioPolicy) -> CodecSpeechDecoder:
        """The voice of a policy that speaks. Raises ValueError where it has no codec."""
        if policy.speech is None or policy.codec is None:
            raise ValueError("the policy has no voice: it needs to be dualized, or to be Higgs, and set_codec")
        return cls(policy.codec, policy.speech)

    @property
    def sample_rate(self) -> int:
        return self.codec.sample_rate

    def waveform(self, rollout: Rollout) -> Wave | None:
        """Everything the rollout said, float32 [T]; None if it said nothing."""
        said = [wav for wav in self.by_segment(rollout) if len(wav)]
        return np.concatenate(said) if said else None

    def by_segment(self, rollout: Rollout) -> list[Wave]:
        """What it said in each segment, float32 [T]; T = 0 for nothing."""
        if rollout not in self._kept:
            self._kept[rollout] = [self._decoded(s) for s in rollout.segments]
        return self._kept[rollout]

    def _decoded(self, segment: Segment) -> Wave:
        if segment.codes is None:
            return np.zeros(0, np.float32)
        speeches = [codes for codes in self.layout.spoken(segment.codes) if codes.shape[1]]
        if not speeches:
            return np.zeros(0, np.float32)
        with torch.no_grad():
            said = [self.codec.decode(codes[None])[0] for codes in speeches]
        return torch.cat(said).float().cpu().numpy()
