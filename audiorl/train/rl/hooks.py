"""What happens after a step besides logging: the listening check, held-out evaluation, recording of rollouts.

A hook decides itself whether a step is its own; it returns metrics of the step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, runtime_checkable

from audiorl.algos.advantages import all_equal
from audiorl.config import ListeningConfig, RLConfig, SamplingConfig
from audiorl.config.checks import pass_tokens
from audiorl.data.views import views_of
from audiorl.eval._listening import DEFAULT_VIEWS, audio_gains, gain_metrics, verdict
from audiorl.models import AudioPolicy, TrainedPolicy
from audiorl.protocols import RolloutEngine, SpeechDecoder
from audiorl.run.folder import Run
from audiorl.run.progress import Progress
from audiorl.run.saving import pull
from audiorl.train.rl.advantages import has_signal
from audiorl.train.rl.processes import Workers
from audiorl.train.rl.trainer import TrainOutput
from audiorl.train.rl.workers import Sampling
from audiorl.types import Rollout

Evaluate = Callable[[], Mapping[str, float]]  # Returns held-out metrics of the policy as it is now
EQUAL_STEPS = 5
AT_ONCE = 64  # Samples that each engine is asked between two movements of the display


@dataclass(frozen=True)
class FinishedStep:
    """A step of training that has just been done."""

    done: int  # Steps done, from 1
    rollouts: Sequence[Rollout]
    output: TrainOutput


class Hook(Protocol):
    """Something that happens after steps."""

    def after_step(self, step: FinishedStep) -> Mapping[str, float]:
        """Return metrics of the step, none where there is nothing to do."""
        ...


@dataclass(frozen=True)
class ListeningCheck:
    """Checks every so many steps that the policy still uses its audio; see `ListeningConfig`."""

    policy: AudioPolicy
    workers: Workers

    def after_step(self, step: FinishedStep) -> Mapping[str, float]:
        config = self.workers.config
        if step.done > 1 and step.done % config.listening.every:
            return {}
        pull(self.policy, self.workers.trainers)
        with self.workers.driver_on_gpu(self.policy):
            return check_listening(self.policy, step.rollouts, config.listening, pass_tokens(config))


def check_listening(
    policy: AudioPolicy, rollouts: Sequence[Rollout], config: ListeningConfig, budget: int
) -> dict[str, float]:
    """Return `audio/gain_*` on one answer for each of `config.prompts` prompts; `budget`: tokens of a forward pass.

    Prompts that have no such view, such as text or silence, are left out. Without any, or for streams and speech, there
    is nothing to measure. Raises ValueError where the policy ignores its audio and `config.action` is "stop".
    """

    def has_view(rollouts: Sequence[Rollout], name: str) -> bool:
        try:
            views_of([r.sample for r in rollouts], name)
        except ValueError:
            return False
        return True

    one_each = list({r.group_id: r for r in rollouts if len(r.segments) == 1 and not r.speaks}.values())
    one_each = [r for r in one_each if has_view([r], "silence")][: config.prompts]
    views = [view for view in DEFAULT_VIEWS if one_each and has_view(one_each, view)]
    if not views:
        return {}
    gains = audio_gains(policy, one_each, views, budget)
    result = verdict(gains, config.min_gain)
    if result.word == "ignores_audio":
        message = f"the model ignores its audio: {result.reason}"
        if config.action == "stop":
            raise ValueError(f"{message}, less than listening.min_gain {config.min_gain:g}")
        print(f"audiorl: {message}", file=sys.stderr)
    return gain_metrics(gains, [r.sample.task for r in one_each])


@dataclass
class EqualRewards:
    """Says once that nothing can be learned: for `EQUAL_STEPS` steps the rewards in each group were equal, or those of
    the step where the estimator compares no groups."""

    run: Run
    phase: str
    config: RLConfig
    count: int = 0

    def after_step(self, step: FinishedStep) -> Mapping[str, float]:
        totals = [r.score.total for r in step.rollouts if r.score]
        if self.config.compares_groups:
            by_prompt = [list(group) for _, group in groupby(step.rollouts, key=lambda r: r.group_id)]
            equal = not any(has_signal(group, self.config) for group in by_prompt)
        else:
            equal = all_equal(totals)
        self.count = self.count + 1 if equal else 0
        if self.count == EQUAL_STEPS:
            mean = sum(totals) / len(totals)
            print(
                f"audiorl: {self.phase}: all answers to a prompt got the same reward for {EQUAL_STEPS} steps (mean "
                f"{mean:.3g}), so that nothing is learned. Look at answers and parts of the reward in "
                f"{self.run.dir / 'rollouts'} or audiorl view: a wrong reference, a format that is never met, answers "
                "cut off, or prompts that are too hard or too easy",
                file=sys.stderr,
            )
        return {}


@runtime_checkable
class EvaluateByEngine(Protocol):
    """An `Evaluate` that can also ask an engine for its greedy answers, which no stop string ends."""

    @property
    def max_new_tokens(self) -> int:
        """Most tokens of an answer."""
        ...

    def __call__(self) -> Mapping[str, float]: ...

    def by_engine(self, engine: RolloutEngine, several: int, note: Callable[[str], None]) -> Mapping[str, float]:
        """Return the same metrics. Asks for `several` answers at a time; `note` shows how far it is."""
        ...


@dataclass(frozen=True)
class HeldOut:
    """Evaluates every `eval_every` steps, by the run's engines where they answer as it wants, else by the driver's
    policy. The last step is left to the evaluation after training."""

    evaluate: Evaluate
    policy: TrainedPolicy
    workers: Workers
    sampling: Sampling
    progress: Progress

    def after_step(self, step: FinishedStep) -> Mapping[str, float]:
        config, evaluate, engine = self.workers.config, self.evaluate, self.workers.engine
        if not config.eval_every or step.done % config.eval_every or step.done >= config.steps:
            return {}
        # The engines may answer where they write as long as the evaluation wants, and end where it does.
        sampling = self.sampling
        alike = False
        if isinstance(evaluate, EvaluateByEngine) and isinstance(sampling, SamplingConfig):
            alike = evaluate.max_new_tokens == sampling.max_new_tokens and not sampling.stop
        if isinstance(evaluate, EvaluateByEngine) and alike:
            engine.sync(step.done)
            metrics = evaluate.by_engine(engine, AT_ONCE * engine.size, self.progress.note)
            engine.free_gpus()
        else:
            pull(self.policy, self.workers.trainers)
            self.progress.note("evaluating")
            with self.workers.driver_on_gpu(self.policy):
                metrics = evaluate()
        self.progress.note("")
        return {f"eval/{name}": value for name, value in metrics.items()}


def is_recorded(done: int, config: RLConfig) -> bool:
    """Return whether the rollouts of a step are written to the run folder."""
    return done % config.rollouts_every == 0 or done in (1, config.steps)


@dataclass(frozen=True)
class RecordRollouts:
    """Writes rollouts with their advantages and numbers of every token to the run folder; see `rollouts_every`."""

    run: Run
    phase: str
    config: RLConfig
    speech_decoder: SpeechDecoder | None = None

    def after_step(self, step: FinishedStep) -> Mapping[str, float]:
        if is_recorded(step.done, self.config):
            advantages, tokens = step.output.advantages, step.output.tokens
            self.run.write_rollouts(self.phase, step.done, step.rollouts, advantages, self.speech_decoder, tokens)
        return {}
