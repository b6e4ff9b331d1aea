"""Words of a text: scripts and units of length, normalisers, word and character error rates.

WER = (S + D + I) / (H + S + D): substitutions, deletions and insertions of the cheapest alignment over the length of
the reference. A corpus rate divides the sums, so long utterances weigh more; `mean` averages per-utterance rates.

An empty reference has no rate by that formula. Here it is 0 when the hypothesis is empty too and 1 otherwise; in a
corpus its insertions count as errors and its length as zero.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Literal

import jiwer

from audiorl.errors import install
from audiorl.languages import language_code, written_in
from audiorl.user_files import load_function

if TYPE_CHECKING:
    from babel import Locale

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
    "odia": "\u0b00-\u0b7f",
    "tamil": "\u0b80-\u0bff",
    "telugu": "\u0c00-\u0c7f",
    "kannada": "\u0c80-\u0cff",
    "malayalam": "\u0d00-\u0d7f",
    "sinhala": "\u0d80-\u0dff",
    "thai": "\u0e00-\u0e7f",
    "lao": "\u0e80-\u0eff",
    "tibetan": "\u0f00-\u0fff",
    "myanmar": "\u1000-\u109f",
    "georgian": "\u10a0-\u10ff",
    "hangul": "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af",
    "ethiopic": "\u1200-\u139f",
    "khmer": "\u1780-\u17ff",
    "kana": "\u3041-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f",
    "han": "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003fa1f",
}

UNSPACED_SCRIPTS = {"han", "kana", "thai", "lao", "myanmar", "khmer"}
UNSPACED = "".join(SCRIPTS[s] for s in sorted(UNSPACED_SCRIPTS))

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


# -- normalisers -----------------------------------------------------------------------------------------------------


Normalizer = str
"""english, basic, none, or FILE.py:FUNCTION; see `normalize`."""

# What takes no room: zero-width characters, soft hyphens, marks of direction, selectors of variants; not the joiners,
# which change how letters of Persian and Indic scripts are drawn.
INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\U000e0000-\U000e0fff]"
)
JOINERS = re.compile("[\u200c\u200d]")
_APOSTROPHES = str.maketrans(dict.fromkeys("‘’‛ʼʻʹ′´`＇", "'"))
# Vowel marks that Arabic and Hebrew may leave out, tatweel, and stress marks of Cyrillic. NFC has composed the marks
# that make another letter.
_VOWEL_MARKS = re.compile(
    "[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670\u06d6-\u06dc\u06df-\u06e8"
    f"\u06ea-\u06ed\u08ca-\u08e1\u08e3-\u08ff]|(?<=[{SCRIPTS['cyrillic']}])[\u0300\u0301]"
)
_MARKS_ARE_LETTERS = ("ks", "yi")  # Kashmiri and Yiddish always write them
_RAISED = re.compile("(?<=[0-9])(?=[²³¹⁰⁴-⁹₀-₉¼-¾⅐-⅞])")  # NFKC would make "10²" 102 and "1½" 11/2
# Thousands divided by spaces that do not break, thin ones, an apostrophe or Arabic's sign, in any language.
_GROUPED = re.compile("(?<![0-9.,])[1-9][0-9]{0,2}([\u00a0\u2007-\u2009\u202f'٬])[0-9]{3}(?:\\1[0-9]{3})*(?![0-9])")
_SPACED = re.compile("(?<![0-9.,])(?<![0-9] )[1-9][0-9]{0,2}(?: [0-9]{3})+(?! ?[0-9])")
_LETTERS = "".join(SCRIPTS[name] for name in ("latin", "greek", "cyrillic", "armenian", "georgian"))
# Not the 2 of "2nd" or "mp3", nor parts of "1.5km".
_NUMBER = re.compile(
    rf"(?<![{_LETTERS}0-9])(?<![0-9][.,])(?P<minus>(?<![^\s(\[])[-−–])?(?P<digits>[0-9]+(?:[.,][0-9]+)*)"
    rf"(?![.,]?[0-9]|[{_LETTERS}])(?P<percent> ?%)?"
)
# English says 105 with and without "and".
_HUNDRED_AND = re.compile(
    r"\b(hundred|[mb]illion|thousand) and (?=(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|"
    r"(?:twen|thir|for|fif|six|seven|eigh|nine)ty)\b)"
)


@functools.cache
def _whisper_normalizer(name: Literal["english", "basic"]) -> Callable[[str], str]:
    if name == "english":
        from whisper_normalizer.english import EnglishTextNormalizer

        return EnglishTextNormalizer()
    from whisper_normalizer.basic import BasicTextNormalizer

    # Whisper's own default deletes vowel signs of Indic scripts; letters that NFKC composes are not affected.
    return BasicTextNormalizer(preserve_marks=True)


def normalize(text: str, normalizer: Normalizer = "basic", language: str | None = None) -> str:
    """Return text that is ready to compare, whitespace collapsed.

    "english": Whisper's English normaliser (contractions, British spelling, numbers as digits, fillers dropped); for a
    `language` other than English "basic", as its fillers ("um") are words elsewhere.
    "basic": Whisper's multilingual one (case, punctuation, bracketed remarks), with combining marks kept; given a
    `language` as `language_code` takes it, numbers are spelled out first, as the multilingual Open ASR leaderboard does
    (see `spell_numbers`), and Chinese is written in simplified characters.
    "none": the text as one sees it: composed (NFC) and without invisible characters.
    FILE.py:FUNCTION: your own, from a text, or from a text and its language (or None), to a text.

    Both of Whisper's get ' for every apostrophe, ASCII for full-width forms and for digits of other scripts, and no
    invisible characters, joiners, tatweel, vowel marks of Arabic and Hebrew.
    Raises ValueError for an unknown language, and for a function that fails. Source: Radford et al. 2022, appendix C.
    """
    if (own := _user_normalizer(normalizer)) is not None:
        try:
            return " ".join(own(text, language).split())
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            raise ValueError(f"normalizer {normalizer} fails on {text!r}: {message}") from error
    text = unicodedata.normalize("NFC", INVISIBLE.sub("", text))
    if normalizer == "none":
        return " ".join(text.split())
    code = language_code(language) if language else ""
    if normalizer == "english" and code not in ("", "en"):
        normalizer = "basic"
    text = JOINERS.sub("", text).translate(_APOSTROPHES)
    text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)
    text = _GROUPED.sub(lambda number: re.sub("[^0-9]", "", number[0]), text)
    text = unicodedata.normalize("NFKC", _RAISED.sub(" ", text)).replace("٪", "%")
    if code not in _MARKS_ARE_LETTERS:
        text = _VOWEL_MARKS.sub("", text)
    if normalizer == "english":
        text = re.sub(r"(?<![^\s(\[])[-−–](?=[0-9])", "minus ", re.sub("(?<=[0-9]) %", "%", text))
        return " ".join(_whisper_normalizer("english")(text).split())
    if language:
        text = spell_numbers(_simplified(text) if written_in(code) == ("han",) else text, language)
    if code in ("tr", "az"):
        text = text.replace("I", "ı").replace("İ", "i")
    text = _whisper_normalizer("basic")(text).casefold()  # "ß" is "ss"
    if code == "ar":
        text = re.sub(r"\bو ", "و", text)  # "and" belongs to the next word, num2words parts it
    if code in ("en", "it"):
        text = re.sub(r"\bper (cento?)\b", r"per\1", text)
    if code == "en":
        text = _HUNDRED_AND.sub(r"\1 ", text)
    return " ".join(text.split())


@functools.cache
def _user_normalizer(name: Normalizer) -> Callable[[str, str | None], str] | None:
    """Return the function of a user's file; None for one of ours. Raises ValueError for anything else."""
    if name in ("english", "basic", "none"):
        return None
    file, found, function = name.partition(".py:")
    if not found:
        raise ValueError(f"normalizer: {name!r} is none of english, basic, none and FILE.py:FUNCTION")
    own = load_function(f"{file}.py", function, "normalizer")
    if len(inspect.signature(own).parameters) > 1:
        return own
    return lambda text, language: str(own(text))


