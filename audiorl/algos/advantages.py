"""Advantages. One formula, one function.

Shapes: B rollouts of at most T tokens; `mask` [B, T] is True where a token was sampled. Observed tokens (audio that
arrives between two turns) and padding are False: they are skipped, so that the step after the last token of one turn is
the first token of the next. Rewards must lie on sampled tokens; what lies elsewhere does not count. Results are 0 where
the mask is False.

A *step* is a part of a rollout with a reward of its own: a word, a thought, a turn. `ends` [B, T] counts the steps that
end on a sampled token, none on most; the step's reward is the sum over its tokens, and may be 0. Steps that end on one
token share its reward equally, and the token has the mean of their advantages.

Rewards that differ by no more than float32's rounding are equal: their centred values are 0, not the rounding, which a
division by their spread would make as large as any signal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from audiorl.algos.losses import check_shapes

Reduce = Callable[[Tensor], Tensor]  # Sums a tensor over all ranks
LARGEST_REWARD = 1e18
"""Rewards stay below this: the squares of larger ones are infinite in float32, and the advantages then 0."""


def identity(tensor: Tensor) -> Tensor:
    """Return the sum over one rank."""
    return tensor


def differ(low: Tensor, high: Tensor) -> Tensor:
    """Return whether the lowest and the highest of some rewards differ by more than a few roundings of their dtype."""
    return high - low > 3 * torch.finfo(low.dtype).eps * torch.maximum(-low, high)


def all_equal(values: Sequence[float]) -> bool:
    """Return whether values, at least one, differ by no more than the rounding of a few sums."""
    return max(values) - min(values) <= 1e-12 * max(map(abs, values))


def group_relative(rewards: Tensor, group_ids: Sequence[str] | Tensor, std: bool = True, eps: float = 1e-4) -> Tensor:
    """GRPO's advantage, (r - mean) / (std + eps) within each group (Shao et al. 2024, arXiv 2402.03300, eq. 3 ff.).

    rewards [B]; group_ids: B labels, equal for rollouts of one prompt, in any order. Returns [B].
    `std=False` leaves the division out (Dr.GRPO, arXiv 2503.20783). The std is the unbiased one, as in TRL and verl; a
    group of one or of equal rewards has advantage 0.
    """
    centred, index, count = centre_groups(rewards, group_ids, "group_relative")
    if not std:
        return centred
    square = torch.zeros_like(count).index_add(0, index, centred**2)
    deviation = (square / (count - 1).clamp(min=1)).sqrt()
    scale = deviation[index] + eps
    return centred / torch.where(scale > 0, scale, 1.0)  # equal rewards and an eps of 0: 0 / 0


def rloo(rewards: Tensor, group_ids: Sequence[str] | Tensor) -> Tensor:
    """RLOO's advantage, r minus the mean of the others of its group (Ahmadian et al. 2024, arXiv 2402.14740, eq. 7).

    rewards [B]; group_ids: B labels. Returns [B]; a group of one has no others and advantage 0.
    """
    centred, index, count = centre_groups(rewards, group_ids, "rloo")
    return centred * (count / (count - 1).clamp(min=1))[index]  # the others' mean lies n/(n-1) times as far away


def time_index_relative(
    rewards: Tensor,
    mask: Tensor,
    group_ids: Sequence[str] | Tensor,
    std: bool = True,
    eps: float = 1e-4,
    gamma: float = 1.0,
) -> Tensor:
    """Per turn: rewards normalised over the group at the same turn, summed from each turn on (Hibiki-Zero, 2602.11072).

    rewards, mask [B, S]: a reward for each of at most S turns, True where the rollout has the turn; gamma: discount of
    later turns. Returns [B, S], 0 where the mask is False. A turn that only one rollout of the group has contributes 0.
    """
    check_shapes("time_index_relative", rewards=rewards, mask=mask)
    mask = mask.bool()
    turn = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)[mask]
    group, _ = _group_index(group_ids, mask.device)
    at = group[:, None].expand_as(mask)[mask] * mask.shape[1] + turn
    normalised = torch.zeros_like(rewards)
    normalised[mask] = group_relative(rewards[mask], at, std, eps)
    return torch.where(mask, _discounted_sums(normalised, gamma), 0.0)


def step_index_relative(
    rewards: Tensor,
    mask: Tensor,
    ends: Tensor,
    group_ids: Sequence[str] | Tensor,
    std: bool = True,
    eps: float = 1e-4,
    gamma: float = 0.0,
) -> Tensor:
    """Return `time_index_relative` of the steps of an answer, such as the words that it says: the k-th step of a
    rollout is compared with the k-th steps of its group.

    rewards, mask, ends [B, T]. Returns [B, T]: a token has the advantage of its own step and, with `gamma` above 0,
    gamma^n times that of the n-th step after it. What follows the last step belongs to it.
    """
    check_shapes("step_index_relative", rewards=rewards, mask=mask, ends=ends)
    step_BT, counts_B = steps_of(ends, mask)
    return time_index_on_tokens(rewards, mask, step_BT, counts_B, group_ids, std, eps, gamma)


def steps_of(ends: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the step of each token [B, T] int64, from 0, and how many steps each rollout has [B].

    What follows the last end has the number of the last step.
    """
    ends = ends.long() * mask.bool()
    counts_B = ends.sum(1)
    first_BT = ends.cumsum(1) - ends.long()
    # What follows the last end belongs to the first of the steps that end there.
    last_B = torch.where(ends > 0, first_BT, 0).amax(1) if ends.shape[1] else counts_B
    return first_BT.minimum(last_B[:, None]), counts_B


