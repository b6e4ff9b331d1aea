"""The user turns that ask a speech model something: a question with choices, an open question, a transcript.

The layout follows Ke-Omni-R: the audio, then the question, the options, and how to answer. With `think` the model is to
reason between <think> tags before it answers between <answer> tags; the format rewards check the same tags. The limit
on words is only asked for, never enforced.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def asr_prompt(clip: AudioClip, language: str = "", think: bool = False, ask: str = "") -> tuple[Message, ...]:
    """One user turn that asks for the transcript, without think with no tags. `language`: an ISO code or a name, or "".

    `ask` replaces the English request, for instance by one in the language of the recording.
    """
    spoken = f" {language_name(language)}" if language else ""
    ask = ask.strip() or _TRANSCRIBE.format(spoken)
    return _turn(clip, ask, think) if think else (Message("user", (clip, ask)),)


def transcript_language(request: str) -> str | None:
    """Return the language that a plain request of `asr_prompt` names, "" for none; None for another request."""
    before, after = _TRANSCRIBE.split("{}")
    if not (request.startswith(before) and request.endswith(after)):
        return None
    spoken = request[len(before) : len(request) - len(after)].strip()
    return next((code for code, name in LANGUAGES.items() if name == spoken), spoken)


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
