"""Questions of four choices whose prompt says in words what the audio would: to learn to read choices without audio.

A model that recognises speech answers with what it recognised, not with the choice that means it. Here the words stand
in the prompt, often misspelled, and the answer is the choice that they are nearest to.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle

import numpy as np

from audiorl.audio import AudioClip
from audiorl.data.prompts import choice_question
from audiorl.data.views import RATE
from audiorl.types import Sample

MISSPELLED = 0.5
"""The share of questions whose words are misspelled."""
DROPPED = 0.2
"""The share of letters that misspelled words lack."""


def in_words(sample: Sample, words: str = "") -> Sample:
    """The prompt with `words` (default: the right answer) before its request, whose audio is to be taken away."""
    *earlier, turn = sample.messages
    content = list(turn.content)
    place = next(i for i, part in enumerate(content) if isinstance(part, str))
    content[place] = f"The audio: {words or sample.references[0]}\n{content[place]}"
    return replace(sample, messages=(*earlier, replace(turn, content=tuple(content))))


def reading_questions(forms: Mapping[str, Sequence[Sample]], count: int, seed: int) -> list[tuple[Sample, str]]:
    """Questions and the form of each, from training questions by form, whose prompts differ; forms take turns.

    A third of them have their own four choices, a third choices of any questions, a third words that nobody knows, so
    that reading is more than to recognise the choices of training; one of the four, drawn at random, is what the prompt
    says in words. The clip is a placeholder.
    """
    rng = random.Random(f"reading {seed}")
    placeholder = AudioClip(array=np.zeros(RATE, np.float32), sample_rate=RATE)
    pool = sorted({choice for samples in forms.values() for sample in samples for choice in sample.choices})
    rows = []
    for number, form in zip(range(count), cycle(forms)):
        source = rng.choice(forms[form])
        kind = rng.randrange(3)
        if kind == 0:
            choices = list(source.choices)
        elif kind == 1:
            choices = rng.sample(pool, min(4, len(pool)))
        else:
            choices = [" ".join(_new_word(rng) for _ in range(rng.randint(1, 3))) for _ in range(4)]
        answer = rng.choice(choices)
        words = answer
        if rng.random() < MISSPELLED:
            words = "".join(letter for letter in answer if rng.random() >= DROPPED) or answer
        request = next(part for part in source.messages[-1].content if isinstance(part, str))
        messages = choice_question(placeholder, request.split("\n")[0], choices, "<think>" in request)
        sample = replace(
            source, id=f"reading-{number}", messages=messages, references=(answer,), choices=tuple(choices)
        )
        rows.append((in_words(sample, words), form))
    return rows


def _new_word(rng: random.Random) -> str:
    return "".join(rng.choice("bcdfghklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))
