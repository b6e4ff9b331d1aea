"""What the processes of test_sync.py do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from audiorl.rollout.weight_transfer import Backend, SyncError, WeightReceiver, WeightSender


def weights(version: int) -> dict[str, Tensor]:
    """Several types, an odd number of bytes, a scalar, nothing at all, and a view that is not contiguous."""
    g = torch.Generator().manual_seed(version)
    return {
        "flags": torch.randint(0, 2, (7,), generator=g, dtype=torch.int8),
        "embed": torch.randn(40, 9, generator=g),
        "half": torch.randn(5, 3, generator=g).bfloat16(),
        "transposed": torch.randn(6, 4, generator=g).t(),
        "scalar": torch.tensor(version + 0.5),
        "empty": torch.zeros(0, 4),
        "double": torch.randn(3, generator=g, dtype=torch.float64),
    }


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return list(a) == list(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


class Taker:
    """An engine that knows some names."""

    policy_version = 0

    def __init__(self, names: set[str]):
        self.names = names
        self.got: dict[str, Tensor] = {}

    def update_weights(self, weights: Any, version: int) -> None:
        self.got = {}
        for name, tensor in weights:
            if name not in self.names:
                raise ValueError(f"weight {name!r} is not in this model")
            self.got[name] = tensor
        self.policy_version = version

    def generate(self, requests: Any) -> list[Any]:
        return []


def receive(
    address: str,
    number: int,
    receivers: int,
    rounds: int,
    timeout: float,
    names: set[str],
    out: Any,
    backend: Backend = "gloo",
) -> None:
    """Takes weights and reports, per round, whether they are those of the round, or what went wrong."""
    try:
        receiver = WeightReceiver(address, number, receivers, timeout=timeout, backend=backend)
        engine = Taker(names)
        for version in range(rounds):
            receiver.update(engine.update_weights, version)
            out.put((number, same(engine.got, weights(version))))
    except (SyncError, ValueError) as error:
        out.put((number, f"{type(error).__name__}: {error}"))


def die_while_receiving(address: str, number: int, receivers: int, timeout: float, backend: Backend) -> None:
    for _ in WeightReceiver(address, number, receivers, timeout=timeout, backend=backend).weights():
        os._exit(3)


def die_while_sending(receivers: int, timeout: float, backend: Backend, out: Any) -> None:
    sender = WeightSender(receivers, timeout=timeout, backend=backend)
    out.put(sender.address)

    def some() -> Any:
        yield "first", torch.zeros(2**24)
        yield "second", torch.zeros(2**24)
        os._exit(3)

    sender.send(some())
