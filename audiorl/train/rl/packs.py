"""A mini-batch in packs: micro-batches that carry the weight of every token in the loss and in the metrics.

Shapes: N sampled tokens of a pack, Q codebooks where codec frames are among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from audiorl.algos.experience import Experience, PackedBatch
from audiorl.algos.losses import clip_cov_tokens, covariances, kl_cov_tokens, token_weights
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.config import RLConfig
from audiorl.distributed.world import World
from audiorl.train.batches import counts, frames, gather, repeat_each, sum_codebooks


@dataclass(frozen=True)
class FrameCounts:
    """The codec frames among the sampled rows of all ranks."""

    fraction: float
    """The share of rows that are frames."""
    codebooks: int
    """Q."""


@dataclass(frozen=True, eq=False)
class Pack:
    """Experiences in one row, for one forward and backward pass. `MiniBatch.packs` fills in every field."""

    experiences: Sequence[Experience]
    batch: PackedBatch
    loss_weights_N: Tensor
    """The weight of each sampled token in the loss, by `RLConfig.aggregation`: losses are weighted sums."""
    mean_weights_N: Tensor
    """The weights under which sums over all packs are plain means over the tokens of the mini-batch."""
    frame_counts: FrameCounts | None
    """The codec frames of the mini-batch; None where no experience can have frames."""
    chosen_N: Tensor | None = None
    """bool: the tokens that Clip-Cov leaves out, or KL-Cov holds back; None with other losses."""

    def gather(self, name: str) -> Tensor | None:
        """The sampled tokens' entries [N] or [N, Q] of a field of `Experience`; None where it is not filled in."""
        return gather(self.experiences, name, self.loss_weights_N.device)

    @property
    def sequence_N(self) -> Tensor:
        """int64, on the CPU: which experience of the pack each sampled token belongs to."""
        return repeat_each(range(len(self.experiences)), counts(self.experiences))

    @cached_property
    def is_frame_N(self) -> Tensor:
        """bool, on the CPU: which sampled rows are codec frames."""
        return is_frame(self.experiences)

    def means(self, name: str, values_N: Tensor) -> dict[str, Tensor]:
        """This pack's share of a metric's mean; of a model that speaks also over text tokens and over frames alone."""
        return means_by_modality(name, values_N, self.mean_weights_N, self.is_frame_N, self.frame_counts)

    def kl_means(self, kl: Tensor) -> dict[str, Tensor]:
        """This pack's share of the mean KL [N] or [N, Q], over all rows, by modality and by codebook."""
        return kl_means(kl, self.mean_weights_N, self.is_frame_N, self.frame_counts)


class MiniBatch:
    """One rank's experiences of one update. Weights come from the counts of all ranks (a collective call).

    `seed` makes Clip-Cov's choice of tokens reproducible.
    """

    def __init__(
        self, experiences: Sequence[Experience], config: RLConfig, max_tokens: int, world: World, seed: int = 0
    ):
        self.experiences, self._config = experiences, config
        lengths_of_all, own = world.gather_list(counts(experiences))
        self._loss_weights = token_weights(lengths_of_all, config.aggregation, max_tokens)[own]
        self._mean_weights = token_weights(lengths_of_all, "token-mean")[own]
        self._frame_counts = frame_counts(experiences, world)
        self._chosen = None
        if config.loss in ("clip-cov", "kl-cov"):
            self._chosen = chosen_by_covariance(experiences, config, world, seed).split(counts(experiences))
        self._indices = micro_batches(experiences, config.micro_batch_tokens, config.share_prompts)

    def __len__(self) -> int:
        """How many packs there are."""
        return len(self._indices)

    def packs(self, device: torch.device) -> Iterator[Pack]:
        """Each pack in turn, its weights on `device`."""
        for indices in self._indices:
            experiences = [self.experiences[i] for i in indices]
            lengths = counts(experiences)
            yield Pack(
                experiences,
                pack_experiences(experiences, self._config.share_prompts),
                repeat_each([self._loss_weights[i] for i in indices], lengths).to(device),
                repeat_each([self._mean_weights[i] for i in indices], lengths).to(device),
                self._frame_counts,
                None if self._chosen is None else torch.cat([self._chosen[i] for i in indices]).to(device),
            )


