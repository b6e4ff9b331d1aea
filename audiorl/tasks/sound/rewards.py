"""Rewards of models that make sound: which events are heard, when, where, how cleanly; and of the thought about them.

What is asked is the sample's metadata["events"], as rows of scenes have them. Each is a reward of its own::

    sounds = SoundModels(load_tagger("tagger"))
    events, times, places = EventsHeard(sounds), EventTimes(sounds), EventPlaces(sounds)
    WeightedSum.of(events=events, times=times, places=places, clean=Clean(sounds))

One alone is easily hacked: a click at each asked time has perfect times, and is no bell. Silence earns 0 in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from audiorl.audio import AudioClip, load_channels
from audiorl.config.flow import FlowConfig
from audiorl.data.schema import FieldError
from audiorl.eval.metrics.sound import interaural_delay, mono, onset_scores, onsets, sound_quality
from audiorl.eval.metrics.speech import level
from audiorl.models.flow import FlowPolicy
from audiorl.protocols import Request, Reward, SpeechDecoder
from audiorl.rewards.answers import extract_think
from audiorl.rewards.combine import check_options, check_sample
from audiorl.rollout.flow import FlowEngine
from audiorl.speech_models.protocol import Tagger
from audiorl.tasks.sound.places import azimuth_of, delay_of
from audiorl.tasks.sound.scenes import Event, events_of, parse_thought
from audiorl.types import Message, Rollout, Sample, Score

T = TypeVar("T")
Sound = NDArray[np.float32]
SILENT = -60.0
"""dB below which a part of a sound has no place, and a sound no events."""
LOST = 90.0
"""Degrees by which an event that is not heard is counted as wrong."""
NEAR = 0.5
"""Seconds within which a thought's time earns something."""


@dataclass(frozen=True, eq=False)
class SoundModels:
    """The sounds of rollouts and what the tagger hears in them, found once a rollout for all rewards that share this.

    decoder: turns what was sampled into sound, mono [T] or [T, channels]; None: rollouts carry their `spoken_audio`.
    """

    tagger: Tagger | None = None
    decoder: SpeechDecoder | None = None
    _cache: WeakKeyDictionary[Rollout, dict[str, Any]] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    @property
    def required_tagger(self) -> Tagger:
        """Return the tagger. Raises ValueError without one."""
        if self.tagger is None:
            raise ValueError("SoundModels: no tagger; give one to tell which events are heard")
        return self.tagger

    def waves(self, rollouts: Sequence[Rollout]) -> list[tuple[Sound, int]]:
        """Return (sound, Hz) of each; without samples where there is none. Raises ValueError for samples that are not
        finite, naming the rollout."""

        def read(new: list[Rollout]) -> list[tuple[Sound, int]]:
            if self.decoder is not None:
                made = self.decoder.waveforms(new)
                sounds = [
                    (np.zeros(0, np.float32) if wave is None else wave, self.decoder.sample_rate) for wave in made
                ]
            else:
                sounds = [(np.zeros(0, np.float32), 16_000)] * len(new)
            for i, rollout in enumerate(new):
                try:
                    if self.decoder is None and rollout.spoken_audio is not None:
                        sounds[i] = load_channels(rollout.spoken_audio)
                    mono(sounds[i][0])
                except ValueError as error:
                    raise ValueError(f"{rollout.name}: {error}; the model or its codec is broken") from error
            return sounds

        return self._once("wave", rollouts, read)

    def tags(self, rollouts: Sequence[Rollout]) -> list[NDArray[Any]]:
        """Return the probabilities [C] of the tagger's labels for each; 0 for silence."""
        tagger = self.required_tagger

        def tag(new: list[Rollout]) -> list[NDArray[Any]]:
            out = [np.zeros(len(tagger.labels), np.float32) for _ in new]
            for i, (wave, rate) in enumerate(self.waves(new)):
                if level(mono(wave)) > SILENT:
                    out[i] = tagger.tag([mono(wave).astype(np.float32)], rate)[0]
            return out

        return self._once("tags", rollouts, tag)

    def _once(self, what: str, rollouts: Sequence[Rollout], find: Callable[[list[Rollout]], list[T]]) -> list[T]:
        new = [r for r in dict.fromkeys(rollouts) if what not in self._cache.setdefault(r, {})]
        for rollout, value in zip(new, find(new) if new else [], strict=True):
            self._cache[rollout][what] = value
        return [self._cache[r][what] for r in rollouts]


