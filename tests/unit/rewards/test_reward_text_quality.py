"""Captions, languages, lengths, repetition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audiorl.eval.metrics.corpus import DocumentFrequencies, cider_d
from audiorl.rewards import CaptionQuality, LanguageConsistency, Overlong, Repetition
from audiorl.types import Rollout, Sample

REFERENCES = (
    ("a dog barks in the rain", "a dog is barking"),
    ("music plays softly", "soft music"),
    ("a man speaks while a dog barks",),
)
# Cider().compute_score of pycocoevalcap 1.2 gives these.
PUBLISHED = {
    "a dog barks": 1.49874584,
    "music music music plays": 1.1043762,
    "a dog barks in the rain": 0.64528428,
}
SAMPLES = [Sample(str(i), (), texts) for i, texts in enumerate(REFERENCES)]


def test_cider_d_is_that_of_its_released_code() -> None:
    frequencies = DocumentFrequencies.of(REFERENCES)
    for (caption, value), references in zip(PUBLISHED.items(), REFERENCES, strict=True):
        assert cider_d(caption, references, frequencies) == pytest.approx(value, abs=1e-7)


def test_the_reward_reads_the_answer_and_ignores_case(make_rollout: Callable[..., Rollout]) -> None:
    reward = CaptionQuality.of(SAMPLES)
    texts = ("A DOG barks.", "<think>music plays</think><answer>a dog barks</answer>", "", "<think>a dog barks")
    scores = reward([make_rollout(text, references=REFERENCES[0]) for text in texts])
    assert [s.total for s in scores] == pytest.approx([0.149874584, 0.149874584, 0.0, 0.0], abs=1e-8)


def test_captions_of_scripts_without_spaces_are_compared_by_characters(make_rollout: Callable[..., Rollout]) -> None:
    captions = ("一只狗在雨中叫", "音乐轻轻地响", "一个男人说话")
    reward = CaptionQuality.of([Sample(c, (), references=(c,)) for c in captions])
    same, near, other = reward(
        [make_rollout(c, references=captions[:1]) for c in ("一只狗在雨中叫", "狗在雨中叫", "音乐轻轻地响")]
    )
    assert same.total > near.total > 0.4 and other.total == 0.0


def test_repeated_and_frequent_words_earn_little(make_rollout: Callable[..., Rollout]) -> None:
    reward = CaptionQuality.of(SAMPLES)

    def score(text: str) -> float:
        return reward([make_rollout(text, references=REFERENCES[1])])[0].total

    assert score("soft music") > score("soft soft soft music music music") > score("a dog")
    assert score("a dog") == 0.0


def test_bad_input(make_rollout: Callable[..., Rollout]) -> None:
    with pytest.raises(ValueError, match="sample 'clip-7' has no reference caption"):
        CaptionQuality.of(SAMPLES)([make_rollout("a dog")])
    with pytest.raises(ValueError, match="references of 1 clips do not say which words are rare"):
        CaptionQuality.of(SAMPLES[:1])


EN = "the dog barks twice and then a door is closed slowly"
DE = "der Hund bellt zweimal und danach wird eine Tür langsam geschlossen"
ZH = "狗叫了两声然后有人慢慢地把门关上了我觉得这是一个院子里的声音"
JA = "犬が二回吠えてから誰かがゆっくりとドアを閉めたように聞こえました"
RU = "собака лает два раза, потом кто-то медленно закрывает дверь"


def value(text: str, target: str, **options) -> float:
    return LanguageConsistency(**options).value(text, target)


@pytest.mark.parametrize(("text", "language"), [(EN, "en"), (DE, "de"), (ZH, "zh"), (JA, "ja"), (RU, "ru")])
def test_only_the_right_language_scores_one(text: str, language: str) -> None:
    scores = {target: value(text, target) for target in ("en", "de", "zh", "ja", "ru")}
    assert scores.pop(language) == 1.0
    assert max(scores.values()) <= 0.6  # Japanese shares its Han characters with Chinese
    if language in ("en", "de", "zh"):
        assert set(scores.values()) == {0.0}


@pytest.mark.parametrize(
    ("text", "target", "options", "expected"),
    [
        ("", "en", {}, 0.0),
        (" \n", "en", {}, 0.0),
        ("42 + 1", "en", {}, 1.0),  # no letters: fits every language
        ("Hund", "en", {}, 1.0),  # below min_letters only the script counts
        ("狗", "ja", {}, 1.0),
        (DE, "en", {"min_letters": len(DE)}, 1.0),
        (DE, "en", {"min_letters": 10}, 0.0),
        ("狗 dog", "zh", {}, 0.25),
        ("狗 dog", "en", {}, 0.75),
        (DE, "en", {"languages": ("en", "zh")}, 1.0),  # nothing that shares the script to confuse it with
        (RU, "ru", {"languages": ("ru", "uk", "bg")}, 1.0),
        ("acoustic guitar, piano, violin", "en", {}, 1.0),  # whose words other languages share
        ("piano concerto in C minor", "en", {}, 1.0),
        ("Female opera soprano aria", "en", {}, 1.0),
        ("a solo saxophone melody", "en", {}, 1.0),
        ("C# major chord progression", "en", {}, 1.0),
        ("El perro ladra en el jardín", "en", {}, 0.0),
        ("Il pianoforte suona una melodia", "en", {}, 0.0),
        ("Le chien aboie dans la rue", "en", {}, 0.0),
        ("Ein Hund bellt im Garten", "en", {}, 0.0),
    ],
)
def test_short_and_mixed_texts(text: str, target: str, options, expected: float) -> None:
    assert value(text, target, **options) == pytest.approx(expected)


def test_parts_and_targets(make_rollout) -> None:
    rollout = make_rollout(f"<think>{ZH}</think><answer>{EN}</answer>", language="en-US")

    def total(**options) -> float:
        return LanguageConsistency(**options)([rollout])[0].total

    assert total(part="answer") == 1.0
    assert total(part="think") == 0.0
    assert 0.0 < total(part="all") < 1.0
    assert total(part="think", language="zh-CN") == 1.0  # the option wins over the metadata
    assert LanguageConsistency(part="think")([make_rollout(EN, language="en")])[0].total == 0.0  # nothing thought


def test_errors(make_rollout) -> None:
    with pytest.raises(ValueError, match="'clip-7' has no metadata"):
        LanguageConsistency()([make_rollout(EN)])
    with pytest.raises(ValueError, match="language 'xx' is unknown"):
        value(EN, "xx")


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (99, -0.95), (100, -1.0), (150, -1.0)]
)
def test_overlong(make_rollout, tokens: int, expected: float) -> None:
    texts = ("one", "two") if tokens == 90 else ("text",)  # tokens of all segments count
    (score,) = Overlong(max_tokens=100, buffer=20)([make_rollout(*texts, tokens=tokens // len(texts))])
    assert score.total == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        ("a b c d", 2, 0.0),
        ("a b a b a b", 2, 2 / 5 - 1),  # ab ba ab ba ab
        ("Go go go", 1, 1 / 3 - 1),
        ("a a a a", 3, 1 / 2 - 1),
        ("a b", 3, 0.0),
        ("", 3, 0.0),
        ("哈哈哈哈", 2, 1 / 3 - 1),
    ],
)
def test_repetition(make_rollout, text: str, n: int, expected: float) -> None:
    assert Repetition(n=n)([make_rollout(text)])[0].total == pytest.approx(expected)


def test_units() -> None:
    assert Repetition(n=1, unit="words").value("哈哈哈") == 0.0
    assert Repetition(n=1, unit="characters").value("aab") == pytest.approx(2 / 3 - 1)


@given(st.text(), st.integers(1, 5))
def test_range(text: str, n: int) -> None:
    assert -1.0 <= Repetition(n=n).value(text) <= 0.0
    assert -1.0 <= Repetition(n=n, unit="characters").value(text) <= 0.0
