"""Other views of a prompt: the same question about silence, another recording, the words that are said, and so on.

A view changes what a model is given, not what may be answered: choices, references and task stay. The log-probability
of one answer under two views says what the difference between them is worth to a model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

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
    """Return the text of the prompt without its clips."""
    return with_clips(sample, lambda clip, _: "")


def transcript(sample: Sample) -> Sample:
    """metadata["text"] in place of the one clip. Raises ValueError without transcript and for more clips."""
    text = sample.metadata.get("text")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'sample {sample.id!r}: no transcript in metadata "text" to put in place of the audio')
    return _with_one(sample, "one transcript", f"{text.strip()}\n")


def clean(sample: Sample) -> Sample:
    """metadata["clean_audio"] in place of the one clip. Raises ValueError without it and for more clips."""
    recording = sample.metadata.get("clean_audio")
    if isinstance(recording, str) and recording:
        recording = AudioClip(path=recording)
    if not isinstance(recording, AudioClip):
        raise ValueError(f'sample {sample.id!r}: no "clean_audio" to put in place of its audio; give the column')
    return _with_one(sample, "one clean recording", recording)


def rationale(sample: Sample) -> Sample:
    """Return the prompt with metadata["rationale"] after the last turn's text. Raises ValueError without it."""
    reasons = sample.metadata.get("rationale")
    if not isinstance(reasons, str) or not reasons.strip():
        raise ValueError(f'sample {sample.id!r}: no "rationale" to add to the prompt; give the column')
    *earlier, last = sample.messages
    last = replace(last, content=(*last.content, f"\n\nReasons for the right answer: {reasons.strip()}"))
    return replace(sample, messages=(*earlier, last))


VIEWS: Mapping[str, View] = {
    "silence": silence,
    "noise": noise,
    "text": text_only,
    "transcript": transcript,
    "clean": clean,
    "rationale": rationale,
}
SWAP, SWAP_ALIKE = "swap", "swap-alike"
"""The names of the views that need other samples; see `swapped` and `swapped_alike`."""


def swapped(samples: Sequence[Sample]) -> list[Sample]:
    """Return each sample with the clips of the one most like it in length, whose audio and references differ.

    Raises ValueError where a sample has no such partner, and for prompts with different numbers of clips.
    """
    return _swapped(samples, alike=False)


def swapped_alike(samples: Sequence[Sample]) -> list[Sample]:
    """Return each sample with other clips, if possible of a sample with its references, and most like it in length.

    What the right audio adds over them is not the answer. Raises ValueError as `swapped` does.
    """
    return _swapped(samples, alike=True)


def _swapped(samples: Sequence[Sample], alike: bool) -> list[Sample]:
    if len({len(s.audio) for s in samples}) > 1:
        raise ValueError("the view swap needs samples with equally many clips")
    lengths = [sum(map(seconds, s.audio)) for s in samples]
    keys = [tuple(c.key for c in s.audio) for s in samples]
    views = []
    for sample, length, key in zip(samples, lengths, keys, strict=True):
        others = [(s, abs(n - length)) for s, n, k in zip(samples, lengths, keys, strict=True) if k != key]
        if alike:
            others = [o for o in others if o[0].references == sample.references] or others
        elif sample.references:
            others = [o for o in others if o[0].references != sample.references]
        if not others:
            wanted = "other audio" if alike else "other audio and another answer"
            raise ValueError(f"sample {sample.id!r}: no other sample has {wanted} to swap with")
        clips = min(others, key=lambda other: other[1])[0].audio
        views.append(with_clips(sample, lambda clip, number, clips=clips: clips[number]))  # type: ignore[misc]
    return views


_SWAPS = {SWAP: swapped, SWAP_ALIKE: swapped_alike}


def view_named(name: str) -> View:
    """One of `VIEWS`, or FILE.py:FUNCTION of the user's. Raises ValueError for anything else."""
    if name in VIEWS:
        return VIEWS[name]
    file, _, function = name.rpartition(":")
    if not file.endswith(".py"):
        known = ", ".join((*VIEWS, *_SWAPS))
        raise ValueError(f"no view is called {name!r}; choose from {known}, or give FILE.py:FUNCTION")
    return load_function(file, function, "view")


def view_of(sample: Sample, name: str) -> Sample:
    """One sample under the view of that name, checked like `views_of`; swaps need several samples."""
    return views_of([sample], name)[0]


def views_of(samples: Sequence[Sample], name: str) -> list[Sample]:
    """Return every sample under the view of that name.

    Raises ValueError for a view that changes what may be answered, or that leaves the prompt as it was.
    """
    views = _SWAPS[name](samples) if name in _SWAPS else list(map(view_named(name), samples))
    for sample, view in zip(samples, views, strict=True):
        if not isinstance(view, Sample) or (view.choices, view.references) != (sample.choices, sample.references):
            raise ValueError(f"view {name!r} changes the choices or references of sample {sample.id!r}; it must not")
        if _content(view) == _content(sample):
            raise ValueError(f"view {name!r} changes nothing in sample {sample.id!r}")
    return views


def with_clips(sample: Sample, other: Callable[[AudioClip, int], AudioClip | str]) -> Sample:
    """Return the sample with other(clip, number) in place of each clip of its messages.

    Raises ValueError for a stream, whose audio is in its turns, and for a sample without clips.
    """
    if sample.turns or not sample.audio:
        what = "is a stream; views are of single prompts" if sample.turns else "has no audio to view differently"
        raise ValueError(f"sample {sample.id!r} {what}")
    numbers = count()
    messages = []
    for message in sample.messages:
        pieces = [other(c, next(numbers)) if isinstance(c, AudioClip) else c for c in message.content]
        messages.append(replace(message, content=tuple(piece for piece in pieces if piece != "")))
    return replace(sample, messages=tuple(messages))


def _with_one(sample: Sample, what: str, replacement: AudioClip | str) -> Sample:
    """Return the sample with a replacement of its only clip. Raises ValueError if it has several clips."""
    if len(sample.audio) > 1:
        raise ValueError(f"sample {sample.id!r}: {what} cannot stand for {len(sample.audio)} clips")
    return with_clips(sample, lambda clip, _: replacement)


def _content(sample: Sample) -> list[str]:
    return [c if isinstance(c, str) else c.key for m in sample.messages for c in m.content]


def _length(clip: AudioClip) -> int:
    return round(seconds(clip) * RATE)


def _clip(samples_T: np.ndarray) -> AudioClip:
    return AudioClip(array=samples_T, sample_rate=RATE)
