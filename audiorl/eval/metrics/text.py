"""Words of a text: scripts and units of length, normalisers, word and character error rates.

WER = (S + D + I) / (H + S + D): substitutions, deletions and insertions of the cheapest alignment over the length of
the reference. A corpus rate divides the sums, so long utterances weigh more; `mean` averages per-utterance rates.

An empty reference has no rate by that formula. Here it is 0 when the hypothesis is empty too and 1 otherwise; in a
corpus its insertions count as errors and its length as zero.
"""

from __future__ import annotations

import functools
import operator
import re
import string
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import jiwer

# -- scripts -----------------------------------------------------------------------------------------------------------


# Character ranges, ready to stand inside a regular expression's [...].
SCRIPTS: dict[str, str] = {
    "latin": "A-Za-zªºÀ-ÖØ-öø-ʯ\u1e00-\u1eff\uff21-\uff3a\uff41-\uff5a",
    "greek": "\u0370-\u03ff\u1f00-\u1fff",
    "cyrillic": "\u0400-\u052f\u1c80-\u1c8f",
    "armenian": "\u0530-\u058f",
    "hebrew": "\u0590-\u05ff",
    "arabic": "\u0600-\u06ff\u0750-\u077f\u08a0-\u08ff\ufb50-\ufdff\ufe70-\ufeff",
    "devanagari": "\u0900-\u097f",
    "bengali": "\u0980-\u09ff",
    "gurmukhi": "\u0a00-\u0a7f",
    "gujarati": "\u0a80-\u0aff",
    "tamil": "\u0b80-\u0bff",
    "telugu": "\u0c00-\u0c7f",
    "kannada": "\u0c80-\u0cff",
    "malayalam": "\u0d00-\u0d7f",
    "thai": "\u0e00-\u0e7f",
    "lao": "\u0e80-\u0eff",
    "myanmar": "\u1000-\u109f",
    "georgian": "\u10a0-\u10ff",
    "hangul": "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af",
    "ethiopic": "\u1200-\u139f",
    "khmer": "\u1780-\u17ff",
    "kana": "\u3041-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f",
    "han": "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003fa1f",
}

UNSPACED = "".join(SCRIPTS[s] for s in ("han", "kana", "thai", "lao", "myanmar", "khmer"))

_UNIT = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
_SPACE_NEXT_TO_UNSPACED = re.compile(rf"(?<=[{UNSPACED}])\s+|\s+(?=[{UNSPACED}])")
_SCRIPT_PATTERNS = {name: re.compile(f"[{ranges}]") for name, ranges in SCRIPTS.items()}


def units(text: str) -> list[str]:
    """Split into words; each character of a script that is written without spaces stands alone.

    >>> units("play 音乐 now")
    ['play', '音', '乐', 'now']
    """
    return _UNIT.findall(text)


def join_unspaced(text: str) -> str:
    """Drop whitespace next to characters of scripts written without spaces; it carries no meaning there."""
    return _SPACE_NEXT_TO_UNSPACED.sub("", text)


def script_counts(text: str) -> dict[str, int]:
    """Count the letters of each script in `text`; letters of scripts that are not listed count as "other"."""
    counts: dict[str, int] = {}
    for char in text:
        if char.isalpha():
            name = next((n for n, p in _SCRIPT_PATTERNS.items() if p.match(char)), "other")
            counts[name] = counts.get(name, 0) + 1
    return counts


# -- normalisers and error rates ---------------------------------------------------------------------------------------


Normalizer = Literal["english", "basic", "none"]

# Plain numbers up to six digits: num2words takes forever on larger ones in some languages. Not the 2 of "2nd" or "mp3".
_NUMBER = re.compile(r"(?<![A-Za-z0-9])(?<![0-9]\.)[0-9]{1,6}(?:\.[0-9]{1,2})?(?!\.?[0-9]|[A-Za-z])")


@functools.cache
def _whisper_normalizer(name: Literal["english", "basic"]) -> Callable[[str], str]:
    if name == "english":
        from whisper_normalizer.english import EnglishTextNormalizer

        return EnglishTextNormalizer()
    from whisper_normalizer.basic import BasicTextNormalizer

    # Whisper's own default deletes vowel signs of Indic scripts; letters that NFKC composes are not affected.
    return BasicTextNormalizer(preserve_marks=True)


