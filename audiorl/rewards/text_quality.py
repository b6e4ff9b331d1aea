"""Rewards of written text: captions, the language asked for, the length limit, repetition."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from audiorl.data.schema import FieldError, check_language
from audiorl.eval.metrics.corpus import DocumentFrequencies, cider_d
from audiorl.eval.metrics.text import Normalizer, normalize, script_counts, units
from audiorl.languages import language_code, written_in
from audiorl.rewards.answers import extract_answer, extract_think, final_text, strip_tags
from audiorl.rewards.combine import check_options
from audiorl.types import Rollout, Sample, Score


@dataclass(frozen=True)
class CaptionQuality:
    """CIDEr-D of the final text against the sample's references, divided by 10: in [0, 1]. Scripts without spaces are
    compared by characters.

    Make it with `CaptionQuality.of(samples)`, which counts how rare words are in all their references. Source: Rennie
    et al., arXiv 1612.00563. Raises ValueError for a sample without references.
    """

    frequencies: DocumentFrequencies = field(repr=False)
    normalizer: Normalizer = "basic"

    @classmethod
    def of(cls, samples: Sequence[Sample], normalizer: Normalizer = "basic") -> CaptionQuality:
        """For the captions of these samples. Raises ValueError for less than two."""
        references = [[_spaced(text, normalizer) for text in s.references] for s in samples]
        return cls(DocumentFrequencies.of(references), normalizer)

    def check(self, sample: Sample) -> None:
        if not sample.references:
            raise FieldError("answer", f"CaptionQuality: sample {sample.id!r} has no reference caption")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = []
        for rollout in rollouts:
            self.check(rollout.sample)
            references = [_spaced(text, self.normalizer) for text in rollout.sample.references]
            text = _spaced(final_text(rollout.text), self.normalizer)
            scores.append(Score(cider_d(text, references, self.frequencies) / 10))
        return scores


def _spaced(text: str, normalizer: Normalizer) -> str:
    """Return the text with its `units` apart, as CIDEr-D splits at spaces."""
    return " ".join(units(normalize(text, normalizer)))


Part = Literal["all", "think", "answer"]
CERTAIN = 0.95
"""The least probability of another language that counts. English about music reaches 0.94 for Italian, which most of
its words come from; most sentences of five words in another language are above 0.95."""


@dataclass(frozen=True)
class LanguageConsistency:
    """Share of letters in the target language's script, and 0 if the text is identified as another language.

    The target is `language` or else sample.metadata["language"] ("en", "zh-CN", "Chinese", …). Between languages that
    share a script py3langid decides among `languages` and the target, where it is certain (0.95), for texts of at
    least `min_letters` letters.
    Shorter ones, and languages that py3langid does not know, are judged by script alone. Japanese of that length must
    contain kana.

    `part` is the text judged: the thinking, the answer, or all without tags. A missing or empty part scores 0; a part
    without letters ("42") fits every language and scores 1.

    Raises ValueError when no target is known, and for an unknown language.
    """

    language: str | None = None
    languages: tuple[str, ...] = ("en", "zh", "de", "fr", "es", "it", "pt", "ja", "ko", "ru", "ar")
    part: Part = "all"
    min_letters: int = 20

    def __post_init__(self) -> None:
        check_options(self, part=get_args(Part), min_letters=1)
        for language in (*self.languages, *filter(None, [self.language])):
            language_code(language)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        part = {"all": strip_tags, "think": extract_think, "answer": extract_answer}[self.part]
        scores = []
        for rollout in rollouts:
            scores.append(Score(self.value(part(rollout.text) or "", self._target(rollout.sample))))
        return scores

    def check(self, sample: Sample) -> None:
        self._target(sample)

    def _target(self, sample: Sample) -> str:
        language = self.language or sample.metadata.get("language")
        if not isinstance(language, str) or not language:
            no_target = f"sample {sample.id!r} has no metadata['language'] and no language was set"
            raise FieldError("language", f"LanguageConsistency: {no_target}")
        check_language(language)
        return language

    def value(self, text: str, target: str) -> float:
        """Return the value in [0, 1] of a text without tags."""
        if not text.strip():
            return 0.0
        counts = script_counts(text)
        letters = sum(counts.values())
        if not letters:
            return 1.0
        scripts = written_in(target)
        share = sum(counts.get(s, 0) for s in scripts) / letters
        if letters < self.min_letters:
            return share
        target = language_code(target)
        if target == "ja" and not counts.get("kana"):
            return 0.0
        rivals = {language_code(name) for name in self.languages if written_in(name) == scripts} | {target}
        rivals &= identified()
        if target not in rivals or len(rivals) < 2:
            return share
        language, probability = identify(text, tuple(sorted(rivals)))
        return 0.0 if language != target and probability >= CERTAIN else share


def identify(text: str, languages: tuple[str, ...]) -> tuple[str, float]:
    """Return the most likely of `languages` (ISO 639-1) for `text`, and its probability among them.

    Source: py3langid, after Lui and Baldwin 2012.
    """
    return _identifier(languages).classify(text)


@functools.cache
def identified() -> frozenset[str]:
    """Return the codes of the languages that py3langid knows."""
    return frozenset(_identifier(()).labels)


@functools.cache
def _identifier(languages: tuple[str, ...]):
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    if languages:
        identifier.set_languages(list(languages))
    return identifier


@dataclass(frozen=True)
class Overlong:
    """min(-(length - (max_tokens - buffer)) / buffer, 0), at least -1: 0 up to the buffer, -1 from `max_tokens` on.

    Lengths are sampled tokens of all segments. Source: soft overlong punishment of DAPO, arXiv 2503.14476, eq. 13.
    """

    max_tokens: int
    buffer: int

    def __post_init__(self) -> None:
        check_options(self, buffer=1, max_tokens=max(self.buffer, 1))

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        over = [r.num_sampled - (self.max_tokens - self.buffer) for r in rollouts]
        return [Score(max(-tokens / self.buffer, -1.0) if tokens > 0 else 0.0) for tokens in over]


@dataclass(frozen=True)
class Repetition:
    """-(1 - unique n-grams / all n-grams), in (-1, 0]; 0 for a text shorter than n units.

    A unit is a word, or a single character where a script has no spaces ("auto"); "words" and "characters" force one
    reading. Case does not matter. Source: the n-gram penalty of Yeo et al. 2025, arXiv 2502.03373.

    `beyond_reference`: a text may repeat as much as the reference that repeats itself most, since people say things
    twice; only what goes beyond that is penalised.
    """

    n: int = 3
    unit: Literal["auto", "words", "characters"] = "auto"
    beyond_reference: bool = False

    def __post_init__(self) -> None:
        check_options(self, n=1, unit=("auto", "words", "characters"))

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = []
        for rollout in rollouts:
            allowed = [self.value(text) for text in rollout.sample.references if self.beyond_reference]
            scores.append(Score(min(0.0, self.value(rollout.text) - min(allowed, default=0.0))))
        return scores

    def value(self, text: str) -> float:
        text = text.casefold()
        tokens = units(text) if self.unit == "auto" else text.split()
        tokens = list("".join(tokens)) if self.unit == "characters" else tokens
        ngrams = [tuple(tokens[i : i + self.n]) for i in range(len(tokens) - self.n + 1)]
        return len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0
