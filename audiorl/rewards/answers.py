"""Answers: the tags around them, the choice they name, symbolic maths, and the accuracy of audio question answering."""

from __future__ import annotations

import functools
import json
import logging
import re
import threading
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from audiorl.data.schema import FieldError
from audiorl.eval.metrics.text import (
    HAN_NUMERALS,
    INVISIBLE,
    JOINERS,
    han_value,
    languages_of_number_words,
    script_counts,
    spell_numbers,
)
from audiorl.languages import language_code, written_in
from audiorl.rewards.combine import check_options
from audiorl.types import Rollout, Sample, Score

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_THINK_BLOCK = re.compile(r"<think>.*?</think>", re.DOTALL)
_TAG = re.compile(r"</?(?:think|answer)>")
_LOOSE_TAG = re.compile(r"<\s*(/?)\s*(think|answer)\s*>", re.IGNORECASE)


def _with_plain_tags(text: str) -> str:
    """Return the text with "<Answer>" and "</answer >" as tags are written."""
    return _LOOSE_TAG.sub(lambda tag: f"<{tag[1]}{tag[2].lower()}>", text)


def after_think(text: str) -> str:
    """Return what follows the thinking. Also where the prompt opened the think tag and the response only closes it."""
    return _THINK_BLOCK.sub("", _with_plain_tags(text)).rpartition("</think>")[2]


def extract_answer(text: str) -> str | None:
    """Return the stripped text of the last well-formed `<answer>…</answer>` outside the thinking, or None.

    >>> extract_answer("<think>first <answer>A</answer></think> <answer> B </answer>")
    'B'
    """
    answers = _ANSWER.findall(after_think(text))
    return answers[-1].strip() if answers else None


def extract_think(text: str) -> str | None:
    """Return the stripped text up to the first `</think>`, without its opening tag; None if the thinking is not closed.

    >>> extract_think("<think> a dog </think><answer>B</answer>")
    'a dog'
    """
    before, closed, _ = _with_plain_tags(text).partition("</think>")
    head, opened, inner = before.partition("<think>")  # a second one would hide what stands before it
    return (inner if opened else head).strip() if closed else None


def strip_tags(text: str) -> str:
    """Return the response without its think and answer tags, their contents kept."""
    return _TAG.sub(" ", _with_plain_tags(text)).strip()


def final_text(text: str) -> str:
    """Return the `<answer>` text, else what follows the thinking; "" when the thinking never ends.

    Of a recogniser's response it is the transcript: what follows Qwen3-ASR's `<asr_text>`, and the contents of
    VibeVoice-ASR's list of segments.

    >>> final_text("language English<asr_text>good morning")
    'good morning'
    """
    answer, rest = extract_answer(text), after_think(text)
    if answer is not None:
        return answer
    return "" if "<think>" in rest else plain_transcript(strip_tags(rest))


def plain_transcript(text: str) -> str:
    """Return a transcript without what Qwen3-ASR and VibeVoice-ASR write around it: languages, times and speakers."""
    text = text.rpartition("<asr_text>")[2].strip()
    segments = text.removeprefix("assistant").strip()
    if not segments.startswith("["):
        return text
    try:
        return " ".join(segment["Content"] for segment in json.loads(segments))
    except (ValueError, KeyError, TypeError, RecursionError):  # no list of segments
        return text


# -- one text, however it is written -----------------------------------------------------------------------------------

_KEYCAP = "\u20e3"  # the frame of 2\ufe0f\u20e3
_SAME = str.maketrans(
    {"♯": "#", "♭": "b", "♮": " natural", "⁄": "/", "∕": "/", "−": "-"}
    | dict.fromkeys("‐‑‒–—―", "-")
    | dict.fromkeys("’‘ʼʻ′´", "'")
)


