"""No loss and no advantage broadcasts: tensors of two shapes are an error that names both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from audiorl.algos import advantages, experimental, losses
from audiorl.algos.losses import kl_estimate

N, Q = 3, 3  # equal, so that [N] - [N, Q] would broadcast without an error


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (kl_estimate, 2),
        (losses.LossInputs, 5),
        (losses.tis_weights, 2),
        (losses.value_loss, 4),
        (experimental.remax, 2),
        (partial(advantages.time_index_relative, group_ids=["a"] * N), 2),
        (partial(advantages.step_index_relative, group_ids=["a"] * N), 3),
        (partial(advantages.process_relative, group_ids=["a"] * N), 3),
        (advantages.gae, 3),
        (advantages.reinforce_returns, 2),
        (advantages.whiten, 2),
    ],
)
def test_one_input_of_another_shape_is_refused(function: Callable[..., Any], inputs: int) -> None:
    for odd in range(inputs):
        tensors = [torch.zeros(N, Q) if i == odd else torch.zeros(N) for i in range(inputs)]
        with pytest.raises(ValueError, match=r"shapes differ: .*\[3, 3\]"):
            function(*tensors)


def test_rewards_of_a_group_are_a_vector() -> None:
    for function in (advantages.group_relative, advantages.rloo):
        with pytest.raises(ValueError, match=r"rewards of shape \[3, 3\]"):
            function(torch.zeros(3, 3), ["a"] * 3)
