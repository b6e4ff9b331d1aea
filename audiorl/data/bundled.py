"""Tasks on the bundled speech, for trying a recipe before there is data of one's own, by name.

bundled_set("bundled:languages/train")           # prompts
bundled_pairs("bundled:languages/train")         # a right and a wrong answer
"""

from __future__ import annotations

import random
from typing import Literal

from audiorl.audio import AudioClip
from audiorl.data.corpus import Utterance, bundled_speech, normalised, split_by_key, unseen_speakers
from audiorl.data.preferences import Pair, Steps
from audiorl.data.prompts import LANGUAGES, asr_prompt, choice_question
from audiorl.types import Message, Sample

NAMES = ("bundled", "bundled:languages/train", "bundled:languages/test", "bundled:languages/unseen")
SPOKEN = {code: LANGUAGES[code] for code in ("en", "es", "fr")}
LANGUAGE_QUESTION = "Which language is spoken: English, Spanish or French?"


def bundled_questions(think: bool = True, seed: int = 0) -> list[Sample]:
    """Ask which of four phrases was said: one question a recording, wrong choices in its language."""
    rng = random.Random(seed)
    utterances = bundled_speech(max_seconds=3.0)
    texts: dict[str, list[str]] = {}
    for u in utterances:
        if u.text not in texts.setdefault(u.language, []):
            texts[u.language].append(u.text)
    samples = []
    for u in utterances:
        others = rng.sample([t for t in texts[u.language] if t != u.text], 3)
        choices = [u.text, *others]
        rng.shuffle(choices)
        messages = choice_question(u.clip, "Which phrase is spoken?", choices, think=think)
        samples.append(Sample(u.id, messages, (u.text,), tuple(choices), "phrase", _about(u)))
    return samples


def bundled_transcripts(think: bool = False, max_seconds: float = 3.0) -> list[Sample]:
    """Speech recognition on the bundled recordings."""
    speech = bundled_speech(max_seconds=max_seconds)
    return [Sample(u.id, asr_prompt(u.clip, u.language, think), (u.text,), (), "asr", _about(u)) for u in speech]


def bundled_languages(
    split: Literal["train", "test", "unseen"],
    max_seconds: float = 4.0,
    held_out: float = 0.27,
    max_phrases: int | None = None,
) -> list[Sample]:
    """Ask which language is spoken. No phrase of "test", a fraction `held_out` of all recordings, is in "train".

    "unseen": recordings of five other speakers, which a clone of the repository has; see `unseen_speakers`.
    """
    if split == "unseen":
        return [language_question(u.clip, u, "human") for u in unseen_speakers() if u.duration <= max_seconds]
    train, test = split_by_key(language_phrases(max_seconds, max_phrases), held_out, seed=0)  # one split for all seeds
    return [language_question(u.clip, u, "human") for u in (train if split == "train" else test)]


def language_phrases(max_seconds: float = 4.0, max_phrases: int | None = None) -> list[Utterance]:
    """Return the recordings behind `bundled_languages`; `max_phrases` takes about so many, evenly spaced."""
    phrases = bundled_speech(tuple(SPOKEN), max_seconds=max_seconds)
    return phrases if max_phrases is None else phrases[:: max(len(phrases) // max_phrases, 1)]


def language_question(clip: AudioClip, u: Utterance, voice: str) -> Sample:
    """Ask which language is spoken in `clip`, the utterance said by `voice`."""
    return Sample(
        id=f"{u.id}/{voice}",
        messages=(Message("system", ("",)), Message("user", (clip, LANGUAGE_QUESTION))),
        references=(SPOKEN[u.language],),
        choices=tuple(SPOKEN.values()),
        task=SPOKEN[u.language],
        metadata={"text": u.text, "speaker": u.speaker},
    )


def bundled_set(name: str, think: bool = True, seed: int = 0) -> list[Sample]:
    """Return the samples of one of NAMES, else raise ValueError; `think` and `seed` shape `bundled` only."""
    if name not in NAMES:
        raise ValueError(f"no bundled set is called {name!r}; choose from {', '.join(NAMES)}")
    if name == "bundled":
        return bundled_questions(think, seed)
    return bundled_languages(name.rpartition("/")[2])  # type: ignore[arg-type]


def bundled_pairs(name: str, think: bool = False, seed: int = 0) -> list[Pair]:
    """Return each sample of a set with the right answer chosen and one wrong choice, drawn by `seed`, rejected."""
    rng = random.Random(seed)
    return [
        Pair(s, _turn(s, s.references[0], think), _turn(s, rng.choice(_wrong(s)), think))
        for s in bundled_set(name, think, seed)
    ]


def bundled_steps(name: str, seed: int = 0) -> list[Steps]:
    """Return each sample of a set twice, as a thought and an answer: both right, then a wrong answer.

    The thought before the wrong answer is right (labels 1, 0) or, as often, that of another sample (0, 0).
    """
    rng = random.Random(seed)
    samples = bundled_set(name, think=True, seed=seed)
    thoughts = sorted({_first_words(s) for s in samples})
    steps = []
    for s in samples:
        words = _first_words(s)
        other_words = rng.choice([t for t in thoughts if t != words])
        right = rng.random() < 0.5
        steps.append(Steps(s, _thought_and_answer(words, s.references[0]), (1.0, 1.0)))
        wrong = _thought_and_answer(words if right else other_words, rng.choice(_wrong(s)))
        steps.append(Steps(s, wrong, (float(right), 0.0)))
    return steps


def _turn(sample: Sample, answer: str, think: bool) -> str:
    thought = f"<think>{_first_words(sample)}</think>" if think else ""
    return f"{thought}<answer>{answer}</answer>"


def _thought_and_answer(words: str, answer: str) -> tuple[str, str]:
    return f"<think>I hear {words}</think>", f"<answer>{answer}</answer>"


def _first_words(sample: Sample) -> str:
    return " ".join(normalised(sample.metadata["text"]).split()[:2])


def _wrong(sample: Sample) -> list[str]:
    return [choice for choice in sample.choices if choice not in sample.references]


def _about(u: Utterance) -> dict[str, str]:
    return {"language": u.language, "text": u.text, "speaker": u.speaker}