@functools.lru_cache(4096)
def _plain(text: str) -> str:
    """Return the text in NFKC with ASCII signs and nothing invisible; ② is "(2) ", Ⓑ and 🅱 are "(B) "."""

    if text.isascii():
        return text

    def ringed(char: str) -> str:
        if (digit := unicodedata.decimal(char, None)) is not None:
            return str(digit)
        name = unicodedata.name(char, "") if unicodedata.category(char) in ("So", "No") else ""
        value = unicodedata.numeric(char, 0.5) if "CIRCLED" in name else 0.5
        letter = re.search(r"LETTER ([A-Z])$", name)
        return f"({letter[1]}) " if letter else f"({value:.0f}) " if value % 1 == 0 else char

    text = "".join(map(ringed, JOINERS.sub("", INVISIBLE.sub("", text)).replace(_KEYCAP, "")))
    # NFKC alone makes 31/2 of 3½, 102 of 10², and two numbers of 1 000 with a narrow space.
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text)
    text = re.sub(r"(?<=[0-9])(?=[⁰¹²³⁴-⁹⁻])", "^", text)
    text = re.sub(r"(?<=\b[A-Ga-g]) (?=[♯♭])", "", text)
    text = re.sub(r"(?<=\d)[\u00a0\u2009\u202f](?=\d{3}(?!\d))", "", text)
    return unicodedata.normalize("NFKC", text.translate(_SAME)).translate(_SAME)


_BRACES = r"\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
_WRAPPERS = tuple(
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), inside)
    for pattern, inside in (
        (r"(\$\$?)(?=[^\s$])([^$]*?)(?<=[^\s$])\1(?!\d)", r"\2"),  # not the prices of "$5 and $6"
        (
            r"\\(?:mbox|text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|it|rm|sf|tt)|emph|underline|bm|boldsymbol)" + _BRACES,
            r"\1",
        ),
        (r"\\(?:boxed|fbox)" + _BRACES, r" answer: \1\n"),  # where a text has a box, it gives the answer there
        (r"(\^?)\\(sharp|flat|circ)(?![a-z])", lambda m: {"sharp": "#", "flat": "b", "circ": "°"}[m[2].lower()]),
        (r"```(?:\w*\n)?(.*?)```", r"\1"),
        (r"`([^`]*)`", r"\1"),
        (r"<(b|strong|i|em|u|p|span|code|mark|font)(?:\s[^<>]*)?>(.*?)</\1\s*>", r"\2"),
        (r"(?<![\w*])(\*{1,3})(?=[^\s*])(.*?)(?<=[^\s*])\1(?![\d*])", r"\2"),  # not the products of 2*3*4 and 2**3
        (r"(?<!\w)(_{1,3})(?=[^\s_])(.*?)(?<=[^\s_])\1(?!\w)", r"\2"),
        (r"\\[()\[\],;:! ]|\\q?quad(?![a-z])|\\(?:left|right|displaystyle)(?![a-z])", " "),
        (r"\\([%$#&_*.-])", r"\1"),
        (r"^\s*(?:#{1,6}|[-*•>](?!\s*\.?\d))\s+", ""),  # a heading, an item of a list, a quotation
    )
)


@functools.lru_cache(4096)
def _unwrapped(text: str) -> str:
    """Return the plain text without the marks of Markdown, LaTeX and HTML around words; a box is "answer: …"."""
    text, before = re.sub(r"\s+", lambda space: "\n" if "\n" in space[0] else " ", _plain(text)), None
    while text != before:  # "$\boxed{\text{**B**}}$"; each turn makes it shorter, but for boxes, which it uses up
        before = text
        for pattern, inside in _WRAPPERS:
            text = pattern.sub(inside, text)
    return text.strip()


def normalize_text(text: str) -> str:
    """Return the text without differences of case, punctuation and space: "Acoustic-guitar. " -> "acoustic guitar".

    What carries meaning stays: signs, points and slashes of numbers ("-5", "3/4"), "%", and the sharp of "C#".
    """
    padded = " " + _plain(text).casefold().replace("'", "") + " "  # don't -> dont
    kept = []
    for before, char, after in zip(padded, padded[1:], padded[2:], strict=False):
        numeric = after.isdigit() and (before.isdigit() or (not before.isalnum() and char in "-."))
        kept.append(char if char in "%#" or numeric or not unicodedata.category(char).startswith("P") else " ")
    return " ".join("".join(kept).split())


