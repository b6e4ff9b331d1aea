"""The reward of usual prosody on human speech whose melody is flattened or exaggerated."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from audiorl.audio import AudioClip
from audiorl.data.corpus import bundled_speech
from audiorl.eval.metrics.prosody import MEASURES, Prosody, prosody
from audiorl.protocols import SpeechDecoder
from audiorl.tasks.tts.listening import SpeechModels
from audiorl.tasks.tts.prosody import (
    ProsodyBins,
    ProsodyDistribution,
    ProsodyNorm,
    ProsodyRange,
    bins_of,
    prosody_norm,
)
from audiorl.types import Message, Rollout, Sample, Segment
from tests.support.prosody import glide, melody_scaled

RATE = 16_000


@dataclass
class Says(SpeechDecoder):
    """A speech decoder with given waveforms by the sample's id, which counts its calls."""

    waves: dict[str, np.ndarray]
    sample_rate: int = RATE
    calls: list[str] = field(default_factory=list)

    def waveform(self, rollout: Rollout) -> np.ndarray:
        self.calls.append(rollout.sample.id)
        return self.waves[rollout.sample.id]


def rollout(id: str, **metadata: object) -> Rollout:
    segment = Segment(torch.arange(3), torch.arange(2), torch.zeros(2), "", "eos")
    return Rollout(Sample(id, (Message("user", ("say",)),), ("say",), metadata=metadata), (segment,), "g")


@pytest.fixture(scope="module")
def clips() -> list[AudioClip]:
    """Of one speaker."""
    recordings = bundled_speech(("en",), 1.0, 2.0)
    return [u.clip for u in recordings if u.speaker == recordings[0].speaker][:40]


def measured(clips: list[AudioClip]) -> list[Prosody | None]:
    return [prosody(clip.load(RATE), RATE) for clip in clips]


@pytest.fixture(scope="module")
def norm(clips: list[AudioClip]) -> ProsodyNorm:
    return prosody_norm(clips, RATE)


def test_flat_and_wild_melodies_score_less_than_the_recordings(clips: list[AudioClip], norm: ProsodyNorm) -> None:
    recordings = {str(i): clip.load(RATE) for i, clip in enumerate(clips[::8])}
    totals = {}
    for factor in (0.0, 0.5, 1.0, 2.0):
        voice = Says({id: melody_scaled(wav, RATE, factor) for id, wav in recordings.items()})
        scores = ProsodyRange(SpeechModels(voice), norm)([rollout(id) for id in recordings])
        totals[factor] = np.mean([s.total for s in scores])
        assert all(0 < s.total <= 1 and set(s.parts) == set(MEASURES) for s in scores)
        assert voice.calls == list(recordings)
    assert totals[1.0] > 0.85
    assert totals[0.0] < totals[0.5] < totals[1.0] > totals[2.0]
    assert totals[0.0] < 0.6 * totals[1.0]


def test_the_score_in_numbers() -> None:
    wav = glide(10, RATE, 1.0)
    measured = prosody(wav, RATE)
    assert measured is not None
    levels = (np.log(measured.energy_range), 0.5)
    models = SpeechModels(Says({"a": wav}))
    usual = measured.f0_range
    for mean, z in ((10, 1), (usual, 1), (usual * np.exp(0.8), 4), (usual / 2, 3.466)):
        (score,) = ProsodyRange(models, ProsodyNorm((np.log(mean), 0.2), levels, (0.0, 0.1)))([rollout("a")])
        assert score.total == pytest.approx((1 / z) ** (1 / 3), rel=1e-3)
        assert score.parts["f0_range"] == measured.f0_range
    (paused,) = ProsodyRange(models, ProsodyNorm((np.log(measured.f0_range), 0.2), levels, (0.2, 0.1)))([rollout("a")])
    assert paused.total == pytest.approx((1 / 2) ** (1 / 3))  # two deviations too few pauses


def test_a_sample_with_its_own_recording_is_compared_with_it(norm: ProsodyNorm) -> None:
    flat = glide(1, RATE)
    models = SpeechModels(Says({"a": flat}))
    own = AudioClip(array=flat.astype(np.float32), sample_rate=RATE)
    without, compared = ProsodyRange(models, norm)([rollout("a"), rollout("a", reference_audio=own)])
    assert compared.total == 1.0 > without.total
    (mean,) = ProsodyRange(models, norm, reference=lambda sample: None)([rollout("a", reference_audio=own)])
    assert mean == without
    silent = AudioClip(array=np.zeros(RATE, np.float32), sample_rate=RATE)
    assert ProsodyRange(models, norm)([rollout("a", reference_audio=silent)]) == [without]


