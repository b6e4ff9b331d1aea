"""Supervised training of flows: the velocity from noise to sounds, under prompts with parts left out at random."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from audiorl.algos.experience import Experience
from audiorl.algos.flow import flow_matching_loss, interpolate, training_times
from audiorl.algos.packing import pack
from audiorl.config import OptimConfig
from audiorl.config.checks import pass_tokens
from audiorl.config.flow import FlowSFTConfig
from audiorl.models.flow import FlowPolicy, SoundPrompt
from audiorl.models.flow.policy import prompt_bytes
from audiorl.run.folder import Run
from audiorl.train.fit import Learner, PackLoss, train_on
from audiorl.types import Sample

HELD_OUT_DRAWS = 4
"""Times and noises under which the loss of a held-out sound is measured, the same at every measurement."""


def sound_sft(
    policy: FlowPolicy,
    samples: Sequence[Sample],
    run: Run,
    *,
    config: FlowSFTConfig,
    optim: OptimConfig,
    seed: int = 0,
    phase: str = "sft",
) -> None:
    """Train `policy` in place on the sounds of samples; see `FlowPolicy.prompt` and `target` for what they hold."""
    train_on(partial(sound_loss, seed=seed), policy, samples, run, config, optim, phase=phase, seed=seed)


def sound_loss(
    learner: Learner, config: FlowSFTConfig, samples: Sequence[Sample], seed: int
) -> tuple[list[list[int]], PackLoss]:
    """Compute the flow matching loss: a mean over the sounds of all ranks, at one time and noise each.

    Time, noise and what is left out depend on the seed, the update and the sample: neither ranks nor packs change them.
    """
    policy = cast(FlowPolicy, learner.policy)
    update, total = learner.optimizer.updates, sum(learner.world.gather(len(samples)))
    world = learner.world  # ranks take the sounds of a batch in turn: `place` is that in the whole batch
    places = range(world.rank, world.rank + world.size * len(samples), world.size)
    keys = [f"{seed}/{update}/{place}/{s.id}" for place, s in zip(places, samples, strict=True)]
    drawn = [draw(policy, s, config, key) for s, key in zip(samples, keys, strict=True)]

    def loss(indices: list[int]) -> tuple[list[Experience], Tensor, dict[str, Tensor], Tensor | None]:
        each = sound_losses(policy, [drawn[i] for i in indices])
        mean = each.sum() / total
        named = [Experience(torch.zeros(0), torch.zeros(0), 0, name=repr(samples[i].id)) for i in indices]
        return named, mean, {"sft/loss": mean}, None

    costs = [prompt.frames + len(prompt_bytes(prompt)) for prompt, *_ in drawn]
    return pack(costs, pass_tokens(config)), loss


Drawn = tuple[SoundPrompt, Tensor, Tensor, float]
"""A prompt with parts left out, x0 [F, D], noise [F, D] and t."""


def draw(policy: FlowPolicy, sample: Sample, config: FlowSFTConfig, key: str) -> Drawn:
    """Draw the time and noise of a sound, what its prompt leaves out, and the noise of a recording that is to be
    enhanced and has none; all of it is fixed by `key`."""
    generator = torch.Generator().manual_seed(int(hashlib.sha256(key.encode()).hexdigest()[:14], 16))
    prompt = policy.prompt(sample, key)
    x0 = policy.target(sample, prompt)
    t = float(training_times(1, config.times, config.shift, generator))
    noise = torch.randn(x0.shape, generator=generator)
    caption, thought, context, video, everything = (torch.rand(5, generator=generator) < config.drop).tolist()
    inpaint, first, last = torch.rand(3, generator=generator).tolist()
    if inpaint < config.inpaint and prompt.context is None:
        begin, end = sorted((int(first * len(x0)), int(last * len(x0))))
        stays = torch.ones(len(x0), 1)
        stays[begin : end + 1] = 0
        prompt = replace(prompt, context=pad(x0, (0, 1), value=1.0) * stays)
    prompt = replace(
        prompt,
        caption="" if caption or everything else prompt.caption,
        thought="" if thought or everything else prompt.thought,
        context=None if context or everything else prompt.context,
        video=None if video or everything else prompt.video,
        said="" if caption or everything else prompt.said,
    )
    return prompt, x0, noise, t


def sound_losses(policy: FlowPolicy, drawn: Sequence[Drawn]) -> Tensor:
    """Return the flow matching loss [B] of each."""
    prompts, sounds, noises, times = zip(*drawn, strict=True)
    lengths = [len(x0) for x0 in sounds]
    x0, noise = (torch.cat(parts).to(policy.device, non_blocking=True) for parts in (sounds, noises))
    t = torch.tensor(times, device=policy.device)
    rows = t.repeat_interleave(torch.tensor(lengths, device=policy.device), output_size=len(x0))[:, None]
    v = policy.velocity(interpolate(x0, noise, rows), t, prompts)
    return flow_matching_loss(v, x0, noise, lengths)


@torch.no_grad()
def held_out_loss(policy: FlowPolicy, samples: Sequence[Sample], config: FlowSFTConfig) -> float:
    """Return the mean loss of held-out sounds under whole prompts, at times and noises that are always the same."""
    whole = replace(config, drop=0.0, inpaint=0.0)
    drawn = [draw(policy, s, whole, f"held out/{k}/{s.id}") for s in samples for k in range(HELD_OUT_DRAWS)]
    packs = pack([prompt.frames for prompt, *_ in drawn], pass_tokens(config))
    return sum(float(sound_losses(policy, [drawn[i] for i in indices]).sum()) for indices in packs) / len(drawn)