@functools.lru_cache(4096)
def _folded(text: str) -> str:
    return re.sub(r"^- (?=\d)", "-", " ".join(_unwrapped(text).casefold().split()))


@functools.lru_cache(4096)
def _normal(text: str) -> str:
    return normalize_text(_folded(text))


@functools.lru_cache(4096)
def _without_article(text: str) -> str:
    """Return the normal text without an article in front; "A minor" is a key."""
    text = re.sub(r"^(?:an?|the)\s+(?=[\w\"'])(?!(?:major|minor|maj|min|sharp|flat)\b)", "", _folded(text))
    return normalize_text(text)


@functools.cache
def _number_words() -> tuple[re.Pattern[str], Callable[[re.Match[str]], str]]:
    """Return a pattern of one English number in words, and its digits.

    Whisper's normaliser alone makes 34 of "three four", the time signature, and leaves "one" as a pronoun.
    """
    from whisper_normalizer.english import EnglishNumberNormalizer

    english = EnglishNumberNormalizer()
    ones, ordinals = "|".join(w for w, value in english.ones.items() if value < 10), "|".join(english.ones_ordinal)
    below_100 = f"(?:(?:{'|'.join(english.tens)})(?: (?:{ones}|{ordinals}))?|{'|'.join(english.ones)}|{ordinals})"
    below_1000 = f"(?:{below_100}(?: hundred(?:(?: and)? {below_100})?)?)"
    number = f"zero|{below_1000}(?: (?:thousand|million|billion)(?:(?: and)? {below_1000})?)*"
    return re.compile(rf"\b(?:{number})\b"), lambda m: " ".join(english.process_words(m[0].split()))


@functools.lru_cache(4096)
def _loose(text: str) -> str:
    """Return the normal text with numbers as digits, notes with # and b, and no space before a unit."""
    text = re.sub(r"(?<=\d)(?: - | ?– ?| to )(?=\d)", "-", _folded(text).replace("&", " and "))  # a range
    text = re.sub(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0].replace(",", ""), text)
    text = re.sub(r"(?<![\w.])\+(?=\d)", "", text)
    text = _without_article(re.sub(r"\ba (?=hundred|thousand|million)", "one ", text))
    text = re.sub(r"\b([a-g]) (sharp|flat)\b", lambda m: m[1] + ("#" if m[2] == "sharp" else "b"), text)
    number, digits = _number_words()
    text = number.sub(digits, text.replace("ninth", "nineth"))  # the table's spelling
    text = text.replace("百分之百", "百分之一百")
    text = HAN_NUMERALS.sub(lambda m: str(m[0] if (value := han_value(m[0])) is None else value), text)
    for pattern, written in (
        (r"(?<=\d) point (?=\d)", "."),
        (r"\b(?:minus|negative) (?=\d)", "-"),
        (r"(?<=\d) ?(?:percent|per cent|pct)\b", "%"),
        (r"百分之(\d+)", r"\1%"),
        (r"(?<=\d) (?=[^\W\d]|[%°])", ""),  # 5dB, 20 °C
    ):
        text = re.sub(pattern, written, text)
    return text


@functools.lru_cache(4096)
def _unaccented(text: str) -> str:
    """Return the loose text without the accents of Latin letters."""
    return _without_accents(_loose(text))


def _without_accents(text: str) -> str:
    return re.sub(r"(?<=[a-z])[\u0300-\u036f]+", "", unicodedata.normalize("NFD", text))


# -- numbers in words of other languages -------------------------------------------------------------------------------


@functools.lru_cache(4096)
def _bare(text: str, language: str = "") -> str:
    """Return the normal text without the accents of Latin letters; with a `language`, numbers in its words."""
    return _without_accents(normalize_text(spell_numbers(_folded(text), language) if language else _folded(text)))


@functools.cache
def _small_numbers(language: str) -> frozenset[str]:
    return frozenset(_bare(str(number), language) for number in (*range(101), *range(200, 1001, 100)))


@functools.lru_cache(1024)
def _languages_in_script(text: str) -> tuple[str, ...]:
    """Return the languages that may be that of a text by its script, with words for numbers; none of mixed scripts."""
    scripts = set(script_counts(text))
    return tuple(c for c in languages_of_number_words() if scripts <= set(written_in(c))) if len(scripts) == 1 else ()


