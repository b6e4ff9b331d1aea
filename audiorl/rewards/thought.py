"""What a thought is worth, judged by a frozen checkpoint: does the answer follow from it, is it about the audio?

`path` is a policy's folder, for example the start of the run. It is loaded at the first call and never trained. Both
rewards read the texts of a rollout under the judge's own tokenizer, so it may be of another family than the policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from audiorl.data.views import SWAP_ALIKE, view_of, views_of
from audiorl.rewards.choices import match_choice
from audiorl.rewards.tags import extract_answer, extract_think
from audiorl.types import Rollout, Sample, Score

if TYPE_CHECKING:
    from audiorl.models import AudioPolicy


@dataclass(frozen=True)
class _Judged:
    """The judge of both rewards."""

    path: str
    """Folder or hub id of the judge."""
    view: str = "text"
    """What the judge is given in place of the audio: a view of `audiorl.data.views`, or FILE.py:FUNCTION."""
    device: str = "auto"
    """Where the judge runs."""
    max_batch_tokens: int = 8192
    """Row tokens of one forward pass."""

    @cached_property
    def judge(self) -> AudioPolicy:
        from audiorl.config import ModelConfig
        from audiorl.models import load_policy

        policy = load_policy(self.path, ModelConfig(dtype="auto", device=self.device))
        policy.model.requires_grad_(False)
        return policy

    def logprobs(self, items: Sequence[tuple[Sample, str]]) -> list[float]:
        """The summed log-prob in nats of each answer after the prompt of its sample; equal neighbours share prompts."""
        from audiorl.models.examples import Example, answer_logprobs, experience

        laid_out = [experience(self.judge, Example(sample, text), sample.id) for sample, text in items]
        values = answer_logprobs(self.judge, laid_out, self.max_batch_tokens, share_prompts=True)
        return [float(x.sum()) for x in values]


@dataclass(frozen=True)
class ThoughtConsistency(_Judged):
    """Does the answer follow from the thought? The probability, in [0, 1], that the judge chooses the rollout's answer
    when it reads the question and the thought and gets `view` in place of the audio.

    The probability is that of the rollout's choice among all choices of the sample. Part `agrees` is 1 where no other
    choice is more probable. Without a closed thought, or with an answer that names no choice, the score is 0. A thought
    that states the answer is consistent, too: combine this with accuracy and with `ThoughtGrounding`.

    Raises ValueError for a sample without choices. Source: the consistency reward of CESAR (arXiv 2510.20867), with
    log-probs of a judge in place of a comparison of words.
    """

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        scores = [Score(0.0, {"agrees": 0.0}) for _ in rollouts]
        requests: list[tuple[int, int]] = []
        items: list[tuple[Sample, str]] = []
        for i, rollout in enumerate(rollouts):
            sample, thought = rollout.sample, extract_think(rollout.text)
            if not sample.choices:
                raise ValueError(f"sample {sample.id!r} has no choices, among which an answer could follow")
            chosen = match_choice(extract_answer(rollout.text) or "", sample.choices)
            if thought and chosen is not None:
                requests.append((i, chosen))
                given = view_of(sample, self.view)
                items += [(given, f"<think>{thought}</think><answer>{choice}</answer>") for choice in sample.choices]
        logprobs = iter(self.logprobs(items))
        for i, chosen in requests:
            of_choices = [next(logprobs) for _ in rollouts[i].sample.choices]
            best = max(of_choices)
            total = sum(math.exp(x - best) for x in of_choices)
            agrees = float(of_choices[chosen] == best)
            scores[i] = Score(math.exp(of_choices[chosen] - best) / total, {"agrees": agrees})
        return scores


@dataclass(frozen=True)
class ThoughtGrounding(_Judged):
    """Is the thought about this audio? How much more probable the judge finds it with the audio than with `view` in its
    place: (gain in nats / tokens of the thought) / `full`, in [0, 1]; part `nats` holds the gain per token itself.

    A thought that fits any recording gains nothing. `view` is by default the audio of another prompt of the step, with
    the same answer if there is one, so that a cue for the answer gains nothing either: over `silence` it does. Without
    a closed thought that has words the score is 0. The judge must listen: see `audiorl audit`.

    Raises ValueError for a sample without audio, or without another sample to compare with.
    """

    view: str = SWAP_ALIKE
    full: float = 1.0
    """Nats per token that earn the whole reward."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.full) and self.full > 0):
            raise ValueError(f"ThoughtGrounding: full is {self.full}; give nats per token above 0")

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        thoughts = [extract_think(r.text) for r in rollouts]
        requests = [(i, f"<think>{thought}</think>") for i, thought in enumerate(thoughts) if thought]
        with_audio = self.logprobs([(rollouts[i].sample, text) for i, text in requests])
        samples = {r.sample.id: r.sample for r in rollouts}
        views = dict(zip(samples, views_of(list(samples.values()), self.view), strict=True))
        with_view = self.logprobs([(views[rollouts[i].sample.id], text) for i, text in requests])
        scores = [Score(0.0, {"nats": 0.0}) for _ in rollouts]
        for (i, text), right, other in zip(requests, with_audio, with_view, strict=True):
            tokens = len(self.judge.tokenizer.encode(text, add_special_tokens=False))
            nats = (right - other) / tokens
            scores[i] = Score(min(max(nats / self.full, 0.0), 1.0), {"nats": nats})
        return scores