def time_index_on_tokens(
    rewards: Tensor,
    mask: Tensor,
    steps: Tensor,
    counts: Tensor,
    group_ids: Sequence[str] | Tensor,
    std: bool = True,
    eps: float = 1e-4,
    gamma: float = 1.0,
) -> Tensor:
    """Return `time_index_relative` of the summed rewards of each step (turn, word) on its tokens, [B, T].

    rewards, mask [B, T]; steps [B, T] int64: the step of each token, from 0; counts [B]: how many steps each rollout
    has.
    """
    check_shapes("time_index_on_tokens", rewards=rewards, mask=mask, steps=steps)
    rewards_BS, present_BS, place_BS, sharing_BS = _sum_steps(rewards, mask.bool(), steps, counts)
    advantages_BS = time_index_relative(rewards_BS, present_BS, group_ids, std, eps, gamma)
    means_BS = torch.zeros_like(advantages_BS).scatter_add(1, place_BS, advantages_BS / sharing_BS)
    return torch.where(mask.bool(), means_BS.gather(1, steps), 0.0)


def process_relative(
    rewards: Tensor, mask: Tensor, ends: Tensor, group_ids: Sequence[str] | Tensor, std: bool = True, eps: float = 1e-4
) -> Tensor:
    """Return GRPO's advantage with a reward for each step of an answer (Shao et al. 2024, arXiv 2402.03300, 4.1.3).

    rewards, mask, ends [B, T]. Rewards are normalised over all steps of the group (with `std=False` centred), and a
    token's advantage is the sum of those of its own step and of the later ones; tokens after the last step belong to
    none and have 0. Returns [B, T].
    """
    check_shapes("process_relative", rewards=rewards, mask=mask, ends=ends)
    step_BT, counts_B = steps_of(ends, mask)
    inside_BT = mask.bool() & ((ends.bool() & mask.bool()).flip(1).cumsum(1).flip(1) > 0)
    rewards_BS, present_BS, *_ = _sum_steps(rewards, inside_BT, step_BT, counts_B)
    group = _group_index(group_ids, mask.device)[0][:, None].expand_as(present_BS)
    normalised_BS = torch.zeros_like(rewards_BS)
    normalised_BS[present_BS] = group_relative(rewards_BS[present_BS], group[present_BS], std, eps)
    later_BS = normalised_BS.flip(1).cumsum(1).flip(1)
    return torch.where(inside_BT, later_BS.gather(1, step_BT), 0.0)