def test_silence_scores_nothing(norm: ProsodyNorm) -> None:
    noise = 0.1 * np.random.default_rng(0).standard_normal(RATE).astype(np.float32)
    waves = {"empty": np.zeros(0, np.float32), "silence": np.zeros(RATE, np.float32), "noise": noise}
    for score in ProsodyRange(SpeechModels(Says(waves)), norm)([rollout(id) for id in waves]):
        assert score.total == 0
        assert score.parts == {"f0_range": 0, "energy_range": 0, "pauses": 1}


def test_the_norm_of_recordings(clips: list[AudioClip], norm: ProsodyNorm) -> None:
    ranges = [p.f0_range for c in clips if (p := prosody(c.load(RATE), RATE))]
    assert norm.f0_range == pytest.approx((np.mean(np.log(ranges)), np.std(np.log(ranges))))
    assert 5 < np.exp(norm.f0_range[0]) < 20
    assert prosody_norm(clips, RATE, most=len(clips) // 2) == prosody_norm(clips[::2], RATE)
    assert prosody_norm(clips[:1], RATE).pauses[1] == 0.05
    silence = AudioClip(array=np.zeros(RATE, np.float32), sample_rate=RATE)
    for recordings in ([], [silence]):
        with pytest.raises(ValueError, match=f"none of {len(recordings)} recordings has 0.1 s of voice"):
            prosody_norm(recordings, RATE)


# -- the distribution of a batch ---------------------------------------------------------------------------------------


def test_a_batch_that_speaks_too_flatly_is_paid_for_lively_speech(clips: list[AudioClip]) -> None:
    recordings = {str(i): clip.load(RATE) for i, clip in enumerate(clips)}
    flat = {id: melody_scaled(wav, RATE, 0.2) if int(id) % 4 else wav for id, wav in recordings.items()}
    bins = bins_of(measured(clips))
    as_recorded = ProsodyDistribution(SpeechModels(Says(recordings)), bins)([rollout(id) for id in recordings])
    assert [s.total for s in as_recorded] == pytest.approx([0.5] * len(clips))
    scores = ProsodyDistribution(SpeechModels(Says(flat)), bins)([rollout(id) for id in flat])
    lively, monotone = ([s.total for id, s in zip(flat, scores, strict=True) if int(id) % 4 == r] for r in (0, 1))
    assert np.mean(lively) > 0.5 > np.mean(monotone) + 0.05


def test_the_score_of_a_batch_in_numbers() -> None:
    """Two thirds of the recordings in the upper bin of the F0 range, one of three rollouts: one is added to counts."""
    low, high = glide(1, RATE), glide(10, RATE)
    edges = {"f0_range": (np.log(4),), "energy_range": (), "pauses": ()}
    bins = ProsodyBins(edges, {"f0_range": (0.25, 0.75), "energy_range": (1.0,), "pauses": (1.0,)})
    voice = Says({"a": low, "b": low, "c": high, "silence": np.zeros(RATE, np.float32)})
    scores = ProsodyDistribution(SpeechModels(voice), bins)([rollout(id) for id in voice.waves])
    often, seldom = 0.25 / (0.25 + 3 / 5), 0.75 / (0.75 + 2 / 5)
    expected = [(often + 1) / 3, (often + 1) / 3, (seldom + 1) / 3, 0]
    assert [s.total for s in scores] == pytest.approx(expected)
    assert ProsodyDistribution(SpeechModels(voice), bins)([rollout("silence")])[0].parts["pauses"] == 1


def test_bins_hold_equally_many_recordings(clips: list[AudioClip]) -> None:
    bins = bins_of(measured(clips), bins=4)
    assert len(bins.edges["f0_range"]) == 3 and [*bins.edges["f0_range"]] == sorted(bins.edges["f0_range"])
    assert bins.shares["f0_range"] == pytest.approx([0.25] * 4, abs=0.03)
    assert bins_of(measured(clips[:1])).shares["pauses"] == (1.0,)  # one value, one bin
    with pytest.raises(ValueError, match="none of 2 recordings"):
        bins_of([None, None])
