"""Rewards of transcripts: word and character accuracy, and what was written that nobody said."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from audiorl.audio import seconds
from audiorl.data.hotwords import checked_hotwords
from audiorl.data.schema import FieldError
from audiorl.eval.metrics.text import (
    ErrorCounts,
    HotwordErrors,
    Normalizer,
    char_errors,
    hotword_errors,
    hotword_units,
    normalize,
    units,
    word_errors,
)
from audiorl.rewards.answers import after_think, final_text, language_of, plain_transcript, strip_tags
from audiorl.rewards.combine import check_options
from audiorl.types import Rollout, Sample, Score


@dataclass(frozen=True)
class WordAccuracy:
    """1 - WER of the response, or of its <answer> if it has one; the best over the sample's references.

    WER can exceed 1: `clip` keeps the reward in [0, 1]. `normalizer` is "english" (Whisper), "basic" (multilingual;
    spells numbers out where sample.metadata has a "language") or "none". The reference "" says that nobody speaks: an
    empty response gets 1 and any other 0. Babble costs no more than one wrong word: see `Hallucination`.

    Raises ValueError for a sample without references and for a text that is empty after normalisation.
    """

    normalizer: Normalizer = "basic"
    clip: bool = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(_accuracy(r, word_errors, self.normalizer, self.clip)) for r in rollouts]

    def check(self, sample: Sample) -> None:
        references_of(sample, self.normalizer, language_of(sample))


@dataclass(frozen=True)
class CharAccuracy:
    """1 - CER: `WordAccuracy` by characters, for Chinese, Japanese and other text without spaces."""

    normalizer: Normalizer = "basic"
    clip: bool = True

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(_accuracy(r, char_errors, self.normalizer, self.clip)) for r in rollouts]

    def check(self, sample: Sample) -> None:
        references_of(sample, self.normalizer, language_of(sample))


@dataclass(frozen=True)
class HotwordAccuracy:
    """1 - a WER in which a hotword weighs `weight` words, and `false_weight` for each that nobody said; best reference.

    (E_other + weight E_hotword + false_weight F) / (N_other + weight N_hotword), with the errors E and words N of
    `audiorl.eval.metrics.text.hotword_errors`; F: hotwords written more often than said. The hotwords are the sample's
    `metadata["hotwords"]`, distractors among them; without any it is `WordAccuracy`, but that scripts without spaces
    are compared by characters. `parts`, of samples with hotwords: those `missed`, said and not written, and `false`.

    Source: the reward that prefers biasing words of RLBR (arXiv 2601.13409); the penalty on false ones is ours.
    Raises ValueError as `WordAccuracy` does, and for hotwords that are no words or empty after normalisation.
    """

    normalizer: Normalizer = "basic"
    weight: float = 3.0
    false_weight: float = 1.0
    clip: bool = True

    def __post_init__(self) -> None:
        check_options(self, weight=0.0, false_weight=0.0)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [self._score(r.sample, final_text(r.text)) for r in rollouts]

    def check(self, sample: Sample) -> None:
        language = language_of(sample)
        references_of(sample, self.normalizer, language)
        try:
            hotword_units(hotwords_of(sample), self.normalizer, language)
        except ValueError as error:
            raise FieldError("hotwords", str(error).removeprefix("hotwords: ")) from error

    def _score(self, sample: Sample, text: str) -> Score:
        language, hotwords = language_of(sample), hotwords_of(sample)
        references = references_of(sample, self.normalizer, language)
        counts = [hotword_errors(reference, text, hotwords, self.normalizer, language) for reference in references]
        best = min(counts, key=self._rate)
        accuracy = 1.0 - self._rate(best)
        parts = {"missed": float(len(best.missed)), "false": float(len(best.false))} if hotwords else {}
        return Score(max(0.0, accuracy) if self.clip else accuracy, parts)

    def _rate(self, counts: HotwordErrors) -> float:
        biased, other = counts.biased, counts.unbiased
        errors = other.errors + self.weight * biased.errors + self.false_weight * len(counts.false)
        words = other.reference_length + self.weight * biased.reference_length
        return errors / words if words else float(errors > 0)


def hotwords_of(sample: Sample) -> tuple[str, ...]:
    """Return the sample's hotwords, () without any. Raises FieldError for what is no list of words."""
    words = sample.metadata.get("hotwords") or ()
    if not isinstance(words, list | tuple):
        raise FieldError("hotwords", f"{words!r} is not a list of words; give one, or leave the column out")
    return checked_hotwords(map(str, words))


