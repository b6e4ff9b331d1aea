"""Refusing what is not finite before it reaches a weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from audiorl.algos.experience import Experience


def check_finite(experiences: Sequence[Experience], flat: Tensor, what: str) -> None:
    """Raise FloatingPointError naming the first rollout whose entries of `flat` [N] or [N, Q] are not all finite."""
    if bool(flat.isfinite().all()):
        return
    for e, values in zip(experiences, flat.split([e.num_sampled for e in experiences]), strict=True):
        bad = (~values.isfinite()).nonzero()
        if len(bad):
            at = bad[0].tolist()
            code = f", codebook {at[1]}" if len(at) > 1 and e.codes is not None else ""
            raise FloatingPointError(
                f"rollout {e.name}: {what} is {float(values[tuple(at)])} at its sampled token {at[0]}{code}; this "
                "update changed no weight, resume from the last checkpoint with a lower learning rate or a smaller clip"
            )


def check_loss(experiences: Sequence[Experience], loss: Tensor) -> None:
    """Raise FloatingPointError naming the rollouts of a pack whose loss is not finite."""
    if not bool(loss.isfinite()):
        names = ", ".join(e.name for e in experiences)
        raise FloatingPointError(f"the loss of {names} is {float(loss)}; this update changed no weight")


def read_pass(
    experiences: Sequence[Experience], loss: Tensor, metrics: Mapping[str, Tensor], logprobs: Tensor | None = None
) -> dict[str, float]:
    """Return the metrics of a pass as numbers, by one transfer: the host waits for the device once in a micro-batch.

    metrics: scalars by name. logprobs: [N] or [N, Q], of all sampled tokens. Raises FloatingPointError where `loss` or
    one of `logprobs` is not finite.
    """
    finite = [loss.isfinite()] if logprobs is None else [loss.isfinite(), logprobs.isfinite().all()]
    scalars = [x.detach().double() for x in (*finite, *metrics.values())]
    numbers = torch.stack(scalars).tolist()
    if not all(numbers[: len(finite)]):
        if logprobs is not None:
            check_finite(experiences, logprobs.detach(), "the log-prob")
        check_loss(experiences, loss.detach())
    return dict(zip(metrics, numbers[len(finite) :], strict=True))


def check_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise FloatingPointError naming a parameter whose gradient is not finite."""
    if not bool(torch.nn.utils.get_total_norm([p.grad for p in parameters.values() if p.grad is not None]).isfinite()):
        bad = [n for n, p in parameters.items() if p.grad is not None and not bool(p.grad.isfinite().all())]
        what = f"the gradient of {bad[0]!r}" if bad else "the gradient's norm"
        raise FloatingPointError(f"{what} is not finite; this update changed no weight")


def check_weights(parameters: Mapping[str, nn.Parameter], lr: float) -> None:
    """After an update: raise FloatingPointError naming a weight that is not finite, before it is saved or sent."""
    with torch.no_grad():
        if bool(torch.nn.utils.get_total_norm(list(parameters.values())).isfinite()):
            return
        bad = [name for name, p in parameters.items() if not bool(p.isfinite().all())]
    if bad:  # the norm of large finite weights can overflow
        raise FloatingPointError(
            f"the update made the weight {bad[0]!r} not finite (learning rate {lr:g}); resume from the last checkpoint "
            "with a lower learning rate"
        )
