"""The policy gradient trainer of one rank: log-probs and values, advantages, packed updates.

It serves the whole family: GRPO, RLOO, REINFORCE, REINFORCE++, ReMax, and PPO with a critic. Shapes: L tokens of an
experience, N sampled tokens of a micro-batch, Q codebooks where frames are among them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from audiorl.algos.experience import Experience, PackedBatch, PolicyOutput
from audiorl.algos.losses import KLController, kl_estimate, tis_weights, token_weights
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.config import OptimConfig, RLConfig
from audiorl.config.checks import pass_tokens
from audiorl.distributed.local import World, changes_worker, gpu_seconds, gpu_work
from audiorl.models import AudioPolicy, TrainedPolicy
from audiorl.models.policy import Reference
from audiorl.models.value import make_critic
from audiorl.run.checkpoint import StatePiece, TrainerState
from audiorl.train.batches import (
    PassMetrics,
    check_finite,
    counts,
    fill,
    gather,
    idle_batch,
    logprobs_by_code,
    sum_codebooks,
)
from audiorl.train.optim.adamw import EMA, Optimizer
from audiorl.train.optim.steps import (
    backward,
    idle_passes,
    optimizer_for,
    with_pass_tokens,
    within_memory,
)
from audiorl.train.rl.advantages import compute_advantages, mean_advantage
from audiorl.train.rl.critic import Critic
from audiorl.train.rl.distill import Distillation, Teacher, load_teacher
from audiorl.train.rl.losses import policy_loss
from audiorl.train.rl.minibatch import (
    MicroBatch,
    MiniBatch,
    TrainBatch,
    mean_kl,
    mini_batch_numbers,
    mini_batches_of,
    trained_by,
    updates_of,
)

State = Mapping[str, Mapping[str, Tensor]]
TokenNumbers = Mapping[str, Tensor]
"""Diagnostics of one experience's tokens for the viewer: [L] float16 by name, 0 where nothing was sampled.

