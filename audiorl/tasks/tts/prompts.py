"""Texts for speech synthesis, as prompts and as examples with their recordings.

A prompt is a conversation in the format of Higgs Audio V2: for voice cloning first a text with its recording, then the
text to speak. A tag such as [SPEAKER0] in front of the text names the speaker.
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
    """A prompt to speak `text`, without any written answer. Its reference is the text itself.

    speaker: a tag in front of the text, as [SPEAKER0]. voice: (text, recording) of the voice to imitate. scene: a
    description of the recording for the system message. Raises ValueError for an empty text.
    """
    if not text.strip():
        raise ValueError(f"sample {id!r}: the text to speak is empty")
    messages: list[Message] = []
    if scene:
        messages.append(Message("system", (scene,)))
    if voice is not None:
        messages += [Message("user", (tagged(speaker, voice[0]),)), Message("assistant", (voice[1],))]
    messages.append(Message("user", (tagged(speaker, text),)))
    about: dict[str, Any] = {**(metadata or {}), "respond": "speech"}
    if voice is not None:
        about.setdefault("reference_audio", voice[1])
    return Sample(id, tuple(messages), (text,), task="tts", metadata=about)


def utterance_sample(utterance: Utterance, tag: bool = False) -> Sample:
    """The prompt of an utterance; `tag` puts its speaker in front of the text.

    metadata["reference_audio"] has the wanted voice: the prompt's audio, or else the recording.
    metadata["reference_seconds"] is the recording's duration, or else an estimate from the prompt's speaking rate.
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
        raise ValueError(f"{utterance.name!r}: has no recording to train on; give the row's audio")
    return Example(utterance_sample(utterance, tag), speech=(utterance.recording,))


def _letters(text: str) -> int:
    return sum(map(str.isalnum, text))


def tagged(speaker: str, text: str) -> str:
    """The text with its speaker in front, as [SPEAKER0]."""
    return f"[{speaker}] {text}" if speaker else text
