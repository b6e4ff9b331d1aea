"""Texts to be spoken, as prompts and as examples with their recordings.

A prompt is the conversation that Higgs Audio V2 was trained on: for a voice to be cloned a line of it with its text,
then the text to say. A tag such as [SPEAKER0] at its beginning says who speaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from audiorl.data.audio import seconds
from audiorl.train.examples import Example
from audiorl.types import AudioClip, Message, Sample


def to_speak(
    id: str,
    text: str,
    *,
    speaker: str = "",
    voice: tuple[str, AudioClip] | None = None,
    scene: str = "",
    metadata: Mapping[str, Any] | None = None,
) -> Sample:
    """A text that the policy is to say at once. Its reference is the text itself.

    speaker: a tag in front of the text, as [SPEAKER0]. voice: what someone says in a recording, and the recording, to
    be imitated. scene: a description of the recording for the system's turn. Raises ValueError for an empty text.
    """
    if not text.strip():
        raise ValueError(f"sample {id!r}: the text to say is empty")
    messages: list[Message] = []
    if scene:
        messages.append(Message("system", (scene,)))
    if voice is not None:
        messages += [Message("user", (_tagged(speaker, voice[0]),)), Message("assistant", (voice[1],))]
    messages.append(Message("user", (_tagged(speaker, text),)))
    about: dict[str, Any] = {**(metadata or {}), "respond": "speech"}
    if voice is not None:
        about.setdefault("reference_audio", voice[1])
    return Sample(id, tuple(messages), (text,), task="tts", metadata=about)


def as_speech(sample: Sample, speaker: str = "") -> Example:
    """A recording with its transcript, as `read_samples` gives it for speech recognition, turned round.

    Raises ValueError for a sample with other than one clip, or without a reference.
    """
    if len(sample.audio) != 1 or not sample.references:
        raise ValueError(
            f"sample {sample.id!r} has {len(sample.audio)} clips and {len(sample.references)} transcripts; speech is "
            "learned from one recording with its transcript"
        )
    return spoken(sample.id, sample.references[0], sample.audio[0], speaker=speaker, metadata=sample.metadata)


def spoken(
    id: str, text: str, clip: AudioClip, *, speaker: str = "", metadata: Mapping[str, Any] | None = None
) -> Example:
    """A text and how it sounds. The prompt's metadata knows the recording and its length."""
    about = {**(metadata or {}), "reference_seconds": seconds(clip), "reference_audio": clip}
    return Example(to_speak(id, text, speaker=speaker, metadata=about), speech=(clip,))


def samples_of(examples: Sequence[Example]) -> list[Sample]:
    """The prompts alone."""
    return [e.sample for e in examples]


def _tagged(speaker: str, text: str) -> str:
    return f"[{speaker}] {text}" if speaker else text
