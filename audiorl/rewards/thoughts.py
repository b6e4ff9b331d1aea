"""Rewards of the thinking: its format, its length, whether it repeats what is said, and what a frozen model finds."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from audiorl.data.schema import FieldError
from audiorl.data.sums import OPERATIONS, read_thought
from audiorl.data.views import SWAP_ALIKE, view_of, views_of
from audiorl.eval.metrics.text import char_errors, normalize, units, word_errors
from audiorl.rewards.answers import extract_answer, extract_think, language_of, match_choice
from audiorl.rewards.combine import check_options
from audiorl.rewards.model import Checkpoint
from audiorl.types import Rollout, Sample, Score

_THINK_ANSWER = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
_ANSWER_ONLY = re.compile(r"<answer>.*?</answer>", re.DOTALL)


def _has_form(text: str, form: re.Pattern[str], tags: tuple[int, ...]) -> float:
    counts = tuple(text.count(tag) for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    return float(counts == tags and form.fullmatch(text.strip()) is not None)


@dataclass(frozen=True)
class ThinkFormat:
    """1 if the whole response is `<think>.*?</think>\\s*<answer>.*?</answer>`, each tag once, else 0.

    The regular expression is Ke-Omni-R's; it alone would also accept nested and repeated tags. Whitespace around the
    response does not matter.
    """

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(_has_form(r.text, _THINK_ANSWER, (1, 1, 1, 1))) for r in rollouts]


@dataclass(frozen=True)
class AnswerFormat:
    """1 if the whole response is one `<answer>.*?</answer>` without thinking, else 0: the no-think counterpart."""

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(_has_form(r.text, _ANSWER_ONLY, (0, 0, 1, 1))) for r in rollouts]


@dataclass(frozen=True)
class ThinkPresent:
    """1 if the response has a closed thought of at least `min_words` words, else 0, whatever else it contains.

    Step-Audio-R1 (arXiv 2511.15848) rewards 0.8 times accuracy plus 0.2 times this, so that a model does not stop
    thinking: `WeightedSum.of(accuracy=(AnswerAccuracy(), 0.8), think=(ThinkPresent(), 0.2))`.
    """

    min_words: int = 1

    def __post_init__(self) -> None:
        check_options(self, min_words=1)

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
        check_options(self, min_words=0, max_words=max(self.min_words, 1))

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = []
        for rollout in rollouts:
            think = extract_think(rollout.text)
            n = len(units(think or ""))
            value = n / self.min_words if n < self.min_words else min(1.0, max(0.0, 2.0 - n / self.max_words))
            scores.append(Score(0.0 if think is None else value))
        return scores


@dataclass(frozen=True)
class ThinkTranscript:
    """Does the thought repeat what is said? 1 - CER of the thought, at least 0, against sample.metadata["text"].

    `words` compares with the first so many words of the transcript only; None with all of it. Part `said` is 1 where
    the thought has words and each of them is a word of the whole transcript. A character of a script without spaces is
    a word. A missing or unclosed thought earns 0.
    Raises ValueError for a sample without transcript.
    """

    words: int | None = None

    def __post_init__(self) -> None:
        check_options(self, words=1)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [self._score(r.sample, extract_think(r.text) or "") for r in rollouts]

    def check(self, sample: Sample) -> None:
        self._transcript(sample)

    def _transcript(self, sample: Sample) -> str:
        text = sample.metadata.get("text")
        transcript = normalize(text, "basic", language_of(sample)) if isinstance(text, str) else ""
        if not transcript:
            what = 'metadata has no transcript "text" to compare the thought with'
            raise FieldError("text", f"sample {sample.id!r}: {what}")
        return transcript

    def _score(self, sample: Sample, thought: str) -> Score:
        transcript = self._transcript(sample)
        said = units(transcript)
        thought = normalize(thought, "basic", language_of(sample))
        errors = char_errors(" ".join(said[: self.words]), thought, "none")
        all_said = bool(thought) and set(units(thought)) <= set(said)
        return Score(max(0.0, 1.0 - errors.rate), {"said": float(all_said)})


@dataclass(frozen=True)
class SpokenNumbers:
    """Is the thought about spoken numbers right? The share of the numbers that were heard (`audiorl.data.sums`), and as
    much again if its arithmetic is right and leads to the answer: in [0, 2].

    Parts: `heard`, 1 - edits / numbers said, at least 0; `exact`, 1 where all were heard in their order; `follows`, 1
    where each step is right for the numbers in the thought and the answer is its result; `luck`, 1 where the answer is
    right though a number was misheard. Raises ValueError for a sample without `numbers` and `operation`.
    """

    def check(self, sample: Sample) -> None:
        numbers, operation = (sample.metadata.get(name) for name in ("numbers", "operation"))
        if not isinstance(numbers, list | tuple) or not numbers or operation not in OPERATIONS:
            what = f"needs the numbers that are said and an operation ({', '.join(OPERATIONS)})"
            raise FieldError("numbers", f"sample {sample.id!r} {what}")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = []
        for rollout in rollouts:
            self.check(rollout.sample)
            said = list(rollout.sample.metadata["numbers"])
            thought = extract_think(rollout.text) or ""
            numbers, result = read_thought(thought, rollout.sample.metadata["operation"])
            answer = (extract_answer(rollout.text) or "").strip()
            errors = word_errors(" ".join(map(str, said)), " ".join(map(str, numbers)), "none")
            heard = max(0.0, 1.0 - errors.rate)
            follows = float(result is not None and answer == result)
            luck = float(numbers != said and answer in rollout.sample.references)
            parts = {"heard": heard, "exact": float(numbers == said), "follows": follows, "luck": luck}
            scores.append(Score(heard + follows, parts))
        return scores


@dataclass(frozen=True)
class ThoughtConsistency(Checkpoint):
    """Does the answer follow from the thought? The probability, in [0, 1], that the judge chooses the rollout's answer
    when it reads the question and the thought and gets `view` in place of the audio.

    Part `agrees` is 1 where no other choice is more probable. Without a closed thought, or with an answer that names no
    choice, the score is 0. A thought that states the answer is consistent, too: combine this with accuracy.

    Raises ValueError for a sample without choices. Source: the consistency reward of CESAR (arXiv 2510.20867), with
    log-probs of a judge in place of a comparison of words.
    """

    view: str = "text"
    """What the judge is given in place of the audio: a view of `audiorl.data.views`, or FILE.py:FUNCTION."""

    def check(self, sample: Sample) -> None:
        if not sample.choices:
            what = "has no choices, among which an answer could follow"
            raise FieldError("choices", f"sample {sample.id!r} {what}")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        chosen: list[int | None] = []
        items: list[tuple[Sample, str]] = []
        for rollout in rollouts:
            sample, thought = rollout.sample, extract_think(rollout.text)
            self.check(sample)
            named = match_choice(extract_answer(rollout.text) or "", sample.choices, language_of(sample))
            chosen.append(named if thought else None)
            if chosen[-1] is not None:
                given = view_of(sample, self.view)
                items += [(given, f"<think>{thought}</think><answer>{choice}</answer>") for choice in sample.choices]
        logprobs, scores = iter(self.logprobs(items)), []
        for rollout, choice in zip(rollouts, chosen, strict=True):
            if choice is None:
                scores.append(Score(0.0, {"agrees": 0.0}))
                continue
            of_choices = [next(logprobs) for _ in rollout.sample.choices]
            best = max(of_choices)
            probability = math.exp(of_choices[choice] - best) / sum(math.exp(x - best) for x in of_choices)
            scores.append(Score(probability, {"agrees": float(of_choices[choice] == best)}))
        return scores


@dataclass(frozen=True)
class ThoughtGrounding(Checkpoint):
    """Is the thought about this audio? How much more probable the judge finds it with the audio than with `view` in its
    place: (gain in nats / tokens of the thought) / `full`, in [0, 1]; part `nats` holds the gain per token itself.

    `view` is by default the audio of another prompt of the step, with the same answer if there is one, so that a cue
    for the answer gains nothing: over `silence` it does. Without a closed thought that has words the score is 0.

    Raises ValueError for a sample without audio, or without another sample to compare with.
    """

    view: str = SWAP_ALIKE
    full: float = 1.0
    """Nats per token that earn the whole reward."""

    def __post_init__(self) -> None:
        check_options(self, full=1e-6)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        thoughts = [extract_think(r.text) for r in rollouts]
        requests = [(i, f"<think>{thought}</think>") for i, thought in enumerate(thoughts) if thought]
        with_audio = self.logprobs([(rollouts[i].sample, text) for i, text in requests])
        samples = {r.sample.id: r.sample for r in rollouts}
        views = dict(zip(samples, views_of(list(samples.values()), self.view), strict=True))
        with_view = self.logprobs([(views[rollouts[i].sample.id], text) for i, text in requests])
        scores = [Score(0.0, {"nats": 0.0}) for _ in rollouts]
        for (i, text), right, other in zip(requests, with_audio, with_view, strict=True):
            tokens = len(self.policy.tokenizer.encode(text, add_special_tokens=False))
            nats = (right - other) / tokens
            scores[i] = Score(min(max(nats / self.full, 0.0), 1.0), {"nats": nats})
        return scores