def check_normalizer(name: Normalizer) -> None:
    """Raise ValueError unless there is a normaliser of this name."""
    _user_normalizer(name)


def _simplified(text: str) -> str:
    try:
        from zhconv import convert
    except ImportError as error:
        raise ImportError(f"error rates of Chinese need zhconv: {install('metrics')}") from error
    return convert(text, "zh-hans")


# -- numbers -----------------------------------------------------------------------------------------------------------


# num2words says less than it knows: it never ends for large numbers in Amharic, and takes the first two letters of an
# unknown code, Finnish for Filipino.
_LONGEST, _LONGEST_AMHARIC = 12, 6
_NUM2WORDS = {"nb": "no", "nn": "no", "kk": "kz"}
# Where it says decimals wrongly (Persian 2.05 as two and a half), or a point where the language has a comma.
_POINTS = {
    "ar": "فاصلة",
    "bn": "দশমিক",
    "ca": "coma",
    "es": "coma",
    "fa": "ممیز",
    "hi": "दशमलव",
    "id": "koma",
    "it": "virgola",
}
_POINTS |= {"cs": "celá", "tr": "virgül", "vi": "phẩy"}


def spell_numbers(text: str, language: str) -> str:
    """Spell the numbers of a text out ("21" -> "einundzwanzig" for "de"), with their minus and percent signs.

    Separators are read as the language, or the region of a tag like "es-MX", writes them: "1.250" and "1 250" are 1250
    in German, "1,00,000" is a hundred thousand in English. "1.2.3", "24.12.2024" and "2nd" stay. Numbers stay digits,
    without separators, from 12 digits on and in languages without words for them: see `number_words`.
    """
    code, locale = language_code(language), _locale(language)
    comma = locale is not None and locale.number_symbols.get("latn", {}).get("decimal", ".") == ","
    text = text.replace("٫", "," if comma else ".")
    if comma:
        text = _SPACED.sub(lambda number: number[0].replace(" ", ""), text)
    if written_in(code) == ("han",):
        return _chinese_numbers(text)
    if code in ("tr", "eu"):
        text = re.sub("% ?([0-9][0-9.,]*)", r"\1%", text)
    if code == "ja":
        text = re.sub(rf"[{_HAN_DIGITS}〇]{{3,}}", lambda match: match[0].translate(_HAN_TO_ASCII), text)

    def ungrouped(match: re.Match[str]) -> str:  # "1,500km", "1,000th"
        return ".".join(filter(None, read_number(match[0], comma) or (match[0], "")))

    def spell(match: re.Match[str]) -> str:
        digits, after = match["digits"], text[match.end() :][:1]
        number = read_number(digits, comma)
        if number is None or (comma and after == "." and re.fullmatch(r"[0-9]+\.[0-9]", digits)):  # the first of May
            if "." in digits:
                return match[0]
            return re.sub("[0-9]+", lambda part: _said(part[0], "", language) or part[0], match[0])  # a list: "1,5"
        whole, fraction = number
        if len(digits) == 2 and (after in (":", "/", "-") or text[: match.start()][-1:] in (":", "/", "-")):
            whole = str(int(whole))  # 09:05, 2024-01-02
        said = _said(whole, fraction, language, minus=bool(match["minus"]))
        if said is None:
            said = (match["minus"] or "") + whole + ("." + fraction if fraction else "")
        return _percent(number, said, locale) if match["percent"] else said

    text = re.sub(rf"(?<![{_LETTERS}0-9.,])[0-9]+(?:[.,][0-9]+)+(?=[{_LETTERS}])", ungrouped, text)
    return _NUMBER.sub(spell, text)


