"""Error rates by hand and as an edit distance; the texts that Seed-TTS-eval compares, and its lists."""

from __future__ import annotations

import json
import re
import string
import unicodedata
from decimal import Decimal
from pathlib import Path

import jiwer
import pytest
from babel import Locale
from babel.numbers import format_decimal, get_decimal_symbol
from hypothesis import given
from hypothesis import strategies as st

from audiorl.data.seedtts import read_conversations, read_meta
from audiorl.eval.metrics import ErrorCounts, cer, char_errors, normalize, wer, word_errors
from audiorl.eval.metrics.text import (
    _CHINESE,
    Normalizer,
    compared,
    hotword_errors,
    join_unspaced,
    languages_of_number_words,
    script_counts,
    spell_numbers,
    units,
    utterance_errors,
)


def test_counts_of_each_kind() -> None:
    assert word_errors("a b c", "a x c d") == ErrorCounts(hits=2, substitutions=1, insertions=1, deletions=0)
    assert word_errors("a b c", "c") == ErrorCounts(hits=1, deletions=2)
    assert char_errors("abc", "abxc") == ErrorCounts(hits=3, insertions=1)
    assert word_errors("a b c", "a x c d").rate == pytest.approx(2 / 3)


def test_corpus_rate_weighs_by_length_and_mean_does_not() -> None:
    corpus = wer(["a b c d", "e"], ["a b c d", "x"])
    assert corpus.rate == pytest.approx(1 / 5)
    assert corpus.mean == pytest.approx((0 + 1) / 2)
    assert corpus.total == ErrorCounts(hits=4, substitutions=1)
    assert cer(["ab", "c"], ["ab", "d"]).rate == pytest.approx(1 / 3)


def test_empty_references_are_defined() -> None:
    assert [word_errors(*pair).rate for pair in (("", ""), ("", "a b"), ("a b", ""))] == [0.0, 1.0, 1.0]
    corpus = wer(["", "a b"], ["x", "a b"])
    assert (corpus.rate, corpus.mean) == (0.5, 0.5)
    for texts, message in (
        (([], []), "0 references"),
        ((["a", "b"], ["a"]), "2 references but 1"),
        (("ab", "ab"), "not one text"),
    ):
        with pytest.raises(ValueError, match=message):
            wer(*texts)


def test_cer_ignores_spaces_only_where_they_mean_nothing() -> None:
    assert char_errors("今天 天气", "今天天气").rate == 0.0
    assert char_errors("a b", "ab").rate == pytest.approx(1 / 3)
    assert join_unspaced("play 音 乐 now please") == "play音乐now please"


def test_normalisers() -> None:
    assert normalize("Mr. Smith's twenty-one colours, uh, it's $5.", "english") == (
        "mister smith is 21 colors it is $5"
    )
    assert normalize("Um acht", "english", "de") == normalize("Um 8", "english", "de") == "um acht"  # no filler there
    assert normalize("  Héllo, [noise] WÖRLD! ", "basic") == "héllo wörld"
    assert normalize("नमस्ते।", "basic") == "नमस्ते"  # vowel signs survive
    assert normalize(" A,  b ", "none") == "A, b"
    with pytest.raises(ValueError, match="'whisper'"):
        normalize("a", "whisper")  # type: ignore[arg-type]


def test_spelled_numbers() -> None:
    assert normalize("21 Hunde", "basic", "de-DE") == "einundzwanzig hunde"
    assert spell_numbers("3.5", "fr") == "trois virgule cinq"
    assert spell_numbers("21", "bo") == "21"  # nobody spells Tibetan's
    assert spell_numbers("50%", "ko") == "오십 퍼센트" and spell_numbers("-50", "vi") == "âm năm mươi"
    for language in languages_of_number_words():  # a sign that is lost makes a wrong number right
        assert len({normalize(text, "basic", language) for text in ("50", "-50", "50%")}) == 3, language
    with pytest.raises(ValueError, match="language 'zz' is unknown"):
        spell_numbers("21", "zz")
    assert spell_numbers("In 7 days, 30.", "en") == "In seven days, thirty."
    for unchanged in ("1" + "0" * 400, "mp3", "2nd", "1.2.3", "24.12.2024", "1.5km"):
        assert spell_numbers(unchanged, "en") == unchanged


