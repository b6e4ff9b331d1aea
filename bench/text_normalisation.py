"""Which of 2,000 pairs of lines in ten languages count as equal: here, by whisper_normalizer, by jiwer, by NeMo.

    python -m bench.text_normalisation                        a table: right answers by kind of line and normaliser
    python -m bench.text_normalisation --lines lines.json     writes the pairs, for programs of another environment
    python bench/text_normalisation.py --nemo lines.json LANGUAGE [CACHE]     there: NeMo's text processing

Each kind has 20 pairs a language of which one knows whether they are one text. Texts are the bundled transcripts in
English, Spanish and French, a sentence frame in the others; numbers are random, written as CLDR says.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal

FRAMES = {
    "en": "The train brings {} people to the city", "de": "Der Zug bringt {} Leute in die Stadt",
    "es": "El tren lleva {} personas a la ciudad", "fr": "Le train amène {} personnes à la ville",
    "it": "Il treno porta {} persone in città", "pt": "O trem leva {} pessoas à cidade",
    "ru": "Поезд везёт {} человек в город", "zh": "火车把{}人带到城里",
    "ar": "القطار ينقل {} شخص إلى المدينة", "hi": "रेल {} लोगों को शहर लाती है",
}  # fmt: skip
NATIVE = {"ar": "٠١٢٣٤٥٦٧٨٩", "hi": "०१२३४५६७८९"}
MARKS = {"ar": "\u064e", "ru": "\u0301"}
FULL_WIDTH = str.maketrans("0123456789", "０１２３４５６７８９")
Pair = tuple[str, str, str, str, bool]
"""Language, kind, a line, another, whether they are one text."""


def pairs() -> Iterator[Pair]:
    from babel import Locale
    from babel.numbers import format_decimal, format_percent
    from num2words import num2words

    from audiorl.data.corpus import bundled_speech
    from audiorl.eval.metrics.text import normalize

    rng = random.Random(0)
    for language, frame in FRAMES.items():
        locale = Locale(language)
        said = sorted({u.text for u in bundled_speech() if u.language == language and len(u.text.split()) > 3})
        for i in range(20):
            number, other = rng.randrange(1000, 10**6), rng.randrange(2, 100)
            grouped = format_decimal(number, "#,##0", locale, numbering_system="latn")
            text = said[i] if said else frame.format(other)
            plain = frame.format(number)
            fifty = 10 * rng.randrange(2, 10) + 5
            words, spelled = (
                normalize(str(n), "basic", language) if language in ("zh", "hi") else num2words(n, lang=language)
                for n in (other, fifty)
            )
            decimal = format_decimal(Decimal(number) / 10, "#,##0.0", locale, numbering_system="latn")
            digits = str(number).translate(
                str.maketrans("0123456789", NATIVE[language]) if language in NATIVE else FULL_WIDTH
            )
            middle = len(text) // 2
            yield language, "case, punctuation", text, text.upper() if language != "zh" else f"{text}。", True
            yield language, "thousands", plain, frame.format(grouped), True
            yield language, "words", frame.format(other), frame.format(words), True
            yield (
                language,
                "decimals",
                frame.format(decimal),
                frame.format(_plain(decimal)),
                True,
            )
            percent = format_percent(fifty / 100, "0%", locale, numbering_system="latn")
            spoken = {"en": "percent", "de": "Prozent", "es": "por ciento", "fr": "pour cent", "it": "per cento"}
            spoken |= {"pt": "por cento", "ru": "процентов", "zh": "", "ar": "بالمائة", "hi": "प्रतिशत"}
            wanted = f"百分之{spelled}" if language == "zh" else f"{spelled} {spoken[language]}"
            yield language, "percent", frame.format(percent), frame.format(wanted), True
            yield language, "digits of a script", plain, frame.format(digits), True
            yield language, "invisible", text, f"\ufeff{text[:middle]}\u00ad{text[middle:]}", True
            mark = MARKS.get(language, "’")
            marked = text[:2] + mark + text[2:] if mark != "’" else f"{text} l’ami"
            yield language, "apostrophes, marks", text if mark != "’" else f"{text} l'ami", marked, True
            yield language, "another number", plain, frame.format(number + 1000), False
            yield language, "another sign", frame.format(f"{other}.{i}"), frame.format(f"{other}{i}"), False


def _plain(decimal: str) -> str:
    """Return a number without its thousands: all but the last sign goes."""
    return "".join(c for c in decimal[:-2] if c.isdigit()) + decimal[-2:]


def normalisers() -> dict[str, Callable[[str, str], str]]:
    from jiwer import Compose, RemoveMultipleSpaces, RemovePunctuation, Strip, ToLowerCase
    from whisper_normalizer import international
    from whisper_normalizer.basic import BasicTextNormalizer
    from whisper_normalizer.english import EnglishTextNormalizer

    from audiorl.eval.metrics.text import join_unspaced, normalize

    names = {"es": "Spanish", "fr": "French", "ar": "Arabic", "zh": "Chinese", "ru": "Russian"}
    own = {code: getattr(international, f"{name}TextNormalizer")() for code, name in names.items()}
    own["en"] = EnglishTextNormalizer()
    whisper, plain = (
        BasicTextNormalizer(),
        Compose([ToLowerCase(), RemovePunctuation(), RemoveMultipleSpaces(), Strip()]),
    )
    return {
        "audiorl basic": lambda text, language: join_unspaced(normalize(text, "basic", language)),
        "whisper basic": lambda text, language: join_unspaced(whisper(text).strip()),
        "whisper's own": lambda text, language: own.get(language, whisper)(text).strip(),
        "jiwer": lambda text, language: plain(text),
    }


def nemo(lines: list[Pair], language: str, cache: str | None) -> list[list[object]]:
    """Return the pairs of a language with NeMo's answer; its output is compared in lower case without signs."""
    from nemo_text_processing.text_normalization.normalize import Normalizer

    normalizer = Normalizer("cased", lang=language, cache_dir=cache)

    def spoken(text: str) -> str:
        written = normalizer.normalize(text).lower()
        return " ".join("".join(c if c.isalnum() else " " for c in written).split())

    return [[*line, spoken(line[2]) == spoken(line[3])] for line in lines if line[0] == language]