def number_words(language: str) -> bool:
    """Return whether numbers are spelled out in a language; if not, "21" and the word for it differ."""
    return written_in(language_code(language)) == ("han",) or _said("21", "", language) is not None


_INDIC = "as bn gu hi kn ml mr ne or pa si ta te ur"


@functools.cache
def languages_of_number_words() -> tuple[str, ...]:
    """Return the codes of the languages, but those written in Han, that `number_words` is true of."""
    from num2words import CONVERTER_CLASSES

    codes = {language_code({"kz": "kk"}.get(key, key)) for key in CONVERTER_CLASSES if "_" not in key}
    return tuple(sorted(c for c in {*codes, *_INDIC.split()} if "han" not in written_in(c) and number_words(c)))


def read_number(digits: str, comma: bool) -> tuple[str, str] | None:
    """Return the digits before and after the decimal sign, `comma` or point; None for what is no number, as "1.2.3".

    >>> read_number("1.250", comma=True), read_number("1,00,000.5", comma=False), read_number("1.2.3", comma=True)
    (('1250', ''), ('100000', '5'), None)
    """
    signs, parts = re.findall("[.,]", digits), re.split("[.,]", digits)

    def grouped(parts: list[str]) -> bool:
        first, *middle, last = map(len, parts)
        indian = not comma and middle and first <= 2 and set(middle) == {2}
        return parts[0][0] != "0" and first <= 3 and last == 3 and (set(middle) <= {3} or bool(indian))

    if not signs:
        return digits, ""
    if len(set(signs)) == 1:
        if grouped(parts) and (len(signs) > 1 or (signs[0] == ".") == comma):
            return "".join(parts), ""
        if len(signs) == 1 and ((signs[0] == ",") == comma or (signs[0] == "." and len(parts[1]) == 1)):
            return parts[0], parts[1]
    elif len(set(signs[:-1])) == 1 and grouped(parts[:-1]):
        return "".join(parts[:-1]), parts[-1]
    return None