@dataclass(frozen=True)
class EventsHeard:
    """Are the asked events heard, and no others? 2 Σ p(asked) / (events asked + Σ p(all)) by the tagger, in [0, 1].

    Parts: `recall`, the mean probability of the asked ones; `precision`, their share of all that is heard. Raises
    ValueError for a sample that asks for a class that the tagger does not know.
    """

    sounds: SoundModels

    def check(self, sample: Sample) -> None:
        labels = self.sounds.required_tagger.labels
        unknown = sorted({e.name for e in events_of(sample)} - set(labels))
        if unknown:
            raise FieldError(
                "events", f"sample {sample.id!r}: {unknown[0]!r} is none of the tagger's classes: {', '.join(labels)}"
            )

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = []
        for rollout, tags in zip(rollouts, self.sounds.tags(rollouts), strict=True):
            self.check(rollout.sample)
            labels, asked = self.sounds.required_tagger.labels, {e.name for e in events_of(rollout.sample)}
            heard = float(sum(tags[labels.index(name)] for name in sorted(asked)))
            every = float(tags.sum())
            parts = {"recall": heard / len(asked), "precision": heard / every if every > 0 else 0.0}
            scores.append(Score(2 * heard / (len(asked) + every), parts))
        return scores


@dataclass(frozen=True)
class EventTimes:
    """Does something begin when it should? F1 of onsets against the asked starts, in which a pair counts
    1 - lag / window; see `audiorl.eval.metrics.sound.onset_scores`. Parts: `f1` within the tolerance, `lag` in seconds.
    """

    sounds: SoundModels
    tolerance: float = 0.1
    window: float = 0.5

    def __post_init__(self) -> None:
        check_options(self, tolerance=0.001, window=self.tolerance)

    def check(self, sample: Sample) -> None:
        events_of(sample)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = []
        for rollout, (wave, rate) in zip(rollouts, self.sounds.waves(rollouts), strict=True):
            spans = [(e.start, e.end) for e in events_of(rollout.sample)]
            found = onset_scores(spans, onsets(wave, rate).tolist(), self.tolerance, self.window)
            scores.append(Score(found.pop("graded"), found))
        return scores


@dataclass(frozen=True)
class EventPlaces:
    """Do the events come from where they should? The mean of 1 - error / 90°, by the delay between the ears (GCC-PHAT)
    from the start of an event to that of the next.

    Parts: `azimuth_error` in degrees, `delay_error` in µs, means of the events that are placed. Raises ValueError for
    a sample that places none, and for mono sounds.
    """

    sounds: SoundModels

    def check(self, sample: Sample) -> None:
        if all(e.azimuth is None for e in events_of(sample)):
            raise FieldError("events", f"sample {sample.id!r}: no event has an azimuth; leave this reward out")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = []
        for rollout, (wave, rate) in zip(rollouts, self.sounds.waves(rollouts), strict=True):
            self.check(rollout.sample)
            try:
                errors = place_errors(events_of(rollout.sample), wave, rate)
            except ValueError as error:
                raise ValueError(f"{rollout.name}: {error}") from error
            degrees, seconds = (float(np.mean(column)) for column in zip(*errors, strict=True))
            total = float(np.mean([max(0.0, 1 - e / 90) for e, _ in errors]))
            scores.append(Score(total, {"azimuth_error": degrees, "delay_error": seconds * 1e6}))
        return scores


def place_errors(events: Sequence[Event], wave: Sound, rate: int) -> list[tuple[float, float]]:
    """Return (degrees, seconds) by which each placed event of a sound [T, 2] is off; LOST where it is silent."""
    if len(wave) and (wave.ndim != 2 or wave.shape[1] != 2):
        raise ValueError("places asked of a mono sound; take a model with 2 channels, or leave this reward out")
    errors = []
    for number, event in enumerate(events):
        if event.azimuth is None:
            continue
        next_ = min((e.start for e in events[number + 1 :] if e.start > event.start), default=event.end)
        part = wave[round(event.start * rate) : round(min(next_, event.end) * rate)]
        if not len(part) or max(level(part[:, 0]), level(part[:, 1])) < SILENT:
            errors.append((LOST, delay_of(LOST)))
            continue
        delay = interaural_delay(part, rate)
        errors.append((abs(azimuth_of(delay) - event.azimuth), abs(delay - delay_of(event.azimuth))))
    return errors


