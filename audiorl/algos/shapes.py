"""Refusing tensors that would broadcast: a loss over wrong shapes is a wrong number, not an error."""

from __future__ import annotations

from torch import Tensor


def check_shapes(function: str, **tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors have one shape; None is an input that is not given."""
    shapes = {name: list(t.shape) for name, t in tensors.items() if t is not None}
    if any(shape != next(iter(shapes.values())) for shape in shapes.values()):
        raise ValueError(f"{function}: shapes differ: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