def _sum_steps(rewards: Tensor, mask: Tensor, steps: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the rewards [B, T] where `mask` is True summed over each step, [B, S] with S the most steps of a rollout;
    which steps exist; the step whose tokens each of them shares, itself where it has some; and how many share them.
    """
    number_S = torch.arange(max([*counts.tolist(), 1]), device=rewards.device)
    present_BS = number_S < counts[:, None]
    sums_BS = rewards.new_zeros(present_BS.shape).scatter_add(1, steps, torch.where(mask, rewards, 0.0))
    has_tokens_BS = torch.zeros_like(sums_BS).scatter_add(1, steps, mask.to(sums_BS.dtype)) > 0
    place_BS = torch.where(has_tokens_BS, number_S, 0).cummax(1).values
    sharing_BS = torch.zeros_like(sums_BS).scatter_add(1, place_BS, present_BS.to(sums_BS.dtype)).clamp(min=1)
    sharing_BS = sharing_BS.gather(1, place_BS)
    return sums_BS.gather(1, place_BS) / sharing_BS, present_BS, place_BS, sharing_BS


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    rewards, values, mask [B, T]. Returns (advantages, returns), [B, T]: with s' the next sampled token,
    δ_s = r_s + γ·V_s' - V_s and A_s = δ_s + γλ·A_s'; after the last one both V and A are 0. returns = A + V.
    Not differentiated through.
    """
    check_shapes("gae", rewards=rewards, values=values, mask=mask)
    rewards, values, mask = rewards.detach(), values.detach(), mask.bool()
    r, v = rewards, values
    gaps = not bool(mask.all())
    if gaps:  # sampled tokens move up to the columns 1, 2, …; column 0 takes all others and is dropped
        place = mask.cumsum(1) * mask
        r, v = (x.new_zeros(len(x), x.shape[1] + 1).scatter_(1, place, x)[:, 1:] for x in (rewards, values))
    following = pad(v[:, 1:], (0, 1))
    advantages = _discounted_sums(r + gamma * following - v, gamma * lam)
    if gaps:
        advantages = pad(advantages, (1, 0)).gather(1, place)
    return advantages, torch.where(mask, advantages + values, 0.0)


def reinforce_returns(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """REINFORCE's returns, G_s = r_s + γ·G_s' over sampled tokens (Williams 1992). All [B, T]."""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[0]


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float = 1.0, reduce: Reduce = identity) -> Tensor:
    """REINFORCE++ (Hu 2025, arXiv 2501.03262): returns of the token rewards, whitened over all sampled tokens.

    rewards [B, T] hold -β·k1 on every token and the score on the last. `reduce` as in `whiten`. Returns [B, T].
    """
    return whiten(reinforce_returns(rewards, mask, gamma), mask, reduce)


def reinforce_plus_plus_baseline(
    scores: Tensor, group_ids: Sequence[str] | Tensor, mask: Tensor, reduce: Reduce = identity
) -> Tensor:
    """REINFORCE++-baseline (arXiv 2501.03262): scores [B] less their group's mean, whitened over all sampled tokens.

    Returns [B, T], one value a rollout. Its KL goes into the loss.
    """
    return whiten(group_relative(scores, group_ids, std=False)[:, None] * mask, mask, reduce)


def whiten(x: Tensor, mask: Tensor, reduce: Reduce = identity, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the True entries of `mask`, any shape; 0 elsewhere.

    `reduce` sums a tensor over all ranks, so that mean and (unbiased) variance are those of the global batch. Fewer
    than two entries, or equal ones, give 0.
    """
    check_shapes("whiten", x=x, mask=mask)
    mask = mask.bool()
    masked = torch.where(mask, x, 0.0).double()
    count, total = reduce(torch.stack([mask.sum().double(), masked.sum()]))
    mean = total / count.clamp(min=1)
    centred = torch.where(mask, masked - mean, 0.0)
    variance = reduce((centred**2).sum()) / (count - 1).clamp(min=1)
    equal = variance <= (max(torch.finfo(x.dtype).eps, 1e-14) * mean) ** 2  # but for rounding, of x or of the sum
    return torch.where(equal, 0.0, centred / (variance + eps).sqrt()).to(x.dtype)


def _discounted_sums(x: Tensor, decay: float) -> Tensor:
    """y_t = Σ_{k ≥ t} decay^(k-t) · x_k for x [B, T], without a loop over time.

    Within blocks of 64 a product with a triangular matrix of powers; what enters a block from behind is the same sum
    over the blocks' first entries, with the block's decay.
    """
    batch, length = x.shape
    if x.numel() == 0:
        return x.clone()
    size = min(64, length)
    blocks = pad(x, (0, -length % size)).view(batch, -1, size)
    steps = torch.arange(size, device=x.device)
    distance = steps[:, None] - steps[None, :]
    powers = torch.where(distance >= 0, torch.pow(decay, distance.clamp(min=0).to(x.dtype)), 0.0)
    inside = blocks @ powers
    if blocks.shape[1] == 1:
        return inside.view(batch, -1)[:, :length]
    whole = _discounted_sums(inside[:, :, 0], decay**size)
    entering = pad(whole[:, 1:], (0, 1))
    reach = torch.pow(decay, (size - steps).to(x.dtype))
    return (inside + entering[:, :, None] * reach).view(batch, -1)[:, :length]


def centre_groups(rewards: Tensor, group_ids: Sequence[str] | Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards less their group's mean [B], 0 in a group of equal ones, the group of each [B], and the groups'
    sizes. Raises ValueError for a reward that is not below `LARGEST_REWARD`."""
    index, size = _group_index(group_ids, rewards.device)
    if rewards.dim() != 1 or len(index) != len(rewards):
        raise ValueError(f"{name}: rewards of shape {list(rewards.shape)} but {len(index)} group ids")
    empty = torch.zeros(size, dtype=rewards.dtype, device=rewards.device)
    if not bool((rewards.abs() < LARGEST_REWARD).all()):
        wrong = float(rewards[~(rewards.abs() < LARGEST_REWARD)][0])
        raise ValueError(f"{name}: a reward of {wrong:g}; they must be finite and below {LARGEST_REWARD:g}")
    count = empty.index_add(0, index, torch.ones_like(rewards))
    low, high = (empty.scatter_reduce(0, index, rewards, how, include_self=False) for how in ("amin", "amax"))
    # A large part that all share is taken off first: the mean would be rounded to its digits.
    shared = torch.where(high - low < torch.maximum(-low, high) / 1024, low, 0.0)
    rewards = rewards - shared[index]
    mean = empty.index_add(0, index, rewards) / count
    return torch.where(differ(low, high)[index], rewards - mean[index], 0.0), index, count


def _group_index(group_ids: Sequence[str] | Tensor, device: torch.device) -> tuple[Tensor, int]:
    """Group labels as integers 0 … size-1, in order of first appearance."""
    labels = group_ids.tolist() if isinstance(group_ids, Tensor) else list(group_ids)
    order: dict[object, int] = {}
    index = torch.tensor([order.setdefault(g, len(order)) for g in labels], dtype=torch.long, device=device)
    return index, len(order)
