"""Which library tells the language of a short text best? Accuracy by number of words, time and size on disk.

The texts are the bundled transcripts in English, Spanish and French; the candidates are those among which
`LanguageConsistency` decides by default for text in Latin letters. Lingua is not a dependency:

pip install lingua-language-detector
python bench/language_identification.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.metadata import files
from pathlib import Path

from audiorl.data.corpus import bundled_speech
from audiorl.rewards.text_quality import identify

CANDIDATES = ("de", "en", "es", "fr", "it", "pt")
LENGTHS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 10**6))
"""Least and greatest number of words."""

Identify = Callable[[str], str]


def identifiers() -> dict[str, tuple[str, Callable[[], Identify]]]:
    """By name: the distribution, and how the function that identifies is made."""

    def py3langid() -> Identify:
        return lambda text: identify(text, CANDIDATES)[0]

    def lingua(low: bool) -> Identify:
        from lingua import IsoCode639_1, LanguageDetectorBuilder

        codes = [getattr(IsoCode639_1, code.upper()) for code in CANDIDATES]
        builder = LanguageDetectorBuilder.from_iso_codes_639_1(*codes)
        detector = (builder.with_low_accuracy_mode() if low else builder).build()

        def name(text: str) -> str:
            language = detector.detect_language_of(text)
            return "" if language is None else language.iso_code_639_1.name.lower()

        return name

    return {
        "py3langid": ("py3langid", py3langid),
        "lingua": ("lingua-language-detector", lambda: lingua(False)),
        "lingua, low accuracy mode": ("lingua-language-detector", lambda: lingua(True)),
    }


def megabytes(distribution: str) -> float:
    return sum(Path(str(f.locate())).stat().st_size for f in files(distribution) or [] if f.locate().exists()) / 1e6


def accuracy(rows: Sequence[tuple[str, str, str]], lengths: tuple[int, int]) -> tuple[float, int]:
    """The share of (text, language, answer) that is right, and how many have as many words."""
    hits = [language == answer for text, language, answer in rows if lengths[0] <= len(text.split()) <= lengths[1]]
    return sum(hits) / max(len(hits), 1), len(hits)


def main() -> None:
    texts = list(dict.fromkeys((u.text, u.language) for u in bundled_speech(("en", "es", "fr"))))
    print(f"{len(texts)} texts, candidates {', '.join(CANDIDATES)}")
    for name, (distribution, make) in identifiers().items():
        began = time.perf_counter()
        identifier = make()
        identifier("Guten Morgen.")  # models are read when they are first needed
        loaded = time.perf_counter()
        rows = [(text, language, identifier(text)) for text, language in texts]
        seconds = time.perf_counter() - loaded
        cells = [f"{low}-{high} words" if high < 100 else f"{low} or more" for low, high in LENGTHS]
        for cell, lengths in zip(cells, LENGTHS, strict=True):
            share, count = accuracy(rows, lengths)
            print(f"{name:26}{cell:>12}: {share:6.1%} of {count}")
        for language in ("en", "es", "fr"):
            own = [row for row in rows if row[1] == language]
            print(f"{name:26}{language:>12}: {accuracy(own, (1, 10**6))[0]:6.1%} of {len(own)}")
        print(
            f"{name:26}{accuracy(rows, (1, 10**6))[0]:.1%} of all; loads in {loaded - began:.2f} s, "
            f"{1e3 * seconds / len(rows):.2f} ms a text, {megabytes(distribution):.0f} MB installed\n"
        )


if __name__ == "__main__":
    main()
