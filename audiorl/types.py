"""The values that flow through audiorl. All frozen: make a new one, don't edit.

Shapes: N sampled tokens, P observed tokens, Q codebooks.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from audiorl.audio import AudioClip
from audiorl.pictures import Picture

if TYPE_CHECKING:  # rows are read, and logs scored, without the seconds that torch takes
    from torch import Tensor

StopReason = Literal["eos", "stop", "length", "paused"]
"""A stop token, a stop string, the length limit; "paused": a later step goes on with the answer."""


@dataclass(frozen=True)
class Message:
    """One chat turn; `content` interleaves text, audio and pictures in the order the model reads them."""

    role: Literal["system", "user", "assistant"]
    content: tuple[str | AudioClip | Picture, ...]


@dataclass(frozen=True)
class Turn:
    """One step of a stream: a chunk of audio, and what can be translated once it has been read."""

    audio: AudioClip
    """The chunk."""
    end: float
    """Seconds of the source read after it."""
    reference: str = ""
    """y*_t: gold text that can be said now, "" for nothing yet."""
    source: str = ""
    """The source words behind the reference, "" if unknown."""
    reference_seconds: float | None = None
    """Duration of the reference when spoken; None if unknown."""
    speech: tuple[AudioClip, ...] = ()
    """Recordings of the reference, in order, for a policy that speaks."""


@dataclass(frozen=True)
class Sample:
    """One prompt with everything its rewards need, made by a data reader. It carries its own audio.

    >>> from audiorl import Sample
    >>> from audiorl.types import Message
    >>> Sample("q1", (Message("user", ("Which animal?",)),), references=("a cat",)).references
    ('a cat',)
    """

    id: str
    """Unique in its data set."""
    messages: tuple[Message, ...]
    """The prompt."""
    references: tuple[str, ...] = ()
    """Gold texts: the answer of a question, the transcript of a clip."""
    choices: tuple[str, ...] = ()
    """Options of a multiple-choice question; empty for open ones."""
    task: str = ""
    """Name by which evaluations group samples."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Every manifest field that has no place of its own."""
    turns: tuple[Turn, ...] = ()
    """Of a stream: the messages come first, then the policy writes one segment after each turn."""

    @property
    def audio(self) -> tuple[AudioClip, ...]:
        """Every clip, in order: those of the messages, then those of the turns."""
        prompt = tuple(c for m in self.messages for c in m.content if isinstance(c, AudioClip))
        return prompt + tuple(t.audio for t in self.turns)

    @property
    def images(self) -> tuple[Picture, ...]:
        """Every picture of the messages, in order."""
        return tuple(c for m in self.messages for c in m.content if isinstance(c, Picture))


@dataclass(frozen=True, eq=False)
class FlowPath:
    """How a flow made a sound of F latent frames with D channels: what its N noisy steps need to be computed again.

    The steps follow each other. The sound is `Rollout.spoken_audio`; recorded rows hold no path. With noise "none" the
    solver made the sound, and N times it is noised again: a loss compares the velocity there with the noise - sound.
    """

    states: Tensor
    """[N + 1, F, D] float32: the latents before the first noisy step, and after each; or the sound, and N noises."""
    times: tuple[float, ...]
    """[N + 1]: t at these, 1 is noise and 0 the sound; or N times to which the sound is noised."""
    means: Tensor | None
    """[N, F, D] float32: where the steps would have led without noise; or velocities of the policy before the step's
    updates, filled in by the trainer when it needs them."""
    noise: str
    """The rule of the noise and its level, see `audiorl.algos.flow.transition`; or "none"."""
    level: float
    guidance: float
    """Classifier-free guidance of the velocity."""
    context: Tensor | None = None
    """[F, D + 1]: latents of audio that was there already and 1 where it was, 0 elsewhere; None: nothing was."""
    video: Tensor | None = None
    """[F, V]: video features at the time of each frame."""
    ref_means: Tensor | None = None
    """[N, F, D]: where the reference would have led, or its velocities; filled in by the trainer."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Tokens that were observed, then tokens that were sampled. The engine fills in every field."""

    prompt_ids: Tensor
    """[P] int64: observed tokens, audio placeholders expanded to the encoder's frame count."""
    ids: Tensor
    """[N] int64: sampled tokens, the stop token included."""
    logprobs: Tensor
    """[N] float32, or [N, Q]: the engine's log-probs under the distribution it sampled from."""
    text: str = ""
    """The sampled tokens decoded, without special tokens."""
    audio: tuple[AudioClip, ...] = ()
    """The clips behind the placeholders of prompt_ids, in order."""
    stop_reason: StopReason = "eos"
    """Why it ended."""
    policy_version: int = 0
    """Training steps that the weights had taken, those that sampled the last token."""
    source_time: float | None = None
    """Seconds of source read when the segment was complete."""
    emit_time: float | None = None
    """Seconds of wall clock when the segment was complete."""
    decoder_passes: int | None = None
    """Forward passes of the decoder in this turn of a stream, with those for tokens that a schedule cut off."""
    codes: Tensor | None = None
    """[N, Q] int64 in delayed rows, -1 where a row is no frame."""
    prompt_codes: Tensor | None = None
    """[P, Q] int64, likewise."""
    code_mask: Tensor | None = None
    """[N, Q] bool: which codes were sampled; the delay pattern forces the others."""
    policy_versions: Tensor | None = None
    """[N] int64: the version that sampled each token, of an answer that was paused; None: `policy_version` for all."""
    flow: FlowPath | None = None
    """Of a flow, whose prompt_ids are the bytes of the prompt and whose ids are the numbers of its noisy steps."""
    images: tuple[Picture, ...] = ()
    """The pictures behind the placeholders of prompt_ids, in order."""


