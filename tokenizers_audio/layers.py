"""Layers that process their input piece by piece and give exactly what they give for all of it at once.

A `Layer` keeps only the inputs that later outputs still need: no recomputation, no seams, state that does not grow.
Look-ahead takes care of itself, since a layer simply gives fewer outputs until it has received enough. Results equal
the whole-input ones up to the rounding of differently shaped products.

Shapes: [B, C, T] as in torch's convolutions; any T, also 0. An output without a time step may have any C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(Protocol):
    def push(self, x: Tensor) -> Tensor:
        """More input [B, C, T] -> the outputs [B, C', T'] that nothing later can change."""
        ...

    def finish(self) -> Tensor:
        """Return the remaining outputs, after the last input; at least one push must have come before. Then as new."""
        ...


def join(before: Tensor | None, after: Tensor) -> Tensor:
    """Laid end to end."""
    if before is None or before.shape[-1] == 0:
        return after
    return before if after.shape[-1] == 0 else torch.cat([before, after], -1)


def rest(x: Tensor, start: int) -> Tensor:
    """x from `start` on, as a copy: a view would keep all of x alive."""
    return x[..., max(0, start) :].clone()


class Chain:
    """One layer after the other."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers

    def push(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.push(x)
            if x.shape[-1] == 0:
                break
        return x

    def finish(self) -> Tensor:
        x = self.layers[0].finish()
        for layer in self.layers[1:]:
            x = join(layer.push(x), layer.finish())
        return x


class Pointwise:
    """A function of each time step by itself that keeps the channels."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function
        self.empty: Tensor | None = None

    def push(self, x: Tensor) -> Tensor:
        self.empty = rest(x, x.shape[-1])
        return self.function(x) if x.shape[-1] else x

    def finish(self) -> Tensor:
        assert self.empty is not None
        return self.empty


class Residual:
    """body(x) + skip(x); the shorter way waits for the longer one."""

    def __init__(self, body: Layer, skip: Layer) -> None:
        self.ways = (body, skip)
        self.waiting: list[Tensor | None] = [None, None]

    def push(self, x: Tensor) -> Tensor:
        return self._sum([way.push(x) for way in self.ways])

    def finish(self) -> Tensor:
        total = self._sum([way.finish() for way in self.ways])
        assert all(left is not None and left.shape[-1] == 0 for left in self.waiting), "ways of different length"
        self.waiting = [None, None]
        return total

    def _sum(self, new: list[Tensor]) -> Tensor:
        body, skip = (join(old, x) for old, x in zip(self.waiting, new, strict=True))
        ready = min(body.shape[-1], skip.shape[-1])
        self.waiting = [rest(body, ready), rest(skip, ready)]
        return skip[..., :ready] + body[..., :ready] if ready else skip[..., :0]


class Frames:
    """Passes on whole frames of `hop` samples. `fill` completes the last one with silence; else it stays short."""

    def __init__(self, hop: int, fill: bool) -> None:
        self.hop, self.fill = hop, fill
        self.buffer: Tensor | None = None

    def push(self, x: Tensor) -> Tensor:
        x = join(self.buffer, x)
        ready = x.shape[-1] // self.hop * self.hop
        self.buffer = rest(x, ready)
        return x[..., :ready]

    def finish(self) -> Tensor:
        assert self.buffer is not None
        last, self.buffer = self.buffer, None
        return F.pad(last, (0, -last.shape[-1] % self.hop)) if self.fill else last


class Conv:
    """A convolution with padding `left` and `right`; with `complete`, right padding also fills its last stride.

    `mode` is constant (zeros), replicate or reflect, as in torch.nn.functional.pad. Where an input is too short to be
    reflected it is first lengthened with zeros, which are cut off again after the reflection (as Encodec does).
    """

    def __init__(self, conv: nn.Conv1d, left: int, right: int, mode: str = "constant", complete: bool = False) -> None:
        self.weight, self.bias = conv.weight.detach(), conv.bias  # a parametrised weight is computed here, once
        self.stride, self.dilation, self.groups = conv.stride[0], conv.dilation[0], conv.groups
        self.span = (conv.kernel_size[0] - 1) * self.dilation + 1
        assert self.span >= self.stride, "inputs between two outputs' windows"
        self.left, self.right, self.mode, self.complete = left, right, mode, complete
        longest = max(left, right + (self.stride - 1 if complete else 0))
        self.needed = {"constant": 0, "replicate": 1, "reflect": longest + 1}[mode]
        self._reset()

    def _reset(self) -> None:
        self.buffer: Tensor | None = None
        self.last: Tensor | None = None  # what padding at the end is made of
        self.received = 0
        self.started = False

    def push(self, x: Tensor) -> Tensor:
        self.received += x.shape[-1]
        self.buffer = join(self.buffer, x)
        last = join(self.last, x)
        self.last = rest(last, last.shape[-1] - self.needed)
        if not self.started:
            if self.received < self.needed:
                return self._outputs(self.buffer[..., :0])
            self.buffer = self._pad(self.buffer, self.left, 0)
            self.started = True
        outputs = self._outputs(self.buffer)
        self.buffer = rest(self.buffer, outputs.shape[-1] * self.stride)
        return outputs

    def finish(self) -> Tensor:
        assert self.buffer is not None and self.last is not None
        right = self.right + (-self.received % self.stride if self.complete else 0)
        if self.started:
            padding = F.pad(self.last, (0, right), mode=self.mode)[..., self.last.shape[-1] :]
            outputs = self._outputs(join(self.buffer, padding))
        else:
            outputs = self._outputs(self._pad(self.buffer, self.left, right))
        self._reset()
        return outputs

    def _pad(self, x: Tensor, left: int, right: int) -> Tensor:
        if self.mode != "reflect" or x.shape[-1] > max(left, right):
            return F.pad(x, (left, right), mode=self.mode)
        short = max(left, right) - x.shape[-1] + 1
        padded = F.pad(F.pad(x, (0, short)), (left, right), mode="reflect")
        return padded[..., : padded.shape[-1] - short]

    def _count(self, x: Tensor) -> int:
        return max(0, (x.shape[-1] - self.span) // self.stride + 1)

    def _outputs(self, x: Tensor) -> Tensor:
        if self._count(x) == 0:
            return x.new_zeros(x.shape[0], self.weight.shape[0], 0)
        return F.conv1d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class TransposedConv:
    """A transposed convolution without padding whose first `left` and last `right` outputs are cut off."""

    def __init__(self, conv: nn.ConvTranspose1d, left: int, right: int) -> None:
        self.weight, self.bias = conv.weight.detach(), conv.bias
        self.stride, self.groups, self.kernel = conv.stride[0], conv.groups, conv.kernel_size[0]
        self.overlap = self.kernel - self.stride  # outputs that reach into what the next input adds to
        assert conv.dilation[0] == 1 and 0 <= right <= self.overlap
        self.left, self.right = left, right
        self._reset()

    def _reset(self) -> None:
        self.context: Tensor | None = None  # the inputs that later outputs still depend on
        self.cut = self.left

    def push(self, x: Tensor) -> Tensor:
        carried = 0 if self.context is None else self.context.shape[-1]
        x = join(self.context, x)
        new = x.shape[-1] - carried
        self.context = rest(x, x.shape[-1] - (self.kernel - 1) // self.stride)
        return self._cut_left(self._outputs(x)[..., carried * self.stride : (carried + new) * self.stride])

    def finish(self) -> Tensor:
        assert self.context is not None
        outputs = self._outputs(self.context)
        outputs = outputs[..., self.context.shape[-1] * self.stride : outputs.shape[-1] - self.right]
        outputs = self._cut_left(outputs)
        self._reset()
        return outputs

    def _cut_left(self, x: Tensor) -> Tensor:
        cut = min(self.cut, x.shape[-1])
        self.cut -= cut
        return x[..., cut:]

    def _outputs(self, x: Tensor) -> Tensor:
        if x.shape[-1] == 0:
            return x.new_zeros(x.shape[0], self.weight.shape[1] * self.groups, 0)
        return F.conv_transpose1d(x, self.weight, self.bias, self.stride, 0, 0, self.groups)


class Lstm:
    """x + lstm(x), forward in time."""

    def __init__(self, lstm: nn.LSTM) -> None:
        self.lstm = lstm
        self.state: Any = None
        self.empty: Tensor | None = None

    def push(self, x: Tensor) -> Tensor:
        self.empty = rest(x, x.shape[-1])
        if x.shape[-1] == 0:
            return x
        steps = x.permute(2, 0, 1)
        outputs, self.state = self.lstm(steps, self.state)
        return (outputs + steps).permute(1, 2, 0)

    def finish(self) -> Tensor:
        assert self.empty is not None
        self.state = None
        return self.empty