@functools.lru_cache(maxsize=1 << 16)
def _said(whole: str, fraction: str, language: str, minus: bool = False) -> str | None:
    """Return the words of a number; None where there are none."""
    from num2words import CONVERTER_CLASSES, num2words

    code, locale = language_code(language), _locale(language)
    code = _NUM2WORDS.get(code, code)
    regional = f"{code}_{locale.territory}" if locale else ""
    key = regional if regional in CONVERTER_CLASSES else code

    def cardinal(number: int | Decimal) -> str:
        if key in CONVERTER_CLASSES:
            return num2words(number, lang=key).strip()
        from indic_numtowords import num2words as indic

        return indic(number, lang=key).strip()

    if len(whole) > (_LONGEST_AMHARIC if key == "am" else _LONGEST):
        return None
    try:
        zero, digits = cardinal(0), whole.lstrip("0") or "0"
        words = [zero] * (len(whole) - len(digits)) + [cardinal(int(digits))]
        if fraction and key in ("ru", "hu") and len(fraction) <= 3:  # five tenths
            words = [cardinal(Decimal(f"{digits}.{fraction}"))]
        elif fraction:
            point = _POINTS.get(code) or getattr(CONVERTER_CLASSES.get(key), "pointword", None)
            point = point[0] if isinstance(point, tuple) else point
            if not point:
                return None
            words += [point.strip(), *(cardinal(int(digit)) for digit in fraction)]
        if minus:
            one, less = cardinal(1), ""
            with contextlib.suppress(ValueError, KeyError):  # Polish, Czech and Slovak; Malayalam
                less = cardinal(-1).removesuffix(one)
            less = less or getattr(CONVERTER_CLASSES.get(key), "negword", None) or ""
            words = [_MINUS.get(code) or less.strip(" ()-") or "minus", *words]
    except (NotImplementedError, OverflowError, KeyError, IndexError, TypeError, ValueError):
        return None
    return ("" if key in ("ja", "th") else " ").join(filter(None, words))


@functools.cache
def _locale(language: str) -> Locale | None:
    """Return how CLDR writes a language, in the region that the tag names; None where it does not know."""
    from babel import Locale, UnknownLocaleError

    code = language_code(language)
    regions = [part for part in re.split("[-_]", language)[1:] if re.fullmatch("[A-Za-z]{2}|[0-9]{3}", part)]
    for name in (*(f"{code}_{region.upper()}" for region in regions), code):
        with contextlib.suppress(UnknownLocaleError):
            return Locale.parse(name)
    return None


def _percent(number: tuple[str, str], said: str, locale: Locale | None) -> str:
    """Return "fifty percent" in the words and the order of the language."""
    if locale is None:
        return f"{said} percent"
    from babel.units import format_unit

    for value in (Decimal(".".join(filter(None, number))), 1):  # Arabic has a word for some numbers only
        written = format_unit(value, "concentr-percent", "long", format="0.####", locale=locale)
        if not re.search("[%٪]", written):
            break
    if re.search("[%٪]", written):  # CLDR has the sign alone
        return f"{said} {_PERCENT.get(locale.language, 'percent')}"
    return re.sub("[0-9][0-9.,]*", lambda _: f" {said} ", written, count=1)


_PERCENT = {"ko": "퍼센트", "ml": "ശതമാനം", "tg": "фоиз", "vi": "phần trăm"}
_MINUS = {"bn": "মাইনাস", "kn": "ಮೈನಸ್", "ml": "മൈനസ്", "te": "మైనస్", "vi": "âm"}