# From the text itself to what only its sense has in common with it. The first under which a text equals a choice
# decides: two choices that differ never become one.
_FORMS: tuple[Callable[[str], str], ...] = (str.strip, _folded, _normal, _without_article, _loose, _unaccented)


# -- which choice a text names -----------------------------------------------------------------------------------------

# What stands before a label, the label, the marks up to a word or a signed number, and the rest.
_LABEL = re.compile(
    r"([\W_]*)([A-Za-z](?![A-Za-z])|\d{1,2}(?!\d))((?:(?![-+]\.?\d|(?<=\s)\.\d)[^\w#+$€£¥%@&°=≠~^<\\])*)(.*)", re.DOTALL
)
_LEAD = re.compile(
    r"""(?:\b(?:(?:the|my|your|so|final|correct|right|best|most\ likely)\ )*(?:answer|option|choice)
        (?:\ to\ (?:the|this|your)\ question)?["']?\s*(?:\b(?:is|was|would\ be|should\ be|must\ be)\b|[:=])
    |\b(?:ans|selected|selection|solution|response|result)\s*:
    |^(?:select|choose)\ (?=[A-Z]\b)
    |\bI(?:\ would|\ will|'d|'ll)?\ (?:choose|pick|select|go\ with|say|believe|think)\b(?:\ that)?(?:\ it(?:\ i|')s\b)?
    |\b(?:antwort|réponse|respuesta|resposta|risposta|ответ)\b(?:\ corr\w+)?\s*(?:(?:ist|lautet|est|es|é|è)\b|:|-\s)
    |(?:答案|选项|選項|答え|正解|正答|选择|選擇)(?:应该|應該)?[是为為は:]?|[选選]
    |(?:정답|답)[은는:]
    )[\s:]*(?:-\s+)?(?:(?:most\ )?(?:likely|probably)\ )?""",
    re.VERBOSE | re.IGNORECASE,
)
_BARE_LEAD = re.compile(
    r"(?:(?:it is|it's|that's|this is|(?:so|thus|therefore|hence),?)\s+"
    r"|(?:the )?(?:(?:correct|right|final|best) )?(?:answer|option|choice|letter)\s+)+",
    re.IGNORECASE,
)
_CONFIRMED = re.compile(
    r"(?:\s+is\s+(?:the\s+)?(?:(?:most likely|best|only)\s+)?(?:correct|right|answer|option|choice)"
    r"(?:\s+(?:answer|option|choice|one))?|\s*是?(?:正确|正確|对|對)(?:的|答案|选项)*|\s*(?:입니다|です))\W*$",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r"(.+?)(?:[,;:.!]\s+|\s+-\s+|\n|\s+(?=because\b|since\b))(.+)", re.DOTALL | re.IGNORECASE)
_EXPLAINS = re.compile(
    r"(?:it|i|he|she|they|we|you|this|that|these|those|there|because|since|as|explanation|reason(?:ing)?|based on"
    r"|options?|choices?|the (?:audio|sounds?|speakers?|recording|clip|music|voices?|others?|man|woman|animal))\b",
    re.IGNORECASE,
)
_DISMISSED = re.compile(
    r"(?:\b(?:the )?(?:other|remaining) (?:options|choices|answers|ones)|\b(?:the )?others"
    r"|(?:\b(?:options?|choices?|answers?) )?(?:\(?\b[A-Z]\b\)?(?:,? and |,? or |, |/)?(?:options? |choices? )?)+)"
    r"\s*(?:(?:is|are|was|were|do|does|can|could|would|must) ?)(?:not\b|n't\b|wrong\b|incorrect\b|false\b|unlikely\b)",
)
_NOT = re.compile(
    r"\b(?:not|no|never|cannot|wrong|incorrect|false|unlikely|except|nicht|keine?|pas|нет|не)\b|n't\b|[不非没沒未错錯]",
    re.IGNORECASE,
)
_OR = re.compile(
    r"\b(?:or|either|neither|nor|both|maybe|perhaps|possibly|might|may|could|but)\b|或|还是|還是", re.IGNORECASE
)
_CONTRADICTION = -1
_LONGEST = 1000  # characters that are searched: what declares an answer stands at the end of a longer text


