"""The policy gradient trainer of one rank: log-probs and values, credit, the losses, the optimizers.

It serves the whole family: GRPO, RLOO, REINFORCE, REINFORCE++, ReMax, and PPO with a critic.

Shapes: L tokens of an experience, N sampled tokens of a pack, Q codebooks where frames are among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from audiorl.algos.kl import FixedKL, HorizonKL, LogSpaceKL, kl_estimate
from audiorl.algos.losses import (
    cispo_loss,
    engine_correction,
    gspo_loss,
    policy_loss,
    reinforce_loss,
    token_weights,
    value_loss,
)
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.config import OptimConfig, RLConfig
from audiorl.models import AudioPolicy
from audiorl.models.reference import Reference
from audiorl.models.value import ValueModel, critic_of
from audiorl.rl.advantages import compute_advantages, mean_advantage
from audiorl.run.checkpoint import load_checkpoint
from audiorl.runtime.local import changes_worker, replaces_worker
from audiorl.runtime.world import World
from audiorl.train.adamw import Optimizer
from audiorl.train.batches import (
    blank,
    by_code,
    check_finite,
    check_gradients,
    check_loss,
    counts,
    fill,
    frames,
    gather,
    gather_code_mask,
    spread,
    sum_codebooks,
)
from audiorl.train.ema import EMA
from audiorl.train.optim import backward, idle_passes, optimizer_for
from audiorl.types import Experience, PackedBatch

if TYPE_CHECKING:
    from audiorl.train.zero import ZeroOptimizer

State = dict[str, dict[str, Tensor]]
Sums = dict[str, float]


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """One rank's part of a step: whole groups with their scores, and examples for the supervised term."""

    experiences: Sequence[Experience]
    supervised: Sequence[Experience] = ()
    mini_batches: Sequence[int] | None = None
    """Which mini-batch of the whole step each experience belongs to; None: in order, equally many in each."""


@dataclass(frozen=True)
class TrainOutput:
    """What a step gave: means of metrics, and the mean advantage of each experience in order."""

    metrics: dict[str, float]
    advantages: list[float]


