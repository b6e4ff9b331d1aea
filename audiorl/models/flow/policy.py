"""The policy of a flow: velocities, log-probs of noisy steps, latents of sounds, and its folder.

Sounds are latents of a codec before it quantises them (`latents` and `decode_latents` of `tokenizers_audio`), each
channel of them brought to mean 0 and deviation 1. Shapes: F latent frames, D channels, N noisy steps, B sounds, V video
features.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from audiorl.algos.experience import NoisySteps, PackedBatch, PolicyOutput
from audiorl.algos.flow import gaussian_kl, interpolate, matching, transition
from audiorl.audio import AudioClip, AudioError, load_channels, name, probe, seconds
from audiorl.config import ModelConfig, torch_device
from audiorl.config.flow import FlowModelConfig
from audiorl.data.augment import noisy_recording
from audiorl.data.schema import FieldError
from audiorl.models.attention import autocast
from audiorl.models.audio_encoder import ClipCache
from audiorl.models.flow.network import FlowNetwork, SoundPrompt
from audiorl.models.flow.stereo import mixed_down, spread
from audiorl.models.policy import Reference
from audiorl.models.weights import Weights, check_finite_weights, copy_weights, read_tensors
from audiorl.types import Sample
from tokenizers_audio import AudioTokenizer, prepare

MODEL_TYPE = "audiorl_flow"
WEIGHTS = "model.safetensors"
SEPARATOR = b"\x1f"
"""Between the caption, the thought and what is said in the bytes of a prompt."""


class LatentCodec(AudioTokenizer, Protocol):
    """A codec that gives its latents before they are quantised, and decodes them."""

    def latents(self, wav: Tensor) -> Tensor:
        """[B, T] -> [B, D, ceil(T / hop)]."""
        ...

    def decode_latents(self, latents: Tensor) -> Tensor:
        """[B, D, F] -> [B, F · hop] float32."""
        ...


class SoundLatents:
    """Latents of clips, each encoded once, up to `max_bytes` of them.

    Stereo is the latents of the left channel, then those of the right one; of a codec that makes its phases up those of
    one sound, then its place, see `audiorl.models.flow.stereo`. D numbers a frame are `width` of them.
    """

    def __init__(self, codec: LatentCodec, channels: int, max_bytes: int):
        self.codec, self.channels = codec, channels
        self.places = channels == 2 and not getattr(codec, "codes_phases", True)
        self.hop = round(codec.sample_rate / codec.frame_rate)
        own = codec.latents(torch.zeros(1, self.hop)).shape[1]
        self.width = own + 2 if self.places else own * channels
        self._cache = ClipCache(max_bytes)

    def once(self) -> AbstractContextManager[object]:
        """Do nothing: a codec is not trained, its latents stay."""
        return nullcontext()

    def encode(self, clip: AudioClip, keep: bool = True) -> Tensor:
        """Return [F, D] on the CPU; `keep`: for the next time."""
        if (held := self._cache.get(clip.key)) is not None:
            return held
        rate = self.codec.sample_rate
        wave = clip.load(rate) if self.channels == 1 else load_channels(clip, rate)[0]
        waves = [wave] * self.channels if wave.ndim == 1 else [*wave.T[:2]]
        wav = torch.stack([prepare(np.ascontiguousarray(wave), rate, self.codec) for wave in waves])
        places: list[Tensor] = []
        if self.places:
            mixed, place = mixed_down(wav.T.cpu(), rate, self.hop)
            wav, places = mixed[None].clamp(-1, 1), [place]
        latents = torch.cat([*self.codec.latents(wav).float().cpu().transpose(1, 2), *places], -1)
        if keep:
            self._cache.put(clip.key, latents)
        return latents

    def decode(self, latents: Tensor) -> np.ndarray:
        """Return the sound of [F, D]: float32 [T] in [-1, 1], or [T, 2] of stereo."""
        places = latents[:, -2:]
        parts = latents[None, :, :-2] if self.places else torch.stack(latents.chunk(self.channels, -1))
        waves = self.codec.decode_latents(parts.transpose(1, 2)).float().cpu()
        if self.places:
            waves = spread(waves[0], places, self.codec.sample_rate, self.hop).clamp(-1, 1).T
        return np.ascontiguousarray(waves[0].numpy() if self.channels == 1 else waves.T.numpy())


class FlowPolicy(nn.Module):
    """A flow that acts: makes sounds from prompts, and gives log-probs of its noisy steps for packed batches."""

    def __init__(self, model: FlowNetwork, config: ModelConfig | None = None, codec: AudioTokenizer | None = None):
        super().__init__()
        self.config, self.model, self.speech = config or ModelConfig(), model, None
        self.codec_identity = ""
        self.audio: SoundLatents
        if codec is not None:
            self.set_codec(codec)
        if self.config.lora.rank:
            raise ValueError("model.lora: flows are trained whole; leave --lora out")
        if self.config.dtype not in ("auto", "float32"):
            raise ValueError("model.dtype: a flow's weights are float32; --model.autocast True computes in bfloat16")
        model.attention = self.config.attention
        model.checkpointing = self.config.gradient_checkpointing is True
        if self.config.only:
            for pattern in self.config.only:
                if not any(re.search(pattern, weight) for weight, _ in model.named_parameters()):
                    raise ValueError(f"model.only: {pattern!r} is in no name of a trained weight")
            for weight, p in model.named_parameters():
                p.requires_grad_(any(re.search(pattern, weight) for pattern in self.config.only))

    # -- what training asks of every policy ------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.model.begin.device

    @property
    def codec(self) -> AudioTokenizer | None:
        return self.audio.codec if self.codec_identity else None

    def set_codec(self, codec: AudioTokenizer) -> None:
        """Set the codec of the latents. Raises ValueError for another one than the flow was trained on."""
        if not hasattr(codec, "latents"):
            raise ValueError("this codec gives no latents; take one of tokenizers_audio")
        if self.codec_identity not in ("", codec.identity):
            raise ValueError(
                f"the flow makes latents of {self.codec_identity}, not of {codec.identity}; give the codec that it was "
                "trained with"
            )
        latent = cast(LatentCodec, codec)
        if isinstance(codec, nn.Module):
            codec.to(self.device)
        audio = SoundLatents(latent, self.model.config.channels, self.config.audio_cache_mb * 2**20)
        if audio.width != self.model.latent_channels:
            makes = "mono" if audio.channels == 1 else "stereo"
            raise ValueError(
                f"the flow makes latents of {self.model.latent_channels} channels, but {makes} of this codec has "
                f"{audio.width}"
            )
        self.codec_identity, self.audio = codec.identity, audio

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def trainable(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def weights(self) -> Mapping[str, Tensor]:
        """Return the trained weights by name, by reference."""
        return {n: p.detach() for n, p in self.trainable().items()}

    def load_weights(self, weights: Weights, where: str = "weights") -> None:
        copy_weights(dict(self.model.state_dict()), weights, where)

    def weights_changed(self) -> None:
        """Do nothing: nothing is kept that was computed with old weights."""

    def has_fresh_adapter(self) -> bool:
        return False

    def copy(self) -> FlowPolicy:
        """Copy the flow as it is now; the codec is shared."""
        return copy.deepcopy(self, {id(self.audio): self.audio})

    def reference(self) -> Reference:
        """Return a frozen copy of the flow as it is now."""
        return Reference(cast(Any, self))  # of a policy it asks what stands in this section

    def autocast(self) -> AbstractContextManager[object]:
        return autocast(self.config, self.device)

    # -- sounds ----------------------------------------------------------------------------------------------------

    @property
    def frame_rate(self) -> float:
        """Latent frames a second."""
        return self.audio.codec.frame_rate

    def frames_of(self, duration: float) -> int:
        """Return the frames of so many seconds. Raises ValueError for more than the flow makes."""
        most = self.model.config.max_seconds
        if not 0 < duration <= most:
            raise ValueError(f"a sound of {duration:g} s was asked for; this flow makes up to {most:g} s")
        return max(math.ceil(duration * self.frame_rate - 1e-6), 1)

    def encode(self, clip: AudioClip, keep: bool = True) -> Tensor:
        """Return the latents [F, D] of a clip as the flow knows them, on the CPU; `keep`: for the next time."""
        return (self.audio.encode(clip, keep) - self.model.mean.cpu()) / self.model.deviation.cpu()

    def decode(self, latents: Tensor) -> np.ndarray:
        """Return the sound of latents [F, D]: float32 [T] in [-1, 1], or [T, 2] of stereo. Raises FloatingPointError
        for those that are not finite."""
        if not bool(latents.isfinite().all()):
            raise FloatingPointError("the flow made latents that are not finite; its weights are broken")
        return self.audio.decode(latents.float().cpu() * self.model.deviation.cpu() + self.model.mean.cpu())

    @torch.no_grad()
    def measure_latents(self, clips: Sequence[AudioClip]) -> None:
        """Take mean and deviation of the latents from clips, before training."""
        all_frames = torch.cat([self.audio.encode(clip) for clip in clips])
        self.model.mean.copy_(all_frames.mean(0))
        self.model.deviation.copy_(all_frames.std(0).clamp(min=1e-3 * float(all_frames.std())))

    def prompt(self, sample: Sample, noise: str | None = None) -> SoundPrompt:
        """Return the conditions that a sample gives.

        Its messages are the caption. Of its metadata are read `thought`, `duration` in seconds (else that of `audio`),
        `video` (a .npy file of features [frames, V], or of frames [frames, height, width] uint8) with `video_rate`, and
        for edits `before`, a clip that stays as it is outside of the spans `mask`; what is to follow its end is always
        made. The task `enhance` reads its `noisy_recording`, by the key `noise`; `tts` says the first reference, in the
        voice of `prompt_audio`, which says `prompt_text`. Raises FieldError.
        """
        about = sample.metadata
        caption = "".join(part for m in sample.messages for part in m.content if isinstance(part, str)).strip()
        duration = duration_of(sample)
        given, said = None, ""
        if sample.task in ("enhance", "tts") and self.model.config.channels == 2:
            raise FieldError("task", f"sample {sample.id!r}: {sample.task} is for flows that make mono, not stereo")
        try:
            if sample.task == "enhance":
                made_up = noise is not None and "before" not in about  # such a recording never comes again
                given = self.encode(noisy_recording(sample, noise), keep=not made_up)
            elif sample.task == "tts":
                said = sample.references[0]
                if about.get("prompt_audio") is not None:
                    given, said = self.encode(about["prompt_audio"]), f"{about['prompt_text']} {said}"
        except AudioError as error:
            field = {"enhance": "before" if "before" in about else "audio", "tts": "prompt_audio"}[sample.task]
            raise FieldError(field, str(error)) from error
        voice = len(given) if given is not None and sample.task == "tts" else 0
        try:
            frames = self.frames_of(duration + voice / self.frame_rate)
        except ValueError as error:
            raise FieldError("duration", f"sample {sample.id!r}: {error}") from None
        if (letters := len(said.lower().encode())) > frames:
            most = f"at most {frames} bytes in {frames / self.frame_rate:.2f} s, a frame says one"
            raise FieldError("duration", f"sample {sample.id!r}: a text of {letters} bytes, {most}; give more seconds")
        if about.get("channels", 1) > self.model.config.channels:
            raise FieldError("channels", f"sample {sample.id!r}: asks for stereo, but this flow makes mono")
        prompt = SoundPrompt(frames, caption, str(about.get("thought") or "").strip(), said=said, voice=voice)
        if given is not None:
            known = nn.functional.pad(given[:frames], (0, 1), value=1.0)
            prompt = replace(prompt, context=nn.functional.pad(known, (0, 0, 0, frames - len(known))))
        elif about.get("before") is not None:
            prompt = replace(prompt, context=self._context(sample, duration, frames))
        if about.get("video") is not None and self.model.config.video:
            prompt = replace(prompt, video=self._video(sample, frames))
        return prompt

    def _context(self, sample: Sample, duration: float, frames: int) -> Tensor:
        """Return [frames, D + 1] for the part of `before` that stays: what is in no span of `mask`, in seconds."""
        before, mask = sample.metadata["before"], sample.metadata.get("mask", ())
        try:
            there, channels = seconds(before), probe(before).channels
            latents = self.encode(before)[:frames]
        except AudioError as error:
            raise FieldError("before", str(error)) from error
        where = f"sample {sample.id!r}: {name(before)}"
        if before.channel is None and channels > self.model.config.channels:
            makes = f"this flow makes {'mono' if self.model.config.channels == 1 else 'stereo'}"
            raise FieldError("before", f"{where} has {channels} channels, but {makes}; give one of them")
        if there > duration + 1 / self.frame_rate:
            asked = f"{where} lasts {there:.2f} s, but {duration:.2f} s are asked for"
            raise FieldError("duration", f"{asked}; an edit never shortens a sound: cut it first")
        if not len(mask) and duration <= there:
            raise FieldError("mask", f"{where}: nothing is to be made anew; give [[start, end], …] in seconds")
        stays = torch.ones(len(latents), 1)
        for start, end in mask:
            stays[int(start * self.frame_rate) : math.ceil(end * self.frame_rate)] = 0
        return nn.functional.pad(torch.cat([latents * stays, stays], 1), (0, 0, 0, frames - len(latents)))

    def _video(self, sample: Sample, frames: int) -> Tensor:
        path, rate, width = sample.metadata["video"], sample.metadata.get("video_rate"), self.model.config.video
        if not isinstance(rate, int | float) or rate <= 0:
            raise FieldError("video_rate", f"sample {sample.id!r}: missing; give the frames a second of the video")
        try:
            read = np.load(path, allow_pickle=False)
            video = torch.from_numpy(read.astype(np.float32))
        except (OSError, ValueError, EOFError) as error:
            raise FieldError("video", f"sample {sample.id!r}: {path} is no .npy file of numbers ({error})") from None
        if not bool(video.isfinite().all()):
            raise FieldError("video", f"sample {sample.id!r}: {path} holds numbers that are not finite")
        if video.dim() == 3 and read.dtype != np.uint8:
            raise FieldError("video", f"sample {sample.id!r}: {path} holds pictures of {read.dtype}; they are uint8")
        if video.dim() == 3:  # pictures: a small one of each, as far as it fits
            side = math.isqrt(width)
            video = nn.functional.adaptive_avg_pool2d(video[:, None] / 255, (side, side)).flatten(1)
        if video.dim() != 2 or video.shape[1] > width or not len(video):
            raise FieldError(
                "video", f"sample {sample.id!r}: {list(video.shape)}, but this flow reads [frames, {width}]"
            )
        if abs(len(video) / rate - frames / self.frame_rate) > 1 / rate + 1 / self.frame_rate:
            lengths = (
                f"{len(video) / rate:.2f} s at {rate:g} frames a second, the sound {frames / self.frame_rate:.2f} s"
            )
            raise FieldError("video", f"sample {sample.id!r}: {path} lasts {lengths}")
        at = (torch.arange(frames) / self.frame_rate * rate).long().clamp(max=len(video) - 1)
        return nn.functional.pad(video, (0, width - video.shape[1]))[at]

    def target(self, sample: Sample, prompt: SoundPrompt) -> Tensor:
        """Return the latents [F, D] that a sample's `audio` (of an edit `after`) has, after those of the voice of its
        prompt. Raises FieldError without any."""
        clip = recording_of(sample)
        if clip is None:
            raise FieldError("audio", f"sample {sample.id!r}: no sound to learn")
        frames = prompt.frames
        try:
            latents = self.encode(clip)
        except AudioError as error:
            raise FieldError("audio", str(error)) from error
        if prompt.context is not None and prompt.voice:
            latents = torch.cat([prompt.context[: prompt.voice, :-1], latents])
        latents = latents[:frames]
        if len(latents) < frames - 1:
            raise FieldError("duration", f"{name(clip)} is shorter than the {frames / self.frame_rate:.2f} s asked for")
        return nn.functional.pad(latents.T, (0, frames - len(latents)), mode="replicate").T

    # -- forward ---------------------------------------------------------------------------------------------------

    def velocity(self, x: Tensor, t: Tensor, prompts: Sequence[SoundPrompt], guidance: float = 1.0) -> Tensor:
        """Return v [F, D] float32 of packed latents x [F, D] at the times t [B] of B prompts.

        With guidance w it is v₀ + w·(v - v₀), v₀ without any condition (Ho and Salimans 2022, arXiv 2207.12598).
        """
        with self.autocast():
            if guidance == 1:
                return self.model(x, t, prompts)
            bare = [SoundPrompt(p.frames) for p in prompts]
            v, without = self.model(torch.cat([x, x]), torch.cat([t, t]), [*prompts, *bare]).chunk(2)
            return without + guidance * (v - without)

    def forward(
        self,
        batch: PackedBatch,
        temperature: float = 1.0,
        value_head: nn.Module | None = None,
        audio_temperature: float | Sequence[float] | None = None,
    ) -> PolicyOutput:
        """Return log-probs and entropies [N] of the noisy steps, means over the numbers of a sound's latents; of sounds
        that are noised again minus the flow matching loss, without guidance."""
        assert value_head is None and len(batch.flows) == len(batch.source), "flows have no critic"
        steps = [
            (prompt_of(batch, i), flow, k) for i, flow in enumerate(batch.flows) for k in range(len(flow.states) - 1)
        ]
        if not steps:
            none = 0 * self.model.last.weight.sum() + torch.zeros(0, device=self.device)
            return PolicyOutput(none, none.detach())
        (noise, level, guidance), *others = {(f.noise, f.level, f.guidance) for f in batch.flows}
        assert not others, "rollouts of one step are sampled in one way"
        lengths = [prompt.frames for prompt, _, _ in steps]

        def here(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat(list(parts)).to(self.device, non_blocking=True)

        again = noise == "none"
        times = torch.tensor([(f.times[k], 0 if again else f.times[k + 1]) for _, f, k in steps], device=self.device)
        counts = torch.tensor(lengths, device=self.device)
        t, next_t = times.repeat_interleave(counts, 0, output_size=sum(lengths)).split(1, 1)
        before = here([f.states[0 if again else k] for _, f, k in steps])
        after = here([f.states[k + 1] for _, f, k in steps])
        if again:
            before, after = interpolate(before, after, t), after - before
        v = self.velocity(before, times[:, 0], [prompt for prompt, _, _ in steps], 1.0 if again else guidance)
        step = matching(v) if again else transition(before, v, t, next_t, noise, level)  # type: ignore[arg-type]
        std = torch.stack([part[0, 0] for part in step.std.split(lengths)])

        def known(name: str) -> Tensor | None:
            means = [None if (own := getattr(f, name)) is None else own[k] for _, f, k in steps]
            return None if any(m is None for m in means) else here([m for m in means if m is not None])

        old, ref = known("means"), known("ref_means")
        old = step.mean.detach() if old is None else old
        noisy = NoisySteps(
            step.mean,
            old,
            after,
            t,
            lengths,
            std,
            times[:, 1] - times[:, 0],
            drift=gaussian_kl(step.mean, old, step.std, lengths),
            kl=None if ref is None else gaussian_kl(step.mean, ref, step.std, lengths),
        )
        entropy = std.log() + 0.5 * math.log(2 * math.pi * math.e)
        return PolicyOutput(step.logprobs(after, lengths), entropy, noisy_steps=noisy)

    # -- folders ---------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "model_type": MODEL_TYPE,
            "network": asdict(self.model.config),
            "latent_channels": self.model.latent_channels,
            "codec": self.codec_identity,
        }
        (folder / "config.json").write_text(json.dumps(content, indent=1))
        state = {key: tensor.detach().cpu().contiguous() for key, tensor in self.model.state_dict().items()}
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})

    def restore(self, folder: str | Path) -> None:
        """Copy the weights saved in `folder` into this flow."""
        path = Path(folder) / WEIGHTS
        weights = read_tensors(path)
        check_finite_weights(weights.items(), path)
        if missing := sorted(self.model.state_dict().keys() - weights.keys()):
            raise ValueError(f"{path}: weight {missing[0]!r} is missing: another architecture")
        self.load_weights(weights, str(path))


def duration_of(sample: Sample) -> float:
    """Return the seconds of the sound that a sample asks for: its `duration`, or that of its `audio`. Raises
    FieldError."""
    clip = sample.metadata.get("audio")
    duration = sample.metadata.get("duration", seconds(clip) if isinstance(clip, AudioClip) else None)
    if not isinstance(duration, int | float):
        raise FieldError("duration", f"sample {sample.id!r}: missing; give the seconds of the sound")
    return duration


def recording_of(sample: Sample) -> AudioClip | None:
    """Return the sound that a sample has: of an edit that after it, else its `audio`; None without one."""
    clip = sample.metadata.get("after", sample.metadata.get("audio"))
    return clip if isinstance(clip, AudioClip) else None


def prompt_bytes(prompt: SoundPrompt) -> Tensor:
    """Return [P] int64: the caption, the thought and what is said as bytes, from which `prompt_of` reads them."""
    text = SEPARATOR.join(part.encode() for part in (prompt.caption, prompt.thought, prompt.said))
    return torch.tensor(list(text.rstrip(SEPARATOR)), dtype=torch.long)


def prompt_of(batch: PackedBatch, number: int) -> SoundPrompt:
    """Return the prompt of an experience of a packed batch."""
    rows, flow = batch.source[number], batch.flows[number]
    text = bytes(batch.ids[rows[~batch.loss_mask[rows]]].tolist())
    caption, thought, said = (part.decode() for part in (text + 2 * SEPARATOR).split(SEPARATOR)[:3])
    return SoundPrompt(flow.states.shape[1], caption, thought, flow.context, flow.video, said)


def new_flow(
    config: FlowModelConfig, codec: AudioTokenizer, model: ModelConfig | None = None, seed: int = 0
) -> FlowPolicy:
    """Make a random flow on latents of `codec`; `FlowPolicy.measure_latents` then scales these."""
    model = model or ModelConfig()
    width = SoundLatents(cast(LatentCodec, codec), config.channels, 0).width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = FlowNetwork(config, width)
    return FlowPolicy(network.to(torch_device(model.device)), model, codec)


def load_flow(path: str | Path, config: ModelConfig | None = None, codec: AudioTokenizer | None = None) -> FlowPolicy:
    """Load the flow in a folder. Raises ValueError for a folder that holds none, is damaged, or is of another codec."""
    config = config or ModelConfig()
    network, identity = read_network(path)
    policy = FlowPolicy(network, config)
    policy.restore(path)
    network.to(torch_device(config.device))
    policy.codec_identity = identity
    if codec is not None:
        policy.set_codec(codec)
    return policy


def read_network(path: str | Path) -> tuple[FlowNetwork, str]:
    """Return a random network of the size of the flow in a folder, and the identity of its codec. Raises ValueError."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"{path}: no config.json there; give the folder of a flow, such as a checkpoint of sound-sft")
    try:
        content = json.loads(file.read_text())
        if content.get("model_type") != MODEL_TYPE:
            raise ValueError(f"model_type {content.get('model_type')!r} is no flow, which is {MODEL_TYPE!r}")
        network = FlowNetwork(FlowModelConfig(**content["network"]), content["latent_channels"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: {error}") from error
    return network, content.get("codec", "")
