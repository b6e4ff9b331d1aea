"""Other views of a prompt: the same question about silence, noise, another recording, or the words that are said.

A view changes what a model is given, not what may be answered: choices, references and task stay. The log-probability
of one answer under two views says what the difference between them is worth to a model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from audiorl.audio import AudioClip, seconds
from audiorl.types import Sample
from audiorl.user_files import load_function

View = Callable[[Sample], Sample]
RATE = 16_000


def silence(sample: Sample) -> Sample:
    """Digital silence as long as each clip."""
    return with_clips(sample, lambda clip, _: _clip(np.zeros(_length(clip), np.float32)))


def noise(sample: Sample) -> Sample:
    """White noise as long and as loud as each clip (root mean square); equal samples get equal noise."""

    def noisy(clip: AudioClip, number: int) -> AudioClip:
        level = float(np.sqrt(np.mean(np.square(clip.load(RATE), dtype=np.float64))))
        rng = np.random.default_rng((zlib.crc32(sample.id.encode()), number))
        return _clip(np.clip(level * rng.standard_normal(_length(clip)), -1, 1).astype(np.float32))

    return with_clips(sample, noisy)


def text_only(sample: Sample) -> Sample:
    """The text of the prompt without its clips."""
    return with_clips(sample, lambda clip, _: "")


def transcript(sample: Sample) -> Sample:
    """metadata["text"] in place of the one clip. Raises ValueError without transcript and for more clips."""
    text = sample.metadata.get("text")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'sample {sample.id!r}: no transcript in metadata "text" to put in place of the audio')
    if len(sample.audio) != 1:
        raise ValueError(f"sample {sample.id!r}: one transcript cannot stand for {len(sample.audio)} clips")
    return with_clips(sample, lambda clip, _: f"{text.strip()}\n")


VIEWS: Mapping[str, View] = {"silence": silence, "noise": noise, "text": text_only, "transcript": transcript}
SWAP = "swap"
"""The name of the view that needs other samples; see `swapped`."""


def swapped(samples: Sequence[Sample]) -> list[Sample]:
    """Each sample with the clips of another one, whose audio and references differ and which is most like it in length.

    Raises ValueError where a sample has no such partner, and for prompts with different numbers of clips.
    """
    if len({len(s.audio) for s in samples}) > 1:
        raise ValueError("the view swap needs samples with equally many clips")
    lengths = [sum(map(seconds, s.audio)) for s in samples]
    keys = [tuple(c.key for c in s.audio) for s in samples]
    views = []
    for i, sample in enumerate(samples):
        others = [
            j
            for j, other in enumerate(samples)
            if keys[j] != keys[i] and (not sample.references or other.references != sample.references)
        ]
        if not others:
            raise ValueError(f"sample {sample.id!r}: no other sample has other audio and another answer to swap with")
        clips = samples[min(others, key=lambda j: (abs(lengths[j] - lengths[i]), j))].audio
        views.append(with_clips(sample, lambda clip, number, clips=clips: clips[number]))  # type: ignore[misc]
    return views


def view_named(name: str) -> View:
    """One of `VIEWS`, or FILE.py:FUNCTION of the user's. Raises ValueError for anything else."""
    if name in VIEWS:
        return VIEWS[name]
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise ValueError(
            f"no view is called {name!r}; choose from {', '.join((*VIEWS, SWAP))}, or give FILE.py:FUNCTION"
        )
    return load_function(file, function, "view")


def view_of(sample: Sample, name: str) -> Sample:
    """One sample under the view of that name, checked like `views_of`; "swap" needs several samples."""
    return views_of([sample], name)[0]


def views_of(samples: Sequence[Sample], name: str) -> list[Sample]:
    """Every sample under the view of that name.

    Raises ValueError for a view that changes what may be answered, or that leaves the prompt as it was.
    """
    views = swapped(samples) if name == SWAP else list(map(view_named(name), samples))
    for sample, view in zip(samples, views, strict=True):
        if not isinstance(view, Sample) or (view.choices, view.references) != (sample.choices, sample.references):
            raise ValueError(f"view {name!r} changes the choices or references of sample {sample.id!r}; it must not")
        if _content(view) == _content(sample):
            raise ValueError(f"view {name!r} changes nothing in sample {sample.id!r}")
    return views


def with_clips(sample: Sample, other: Callable[[AudioClip, int], AudioClip | str]) -> Sample:
    """The sample with other(clip, number) in place of each clip of its messages.

    Raises ValueError for a stream, whose audio is in its turns, and for a sample without clips.
    """
    if sample.turns or not sample.audio:
        what = "is a stream; views are of single prompts" if sample.turns else "has no audio to view differently"
        raise ValueError(f"sample {sample.id!r} {what}")
    number = 0
    messages = []
    for message in sample.messages:
        content: list[str | AudioClip] = []
        for piece in message.content:
            if isinstance(piece, AudioClip):
                piece = other(piece, number)
                number += 1
            if piece != "":
                content.append(piece)
        messages.append(replace(message, content=tuple(content)))
    return replace(sample, messages=tuple(messages))


def _content(sample: Sample) -> list[str]:
    return [c.key if isinstance(c, AudioClip) else c for m in sample.messages for c in m.content]


def _length(clip: AudioClip) -> int:
    return round(seconds(clip) * RATE)


def _clip(samples_T: np.ndarray) -> AudioClip:
    return AudioClip(array=samples_T, sample_rate=RATE)