def table(answers: dict[str, list[tuple[str, bool]]]) -> None:
    kinds = list(dict.fromkeys(kind for kind, _ in next(iter(answers.values()))))
    print(f"| {' | '.join(['right of 100 %', *answers])} |")
    for kind in kinds:
        shares = []
        for found in answers.values():
            held = [right for k, right in found if k == kind]
            shares.append(f"{100 * sum(held) / len(held):.0f}" if held else "–")
        print(f"| {' | '.join([kind, *shares])} |")


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--nemo"]:
        with open(arguments[1], encoding="utf-8") as file:
            lines = [tuple(line) for line in json.load(file)]
        found = nemo(lines, arguments[2], arguments[3] if len(arguments) > 3 else None)
        counts = Counter((row[1], row[4] == row[5]) for row in found)
        print(arguments[2], {kind: f"{counts[kind, True]}/20" for kind in dict.fromkeys(str(row[1]) for row in found)})
        return
    lines = list(pairs())
    if arguments[:1] == ["--lines"]:
        with open(arguments[1], "w", encoding="utf-8") as file:
            json.dump(lines, file, ensure_ascii=False)
        return
    answers: dict[str, list[tuple[str, bool]]] = {}
    for name, normalise in normalisers().items():
        answers[name] = [
            (kind, (normalise(a, language) == normalise(b, language)) == same) for language, kind, a, b, same in lines
        ]
        shown: set[tuple[str, str]] = set()
        for (language, kind, a, b, _), (_, right) in zip(lines, answers[name], strict=True):
            if not right and name == "audiorl basic" and (language, kind) not in shown:
                shown.add((language, kind))
                print(language, kind, repr(a), repr(b), "|", normalise(a, language), "|", normalise(b, language))
    table(answers)


if __name__ == "__main__":
    main(sys.argv[1:])
