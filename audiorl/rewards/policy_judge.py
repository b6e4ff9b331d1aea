"""A checkpoint of a policy as a judge, in this process: no server, no parsing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from audiorl.rewards.judge_prompt import SYSTEM, JudgePrompt
from audiorl.types import Message, Rollout, Sample, Score

if TYPE_CHECKING:
    from audiorl.models import AudioPolicy


@dataclass(frozen=True)
class PolicyJudge:
    """The expected rating Σ p(k) k of the checkpoint in `path`, brought to [0, 1].

    p(k) is the probability that the model answers the number k to the rubric, among the whole numbers of the scale. It
    is exact and the same in every call; nothing is sampled. Parts: `rating` (on the scale) and `confidence` (the
    largest p). Costs one forward pass of the prompt with a few tokens for each number. Source: the weighting of ratings
    by their probability in G-Eval (Liu et al. 2023, arXiv 2303.16634, section 2).

    Loaded at the first call. A text model takes prompts with `JudgePrompt(audio="none")` only.
    """

    path: str
    """Folder or cached hub id of a model that `load_policy` reads, such as a run's exported checkpoint."""
    prompt: JudgePrompt
    """What it is shown, and the rubric."""
    scale: tuple[int, int] = (1, 5)
    """The lowest and the highest rating, whole numbers."""
    device: str = "auto"
    """Where it runs."""
    max_batch_tokens: int = 8192
    """Most tokens in a forward pass."""

    def __post_init__(self) -> None:
        low, high = self.scale
        if not (type(low) is type(high) is int and low < high):
            raise ValueError(f"PolicyJudge: scale is {self.scale}; give two whole numbers, the lowest first")

    @cached_property
    def policy(self) -> AudioPolicy:
        from audiorl.config import ModelConfig
        from audiorl.models import load_policy

        return load_policy(self.path, ModelConfig(dtype="auto", device=self.device))

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        import torch

        from audiorl.models.examples import Example, answer_logprobs, experience

        low, high = self.scale
        ratings_K = torch.arange(low, high + 1)
        experiences = [
            experience(self.policy, Example(sample, str(k)), str(number))
            for number, sample in enumerate(map(self._sample, rollouts))
            for k in ratings_K.tolist()
        ]
        logprobs = answer_logprobs(self.policy, experiences, self.max_batch_tokens, share_prompts=True)
        logprobs_NK = torch.tensor([float(t.sum()) for t in logprobs]).view(len(rollouts), len(ratings_K))
        scores = []
        for probabilities_K in logprobs_NK.softmax(-1):
            rating = float(probabilities_K @ ratings_K.float())
            parts = {"rating": rating, "confidence": float(probabilities_K.max())}
            scores.append(Score((rating - low) / (high - low), parts))
        return scores

    def _sample(self, rollout: Rollout) -> Sample:
        low, high = self.scale
        order = (
            f"Rate the answer from {low} to {high} by this rubric:\n{self.prompt.rubric}\nAnswer with the number only."
        )
        contents = (*self.prompt.conversation(rollout), f"\n{order}")
        lines = (f"{c}\n" if isinstance(c, str) else c for c in contents)
        messages = (Message("system", (SYSTEM,)), Message("user", tuple(lines)))
        return Sample(rollout.sample.id, messages)