@dataclass(frozen=True)
class Clean:
    """Is the sound clean? No clipping, no hiss: `audiorl.eval.metrics.sound.sound_quality`. Parts: `clipping`, `hiss`
    (1 is none), and `loudness_range` in dB."""

    sounds: SoundModels

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        found = [sound_quality(wave, rate) for wave, rate in self.sounds.waves(rollouts)]
        return [Score(parts.pop("clean"), parts) for parts in found]


@dataclass(frozen=True)
class ThoughtEvents:
    """Is the thought well formed, and about the asked events? 0 unless `parse_thought` reads it, else the mean of its
    parts: `names`, F1 of the events; `times`, the mean of 1 - distance / 0.5 s of their starts; `places`, of
    1 - distance / 90°, where places are asked. An event that the thought leaves out has 0.

    The thought is what stands in <think>…</think>, or the whole text without that.
    """

    def check(self, sample: Sample) -> None:
        events_of(sample)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [self._score(events_of(r.sample), extract_think(r.text) or r.text) for r in rollouts]

    def _score(self, asked: Sequence[Event], thought: str) -> Score:
        placed = any(e.azimuth is not None for e in asked)
        names = ("names", "times", *(["places"] if placed else []))
        try:
            said = parse_thought(thought)
        except ValueError:
            return Score(0.0, {"format": 0.0, **dict.fromkeys(names, 0.0)})
        left, times, places = list(said), [], []
        for event in asked:
            same = [s for s in left if s.name == event.name]
            if not same:
                times.append(0.0)
                places += [0.0] if event.azimuth is not None else []
                continue
            near = min(same, key=lambda s: abs(s.start - event.start))
            left.remove(near)
            times.append(max(0.0, 1 - abs(near.start - event.start) / NEAR))
            if event.azimuth is not None:
                off = LOST if near.azimuth is None else abs(near.azimuth - event.azimuth)
                places.append(max(0.0, 1 - off / 90))
        hits = len(said) - len(left)
        values = {"names": 2 * hits / (len(asked) + len(said)), "times": float(np.mean(times))}
        values |= {"places": float(np.mean(places))} if placed else {}
        return Score(float(np.mean(list(values.values()))), {"format": 1.0, **values})


@dataclass(frozen=True, eq=False)
class SoundOfThought:
    """Score a thought by the sound that it causes: a frozen flow makes it of metadata["caption"], if there is one, and
    the thought, and `reward` hears it as the rollout's `spoken_audio`.

    The thought is what stands in <think>…</think>, or the whole text without that. One that `parse_thought` does not
    read makes silence; the part `format` says so, beside the parts of `reward`. The sounds of a group begin with one
    noise: their scores differ by their thoughts alone.
    """

    flow: FlowPolicy
    reward: Reward
    sampling: FlowConfig = FlowConfig()

    def check(self, sample: Sample) -> None:
        self.flow.prompt(self._asked(sample, ""))
        check_sample(self.reward, sample)

    def _asked(self, sample: Sample, thought: str) -> Sample:
        """Return what the flow is asked for."""
        kept = {k: v for k, v in sample.metadata.items() if k in ("duration", "channels", "video", "video_rate")}
        caption = str(sample.metadata.get("caption", ""))
        return replace(sample, messages=(Message("user", (caption,)),), metadata={**kept, "thought": thought})

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        thoughts = [(extract_think(r.text) or r.text).strip() for r in rollouts]
        read = [_readable(thought) for thought in thoughts]
        asked = [self._asked(r.sample, thought) for r, thought in zip(rollouts, thoughts, strict=True)]
        requests = [Request(sample, greedy=True) for sample, ok in zip(asked, read, strict=True) if ok]
        made = iter(FlowEngine(self.flow, self.sampling).generate(requests))
        sounds = [next(made).spoken_audio if ok else self._silence(r) for r, ok in zip(rollouts, read, strict=True)]
        scores = self.reward([replace(r, spoken_audio=s) for r, s in zip(rollouts, sounds, strict=True)])
        return [
            None if score is None else Score(score.total if ok else 0.0, {"format": float(ok), **score.parts})
            for score, ok in zip(scores, read, strict=True)
        ]

    def _silence(self, rollout: Rollout) -> AudioClip:
        rate, channels = self.flow.audio.codec.sample_rate, self.flow.model.config.channels
        samples = np.zeros((round(rollout.sample.metadata["duration"] * rate), channels), np.float32)
        return AudioClip(array=samples if channels == 2 else samples[:, 0], sample_rate=rate)


def _readable(thought: str) -> bool:
    try:
        return bool(parse_thought(thought))
    except ValueError:
        return False