LANGUAGES = (
    "en",
    "de",
    "de-CH",
    "fr",
    "es",
    "es-MX",
    "it",
    "pt",
    "ru",
    "pl",
    "tr",
    "hi",
    "ar",
    "fa",
    "zh",
    "ja",
    "ko",
    "th",
)
texts = st.text(
    st.sampled_from("aé'.,:%-– 019½²（１٣१三十百万点年\u200b\u00ad\u0301\u00a0ßİ٫٬$[]"), max_size=12
) | st.text(max_size=12)


@given(st.integers(0, 10**9), st.sampled_from(LANGUAGES), st.integers(0, 2))
def test_a_number_is_one_however_its_region_writes_it(number: int, language: str, decimals: int) -> None:
    plain, pattern = f"{number / 100:.{decimals}f}", "#,##0" + ((decimals and "." + "0" * decimals) or "")
    locale = Locale.parse(language, sep="-")
    grouped = format_decimal(Decimal(plain), pattern, locale, numbering_system="latn")
    sign = get_decimal_symbol(locale, numbering_system="latn")
    assert word_errors(grouped, plain.replace(".", sign), "basic", language).rate == 0.0, grouped


@given(texts, st.sampled_from(LANGUAGES), st.sampled_from(("basic", "english", "none")))
def test_a_text_is_itself_in_any_form(text: str, language: str, normalizer: Normalizer) -> None:
    written = normalize(text, normalizer, language)
    assert written == " ".join(written.split())
    for form in (
        unicodedata.normalize("NFD", text),
        "\u00ad".join(text),
        f"\ufeff{text}\u200b",
        text.replace("'", "’"),
    ):
        if normalizer != "none" or "’" not in form:
            assert normalize(form, normalizer, language) == written
    if normalizer == "basic":
        assert not re.search("[^\\W\\d_]*[\u0660-\u0669\u0966-\u096f\uff10-\uff19]", written)


def test_units_and_scripts() -> None:
    assert units("play 音乐 now, ok") == ["play", "音", "乐", "now,", "ok"]
    assert units("") == []
    assert script_counts("Ab1 音か한ж!") == {"latin": 2, "han": 1, "kana": 1, "hangul": 1, "cyrillic": 1}
    assert script_counts("ꯀ") == {"other": 1}


words = st.lists(st.sampled_from("abcd"), max_size=7)


def edit_distance(a: list[str], b: list[str]) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


@given(words, words)
def test_errors_are_the_edit_distance_and_counts_add_up(a: list[str], b: list[str]) -> None:
    counts = word_errors(" ".join(a), " ".join(b))
    assert counts.errors == edit_distance(a, b)
    assert counts.reference_length == len(a)
    assert counts.hits + counts.substitutions + counts.insertions == len(b)


@pytest.mark.parametrize(
    ("text", "language", "wanted"),
    [
        ("Don't, please – stop!", "en", "don't please stop"),
        ("a  b \u3000 c", "en", "a b c"),
        ("“Quoted” mother-in-law", "en", "quoted motherinlaw"),  # a hyphen goes without a space in its place
        ("你好，世界。", "zh", "你 好 世 界"),
        ("我有 2 个 apple", "zh", "我 有 2 个 a p p l e"),
        ("...", "en", ""),
        ("¿Qué «dice» l'ami?", "es", "qué dice l'ami"),  # languages that the benchmark lacks
        ("東京、まで。", "ja", "東 京 ま で"),
    ],
)
def test_texts_to_compare(text: str, language: str, wanted: str) -> None:
    assert compared(text, language) == wanted


