"""Does the transcript match? Word and character accuracy of speech recognition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from audiorl.eval.metrics.text import ErrorCounts, Normalizer, char_errors, normalize, word_errors
from audiorl.rewards.tags import final_text
from audiorl.types import Rollout, Sample, Score


@dataclass(frozen=True)
class WordAccuracy:
    """1 - WER of the response, or of its <answer> if it has one; the best over the sample's references.

    WER can exceed 1: `clip` keeps the reward in [0, 1], without it long babble goes below 0. `normalizer` is
    "english" (Whisper), "basic" (multilingual; spells digits out where sample.metadata has a "language") or "none".

    The reference "" says that nobody speaks: an empty response gets 1 and any other 0. Clipped, an output that is wrong
    throughout gets 0 however long it is, and the normalisers drop text in brackets: see `Hallucination`.

    Raises ValueError for a sample without references and for a text that is empty after normalisation.
    """

    normalizer: Normalizer = "basic"
    clip: bool = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(_accuracy(r, word_errors, self.normalizer, self.clip)) for r in rollouts]


@dataclass(frozen=True)
class CharAccuracy:
    """1 - CER: `WordAccuracy` by characters, for Chinese, Japanese and other text without spaces."""

    normalizer: Normalizer = "basic"
    clip: bool = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(_accuracy(r, char_errors, self.normalizer, self.clip)) for r in rollouts]


def _accuracy(rollout: Rollout, errors: Callable[..., ErrorCounts], normalizer: Normalizer, clip: bool) -> float:
    accuracy = 1.0 - error_rate(rollout.sample, final_text(rollout.text), errors, normalizer)
    return max(0.0, accuracy) if clip else accuracy


def error_rate(
    sample: Sample, hypothesis: str, errors: Callable[..., ErrorCounts], normalizer: Normalizer = "basic"
) -> float:
    """The lowest rate of `errors` (`word_errors` or `char_errors`) of a text over the sample's references.

    Raises ValueError for a sample without references and for a text that is empty after normalisation.
    """
    language = language_of(sample)
    references = references_of(sample, normalizer, language)
    return min(errors(reference, hypothesis, normalizer, language).rate for reference in references)


def references_of(sample: Sample, normalizer: Normalizer, language: str | None) -> tuple[str, ...]:
    """sample.references, checked: "" stays (nobody speaks), other texts must not be empty after normalisation."""
    if not sample.references:
        raise ValueError(f"sample {sample.id!r} has no reference transcript")
    for reference in sample.references:
        if reference and not normalize(reference, normalizer, language):
            raise ValueError(
                f"sample {sample.id!r}: the reference transcript {reference!r} is empty after "
                f"{normalizer!r} normalisation; its word error rate is undefined"
            )
    return sample.references


def languages_of(samples: Sequence[Sample]) -> tuple[str, ...]:
    """The codes of the samples' languages, sorted."""
    return tuple(sorted({code for s in samples if (code := language_of(s))}))


def language_of(sample: Sample) -> str | None:
    """sample.metadata["language"], where it is a code."""
    language = sample.metadata.get("language")
    return language if isinstance(language, str) and language else None
