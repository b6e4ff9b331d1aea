"""Questions about the speech of a corpus that `audiorl data build` wrote: language, voices, words and their meaning.

The held-out split has other speakers and other prompts than the training split. Two or more voices in one clip come
from Tux Paint, so that a clip has one licence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from audiorl.data.corpus import Utterance, split_by_key
from audiorl.data.prompts import LANGUAGES
from corpora.questions.choices import Draft
from corpora.sources.voices import RATE

HELD_OUT_SPEAKERS = (
    "July E. Jiménez",
    "Armelle Desjardins",
    "Tux Paint en",
    "Tux Paint es",
    "Tux Paint fr",
    "Tux Paint ru",
    "Tux Paint be",
    "Paola Dal Zot",
)
VOICES = {"bg": "man", "ca": "man", "da": "man", "fr": "man", "ru": "man"} | dict.fromkeys(
    ("be", "el", "es", "ro"), "woman"
)
"""Who speaks Tux Paint's descriptions in a language: by the contributor's name and the pitch (below 150 Hz, above 220
Hz in the median)."""
SPOKEN = ("en", "es", "fr", "it", "ru")
"""Languages of the question which language it is: each has speakers in both splits."""
TWO_VOICES = ("first a man", "first a woman", "two men", "two women")
COUNTS = ("one", "two", "three", "four")


def split_speech(utterances: Sequence[Utterance], seed: int) -> tuple[list[Utterance], list[Utterance]]:
    """(training, held-out) utterances that share neither a speaker nor a prompt nor a text."""
    train, held_out = split_by_key(utterances, 0.25, seed)
    known = [u for u in train if u.speaker not in HELD_OUT_SPEAKERS]
    return known, [u for u in held_out if u.speaker in HELD_OUT_SPEAKERS]


def speech_drafts(split: str, count: int, seed: int, utterances: Sequence[Utterance]) -> list[Draft]:
    """About `count` questions on the utterances of one split, of 0.6 to 6 s.

    Raises ValueError where the corpus lacks the voices that a kind of question needs.
    """
    short = [u for u in utterances if 0.6 <= u.duration <= 6]
    rng = random.Random(f"{seed}/speech/{split}")
    per_kind = count // 5
    return [
        *_language(split, per_kind, short, rng),
        *_two_voices(split, per_kind, short, rng),
        *_speakers(split, per_kind, short, rng),
        *_words(split, per_kind, short, rng, "phrase"),
        *_words(split, per_kind, short, rng, "meaning"),
    ]


def stamps(utterances: Sequence[Utterance]) -> list[Utterance]:
    """Return those that Tux Paint's voices say."""
    return [u for u in utterances if u.speaker.startswith("Tux Paint")]


def _draft(split: str, kind: str, number: int, question: str, answer: str, used: Sequence[Utterance], **more) -> Draft:  # type: ignore[no-untyped-def]
    waves = [partial(u.clip.load, RATE) for u in used]
    licence = " and ".join(sorted({u.licence for u in used}))
    id = f"speech-{kind}-{split}-{number:04d}"
    return Draft(
        id, "speech", kind, question, answer, partial(_joined, waves, id), tuple(u.id for u in used), licence, **more
    )