def spell_numbers(text: str, language: str) -> str:
    """Spell digits out ("21" -> "einundzwanzig" for "de"), for numbers below a million.

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
    """Return text that is ready to compare, whitespace collapsed.

    "english": Whisper's English normaliser (contractions, British spelling, numbers as digits, fillers dropped).
    "basic": Whisper's multilingual one (case, punctuation, bracketed remarks), with combining marks kept; given a
    `language` code, digits are spelled out first, as the multilingual Open ASR leaderboard does.
    "none": the text as it is.
    Source: Radford et al. 2022, appendix C.
    """
    if normalizer not in ("english", "basic", "none"):
        raise ValueError(f"normalizer: {normalizer!r} is not one of 'english', 'basic', 'none'")
    if normalizer == "basic" and language:
        text = spell_numbers(text, language.replace("_", "-").split("-")[0].lower())
    if normalizer != "none":
        text = _whisper_normalizer(normalizer)(text)
    return " ".join(text.split())


@dataclass(frozen=True)
class ErrorCounts:
    """Alignment counts of an utterance, or their sum over several."""

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
        return ErrorCounts(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class CorpusErrors:
    """Error counts per utterance, in the order given."""

    utterances: tuple[ErrorCounts, ...]

    @property
    def total(self) -> ErrorCounts:
        return sum(self.utterances, ErrorCounts())

    @property
    def rate(self) -> float:
        """All errors over all reference units."""
        return self.total.rate

    @property
    def mean(self) -> float:
        """Mean of the utterances' own rates."""
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
    references: Sequence[str], hypotheses: Sequence[str], normalizer: Normalizer = "none", language: str | None = None
) -> CorpusErrors:
    """Align a corpus by words: `.rate` is its WER, `.utterances` the counts of each line."""
    pairs = _pairs(references, hypotheses)
    return CorpusErrors(tuple(word_errors(r, h, normalizer, language) for r, h in pairs))


def cer(
    references: Sequence[str], hypotheses: Sequence[str], normalizer: Normalizer = "none", language: str | None = None
) -> CorpusErrors:
    """Align a corpus by characters: `.rate` is its CER."""
    pairs = _pairs(references, hypotheses)
    return CorpusErrors(tuple(char_errors(r, h, normalizer, language) for r, h in pairs))


def _pairs(references: Sequence[str], hypotheses: Sequence[str]) -> list[tuple[str, str]]:
    if isinstance(references, str) or isinstance(hypotheses, str):
        raise ValueError("references and hypotheses are lists of texts, one per utterance, not one text")
    if len(references) != len(hypotheses) or not references:
        raise ValueError(f"{len(references)} references but {len(hypotheses)} hypotheses; give as many, at least one")
    return list(zip(references, hypotheses, strict=True))


# -- Seed-TTS-eval -----------------------------------------------------------------------------------------------------


# The word errors of Seed-TTS-eval (Anastassiou et al. 2024, arXiv 2406.02430), whose script removes the Chinese
# punctuation of zhon.hanzi and that of ASCII.
_CHINESE = (
    "＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､\u3000、〃〈〉《》「」『』【】"
    "〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏﹑﹔·．！？｡。"
)
_REMOVED = str.maketrans("", "", (_CHINESE + string.punctuation).replace("'", ""))


def compared(text: str, language: str) -> str:
    """Return the words or characters that Seed-TTS-eval compares, divided by single spaces.

    Punctuation goes, apostrophes stay; English is compared by words in lower case, Chinese by characters, and other
    languages, which the benchmark lacks, as English, with scripts without spaces by characters.

    >>> compared("Don't, please – stop!", "en"), compared("你好，世界。", "zh"), compared("¿Qué «dice»?", "es")
    ("don't please stop", '你 好 世 界', 'qué dice')
    """
    text = text.translate(_REMOVED)
    if language == "zh":
        return " ".join(character for character in text if not character.isspace())
    if language == "en":
        return " ".join(text.lower().split())
    return " ".join(units("".join(c for c in text.lower() if c == "'" or not unicodedata.category(c).startswith("P"))))


def utterance_errors(reference: str, hypothesis: str, language: str) -> ErrorCounts:
    """Align one utterance by what Seed-TTS-eval compares; `.rate` may exceed 1.

    The benchmark's score is the mean of the utterances' rates: a short one weighs as much as a long one.
    """
    return word_errors(compared(reference, language), compared(hypothesis, language))
