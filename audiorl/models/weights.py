"""Weights by name: copied into a model in place, and checked against it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Named tensors: all at once, or one after the other as they arrive."""


def named(weights: Weights) -> Iterable[tuple[str, Tensor]]:
    return weights.items() if isinstance(weights, Mapping) else weights


def check_weight(name: str, tensor: Tensor, parameters: Mapping[str, Tensor], where: str) -> None:
    """Raise ValueError unless `parameters`, those of a model, have one of this name and shape."""
    if name not in parameters:
        raise ValueError(f"{where}: weight {name!r} is not in this model; was it saved by another one?")
    if parameters[name].shape != tensor.shape:
        shapes = f"{tuple(tensor.shape)} there, {tuple(parameters[name].shape)} here"
        raise ValueError(f"{where}: weight {name!r} has another shape ({shapes}): another architecture")


@torch.no_grad()
def copy_weights(parameters: Mapping[str, Tensor], weights: Weights, where: str) -> None:
    """Copy `weights` into the `parameters` of the same name. Raises ValueError for one that does not fit.

    A mapping is checked as a whole before anything is copied.
    """
    if isinstance(weights, Mapping):
        for name, tensor in weights.items():
            check_weight(name, tensor, parameters, where)
    for name, tensor in named(weights):
        check_weight(name, tensor, parameters, where)
        if parameters[name].data_ptr() != tensor.data_ptr():
            parameters[name].copy_(tensor)