def _joined(waves: Sequence[Callable[[], np.ndarray]], seed: str) -> np.ndarray:
    """Return the clips at one loudness with half a second between them."""
    level = random.Random(seed).uniform(0.05, 0.1)
    pause = np.zeros(RATE // 2, np.float32)
    pieces: list[np.ndarray] = []
    for wave in waves:
        wav = wave()
        wav = wav * (level / max(float(np.sqrt(np.mean(wav**2))), 1e-6))
        pieces += [pause, np.clip(wav, -1, 1).astype(np.float32)] if pieces else [np.clip(wav, -1, 1)]
    return np.concatenate(pieces)


def _language(split: str, count: int, utterances: Sequence[Utterance], rng: random.Random) -> list[Draft]:
    by_speaker = {code: _by_speaker([u for u in utterances if u.language == code]) for code in SPOKEN}
    missing = [LANGUAGES[code] for code, speakers in by_speaker.items() if not speakers]
    if missing:
        raise ValueError(f"the corpus has no {split} speakers of {', '.join(missing)}; build it with all sources")
    drafts = []
    for n in range(count):
        code = SPOKEN[n % len(SPOKEN)]
        u = rng.choice(by_speaker[code][rng.choice(sorted(by_speaker[code]))])
        more = {"difficulty": "easy"}
        drafts.append(_draft(split, "language", n, "Which language is spoken?", LANGUAGES[code], [u], **more))
    return drafts


def _two_voices(split: str, count: int, utterances: Sequence[Utterance], rng: random.Random) -> list[Draft]:
    voices: dict[str, dict[str, list[Utterance]]] = {"man": {}, "woman": {}}
    for speaker, said in _by_speaker(stamps(utterances)).items():
        voice = VOICES.get(said[0].language)
        if voice is not None:
            voices[voice][speaker] = said
    if min(map(len, voices.values())) < 2:
        raise ValueError(f"the corpus has too few {split} voices of Tux Paint; build it with all sources")
    orders = (("man", "woman"), ("woman", "man"), ("man", "man"), ("woman", "woman"))
    drafts = []
    for n in range(count):
        first, second = orders[n % 4]
        speakers = [rng.choice(sorted(voices[first]))]
        speakers.append(rng.choice(sorted(set(voices[second]) - set(speakers))))
        used = [rng.choice(voices[v][s]) for v, s in zip((first, second), speakers, strict=True)]
        question = "Two people speak one after the other. Who are they?"
        drafts.append(_draft(split, "voices", n, question, TWO_VOICES[n % 4], used, choices=TWO_VOICES))
    return drafts


def _speakers(split: str, count: int, utterances: Sequence[Utterance], rng: random.Random) -> list[Draft]:
    by_speaker = {s: said for s, said in _by_speaker(stamps(utterances)).items() if len(said) >= 4}
    if len(by_speaker) < 4:
        raise ValueError(f"the corpus has fewer than four {split} voices of Tux Paint; build it with all sources")
    drafts = []
    for n in range(count):
        different = rng.sample(sorted(by_speaker), n % 4 + 1)
        turns = different + [rng.choice(different) for _ in range(4 - len(different))]
        rng.shuffle(turns)
        used: list[Utterance] = []
        for speaker in turns:
            used.append(
                rng.choice([u for u in by_speaker[speaker] if u not in used and u.duration < 3] or by_speaker[speaker])
            )
        question = "How many different people speak?"
        drafts.append(_draft(split, "speakers", n, question, COUNTS[n % 4], used, choices=COUNTS, difficulty="hard"))
    return drafts


def _words(split: str, count: int, utterances: Sequence[Utterance], rng: random.Random, kind: str) -> list[Draft]:
    """`phrase`: what is said, in its language; `meaning`: what it means in English. Choices are of the same speaker."""
    question = "What is said?" if kind == "phrase" else "What does the speaker say, in English?"
    pools: dict[str, list[tuple[str, Utterance]]] = {}
    for u in utterances:
        text = u.text if kind == "phrase" else u.translation
        if text and len(text) <= 80:
            pools.setdefault(u.speaker, []).append((text, u))
    pools = {speaker: rng.sample(said, len(said)) for speaker, said in pools.items() if len(said) >= 8}
    if not pools:
        raise ValueError(f"the corpus has no texts of {split} speakers for the kind {kind}; build it with all sources")
    drafts: list[Draft] = []
    texts: set[tuple[str, str]] = set()
    speakers = rng.sample(sorted(pools), min(len(pools), max(count // 8, 1)))  # wrong choices need questions of a pool
    while len(drafts) < count and speakers:
        speaker = speakers[len(drafts) % len(speakers)]
        if not pools[speaker]:
            speakers.remove(speaker)
            continue
        text, u = pools[speaker].pop()
        if (speaker, text) not in texts:
            texts.add((speaker, text))
            drafts.append(_draft(split, kind, len(drafts), question, text, [u], pool=speaker))
    return drafts


def _by_speaker(utterances: Sequence[Utterance]) -> dict[str, list[Utterance]]:
    speakers: dict[str, list[Utterance]] = {}
    for u in utterances:
        speakers.setdefault(u.speaker, []).append(u)
    return speakers