advantages: only where they differ within the response. entropies: of the distributions of the step's last pass, nats.
ratios: probabilities in the last pass over those that the engine sampled with, at most 1e4. Of a frame they are those
of all its codes together.
"""


@dataclass(frozen=True)
class TrainOutput:
    """What a step gives: that of one trainer, or of all together."""

    metrics: dict[str, float]  # Means over the step and all ranks
    advantages: list[float]  # The mean advantage of each experience of the batch, in order
    tokens: list[TokenNumbers]  # The numbers of its tokens, likewise; empty where the batch does not ask for them
    returns: Sequence[Tensor] = ()  # Its returns [L], likewise, for critics in processes of their own; else empty
    prepare_seconds: float = 0.0  # Of the step: for log-probs and values before the update


@dataclass(frozen=True)
class Separate:
    """Which models live in processes of their own and not in the trainers'.

    reference: that of the KL and the teacher of distillation; experiences come with `ref_logprobs` and `teacher`.
    critic: experiences come with `values`.
    """

    reference: bool = False
    critic: bool = False


class Trainer:
    """Updates a policy from scored experiences.

    Log-probs are taken at the temperatures that rollouts are sampled at (`SamplingConfig.training_temperatures`):
    `temperature` of text tokens, and `audio_temperature` of codec codes or of each codebook (None: the same).
    `max_tokens` is the response budget that Dr.GRPO divides by.
    Make the trainer before a checkpoint is restored: the critic, and the reference if none is given, start as copies of
    the policy as it is now.

    The trainers of one `world` together do what one would do alone: counts, whitening, gradients and metrics are those
    of all ranks, wherever an experience is.
    """

    def __init__(
        self,
        policy: TrainedPolicy,
        config: RLConfig,
        optim: OptimConfig,
        temperature: float,
        max_tokens: int,
        reference: Reference | None = None,
        audio_temperature: float | Sequence[float] | None = None,
        world: World | None = None,
        separate: Separate | None = None,
    ):
        self.policy, self.max_tokens = policy, max_tokens
        self.given, self.config = config, with_pass_tokens(config, policy, optim, max_tokens)
        config = self.config
        self.world, separate = world or World(), separate or Separate()
        self.temperatures = temperature or 1.0, audio_temperature or temperature or 1.0
        self.steps = 0
        self.kl = KLController(config.kl_beta, config.kl)
        self.has_kl = config.needs_reference
        self.reference: Reference | None = None
        name = config.distill.teacher
        distills = config.distill.coef > 0
        if (self.has_kl or (distills and name == "reference")) and not separate.reference:
            self.reference = reference or policy.reference()
        self.distillation: Distillation | None = None
        if distills:
            assert isinstance(policy, AudioPolicy), "flows are not distilled"
            teacher: AudioPolicy | Reference | None = policy
            if name != "policy":
                teacher = self.reference if name == "reference" else None
                if teacher is None and not separate.reference:
                    teacher = load_teacher(name, policy)
            made = None if teacher is None else Teacher(teacher, policy, config, self.temperatures[0])
            self.distillation = Distillation(policy, config, self.temperatures[0], self.world, made)
        self.critic: Critic | None = None
        if config.advantage == "gae" and not separate.critic:
            assert isinstance(policy, AudioPolicy), "flows have no critic"
            model = make_critic(policy, config.critic.shared)
            self.critic = Critic(model, config.critic, optim, updates_of(config), self.world)
        self.optimizer = optimizer_for(policy, optim, updates_of(config, config.critic_warmup), self.world)
        if self.critic is not None and not config.critic.shared and isinstance(policy, AudioPolicy):
            policy.layers_again = None  # the critic's graph waits beside the policy's: all layers are computed again
        self.ema = None if config.ema_decay is None else EMA(policy.trainable(), config.ema_decay)

    @changes_worker
    def step(self, batch: TrainBatch) -> TrainOutput:
        """Log-probs and values, advantages, then `epochs` passes over `mini_batches` updates."""
        config, began = self.config, time.monotonic()
        experiences = list(batch.experiences)
        trained = trained_by(config, experiences)
        prepared = within_memory(self, lambda: self.prepare([experiences[i] for i in trained]))
        for i, e in zip(trained, prepared, strict=True):
            experiences[i] = e
        answers = list(batch.answers)
        if self.distillation is not None:
            both = self.distillation.prepare([*experiences, *answers])
            experiences, answers = both[: len(experiences)], both[len(experiences) :]
        experiences = compute_advantages(experiences, config, self.kl.beta, self.world.sum)
        if self.distillation is not None:
            experiences = self.distillation.add_advantages(experiences)
        numbers = batch.mini_batches or mini_batch_numbers(config, experiences)
        learned = [experiences[i] for i in trained]
        batch = replace(batch, experiences=learned, mini_batches=[numbers[i] for i in trained], answers=answers)
        seconds = time.monotonic() - began
        record = TokenRecord(experiences) if batch.record_tokens else None
        totals: dict[str, float] = defaultdict(float)
        mini_batches: list[MiniBatch] = []
        if self._optimizers():
            mini_batches = mini_batches_of(batch, config, self.max_tokens, self.world)
        for update, mini_batch in enumerate(mini_batches * config.epochs):
            norms, means = within_memory(self, partial(self._passes, mini_batch, batch, update, record))
            for name, value in self._update(norms, means).items():
                totals[name] += value
        metrics = {name: value / (len(mini_batches) * config.epochs) for name, value in totals.items()}
        metrics |= self._step_metrics(experiences, metrics)
        self.steps += 1
        recorded = [] if record is None else record.numbers()
        returns = [e.returns for e in experiences if e.returns is not None] if self.critic is None else []
        if (busy := gpu_seconds()) is not None:
            metrics["time/gpu_busy"] = busy
        return TrainOutput(metrics, [mean_advantage(e) for e in experiences], recorded, returns, seconds)

    @property
    def critic_warms_up(self) -> bool:
        """Whether this step trains the critic alone, here or in processes of its own."""
        return self.steps < self.config.critic_warmup

    # -- before the update ---------------------------------------------------------------------------------------------

    def prepare(self, experiences: Sequence[Experience]) -> list[Experience]:
        """Fill in ref_logprobs, old_logprobs and values where the step needs them and they are None."""
        config, prepared = self.config, list(experiences)
        if not prepared:
            return prepared
        rollout = gather(experiences, "rollout_logprobs")
        assert rollout is not None
        # An engine may give nan for a token; `tis_weights` and the metrics know it, nothing else reads it.
        check_finite(experiences, rollout.masked_fill(rollout.isnan(), 0.0), "the engine's log-prob")

        def missing(name: str) -> bool:
            return any(getattr(e, name) is None for e in prepared)

        if self.has_kl and self.reference is not None and missing("ref_logprobs"):
            prepared = with_logprobs(prepared, "ref_logprobs", self.reference, config, self.temperatures)
        assert not self.has_kl or not missing("ref_logprobs"), "the reference is a process of its own"
        # With a single update the old policy is the current one: its log-probs come with the loss.
        needs_old = config.epochs * config.mini_batches > 1 or (config.kl.place == "reward" and self.has_kl)
        needs_old = needs_old or (self.distillation is not None and config.distill.loss_kind is None)
        needs_old = needs_old and missing("old_logprobs")
        critic, packing = self.critic, (pass_tokens(config), config.share_prompts)
        if needs_old and critic is not None and config.critic.shared and missing("values"):

            def both(batch: PackedBatch) -> dict[str, Tensor]:  # from one pass through the shared trunk
                output = self.policy.forward(batch, self.temperatures[0], critic.model.head, self.temperatures[1])
                assert output.values is not None
                return {"old_logprobs": logprobs_by_code(output), "values": output.values}

            prepared = fill(prepared, both, *packing)
        elif needs_old:
            prepared = with_logprobs(prepared, "old_logprobs", self.policy, config, self.temperatures)
        if critic is not None and missing("values"):
            prepared = fill(prepared, lambda batch: {"values": critic.model(batch)}, *packing)
        assert config.advantage != "gae" or not missing("values"), "the critic is a process of its own"
        return prepared

    # -- the update ----------------------------------------------------------------------------------------------------

    def _passes(
        self, mini_batch: MiniBatch, batch: TrainBatch, update: int, record: TokenRecord | None
    ) -> tuple[list[float], dict[str, float]]:
        """Forward, loss and backward of every micro-batch, and all-reduce; `update`: its number in the step.

        Returns the norms of gradients by optimizer, and metrics as means over the mini-batch and all ranks.
        """
        optimizers = self._optimizers()
        mini_batch.divide(pass_tokens(self.config))
        for optimizer in optimizers:
            optimizer.zero_grad()
        passes = PassMetrics()
        with ExitStack() as stack:
            # The policy and the critic's trunk, which may be the same, encode a clip once for all micro-batches.
            for model in {id(m): m for m in (self.policy, self.critic and self.critic.model.trunk) if m}.values():
                stack.enter_context(model.audio.once())
            # Under ZeRO every rank runs equally many passes: collectives of the layers must line up.
            idle = idle_passes(len(mini_batch), self.world, *optimizers)
            for micro in mini_batch.micro_batches(self.policy.device):
                with gpu_work():
                    output = self._forward(micro.batch)
                    loss, metrics = self._loss(micro, output)
                    backward(loss, *optimizers)
                if record is not None and not self.critic_warms_up:
                    record.add(micro, output)
                passes.add(micro.experiences, loss, metrics, logprobs_by_code(output))
            for _ in range(idle):
                output = self._forward(idle_batch(self.policy))
                flat = [x for x in (output.logprobs, output.values) if x is not None]
                backward(0 * torch.cat(flat).sum(), *optimizers)
            if self.config.ptx.coef and not self.critic_warms_up:
                coef, examples = self.config.ptx.coef, batch.supervised[update]
                self._supervised(passes, "ptx/loss", examples, coef, lambda _, output: -output.logprobs.sum())
            if self.distillation is not None and self.distillation.reference_share and not self.critic_warms_up:
                coef = self.config.distill.coef * self.distillation.reference_share
                loss_of, name = self.distillation.answer_loss, "distill/divergence_off_policy"
                self._supervised(passes, name, batch.answers, coef, loss_of, self.temperatures[0])
        for optimizer in optimizers:
            optimizer.gather_gradients()
        sums, norms = passes.read(*(optimizer.clip() for optimizer in optimizers))
        return norms, self.world.add_up(sums)

    def _update(self, norms: Sequence[float], means: dict[str, float]) -> dict[str, float]:
        """Step, and return `means` with what the optimizers say. Where the check of a norm raises none steps."""
        for optimizer, norm in zip(self._optimizers(), norms, strict=True):
            optimizer.check(norm)
        if not self.critic_warms_up:
            with gpu_work():
                means |= self.optimizer.step(norms[0])
            self.policy.weights_changed()
            if self.ema is not None:
                self.ema.update()
        if self.critic is not None:
            means |= self.critic.step(norms[-1])
        return means

    def _forward(self, batch: PackedBatch) -> PolicyOutput:
        """Log-probs and entropies, and values where there is a critic; only values while the critic warms up."""
        critic = self.critic
        if critic is not None and self.critic_warms_up:
            values_N = critic.values(batch)
            return PolicyOutput(values_N.new_zeros(0), values_N.new_zeros(0), values_N)
        head = critic.model.head if critic is not None and critic.config.shared else None
        output = self.policy.forward(batch, self.temperatures[0], head, self.temperatures[1])
        if critic is not None and output.values is None:
            output = replace(output, values=critic.values(batch))
        return output

    def _loss(self, micro: MicroBatch, output: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a micro-batch and sums for metrics: the policy's, the divergence from a teacher, the
        critic's."""
        losses: list[tuple[Tensor, dict[str, Tensor]]] = []
        if not self.critic_warms_up:
            losses.append(policy_loss(micro, output, self.config, self.kl.beta))
            if self.distillation is not None and self.config.distill.loss_kind:
                losses.append(self.distillation.loss(micro, output))
        if self.critic is not None:
            losses.append(self.critic.loss(micro, output.values, with_policy=not self.critic_warms_up))
        total = torch.stack([loss for loss, _ in losses]).sum()
        return total, {name: value for _, metrics in losses for name, value in metrics.items()}

    def _optimizers(self) -> list[Optimizer]:
        """Return the optimizers that step in this update."""
        optimizers = [] if self.critic_warms_up else [self.optimizer]
        return optimizers if self.critic is None else [*optimizers, self.critic.optimizer]

    def _supervised(
        self,
        passes: PassMetrics,
        name: str,
        examples: Sequence[Experience],
        coef: float,
        loss_of: Callable[[Sequence[Experience], PolicyOutput], Tensor],
        temperature: float = 1.0,
    ) -> None:
        """Add the gradient of coef x the mean over the tokens of all ranks' examples of `loss_of`, which is a sum.

        This rank's share of that mean goes to `passes` as `name`.
        """
        lengths_of_all, _ = self.world.gather_list(counts(examples))
        weight = token_weights(lengths_of_all, "token-mean")[0] if lengths_of_all else 0.0
        optimizers = self._optimizers()
        parts = micro_batches(examples, pass_tokens(self.config), share_prompts=False)
        idle = idle_passes(len(parts), self.world, *optimizers)
        for indices in parts:
            members = [examples[i] for i in indices]
            output = self.policy.forward(pack_experiences(members, share_prompts=False), temperature)
            loss = weight * loss_of(members, output)
            backward(coef * loss, *optimizers)
            passes.add(members, loss, {name: loss})
        for _ in range(idle):
            backward(0 * self.policy.forward(idle_batch(self.policy)).logprobs.sum(), *optimizers)

    def _step_metrics(self, experiences: Sequence[Experience], metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the whole step on all ranks; afterwards the KL coefficient follows the step's mean KL."""
        out: dict[str, float] = {}
        if self.critic is not None:
            out |= self.critic.metrics(experiences, self.world)
        if self.distillation is not None:
            out |= self.distillation.metrics(experiences, metrics)
        if self.has_kl:
            if self.config.kl.place == "reward":  # the KL that the rewards were charged for: of the old policy
                old, ref = (gather(experiences, n) if experiences else None for n in ("old_logprobs", "ref_logprobs"))
                kl = None if old is None or ref is None else kl_estimate(old, ref, self.config.kl.kind)
                out |= mean_kl(kl, experiences, self.world)
            out["kl/beta"] = self.kl.beta
            observed = {**metrics, **out}.get("kl")
            if observed is not None and not self.critic_warms_up:  # the policy has not moved while its critic warms up
                self.kl = self.kl.update(observed, sum(self.world.gather(len(experiences))))
        return out

    # -- state ---------------------------------------------------------------------------------------------------------

    def state(self) -> TrainerState:
        """Return what a resumed run needs besides weights; the reference is the policy that the phase began with."""
        out: dict[str, Mapping[str, Tensor | StatePiece]] = {
            "optimizer": self.optimizer.state(),
            "progress": {"steps": torch.tensor(self.steps), "kl_beta": torch.tensor(self.kl.beta, dtype=torch.float64)},
        }
        if self.critic is not None:
            out |= self.critic.state()
        if self.ema is not None:
            out["ema"] = self.ema.state()
        return out

    def load(self, state: State, where: str) -> None:
        """Take over a `state`. Raises ValueError for one of a run without the critic or the average."""
        self.optimizer.load(state["optimizer"], where)
        self.steps = int(state["progress"]["steps"])
        self.kl = replace(self.kl, beta=float(state["progress"]["kl_beta"]))
        if self.critic is not None:
            self.critic.load(state, where)
        if self.ema is not None:
            if "ema" not in state:
                raise ValueError(f"{where}: the checkpoint holds no ema; it was written without one")
            self.ema.load(state["ema"], where)

    def close(self) -> None:
        """End after the last update."""
        self.optimizer.close()
        if self.critic is not None:
            self.critic.optimizer.close()

    def weights(self) -> Mapping[str, Tensor]:
        return self.policy.weights()

    def averaged(self) -> Mapping[str, Tensor]:
        """Return the moving average of the weights."""
        assert self.ema is not None
        return self.ema.state()

    def beta(self) -> float:
        """Return the KL coefficient as it is now."""
        return self.kl.beta


def with_logprobs(
    experiences: Sequence[Experience],
    name: Literal["old_logprobs", "ref_logprobs"],
    model: TrainedPolicy | Reference,
    config: RLConfig,
    temperatures: tuple[float, float | Sequence[float]],
) -> list[Experience]:
    """Return the experiences with the log-probs of `model` at temperatures of text and of codes; those of a flow also
    with where its noisy steps lead, for exact KLs."""

    def forward(batch: PackedBatch) -> dict[str, Tensor]:
        output = model.forward(batch, temperatures[0], audio_temperature=temperatures[1])
        steps, means = output.noisy_steps, "means" if name == "old_logprobs" else "ref_means"
        return {name: logprobs_by_code(output)} | ({} if steps is None else {means: steps.means})

    return fill(experiences, forward, pass_tokens(config), config.share_prompts)


class TokenRecord:
    """The `TokenNumbers` of all experiences of a rank. A pass that is recorded waits for the device once more."""

    def __init__(self, experiences: Sequence[Experience]):
        self._experiences = experiences
        self._passes: dict[int, tuple[Tensor, ...]] = {}

    def add(self, micro: MicroBatch, output: PolicyOutput) -> None:
        """Keep the micro-batch's log-probs and entropies in place of those of an earlier pass."""
        both_2N = torch.stack([output.logprobs.detach().float(), output.entropy.detach().float()]).cpu()
        parts = both_2N.split(counts(micro.experiences), dim=1)
        self._passes |= {id(e): part.unbind(0) for e, part in zip(micro.experiences, parts, strict=True)}

    def numbers(self) -> list[TokenNumbers]:
        """Return those of each experience; no entropies and ratios where there was no pass of the policy."""
        out: list[TokenNumbers] = []
        for e in self._experiences:
            assert e.advantages is not None and e.rollout_logprobs is not None
            flat: dict[str, Tensor] = {}
            advantages_N = e.advantages[e.loss_mask]
            if len(advantages_N) and bool((advantages_N != advantages_N[0]).any()):
                flat["advantages"] = advantages_N
            if id(e) in self._passes:
                logprobs_N, flat["entropies"] = self._passes[id(e)]
                flat["ratios"] = tis_weights(logprobs_N, sum_codebooks(e.rollout_logprobs[e.loss_mask].float()), 1e4)
            streams = {name: torch.zeros(len(e), dtype=torch.float16) for name in flat}
            for name, values_N in flat.items():
                streams[name][e.loss_mask] = values_N.half()
            out.append(streams)
        return out
