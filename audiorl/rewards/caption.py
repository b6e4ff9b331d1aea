"""The quality of a caption, by its agreement with references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from audiorl.eval.metrics.corpus import DocumentFrequencies, cider_d
from audiorl.eval.metrics.text import Normalizer, normalize
from audiorl.rewards.tags import final_text
from audiorl.types import Rollout, Sample, Score


@dataclass(frozen=True)
class CaptionQuality:
    """CIDEr-D of the final text against the sample's references, divided by 10: in [0, 1].

    Make it with `CaptionQuality.of(samples)`, which counts how rare words are in all their references.
    Self-critical training of captions rewards this (Rennie et al., arXiv 1612.00563). It counts words alone: look at a
    judge's opinion, too.

    Raises ValueError for a sample without references.
    """

    frequencies: DocumentFrequencies = field(repr=False)
    normalizer: Normalizer = "basic"

    @classmethod
    def of(cls, samples: Sequence[Sample], normalizer: Normalizer = "basic") -> CaptionQuality:
        """For the captions of these samples. Raises ValueError for less than two."""
        references = [[normalize(text, normalizer) for text in s.references] for s in samples]
        return cls(DocumentFrequencies.of(references), normalizer)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(self._value(r)) for r in rollouts]

    def _value(self, rollout: Rollout) -> float:
        references = [normalize(text, self.normalizer) for text in rollout.sample.references]
        if not references:
            raise ValueError(f"CaptionQuality: sample {rollout.sample.id!r} has no reference caption")
        return cider_d(normalize(final_text(rollout.text), self.normalizer), references, self.frequencies) / 10
