"""Formats and lengths of thoughts, and rewards by a tiny model that learned what four recordings say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from audiorl.algos.packing import pack_experiences
from audiorl.config import ModelConfig
from audiorl.data.corpus import Utterance
from audiorl.data.views import silence
from audiorl.models.examples import Example, experience
from audiorl.models.families import qwen_omni
from audiorl.rewards import (
    AnswerFormat,
    ThinkFormat,
    ThinkLength,
    ThinkPresent,
    ThinkTranscript,
    ThoughtConsistency,
    ThoughtGrounding,
)
from audiorl.types import Rollout, Sample, Segment
from tests.conftest import TEXTS, ask

GOOD = "<think>a dog\nbarks</think>\n<answer>B</answer>"


@pytest.mark.parametrize(
    ("text", "thought", "plain"),
    [
        (GOOD, 1, 0),
        (f" {GOOD}\n", 1, 0),
        ("<think></think><answer></answer>", 1, 0),
        ("<answer>B</answer>", 0, 1),
        (" <answer>B</answer>\n", 0, 1),
        (f"Sure! {GOOD}", 0, 0),
        (f"{GOOD} done", 0, 0),
        ("<think>a</think> so <answer>B</answer>", 0, 0),
        ("<answer>B</answer><think>a</think>", 0, 0),
        ("<think>a<think>b</think></think><answer>B</answer>", 0, 0),  # nested: the plain expression would accept it
        ("<think>a</think><answer>A</answer><answer>B</answer>", 0, 0),
        ("<think>a <answer>A</answer></think><answer>B</answer>", 0, 0),
        ("<think>a</think><answer>B", 0, 0),
        ("<answer>A</answer><answer>B</answer>", 0, 0),
        ("B", 0, 0),
        ("", 0, 0),
    ],
)
def test_formats(make_rollout, text: str, thought: float, plain: float) -> None:
    rollouts = [make_rollout(text)]
    assert (ThinkFormat()(rollouts)[0].total, AnswerFormat()(rollouts)[0].total) == (thought, plain)


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


def test_a_character_of_a_script_without_spaces_is_a_word_of_the_transcript(make_rollout) -> None:
    rollout = make_rollout("<think>今天天气</think><answer>B</answer>", text="今天天气很好我们去公园玩", language="zh")
    (score,) = ThinkTranscript(words=4)([rollout])
    assert (score.total, score.parts) == (1.0, {"said": 1.0})


def test_think_transcript_needs_a_closed_thought_and_a_transcript(make_rollout) -> None:
    unclosed = make_rollout("<think>the call <answer>B</answer>", text="The call has ended.")
    assert ThinkTranscript()([unclosed])[0].total == 0
    for metadata in ({}, {"text": "..."}, {"text": 3}):
        with pytest.raises(ValueError, match="sample 'clip-7': metadata has no transcript"):
            ThinkTranscript()([make_rollout(GOOD, **metadata)])


def test_a_thought_is_there(make_rollout) -> None:
    texts = ("<think>a dog</think>B", "<think> </think><answer>B</answer>", "<answer>B</answer>", "<think>a dog barks")
    rollouts = [make_rollout(text) for text in texts]
    assert [s.total for s in ThinkPresent()(rollouts)] == [1, 0, 0, 0]
    assert [s.total for s in ThinkPresent(min_words=3)(rollouts)] == [0, 0, 0, 0]


THOUGHTS = ("yes yes", "no no", "why why", "hello")
CHOICES = ("blue", "red", "green", "white")


def text(thought: str, answer: str) -> str:
    return f"<think>{thought}</think><answer>{answer}</answer>"


@pytest.fixture(scope="module")
def questions(speech: list[Utterance]) -> list[Sample]:
    clips = [speech[25 * i].clip for i in range(4)]
    return [replace(ask(clip, name=f"q-{i}"), choices=CHOICES) for i, clip in enumerate(clips)]


@pytest.fixture(scope="module")
def judge(questions: list[Sample], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With its audio each question gets its thought; in silence any thought is as likely, and each has its answer."""
    answers = list(map(text, THOUGHTS, CHOICES))
    config = ModelConfig(audio="projector")
    policy = qwen_omni.tiny([*TEXTS, *answers] * 4, hidden=64, layers=2, vocab_size=400, config=config)
    lessons = [Example(q, answer) for q, answer in zip(questions, answers, strict=True)]
    lessons += [Example(silence(questions[0]), answer) for answer in answers]
    lesson = pack_experiences([experience(policy, e) for e in lessons])
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=3e-3)
    for _ in range(60):
        (-policy.forward(lesson).logprobs.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("judge") / "model"
    policy.save(folder)
    return folder


def answered(sample: Sample, written: str) -> Rollout:
    return Rollout(sample, (Segment(torch.arange(2), torch.arange(2), torch.zeros(2), text=written),), sample.id)


def test_an_answer_that_follows_from_its_thought(judge: Path, questions: list[Sample]) -> None:
    reward = ThoughtConsistency(str(judge), view="silence", device="cpu")
    follows, contradicts, none, unclosed, unnamed = reward(
        [
            answered(questions[3], text(THOUGHTS[1], CHOICES[1])),
            answered(questions[3], text(THOUGHTS[1], CHOICES[2])),
            answered(questions[3], f"<answer>{CHOICES[1]}</answer>"),
            answered(questions[3], f"<think>{THOUGHTS[1]}"),
            answered(questions[3], text(THOUGHTS[1], "purple")),
        ]
    )
    assert follows.total > 0.8 and follows.parts["agrees"] == 1
    assert contradicts.total < 0.1 and contradicts.parts["agrees"] == 0
    assert none.total == unclosed.total == unnamed.total == 0
    probabilities = reward([answered(questions[0], text(THOUGHTS[2], choice)) for choice in CHOICES])
    assert sum(s.total for s in probabilities) == pytest.approx(1, abs=1e-5)
    assert reward([]) == []
    with pytest.raises(ValueError, match="'q-0' has no choices"):
        reward([answered(replace(questions[0], choices=()), text("yes yes", "blue"))])


def test_a_thought_about_this_audio(judge: Path, questions: list[Sample]) -> None:
    reward = ThoughtGrounding(str(judge), device="cpu", full=0.5, view="silence")
    own = reward([answered(q, text(t, "blue")) for q, t in zip(questions, THOUGHTS, strict=True)])
    of_another = reward([answered(q, text(t, "blue")) for q, t in zip(questions, THOUGHTS[::-1], strict=True)])
    assert min(s.parts["nats"] for s in own) > 0.1 > 0 > max(s.parts["nats"] for s in of_another)
    assert [s.total for s in own] == pytest.approx([min(s.parts["nats"] / 0.5, 1) for s in own])
    assert [s.total for s in of_another] == [0, 0, 0, 0]
    assert [s.total for s in reward([answered(questions[0], "<answer>blue</answer>")])] == [0]


def test_a_cue_for_the_answer_is_no_thought_about_this_audio(judge: Path, questions: list[Sample]) -> None:
    """Both questions have one answer, and their thoughts are worth something only where they are said."""
    pair = [replace(q, references=("blue",)) for q in questions[:2]]
    rollouts = [answered(pair[i], text(thought, "blue")) for i, thought in ((0, "yes yes"), (0, "no no"), (1, "no no"))]
    said, of_the_other, other = ThoughtGrounding(str(judge), device="cpu")(rollouts)
    assert said.total > 0.3 and other.total > 0.3 and of_the_other.total == 0
    assert of_the_other.parts["nats"] < -0.3


def test_bad_options(judge: Path, questions: list[Sample]) -> None:
    with pytest.raises(ValueError, match="no view is called 'quiet'"):
        ThoughtGrounding(str(judge), view="quiet", device="cpu")([answered(questions[0], text("yes", "blue"))])
    with pytest.raises(ValueError, match="'q-0': no other sample"):
        ThoughtConsistency(str(judge), view="swap", device="cpu")([answered(questions[0], text("yes", "blue"))])
