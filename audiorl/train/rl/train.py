"""The reinforcement learning loop: sync, collect, advantages, train, log, evaluate, checkpoint.

Every step is a function of (seed, step) and the weights alone, so a resumed run repeats exactly what was lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from audiorl.config import OptimConfig, RLConfig, SamplingConfig
from audiorl.data.schedule import batch_of_step
from audiorl.distributed.local import Group, Groups
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, experience
from audiorl.models.policy import Reference
from audiorl.protocols import Reward, SpeechDecoder
from audiorl.run.folder import Run
from audiorl.run.phase import checkpoint, completing_saves, pull, pull_last, restore
from audiorl.run.progress import Progress, StepClock
from audiorl.train.rl.advantages import compute_advantages, scored_experiences
from audiorl.train.rl.collect import Collector
from audiorl.train.rl.distill import check_teacher_prompts, reference_answers, with_teacher_prompts
from audiorl.train.rl.driver import with_driver_gpu, without_driver_gpu
from audiorl.train.rl.held_out import Evaluate, held_out_metrics
from audiorl.train.rl.listening import check_listening
from audiorl.train.rl.metrics import step_metrics
from audiorl.train.rl.partial import check_can_pause, load_unfinished, unfinished_file
from audiorl.train.rl.split import (
    add_from_critics,
    add_from_references,
    mean_advantages,
    split_batch,
    token_numbers,
    update_critics,
)
from audiorl.train.rl.weight_sync import GroupEngine
from audiorl.train.rl.workers import start_workers
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
    """Policy gradient training of `policy` in place, from the phase's last checkpoint on; see `RLConfig`.

    `supervised`: the examples of the ptx term. `answers`: the prompts with their reference answers, for the off-policy
    share of distillation. `reference`: what the KL is measured from, by default the policy as the phase begins; a
    second phase may stay close to the start of the first. `speech_decoder`: turns
    the codes of a policy that speaks into sound, which is saved with recorded rollouts.
    """
    if run.finished(phase):
        run.load_result(phase, policy)
        return
    check_can_pause(policy, samples, config)
    if config.ptx_coef and not supervised:
        raise ValueError("ptx_coef is set, but there are no supervised examples for it")
    if config.distill.coef:
        check_teacher_prompts([*samples, *(a.sample for a in answers)], config.distill)
    if config.reference_prompts and not answers:
        raise ValueError("distill.off_policy is set, but this recipe gives no reference answers; distill-speech does")
    # Reference and critic start as copies of the policy, so the workers are made before its weights are restored.
    trainers, engine, references, critics = start_workers(run, phase, policy, config, optim, sampling, reference)
    saved = trainers if critics is None else Groups(trainers, critics)
    start = restore(run, phase, saved)
    waiting = []
    if config.partial_tokens is not None and start:
        waiting = load_unfinished(unfinished_file(run.dir / "checkpoints" / phase, start), policy, samples)
    collector = Collector(engine, samples, reward, config, seed, waiting)
    processes = [group for group in (trainers, engine.engines, references, critics) if group is not None]
    with (
        run.interruptible(),
        completing_saves(run, saved),
        without_driver_gpu(policy, trainers),
        Progress(phase, config.steps, start) as progress,
    ):
        for step in range(start, config.steps):
            clock = StepClock(*processes)
            engine.sync(version=step)
            rollouts = collector.collect(step)
            clock.lap("rollout")
            experiences = scored_experiences(rollouts, config)
            given = reference_answers(answers, step, config, seed)
            answered = [experience(policy, e) for e in given]
            if config.distill.coef:
                experiences = with_teacher_prompts(experiences, [r.sample for r in rollouts.rollouts], config.distill)
                answered = with_teacher_prompts(answered, [e.sample for e in given], config.distill)
            experiences, answered = (add_from_references(es, references, config) for es in (experiences, answered))
            experiences = compute_advantages(add_from_critics(experiences, critics), config)
            ptx = batch_of_step(supervised, step, config.ptx_batch, seed) if config.ptx_coef else []
            done = step + 1
            recorded = done % config.rollouts_every == 0 or done in (1, config.steps)
            of_ptx = [experience(policy, e) for e in ptx]
            batches, shares = split_batch(experiences, of_ptx, trainers, config, answered, recorded)
            engine.free_gpus()
            with collector.collect_ahead(step + 1, run.asked_to_stop):
                outputs = trainers.each("step", batches)
                of_critics = {} if critics is None else update_critics(experiences, outputs, shares, critics, config)
            clock.lap("train")

            metrics = step_metrics(rollouts, outputs, step, config) | of_critics | clock.laps
            metrics["tokens_per_s"] = rollouts.num_sampled / clock.seconds
            if config.audio_check_every and (done == 1 or done % config.audio_check_every == 0):
                pull(policy, trainers)
                with with_driver_gpu(policy, trainers):
                    metrics |= check_listening(policy, rollouts.rollouts, config)
            if evaluate and config.eval_every and done % config.eval_every == 0 and done < config.steps:
                metrics |= held_out_metrics(evaluate, engine, policy, trainers, sampling, done, progress)
            if recorded:
                advantages, numbers = mean_advantages(outputs, shares), token_numbers(outputs, shares)
                run.write_rollouts(phase, done, rollouts.rollouts, advantages, speech_decoder, numbers)
            run.log(phase, done, metrics)
            progress.update(done, metrics)
            run.add_seconds(phase, clock.seconds, clock.cpu_seconds)
            save_waiting = None if config.partial_tokens is None else collector.save(done)
            checkpoint(run, phase, done, config.steps, config.save_every, saved, save_waiting)
    finish(run, phase, policy, trainers, engine, config)
    if critics is not None:
        critics.all("close")


def finish(run: Run, phase: str, policy: AudioPolicy, trainers: Group, engine: GroupEngine, config: RLConfig) -> None:
    """Save the moving average if one is kept, end the workers, and mark the phase as finished."""
    beta = trainers.first("beta")
    pull_last(run, phase, policy, trainers)
    if config.ema_decay is not None:
        weights = {name: tensor.clone() for name, tensor in policy.weights().items()}
        policy.load_weights(trainers.first("averaged"))
        run.save_model(phase, "ema", policy)
        policy.load_weights(weights)
    trainers.all("close")
    engine.close()
    run.finish(phase, {"steps": config.steps, "seconds": run.seconds(phase), "kl_beta": beta})