def mini_batches_of(
    experiences: Sequence[Experience],
    numbers: Sequence[int] | None,
    config: RLConfig,
    max_tokens: int,
    world: World,
    seed: int = 0,
) -> list[MiniBatch]:
    """The mini-batches of a rank's share of a step; as many as the rank with the most has. `numbers`: which mini-batch
    each experience belongs to; None: in order, equally many in each."""
    if numbers is None:
        numbers = in_order(len(experiences), config.mini_batches)
    count = max(world.gather(max(numbers, default=0))) + 1
    members: list[list[Experience]] = [[] for _ in range(count)]
    for e, number in zip(experiences, numbers, strict=True):
        members[number].append(e)
    return [MiniBatch(part, config, max_tokens, world, seed) for part in members]


def in_order(count: int, parts: int) -> list[int]:
    """Which of `parts` each of `count` experiences belongs to, when each takes equally many in order."""
    size = max(-(-count // parts), 1)
    return [i // size for i in range(count)]


def chosen_by_covariance(experiences: Sequence[Experience], config: RLConfig, world: World, seed: int) -> Tensor:
    """bool, for each sampled token of this rank: Clip-Cov's or KL-Cov's choice among the tokens of all ranks.

    Covariances are those of the log-probs before the update: the policy's own where several updates need them, else the
    engine's. The choice so depends neither on packs nor on ranks.
    """
    device = torch.device("cpu")
    pairs: list[tuple[float, float]] = []
    if experiences:
        old, engine, advantages = (
            gather(experiences, n, device) for n in ("old_logprobs", "engine_logprobs", "advantages")
        )
        logprobs = engine if old is None else old
        assert logprobs is not None and advantages is not None
        pairs = list(zip(sum_codebooks(logprobs).tolist(), advantages.tolist(), strict=True))
    tokens, own = world.gather_list(pairs)
    if not tokens:
        return torch.zeros(0, dtype=torch.bool)
    covariance = covariances(*torch.tensor(tokens, dtype=torch.float64).unbind(1))
    if config.loss == "kl-cov":
        return kl_cov_tokens(covariance, config.cov_fraction)[own]
    return clip_cov_tokens(covariance, config.cov_fraction, config.cov_low, config.cov_high, seed)[own]


def frame_counts(experiences: Sequence[Experience], world: World) -> FrameCounts | None:
    """The codec frames of all ranks; None when no experience can have frames."""
    widths = [e.codes.shape[1] for e in experiences if e.codes is not None]
    of_ranks = world.gather((sum(counts(experiences)), int(is_frame(experiences).sum()), max(widths, default=0)))
    rows, frame_rows, codebooks = (list(column) for column in zip(*of_ranks, strict=True))
    return FrameCounts(sum(frame_rows) / max(sum(rows), 1), max(codebooks)) if max(codebooks) else None


def is_frame(experiences: Sequence[Experience]) -> Tensor:
    """[N] bool, on the CPU: which sampled rows are codec frames."""
    marks = frames(experiences, torch.device("cpu"))
    return torch.zeros(sum(counts(experiences)), dtype=torch.bool) if marks is None else marks


def kl_means(kl: Tensor, weights_N: Tensor, is_frame_N: Tensor, frame_counts: FrameCounts | None) -> dict[str, Tensor]:
    """Weighted sums of the KL [N], or [N, Q] by code: `kl` as `means_by_modality`, and with frames `kl_codebook_K`,
    the mean over frames of codebook K, from 0."""
    out = means_by_modality("kl", sum_codebooks(kl), weights_N, is_frame_N, frame_counts)
    if frame_counts is None:
        return out
    places = is_frame_N.nonzero()[:, 0].to(kl.device)
    sums = (weights_N[places, None] * kl[places]).sum(0) if kl.dim() == 2 else kl.new_zeros(frame_counts.codebooks)
    return out | {f"kl_codebook_{k}": value / max(frame_counts.fraction, 1e-9) for k, value in enumerate(sums)}


def means_by_modality(
    name: str, values_N: Tensor, weights_N: Tensor, is_frame_N: Tensor, frame_counts: FrameCounts | None
) -> dict[str, Tensor]:
    """Weighted sums of `values_N`: `name` over all rows, and with frames `name`_text and `name`_audio, each divided by
    the share of its rows, so that they are means over these."""
    weighted_N = weights_N * values_N
    out = {name: weighted_N.sum()}
    if frame_counts is not None:
        share = frame_counts.fraction
        for modality, rows, fraction in (("text", ~is_frame_N, 1 - share), ("audio", is_frame_N, share)):
            places = rows.nonzero()[:, 0].to(weighted_N.device)
            out[f"{name}_{modality}"] = weighted_N[places].sum() / max(fraction, 1e-9)
    return out
