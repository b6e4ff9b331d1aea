"""Training our tokenizer: one step at a time, on one or many GPUs.

    trainer = CodecTrainer(UnifiedTokenizer(UnifiedConfig()), TrainConfig(steps=100_000))
    for batch in batches:                  # [B, T] samples in [-1, 1], T a whole number of frames
        metrics = trainer.step(batch)
    trainer.tokenizer.save("codec")

Every step is a function of its batch, the seed, the step's number and the state: a trainer that loads the state of
another goes on as that one would have. Under torch.distributed each rank brings its own part of the batch, equally
large; gradients, codebook statistics and revived codes are the same on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokenizers_audio.unified.codebooks import CodebookTrainer
from tokenizers_audio.unified.discriminator import (
    Discriminator,
    adversarial_loss,
    discriminator_loss,
    feature_matching_loss,
)
from tokenizers_audio.unified.distributed import average_gradients, gather_rows, take_from_first, world_size
from tokenizers_audio.unified.losses import MEL_BANDS, MEL_WINDOWS, STFT_WINDOWS, SpectralLoss
from tokenizers_audio.unified.model import Reconstruction, UnifiedTokenizer

State = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class LossWeights:
    """X-Codec's (arXiv 2408.17175), whose semantic features are HuBERT's; a weight of 0 leaves a loss out.

    A decoder that says log-mels (`phases="peaks"`) is compared in them alone: `mel`.
    """

    mel: float = 45.0
    """Weight of the L1 distance of log-mel spectra."""
    stft: float = 1.0
    """Weight of the distance of STFT magnitudes."""
    semantic: float = 100.0
    """Weight of the distance between decoded and original semantic features."""
    commitment: float = 1.0
    """Weight of the distance between the encoder's output and its codes."""
    adversarial: float = 1.0
    """Weight of the discriminator's judgement."""
    feature_matching: float = 20.0
    """Weight of the L1 distance of the discriminator's features."""


