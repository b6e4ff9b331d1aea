"""Is the response in the language asked for? Models trained on accuracy alone drift into mixed languages."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from audiorl.eval.metrics.text import script_counts
from audiorl.rewards.tags import extract_answer, extract_think, strip_tags
from audiorl.types import Rollout, Sample, Score

Part = Literal["all", "think", "answer"]

# The scripts a language is written in; every language not listed is written in Latin letters.
LANGUAGE_SCRIPTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("zh", "yue", "wuu"), ("han",)),
    "ja": ("han", "kana"),
    "ko": ("hangul",),
    **dict.fromkeys(("ru", "uk", "be", "bg", "mk", "sr", "kk", "ky", "mn", "tg", "tt", "ba"), ("cyrillic",)),
    "el": ("greek",),
    "hy": ("armenian",),
    "he": ("hebrew",),
    **dict.fromkeys(("ar", "fa", "ur", "ps", "ug"), ("arabic",)),
    **dict.fromkeys(("hi", "mr", "ne", "sa"), ("devanagari",)),
    **dict.fromkeys(("bn", "as"), ("bengali",)),
    "pa": ("gurmukhi",),
    "gu": ("gujarati",),
    "ta": ("tamil",),
    "te": ("telugu",),
    "kn": ("kannada",),
    "ml": ("malayalam",),
    "th": ("thai",),
    "lo": ("lao",),
    "my": ("myanmar",),
    "ka": ("georgian",),
    "am": ("ethiopic",),
    "km": ("khmer",),
}


@dataclass(frozen=True)
class LanguageConsistency:
    """Share of letters in the target language's script, and 0 if the text is identified as another language.

    The target is `language` or else sample.metadata["language"] ("en", "zh-CN", …). Scripts settle Chinese, Korean,
    Russian against English and the like. Between languages that share a script py3langid decides among `languages` and
    the target, for texts of at least `min_letters` letters; shorter ones are judged by script alone. Japanese of that
    length must contain kana, else it is taken for Chinese.

    `part` is the text judged: the thinking, the answer, or all without tags. A missing or empty part scores 0; a part
    without letters ("42") fits every language and scores 1.

    Raises ValueError when no target is known, or when py3langid does not know a language.
    """

    language: str | None = None
    languages: tuple[str, ...] = ("en", "zh", "de", "fr", "es", "it", "pt", "ja", "ko", "ru", "ar")
    part: Part = "all"
    min_letters: int = 20

    def __post_init__(self) -> None:
        if self.part not in ("all", "think", "answer"):
            raise ValueError(f"LanguageConsistency: part {self.part!r} is not one of 'all', 'think', 'answer'")
        if self.min_letters < 1:
            raise ValueError(f"LanguageConsistency: min_letters must be at least 1, got {self.min_letters}")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(self.value(self._part(r.text), self.target(r.sample))) for r in rollouts]

    def target(self, sample: Sample) -> str:
        language = self.language or sample.metadata.get("language")
        if not isinstance(language, str) or not language:
            raise ValueError(
                f"LanguageConsistency: sample {sample.id!r} has no metadata['language'] and no language was set"
            )
        return _code(language)

    def value(self, text: str, target: str) -> float:
        """In [0, 1], for a text without tags."""
        if not text.strip():
            return 0.0
        counts = script_counts(text)
        letters = sum(counts.values())
        if not letters:
            return 1.0
        scripts = _scripts(target)
        share = sum(counts.get(s, 0) for s in scripts) / letters
        if letters < self.min_letters:
            return share
        if target == "ja" and not counts.get("kana"):
            return 0.0
        rivals = {code for code in map(_code, self.languages) if _scripts(code) == scripts} | {target}
        if len(rivals) > 1 and identify(text, tuple(sorted(rivals))) != target:
            return 0.0
        return share

    def _part(self, text: str) -> str:
        if self.part == "all":
            return strip_tags(text)
        return (extract_think(text) if self.part == "think" else extract_answer(text)) or ""


def identify(text: str, languages: tuple[str, ...]) -> str:
    """The most likely of `languages` (ISO 639-1 codes) for `text`. Source: py3langid, after Lui and Baldwin 2012."""
    return _identifier(languages).classify(text)[0]


@functools.cache
def _identifier(languages: tuple[str, ...]):
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    unknown = sorted(set(languages) - set(identifier.labels))
    if unknown:
        raise ValueError(f"LanguageConsistency: py3langid does not know {', '.join(unknown)}")
    identifier.set_languages(list(languages))
    return identifier


def _code(language: str) -> str:
    return language.replace("_", "-").split("-")[0].lower()


def _scripts(code: str) -> tuple[str, ...]:
    return LANGUAGE_SCRIPTS.get(code, ("latin",))
