"""The reinforcement learning loop: sync, collect, train, hooks, log, checkpoint.

Every step is a function of (seed, step) and the weights alone, so a resumed run repeats exactly what was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from audiorl.config import OptimConfig, RLConfig, SamplingConfig
from audiorl.data.schedule import batch_of_step
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, experience
from audiorl.models.policy import Reference
from audiorl.protocols import Reward, SpeechDecoder
from audiorl.run.folder import Run
from audiorl.run.progress import Progress, StepClock
from audiorl.run.saving import checkpoint, completing_saves, pull_last, restore
from audiorl.train.rl.collect import Collector, RolloutBatch, scored_experiences
from audiorl.train.rl.distill import check_teacher_prompts, reference_answers, with_teacher_prompts
from audiorl.train.rl.hooks import Evaluate, FinishedStep, HeldOut, Hook, ListeningCheck, RecordRollouts, is_recorded
from audiorl.train.rl.metrics import step_metrics
from audiorl.train.rl.partial import check_can_pause, load_unfinished, unfinished_file
from audiorl.train.rl.processes import StepBatch, Workers, start_workers
from audiorl.types import Sample


def train_rl(
    policy: AudioPolicy,
    samples: Sequence[Sample],
    reward: Reward,
    run: Run,
    *,
    config: RLConfig,
    optim: OptimConfig,
    sampling: SamplingConfig,
    seed: int = 0,
    phase: str = "rl",
    evaluate: Evaluate | None = None,
    supervised: Sequence[Example] = (),
    answers: Sequence[Example] = (),
    reference: Reference | None = None,
    speech_decoder: SpeechDecoder | None = None,
) -> None:
    """Train `policy` in place by policy gradients, from the phase's last checkpoint on; see `RLConfig`.

    `supervised`: the examples of the ptx term. `answers`: the prompts with their reference answers, for the off-policy
    share of distillation. `reference`: what the KL is measured from, by default the policy as the phase begins; a
    second phase may stay close to the start of the first. `speech_decoder`: turns the codes of a policy that speaks
    into sound, which is saved with recorded rollouts.
    """
    if run.finished(phase):
        run.load_result(phase, policy)
        return
    given = GivenAnswers(policy, supervised, answers, config, seed)
    given.check(samples)
    check_can_pause(policy, samples, config)
    # Reference and critic start as copies of the policy, so the workers are made before its weights are restored.
    workers = start_workers(run, phase, policy, config, optim, sampling, reference)
    engine, saved = workers.engine, workers.checkpointed
    start = restore(run, phase, saved)
    partial = config.generation.partial_tokens is not None
    waiting = []
    if partial and start:
        waiting = load_unfinished(unfinished_file(run.dir / "checkpoints" / phase, start), policy, samples)
    collector = Collector(engine, samples, reward, config, seed, waiting)
    with (
        run.interruptible(),
        completing_saves(run, saved),
        workers.driver_on_cpu(policy),
        Progress(phase, config.steps, start) as progress,
    ):
        hooks: list[Hook] = []
        if config.listening.every:
            hooks.append(ListeningCheck(policy, workers))
        if evaluate:
            hooks.append(HeldOut(evaluate, policy, workers, sampling, progress))
        hooks.append(RecordRollouts(run, phase, config, speech_decoder))

        for step in range(start, config.steps):
            done = step + 1
            clock = StepClock(*workers.groups)
            engine.sync(version=step)
            rollouts = collector.collect(step)  # generate, score, dynamic sampling
            clock.lap("rollout")
            batch = given.batch(step, rollouts, workers)
            engine.free_gpus()
            with collector.collect_ahead(done, run.asked_to_stop):
                output = workers.step(batch)  # `Trainer.step`: advantages, then forward, loss, backward, optimizer step
            clock.lap("train")

            metrics = output.metrics | step_metrics(rollouts, step, config) | clock.laps
            metrics["tokens_per_s"] = rollouts.num_sampled / clock.seconds
            for hook in hooks:
                metrics |= hook.after_step(FinishedStep(done, rollouts.rollouts, output))
            run.log(phase, done, metrics)
            progress.update(done, metrics)
            run.add_seconds(phase, clock.seconds, clock.cpu_seconds)
            save_waiting = collector.save(done) if partial else None
            checkpoint(run, phase, done, config.steps, config.save_every, saved, save_waiting)
    finish(run, phase, policy, workers)


@dataclass(frozen=True)
class GivenAnswers:
    """The answers that a step learns besides the policy's own: ptx examples, and references for distillation."""

    policy: AudioPolicy
    supervised: Sequence[Example]
    answers: Sequence[Example]
    config: RLConfig
    seed: int

    def check(self, samples: Sequence[Sample]) -> None:
        """Raise ValueError, before the first step, where the config asks for answers that are not given."""
        if self.config.ptx.coef and not self.supervised:
            raise ValueError("ptx.coef is set, but there are no supervised examples for it")
        if self.config.distill.coef:
            check_teacher_prompts([*samples, *(a.sample for a in self.answers)], self.config.distill)
        if self.config.reference_prompts and not self.answers:
            raise ValueError(
                "distill.off_policy is set, but this recipe gives no reference answers; distill-speech does"
            )

    def batch(self, step: int, rollouts: RolloutBatch, workers: Workers) -> StepBatch:
        """Return what the trainers learn in a step: scored rollouts, and this step's share of the given answers."""
        config = self.config
        experiences = scored_experiences(rollouts, config)
        references = reference_answers(self.answers, step, config, self.seed)
        answered = [experience(self.policy, e) for e in references]
        if config.distill.coef:
            experiences = with_teacher_prompts(experiences, [r.sample for r in rollouts.rollouts], config.distill)
            answered = with_teacher_prompts(answered, [e.sample for e in references], config.distill)
        ptx = batch_of_step(self.supervised, step, config.ptx.batch, self.seed) if config.ptx.coef else []
        return StepBatch(
            workers.fill_in(experiences),
            [experience(self.policy, e) for e in ptx],
            workers.fill_in_references(answered),
            record_tokens=is_recorded(step + 1, config),
        )


def finish(run: Run, phase: str, policy: AudioPolicy, workers: Workers) -> None:
    """Save the moving average if one is kept, end the workers, and mark the phase as finished."""
    beta = workers.kl_beta()
    pull_last(run, phase, policy, workers.trainers)
    if workers.config.ema_decay is not None:
        weights = {name: tensor.clone() for name, tensor in policy.weights().items()}
        policy.load_weights(workers.averaged())
        run.save_model(phase, "ema", policy)
        policy.load_weights(weights)
    workers.close()
    run.finish(phase, {"steps": workers.config.steps, "seconds": run.seconds(phase), "kl_beta": beta})
