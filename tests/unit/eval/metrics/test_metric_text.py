import pytest
from hypothesis import given
from hypothesis import strategies as st

from audiorl.eval.metrics import CorpusErrors, ErrorCounts, cer, char_errors, normalize, wer, word_errors
from audiorl.eval.metrics.text import join_unspaced, script_counts, spell_numbers, units


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
    assert word_errors("", "").rate == 0.0
    assert word_errors("", "a b").rate == 1.0
    assert word_errors("a b", "").rate == 1.0
    corpus = wer(["", "a b"], ["x", "a b"])
    assert (corpus.rate, corpus.mean) == (0.5, 0.5)
    with pytest.raises(ValueError, match="no utterances"):
        wer([], [])
    with pytest.raises(ValueError, match="no utterances"):
        _ = CorpusErrors(()).mean
    with pytest.raises(ValueError, match="2 references but 1"):
        wer(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="not one text"):
        wer("ab", "ab")


def test_cer_ignores_spaces_only_where_they_mean_nothing() -> None:
    assert char_errors("今天 天气", "今天天气").rate == 0.0
    assert char_errors("a b", "ab").rate == pytest.approx(1 / 3)
    assert join_unspaced("play 音 乐 now please") == "play音乐now please"


def test_normalisers() -> None:
    assert normalize("Mr. Smith's twenty-one colours, uh, it's $5.", "english") == (
        "mister smith is 21 colors it is $5"
    )
    assert normalize("  Héllo, [noise] WÖRLD! ", "basic") == "héllo wörld"
    assert normalize("नमस्ते।", "basic") == "नमस्ते"  # vowel signs survive
    assert normalize(" A,  b ", "none") == "A, b"
    with pytest.raises(ValueError, match="'whisper'"):
        normalize("a", "whisper")  # type: ignore[arg-type]


def test_spelled_numbers() -> None:
    pytest.importorskip("num2words")
    assert normalize("21 Hunde", "basic", "de-DE") == "einundzwanzig hunde"
    assert spell_numbers("3.5", "fr") == "trois virgule cinq"
    assert spell_numbers("21", "zz") == "21"
    assert spell_numbers("In 7 days, 30.", "en") == "In seven days, thirty."
    for unchanged in ("1" + "0" * 400, "1234567", "mp3", "2nd", "3.1415", "1.2.3"):
        assert spell_numbers(unchanged, "en") == unchanged


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
