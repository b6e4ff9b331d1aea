"""Texts to be spoken, as prompts and as examples with their recordings.

A prompt is the conversation that Higgs Audio V2 was trained on: for a voice to be cloned a line of it with its text,
then the text to say. A tag such as [SPEAKER0] at its beginning says who speaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from audiorl.audio import AudioClip, seconds
from audiorl.data.seedtts import Utterance
from audiorl.models.examples import Example
from audiorl.types import Message, Sample


def speech_sample(
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


def recorded_example(
    id: str, text: str, clip: AudioClip, *, speaker: str = "", metadata: Mapping[str, Any] | None = None
) -> Example:
    """A text and how it sounds. The prompt's metadata knows the recording and its length."""
    about = {**(metadata or {}), "reference_seconds": seconds(clip), "reference_audio": clip}
    return Example(speech_sample(id, text, speaker=speaker, metadata=about), speech=(clip,))


def utterance_sample(utterance: Utterance, tag: bool = False) -> Sample:
    """The prompt of an utterance; `tag` puts its speaker before the text.

    metadata["reference_audio"] is whose voice is wanted: the prompt's, or else the recording's.
    metadata["reference_seconds"] is how long the recording lasts, or else the text would at the prompt's pace.
    """
    u = utterance
    about: dict[str, Any] = {name: v for name, v in (("speaker", u.speaker), ("language", u.language)) if v}
    if u.recording is not None:
        about |= {"reference_seconds": seconds(u.recording), "reference_audio": u.recording}
    elif u.prompt is not None:
        about["reference_seconds"] = seconds(u.prompt) * _letters(u.text) / max(_letters(u.prompt_text), 1)
    if u.prompt is not None:
        about["reference_audio"] = u.prompt
    voice = None if u.prompt is None else (u.prompt_text, u.prompt)
    return speech_sample(u.name, u.text, speaker=u.speaker if tag else "", voice=voice, metadata=about)


def utterance_example(utterance: Utterance, tag: bool = False) -> Example:
    """The prompt of an utterance with its recording. Raises ValueError where there is none."""
    if utterance.recording is None:
        raise ValueError(f"{utterance.name!r}: has no recording to learn from; give the row's audio")
    return Example(utterance_sample(utterance, tag), speech=(utterance.recording,))


def _letters(text: str) -> int:
    return sum(map(str.isalnum, text))


def _tagged(speaker: str, text: str) -> str:
    return f"[{speaker}] {text}" if speaker else text
