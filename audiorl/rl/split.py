"""One step's experiences divided among processes: whole groups, about equally many tokens each."""

from __future__ import annotations

from collections.abc import Sequence

from audiorl.algos.packing import balance
from audiorl.config import RLConfig
from audiorl.rl.trainer import TrainBatch, TrainOutput, in_order
from audiorl.runtime.local import Group
from audiorl.types import Experience


def split_batch(
    experiences: Sequence[Experience],
    supervised: Sequence[Experience],
    trainers: Group,
    config: RLConfig,
    answers: Sequence[Experience] = (),
) -> tuple[list[TrainBatch], list[list[int]]]:
    """A batch for each trainer, and the indices of its experiences. Mini-batches are those of the whole step."""
    shares = split_groups(experiences, trainers.size)
    mini_batches = in_order(len(experiences), config.mini_batches)
    batches = [
        TrainBatch(
            [experiences[i] for i in share],
            supervised[rank :: trainers.size],
            [mini_batches[i] for i in share],
            answers[rank :: trainers.size],
        )
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


def add_from_references(
    experiences: Sequence[Experience], references: Group | None, config: RLConfig
) -> list[Experience]:
    """Fill in `ref_logprobs` and `teacher` where processes of their own hold these models, each for a part.

    Without such processes the trainers fill them in.
    """
    out = list(experiences)
    if references is None:
        return out
    shares = split_groups(out, references.size)
    wanted = {"ref_logprobs": config.kl_beta > 0, "teacher": config.distill.from_reference_process}
    for field in (name for name, needed in wanted.items() if needed):
        answers = references.each(field, [[out[i] for i in share] for share in shares])
        for share, values in zip(shares, answers, strict=True):
            for i, value in zip(share, values, strict=True):
                out[i] = out[i].replace(**{field: value})
    return out
