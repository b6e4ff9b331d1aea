from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from audiorl.types import Rollout, Sample, Segment


@pytest.fixture
def make_rollout() -> Callable[..., Rollout]:
    """make_rollout(text, references=…, choices=…, **metadata): one segment per text given."""

    def make(
        *texts: str,
        references: tuple[str, ...] = (),
        choices: tuple[str, ...] = (),
        id: str = "clip-7",
        tokens: int = 2,
        **metadata: Any,
    ) -> Rollout:
        sample = Sample(id=id, messages=(), references=references, choices=choices, metadata=metadata)
        segments = tuple(
            Segment(prompt_ids=torch.arange(3), ids=torch.arange(tokens), logprobs=torch.zeros(tokens), text=text)
            for text in texts
        )
        return Rollout(sample=sample, segments=segments, group_id="g")

    return make
