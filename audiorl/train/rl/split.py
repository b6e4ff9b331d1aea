"""One step's experiences divided among processes: whole groups, about equally many tokens each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from audiorl.algos.experience import Experience
from audiorl.algos.packing import balance
from audiorl.config import RLConfig
from audiorl.distributed.local import Group
from audiorl.train.rl.packs import in_order
from audiorl.train.rl.token_record import TokenNumbers
from audiorl.train.rl.trainer import TrainBatch, TrainOutput

T = TypeVar("T")


def split_batch(
    experiences: Sequence[Experience],
    supervised: Sequence[Experience],
    trainers: Group,
    config: RLConfig,
    answers: Sequence[Experience] = (),
    record_tokens: bool = False,
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
            record_tokens,
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
    return _in_order([output.advantages for output in outputs], shares)


def token_numbers(outputs: Sequence[TrainOutput], shares: Sequence[Sequence[int]]) -> list[TokenNumbers]:
    """Likewise the numbers of its tokens, from batches with `record_tokens`."""
    return _in_order([output.tokens for output in outputs], shares)


def _in_order(values: Sequence[Sequence[T]], shares: Sequence[Sequence[int]]) -> list[T]:
    by_index = {
        i: value for of_rank, share in zip(values, shares, strict=True) for i, value in zip(share, of_rank, strict=True)
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
    wanted = {"ref_logprobs": config.kl_beta > 0, "teacher": config.distill.from_reference_process}
    for field in (name for name, needed in wanted.items() if needed):
        out = _filled_by(references, field, out)
    return out


def add_from_critics(experiences: Sequence[Experience], critics: Group | None) -> list[Experience]:
    """Fill in `values` where processes of their own hold the critic; else the trainers do."""
    return list(experiences) if critics is None else _filled_by(critics, "values", experiences)


def update_critics(
    experiences: Sequence[Experience],
    outputs: Sequence[TrainOutput],
    shares: Sequence[Sequence[int]],
    critics: Group,
    config: RLConfig,
) -> dict[str, float]:
    """After the trainers' step: update critics in processes of their own towards the returns of its `outputs`.

    `experiences` have `values`. Returns the critic's metrics.
    """
    returns = _in_order([output.returns for output in outputs], shares)
    with_returns = [e.replace(returns=stream) for e, stream in zip(experiences, returns, strict=True)]
    batches, _ = split_batch(with_returns, [], critics, config)
    metrics: dict[str, float] = critics.each("update", batches)[0]
    return metrics


def _filled_by(group: Group, field: str, experiences: Sequence[Experience]) -> list[Experience]:
    """The experiences with what the workers' method of the name `field` gives, each worker for a part."""
    out = list(experiences)
    shares = split_groups(out, group.size)
    answers = group.each(field, [[out[i] for i in share] for share in shares])
    for share, values in zip(shares, answers, strict=True):
        for i, value in zip(share, values, strict=True):
            out[i] = out[i].replace(**{field: value})
    return out
