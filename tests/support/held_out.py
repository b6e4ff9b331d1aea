"""Held-out evaluation by an engine and by the policy, compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from audiorl.protocols import Ended, Request, RolloutEngine
from audiorl.types import Rollout


@dataclass
class Spy:
    """An engine that notes what another one is asked and answers."""

    engine: RolloutEngine
    requests: list[Request] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)

    def generate(self, requests: Sequence[Request], ended: Ended | None = None) -> list[Rollout]:
        self.requests += requests
        self.rollouts += self.engine.generate(requests, ended)
        return self.rollouts[-len(requests) :]


@dataclass
class Compared:
    """Evaluates both ways, and demands the same."""

    probe: Any
    spies: list[Spy] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def max_new_tokens(self) -> int:
        return self.probe.max_new_tokens

    def __call__(self) -> Mapping[str, float]:
        raise AssertionError("the run has an engine")

    def by_engine(self, engine: RolloutEngine, several: int, note: Any) -> Mapping[str, float]:
        self.spies.append(Spy(engine))
        metrics = self.probe.by_engine(self.spies[-1], 2, self.notes.append)
        assert metrics == self.probe()
        return metrics
