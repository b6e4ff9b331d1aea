from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from audiorl.data.manifest import Loaded
from audiorl.data.rows import BadRow
from audiorl.protocols import Request
from audiorl.types import Rollout, Sample, Segment

ROOT = Path(__file__).parents[3]


@dataclass
class ScriptedEngine:
    """An engine that answers each sample with a fixed text and remembers what it was asked."""

    texts: Mapping[str, str]
    asked: list[str] = field(default_factory=list)
    fail_after: int | None = None
    policy_version: int = 0

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        if self.fail_after is not None and len(self.asked) >= self.fail_after:
            raise KeyboardInterrupt
        self.asked += [r.sample.id for r in requests]
        return [self._answer(r.sample) for r in requests]

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        raise NotImplementedError

    def _answer(self, sample: Sample) -> Rollout:
        text = self.texts[sample.id]
        ids = torch.arange(len(text) + 1)
        segment = Segment(prompt_ids=torch.arange(3), ids=ids, logprobs=torch.zeros(len(ids)), text=text)
        return Rollout(sample=sample, segments=(segment,), group_id=sample.id)


@pytest.fixture
def scripted() -> type[ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture
def manifest(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """manifest(samples, skipped=…): what the next read_samples returns."""

    def use(samples: Sequence[Sample], skipped: Sequence[str] = ()) -> None:
        rows = tuple(BadRow("test.jsonl", i, "audio", why) for i, why in enumerate(skipped, 1))
        loaded = Loaded(tuple(samples), rows, "test.jsonl")
        monkeypatch.setattr("audiorl.data.manifest.read_samples", lambda path, **options: loaded)

    return use