@pytest.mark.parametrize(
    ("reference", "hypothesis", "language"),
    [
        ("Don't stop - go on, he said.", "dont stop, go on he says", "en"),
        ("One.", "one two three four", "en"),
        ("今天天气很好。", "今天 天汽好", "zh"),
        ("Same thing!", "same thing", "en"),
    ],
)
def test_rates_against_the_benchmarks_steps(reference: str, hypothesis: str, language: str) -> None:
    """Its script removes signs one by one, joins double spaces once, and asks jiwer."""
    texts = []
    for text in (reference, hypothesis):
        for sign in _CHINESE + string.punctuation:
            text = text if sign == "'" else text.replace(sign, "")
        text = text.replace("  ", " ")
        texts.append(" ".join(text) if language == "zh" else text.lower())
    wanted = jiwer.wer(*texts)
    assert utterance_errors(reference, hypothesis, language).rate == pytest.approx(wanted)


def test_meta_lines(tmp_path) -> None:
    file = tmp_path / "meta.lst"
    file.write_text("\ufeffa-1|Prompt one.|wavs/p1.wav|Say this.\n\nb.wav|p|p2.wav|And this|b_real.wav\nc|Only text\n")
    first, second, third = read_meta(file)
    assert (first.name, first.prompt_text, first.text) == ("a-1", "Prompt one.", "Say this.")
    assert first.prompt is not None and first.prompt.path == str(tmp_path / "wavs/p1.wav")
    assert (second.name, second.text) == ("b", "And this")
    assert (third.text, third.prompt, third.prompt_text) == ("Only text", None, "")


def test_conversations(tmp_path) -> None:
    file = tmp_path / "talks.jsonl"
    part = {"speaker": "A", "text": "Hi.", "start": 0, "duration": 1.5}
    rows = [
        {"id": "d1", "audio": "d1.wav", "turns": [part, {"speaker": "B", "text": "Ho.", "audio": "own.wav"}]},
        {"id": "d2", "turns": [{"speaker": "A", "text": "Hm.", "audio": "x/d2.wav"}]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns = [turn for talk in read_conversations(file) for turn in talk.turns]
    clips = [(t.speaker, t.audio.path, t.audio.duration) for t in turns if t.audio]
    paths = [str(tmp_path / name) for name in ("d1.wav", "own.wav", "x/d2.wav")]
    assert clips == [("A", paths[0], 1.5), ("B", paths[1], None), ("A", paths[2], None)]


TURN = {"speaker": "A", "text": "x"}


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_meta, "a|b|c\n", "line 1: field 3"),
        (read_meta, "a|p|p.wav|x\n\nb\n", "line 3: 1 fields"),
        (read_meta, "a|p|p.wav| \n", "line 1: the text is empty"),
        (read_meta, "|p|p.wav|x\n", "line 1: the name is empty"),
        (read_meta, "a|x\na|y\n", "line 2: 'a' is also the name of line 1"),
        (read_meta, "../a|x\n", "line 1: '../a' is no name"),
        (read_meta, "/a|x\n", "line 1: '/a' is no name"),
        (read_meta, "\n", "holds no utterance"),
        (read_conversations, "{", "row 1: not valid JSON"),
        (read_conversations, "[]", "an empty list"),
        (read_conversations, {"turns": []}, r"field 'turns': \[\] is not a list of turns; give at least one"),
        (read_conversations, {"turns": ["x"]}, r"field 'turns\[0\]': 'x' is not an object"),
        (read_conversations, {"turns": [TURN]}, r"field 'turns\[0\].audio': missing, neither here"),
        (read_conversations, {"turns": [TURN | {"text": " "}]}, r"field 'turns\[0\]\.text': ' ' is not a text"),
        (read_conversations, {"audio": "x", "turns": [TURN]}, r"field 'turns\[0\]\.start': missing; give seconds"),
        (
            read_conversations,
            {"audio": "x", "turns": [TURN | {"start": 0, "duration": 0}]},
            r"field 'turns\[0\]\.duration': 0 is not a duration",
        ),
    ],
)
def test_lists_that_cannot_be_used(tmp_path, read, content, message: str) -> None:
    file = tmp_path / "list"
    file.write_text(content if isinstance(content, str) else json.dumps({"id": "a"} | content))
    with pytest.raises(ValueError, match=message):
        read(file)


