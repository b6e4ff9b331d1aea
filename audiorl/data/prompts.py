"""The user turns that ask a speech model something: a question with choices, an open question, a transcript.

The layout follows Ke-Omni-R: the audio, then the question, the options, and how to answer. With `think` the model is to
reason between <think> tags before it answers between <answer> tags; the format rewards check the same tags. The limit
on words is only asked for, never enforced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from audiorl.audio import AudioClip
from audiorl.languages import language_code
from audiorl.types import Message

_NAMES = """ar Arabic, be Belarusian, bg Bulgarian, ca Catalan, cs Czech, da Danish, de German, el Greek, en English,
    es Spanish, fi Finnish, fr French, hi Hindi, hu Hungarian, id Indonesian, it Italian, ja Japanese, ko Korean,
    nl Dutch, no Norwegian, pl Polish, pt Portuguese, ro Romanian, ru Russian, sv Swedish, th Thai, tr Turkish,
    uk Ukrainian, vi Vietnamese, zh Chinese"""
LANGUAGES: dict[str, str] = dict(pair.split() for pair in _NAMES.split(","))
"""Names for the prompt; a language that is not listed is written as given."""
TRANSLATE = "Translate what is said in this recording into English, the words only."
"""The request of `asr_prompt(ask=…)` for a translation."""
_TRANSCRIBE = "Write down exactly what is said in this{} recording, the words only."
_HOTWORDS = "\nThese words may occur: {}."
_HOTWORDS_GIVEN = re.compile(re.escape(_HOTWORDS).replace(re.escape("{}"), "([^\n]*)") + r"(?=\n|\Z)")


def choice_question(clip: AudioClip, question: str, choices: Sequence[str], think: bool = True) -> tuple[Message, ...]:
    """One user turn: the audio, the question and its options, answered with the text of one option.

    Raises ValueError for an empty question, fewer than two choices, or choices that read the same.
    """
    if len({choice.strip() for choice in choices}) != len(choices) or len(choices) < 2:
        raise ValueError(f"a question needs two or more different choices, got {list(choices)}")
    options = "\n".join(f"- {choice.strip()}" for choice in choices)
    ask = f"Listen to the audio and choose the right option, in its exact words:\n{options}"
    return _turn(clip, f"{_stated(question)}\n{ask}", think)


def open_question(clip: AudioClip, question: str, think: bool = True) -> tuple[Message, ...]:
    """One user turn: the audio and a question without options."""
    return _turn(clip, _stated(question), think)


def language_name(language: str) -> str:
    """Return what prompts call a language. Raises ValueError for an unknown one."""
    return LANGUAGES.get(language_code(language), language)


def asr_prompt(
    clip: AudioClip, language: str = "", think: bool = False, ask: str = "", hotwords: Sequence[str] = ()
) -> tuple[Message, ...]:
    """One user turn that asks for the transcript, without think with no tags. `language`: an ISO code or a name, or "".

    `ask` replaces the English request, for instance by one in the language of the recording. `hotwords` are words that
    may be said, such as names; see `with_hotwords`.
    """
    spoken = f" {language_name(language)}" if language else ""
    ask = with_hotwords(ask.strip() or _TRANSCRIBE.format(spoken), hotwords)
    return _turn(clip, ask, think) if think else (Message("user", (clip, ask)),)


def with_hotwords(request: str, hotwords: Sequence[str]) -> str:
    """Return a request for a transcript with these hotwords, in place of those that it has; without any it has none.

    They stand in a sentence before the request for tags. `transcript_request` reads them back, for a model family that
    was trained with another form.
    """
    request = _HOTWORDS_GIVEN.sub("", request)
    tags = next((f"\n{how}" for how in map(how_to_answer, (True, False)) if request.endswith(f"\n{how}")), "")
    said = _HOTWORDS.format(", ".join(hotwords)) if hotwords else ""
    return request.removesuffix(tags) + said + tags


@dataclass(frozen=True)
class TranscriptRequest:
    """A request for a transcript in its parts, for families with a form of their own."""

    language: str | None
    """"" for none, None where the request is not the usual one."""
    hotwords: tuple[str, ...]
    rest: str
    """The request without its hotwords."""


def transcript_request(request: str) -> TranscriptRequest:
    """Return the language and the hotwords of a request of `asr_prompt`."""
    given = _HOTWORDS_GIVEN.search(request)
    rest = _HOTWORDS_GIVEN.sub("", request)
    before, after = _TRANSCRIBE.split("{}")
    language = None
    if rest.startswith(before) and rest.endswith(after):
        spoken = rest[len(before) : len(rest) - len(after)].strip()
        language = next((code for code, name in LANGUAGES.items() if name == spoken), spoken)
    return TranscriptRequest(language, tuple(given[1].split(", ")) if given else (), rest)


def _stated(question: str) -> str:
    if not question.strip():
        raise ValueError("the question is empty; give its text")
    return question.strip()


def how_to_answer(think: bool) -> str:
    """Return the request for the answer in tags, with `think` after a thought in others."""
    if think:
        return (
            "First think it over inside <think> </think>, in fewer than 50 words. "
            "Then give only the final answer inside <answer> </answer>."
        )
    return "Give only the final answer, inside <answer> </answer>."


def _turn(clip: AudioClip, ask: str, think: bool) -> tuple[Message, ...]:
    return (Message("user", (clip, f"{ask}\n{how_to_answer(think)}")),)
