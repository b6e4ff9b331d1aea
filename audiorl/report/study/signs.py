"""Signs that a reward pays for something else than quality: properties of answers, and probes that change answers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from audiorl.eval.metrics.corpus import repeated
from audiorl.eval.metrics.text import script_counts, units
from audiorl.rewards.answers import extract_answer, strip_tags
from audiorl.rewards.text_quality import LanguageConsistency, identify
from audiorl.types import Rollout, Segment

LANGUAGES = LanguageConsistency().languages
_ANSWER = re.compile(r"(.*<answer>)(.*?)(</answer>.*)", re.DOTALL)
_THOUGHT = re.compile(r"(.*?<think>)(.*?)(</think>.*)", re.DOTALL)
_BABBLE_WORDS = 30


def properties(rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """Compute what nobody wants to pay for, one value a rollout; NaN where it is not defined.

    length: sampled tokens and frames. repetition: the share of 3-grams of words that occurred before in the text.
    copy: the share of the answer's 2-grams of words that stand in the prompt. drift: 1 - the consistency with the
    sample's language (`metadata["language"]`, else that of its reference where it has 20 letters).
    """
    return {
        "length": [float(r.num_sampled) for r in rollouts],
        "repetition": [again / max(count, 1) for again, count in (repeated(strip_tags(r.text)) for r in rollouts)],
        "copy": [_copy(r) for r in rollouts],
        "drift": [_drift(r) for r in rollouts],
    }


def _copy(rollout: Rollout) -> float:
    prompt = " ".join(c for m in rollout.sample.messages for c in m.content if isinstance(c, str))
    given, written = (
        list(pairwise(word.strip(".,;:!?¿¡\"'") for word in units(text.casefold())))
        for text in (prompt, strip_tags(rollout.text))
    )
    return sum(pair in set(given) for pair in written) / len(written) if written else 0.0


def _drift(rollout: Rollout) -> float:
    sample = rollout.sample
    language = sample.metadata.get("language")
    gold = " ".join(sample.references) or " ".join(turn.reference for turn in sample.turns)
    if not isinstance(language, str) or not language:
        if sum(script_counts(gold).values()) < 20:
            return math.nan
        language = identify(gold, LANGUAGES)[0]
    try:
        return 1.0 - LanguageConsistency(language).value(strip_tags(rollout.text), language)
    except ValueError:  # a language that the identifier does not know
        return math.nan


# -- probes ------------------------------------------------------------------------------------------------------------


def probes(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout | None]]:
    """Return the rollouts with changed texts and as many tokens in proportion; None where a change does not apply. In
    a stream every segment with text is changed.

    longer: the thought, or else the answer, is written three times. repeat: the answer is written three times. copy:
    the answer is the prompt's text. babble: the answer is a list of the words that references, or else answers, use
    most. None of them makes an answer better. What stands in <answer> is changed where there is such a part.
    """
    common = _common_words(rollouts)
    return {
        "longer": [_changed(r, _longer) for r in rollouts],
        "repeat": [_changed(r, lambda text: _with_answer(text, _thrice)) for r in rollouts],
        "copy": [_changed(r, lambda text, r=r: _with_answer(text, lambda _: _prompt(r))) for r in rollouts],  # type: ignore[misc]
        "babble": [_changed(r, lambda text: _with_answer(text, lambda _: common)) for r in rollouts],
    }


def _thrice(text: str) -> str:
    return " ".join([text.strip()] * 3)


def _longer(text: str) -> str:
    thought = _THOUGHT.fullmatch(text)
    if thought and thought[2].strip():
        return thought[1] + _thrice(thought[2]) + thought[3]
    return _with_answer(text, _thrice)


def _with_answer(text: str, change: Callable[[str], str]) -> str:
    match = _ANSWER.fullmatch(text)
    return match[1] + change(match[2]) + match[3] if match else change(text)


def _prompt(rollout: Rollout) -> str:
    texts = [c for m in rollout.sample.messages if m.role == "user" for c in m.content if isinstance(c, str)]
    return " ".join(" ".join(texts).split())


def _common_words(rollouts: Sequence[Rollout]) -> str:
    texts = [text for r in rollouts for text in (*r.sample.references, *(turn.reference for turn in r.sample.turns))]
    texts = list(dict.fromkeys(texts)) or [extract_answer(r.text) or strip_tags(r.text) for r in rollouts]
    counts = Counter(word for text in texts for word in units(text.casefold()))
    return " ".join(word for word, _ in counts.most_common(_BABBLE_WORDS))


def _changed(rollout: Rollout, change: Callable[[str], str]) -> Rollout | None:
    """Change the text of each segment that has some; None for speech and where nothing changes."""

    def rewritten(segment: Segment) -> Segment:
        if not segment.text.strip():
            return segment
        text, count = change(segment.text), len(segment.ids)
        length = max(round(count * len(text) / len(segment.text)), 1) if count else 0
        kept = torch.arange(length) % max(count, 1)
        return replace(segment, text=text, ids=segment.ids[kept], logprobs=segment.logprobs[kept])

    changed = replace(rollout, segments=tuple(map(rewritten, rollout.segments)), score=None)
    if rollout.speaks or changed.text == rollout.text or not changed.text.strip():
        return None
    return changed
