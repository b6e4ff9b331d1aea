"""Rewards of usual prosody, next to those of intelligibility, which alone make speech monotone (arXiv 2509.18531).

norm = prosody_norm(recordings, decoder.sample_rate)
models = SpeechModels(decoder, recogniser=load_recogniser("whisper-base", "en"))
understood = Intelligibility(models, "cer")
WeightedSum.of(understood=understood, prosody=(Gated(ProsodyRange(models, norm), understood, 0.7), 0.3))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from audiorl.audio import AudioClip
from audiorl.eval.metrics.prosody import MEASURES, Prosody, prosody
from audiorl.tasks.tts.listening import SpeechModels
from audiorl.types import Rollout, Sample, Score

LEAST_RANGE = 0.1
"""Semitones or dB to which smaller ranges are rounded up, so that they have a logarithm."""
LEAST_DEVIATION = {"f0_range": math.log(1.2), "energy_range": math.log(1.2), "pauses": 0.05}
"""Where recordings differ less, usual is what is within 20 % of the mean range, and within 5 points of the pauses."""


@dataclass(frozen=True)
class ProsodyNorm:
    """(mean, standard deviation) of the measures of recordings; of the ranges' natural logarithms."""

    f0_range: tuple[float, float]
    energy_range: tuple[float, float]
    pauses: tuple[float, float]


def prosody_norm(recordings: Sequence[AudioClip], sample_rate: int, most: int = 500) -> ProsodyNorm:
    """Return what is usual in recordings, at the rate of the speech that will be compared.

    Of more than `most` every n-th counts; a second of speech takes a few milliseconds. Raises ValueError where no
    recording has 0.1 s of voice.
    """
    chosen = recordings[:: max(-(-len(recordings) // most), 1)]
    measured = [p for clip in chosen if (p := prosody(clip.load(sample_rate), sample_rate)) is not None]
    if not measured:
        raise ValueError(
            f"the usual prosody: none of {len(recordings)} recordings has 0.1 s of voice; give recordings of speech"
        )
    moments = {}
    for name in MEASURES:
        values = [_scaled(name, p) for p in measured]
        mean = sum(values) / len(values)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in values) / len(values))
        moments[name] = (mean, max(deviation, LEAST_DEVIATION[name]))
    return ProsodyNorm(**moments)


@dataclass(frozen=True)
class ProsodyBins:
    """The edges between the bins of each measure of speech, and the share of the speech in each bin."""

    edges: Mapping[str, tuple[float, ...]]
    shares: Mapping[str, tuple[float, ...]]

    def of(self, measured: Sequence[Prosody | None]) -> dict[str, NDArray[np.int64]]:
        """Return by measure the bin of each recording, [N]; -1 where there is no voice."""
        places = {}
        for name, edges in self.edges.items():
            found = [-1 if p is None else np.searchsorted(edges, _scaled(name, p), side="right") for p in measured]
            places[name] = np.array(found, np.int64)
        return places


def bins_of(measured: Sequence[Prosody | None], bins: int = 5) -> ProsodyBins:
    """Return bins with equally many of these each, as far as their measures differ; None is left out.

    Raises ValueError where all are None.
    """
    voiced = [p for p in measured if p is not None]
    if not voiced:
        raise ValueError(f"bins_of: none of {len(measured)} recordings has 0.1 s of voice")
    edges, shares = {}, {}
    for name in MEASURES:
        values = [_scaled(name, p) for p in voiced]
        inner = np.quantile(values, np.arange(1, bins) / bins, method="higher")
        edges[name] = tuple(float(edge) for edge in np.unique(inner) if edge > min(values))
        shares[name] = _smoothed_shares(np.searchsorted(edges[name], values, side="right"), len(edges[name]) + 1)
    return ProsodyBins(edges, shares)


def _smoothed_shares(places: NDArray[np.int64], bins: int) -> tuple[float, ...]:
    """Return the share of each bin, with one added to every count: none is 0."""
    counts = np.bincount(places, minlength=bins) + 1
    return tuple(float(share) for share in counts / counts.sum())


def own_recording(sample: Sample) -> AudioClip | None:
    """Return sample.metadata["reference_audio"] where it is an AudioClip."""
    clip = sample.metadata.get("reference_audio")
    return clip if isinstance(clip, AudioClip) else None


@dataclass(frozen=True)
class ProsodyRange:
    """How usual the ranges of pitch and level and the share of pauses are, in [0, 1]; flat and wild both score less.

    With z standard deviations between a measure and the sample's own recording, or the mean of `norm` where
    `reference(sample)` is None, it scores 1 for z up to 1 and 1 / z beyond; the total is their geometric mean.
    `parts` hold the measures: f0_range in semitones, energy_range in dB, pauses as a share of the time. Less than 0.1 s
    of voice scores 0. Speech that nobody understands can be lively: put it behind `Intelligibility` with `Gated`.
    """

    models: SpeechModels
    norm: ProsodyNorm
    reference: Callable[[Sample], AudioClip | None] = own_recording

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [self._score(r, p) for r, p in zip(rollouts, self.models.prosodies(rollouts), strict=True)]

    def _score(self, rollout: Rollout, spoken: Prosody | None) -> Score:
        if spoken is None:
            return Score(0.0, _parts(None))
        clip = self.reference(rollout.sample)
        usual = None if clip is None else self.models.reference_prosody(clip)
        product = 1.0
        for name in MEASURES:
            mean, deviation = getattr(self.norm, name)
            centre = mean if usual is None else _scaled(name, usual)
            product *= 1 / max(abs(_scaled(name, spoken) - centre) / deviation, 1.0)
        return Score(product ** (1 / len(MEASURES)), _parts(spoken))


@dataclass(frozen=True)
class ProsodyDistribution:
    """How seldom the batch speaks like this rollout, next to recordings: it keeps a batch's distribution like theirs.

    For each measure p / (p + q), where p is the share of recordings in the rollout's bin and q that of the batch: 1/2
    where both are alike, more for what is said too seldom (the optimal discriminator, Goodfellow et al. 2014, equation
    2). The total is the mean of the three; `parts` as in `ProsodyRange`. Less than 0.1 s of voice scores 0 and is not
    counted. It needs a batch: all rollouts of a step, a hundred or more.
    """

    models: SpeechModels
    bins: ProsodyBins

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        measured = self.models.prosodies(rollouts)
        totals = np.zeros(len(rollouts))
        for name, places in self.bins.of(measured).items():
            spoken = places >= 0
            recorded = np.array(self.bins.shares[name])
            said = np.array(_smoothed_shares(places[spoken], len(recorded)))
            totals[spoken] += (recorded / (recorded + said))[places[spoken]] / len(MEASURES)
        return [Score(float(total), _parts(p)) for total, p in zip(totals, measured, strict=True)]


def _parts(measured: Prosody | None) -> dict[str, float]:
    if measured is None:
        return dict(zip(MEASURES, (0.0, 0.0, 1.0), strict=True))
    return {name: getattr(measured, name) for name in MEASURES}


def _scaled(name: str, measured: Prosody) -> float:
    """Return the measure on the scale of `ProsodyNorm`."""
    value: float = getattr(measured, name)
    return value if name == "pauses" else math.log(max(value, LEAST_RANGE))