_HAN_DIGITS = "零一二三四五六七八九"
_HAN_TO_ASCII, _HAN_FROM_ASCII = (
    str.maketrans(*pair) for pair in ((_HAN_DIGITS + "两兩〇萬億", "0123456789220万亿"), ("0123456789", _HAN_DIGITS))
)
_HAN_UNITS = {"十": 10, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8}
_HAN_NUMBER = re.compile(
    rf"(?P<minus>(?<![0-9A-Za-z月日年号点])[-−](?=[0-9]))?(?P<whole>[0-9两〇{_HAN_DIGITS}{''.join(_HAN_UNITS)}]+)"
    # Not the time "三点五十分", nor "三点15分".
    rf"(?:(?:\.(?P<ascii>[0-9]+)|点(?P<han>[{_HAN_DIGITS}]++)(?![十百千](?![万亿])))(?P<unit>[百千]?[万亿])?)?"
    r"(?P<percent> ?%)?(?=(?P<year>年)?)"
)


HAN_NUMERALS = re.compile(rf"[{_HAN_DIGITS}两兩〇{''.join(_HAN_UNITS)}萬億]+")
"""Numbers as simplified and traditional Chinese write them, and words with such characters."""


def _chinese_numbers(text: str) -> str:
    """Write each number of a text in simplified Chinese as one says it: "315", "三一五" and "三百一十五" as the last.

    Words with numerals stay: 千万, 万一, 七八个.
    """

    def say(match: re.Match[str]) -> str:
        whole = match["whole"]
        fraction = (match["ascii"] or match["han"] or "").translate(_HAN_TO_ASCII)
        value = han_value(whole, bool(match["year"]))
        said = whole.translate(_HAN_FROM_ASCII) if value is None else _han_said(value)
        if fraction:
            unit = functools.reduce(operator.mul, (_HAN_UNITS[u] for u in match["unit"] or ""), 1)
            scaled = Decimal(f"{value or 0}.{fraction}") * unit
            whole_value = unit > 1 and scaled == int(scaled)
            said = (
                _han_said(int(scaled))
                if whole_value
                else f"{said}点{fraction.translate(_HAN_FROM_ASCII)}{match['unit'] or ''}"
            )
        return ("负" if match["minus"] else "") + ("百分之" if match["percent"] else "") + said

    def ungrouped(match: re.Match[str]) -> str:
        number = read_number(match[0], comma=False)
        return ".".join(filter(None, number)) if number else match[0].replace(".", " ")

    text = re.sub("[0-9]+(?:[.,][0-9]+)+", ungrouped, text)
    return _HAN_NUMBER.sub(say, text).replace("百分之百", "百分之一百")


def han_value(text: str, year: bool = False) -> int | None:
    """Return the number that numerals write: 120 for 一百二; None for words and for what is read digit by digit.

    year: the word for a year follows, before which 七八 is 78 and not "seven or eight".
    """
    plain = text.translate(_HAN_TO_ASCII)
    if plain.isdecimal():
        several = text.isascii() or len(plain) != 2 or "0" in plain or year  # 七八个 are no 78
        return int(plain) if several and len(plain) < 10 and (plain[0] != "0" or plain == "0") else None
    if plain[0] in "百千万亿" or re.search("[1-9]{2}", plain) or len(plain) > 30:  # 千万, 二三十, babble
        return None

    def value(plain: str) -> int:
        for name, unit in reversed(_HAN_UNITS.items()):
            head, found, rest = plain.rpartition(name)
            if found and len(rest) == 1 and rest != "0" and unit > 10:  # 三万五
                return value(head) * unit + int(rest) * unit // 10
            if found:
                return value(head or "1") * unit + value(rest.lstrip("0") or "0")
        return int(plain)

    return value(plain)


