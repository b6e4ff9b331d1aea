"""Workers in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class LocalGroup:
    """Calls methods of workers. `each` scatters one argument per worker, `all` gives every worker the same."""

    def __init__(self, workers: Sequence[Any]):
        if not workers:
            raise ValueError("a group needs at least one worker")
        self.workers = list(workers)

    @property
    def size(self) -> int:
        return len(self.workers)

    def each(self, method: str, shards: Sequence[Any]) -> list[Any]:
        if len(shards) != len(self.workers):
            raise ValueError(f"{len(shards)} shards for {len(self.workers)} workers")
        return [getattr(w, method)(shard) for w, shard in zip(self.workers, shards, strict=True)]

    def all(self, method: str, *args: Any) -> list[Any]:
        return [getattr(w, method)(*args) for w in self.workers]
