"""Trained models as rewards: of outcomes, of steps, and what other rewards ask a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from audiorl.rewards.combine import check_options
from audiorl.types import Rollout, Sample, Score

if TYPE_CHECKING:
    from audiorl.models import AudioPolicy
    from audiorl.models.process_reward import ProcessRewardModel
    from audiorl.models.value import ValueModel


@dataclass(frozen=True)
class Checkpoint:
    """The model in the folder or run, or of the cached hub id, `path`, loaded at the first call."""

    path: str
    device: str = field(default="auto", kw_only=True)
    """Where it runs."""
    max_batch_tokens: int = field(default=8192, kw_only=True)
    """Most tokens in a forward pass."""

    @cached_property
    def policy(self) -> AudioPolicy:
        from audiorl.config import ModelConfig
        from audiorl.models import load_policy
        from audiorl.run.folder import newest_checkpoint

        policy = load_policy(newest_checkpoint(self.path), ModelConfig(dtype="auto", device=self.device))
        policy.model.requires_grad_(False)
        return policy

    def logprobs(self, items: Sequence[tuple[Sample, str]]) -> list[float]:
        """Return the summed log-prob in nats of each answer after the prompt of its sample."""
        from audiorl.models.examples import Example, answer_logprobs, experience

        laid_out = [experience(self.policy, Example(s, text), s.id, sampled=True) for s, text in items]
        values = answer_logprobs(self.policy, laid_out, self.max_batch_tokens, share_prompts=True)
        return [float(x.sum()) for x in values]


@dataclass(frozen=True)
class ModelReward:
    """(score - mean) / std of the reward model in the folder or run `path`, which `audiorl train reward-model` writes.

    It reads the answer's text under its own tokenizer, so it may be of another family than the policy. Raises
    ValueError for a folder that holds no reward model.
    """

    path: str
    mean: float = 0.0
    std: float = 1.0
    device: str = "auto"
    max_batch_tokens: int = 8192

    def __post_init__(self) -> None:
        check_options(self, std=1e-9)

    @cached_property
    def model(self) -> ValueModel:
        from audiorl.config import ModelConfig
        from audiorl.models.value import load_value_model
        from audiorl.run.folder import newest_checkpoint

        config = ModelConfig(dtype="auto", device=self.device)
        return load_value_model(newest_checkpoint(self.path), config).requires_grad_(False)

    def check(self, sample: Sample) -> None:
        self.model.trunk.prompts.check(sample)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        from audiorl.models.examples import Example
        from audiorl.models.value import score_answers

        scores = score_answers(self.model, [Example(r.sample, r.text) for r in rollouts], self.max_batch_tokens)
        return [Score((s - self.mean) / self.std) for s in scores]


@dataclass(frozen=True)
class ProcessModelReward(Checkpoint):
    """The quality of an answer's steps, by the process reward model in the folder or run `path`.

    An answer is split into steps after every `</think>` and at each `separator`. The total is the lowest probability of
    a step to be good; `parts` hold the mean too. An empty answer scores 0. `marker`, `good` and `bad` are those that
    the model was trained with.

    With `credit` "steps" each step's last token gets the step's probability divided by the number of steps; the total
    is their sum. Raises ValueError where the policy's tokenizer is not that of the process reward model.
    """

    marker: str = "\n\n"
    good: str = "+"
    bad: str = "-"
    separator: str = "\n"
    credit: Literal["total", "steps"] = "total"

    def __post_init__(self) -> None:
        check_options(self, credit=("total", "steps"))

    @cached_property
    def judge(self) -> ProcessRewardModel:
        from audiorl.models.process_reward import ProcessRewardModel

        return ProcessRewardModel(self.policy, self.marker, self.good, self.bad)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        steps = [self.steps(r.text) for r in rollouts]
        filled = [(r.sample, s) for r, s in zip(rollouts, steps, strict=True) if s]
        judged = iter(self.judge.score_steps(filled, self.max_batch_tokens))
        return [self._score(r, s, next(judged) if s else ()) for r, s in zip(rollouts, steps, strict=True)]

    def _score(self, r: Rollout, steps: Sequence[str], values: Sequence[float]) -> Score:
        """Return the score; with credit "steps" each step's share is on the token that completes its text."""
        mean = sum(values) / len(values) if values else 0.0
        if self.credit == "total":
            return Score(min(values, default=0.0), {"mean": mean})
        ids = [i for s in r.segments for i in s.ids.tolist()]
        decode = self.judge.policy.decode
        if decode(ids) != r.text:
            raise ValueError(
                f"ProcessModelReward: rollout {r.name} reads differently under the process reward model's tokenizer; "
                'credit="steps" needs a process reward model with the policy\'s tokenizer'
            )
        credit, ends, end, token = [0.0] * len(ids), list[int](), 0, 0
        for step, value in zip(steps, values, strict=True):
            end = r.text.index(step, end) + len(step)
            while token < len(ids) - 1 and not decode(ids[: token + 1]).startswith(r.text[:end]):
                token += 1
            credit[token] += value / len(steps)
            ends.append(token)
        return Score(mean, {"mean": mean}, per_token=tuple(credit), step_ends=tuple(ends))

    def steps(self, text: str) -> tuple[str, ...]:
        """Return the answer's steps, without empty ones.

        >>> ProcessModelReward("runs/prm").steps("<think>one\\ntwo</think><answer>2</answer>")
        ('<think>one', 'two</think>', '<answer>2</answer>')
        """
        cut = text.replace("</think>", f"</think>{self.separator}").split(self.separator)
        return tuple(step.strip() for step in cut if step.strip())