def test_a_normaliser_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def plain(text):\n    return text.replace('-', ' ').lower()\n"
        "def spoken(text, language):\n    return f'{language} {text}'\n"
        "def broken(text):\n    return text[999]\nvalue = 3\n"
    )
    mine = f"{tmp_path}/mine.py"
    assert normalize("Ice-cream  NOW", f"{mine}:plain") == "ice cream now"
    assert normalize("ja", f"{mine}:spoken", "de") == "de ja"
    assert word_errors("ice-cream", "Ice cream", f"{mine}:plain").rate == 0
    for name, message in (
        (f"{mine}:broken", r"normalizer .*mine\.py:broken fails on 'x': IndexError: string index out of range"),
        (f"{mine}:value", "'value' is a int, expected a function"),
        (f"{mine}:other", "defines no module-level name 'other'"),
        (f"{tmp_path}/none.py:f", "no such file"),
        ("whisper", "'whisper' is none of english, basic, none and FILE.py:FUNCTION"),
    ):
        with pytest.raises(ValueError, match=message):
            normalize("x", name)


def counts(*numbers: int) -> ErrorCounts:
    """Hits, substitutions, insertions, deletions."""
    return ErrorCounts(*numbers)


@pytest.mark.parametrize(
    ("reference", "hypothesis", "hotwords", "biased", "other", "missed", "false"),
    [
        # kerberos -> carbon is in a hotword, the -> a is not
        ("start the kerberos daemon", "start a carbon daemon", ["Kerberos"], (0, 1, 0, 0), (2, 1, 0, 0), 1, 0),
        # an inserted hotword counts to them, though nobody said it; another inserted word does not
        ("start it", "start zabbix it now", ["zabbix", "kerberos"], (0, 0, 1, 0), (2, 0, 1, 0), 0, 1),
        # a hotword in place of another word: the reference's word is none
        ("start it", "start zabbix", ["zabbix"], (0, 0, 0, 0), (1, 1, 0, 0), 0, 1),
        ("call ann and ann", "call ann", ["ann"], (1, 0, 0, 1), (1, 0, 0, 1), 1, 0),
        # of several words: "the" counts where "hague" follows it
        ("the town of the hague", "a town of a hague", ["The Hague"], (1, 1, 0, 0), (2, 1, 0, 0), 1, 0),
        ("the hague", "the", ["The Hague", "the"], (1, 0, 0, 1), (0, 0, 0, 0), 1, 1),
        ("去海牙吧", "去海呀吧", ["海牙"], (1, 1, 0, 0), (2, 0, 0, 0), 1, 0),
        ("", "zabbix", ["zabbix"], (0, 0, 1, 0), (0, 0, 0, 0), 0, 1),
    ],
)
def test_errors_in_hotwords_by_hand(reference, hypothesis, hotwords, biased, other, missed: int, false: int) -> None:
    found = hotword_errors(reference, hypothesis, hotwords, "basic")
    assert (found.biased, found.unbiased) == (counts(*biased), counts(*other))
    assert (len(found.missed), len(found.false)) == (missed, false)


@given(*[st.lists(st.sampled_from("abcde"), max_size=9)] * 2, st.sets(st.sampled_from("abcde"), min_size=1))
def test_hotword_errors_follow_jiwers_alignment(a: list[str], b: list[str], listed: set[str]) -> None:
    """Of single words, as in the sets of rare words: each column of the alignment is in a hotword or is not."""
    found = hotword_errors(" ".join(a), " ".join(b), sorted(listed))
    assert found.biased + found.unbiased == word_errors(" ".join(a), " ".join(b))
    assert found.biased.reference_length == sum(word in listed for word in a)
    columns = [
        (c.type, word in listed)
        for c in jiwer.process_words([" ".join(a)], [" ".join(b)]).alignments[0]
        for word in (b[c.hyp_start_idx : c.hyp_end_idx] if c.type == "insert" else a[c.ref_start_idx : c.ref_end_idx])
    ]
    for kind in ("substitute", "insert", "delete"):
        got = {"substitute": "substitutions", "insert": "insertions", "delete": "deletions"}[kind]
        assert getattr(found.biased, got) == columns.count((kind, True))


def test_a_hotword_that_the_normaliser_empties() -> None:
    with pytest.raises(ValueError, match="the hotword 'Um' is empty after 'english' normalisation"):
        hotword_errors("a", "a", ["Um"], "english")
