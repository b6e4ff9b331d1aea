"""Rollouts of a flow: sounds, with the noisy steps on the way to them that a policy gradient is about.

All sounds of a pack take a step together, whatever their lengths. Each has random numbers of its own, so that it does
not depend on what is in the pack; with noisy steps "branch" a group is one sound up to its first noisy step.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audiorl.algos.flow import (
    Step,
    noisy_range,
    ode_step,
    sampling_times,
    step_velocity,
    training_times,
    transition,
)
from audiorl.audio import AudioClip, load_channels
from audiorl.config import ModelConfig
from audiorl.config.flow import FlowConfig, FlowInference
from audiorl.data.augment import noisy_recording
from audiorl.distributed.local import gpu_work
from audiorl.models.export import codec_of
from audiorl.models.flow.network import SoundPrompt
from audiorl.models.flow.policy import FlowPolicy, duration_of, load_flow, prompt_bytes
from audiorl.models.weights import Weights
from audiorl.protocols import Ended, Request
from audiorl.run.folder import newest_checkpoint
from audiorl.types import FlowPath, Rollout, Sample, Segment
from tokenizers_audio import load as load_codec

FADE = 0.01
"""Seconds at each end of an edited span in which the old sound goes over into the new one."""


@dataclass
class _Path:
    """A sound in the making; `index`: of its rollout, None as long as it stands for a whole group."""

    request: Request
    index: int | None
    prompt: SoundPrompt
    noisy: range
    x: Tensor
    generator: torch.Generator
    last: Step | None = None
    states: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)


def _generator(*key: object) -> torch.Generator:
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def load_sounding(path: str | Path, codec: str | None = None, model: ModelConfig | None = None) -> FlowPolicy:
    """Load a flow with its codec: the folder codec/ in or above its own, unless one is named."""
    found = codec or codec_of(path)
    if found is None:
        raise ValueError(f"{path}: no folder codec/ in it or above it; name its audio tokenizer with --codec")
    return load_flow(path, model, load_codec(found))


def engine_for(model: str, options: FlowInference) -> FlowEngine:
    """Load a flow, of a run folder its newest checkpoint, to sample from it as the options say."""
    path = newest_checkpoint(model, options.phase)
    return FlowEngine(load_sounding(path, options.codec, ModelConfig(device=options.device)), options.sampling)


def masked(mask: Sequence[tuple[float, float]], length: int, rate: int) -> NDArray[np.bool_]:
    """Return which samples [length] lie in the spans of a mask, which are seconds."""
    inside = np.zeros(length, bool)
    for start, end in mask:
        inside[round(start * rate) : round(end * rate)] = True
    return inside


def spliced(sample: Sample, made: AudioClip) -> AudioClip:
    """Return an edit's clip `before` with the spans of its `mask`, and what follows its end, taken from `made`.

    All else is bit for bit as it was, at the clip's own rate. Within a span, FADE seconds at each border go from one to
    the other; behind the end of `before` its last sample stands for it.
    """
    about = sample.metadata
    old, rate = load_channels(about["before"])
    new, _ = load_channels(made, rate)
    channels = 1 if new.ndim == 1 else new.shape[1]  # where they are two, a mono clip is heard in both
    total = max(len(old), round(about.get("duration", 0) * rate))
    waves = [(wave if wave.ndim == 2 else wave[:, None].repeat(channels, 1))[:total] for wave in (old, new)]
    out, new = (np.pad(wave, ((0, total - len(wave)), (0, 0)), mode="edge") for wave in waves)
    stays = (np.arange(total) < len(old)) & ~masked(about.get("mask", ()), total, rate)
    for start, end in np.flatnonzero(np.diff(stays, prepend=True, append=True)).reshape(-1, 2):
        border = min(round(FADE * rate), (end - start) // 2)
        rise = np.linspace(0, 1, border + 2, dtype=np.float32)[1:-1, None]
        weight = np.ones((end - start, 1), np.float32)
        if start > 0:
            weight[:border] = rise
        if end < total:
            weight[end - start - border :] = rise[::-1]
        out[start:end] += weight * (new[start:end] - out[start:end])
    return AudioClip(array=out if channels > 1 else out[:, 0], sample_rate=rate)


def filtered(noisy: AudioClip, made: AudioClip) -> AudioClip:
    """Return a noisy recording of which each of 80 mel bands, every 10 ms, is no louder than in the sound made of it.

    So enhanced speech keeps the phases of the recording, where the codec of what was made makes its own up.
    """
    from audiorl.eval.metrics.speech import mel_filters  # with the metrics of text, which a plain checkout lacks

    wave, rate = load_channels(made)
    size, length = round(0.04 * rate) // 4 * 4, len(wave)
    window, filters = torch.hann_window(size), torch.from_numpy(mel_filters(rate, size, 80)).float()
    old = noisy.load(rate)[:length]
    old = np.pad(old, (0, length - len(old)))
    spectra, other = (
        torch.stft(torch.from_numpy(x), size, size // 4, window=window, return_complex=True) for x in (old, wave)
    )
    there, wanted = (filters @ s.abs() ** 2 for s in (spectra, other))
    gains = (wanted / (there + 1e-9)).clamp(max=1).sqrt()
    spread = filters.T @ gains / (filters.sum(0)[:, None] + 1e-9)
    out = torch.istft(spectra * spread, size, size // 4, window=window, length=length)
    return AudioClip(array=out.numpy(), sample_rate=rate)


def noise_of(request: Request) -> str | None:
    """Return what draws the noise of a recording to be enhanced, the same for a group: None, always the same, where
    there is no training."""
    return None if request.greedy else f"{request.seed}/{request.sample.id}"


class FlowEngine:
    """`RolloutEngine` over a `FlowPolicy`, whose weights it shares. Greedy requests follow the ODE, without noise."""

    def __init__(self, policy: FlowPolicy, config: FlowConfig | None = None):
        self.policy, self.config = policy, config or FlowConfig()
        self.policy_version = 0

    def update_weights(self, weights: Weights, version: int) -> None:
        self.policy.load_weights(weights)
        self.policy_version = version

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], ended: Ended | None = None) -> list[Rollout]:
        """Generate all rollouts of all requests, request by request, index ascending. `spoken_audio` is the sound, of
        an edit `before` with its new spans, see `spliced`; of a recording that is enhanced see `filtered`.

        Raises ValueError for a sample that this flow cannot make.
        """
        rollouts: list[Rollout] = []
        for pack in self._packs([(r, self.policy.prompt(r.sample, noise_of(r))) for r in requests]):
            paths = self._sample(pack)
            made = [self._rollout(path) for path in paths]
            rollouts += made
            if ended is not None:
                for request, _ in pack:
                    ended([r for r, path in zip(made, paths, strict=True) if path.request is request])
        return rollouts

    def _packs(self, asked: Sequence[tuple[Request, SoundPrompt]]) -> Iterator[list[tuple[Request, SoundPrompt]]]:
        """Yield requests in packs of at most `max_batch_frames`, or single ones."""
        pack: list[tuple[Request, SoundPrompt]] = []
        frames = 0
        for request, prompt in asked:
            if pack and frames + request.n * prompt.frames > self.config.max_batch_frames:
                yield pack
                pack, frames = [], 0
            pack.append((request, prompt))
            frames += request.n * prompt.frames
        if pack:
            yield pack

    def _sample(self, pack: Sequence[tuple[Request, SoundPrompt]]) -> list[_Path]:
        """Return the paths of all rollouts of a pack, in order."""
        c, device = self.config, self.policy.device
        times = sampling_times(c.steps, c.shift)
        paths: list[_Path] = []
        for request, prompt in pack:
            key = (request.seed, request.sample.id)
            greedy = request.greedy or c.noisy == "none"
            noisy = range(0) if greedy else noisy_range(c.noisy, c.steps, c.window, random.Random(f"{key}"))
            shared = c.noisy == "branch" and not request.greedy
            for index in [None] if shared else range(request.n):
                paths.append(self._path(request, index, prompt, noisy))
        for i, (t, next_t) in enumerate(pairwise(times)):
            paths = [branch for path in paths for branch in self._branches(path, i)]
            lengths = [path.prompt.frames for path in paths]
            prompts = [path.prompt for path in paths]

            def velocity(x: Tensor, at: float, prompts: list[SoundPrompt] = prompts) -> Tensor:
                with gpu_work():
                    return self.policy.velocity(
                        x, torch.full((len(prompts),), at, device=device), prompts, c.guidance_scale
                    )

            x = torch.cat([path.x for path in paths])
            v = velocity(x, t)
            solved = not all(i in path.noisy for path in paths)
            to_next = step_velocity(velocity, x, v, t, next_t, c.solver) if solved else v
            for path, own, other in zip(paths, v.split(lengths), to_next.split(lengths), strict=True):
                if i not in path.noisy:
                    path.x, path.last = ode_step(path.x, other, t, next_t, c.solver, path.last)
                    continue
                path.last = None
                step = transition(path.x, own, t, next_t, c.noise, c.noise_level)
                z = torch.randn(path.x.shape, generator=path.generator).to(device)
                path.states.append(path.x)
                path.x = step.sample(z)
                path.means.append(step.mean)
                path.logprobs.append(step.logprobs(path.x, [len(path.x)]))
                if i == path.noisy[-1]:
                    path.states.append(path.x)
        return paths

    def _path(self, request: Request, index: int | None, prompt: SoundPrompt, noisy: range) -> _Path:
        generator = _generator(request.seed, request.sample.id, index)
        x = torch.randn(prompt.frames, self.policy.model.latent_channels, generator=generator).to(self.policy.device)
        return _Path(request, index, prompt, noisy, x, generator)

    def _branches(self, path: _Path, step: int) -> list[_Path]:
        """Return a path, or where a group's first noisy step is here, one for each of its rollouts."""
        if path.index is not None or step != path.noisy[0]:
            return [path]
        branches = [self._path(path.request, k, path.prompt, path.noisy) for k in range(path.request.n)]
        for branch in branches:
            branch.x = path.x
        return branches

    def _rollout(self, path: _Path) -> Rollout:
        c, request, prompt = self.config, path.request, path.prompt
        assert path.index is not None
        times = sampling_times(c.steps, c.shift)
        codec, task = self.policy.audio.codec, request.sample.task
        rate = codec.sample_rate
        wave = self.policy.decode(path.x)[round(prompt.voice * rate / codec.frame_rate) :]
        sound = AudioClip(array=wave[: round(duration_of(request.sample) * rate)], sample_rate=rate)
        if task == "enhance" and not getattr(codec, "codes_phases", True):
            sound = filtered(noisy_recording(request.sample, noise_of(request)), sound)
        elif prompt.context is not None and task not in ("enhance", "tts"):
            sound = spliced(request.sample, sound)
        x0, noised = path.x.cpu(), 0 if c.noisy != "none" or request.greedy else c.window
        # Of a group's sounds all are noised alike: pairs of them are compared at one t and noise.
        draws = _generator(request.seed, request.sample.id, "noised")
        drawn = training_times(noised, shift=c.shift, generator=draws).tolist()
        noises = torch.randn(noised, *x0.shape, generator=draws)
        flow = FlowPath(
            states=torch.stack(path.states).cpu() if path.states else torch.cat([x0[None], noises]),
            times=tuple(times[path.noisy.start : path.noisy.stop + 1] if path.noisy else drawn),
            means=torch.stack(path.means).cpu() if path.means else None,
            noise="none" if c.noisy == "none" else c.noise,
            level=c.noise_level,
            guidance=c.guidance_scale,
            context=prompt.context,
            video=prompt.video,
        )
        segment = Segment(
            prompt_ids=prompt_bytes(prompt),
            ids=torch.tensor(list(path.noisy or range(noised)), dtype=torch.long),
            logprobs=torch.cat(path.logprobs).cpu() if path.logprobs else torch.full((noised,), math.nan),
            policy_version=self.policy_version,
            flow=flow,
        )
        group = request.group_id or request.sample.id
        return Rollout(request.sample, (segment,), group, path.index, spoken_audio=sound)
