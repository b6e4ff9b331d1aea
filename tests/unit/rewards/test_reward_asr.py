import pytest

from audiorl.rewards import CharAccuracy, WordAccuracy


def total(reward, rollout) -> float:
    (score,) = reward([rollout])
    return score.total


def test_word_accuracy(make_rollout) -> None:
    # the/a substituted, down inserted: 2 errors over 4 words
    rollout = make_rollout("A cat sat, here down!", references=("the cat sat here",))
    assert total(WordAccuracy(), rollout) == pytest.approx(0.5)
    assert total(WordAccuracy(normalizer="none"), rollout) == pytest.approx(0.25)  # "sat," differs too
    tagged = make_rollout("<think>hm</think><answer>the cat sat here</answer>", references=("The cat sat here.",))
    assert total(WordAccuracy(), tagged) == 1.0


def test_clip(make_rollout) -> None:
    babble = make_rollout("one two three four", references=("hello",))  # 1 substitution, 3 insertions: WER 4
    assert total(WordAccuracy(), babble) == 0.0
    assert total(WordAccuracy(clip=False), babble) == -3.0


def test_best_reference_counts(make_rollout) -> None:
    assert total(WordAccuracy(), make_rollout("good bye", references=("goodbye", "good bye"))) == 1.0


def test_digits_are_spelled_out_in_the_samples_language(make_rollout) -> None:
    pytest.importorskip("num2words")
    assert (
        total(WordAccuracy(), make_rollout("ich bin 21", references=("ich bin einundzwanzig",), language="de")) == 1.0
    )
    assert total(WordAccuracy(), make_rollout("ich bin 21", references=("ich bin einundzwanzig",))) < 1.0


def test_char_accuracy(make_rollout) -> None:
    rollout = make_rollout("今天 天汽好", references=("今天天气好。",))
    assert total(CharAccuracy(), rollout) == pytest.approx(0.8)
    assert total(WordAccuracy(), rollout) == 0.0


def test_unfinished_thinking_is_no_transcript(make_rollout) -> None:
    assert total(WordAccuracy(), make_rollout("<think>hello", references=("hello",))) == 0.0


@pytest.mark.parametrize("reward", [WordAccuracy(), CharAccuracy()])
def test_missing_and_empty_references_name_the_sample(make_rollout, reward) -> None:
    with pytest.raises(ValueError, match="'clip-7' has no reference"):
        reward([make_rollout("hi")])
    with pytest.raises(ValueError, match=r"'clip-7': the reference transcript '\.\.\.' is empty"):
        reward([make_rollout("hi", references=("...",))])
