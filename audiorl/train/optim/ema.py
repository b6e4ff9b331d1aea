"""An exponential moving average of trained weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from audiorl.run.pieces import read_shape


class EMA:
    """average ← decay · average + (1 - decay) · weight after each update, in float32; begins as the weights are."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float):
        self._parameters = dict(parameters)
        self._decay = decay
        self._average = {name: p.detach().float().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, p in self._parameters.items():
            self._average[name].lerp_(p.float(), 1 - self._decay)

    def state(self) -> dict[str, Tensor]:
        return dict(self._average)

    def load(self, state: Mapping[str, Tensor], where: str) -> None:
        if {n: read_shape(state, n) for n in state} != {n: tuple(t.shape) for n, t in self._average.items()}:
            raise ValueError(f"{where}: its moving average is of another architecture")
        self._average = {name: state[name].to(t.device).clone() for name, t in self._average.items()}
