"""Rewards for thoughts, judged by a tiny model that learned what four recordings say and what follows from it."""

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
from audiorl.rewards import ThoughtConsistency, ThoughtGrounding
from audiorl.types import Rollout, Sample, Segment
from tests.conftest import TEXTS, ask

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
    policy = qwen_omni.tiny(
        [*TEXTS, *map(text, THOUGHTS, CHOICES)] * 4,
        hidden=64,
        layers=2,
        vocab_size=400,
        config=ModelConfig(audio="projector"),
    )
    lessons = [Example(q, text(*pair)) for q, pair in zip(questions, zip(THOUGHTS, CHOICES, strict=True), strict=True)]
    lessons += [Example(silence(questions[0]), text(t, a)) for t, a in zip(THOUGHTS, CHOICES, strict=True)]
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
    rollouts = [answered(pair[0], text(THOUGHTS[i], "blue")) for i in (0, 1)] + [
        answered(pair[1], text("no no", "blue"))
    ]
    said, of_the_other, other = ThoughtGrounding(str(judge), device="cpu")(rollouts)
    assert said.total > 0.3 and other.total > 0.3 and of_the_other.total == 0
    assert of_the_other.parts["nats"] < -0.3


def test_bad_options(judge: Path, questions: list[Sample]) -> None:
    with pytest.raises(ValueError, match="full is 0; give nats per token above 0"):
        ThoughtGrounding(str(judge), full=0)
    with pytest.raises(ValueError, match="no view is called 'quiet'"):
        ThoughtGrounding(str(judge), view="quiet", device="cpu")([answered(questions[0], text("yes", "blue"))])
    with pytest.raises(ValueError, match="'q-0': no other sample"):
        ThoughtConsistency(str(judge), view="swap", device="cpu")([answered(questions[0], text("yes", "blue"))])
