"""Chat with a policy: questions with recordings, answers that are shown while they are written.

    talk = ChatSession(load_policy("exported"), SamplingConfig(temperature=0.0))
    talk.ask([AudioClip(path="question.wav"), "Which language is this?"], show=lambda text: print(text, end=""))
    talk.ask(["And who speaks?"])
    talk.messages  # two questions and two answers

Every turn reads the whole conversation again; a recording is encoded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from audiorl.audio import AudioClip
from audiorl.config import SamplingConfig
from audiorl.data.prompts import asr_prompt
from audiorl.models.policy import AudioPolicy
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.samplers import SegmentBuffer
from audiorl.rollout.speech import CodecSpeechDecoder, Wave
from audiorl.types import Message, Rollout, Sample


class ChatSession:
    """Asks a policy turn by turn.

    sampling: greedy by default. system: the system message, "" for the model's own. spoken: every answer is to be
    speech, which needs a policy with a codec; otherwise the model decides. language: of recordings that come without a
    question to a model without conversations, whose transcript is asked for. seed: equal seeds and equal questions give
    equal answers.
    """

    def __init__(
        self,
        policy: AudioPolicy,
        sampling: SamplingConfig | None = None,
        *,
        system: str = "",
        spoken: bool = False,
        language: str = "",
        seed: int = 0,
    ):
        self.policy = policy
        self.remembers = _has_conversations(policy)
        """Earlier turns are part of the prompt. Whisper reads a single one."""
        self.messages: tuple[Message, ...] = ()
        """The questions and answers so far, without the system message."""
        self.speech: Wave | None = None
        """The speech of the last answer, float32 [T] at `speech_rate` Hz; None for text alone."""
        self._sampling = sampling or SamplingConfig(temperature=0.0)
        self._decoder = None if policy.codec is None else CodecSpeechDecoder.of(policy)
        self._spoken, self._language, self._seed = spoken, language, seed
        self._turns = 0
        self.system = system

    @property
    def system(self) -> str:
        """The system message. Raises ValueError when one is set for a model that reads none."""
        return self._system

    @system.setter
    def system(self, text: str) -> None:
        if text and not self.remembers:
            raise ValueError("this model reads one recording and a request, and no system message")
        self._system = text

    @property
    def speech_rate(self) -> int | None:
        """Hz of spoken answers; None for a policy without a codec."""
        return None if self._decoder is None else self._decoder.sample_rate

    def reset(self) -> None:
        """Forget the questions and answers. The system message stays."""
        self.messages, self.speech = (), None

    def ask(self, content: Sequence[str | AudioClip], show: Callable[[str], object] = lambda text: None) -> Rollout:
        """Text and recordings of one turn, in the order in which the model reads them; returns the answer.

        `show` gets the answer's text piece by piece. A KeyboardInterrupt ends the answer: what is written of it is the
        answer in `messages`, without speech. Raises ValueError for audio that cannot be read and for a conversation
        that is too long; `messages` is then as before.
        """
        question = Message("user", self._question(content))
        before = self.messages if self.remembers else ()
        system = (Message("system", (self._system,)),) if self._system else ()
        metadata = {"respond": "speech"} if self._spoken else {}
        sample = Sample(f"turn {self._turns + 1}", (*system, *before, question), metadata=metadata)
        writer = _Writer(self.policy, show)
        engine = HFEngine(self.policy, self._sampling, writer)
        self.speech = None
        try:
            (rollout,) = engine.generate([Request(sample, seed=self._seed)])
        except KeyboardInterrupt:
            self._add(question, (writer.text,))
            raise
        writer.finish(rollout.text)
        answer: tuple[str | AudioClip, ...] = (rollout.text,)
        self.speech = None if self._decoder is None else self._decoder.waveform(rollout)
        if self.speech is not None:
            clip = AudioClip(array=self.speech, sample_rate=self.speech_rate)
            answer = (rollout.text, clip) if rollout.text else (clip,)
        self._add(question, answer)
        return rollout

    def _question(self, content: Sequence[str | AudioClip]) -> tuple[str | AudioClip, ...]:
        if not content:
            raise ValueError("the turn is empty; give a question or a recording")
        if not self.remembers and len(content) == 1 and isinstance(content[0], AudioClip):
            return asr_prompt(content[0], self._language)[0].content
        return tuple(content)

    def _add(self, question: Message, answer: tuple[str | AudioClip, ...]) -> None:
        self._turns += 1
        self.messages = (*self.messages, question, Message("assistant", answer))


class _Writer:
    """Gives `show` the text that each token adds, as soon as its characters are whole."""

    def __init__(self, policy: AudioPolicy, show: Callable[[str], object]):
        self.text = ""
        """What was shown."""
        self._policy, self._show = policy, show

    def __call__(self, buffers: Sequence[SegmentBuffer]) -> None:
        text = self._policy.decode(buffers[0].ids).rstrip("\N{REPLACEMENT CHARACTER}")
        if text.startswith(self.text):
            self._write(text[len(self.text) :], text)

    def finish(self, text: str) -> None:
        """Show the rest of the answer; all of it again where later tokens changed what was shown."""
        self._write(text[len(self.text) :] if text.startswith(self.text) else f"\n{text}", text)

    def _write(self, piece: str, text: str) -> None:
        self.text = text
        if piece:
            self._show(piece)


def _has_conversations(policy: AudioPolicy) -> bool:
    try:
        policy.backbone.chat([Message("user", ("a",)), Message("assistant", ("b",)), Message("user", ("c",))])
    except ValueError:
        return False
    return True
