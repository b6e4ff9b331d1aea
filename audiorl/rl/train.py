"""The reinforcement learning loop: sync, collect, advantages, train, log, evaluate, checkpoint.

Every step is a function of (seed, step) and the weights alone, so a resumed run repeats exactly what was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from audiorl.config import OptimConfig, RLConfig, SamplingConfig
from audiorl.data.schedule import batch_of_step
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, experience
from audiorl.models.reference import Reference
from audiorl.rl.advantages import compute_advantages, scored_experiences
from audiorl.rl.collect import Collector
from audiorl.rl.distill import check_teacher_prompts, reference_answers, with_teacher_prompts
from audiorl.rl.listening import check_listening
from audiorl.rl.metrics import step_metrics
from audiorl.rl.split import add_from_references, mean_advantages, split_batch
from audiorl.rl.weight_sync import GroupEngine
from audiorl.rl.workers import start_workers
from audiorl.run.folder import Run
from audiorl.run.phase import checkpoint, pull, restore
from audiorl.run.progress import Progress, StepClock
from audiorl.runtime.local import Group
from audiorl.types import Reward, Sample, SpeechDecoder

Evaluate = Callable[[], Mapping[str, float]]
"""Held-out metrics of the policy as it is now."""


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
    if config.ptx_coef and not supervised:
        raise ValueError("ptx_coef is set, but there are no supervised examples for it")
    if config.distill.coef:
        check_teacher_prompts([*samples, *(a.sample for a in answers)], config.distill)
    if config.reference_prompts and not answers:
        raise ValueError("distill.off_policy is set, but this recipe gives no reference answers; distill-speech does")
    # Reference and critic start as copies of the policy, so the workers are made before its weights are restored.
    trainers, engine, references = start_workers(run, phase, policy, config, optim, sampling, reference)
    collector = Collector(engine, samples, reward, config, seed)
    start = restore(run, phase, policy, trainers)
    with run.interruptible(), Progress(phase, config.steps, start) as progress:
        for step in range(start, config.steps):
            clock = StepClock()
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
            experiences = compute_advantages(experiences, config)
            ptx = batch_of_step(supervised, step, config.ptx_batch, seed) if config.ptx_coef else []
            batches, shares = split_batch(experiences, [experience(policy, e) for e in ptx], trainers, config, answered)
            engine.free_gpus()
            with collector.collect_ahead(step + 1, run.asked_to_stop):
                outputs = trainers.each("step", batches)
            clock.lap("train")

            done = step + 1
            metrics = step_metrics(rollouts, outputs, step, config) | clock.metrics(rollouts.num_sampled)
            if config.audio_check_every and (done == 1 or done % config.audio_check_every == 0):
                pull(policy, trainers)
                metrics |= check_listening(policy, rollouts.rollouts, config)
            if evaluate and config.eval_every and done % config.eval_every == 0 and done < config.steps:
                pull(policy, trainers)
                metrics |= {f"eval/{name}": value for name, value in evaluate().items()}
            if done % config.rollouts_every == 0 or done in (1, config.steps):
                run.write_rollouts(phase, done, rollouts.rollouts, mean_advantages(outputs, shares), speech_decoder)
            run.log(phase, done, metrics)
            progress.update(done, metrics)
            run.add_seconds(phase, clock.seconds)
            checkpoint(run, phase, done, config.steps, config.save_every, policy, trainers)
    finish(run, phase, policy, trainers, engine, config)


def finish(run: Run, phase: str, policy: AudioPolicy, trainers: Group, engine: GroupEngine, config: RLConfig) -> None:
    """Save the moving average if one is kept, end the workers, and mark the phase as finished."""
    beta = trainers.first("beta")
    if config.ema_decay is not None:
        weights = {name: tensor.clone() for name, tensor in policy.weights().items()}
        policy.load_weights(trainers.first("averaged"))
        run.save_model(phase, "ema", policy)
        policy.load_weights(weights)
    trainers.all("close")
    engine.close()
    run.finish(phase, {"steps": config.steps, "seconds": run.seconds(phase), "kl_beta": beta})
