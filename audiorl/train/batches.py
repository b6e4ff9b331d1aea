"""What updates of every kind share: the sampled tokens of experiences, fields filled by a pass, and the refusal of what
is not finite before it reaches a weight.

Shapes: L tokens of an experience, N sampled tokens of a pack, Q codebooks where frames are among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from audiorl.algos.experience import Experience, PackedBatch, PolicyOutput
from audiorl.algos.packing import micro_batches, pack, pack_experiences, shared_groups
from audiorl.distributed.local import gpu_work
from audiorl.models import AudioPolicy, TrainedPolicy


def counts(experiences: Sequence[Experience]) -> list[int]:
    """Return the number of sampled tokens of each."""
    return [e.num_sampled for e in experiences]


def repeat_each(values: Sequence[float], lengths: Sequence[int]) -> Tensor:
    """Return each value repeated as often as its length says, [N]: float32, or int64 for whole numbers."""
    # A rank may have no experience of a mini-batch: without a dtype an empty list would become floats.
    return torch.repeat_interleave(torch.tensor(values), torch.tensor(lengths, dtype=torch.long))


def gather(experiences: Sequence[Experience], name: str) -> Tensor | None:
    """Return the sampled tokens' entries [N] of a field, in the order of the packed row; None where it is not filled.

    [N, Q] where one of them has entries for every codebook; a text token's stands in column 0.
    """
    streams = [getattr(e, name) for e in experiences]
    if any(s is None for s in streams):
        return None
    return torch.cat(widened([s[e.loss_mask] for s, e in zip(streams, experiences, strict=True)]))


def widened(streams: Sequence[Tensor]) -> list[Tensor]:
    """Return streams [L] packed with streams [L, Q]: all [L, Q], with zeros behind column 0."""
    width = max((s.shape[1] for s in streams if s.dim() == 2), default=0)
    return [s if s.dim() == 2 or not width else nn.functional.pad(s[:, None], (0, width - 1)) for s in streams]


def sum_codebooks(values: Tensor) -> Tensor:
    """Return log-probs [N] of tokens and frames from those of their codes [N, Q], independent given the past."""
    return values if values.dim() == 1 else values.sum(-1)


def logprobs_by_code(out: PolicyOutput) -> Tensor:
    """Return log-probs [N, Q] by code where the batch has frames, else [N]."""
    return out.logprobs if out.code_logprobs is None else out.code_logprobs


def idle_batch(policy: TrainedPolicy) -> PackedBatch:
    """Return a pass through `policy` that says nothing: one token after another, no audio."""
    assert isinstance(policy, AudioPolicy), "the optimizer of a flow is not sharded"
    end = policy.end_id
    return pack_experiences([Experience(torch.tensor([end, end]), torch.tensor([False, True]), prompt_length=1)])


@torch.no_grad()
def fill(
    experiences: Sequence[Experience],
    forward: Callable[[PackedBatch], Mapping[str, Tensor]],
    budget: int,
    share_prompts: bool,
) -> list[Experience]:
    """Return the experiences with the fields that `forward` gives, by name, for their sampled tokens; 0 elsewhere.

    [L] for experiences of text, [L, Q] for those with frames where `forward` gives [N, Q]; of flows `means` and
    `ref_means` of their noisy steps. Raises FloatingPointError naming the rollout where a value is not finite.
    """
    filled = list(experiences)
    for indices in micro_batches(experiences, budget, share_prompts):
        part = [experiences[i] for i in indices]
        with gpu_work():
            outputs = forward(pack_experiences(part, share_prompts))
        for name, given in outputs.items():
            flat = given.float().cpu()
            if name in ("means", "ref_means"):  # where the noisy steps of a flow lead, [F, D] each
                steps = flat.split([len(e.flow.states[1:].flatten(0, 1)) for e in part if e.flow is not None])
                for i, led in zip(indices, steps, strict=True):
                    path = filled[i].flow
                    assert path is not None
                    means: dict[str, Any] = {name: led.unflatten(0, (-1, path.states.shape[1]))}
                    filled[i] = filled[i].replace(flow=replace(path, **means))
                continue
            check_finite(part, flat, name)
            for i, values in zip(indices, flat.split(counts(part)), strict=True):
                if experiences[i].codes is None and values.dim() == 2:
                    values = values[:, 0]  # a text packed with frames: its log-probs are [L] in any other pack
                stream = torch.zeros(len(experiences[i]), *values.shape[1:])
                stream[experiences[i].loss_mask] = values
                filled[i] = filled[i].replace(**{name: stream})
    return filled


def group_packs(groups: Sequence[Sequence[Experience]], budget: int) -> list[list[int]]:
    """Return indices of groups in packs of at most `budget` row tokens; groups stay whole, a shared prompt counts
    once."""
    costs = []
    for group in groups:
        shared = shared_groups(group)
        costs.append(sum(s[0].prompt_length + sum(e.rows - e.prompt_length for e in s) for s in shared))
    return pack(costs, budget)


# -- refusing what is not finite ---------------------------------------------------------------------------------------


def check_finite(experiences: Sequence[Experience], flat: Tensor, what: str) -> None:
    """Raise FloatingPointError naming the first rollout whose entries of `flat` [N] or [N, Q] are not all finite."""
    if bool(flat.isfinite().all()):
        return
    for e, values in zip(experiences, flat.split(counts(experiences)), strict=True):
        bad = (~values.isfinite()).nonzero()
        if len(bad):
            at = bad[0].tolist()
            code = f", codebook {at[1]}" if len(at) > 1 and e.codes is not None else ""
            raise FloatingPointError(
                f"rollout {e.name}: {what} is {float(values[tuple(at)])} at its sampled token {at[0]}{code}; this "
                "update changed no weight, resume from the last checkpoint with a lower learning rate or a smaller clip"
            )


class PassMetrics:
    """What the passes of an update give. It stays on the device until `read`, so that the host waits once an update."""

    def __init__(self) -> None:
        self._passes: list[tuple[Sequence[Experience], Tensor, Tensor | None]] = []
        self._names: list[list[str]] = []
        self._numbers: list[Tensor] = []

    def add(
        self,
        experiences: Sequence[Experience],
        loss: Tensor,
        metrics: Mapping[str, Tensor],
        logprobs: Tensor | None = None,
    ) -> None:
        """Keep scalars by name of a pass, its loss, and the log-probs [N] or [N, Q] of all sampled tokens."""
        loss, logprobs = loss.detach(), None if logprobs is None else logprobs.detach()
        finite = loss.isfinite() if logprobs is None else loss.isfinite() & logprobs.isfinite().all()
        self._passes.append((experiences, loss, logprobs))
        self._names.append(list(metrics))
        self._numbers.append(torch.stack([x.detach().double() for x in (finite, *metrics.values())]))

    def read(self, *norms: Tensor) -> tuple[dict[str, float], list[float]]:
        """Return the sums of the metrics by name, and the `norms` of gradients, by one transfer.

        Raises FloatingPointError naming the rollouts of the first pass with a loss or log-prob that is not finite.
        """
        both = [*self._numbers, *(norm.detach().double().reshape(1) for norm in norms)]
        numbers = torch.cat(both).tolist() if both else []
        sums: dict[str, float] = defaultdict(float)
        at = 0
        for (experiences, loss, logprobs), names in zip(self._passes, self._names, strict=True):
            if not numbers[at]:
                if logprobs is not None:
                    check_finite(experiences, logprobs, "the log-prob")
                listed = ", ".join(e.name for e in experiences)
                raise FloatingPointError(f"the loss of {listed} is {float(loss)}; this update changed no weight")
            for name in names:
                at += 1
                sums[name] += numbers[at]
            at += 1
        return sums, numbers[at:]


def gradient_error(parameters: Mapping[str, nn.Parameter]) -> FloatingPointError:
    """Return the error of gradients whose norm is not finite."""
    bad = [n for n, p in parameters.items() if p.grad is not None and not bool(p.grad.isfinite().all())]
    what = f"the gradient of {bad[0]!r}" if bad else "the norm of the gradient"
    return FloatingPointError(f"{what} is not finite; this update changed no weight")


def check_weights(parameters: Mapping[str, nn.Parameter], lr: float) -> None:
    """Raise FloatingPointError after an update that made a weight not finite, before it is saved or sent."""
    with torch.no_grad():
        if bool(nn.utils.get_total_norm(list(parameters.values())).isfinite()):
            return
        bad = [name for name, p in parameters.items() if not bool(p.isfinite().all())]
    if bad:  # the norm of large finite weights can overflow
        raise FloatingPointError(
            f"the update made the weight {bad[0]!r} not finite (learning rate {lr:g}); resume from the last checkpoint "
            "with a lower learning rate"
        )
