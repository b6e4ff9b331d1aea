"""Does a model listen? Measure what the right audio adds to the log-probability of an answer, in nats per token.

The same answer is measured under the prompt's own audio and under other views of it (`audiorl.data.views`). A model
that was trained without its audio, or with that of other prompts, gains nothing from the right one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from audiorl.algos.experience import Experience
from audiorl.audio import AudioClip
from audiorl.audio import name as clip_name
from audiorl.data.views import SWAP, views_of
from audiorl.eval.metrics.corpus import bootstrap_interval
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, answer_after, answer_logprobs, experience
from audiorl.types import Rollout, Sample

DEFAULT_VIEWS = ("silence", "noise", SWAP)
MIN_GAIN = 0.05
"""Nats per token that the right audio must add, by default."""


@dataclass(frozen=True)
class Gain:
    """Nats per token of the answer that the right audio adds over a view, with a 95 % bootstrap interval."""

    view: str
    nats: float
    interval: tuple[float, float]
    per_sample: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"gain_{view_name(self.view)}"


def view_name(view: str) -> str:
    """Return how rows and files call a view: FUNCTION of FILE.py:FUNCTION."""
    return view.rpartition(":")[2]


@dataclass(frozen=True)
class ListeningVerdict:
    """`listens`: every gain's interval lies above the threshold. `ignores_audio`: some interval lies below it.
    `unclear`: some interval contains it; measure more samples."""

    word: Literal["listens", "ignores_audio", "unclear"]
    reason: str


def audio_gains(
    policy: AudioPolicy, answers: Sequence[Example | Rollout], views: Sequence[str] = DEFAULT_VIEWS, budget: int = 8192
) -> list[Gain]:
    """Measure for each view the gain of the right audio over it, on answers that are given or sampled.

    A rollout is an answer in text to a single prompt; the tokens that it sampled are laid after the prompt of each
    view. budget: tokens in a forward pass. Raises ValueError for no answers and for what `views_of` refuses.
    """
    if not answers:
        raise ValueError("no answers to measure the audio's gain on")
    samples = [a.sample for a in answers]

    def laid_out(answer: Example | Rollout, sample: Sample) -> Experience:
        if isinstance(answer, Example):
            return experience(policy, Example(sample, answer.target))
        assert len(answer.segments) == 1 and not answer.speaks, answer.name
        return answer_after(policy.prompt(sample), answer.segments[0].ids, answer)

    def under(prompts: Sequence[Sample]) -> list[float]:
        turns = [laid_out(answer, sample) for answer, sample in zip(answers, prompts, strict=True)]
        return [float(values.mean()) for values in answer_logprobs(policy, turns, budget, share_prompts=True)]

    right = under(samples)
    gains = []
    for view in views:
        differences = [r - o for r, o in zip(right, under(views_of(samples, view)), strict=True)]
        interval = bootstrap_interval(differences)
        gains.append(Gain(view, sum(differences) / len(differences), interval, tuple(differences)))
    return gains


def verdict(gains: Sequence[Gain], min_gain: float = MIN_GAIN) -> ListeningVerdict:
    """Judge a model by its gains. Raises ValueError for a threshold that is negative or not finite."""
    if not math.isfinite(min_gain) or min_gain < 0:
        raise ValueError(f"the least gain is {min_gain}; give nats per token, 0 or more")
    for gain in gains:
        if gain.interval[1] <= min_gain:
            other = "that of another prompt" if gain.view == SWAP else gain.view
            reason = f"the right audio adds {gain.nats:.3f} nats per token over {other}"
            return ListeningVerdict("ignores_audio", reason)
    unclear = [g for g in gains if g.interval[0] <= min_gain]
    if unclear:
        view = unclear[0].view
        return ListeningVerdict("unclear", f"the interval over {view} contains {min_gain:g}: measure more samples")
    return ListeningVerdict("listens", f"each view loses more than {min_gain:g} nats per token")


def check_frames(policy: AudioPolicy, clips: Sequence[AudioClip]) -> None:
    """Raise ValueError naming a clip that does not become as many audio tokens as its features have room for."""
    extractor = policy.extractor
    if extractor is None:
        raise ValueError("the model has no audio encoder")
    for clip in clips:
        samples = len(clip.load(extractor.sampling_rate))
        expected = policy.backbone.tokens(policy.model, samples)
        tokens = len(policy.audio.encoder_output(clip))
        if tokens != expected:
            raise ValueError(
                f"{clip_name(clip)}: {tokens} audio tokens, but {samples} samples have {expected}; the features are "
                "of another length than the audio"
            )


def gain_metrics(gains: Sequence[Gain], tasks: Sequence[str]) -> dict[str, float]:
    """Return `audio/gain_VIEW`, and `audio/gain_VIEW/TASK` where the answers have more than one task."""
    metrics: dict[str, float] = {}
    for gain in gains:
        metrics[f"audio/{gain.name}"] = gain.nats
        by_task: dict[str, list[float]] = {}
        for task, value in zip(tasks, gain.per_sample, strict=True):
            by_task.setdefault(task, []).append(value)
        if len(by_task) > 1:
            metrics |= {f"audio/{gain.name}/{task}": sum(v) / len(v) for task, v in by_task.items()}
    return metrics