class _Choices:
    """The choices of a question, by what they are called."""

    def __init__(self, choices: tuple[str, ...], language: str | None) -> None:
        self.count, self.language = len(choices), language
        # A label is one only where all choices have theirs: "J. Smith" has an initial, "A-flat" and "1:30" have none.
        parts = [part for part in map(_split_label, map(_unwrapped, choices)) if part and part[1] and part[2]]
        labels = [label.upper() for label, _, _ in parts]
        self.numbered = self.count > 1 and labels == [str(i + 1) for i in range(self.count)]
        lettered = self.count > 1 and labels == [chr(ord("A") + i) for i in range(self.count)]
        bare = [rest for _, _, rest in parts] if self.numbered or lettered else []
        self.texts = (choices, tuple(bare))
        self.words = [_loose(text) for text in bare or choices]

    def by_text(self, text: str, first: int, end: int) -> int | None:
        """Return the choice that equals a text under the first form under which one does."""
        for form in _FORMS[first:end]:
            wanted = form(text)
            for texts in self.texts:
                named = [i for i, choice in enumerate(texts) if form(choice) == wanted != ""]
                if named:
                    return named[0] if len(named) == 1 else None
        return None

    def by_number(self, text: str) -> int | None:
        """Return the choice with the number of a text where one has it in digits and the other in words that are not
        English or Han: "2 Hunde" for "zwei Hunde", "три" for "3".

        Their language is the sample's. Where it names none, choices in words show it if all are numbers of one language
        before and after the same words, and an answer in words if the languages of its script, other than Latin, agree.
        """
        choices, folded = self.texts[1] or self.texts[0], _folded(text)
        number = re.search(r"\d+(?:[.,]\d+)*", folded)
        in_digits = [re.search(r"\d", choice) is not None for choice in choices]
        if len(folded) > 4 * max(map(len, choices), default=0) + 40 or (
            any(in_digits) if number else not any(in_digits)
        ):
            return None
        known = self.language and (language_code(self.language),)
        found = set[int]()
        for language in known or _languages_in_script(_bare(" ".join(choices) if number else folded)):
            if number is None and not known and written_in(language) == ("latin",):
                return None  # "elf" is 11 in German
            if number is None:
                named = {
                    i for i, choice in enumerate(choices) if in_digits[i] and _bare(choice, language) == _bare(folded)
                }
            elif named := {i for i, choice in enumerate(choices) if _bare(choice) == _bare(folded, language)}:
                before, after = _bare(folded[: number.start()]), _bare(folded[number.end() :])
                between = (
                    re.fullmatch(rf"{re.escape(before)}(.*){re.escape(after)}", _bare(choice)) for choice in choices
                )
                numbers = sum(bool(m) and m[1].strip() in _small_numbers(language) for m in between if m)
                if numbers < (2 if known else len(choices)):  # "on" is 10 in Turkish, and "off" no number
                    named = set()
            found |= named
        return found.pop() if len(found) == 1 else None

    def by_label(self, label: str) -> int | None:
        """Return the choice of a letter, or of a number where the choices have numbers."""
        index = ord(label.upper()) - ord("A") if label.isalpha() else int(label) - 1 if self.numbered else -1
        return index if 0 <= index < self.count else None

    def named(self, text: str, depth: int = 0) -> int | None:
        """Return the choice that a text names, `_CONTRADICTION` for a label with the words of another choice."""
        if (index := self.by_text(text, 0, 2)) is not None or not (text := _unwrapped(text)) or depth == 6:
            return index
        depth, label, clear, rest = depth + 1, None, False, ""
        if (parts := _split_label(text)) and (label := self.by_label(parts[0])) is not None:
            _, clear, rest = parts
            said = self.named(rest, depth) if rest else None
            if said == label or (clear and said is not None):
                return label if said == label else _CONTRADICTION
        if (index := self.by_text(text, 2, 6)) is not None or (index := self.by_number(text)) is not None:
            return index
        if label is not None and (not rest or (clear and self.fits(rest, label))):
            return label
        match = re.fullmatch(r"(.*\S)\s*[(\[【]([A-Za-z])[)\]】]\W*", text, re.DOTALL)  # cat (B)
        if match and (index := self.named(match[1], depth)) is not None:
            return index if index == self.by_label(match[2]) else _CONTRADICTION
        match = _CLAUSE.fullmatch(text)
        if match and (index := self.named(match[1], depth)) is not None:
            explained = index != _CONTRADICTION and self.fits(match[2], index)
            if explained and (_EXPLAINS.match(match[2]) or self.words[index] in ("yes", "no", "true", "false")):
                return index
        if match := _CONFIRMED.search(text):
            return self.named(text[: match.start()], depth)
        if (answer := _declared(text)) != text:
            return self.named(answer, depth)
        if match := _BARE_LEAD.match(text):
            return self.named(text[match.end() :], depth)
        return None

    def fits(self, rest: str, index: int) -> bool:
        """Return whether what follows a choice may explain it: no "not", no "or", no other choice.

        A sentence of its own may say what is not heard, and that the others are wrong; only another label, or another
        answer that it declares, takes the choice back.
        """
        own = chr(ord("A") + index)
        if _EXPLAINS.match(rest):
            kept = _DISMISSED.sub(lambda others: others[0] if own in _labels(others[0]) else " ", rest)
            taken_back = re.search(
                rf"(?:\bnot|n't|\bnever)\b[^.]*\b{own}\b|\b(?:wrong|incorrect|not (?:right|true|correct))\b", kept
            )
            declared = self.named(_declared(kept), 5) if _LEAD.search(kept) else None
            for hedge in re.findall(r"\b(?:may|might|could|maybe|perhaps|possibly)\b[^.]*", kept, re.IGNORECASE):
                left = f" {_loose(hedge)} ".replace(f" {self.words[index]} ", " | ")
                if any(word and f" {word} " in left for word in self.words):
                    return False
            return not taken_back and declared in (None, index) and _labels(kept) <= {own}
        if _OR.search(rest) or (_NOT.search(rest) and not _NOT.match(self.words[index])):  # but "No, it is not"
            return False
        if not _labels(rest) <= {own}:
            return False
        left = f" {_loose(rest)} "
        for i in sorted(range(self.count), key=lambda i: -len(self.words[i])):  # "dog barking" before "dog"
            if self.words[i] and f" {self.words[i]} " in left:
                if i != index:
                    return False
                left = left.replace(f" {self.words[i]} ", " | ")
        return True


