"""A mini-batch as flat tensors over its sampled tokens, and the micro-batches that pass through the model.

Shapes: N sampled tokens of a mini-batch, or of one of its micro-batches, experience after experience; Q codebooks where
codec frames are among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from audiorl.algos.experience import Experience, PackedBatch
from audiorl.algos.flow import best_and_worst
from audiorl.algos.losses import token_weights
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.config import RLConfig
from audiorl.config.checks import pass_tokens
from audiorl.config.rl import GROUP_LOSSES
from audiorl.distributed.local import World
from audiorl.train.batches import counts, gather, group_packs, repeat_each, sum_codebooks

STREAMS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")
"""Fields of `Experience` that become flat tensors of the same name."""


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """What the trainers learn in a step: all of it, or one rank's part."""

    experiences: Sequence[Experience]  # Whole groups
    supervised: Sequence[Sequence[Experience]] = ()  # Examples of the ptx term, for each update of the step
    mini_batches: Sequence[int] | None = None
    """Which mini-batch of the whole step each experience belongs to; None: in order, equally many in each."""
    answers: Sequence[Experience] = ()  # Reference answers, for the off-policy share of distillation
    record_tokens: bool = False  # The step's rollouts are recorded, with numbers of every token


@dataclass(frozen=True)
class FrameCounts:
    """The codec frames among the sampled tokens of all ranks."""

    fraction: float  # The share of tokens that are frames
    codebooks: int  # Q


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Experiences of one forward and backward pass with what is known of their N sampled tokens."""

    experiences: Sequence[Experience]
    batch: PackedBatch  # All their tokens in one row
    loss_weights: Tensor
    """[N]: the weight of each token in the loss, by `RLConfig.aggregation`: losses are weighted sums."""
    mean_weights: Tensor
    """[N]: the weights under which sums over all micro-batches are plain means over the tokens of the mini-batch."""
    sequence: Tensor  # [N] int64, on the CPU: which of the experiences each token belongs to
    is_frame: Tensor  # [N] bool, on the CPU: which tokens are codec frames
    code_mask: Tensor | None
    """[N, Q] bool, on the CPU: the codes that were sampled (a text token's column 0); None without frames."""
    frame_counts: FrameCounts | None  # The codec frames of the mini-batch; None where no experience can have frames
    rollout_logprobs: Tensor | None = None  # [N] or [N, Q], of the engine
    old_logprobs: Tensor | None = None
    """[N] or [N, Q], of the policy before the step; None where the step has a single update."""
    ref_logprobs: Tensor | None = None  # [N] or [N, Q], of the reference
    advantages: Tensor | None = None  # [N]
    values: Tensor | None = None  # [N]: the critic's, before the step
    returns: Tensor | None = None  # [N], which the critic learns

    def means(self, name: str, values: Tensor) -> dict[str, Tensor]:
        """Return this part's share of the mean of `values` [N]; of a model that speaks also over text and frames."""
        return means_by_modality(name, values, self.mean_weights, self.is_frame, self.frame_counts)

    def kl_means(self, kl: Tensor) -> dict[str, Tensor]:
        """Return this part's share of the mean KL [N] or [N, Q], over all tokens, by modality and by codebook."""
        return kl_means(kl, self.mean_weights, self.is_frame, self.frame_counts)


class MiniBatch:
    """One rank's experiences of one update. Weights come from the counts of all ranks (a collective call)."""

    def __init__(self, experiences: Sequence[Experience], config: RLConfig, max_tokens: int, world: World):
        assert len({e.old_logprobs is None for e in experiences}) < 2, "old log-probs for all experiences, or for none"
        self.experiences, self._config = experiences, config
        self._lengths = counts(experiences)
        self._frame_counts = frame_counts(experiences, world)
        lengths_of_all, own = world.gather_list(self._lengths)
        streams = {name: gather(experiences, name) if experiences else None for name in STREAMS}
        self._flat: dict[str, Tensor] = {name: flat for name, flat in streams.items() if flat is not None}
        for name, aggregation in (("loss_weights", config.aggregation), ("mean_weights", "token-mean")):
            self._flat[name] = repeat_each(token_weights(lengths_of_all, aggregation, max_tokens)[own], self._lengths)
        self.divide(pass_tokens(config))

    def divide(self, tokens: int) -> None:
        """Make micro-batches of at most so many tokens."""
        if self._config.loss == "crpo":  # best and worst stay together
            pairs = [self.experiences[i : i + 2] for i in range(0, len(self.experiences), 2)]
            self._parts = [[2 * pair + k for pair in part for k in (0, 1)] for part in group_packs(pairs, tokens)]
        else:
            self._parts = micro_batches(self.experiences, tokens, self._config.share_prompts)

    def __len__(self) -> int:
        """Return how many micro-batches there are."""
        return len(self._parts)

    def micro_batches(self, device: torch.device) -> Iterator[MicroBatch]:
        """Return each micro-batch in turn, with its tensors on `device`."""
        tokens = torch.arange(sum(self._lengths)).split(self._lengths)
        for indices in self._parts:
            experiences = [self.experiences[i] for i in indices]
            rows = torch.cat([tokens[i] for i in indices])
            speaks = any(e.codes is not None for e in experiences)
            flat = {name: values[rows] for name, values in self._flat.items()}
            # A text packed without frames has log-probs of its tokens alone, [N]: they stand in column 0.
            flat = {n: v[:, 0] if v.dim() == 2 and not speaks else v for n, v in flat.items()}
            yield MicroBatch(
                experiences,
                pack_experiences(experiences, self._config.share_prompts),
                sequence=repeat_each(range(len(experiences)), [self._lengths[i] for i in indices]),
                is_frame=is_frame(experiences),
                code_mask=flat_code_mask(experiences),
                frame_counts=self._frame_counts,
                **{name: values.to(device, non_blocking=True) for name, values in flat.items()},
            )


def mini_batches_of(batch: TrainBatch, config: RLConfig, max_tokens: int, world: World) -> list[MiniBatch]:
    """Return the mini-batches of a rank's share of a step; as many as the rank with the most has."""
    numbers = batch.mini_batches
    if numbers is None:
        numbers = mini_batch_numbers(config, batch.experiences)
    count = max(world.gather(max(numbers, default=0))) + 1
    members: list[list[Experience]] = [[] for _ in range(count)]
    for e, number in zip(batch.experiences, numbers, strict=True):
        members[number].append(e)
    return [MiniBatch(part, config, max_tokens, world) for part in members]


def trained_by(config: RLConfig, experiences: Sequence[Experience]) -> list[int]:
    """Return the indices of the experiences that the loss is about: with raft of the best of each group, with crpo of
    best and worst by turns, else of all."""
    if config.loss not in GROUP_LOSSES:
        return list(range(len(experiences)))
    pairs = best_and_worst([e.score for e in experiences], [e.group_id for e in experiences])
    return [i for pair in pairs for i in pair[: 2 if config.loss == "crpo" else 1]]


def mini_batch_numbers(config: RLConfig, experiences: Sequence[Experience]) -> list[int]:
    """Return the mini-batch of each experience, in order; each takes equally many of those that are trained, and best
    and worst of a group together."""
    numbers, trained = [0] * len(experiences), trained_by(config, experiences)
    each = 2 if config.loss == "crpo" else 1
    count = len(trained) // each
    parts = min(config.mini_batches, count)
    for k, i in enumerate(trained):
        numbers[i] = k // each * parts // count
    return numbers


def updates_of(config: RLConfig, skipped: int = 0) -> int:
    """Return the optimizer updates of a phase after its first `skipped` steps."""
    return max(config.steps - skipped, 0) * config.epochs * config.mini_batches


# -- codec frames ------------------------------------------------------------------------------------------------------


def frame_counts(experiences: Sequence[Experience], world: World) -> FrameCounts | None:
    """Return the codec frames of all ranks; None when no experience can have frames."""
    widths = [e.codes.shape[1] for e in experiences if e.codes is not None]
    of_ranks = world.gather((sum(counts(experiences)), int(is_frame(experiences).sum()), max(widths, default=0)))
    tokens, frames, codebooks = (list(column) for column in zip(*of_ranks, strict=True))
    return FrameCounts(sum(frames) / max(sum(tokens), 1), max(codebooks)) if max(codebooks) else None


def is_frame(experiences: Sequence[Experience]) -> Tensor:
    """Return which sampled tokens are codec frames, [N] bool on the CPU."""
    marks = [torch.zeros(0, dtype=torch.bool)]
    for e in experiences:
        marks.append(e.loss_mask.new_zeros(e.num_sampled) if e.codes is None else e.codes[e.loss_mask, 0] >= 0)
    return torch.cat(marks)


def flat_code_mask(experiences: Sequence[Experience]) -> Tensor | None:
    """Return the codes that were sampled, [N, Q] bool with a text token in column 0; None without frames."""
    width = max((e.code_mask.shape[1] for e in experiences if e.code_mask is not None), default=0)
    if not width:
        return None
    masks = []
    for e in experiences:
        text = pad(torch.ones(e.num_sampled, 1, dtype=torch.bool), (0, width - 1))
        masks.append(text if e.code_mask is None else e.code_mask[e.loss_mask])
    return torch.cat(masks)


def kl_means(kl: Tensor, weights: Tensor, is_frame: Tensor, frame_counts: FrameCounts | None) -> dict[str, Tensor]:
    """Return weighted sums of the KL [N], or [N, Q] by code: `kl` as `means_by_modality`, and with frames
    `kl_codebook_K`, the mean over frames of codebook K, from 0."""
    out = means_by_modality("kl", sum_codebooks(kl), weights, is_frame, frame_counts)
    if frame_counts is None:
        return out
    places = is_frame.nonzero()[:, 0].to(kl.device, non_blocking=True)
    sums = (weights[places, None] * kl[places]).sum(0) if kl.dim() == 2 else kl.new_zeros(frame_counts.codebooks)
    return out | {f"kl_codebook_{k}": value / max(frame_counts.fraction, 1e-9) for k, value in enumerate(sums)}


def means_by_modality(
    name: str, values: Tensor, weights: Tensor, is_frame: Tensor, frame_counts: FrameCounts | None
) -> dict[str, Tensor]:
    """Return weighted sums of `values` [N]: `name` over all tokens, and with frames `name`_text and `name`_audio, each
    divided by the share of its tokens, which makes them means over these."""
    weighted = weights * values
    out = {name: weighted.sum()}
    if frame_counts is not None:
        share = frame_counts.fraction
        for modality, rows, fraction in (("text", ~is_frame, 1 - share), ("audio", is_frame, share)):
            places = rows.nonzero()[:, 0].to(weighted.device, non_blocking=True)
            out[f"{name}_{modality}"] = weighted[places].sum() / max(fraction, 1e-9)
    return out


def mean_kl(kl: Tensor | None, experiences: Sequence[Experience], world: World) -> Mapping[str, float]:
    """Return the mean KL over the tokens of all ranks, from this rank's [N] or [N, Q]; None on a rank without any."""
    lengths_of_all, _ = world.gather_list(counts(experiences))
    frames, sums = frame_counts(experiences, world), dict[str, Tensor]()
    if kl is not None:
        weights = kl.new_full((len(kl),), 1 / max(sum(lengths_of_all), 1))
        sums = kl_means(kl, weights, is_frame(experiences), frames)
    return world.add_up({name: float(value) for name, value in sums.items()})