class Trainer:
    """Updates a policy from scored experiences.

    `temperature` (and `audio_temperature`, of codes, where it is another) is the one that rollouts are sampled at:
    log-probs are taken under the same distribution. Made before
    a checkpoint is restored: the critic, and the reference if none is given, begin as the policy is now. With the
    reference "separate" experiences come with its log-probs.

    Several workers of one `world` do together what one would do alone: counts, whitening, gradients and metrics are
    those of all ranks, wherever an experience is.
    """

    def __init__(
        self,
        policy: AudioPolicy,
        config: RLConfig,
        optim: OptimConfig,
        temperature: float,
        max_tokens: int,
        reference: Reference | Literal["separate"] | None = None,
        audio_temperature: float | None = None,
        world: World | None = None,
    ):
        self.policy = policy
        self.world = world or World()
        self.config = config
        self.temperature, self.audio_temperature = _temperatures(temperature, audio_temperature)
        self.max_tokens = max_tokens
        self.steps = 0
        self.kl = _controller(config)
        self.has_kl = config.kl_beta > 0
        self.reference: Reference | None = None
        if self.has_kl and reference != "separate":
            self.reference = reference or policy.reference()
        self.critic = critic_of(policy, config.critic.shared) if config.advantage == "gae" else None
        updates = config.steps * config.epochs * config.mini_batches
        trained = policy.trainable()
        self.critic_optimizer: Optimizer | ZeroOptimizer | None = None
        if self.critic is not None:
            # The head of a shared trunk also has its own optimizer: it learns alone while the policy waits.
            critic_optim = optim if config.critic.shared else config.critic.optim
            self.critic_optimizer = optimizer_for(self.critic, critic_optim, updates, self.world)
        self.optimizer = optimizer_for(policy, optim, updates, self.world)
        self.ema = None if config.ema_decay is None else EMA(trained, config.ema_decay)

    @changes_worker
    def train(self, shard: TrainBatch) -> TrainOutput:
        """One step: log-probs and values, credit, then `epochs` passes over `mini_batches`."""
        experiences = compute_advantages(self.prepare(shard.experiences), self.config, self.kl.beta, self.world.sum)
        metrics = self.update_policy(experiences, shard.supervised, shard.mini_batches)
        return TrainOutput(metrics, [mean_advantage(e) for e in experiences])

    @property
    def waiting(self) -> bool:
        """Whether the policy stays as it is while its critic learns."""
        return self.critic is not None and self.steps < self.config.critic.warmup_steps

    # -- before the update ----------------------------------------------------------------------------------------

    def prepare(self, experiences: Sequence[Experience]) -> list[Experience]:
        """The experiences with what the step needs of reference and old log-probs and values, all as of now."""
        config = self.config
        found = list(experiences)
        if not found:
            return found
        engine = gather(experiences, "engine_logprobs", torch.device("cpu"))
        assert engine is not None
        check_finite(experiences, engine, "the engine's log-prob")
        temperatures = self.temperature, self.audio_temperature
        if self.reference is not None:
            found = with_logprobs(found, "ref_logprobs", self.reference, config, *temperatures)
        assert not self.has_kl or all(e.ref_logprobs is not None for e in found), "no ref_logprobs"
        # With a single update the old policy is the current one: its log-probs come with the loss.
        if config.epochs * config.mini_batches > 1 or (config.kl_in == "reward" and self.has_kl):
            found = with_logprobs(found, "old_logprobs", self.policy, config, *temperatures)
        if self.critic is not None:
            found = fill(found, "values", self.critic, config.micro_batch_tokens, config.share_prompts)
        return found

    # -- the update -----------------------------------------------------------------------------------------------

    def update_policy(
        self,
        experiences: Sequence[Experience],
        supervised: Sequence[Experience] = (),
        mini_batches: Sequence[int] | None = None,
    ) -> dict[str, float]:
        """Passes over experiences that have been prepared and carry advantages. Returns means of metrics."""
        if mini_batches is None:
            mini_batches = in_order(len(experiences), self.config.mini_batches)
        parts: list[list[Experience]] = [[] for _ in range(max(self.world.gather(max(mini_batches, default=0))) + 1)]
        for e, number in zip(experiences, mini_batches, strict=True):
            parts[number].append(e)
        totals: Sums = defaultdict(float)
        updates = 0
        for _ in range(self.config.epochs):
            for part in parts:
                for name, value in self._update(part, supervised).items():
                    totals[name] += value
                updates += 1
        metrics = {name: value / updates for name, value in totals.items()}
        if self.critic is not None:
            metrics |= self._value_metrics(experiences)
        if self.has_kl:
            if self.config.kl_in == "reward":
                metrics |= self._mean_kl(experiences)
            metrics["kl/beta"] = self.kl.beta
            if "kl" in metrics and not self.waiting:  # a policy that waits for its critic tells nothing about β
                self.kl = self.kl.update(metrics["kl"], sum(self.world.gather(len(experiences))))
        self.steps += 1
        return metrics

    def _update(self, experiences: Sequence[Experience], supervised: Sequence[Experience]) -> Sums:
        waiting = self.waiting
        sums: Sums = defaultdict(float)
        for optimizer in self._learning():
            optimizer.zero_grad()
        lengths = counts(experiences)
        everywhere, own = self.world.gather_list(lengths)
        per_token = token_weights(everywhere, self.config.aggregation, self.max_tokens)[own]
        mean_weights = token_weights(everywhere, "token-mean")[own]
        frame_fraction = self._share_of_frames(experiences)
        with ExitStack() as hearing:
            for model in {id(m): m for m in (self.policy, self.critic and self.critic.trunk) if m}.values():
                hearing.enter_context(model.encode_audio_once())
            packs = micro_batches(experiences, self.config.micro_batch_tokens, self.config.share_prompts)
            idle = idle_passes(len(packs), self.world, *self._learning())
            for indices in packs:
                part = [experiences[i] for i in indices]
                n = [lengths[i] for i in indices]
                weights = spread([per_token[i] for i in indices], n).to(self.policy.device)
                means = spread([mean_weights[i] for i in indices], n).to(self.policy.device)
                for name, value in self._backward(part, weights, means, frame_fraction, waiting).items():
                    sums[name] += float(value)
            for _ in range(idle):
                self._idle(waiting)
            if self.config.ptx_coef and not waiting:
                sums["ptx/loss"] += self._supervised(supervised)
        totals = self.world.add_up(sums)
        for optimizer in self._learning():
            optimizer.gather_gradients()
        if self.critic is not None:
            check_gradients(self.critic.trainable())  # before the policy has moved: both step, or none
        if not waiting:
            totals.update(self.optimizer.step())
            self.policy.weights_changed()
            if self.ema is not None:
                self.ema.update()
        if self.critic_optimizer is not None and self.critic is not None:
            totals.update({f"critic/{name}": value for name, value in self.critic_optimizer.step().items()})
            self.critic.weights_changed()
        return totals

    def _backward(
        self, part: Sequence[Experience], weights: Tensor, means: Tensor, frame_fraction: float | None, waiting: bool
    ) -> dict[str, Tensor]:
        """Add one pack's gradients. Losses are sums of tokens weighted by the counts of the whole mini-batch.

        `means` [N] are the weights under which the metrics are plain means over all tokens of the mini-batch, of which
        a share of `frame_fraction` are frames.
        """
        packed = pack_experiences(part, self.config.share_prompts)
        losses: list[Tensor] = []
        metrics: dict[str, Tensor] = {}
        shared_trunk = self.critic is not None and self.critic.shared and not waiting
        values: Tensor | None = None
        if not waiting:
            head = self.critic.head if shared_trunk and self.critic is not None else None
            out = self.policy.forward(packed, self.temperature, head, self.audio_temperature)
            logprobs = by_code(out)
            check_finite(part, logprobs.detach(), "the log-prob")
            values = out.values
            loss, metrics = self._policy_loss(part, logprobs, out.entropy, weights, means, frame_fraction)
            losses.append(loss)
        if self.critic is not None:
            values = self._values(packed, waiting) if values is None else values
            loss, sums = self._value_loss(part, values, means)
            losses.append(self.config.critic.coef * loss if shared_trunk else loss)
            metrics |= sums
        total = torch.stack(losses).sum()
        check_loss(part, total.detach())
        backward(total, *self._learning())
        return metrics

    def _learning(self) -> list[Optimizer | ZeroOptimizer]:
        """The optimizers of an update."""
        found = [] if self.waiting else [self.optimizer]
        return found if self.critic_optimizer is None else [*found, self.critic_optimizer]

    def _idle(self, waiting: bool) -> None:
        """A pass without a loss, while other ranks still have micro-batches."""
        packed = blank(self.policy)
        outputs = [] if waiting else [self.policy.forward(packed).logprobs]
        if self.critic is not None and (waiting or not self.critic.shared):
            outputs.append(self._values(packed, waiting))
        backward(0 * torch.cat(outputs).sum(), *self._learning())

    def _values(self, packed: PackedBatch, waiting: bool) -> Tensor:
        assert self.critic is not None
        if not self.critic.shared:
            return self.critic(packed)
        assert waiting
        with torch.no_grad(), self.policy.autocast():
            hidden = self.policy.before_sampled(packed)
        return self.critic.head(hidden)

    def _value_loss(
        self, part: Sequence[Experience], values: Tensor, means: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        old, returns = (gather(part, name, values.device) for name in ("values", "returns"))
        assert old is not None and returns is not None
        loss, sums = value_loss(values, old, returns, means, self.config.critic.clip)
        return loss, {"critic/loss": loss.detach(), "critic/clip_frac": sums["value_clip_frac"]}

    def _policy_loss(
        self,
        part: Sequence[Experience],
        logprobs: Tensor,
        entropy: Tensor,
        weights: Tensor,
        means: Tensor,
        frame_fraction: float | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`logprobs` [N], or [N, Q] by code; the rest [N]."""
        config = self.config
        old = gather(part, "old_logprobs", logprobs.device)
        old = logprobs.detach() if old is None else old
        advantages = gather(part, "advantages", logprobs.device)
        engine = gather(part, "engine_logprobs", logprobs.device)
        assert advantages is not None and engine is not None
        counted = weights
        if config.engine_cap is not None:
            counted = weights * engine_correction(sum_codebooks(old), sum_codebooks(engine), config.engine_cap)
        loss, sums = self._surrogate(logprobs, old, advantages, counted, means, part)
        metrics = {
            "policy/loss": loss.detach(),
            "policy/clip_frac": sums["clip_frac"],
            "policy/approx_kl": sums["approx_kl"],
            "policy/ratio": sums["ratio"],
            "policy/engine_gap": (means * (sum_codebooks(old) - sum_codebooks(engine)).abs()).sum(),
            **_by_kind("policy/entropy", entropy.detach(), means, part, frame_fraction),
        }
        ref = gather(part, "ref_logprobs", logprobs.device)
        if ref is not None and config.kl_in == "loss":
            kl = sum_codebooks(kl_estimate(logprobs, ref, config.kl_kind))
            loss = loss + self.kl.beta * (weights * kl).sum()
            metrics |= _by_kind("kl", kl.detach(), means, part, frame_fraction)
        if config.entropy_coef:
            loss = loss - config.entropy_coef * (weights * entropy).sum()
        return loss, metrics

    def _surrogate(
        self,
        logprobs: Tensor,
        old: Tensor,
        advantages: Tensor,
        weights: Tensor,
        means: Tensor,
        part: Sequence[Experience],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and this pack's share of what are means over the mini-batch, whatever the loss's own weights."""
        config = self.config
        sequence = spread(range(len(part)), counts(part)).to(logprobs.device)
        code_mask = gather_code_mask(part, logprobs.device)
        if code_mask is not None and config.frame_ratio == "code":
            # Every drawn code is an action with its frame's advantage and weight.
            of_code = code_mask.nonzero()[:, 0]
            logprobs, old = logprobs[code_mask], old[code_mask]
            advantages, weights, sequence = advantages[of_code], weights[of_code], sequence[of_code]
        else:
            logprobs, old = sum_codebooks(logprobs), sum_codebooks(old)
        if config.loss == "gspo":
            loss, sums = gspo_loss(logprobs, old, advantages, weights, sequence, config.clip_low, config.clip_high)
        elif config.loss == "cispo":
            loss, sums = cispo_loss(logprobs, old, advantages, weights, config.ratio_cap)
        elif config.loss == "reinforce":
            loss, sums = reinforce_loss(logprobs, old, advantages, weights)
        else:
            loss, sums = policy_loss(
                logprobs, old, advantages, weights, config.clip_low, config.clip_high, config.dual_clip
            )
        share = means.sum() / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)
        return loss, {name: share * value for name, value in sums.items()}

    def _supervised(self, examples: Sequence[Experience]) -> float:
        """Add the gradient of ptx_coef x the mean negative log-likelihood of the examples' target tokens."""
        everywhere, _ = self.world.gather_list(counts(examples))
        weight = token_weights(everywhere, "token-mean")[0] if everywhere else 0.0
        total = 0.0
        packs = micro_batches(examples, self.config.micro_batch_tokens, share_prompts=False)
        idle = idle_passes(len(packs), self.world, *self._learning())
        for indices in packs:
            part = [examples[i] for i in indices]
            loss = -weight * self.policy.forward(pack_experiences(part, share_prompts=False)).logprobs.sum()
            check_loss(part, loss.detach())
            backward(self.config.ptx_coef * loss, *self._learning())
            total += float(loss.detach())
        for _ in range(idle):
            backward(0 * self.policy.forward(blank(self.policy)).logprobs.sum(), *self._learning())
        return total

    # -- metrics of all ranks --------------------------------------------------------------------------------------

    def _mean_kl(self, experiences: Sequence[Experience]) -> dict[str, float]:
        everywhere, _ = self.world.gather_list(counts(experiences))
        frame_fraction, sums = self._share_of_frames(experiences), {}
        if experiences:
            old, ref = (gather(experiences, name, torch.device("cpu")) for name in ("old_logprobs", "ref_logprobs"))
            assert old is not None and ref is not None
            kl = sum_codebooks(kl_estimate(old, ref, self.config.kl_kind))
            means = torch.full_like(kl, 1 / max(sum(everywhere), 1))
            sums = {name: float(x) for name, x in _by_kind("kl", kl, means, experiences, frame_fraction).items()}
        return self.world.add_up(sums)

    def _share_of_frames(self, experiences: Sequence[Experience]) -> float | None:
        """Of the sampled rows; None when no experience can have frames."""
        spoken = frames(experiences, torch.device("cpu"))
        rows, found = sum(counts(experiences)), None if spoken is None else int(spoken.sum())
        everywhere = self.world.gather((rows, found))
        if all(count is None for _, count in everywhere):
            return None
        return sum(count or 0 for _, count in everywhere) / max(sum(rows for rows, _ in everywhere), 1)

    def _value_metrics(self, experiences: Sequence[Experience]) -> dict[str, float]:
        """Mean value, and the share of the returns' variance that the values explained before the update."""
        values = returns = torch.zeros(0)
        if experiences:
            found = [gather(experiences, name, torch.device("cpu")) for name in ("values", "returns")]
            values, returns = (stream for stream in found if stream is not None)
        n, value, variance, left = _moments(values.double(), returns.double(), self.world)
        if not n:
            return {}
        explained = 1 - left / variance if variance > 1e-12 else 0.0
        return {"critic/value": value, "critic/explained_variance": explained}

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """What a resumed run needs beside the weights; the reference is the policy that the phase began with."""
        out: State = {
            "optimizer": self.optimizer.state(),
            "progress": {"steps": torch.tensor(self.steps), "kl_beta": torch.tensor(self.kl.beta, dtype=torch.float64)},
        }
        if self.critic is not None and self.critic_optimizer is not None:
            out["critic"] = {name: p.detach() for name, p in self.critic.trainable().items()}
            out["critic_optimizer"] = self.critic_optimizer.state()
        if self.ema is not None:
            out["ema"] = self.ema.state()
        return out

    def load(self, state: State, where: str) -> None:
        self.optimizer.load(state["optimizer"], where)
        self.steps = int(state["progress"]["steps"])
        self.kl = replace(self.kl, beta=float(state["progress"]["kl_beta"]))
        for part, present in (("critic", self.critic), ("ema", self.ema)):
            if present is not None and part not in state:
                raise ValueError(f"{where}: the checkpoint holds no {part}; it was written without one")
        if self.critic is not None and self.critic_optimizer is not None:
            _copy_into(self.critic, state["critic"], where)
            self.critic_optimizer.load(state["critic_optimizer"], where)
        if self.ema is not None:
            self.ema.load(state["ema"], where)

    @replaces_worker
    def resume(self, where: str) -> None:
        """Continue from a checkpoint's folder, weights and all."""
        state, _ = load_checkpoint(Path(where), self.policy)
        self.load(state, where)

    def close(self) -> None:
        """After the last update."""
        for optimizer in (self.optimizer, self.critic_optimizer):
            if optimizer is not None:
                optimizer.close()

    def weights(self) -> Mapping[str, Tensor]:
        return self.policy.weights()

    def averaged(self) -> Mapping[str, Tensor]:
        """The moving average of the weights."""
        if self.ema is None:
            raise ValueError("no moving average is kept; set ema_decay")
        return self.ema.state()

    def beta(self) -> float:
        """The KL coefficient as it is now."""
        return self.kl.beta


def with_logprobs(
    experiences: Sequence[Experience],
    name: Literal["old_logprobs", "ref_logprobs"],
    model: AudioPolicy | Reference,
    config: RLConfig,
    temperature: float,
    audio_temperature: float | None,
) -> list[Experience]:
    """The experiences with the log-probs of `model` at the temperatures that rollouts are sampled at."""
    text, audio = _temperatures(temperature, audio_temperature)

    def forward(batch: PackedBatch) -> Tensor:
        return by_code(model.forward(batch, text, audio_temperature=audio))

    return fill(experiences, name, forward, config.micro_batch_tokens, config.share_prompts)


def _temperatures(text: float, audio: float | None) -> tuple[float, float]:
    """Of text and of codes, under which log-probs are taken: of greedy answers the model's own."""
    return text or 1.0, (text if audio is None else audio) or 1.0


def _controller(config: RLConfig) -> FixedKL | HorizonKL | LogSpaceKL:
    if config.kl_control == "horizon":
        return HorizonKL(config.kl_beta, config.kl_target, config.kl_horizon)
    if config.kl_control == "log-space":
        return LogSpaceKL(config.kl_beta, config.kl_target, config.kl_gain)
    return FixedKL(config.kl_beta)


@torch.no_grad()
def _copy_into(critic: ValueModel, weights: dict[str, Tensor], where: str) -> None:
    own = critic.trainable()
    if {n: t.shape for n, t in weights.items()} != {n: p.shape for n, p in own.items()}:
        raise ValueError(f"{where}: its critic is of another architecture")
    for name, tensor in weights.items():
        own[name].copy_(tensor)
    critic.weights_changed()


def _by_kind(
    name: str, values: Tensor, means: Tensor, part: Sequence[Experience], frame_fraction: float | None
) -> dict[str, Tensor]:
    """Sums of `values` [N] weighted by `means`; of a model that speaks also over text tokens and frames alone.

    The latter are scaled to the means of their kind; `frame_fraction` is the share of frames among all rows.
    """
    weighted = means * values
    out = {name: weighted.sum()}
    if frame_fraction is not None:
        spoken = frames(part, values.device)
        text = torch.ones_like(weighted, dtype=torch.bool) if spoken is None else ~spoken
        for kind, rows, share in (("text", text, 1 - frame_fraction), ("audio", ~text, frame_fraction)):
            out[f"{name}_{kind}"] = weighted[rows].sum() / max(share, 1e-9)
    return out


def _moments(values: Tensor, returns: Tensor, world: World) -> tuple[int, float, float, float]:
    """How many [N] of all ranks, the mean value, and the variances of the returns and of what the values leave."""
    error = returns - values
    n, value, mean, mean_error = world.sum(
        torch.stack([values.new_tensor(float(len(values))), values.sum(), returns.sum(), error.sum()])
    ).tolist()
    if not n:
        return 0, 0.0, 0.0, 0.0
    squares = torch.stack([((returns - mean / n) ** 2).sum(), ((error - mean_error / n) ** 2).sum()])
    variance, left = (world.sum(squares) / n).tolist()
    return int(n), value / n, variance, left


def in_order(count: int, parts: int) -> list[int]:
    """Which of `parts` each of `count` experiences belongs to, when each takes equally many in order."""
    size = max(-(-count // parts), 1)
    return [i // size for i in range(count)]
