"""The thinking: its format, its length, and whether it repeats what is said."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from audiorl.eval.metrics.text import char_errors, normalize, units
from audiorl.rewards.asr import language_of
from audiorl.rewards.tags import extract_think
from audiorl.types import Rollout, Sample, Score

_THINK_ANSWER = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
_ANSWER_ONLY = re.compile(r"<answer>.*?</answer>", re.DOTALL)


def _count_tags(text: str) -> tuple[int, int, int, int]:
    return text.count("<think>"), text.count("</think>"), text.count("<answer>"), text.count("</answer>")


@dataclass(frozen=True)
class ThinkFormat:
    """1 if the whole response is `<think>.*?</think>\\s*<answer>.*?</answer>`, each tag once, else 0.

    The regular expression is Ke-Omni-R's; it alone would also accept nested and repeated tags. Whitespace around the
    response does not matter.
    """

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(float(self.matches(r.text))) for r in rollouts]

    def matches(self, text: str) -> bool:
        return _count_tags(text) == (1, 1, 1, 1) and _THINK_ANSWER.fullmatch(text.strip()) is not None


@dataclass(frozen=True)
class AnswerFormat:
    """1 if the whole response is one `<answer>.*?</answer>` without thinking, else 0: the no-think counterpart."""

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(float(self.matches(r.text))) for r in rollouts]

    def matches(self, text: str) -> bool:
        return _count_tags(text) == (0, 0, 1, 1) and _ANSWER_ONLY.fullmatch(text.strip()) is not None


@dataclass(frozen=True)
class ThinkPresent:
    """1 if the response has a closed thought of at least `min_words` words, else 0, whatever else it contains.

    Step-Audio-R1 (arXiv 2511.15848) rewards 0.8 times accuracy plus 0.2 times this, so that a model does not stop
    thinking: `WeightedSum.of(accuracy=(AnswerAccuracy(), 0.8), think=(ThinkPresent(), 0.2))`.
    """

    min_words: int = 1

    def __post_init__(self) -> None:
        if self.min_words < 1:
            raise ValueError(f"ThinkPresent: min_words must be at least 1, got {self.min_words}")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(float(len(units(extract_think(r.text) or "")) >= self.min_words)) for r in rollouts]


@dataclass(frozen=True)
class ThinkLength:
    """Soft reward for thinking within [min_words, max_words].

    With n words thought: 1 inside; n / min_words below; falling linearly above, max(0, 2 - n / max_words), so that
    twice the limit earns nothing. Thinking that is missing or not closed earns 0. Characters of scripts without spaces
    count as a word each. The limit of 50 is the one Ke-Omni-R states in its prompt (and does not reward).
    """

    max_words: int = 50
    min_words: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_words <= self.max_words or self.max_words < 1:
            raise ValueError(
                f"ThinkLength: need 0 <= min_words <= max_words and max_words >= 1, "
                f"got min_words={self.min_words}, max_words={self.max_words}"
            )

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(self.value(r.text)) for r in rollouts]

    def value(self, text: str) -> float:
        think = extract_think(text)
        if think is None:
            return 0.0
        n = len(units(think))
        if n < self.min_words:
            return n / self.min_words
        return min(1.0, max(0.0, 2.0 - n / self.max_words))


@dataclass(frozen=True)
class ThinkTranscript:
    """Does the thought repeat what is said? 1 - CER of the thought, at least 0, against sample.metadata["text"].

    `words` compares with the first so many words of the transcript only; None with all of it. Part `said` is 1 where
    the thought has words and each of them is a word of the whole transcript. A missing or unclosed thought earns 0.
    Without a reward of this kind GRPO on the answer alone makes thoughts cues that nobody said.

    Raises ValueError for a sample without transcript.
    """

    words: int | None = None

    def __post_init__(self) -> None:
        if self.words is not None and self.words < 1:
            raise ValueError(f"ThinkTranscript: words must be at least 1, or None for all, got {self.words}")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [self._score(r.sample, extract_think(r.text) or "") for r in rollouts]

    def _score(self, sample: Sample, thought: str) -> Score:
        text = sample.metadata.get("text")
        transcript = normalize(text, "basic", language_of(sample)) if isinstance(text, str) else ""
        if not transcript:
            raise ValueError(f'sample {sample.id!r}: metadata has no transcript "text" to compare the thought with')
        said = transcript.split()
        thought = normalize(thought, "basic", language_of(sample))
        errors = char_errors(" ".join(said[: self.words]), thought, "none")
        all_said = bool(thought) and set(thought.split()) <= set(said)
        return Score(max(0.0, 1.0 - errors.rate), {"said": float(all_said)})
