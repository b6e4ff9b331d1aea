"""Questions of four choices whose prompt says in words what the audio would: to learn to read choices without audio.

A model that recognises speech answers with what it recognised, not with the choice that means it. Here the words stand
in the prompt, often misspelled, and the answer is the choice that they are nearest to.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

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


def reading_questions(forms: Mapping[bool, Sequence[Sample]], count: int, seed: int) -> list[tuple[Sample, bool]]:
    """Questions and whether each asks for a thought, from training questions with (True) and without (False) thoughts.

    Every other question has its own four choices, the others have choices of any questions; one of the four, drawn at
    random, is what the prompt says in words. The clip is a placeholder.
    """
    rng = random.Random(f"reading {seed}")
    placeholder = AudioClip(array=np.zeros(RATE, np.float32), sample_rate=RATE)
    pool = sorted({choice for sample in forms[False] for choice in sample.choices})
    rows = []
    for number in range(count):
        think = number % 2 == 1
        source = rng.choice(forms[think])
        choices = list(source.choices) if rng.random() < 0.5 else rng.sample(pool, min(4, len(pool)))
        answer = rng.choice(choices)
        words = _misspelled(answer, rng) if rng.random() < MISSPELLED else answer
        request = next(part for part in source.messages[-1].content if isinstance(part, str))
        messages = choice_question(placeholder, request.split("\n")[0], choices, think)
        sample = replace(
            source, id=f"reading-{number}", messages=messages, references=(answer,), choices=tuple(choices)
        )
        rows.append((in_words(sample, words), think))
    return rows


def _misspelled(text: str, rng: random.Random) -> str:
    return "".join(letter for letter in text if rng.random() >= DROPPED) or text