def _labels(text: str) -> set[str]:
    """Return the letters in a text that may be labels: neither "I hear" nor "A dog"."""
    found = re.findall(r"(?<![\w'])[A-Z](?![\w'+#])|\b[a-z](?=\))", re.sub(r"\b[AI](?= [a-z])", "", text))
    return {letter.upper() for letter in found}


def _split_label(text: str) -> tuple[str, bool, str] | None:
    """Return (label, whether its marks make it clearly one, rest), None for a text without a label in front."""
    match = _LABEL.fullmatch(text)
    if match is None:
        return None
    before, label, marks, rest = match.groups()
    if not all(c.isspace() or c in "\"'<|-*•>.:" or unicodedata.category(c) in ("Ps", "Pi") for c in before):
        return None  # "!B" denies
    letter = unicodedata.category(rest[:1] or " ") == "Lo"  # of a script without case: "B猫" has a label, "Bé" has none
    if rest and not marks and not letter:
        return None
    closed = any(unicodedata.category(c) in ("Pe", "Pf") or c in ">|\n" for c in marks)
    marked = marks.strip(" '/-") != "" and not rest[:1].isdigit()
    return label, closed or marked or (bool(marks.strip()) and marks[-1].isspace()), rest


def _declared(text: str) -> str:
    """Return what follows the last "the answer is", or the text; "I don't think the answer is B" declares nothing."""
    leads = list(_LEAD.finditer(text))
    if not leads:
        return text
    clause = re.split(r"[.,;:!?。，；！？\n]", text[: leads[-1].start()])[-1]
    return "" if _NOT.search(clause) or _OR.search(clause) else text[leads[-1].end() :]