@dataclass(frozen=True)
class TrainConfig:
    """How the tokenizer is trained. AdamW, linear warm-up, then constant or cosine decay over `steps`."""

    steps: int = 400_000
    """Number of updates."""
    lr: float = 2e-4
    """Learning rate of the tokenizer and of the discriminator."""
    betas: tuple[float, float] = (0.8, 0.99)
    """AdamW's decay rates of the first and the second moment."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    warmup_steps: int = 0
    """Updates over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a cosine that ends at 0."""
    max_grad_norm: float = 1000.0
    """Largest norm of the gradient; larger ones are scaled down."""
    weights: LossWeights = LossWeights()
    stft_windows: tuple[int, ...] = STFT_WINDOWS
    """Window lengths of the STFT loss, in samples."""
    mel_windows: tuple[int, ...] = MEL_WINDOWS
    """Window lengths of the mel loss, in samples."""
    mel_bands: tuple[int, ...] = MEL_BANDS
    """Mel bands for each of `mel_windows`."""
    quantize_after: int = 0
    """First steps without quantisation, in which a small network finds its way sooner; codebooks start after them."""
    start_vectors: int = 8192
    """Vectors that the k-means start waits for, and clusters."""
    ema_decay: float = 0.99
    """Decay per update of the moving averages from which codebooks are learned."""
    revive_below: float = 0.03
    """A code used less than this share of the mean begins again elsewhere."""
    codebook_dropout: float = 0.5
    """Share of recordings that use only their first 1 … Q codebooks, drawn evenly, so that bitrates below the full one
    work too. Residual codebooks only."""
    adversarial_after: int | None = 10_000
    """Steps before the discriminator joins; None leaves it out."""
    discriminator_windows: tuple[int, ...] = (2048, 1024, 512, 256)
    """Window lengths of the discriminator's STFTs, in samples."""
    discriminator_channels: int = 32
    """Channels of the discriminator's convolutions."""
    autocast: bool = False
    """Networks in bfloat16 over float32 weights; spectra, codebooks and losses stay in float32."""

    def __post_init__(self) -> None:
        for name in ("steps", "lr", "start_vectors", "max_grad_norm"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be greater than 0")
        if not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay is {self.ema_decay}; it must lie between 0 and 1")
        for name in ("codebook_dropout", "revive_below"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in [0, 1)")


class CodecTrainer:
    """Trains `tokenizer` in place. `trained` says that its codebooks are worth keeping: no k-means start, unless
    `quantize_after` asks for steps without codes."""

    def __init__(self, tokenizer: UnifiedTokenizer, config: TrainConfig, seed: int = 0, trained: bool = False):
        self.tokenizer, self.config, self.seed = tokenizer, config, seed
        device = tokenizer.device
        for p in tokenizer.trainable().values():
            p.requires_grad_(True)
        self.steps_done = 0
        self.codebooks = CodebookTrainer(tokenizer.quantizer, config.ema_decay, config.revive_below)
        self.quantizing = trained and not config.quantize_after
        self.latents = torch.zeros(0, tokenizer.config.codebook_dim, device=device)  # for the k-means start
        self.spectral = SpectralLoss(
            tokenizer.sample_rate, config.stft_windows, config.mel_windows, config.mel_bands
        ).to(device)
        self.generator = _optimizer(tokenizer.trainable(), config)
        self.discriminator: Discriminator | None = None
        if config.adversarial_after is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)  # the discriminator does not depend on what was drawn before it
                self.discriminator = Discriminator(config.discriminator_windows, config.discriminator_channels)
            self.discriminator.to(device)
            self.judge = _optimizer(dict(self.discriminator.named_parameters()), config)
        self.share_weights()

    def share_weights(self) -> None:
        """Give all ranks the weights and the state of the first."""
        if world_size() > 1:
            take_from_first(*(t.detach() for t in self.tokenizer.state_dict(keep_vars=True).values()))
            if self.discriminator is not None:
                take_from_first(*(t.detach() for t in self.discriminator.state_dict(keep_vars=True).values()))
            take_from_first(self.codebooks.counts, self.codebooks.sums)

    def begin(self, wav: Tensor) -> None:
        """Start a decoder that says log-mels from [B, T] samples, the same on all ranks; the codebooks, too, unless
        the first steps are without them."""
        latents = self.tokenizer.begin(wav.to(self.tokenizer.device), self._random("start"))
        if not self.config.quantize_after:
            order = torch.randperm(len(latents), generator=self._random("start"))[: self.config.start_vectors]
            self.codebooks.start(latents[order.to(latents.device)], self._random("start"))
            self.quantizing = True
        self.share_weights()

    def step(self, wav: Tensor) -> dict[str, float]:
        """One update from [B, T] samples. Raises FloatingPointError before the tokenizer changes where a loss or a
        gradient is not finite."""
        config, device = self.config, self.tokenizer.device
        wav = wav.to(device)
        levels = self._levels(len(wav)).to(device) if self.quantizing else None
        adversarial = self.discriminator is not None and self.steps_done >= (config.adversarial_after or 0)
        with self._autocast():
            out = self.tokenizer.reconstruct(wav, levels, sound=adversarial)
        metrics = self._judge(wav, out.wav.detach()) if adversarial and out.wav is not None else {}
        losses = self._losses(wav, out, adversarial)
        weights = config.weights
        total = sum((getattr(weights, name) * value for name, value in losses.items()), wav.new_zeros(()))
        _check_finite(losses)
        self.generator.zero_grad()
        total.backward()
        metrics |= _update(self.generator, self.tokenizer.trainable(), config, self.steps_done)
        if out.quantized is not None:
            metrics |= self.codebooks.update(out.quantized.inputs, out.quantized.codes, self._random("revive"))
        else:
            self._wait_for_start(out.latents)
        self.steps_done += 1
        named = {f"loss/{name}": float(value.detach()) for name, value in losses.items()}
        return {"loss": float(total.detach()), **named, **metrics, "quantizing": float(levels is not None)}

    def state(self) -> State:
        """Everything that the next step depends on, except the tokenizer's own weights."""
        out: State = {
            "progress": {
                "steps_done": torch.tensor(self.steps_done),
                "quantizing": torch.tensor(self.quantizing),
                "latents": self.latents,
            },
            "codebooks": self.codebooks.state(),
            "generator": _optimizer_state(self.generator, self.tokenizer.trainable()),
        }
        if self.discriminator is not None:
            out["discriminator"] = {n: p.detach() for n, p in self.discriminator.named_parameters()}
            out["judge"] = _optimizer_state(self.judge, dict(self.discriminator.named_parameters()))
        return out

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], where: str) -> None:
        """Go on from another trainer's `state()`; the tokenizer's own weights are loaded by the caller."""
        if ("discriminator" in state) != (self.discriminator is not None):
            raise ValueError(f"{where}: trained {'with' if 'discriminator' in state else 'without'} a discriminator")
        device = self.tokenizer.device
        self.steps_done = int(state["progress"]["steps_done"])
        self.quantizing = bool(state["progress"]["quantizing"])
        self.latents = state["progress"]["latents"].to(device).clone()
        self.codebooks.load(dict(state["codebooks"]))
        _load_optimizer(self.generator, self.tokenizer.trainable(), state.get("generator", {}))
        if self.discriminator is not None:
            own = dict(self.discriminator.named_parameters())
            for name, p in own.items():
                p.copy_(state["discriminator"][name])
            _load_optimizer(self.judge, own, state.get("judge", {}))

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _losses(self, wav: Tensor, out: Reconstruction, adversarial: bool) -> dict[str, Tensor]:
        """Unweighted, by the names of `LossWeights`."""
        losses: dict[str, Tensor] = {}
        if out.mels is not None and out.target_mels is not None:
            losses["mel"] = 2 * (out.mels.float() - out.target_mels).abs().mean()  # in log10, as below
        elif out.wav is not None:
            losses["stft"], losses["mel"] = self.spectral(wav, out.wav)
        if out.features is not None and out.predicted is not None:
            losses["semantic"] = (out.predicted.float() - out.features).square().mean()
        if out.quantized is not None:
            losses["commitment"] = out.quantized.commitment
        if adversarial:
            assert self.discriminator is not None and out.wav is not None
            self.discriminator.requires_grad_(False)  # it is judged by here, not taught
            with self._autocast():
                with torch.no_grad():
                    real = self.discriminator(wav)
                fake = self.discriminator(out.wav)
            self.discriminator.requires_grad_(True)
            losses["adversarial"] = adversarial_loss(fake)
            losses["feature_matching"] = feature_matching_loss(real, fake)
        return losses

    def _judge(self, wav: Tensor, fake: Tensor) -> dict[str, float]:
        """One update of the discriminator on originals and detached reconstructions."""
        assert self.discriminator is not None
        with self._autocast():
            judgements = self.discriminator(wav), self.discriminator(fake)
        loss = discriminator_loss(*judgements)
        _check_finite({"discriminator": loss})
        self.judge.zero_grad()
        loss.backward()
        own = dict(self.discriminator.named_parameters())
        update = _update(self.judge, own, self.config, self.steps_done)
        return {"discriminator/loss": float(loss.detach()), "discriminator/grad_norm": update["grad_norm"]}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.tokenizer.device.type, torch.bfloat16, enabled=self.config.autocast)

    def _levels(self, batch: int) -> Tensor:
        """[B] codebooks that each recording of this step uses."""
        count = self.tokenizer.config.num_codebooks
        levels = torch.full((batch,), count)
        if self.tokenizer.config.quantizer == "residual" and self.config.codebook_dropout:
            generator = self._random("levels", own=True)
            fewer_levels = torch.randint(1, count + 1, (batch,), generator=generator)
            fewer = torch.rand(batch, generator=generator) < self.config.codebook_dropout
            levels = torch.where(fewer, fewer_levels, levels)
        return levels

    def _wait_for_start(self, latents: Tensor) -> None:
        """Keep the latest vectors of all ranks, and start quantising when there are enough and it is time."""
        rows = gather_rows(latents.detach().transpose(1, 2).flatten(0, 1).float())
        self.latents = torch.cat([self.latents, rows])[-self.config.start_vectors :]
        due = self.steps_done + 1 >= self.config.quantize_after
        if due and len(self.latents) == self.config.start_vectors:
            self.codebooks.start(self.latents, self._random("start"))
            self.latents = self.latents[:0]
            self.quantizing = True

    def _random(self, purpose: str, own: bool = False) -> torch.Generator:
        """Return a generator for this step, the same on all ranks unless each needs its `own`."""
        rank = dist.get_rank() if own and world_size() > 1 else 0
        purposes = ("levels", "revive", "start")
        number = ((self.seed * 1_000_003 + self.steps_done) * len(purposes) + purposes.index(purpose)) * 4096 + rank
        return torch.Generator().manual_seed(number % 2**63)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the rate of update `step`, from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def _optimizer(parameters: Mapping[str, nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        list(parameters.values()), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
    )


def _update(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], config: TrainConfig, step: int
) -> dict[str, float]:
    average_gradients(parameters.values())
    norm = torch.nn.utils.clip_grad_norm_(list(parameters.values()), config.max_grad_norm)
    if not bool(norm.isfinite()):
        bad = [n for n, p in parameters.items() if p.grad is not None and not bool(p.grad.isfinite().all())]
        raise FloatingPointError(f"the gradient of {(bad or ['all weights'])[0]!r} is not finite; lower the rate")
    lr = learning_rate(step, config)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return {"grad_norm": float(norm), "lr": lr}


def _check_finite(losses: Mapping[str, Tensor]) -> None:
    for name, value in losses.items():
        if not bool(value.detach().isfinite()):
            raise FloatingPointError(f"the {name} loss is {float(value.detach())}; this update changed no weight")


def _optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {f"{key}.{n}": value for n, p in parameters.items() for key, value in optimizer.state.get(p, {}).items()}


def _load_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]
) -> None:
    for n, p in parameters.items():
        own = {k: state[f"{k}.{n}"] for k in ("step", "exp_avg", "exp_avg_sq") if f"{k}.{n}" in state}
        optimizer.state[p] = {k: v.to(p.device, copy=True) for k, v in own.items()}