@dataclass(frozen=True)
class Score:
    """A reward for one rollout, made by a `Reward`.

    >>> from audiorl import Score
    >>> Score(1.5, parts={"accuracy": 1.0, "format": 0.5}).total
    1.5
    """

    total: float
    """What the advantage is computed from."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts for metrics and reports."""
    per_segment: tuple[float, ...] | None = None
    """Optional credit per segment, in place of the total."""
    per_token: tuple[float, ...] | None = None
    """Optional credit per sampled token."""
    segment_parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Named parts of per_segment for reports; NaN where a part is undefined."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the parts of a weighted sum, for advantages that treat them one by one."""
    step_ends: tuple[int, ...] | None = None
    """Sampled tokens, from 0, that end a step (a word, a thought) of credit per token, one for each step: a token on
    which two steps end stands twice. None: it knows no steps."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """One trajectory of the policy on one sample, made by the engine."""

    sample: Sample
    """What was asked."""
    segments: tuple[Segment, ...]
    """One for an answer, one per turn for a stream."""
    group_id: str
    """Equal for rollouts of the same prompt."""
    index: int = 0
    """Number within its group."""
    score: Score | None = None
    """Filled in by the collector."""
    spoken_audio: AudioClip | None = None
    """The recording of its speech; filled in when recorded rollouts are read, and by the engine of a flow."""

    @property
    def text(self) -> str:
        """Everything the policy wrote, segments joined; special tokens are left out."""
        return "".join(s.text for s in self.segments)

    @property
    def num_sampled(self) -> int:
        """Tokens and frames."""
        return sum(len(s.ids) for s in self.segments)

    @property
    def speaks(self) -> bool:
        """Whether any segment holds codec frames, observed or sampled."""
        return any(s.codes is not None or s.prompt_codes is not None for s in self.segments)

    @property
    def audio(self) -> tuple[AudioClip, ...]:
        return tuple(c for s in self.segments for c in s.audio)

    @property
    def images(self) -> tuple[Picture, ...]:
        return tuple(p for s in self.segments for p in s.images)

    @property
    def name(self) -> str:
        """Its name in error messages."""
        return f"{self.sample.id!r} (group {self.group_id}, answer {self.index})"

    def _repr_html_(self) -> str:
        """Prompt, text, gold answers, scores and players, for notebooks."""
        contents = (c for m in self.sample.messages for c in m.content)
        prompt = "".join(html.escape(c) if isinstance(c, str) else c._repr_html_() for c in contents)
        stream = "".join(turn.audio._repr_html_() for turn in self.sample.turns)
        gold = self.sample.references or tuple(t.reference for t in self.sample.turns if t.reference)
        rows = {"prompt": prompt, "stream": stream, "references": html.escape(" | ".join(gold))}
        rows["text"] = html.escape(self.text)
        rows["speech"] = "" if self.spoken_audio is None else self.spoken_audio._repr_html_()
        if self.score is not None:
            values = {"total": self.score.total, **self.score.parts}
            rows["score"] = html.escape(", ".join(f"{name} {value:.3g}" for name, value in values.items()))
        body = "".join(f"<tr><th>{name}</th><td>{row}</td></tr>" for name, row in rows.items() if row)
        return f"<table>{body}</table>"

    def with_score(self, score: Score) -> Rollout:
        return dataclasses.replace(self, score=score)