@functools.lru_cache(1024)
def _choices(choices: tuple[str, ...], language: str | None) -> _Choices:
    return _Choices(choices, language)


def match_choice(text: str, choices: Sequence[str], language: str | None = None) -> int | None:
    """Return the index of the choice that `text` names, None if it names none or more than one.

    A choice is named by its words or its letter in any brackets and marks of Markdown and LaTeX, with "the answer is"
    or an explanation around it. Its own words come first, so a choice that happens to be called "A" is found by name;
    comparison goes from exact to loose, which keeps "C" and "C#" apart. A letter with the words of another choice, "not
    B" and "B or C" name none. Numbers in words of the `language` (English and Chinese are always read) are those in
    digits, in their basic form: "zwei" is 2, "ein Hund" not 1.
    """
    index = _choices(tuple(choices), language).named(text[-_LONGEST:])
    return None if index == _CONTRADICTION else index


def same_answer(
    answer: str, gold: str, choices: Sequence[str] = (), maths: bool = True, language: str | None = None
) -> bool:
    """Return whether an answer says what `gold` says: the rule of rewards and evaluations.

    With choices, an answer that names one is right exactly when it names gold's. Otherwise texts that are equal up to
    their writing are equal, and with `maths` expressions that are so symbolically; among choices only one may be.
    """
    named, wanted = (match_choice(text, choices, language) if choices else None for text in (answer, gold))
    if named is not None:
        if wanted is not None:
            return named == wanted
        answer = choices[named]
    if wanted is not None:
        plain = _unwrapped(answer)
        return maths and [i for i, choice in enumerate(choices) if maths_equal(plain, _plain(choice))] == [wanted]
    if answer.strip() == gold.strip():
        return bool(answer.strip())
    answer, gold = _declared(_unwrapped(answer[-_LONGEST - 4 * len(gold) :])), _unwrapped(gold)
    spelled = [_bare(text, language_code(language)) if language else "" for text in (answer, gold)]  # deux is 2
    alike = any(form(answer) == form(gold) != "" for form in _FORMS[:-1]) or spelled[0] == spelled[1] != ""
    return alike or (maths and maths_equal(answer, gold))


MAX_LENGTH = 100
TIMEOUT = 2  # seconds, per parse and per comparison

_COMMANDS = {"sqrt", "pi", "sin", "cos", "tan", "log", "ln"}
_WORD = re.compile(r"(\\?)([A-Za-z]+)")
_ALLOWED = re.compile(r"[\w\s+\-*/^().,=%{}\\$]*", re.ASCII)
_EXPONENT = re.compile(r"\^\s*(?:-?(\d{1,3}|[A-Za-z])(?![\w.^])|\{\s*-?(\d{1,3}|[A-Za-z])\s*(?:/\s*\d{1,3}\s*)?\})")
_MAX_POWER = 1000  # of all exponents multiplied: beyond it evaluation may take minutes inside one uninterruptible call


def looks_like_maths(text: str) -> bool:
    """True when all of `text` is one expression: a digit or a LaTeX command, no words, no huge powers."""
    text = text.strip()
    if not text or len(text) > MAX_LENGTH or not _ALLOWED.fullmatch(text) or "_" in text:
        return False
    words = [(bool(slash), word) for slash, word in _WORD.findall(text)]
    if any(not latex and len(word) > 1 and word not in _COMMANDS for latex, word in words):
        return False
    latex_commands = any(latex for latex, _ in words)
    variables = any(not latex and len(word) == 1 for latex, word in words)
    if variables and not latex_commands and not re.search(r"[\^*/+=]", text):
        return False  # "B", "A4", "C 7": letters and names of notes, not products
    if not (latex_commands or re.search(r"\d", text)) or re.search(r"\d\s+\d", text):
        return False  # "1 2" is a list, which the parser would add up
    if re.fullmatch(r"(\d[\d.,]*%?\s*-\s*)+\d[\d.,]*%?", text):
        return False  # "20-30" is a range, "2-1" a score, "2024-01-15" a date
    text, power = text.replace("**", "^"), 1
    exponents = _EXPONENT.findall(text)
    for bare, braced in exponents:
        power *= int(bare or braced) if (bare or braced).isdigit() else 1
    return len(exponents) == text.count("^") and power <= _MAX_POWER


