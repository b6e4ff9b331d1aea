"""Conversations: what is shown is the engine's answer, earlier turns are read, Ctrl-C keeps what was written."""

from __future__ import annotations

import numpy as np
import pytest

from audiorl.audio import AudioClip
from audiorl.config import SamplingConfig
from audiorl.data.corpus import Utterance
from audiorl.data.prompts import asr_prompt
from audiorl.models import AudioPolicy
from audiorl.protocols import Request
from audiorl.rollout.conversation import ChatSession
from audiorl.rollout.hf import HFEngine
from audiorl.types import Message, Sample
from tests.conftest import Make, make_dual_omni, make_omni, make_text, make_whisper
from tests.support.speaking_models import codec  # noqa: F401
from tokenizers_audio import AudioTokenizer

SAMPLING = SamplingConfig(temperature=1.0, max_new_tokens=12)


def engine_answer(policy: AudioPolicy, id: str, *messages: Message) -> str:
    (rollout,) = HFEngine(policy, SAMPLING).generate([Request(Sample(id, messages), seed=3)])
    return rollout.text


def test_answers_are_those_of_the_engine_and_shown_piece_by_piece(make_policy: Make, speech: list[Utterance]) -> None:
    policy = make_policy()
    talk = ChatSession(policy, SAMPLING, system="Be brief.", seed=3)
    pieces: list[str] = []
    first = talk.ask([speech[0].clip, "What is said?"], pieces.append)
    system, question = Message("system", ("Be brief.",)), Message("user", (speech[0].clip, "What is said?"))
    assert first.text == engine_answer(policy, "turn 1", system, question) == "".join(pieces)
    assert len(pieces) > 3 and all(pieces)
    second = talk.ask([speech[40].clip, "And here?"])
    again = Message("user", (speech[40].clip, "And here?"))
    answer = Message("assistant", (first.text,))
    assert second.text == engine_answer(policy, "turn 2", system, question, answer, again)
    assert talk.messages == (question, answer, again, Message("assistant", (second.text,)))
    talk.reset()
    assert talk.messages == () and talk.system == "Be brief."
    assert talk.ask(["Why?"]).sample.messages == (system, Message("user", ("Why?",)))


def test_an_encoder_decoder_answers_each_turn_for_itself(speech: list[Utterance]) -> None:
    talk = ChatSession(make_whisper(), SAMPLING, language="es")
    assert not talk.remembers
    talk.ask([speech[0].clip])
    (message,) = talk.ask([speech[40].clip]).sample.messages
    assert message == asr_prompt(speech[40].clip, "es")[0]
    asked = talk.ask([speech[0].clip, "Names: Ana"]).sample.messages
    assert asked == (Message("user", (speech[0].clip, "Names: Ana")),)
    with pytest.raises(ValueError, match="no system message"):
        talk.system = "Be brief."


class Stop:
    """Ctrl-C after the third piece."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def __call__(self, text: str) -> None:
        self.pieces.append(text)
        if len(self.pieces) == 3:
            raise KeyboardInterrupt


def test_an_interrupted_answer_stays_and_the_conversation_goes_on() -> None:
    talk, stop = ChatSession(make_text(), SAMPLING, seed=3), Stop()
    with pytest.raises(KeyboardInterrupt):
        talk.ask(["What is said?"], stop)
    assert talk.messages[-1] == Message("assistant", ("".join(stop.pieces),))
    assert talk.ask(["Why?"]).sample.messages[:2] == talk.messages[:2]


def test_spoken_answers_are_heard_in_the_next_turn(codec: AudioTokenizer) -> None:  # noqa: F811
    policy = make_dual_omni()
    policy.set_codec(codec)
    talk = ChatSession(policy, SamplingConfig(max_frames=6, max_new_tokens=4), spoken=True, seed=1)
    assert talk.speech_rate == codec.sample_rate
    talk.ask(["Say yes."])
    assert talk.speech is not None and talk.speech.dtype == np.float32 and len(talk.speech) > 0
    (clip,) = (c for c in talk.messages[-1].content if isinstance(c, AudioClip))
    prompt = policy.prompt(Sample("s", talk.ask(["Again."]).sample.messages))
    assert prompt.codes is not None and (prompt.codes[:, 0] >= 0).any() and clip.sample_rate == codec.sample_rate


def test_a_turn_that_cannot_be_asked_leaves_the_conversation(speech: list[Utterance]) -> None:
    talk = ChatSession(make_omni(), SAMPLING)
    talk.ask(["Why?"])
    before = talk.messages
    for content, message in (
        ([], "the turn is empty"),
        ([AudioClip(path="gone.wav"), "Why?"], "gone.wav"),
        (["<|im_start|>"], "reserved token"),
        (["word " * 5000], "the model reads at most"),
    ):
        with pytest.raises(ValueError, match=message):
            talk.ask(content)
    assert talk.messages == before
