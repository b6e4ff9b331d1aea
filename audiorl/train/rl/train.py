"""The reinforcement learning loop: sync, collect, advantages, train, log, evaluate, checkpoint.

Every step is a function of (seed, step) and the weights alone, so a resumed run repeats exactly what was lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from audiorl.config import OptimConfig, RLConfig, SamplingConfig
from audiorl.data.schedule import batch_of_step
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, experience
from audiorl.models.policy import Reference
from audiorl.protocols import Reward, SpeechDecoder
from audiorl.run.folder import Run
from audiorl.run.progress import Progress, StepClock
from audiorl.run.saving import checkpoint, completing_saves, pull, pull_last, restore
from audiorl.train.rl.advantages import compute_advantages, scored_experiences
from audiorl.train.rl.collect import Collector
from audiorl.train.rl.distill import check_teacher_prompts, reference_answers, with_teacher_prompts
from audiorl.train.rl.held_out import Evaluate, held_out_metrics
from audiorl.train.rl.listening import check_listening
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
    workers = start_workers(run, phase, policy, config, optim, sampling, reference)
    engine, trainers, saved = workers.engine, workers.trainers, workers.checkpointed
    start = restore(run, phase, saved)
    waiting = []
    if config.partial_tokens is not None and start:
        waiting = load_unfinished(unfinished_file(run.dir / "checkpoints" / phase, start), policy, samples)
    collector = Collector(engine, samples, reward, config, seed, waiting)
    with (
        run.interruptible(),
        completing_saves(run, saved),
        workers.driver_on_cpu(policy),
        Progress(phase, config.steps, start) as progress,
    ):
        for step in range(start, config.steps):
            clock = StepClock(*workers.groups)
            engine.sync(version=step)
            rollouts = collector.collect(step)
            clock.lap("rollout")
            experiences = scored_experiences(rollouts, config)
            given = reference_answers(answers, step, config, seed)
            answered = [experience(policy, e) for e in given]
            if config.distill.coef:
                experiences = with_teacher_prompts(experiences, [r.sample for r in rollouts.rollouts], config.distill)
                answered = with_teacher_prompts(answered, [e.sample for e in given], config.distill)
            experiences = compute_advantages(workers.fill_in(experiences), config)
            ptx = batch_of_step(supervised, step, config.ptx_batch, seed) if config.ptx_coef else []
            done = step + 1
            recorded = done % config.rollouts_every == 0 or done in (1, config.steps)
            batch = StepBatch(
                experiences, [experience(policy, e) for e in ptx], workers.fill_in_references(answered), recorded
            )
            engine.free_gpus()
            with collector.collect_ahead(step + 1, run.asked_to_stop):
                output = workers.step(batch)
            clock.lap("train")

            metrics = output.metrics | step_metrics(rollouts, step, config) | clock.laps
            metrics["tokens_per_s"] = rollouts.num_sampled / clock.seconds
            if config.audio_check_every and (done == 1 or done % config.audio_check_every == 0):
                pull(policy, trainers)
                with workers.driver_on_gpu(policy):
                    metrics |= check_listening(policy, rollouts.rollouts, config)
            if evaluate and config.eval_every and done % config.eval_every == 0 and done < config.steps:
                metrics |= held_out_metrics(evaluate, workers, policy, sampling, done, progress)
            if recorded:
                run.write_rollouts(phase, done, rollouts.rollouts, output.advantages, speech_decoder, output.tokens)
            run.log(phase, done, metrics)
            progress.update(done, metrics)
            run.add_seconds(phase, clock.seconds, clock.cpu_seconds)
            save_waiting = None if config.partial_tokens is None else collector.save(done)
            checkpoint(run, phase, done, config.steps, config.save_every, saved, save_waiting)
    finish(run, phase, policy, workers)


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
