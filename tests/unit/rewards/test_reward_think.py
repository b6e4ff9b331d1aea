import pytest

from audiorl.rewards import AnswerFormat, ThinkFormat, ThinkLength, ThinkPresent, ThinkTranscript

GOOD = "<think>a dog\nbarks</think>\n<answer>B</answer>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD, 1),
        (f" {GOOD}\n", 1),
        ("<think></think><answer></answer>", 1),
        ("<answer>B</answer>", 0),
        (f"Sure! {GOOD}", 0),
        (f"{GOOD} done", 0),
        ("<think>a</think> so <answer>B</answer>", 0),
        ("<answer>B</answer><think>a</think>", 0),
        ("<think>a<think>b</think></think><answer>B</answer>", 0),  # nested: the plain expression would accept it
        ("<think>a</think><answer>A</answer><answer>B</answer>", 0),
        ("<think>a <answer>A</answer></think><answer>B</answer>", 0),
        ("<think>a</think><answer>B", 0),
        ("", 0),
    ],
)
def test_think_format(make_rollout, text: str, expected: float) -> None:
    assert ThinkFormat()([make_rollout(text)])[0].total == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>B</answer>", 1),
        (" <answer>B</answer>\n", 1),
        (GOOD, 0),
        ("<answer>A</answer><answer>B</answer>", 0),
        ("B", 0),
    ],
)
def test_answer_format(make_rollout, text: str, expected: float) -> None:
    assert AnswerFormat()([make_rollout(text)])[0].total == expected


@pytest.mark.parametrize(
    ("words", "expected"), [(0, 0.0), (1, 0.25), (4, 1.0), (10, 1.0), (11, 0.9), (15, 0.5), (20, 0.0), (50, 0.0)]
)
def test_think_length(make_rollout, words: int, expected: float) -> None:
    rollout = make_rollout(f"<think>{'word ' * words}</think><answer>B</answer>")
    assert ThinkLength(max_words=10, min_words=4)([rollout])[0].total == pytest.approx(expected)


def test_think_length_counts_unspaced_characters_and_needs_closed_thinking(make_rollout) -> None:
    reward = ThinkLength(max_words=4)
    scores = reward([make_rollout("<think>我听到狗叫</think>"), make_rollout("<think>short"), make_rollout("B")])
    assert [s.total for s in scores] == [0.75, 0.0, 0.0]  # five characters: 2 - 5/4
    with pytest.raises(ValueError, match="min_words=60"):
        ThinkLength(min_words=60)


@pytest.mark.parametrize(
    ("thought", "words", "accuracy", "said"),
    [
        ("the call", 2, 1, 1),
        ("The call!", 2, 1, 1),
        ("the call has ended", None, 1, 1),
        ("the cell", 2, 7 / 8, 0),
        ("call", 2, 0.5, 1),
        ("ended", 2, 1 - 7 / 8, 1),  # said, but not at the beginning
        ("porer sep ait sep", 2, 0, 0),
        ("", 2, 0, 0),
        ("...", 2, 0, 0),
    ],
)
def test_think_transcript(make_rollout, thought: str, words: int | None, accuracy: float, said: float) -> None:
    rollout = make_rollout(f"<think>{thought}</think><answer>B</answer>", text="The call has ended.", language="en")
    (score,) = ThinkTranscript(words)([rollout])
    assert score.total == pytest.approx(accuracy)
    assert score.parts == {"said": said}


def test_think_transcript_needs_a_closed_thought_and_a_transcript(make_rollout) -> None:
    unclosed = make_rollout("<think>the call <answer>B</answer>", text="The call has ended.")
    assert ThinkTranscript()([unclosed])[0].total == 0
    for metadata in ({}, {"text": "..."}, {"text": 3}):
        with pytest.raises(ValueError, match="sample 'clip-7': metadata has no transcript"):
            ThinkTranscript()([make_rollout(GOOD, **metadata)])
    with pytest.raises(ValueError, match="words must be at least 1"):
        ThinkTranscript(0)


def test_a_thought_is_there(make_rollout) -> None:
    texts = ("<think>a dog</think>B", "<think> </think><answer>B</answer>", "<answer>B</answer>", "<think>a dog barks")
    rollouts = [make_rollout(text) for text in texts]
    assert [s.total for s in ThinkPresent()(rollouts)] == [1, 0, 0, 0]
    assert [s.total for s in ThinkPresent(min_words=3)(rollouts)] == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="min_words must be at least 1"):
        ThinkPresent(min_words=0)