def maths_equal(a: str, b: str) -> bool:
    """Return whether both sides are expressions and symbolically equal. Whatever cannot be parsed in time is not equal.

    Words are not maths: "e minor" must not become Euler's number, nor "3 birds" equal "3 dogs". But 6/8 equals 3/4.
    """
    if not (looks_like_maths(a) and looks_like_maths(b)):
        return False
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    # The library's timeouts use SIGALRM, which exists only in the main thread. Elsewhere the guards above must do.
    in_main = threading.current_thread() is threading.main_thread()
    seconds = TIMEOUT if in_main else None
    quiet = logging.getLogger("math_verify")
    level = quiet.level
    quiet.setLevel(logging.ERROR)  # it warns once about every missing or expired timeout
    try:
        # Only the LaTeX reader, without fallback: the others would read "1/" as 1.
        config = [LatexExtractionConfig()]
        # The library takes 50% for 50 as well as for 0.5.
        shares = (re.sub(r"(\d[\d,.]*)\s*\\?%", r"(\1/100)", x) for x in (a, b))
        texts = (x.strip().strip("$").removesuffix(".").replace("**", "^") for x in shares)
        left, right = (parse(f"${x}$", config, fallback_mode="no_fallback", parsing_timeout=seconds) for x in texts)
        if not left or not right:
            return False
        # verify is not symmetric (it may simplify only one side), equality is
        return bool(verify(left, right, timeout_seconds=seconds) or verify(right, left, timeout_seconds=seconds))
    except (Exception, TimeoutException):  # a model's output may break the parser in any way; that is a wrong answer
        return False
    finally:
        quiet.setLevel(level)


def language_of(sample: Sample) -> str | None:
    """Return sample.metadata["language"], if it has one. Raises ValueError for an unknown one."""
    language = sample.metadata.get("language")
    if not isinstance(language, str) or not language:
        return None
    try:
        language_code(language)
    except ValueError as error:
        raise FieldError("language", f"sample {sample.id!r}: {error}") from error
    return language


Fallback = Literal["none", "text", "last_line"]


@dataclass(frozen=True)
class AnswerAccuracy:
    """1 if the answer equals a reference, else 0.

    The answer is the text of the last well-formed <answer> outside the thinking. Without one, `fallback` decides:
    "none" scores 0, "text" takes all that follows the thinking, "last_line" its last line that is not empty. To a
    conversation that ends without tags itself (`metadata["last_turn"]`) it is all that follows the thinking.

    An answer equals a reference by `same_answer`: it names the reference's choice, has its words however they are
    written, or with `maths` is an expression of the same value. `strict` is the rule of Ke-Omni-R's released reward:
    symbolic maths, else exact equality of the stripped texts. Raises ValueError for a sample without references.
    """

    strict: bool = False
    maths: bool = True
    fallback: Fallback = "none"

    def __post_init__(self) -> None:
        check_options(self, fallback=get_args(Fallback))

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(float(self.correct(r.text, r.sample))) for r in rollouts]

    def check(self, sample: Sample) -> None:
        if not sample.references:
            raise FieldError("answer", f"AnswerAccuracy: sample {sample.id!r} has no reference answer")
        language_of(sample)

    def correct(self, text: str, sample: Sample) -> bool:
        self.check(sample)
        answer = extract_answer(text)
        plain = "<answer>" not in sample.metadata.get("last_turn", "<answer>")
        fallback = "text" if self.fallback == "none" and plain else self.fallback
        if answer is None and fallback != "none":
            answer = final_text(text)
            answer = answer if fallback == "text" else answer[answer.rfind("\n") + 1 :].strip()
        if not answer:
            return False
        if self.strict:
            return any(
                answer == gold.strip() or (self.maths and maths_equal(answer, gold)) for gold in sample.references
            )
        language = language_of(sample)
        return any(same_answer(answer, gold, sample.choices, self.maths, language) for gold in sample.references)