def _han_said(number: int) -> str:
    """Return 二千零五 for 2005."""

    def said(number: int) -> str:
        for name, unit in reversed(_HAN_UNITS.items()):
            if number >= unit:
                head, rest = divmod(number, unit)
                return said(head) + name + ("零" if 0 < rest < unit // 10 else "") + (said(rest) if rest else "")
        return _HAN_DIGITS[number]

    return said(number).removeprefix("一") if 10 <= number < 20 or 10**5 <= number < 2 * 10**5 else said(number)


# -- error rates -------------------------------------------------------------------------------------------------------


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


# -- hotwords ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HotwordErrors:
    """Errors of one utterance in the words of a list and in all others, and which hotwords it has.

    A hotword of several words counts only where they follow each other. Times that a hotword is said or written are
    counted without the alignment: one that is written as often as it is said was found, wherever it stands.
    """

    biased: ErrorCounts
    """Errors in hotwords; its rate is B-WER."""
    unbiased: ErrorCounts
    """All other errors; the rate is U-WER."""
    said: tuple[str, ...]
    """Hotwords of the reference, normalised, each as often as it is said."""
    written: tuple[str, ...]
    """Those of the hypothesis."""
    unsaid: tuple[str, ...]
    """Listed words that the reference has not."""

    @property
    def missed(self) -> tuple[str, ...]:
        """Return those that are said and not written."""
        return tuple((Counter(self.said) - Counter(self.written)).elements())

    @property
    def false(self) -> tuple[str, ...]:
        """Return those that are written and not said."""
        return tuple((Counter(self.written) - Counter(self.said)).elements())


def hotword_errors(
    reference: str,
    hypothesis: str,
    hotwords: Sequence[str],
    normalizer: Normalizer = "none",
    language: str | None = None,
) -> HotwordErrors:
    """Align one utterance by `units` and divide its errors: those in hotwords, and all others.

    A substitution or deletion is in a hotword if the reference's word is one, an insertion if the inserted word is
    (Le et al. 2021, arXiv 2104.02194). All words of the list count, also distractors; the sum of both are
    the errors of `word_errors`, where spaces part words. Raises ValueError for a hotword that is empty after
    normalisation.
    """
    listed = hotword_units(tuple(hotwords), normalizer, language)
    texts = [units(normalize(text, normalizer, language)) for text in (reference, hypothesis)]
    spans = [hotword_spans(text, listed) for text in texts]
    in_hotword = [{i for start, end in found for i in range(start, end)} for found in spans]
    counts = {biased: Counter[str]() for biased in (True, False)}
    for chunk in jiwer.process_words([" ".join(texts[0])], [" ".join(texts[1])]).alignments[0]:
        inserted = chunk.type == "insert"
        start, end = (chunk.hyp_start_idx, chunk.hyp_end_idx) if inserted else (chunk.ref_start_idx, chunk.ref_end_idx)
        for i in range(start, end):
            counts[i in in_hotword[inserted]][chunk.type] += 1
    kinds = ("equal", "substitute", "insert", "delete")
    biased, unbiased = (ErrorCounts(*(counts[of][kind] for kind in kinds)) for of in (True, False))
    said, written = (
        tuple(" ".join(text[start:end]) for start, end in found) for text, found in zip(texts, spans, strict=True)
    )
    unsaid = {" ".join(word) for word in listed}.difference(said)
    return HotwordErrors(biased, unbiased, said, written, tuple(sorted(unsaid)))


@functools.lru_cache(maxsize=4096)
def hotword_units(
    hotwords: tuple[str, ...], normalizer: Normalizer, language: str | None
) -> frozenset[tuple[str, ...]]:
    """Return the hotwords as they are compared, each as its `units`. Raises ValueError for one that is empty then."""
    listed = {word: tuple(units(normalize(word, normalizer, language))) for word in hotwords}
    if empty := [word for word, parts in listed.items() if not parts]:
        raise ValueError(f"the hotword {empty[0]!r} is empty after {normalizer!r} normalisation; leave it out")
    return frozenset(listed.values())


def hotword_spans(text: Sequence[str], listed: Collection[tuple[str, ...]]) -> list[tuple[int, int]]:
    """Return (start, end) of each hotword in the units of a text, from left to right; the longest where several begin.

    >>> hotword_spans("the hague and the alps".split(), {("the", "hague"), ("alps",)})
    [(0, 2), (4, 5)]
    """
    lengths = sorted({len(word) for word in listed}, reverse=True)
    spans, start = [], 0
    while start < len(text):
        length = next((n for n in lengths if tuple(text[start : start + n]) in listed), 0)
        if length:
            spans.append((start, start + length))
        start += length or 1
    return spans


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
    language = language_code(language)
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