def _accuracy(rollout: Rollout, errors: Callable[..., ErrorCounts], normalizer: Normalizer, clip: bool) -> float:
    accuracy = 1.0 - fewest_errors(rollout.sample, final_text(rollout.text), errors, normalizer).rate
    return max(0.0, accuracy) if clip else accuracy


def fewest_errors(
    sample: Sample, hypothesis: str, errors: Callable[..., ErrorCounts], normalizer: Normalizer = "basic"
) -> ErrorCounts:
    """Return `errors` (`word_errors` or `char_errors`) of a text from the sample's reference with the lowest rate.

    Raises ValueError for a sample without references and for a text that is empty after normalisation.
    """
    language = language_of(sample)
    references = references_of(sample, normalizer, language)
    return min((errors(reference, hypothesis, normalizer, language) for reference in references), key=lambda c: c.rate)


def references_of(sample: Sample, normalizer: Normalizer, language: str | None) -> tuple[str, ...]:
    """Return sample.references; "" stays (nobody speaks), other texts must not be empty after normalisation."""
    if not sample.references:
        raise FieldError("answer", f"sample {sample.id!r} has no reference transcript")
    for reference in sample.references:
        if reference and _is_empty(reference, normalizer, language):
            what = f"the reference transcript {reference!r} is empty after {normalizer!r} normalisation"
            remedy = "its word error rate is undefined; correct it, or leave the row out"
            raise FieldError("answer", f"sample {sample.id!r}: {what}; {remedy}", reference)
    return sample.references


@lru_cache(maxsize=65_536)
def _is_empty(text: str, normalizer: Normalizer, language: str | None) -> bool:
    return not normalize(text, normalizer, language)


def languages_of(samples: Sequence[Sample]) -> tuple[str, ...]:
    """Return the codes of the samples' languages, sorted."""
    return tuple(sorted({code for s in samples if (code := language_of(s))}))


_BRACKETS = re.compile(r"[<>()\[\]{}（）［］【】]")


@dataclass(frozen=True)
class Hallucination:
    """-max(insertions, overrun), in [-1, 0]; `parts` hold both.

    insertions: inserted units / reference units (at least `SHORTEST`), at most 1, the best over the references.
    overrun: units beyond those that fit into the audio (max_rate a second, and `ALLOWANCE`), over those that fit, at
    most 1. It counts the text as written, fillers included, which the English normaliser drops. Counted is everything
    after the thinking: also text outside of <answer> tags and in brackets, which 1 - WER does not see.

    `max_rate`: units a second that speech can reach; None: 5 words or 25 characters. Raises ValueError for a sample
    without references and for one without audio.
    """

    unit: Literal["word", "char"] = "word"
    normalizer: Normalizer = "basic"
    max_rate: float | None = None

    def __post_init__(self) -> None:
        check_options(self, unit=tuple(MAX_RATE), max_rate=1e-3)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        texts = (plain_transcript(strip_tags(after_think(r.text))) for r in rollouts)
        return [self._score(r.sample, _BRACKETS.sub(" ", text)) for r, text in zip(rollouts, texts, strict=True)]

    def check(self, sample: Sample) -> None:
        if not sample.audio:
            raise ValueError(f"Hallucination: sample {sample.id!r} has no audio, so nothing can have been said")
        references_of(sample, self.normalizer, language_of(sample))

    def _score(self, sample: Sample, text: str) -> Score:
        self.check(sample)
        errors, language = word_errors if self.unit == "word" else char_errors, language_of(sample)
        counts = [errors(r, text, self.normalizer, language) for r in references_of(sample, self.normalizer, language)]
        insertions = min(min(1.0, c.insertions / max(c.reference_length, SHORTEST[self.unit])) for c in counts)
        rate = MAX_RATE[self.unit] if self.max_rate is None else self.max_rate
        fitting = rate * sum(map(seconds, sample.audio)) + ALLOWANCE[self.unit]
        words = units(normalize(text, "none"))
        length = len(words) if self.unit == "word" else sum(map(len, words))
        overrun = min(1.0, max(0.0, length - fitting) / fitting)
        return Score(-max(insertions, overrun), {"insertions": insertions, "overrun": overrun})


MAX_RATE = {"word": 5.0, "char": 25.0}
"""Units a second."""
ALLOWANCE = {"word": 2, "char": 10}
"""Units that fit into any recording: a single short word is said faster than running speech."""
SHORTEST = {"word": 5, "char": 25}
"""Least number of units that insertions are divided by."""
