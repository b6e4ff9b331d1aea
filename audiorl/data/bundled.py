"""Tasks on the bundled speech, for trying a recipe before there is data of one's own."""

from __future__ import annotations

import random
from collections.abc import Sequence

from audiorl.data.corpus import Utterance, bundled_speech
from audiorl.data.prompts import asr_prompt, choice_question
from audiorl.types import Sample


def bundled_questions(think: bool = True, max_seconds: float = 3.0, seed: int = 0) -> list[Sample]:
    """Which of four phrases was said? One question per bundled recording, the wrong choices in the same language."""
    rng = random.Random(seed)
    utterances = bundled_speech(max_seconds=max_seconds)
    texts: dict[str, list[str]] = {}
    for u in utterances:
        if u.text not in texts.setdefault(u.language, []):
            texts[u.language].append(u.text)
    samples = []
    for u in utterances:
        others = rng.sample([t for t in texts[u.language] if t != u.text], 3)
        choices = _shuffled([u.text, *others], rng)
        messages = choice_question(u.clip, "Which phrase is spoken?", choices, think=think)
        samples.append(Sample(u.id, messages, (u.text,), tuple(choices), "phrase", _about(u)))
    return samples


def bundled_transcripts(
    languages: Sequence[str] = ("en", "es", "fr"), think: bool = False, max_seconds: float = 3.0
) -> list[Sample]:
    """Speech recognition on the bundled recordings."""
    return [
        Sample(u.id, asr_prompt(u.clip, u.language, think=think), (u.text,), (), "asr", _about(u))
        for u in bundled_speech(languages, max_seconds=max_seconds)
    ]


def _shuffled(items: list[str], rng: random.Random) -> list[str]:
    rng.shuffle(items)
    return items


def _about(u: Utterance) -> dict[str, str]:
    return {"language": u.language, "text": u.text, "speaker": u.speaker}
