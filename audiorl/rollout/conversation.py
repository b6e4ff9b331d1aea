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
        self.remembers = True
        """Earlier turns are part of the prompt. Whisper reads a single one."""
        try:
            policy.backbone.chat([Message("user", ("a",)), Message("assistant", ("b",)), Message("user", ("c",))])
        except ValueError:
            self.remembers = False
        self.messages: tuple[Message, ...] = ()
        """The questions and answers so far, without the system message."""
        self.speech: Wave | None = None
        """The speech of the last answer, float32 [T] at `speech_rate` Hz; None for text alone."""
        self._decoder = None if policy.codec is None else CodecSpeechDecoder.of(policy)
        self.speech_rate = None if self._decoder is None else self._decoder.sample_rate
        """Hz of spoken answers; None for a policy without a codec."""
        self._sampling = sampling or SamplingConfig(temperature=0.0)
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

    def reset(self) -> None:
        """Forget the questions and answers. The system message stays."""
        self.messages, self.speech = (), None

    def ask(self, content: Sequence[str | AudioClip], show: Callable[[str], object] = lambda text: None) -> Rollout:
        """Text and recordings of one turn, in the order in which the model reads them; returns the answer.

        `show` gets the answer's text piece by piece, each as soon as its characters are whole. A KeyboardInterrupt ends
        the answer: what is written of it is the answer in `messages`, without speech. Raises ValueError for audio that
        cannot be read and for a conversation that is too long; `messages` is then as before.
        """
        if not content:
            raise ValueError("the turn is empty; give a question or a recording")
        question = Message("user", tuple(content))
        if not self.remembers and len(content) == 1 and isinstance(content[0], AudioClip):
            question = asr_prompt(content[0], self._language)[0]
        before = self.messages if self.remembers else ()
        system = (Message("system", (self._system,)),) if self._system else ()
        metadata = {"respond": "speech"} if self._spoken else {}
        sample = Sample(f"turn {self._turns + 1}", (*system, *before, question), metadata=metadata)
        shown = ""

        def write(text: str, last: bool) -> None:
            nonlocal shown
            if text.startswith(shown):
                piece, shown = text[len(shown) :], text
            elif last:  # all of it again where later tokens changed what was shown
                piece, shown = f"\n{text}", text
            else:
                return
            if piece:
                show(piece)

        def on_step(buffers: Sequence[SegmentBuffer]) -> None:
            write(self.policy.decode(buffers[0].ids).rstrip("\N{REPLACEMENT CHARACTER}"), last=False)

        self.speech = None
        try:
            (rollout,) = HFEngine(self.policy, self._sampling, on_step).generate([Request(sample, seed=self._seed)])
        except KeyboardInterrupt:
            self._add(question, (shown,))
            raise
        write(rollout.text, last=True)
        answer: tuple[str | AudioClip, ...] = (rollout.text,)
        self.speech = None if self._decoder is None else self._decoder.waveform(rollout)
        if self.speech is not None:
            clip = AudioClip(array=self.speech, sample_rate=self.speech_rate)
            answer = (rollout.text, clip) if rollout.text else (clip,)
        self._add(question, answer)
        return rollout

    def _add(self, question: Message, answer: tuple[str | AudioClip, ...]) -> None:
        self._turns += 1
        self.messages = (*self.messages, question, Message("assistant", answer))
