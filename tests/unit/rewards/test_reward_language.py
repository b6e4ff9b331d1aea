import pytest

from audiorl.rewards import LanguageConsistency

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


def test_mixed_scripts_score_their_share() -> None:
    assert value("狗 dog", "zh") == pytest.approx(0.25)
    assert value("狗 dog", "en") == pytest.approx(0.75)


def test_short_texts() -> None:
    assert value("", "en") == 0.0
    assert value(" \n", "en") == 0.0
    assert value("42 + 1", "en") == 1.0  # no letters: fits every language
    assert value("Hund", "en") == 1.0  # below min_letters only the script counts
    assert value("狗", "ja") == 1.0
    assert value(DE, "en", min_letters=len(DE)) == 1.0
    assert value(DE, "en", min_letters=10) == 0.0


def test_the_set_decides_which_rivals_are_considered() -> None:
    assert value(DE, "en", languages=("en", "zh")) == 1.0  # nothing that shares the script to confuse it with
    assert value(RU, "ru", languages=("ru", "uk", "bg")) == 1.0


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
    with pytest.raises(ValueError, match="does not know xx"):
        value(EN, "xx")
    with pytest.raises(ValueError, match="part 'some'"):
        LanguageConsistency(part="some")  # type: ignore[arg-type]
