"""Text normalisers, word error rate and character error rate.

WER = (S + D + I) / (H + S + D): substitutions, deletions and insertions of the cheapest alignment over the length of
the reference. A corpus rate divides the sums, so long utterances weigh more; `mean` averages per-utterance rates.

An empty reference has no rate by that formula. Here it is 0 when the hypothesis is empty too and 1 otherwise; in a
corpus its insertions count as errors and its length as zero.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jiwer

from audiorl.eval.metrics.scripts import join_unspaced

Normalizer = Literal["english", "basic", "none"]

# Plain numbers up to six digits: num2words takes forever on larger ones in some languages. Not the 2 of "2nd" or "mp3".
_NUMBER = re.compile(r"(?<![A-Za-z0-9])(?<![0-9]\.)[0-9]{1,6}(?:\.[0-9]{1,2})?(?!\.?[0-9]|[A-Za-z])")


@functools.cache
def _english():
    from whisper_normalizer.english import EnglishTextNormalizer

    return EnglishTextNormalizer()


@functools.cache
def _basic():
    from whisper_normalizer.basic import BasicTextNormalizer

    # Whisper's own default deletes vowel signs of Indic scripts; letters that NFKC composes are not affected.
    return BasicTextNormalizer(preserve_marks=True)


def spell_numbers(text: str, language: str) -> str:
    """Digits as words ("21" -> "einundzwanzig" for "de"), for numbers below a million.

    Unchanged where num2words is not installed or cannot say the number in the language.
    """
    try:
        from num2words import num2words
    except ImportError:
        return text

    def spell(match: re.Match[str]) -> str:
        number = match.group()
        try:
            return num2words(float(number) if "." in number else int(number), lang=language)
        except (NotImplementedError, OverflowError, KeyError):
            return number

    return _NUMBER.sub(spell, text)


def normalize(text: str, normalizer: Normalizer = "basic", language: str | None = None) -> str:
    """Text ready to compare, whitespace collapsed.

    "english": Whisper's English normaliser (contractions, British spelling, numbers as digits, fillers dropped).
    "basic": Whisper's multilingual one (case, punctuation, bracketed remarks), with combining marks kept; given a
    `language` code, digits are spelled out first, as the multilingual Open ASR leaderboard does.
    "none": the text as it is.
    Source: Radford et al. 2022, appendix C.
    """
    if normalizer == "english":
        text = _english()(text)
    elif normalizer == "basic":
        if language:
            text = spell_numbers(text, language.replace("_", "-").split("-")[0].lower())
        text = _basic()(text)
    elif normalizer != "none":
        raise ValueError(f"normalizer: {normalizer!r} is not one of 'english', 'basic', 'none'")
    return " ".join(text.split())


@dataclass(frozen=True)
class ErrorCounts:
    """Alignment counts of one utterance, or their sum over several."""

    hits: int = 0
    substitutions: int = 0
    insertions: int = 0
    deletions: int = 0

    @property
    def errors(self) -> int:
        return self.substitutions + self.insertions + self.deletions

    @property
    def reference_length(self) -> int:
        return self.hits + self.substitutions + self.deletions

    @property
    def rate(self) -> float:
        """Errors per reference unit; may exceed 1. See the module's docstring for an empty reference."""
        if self.reference_length == 0:
            return float(self.errors > 0)
        return self.errors / self.reference_length

    def __add__(self, other: ErrorCounts) -> ErrorCounts:
        return ErrorCounts(
            self.hits + other.hits,
            self.substitutions + other.substitutions,
            self.insertions + other.insertions,
            self.deletions + other.deletions,
        )


@dataclass(frozen=True)
class CorpusErrors:
    """Error counts per utterance, in the order given."""

    utterances: tuple[ErrorCounts, ...]

    @property
    def total(self) -> ErrorCounts:
        return sum(self.utterances, ErrorCounts())

    @property
    def rate(self) -> float:
        """The corpus rate: all errors over all reference units."""
        return self.total.rate

    @property
    def mean(self) -> float:
        """The mean of the utterances' own rates."""
        if not self.utterances:
            raise ValueError("no utterances: an error rate needs at least one reference")
        return sum(u.rate for u in self.utterances) / len(self.utterances)


def word_errors(
    reference: str, hypothesis: str, normalizer: Normalizer = "none", language: str | None = None
) -> ErrorCounts:
    """Align one utterance by whitespace-separated words."""
    out = jiwer.process_words(
        [normalize(reference, normalizer, language)], [normalize(hypothesis, normalizer, language)]
    )
    return ErrorCounts(out.hits, out.substitutions, out.insertions, out.deletions)


def char_errors(
    reference: str, hypothesis: str, normalizer: Normalizer = "none", language: str | None = None
) -> ErrorCounts:
    """Align one utterance by characters. A space counts, except next to scripts that are written without spaces."""
    out = jiwer.process_characters(
        [join_unspaced(normalize(reference, normalizer, language))],
        [join_unspaced(normalize(hypothesis, normalizer, language))],
    )
    return ErrorCounts(out.hits, out.substitutions, out.insertions, out.deletions)


def wer(
    references: Sequence[str],
    hypotheses: Sequence[str],
    normalizer: Normalizer = "none",
    language: str | None = None,
) -> CorpusErrors:
    """Word errors of a corpus: `.rate` is its WER, `.utterances` the counts of each line."""
    pairs = _pairs(references, hypotheses)
    return CorpusErrors(tuple(word_errors(r, h, normalizer, language) for r, h in pairs))


def cer(
    references: Sequence[str],
    hypotheses: Sequence[str],
    normalizer: Normalizer = "none",
    language: str | None = None,
) -> CorpusErrors:
    """Character errors of a corpus: `.rate` is its CER."""
    pairs = _pairs(references, hypotheses)
    return CorpusErrors(tuple(char_errors(r, h, normalizer, language) for r, h in pairs))


def _pairs(references: Sequence[str], hypotheses: Sequence[str]) -> list[tuple[str, str]]:
    if isinstance(references, str) or isinstance(hypotheses, str):
        raise ValueError("references and hypotheses are lists of texts, one per utterance, not one text")
    if len(references) != len(hypotheses):
        raise ValueError(f"{len(references)} references but {len(hypotheses)} hypotheses")
    if not references:
        raise ValueError("no utterances: an error rate needs at least one reference")
    return list(zip(references, hypotheses, strict=True))
