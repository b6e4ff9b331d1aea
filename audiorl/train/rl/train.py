"""The reinforcement learning loop: sync, collect, train, hooks, log, checkpoint.

Every step is a function of (seed, step) and the weights alone, so a resumed run repeats exactly what was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from audiorl.config import OptimConfig, RLConfig
from audiorl.data.schedule import batch_of_step
from audiorl.models import AudioPolicy, TrainedPolicy
from audiorl.models.examples import Example, experience
from audiorl.models.policy import Reference
from audiorl.protocols import Reward, SpeechDecoder
from audiorl.run.folder import Run
from audiorl.run.progress import Progress, StepClock
from audiorl.run.saving import checkpoint, completing_saves, pull_last, restore
from audiorl.train.rl.collect import (
    Collector,
    RolloutBatch,
    check_can_pause,
    load_unfinished,
    save_unfinished,
    scored_experiences,
    step_metrics,
)
from audiorl.train.rl.distill import check_teacher_prompts, with_teacher_prompts
from audiorl.train.rl.hooks import (
    EqualRewards,
    Evaluate,
    FinishedStep,
    HeldOut,
    Hook,
    ListeningCheck,
    RecordRollouts,
    is_recorded,
)
from audiorl.train.rl.minibatch import TrainBatch
from audiorl.train.rl.processes import Workers, start_workers
from audiorl.train.rl.workers import Sampling
from audiorl.types import Sample


def train_rl(
    policy: TrainedPolicy,
    samples: Sequence[Sample],
    reward: Reward,
    run: Run,
    *,
    config: RLConfig,
    optim: OptimConfig,
    sampling: Sampling,
    seed: int = 0,
    phase: str = "rl",
    evaluate: Evaluate | None = None,
    supervised: Sequence[Example] = (),
    answers: Sequence[Example] = (),
    reference: Reference | None = None,
    speech_decoder: SpeechDecoder | None = None,
) -> None:
    """Train `policy` in place by policy gradients, from the phase's last checkpoint on; see `RLConfig`.

    phase: its name in the run folder. evaluate: measures the policy every `eval_every` steps. supervised: the examples
    of the ptx term. answers: prompts with reference answers, for the off-policy share of distillation. reference: what
    the KL is measured from, by default the policy as the phase begins; a second phase may stay close to the start of
    the first. speech_decoder: turns the codes of a policy that speaks into sound, saved with recorded rollouts.
    """
    if run.finished(phase):
        run.load_result(phase, policy)
        return
    check_given(samples, config, supervised, answers)
    config.check_sampling(sampling)
    check_can_pause(policy, samples, config)
    # Reference and critic start as copies of the policy, so the workers are made before its weights are restored.
    workers = start_workers(run, phase, policy, config, optim, sampling, reference)
    engine, saved = workers.engine, workers.checkpointed
    start = restore(run, phase, saved)
    pauses, checkpoints = config.generation.partial_tokens is not None, run.dir / "checkpoints" / phase
    waiting = load_unfinished(checkpoints, start, policy, samples) if pauses and start else []
    collector = Collector(engine, samples, reward, config, seed, waiting)
    with (
        run.interruptible(),
        completing_saves(run, saved),
        workers.driver_on_cpu(policy),
        Progress(phase, config.steps, start) as progress,
    ):
        hooks: list[Hook] = [EqualRewards(run, phase, config)] if config.advantage != "none" else []
        if config.listening.every:
            assert isinstance(policy, AudioPolicy)
            hooks.append(ListeningCheck(policy, workers))
        if evaluate:
            hooks.append(HeldOut(evaluate, policy, workers, sampling, progress))
        hooks.append(RecordRollouts(run, phase, config, speech_decoder))

        clock = StepClock(*workers.groups)
        for step in range(start, config.steps):
            done = step + 1
            clock.begin()
            engine.sync(version=step)
            clock.lap("sync")
            rollouts = collector.collect(step)  # generate, score, dynamic sampling
            clock.lap("rollout")
            clock.divide("rollout", "rewards", collector.reward_seconds)
            batch = step_batch(policy, rollouts, step, config, seed, workers, supervised, answers)
            engine.free_gpus()
            clock.lap("batch")
            # Of a driver that trains files are read meanwhile.
            if isinstance(policy, AudioPolicy) and policy.device.type == "cuda" and done < config.steps:
                policy.audio.load_ahead(policy.clips_of(collector.prompts_of(done)))
            with collector.collect_ahead(done, run.asked_to_stop):
                output = workers.step(batch)  # `Trainer.step`: advantages, then forward, loss, backward, optimizer step
            clock.lap("train")
            clock.divide("train", "logprobs", output.prepare_seconds)

            metrics = output.metrics | step_metrics(rollouts, step, config)
            metrics["tokens_per_s"] = rollouts.num_sampled / clock.seconds
            for hook in hooks:
                metrics |= hook.after_step(FinishedStep(done, rollouts.rollouts, output))
            clock.lap("hooks", counts=False)
            metrics |= clock.times()
            run.log(phase, done, metrics)
            progress.update(done, metrics)
            run.add_seconds(phase, clock.seconds, clock.cpu_seconds)
            save_waiting = partial(save_unfinished, step=done, groups=collector.unfinished) if pauses else None
            checkpoint(run, phase, done, config.steps, config.save_every, saved, save_waiting)
    pull_last(run, phase, policy, workers.trainers)
    run.finish(phase, workers.finish(policy, run, phase))


def check_given(
    samples: Sequence[Sample], config: RLConfig, supervised: Sequence[Example], answers: Sequence[Example]
) -> None:
    """Raise ValueError, before the first step, where the config asks for answers that are not given, or does not suit
    streams."""
    stream = next((s for s in samples if s.turns), None)
    if config.aggregation == "sequence-mean-token-sum" and stream is not None:
        raise ValueError(
            f"aggregation 'sequence-mean-token-sum' divides by the budget of one answer, and sample {stream.id!r} is a "
            "stream of several turns: take 'token-mean' or 'sequence-mean-token-mean'"
        )
    if config.ptx.coef and not supervised:
        raise ValueError("ptx.coef is set, but there are no supervised examples for it")
    if config.distill.coef:
        check_teacher_prompts([*samples, *(a.sample for a in answers)], config.distill)
    if config.reference_prompts and not answers:
        raise ValueError("distill.off_policy is set, but this recipe gives no reference answers; distill-speech does")


def step_batch(
    policy: TrainedPolicy,
    rollouts: RolloutBatch,
    step: int,
    config: RLConfig,
    seed: int,
    workers: Workers,
    supervised: Sequence[Example],
    answers: Sequence[Example],
) -> TrainBatch:
    """Return what the trainers learn in a step: scored rollouts, and this step's share of the given answers."""
    experiences = scored_experiences(rollouts, config)
    count = config.reference_prompts
    if not isinstance(policy, AudioPolicy):  # which has neither a teacher nor supervised examples
        return TrainBatch(workers.fill_in(experiences), record_tokens=is_recorded(step + 1, config))
    references = batch_of_step(answers, step, count, f"{seed}/answers") if count else []
    answered = [experience(policy, e) for e in references]
    if config.distill.coef:
        experiences = with_teacher_prompts(experiences, [r.sample for r in rollouts.rollouts], config.distill)
        answered = with_teacher_prompts(answered, [e.sample for e in references], config.distill)
    updates = range(config.epochs * config.mini_batches) if config.ptx.coef else []
    ptx = [batch_of_step(supervised, step * len(updates) + k, config.ptx.batch, seed) for k in updates]
    return TrainBatch(
        workers.fill_in(experiences),
        [[experience(policy, e) for e in examples] for examples in ptx],
        answers=workers.fill_in(answered, values=False),
        record_tokens=is_recorded(step + 1, config),
    )
