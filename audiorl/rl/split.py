"""One step's experiences divided among processes: whole groups, about equally many tokens each."""

from __future__ import annotations

from collections.abc import Sequence

from audiorl.algos.packing import balance
from audiorl.config import RLConfig
from audiorl.rl.trainer import TrainBatch, TrainOutput, in_order
from audiorl.runtime.local import Group
from audiorl.types import Experience


def split_batch(
    experiences: Sequence[Experience], supervised: Sequence[Experience], trainers: Group, config: RLConfig
) -> tuple[list[TrainBatch], list[list[int]]]:
    """A batch for each trainer, and the indices of its experiences. Mini-batches are those of the whole step."""
    shares = split_groups(experiences, trainers.size)
    mini_batches = in_order(len(experiences), config.mini_batches)
    batches = [
        TrainBatch([experiences[i] for i in share], supervised[rank :: trainers.size], [mini_batches[i] for i in share])
        for rank, share in enumerate(shares)
    ]
    return batches, shares


def split_groups(experiences: Sequence[Experience], ranks: int) -> list[list[int]]:
    """Indices of experiences by rank: whole groups, about equally many tokens each."""
    groups: dict[str, list[int]] = {}
    for i, e in enumerate(experiences):
        groups.setdefault(e.group_id, []).append(i)
    members = list(groups.values())
    shares = balance([sum(len(experiences[i]) for i in group) for group in members], ranks)
    return [[i for g in share for i in members[g]] for share in shares]


def mean_advantages(outputs: Sequence[TrainOutput], shares: Sequence[Sequence[int]]) -> list[float]:
    """The mean advantage of every experience of the step, in order, from the outputs of all trainers."""
    by_index = {
        i: advantage
        for output, share in zip(outputs, shares, strict=True)
        for i, advantage in zip(share, output.advantages, strict=True)
    }
    return [by_index[i] for i in range(len(by_index))]


def add_ref_logprobs(experiences: Sequence[Experience], references: Group | None) -> list[Experience]:
    """Fill in `ref_logprobs` where processes of their own hold the reference, each for a part; else trainers do it."""
    out = list(experiences)
    if references is None:
        return out
    shares = split_groups(out, references.size)
    answers = references.each("logprobs", [[out[i] for i in share] for share in shares])
    for share, logprobs in zip(shares, answers, strict=True):
        for i, ref_logprobs in zip(share, logprobs, strict=True):
            out[i] = out[i].replace(ref_logprobs=ref_logprobs)
    return out
