"""Workers in this process, and what all groups of workers have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Group(Protocol):
    """Workers whose methods are called together, wherever they are."""

    shared: bool
    """Whether the first worker's model is the driver's own."""

    @property
    def size(self) -> int: ...

    def each(self, method: str, shards: Sequence[Any]) -> list[Any]:
        """Call `method` of every worker with its own shard; the results by worker."""
        ...

    def all(self, method: str, *args: Any) -> list[Any]:
        """Call `method` of every worker with the same arguments; the results by worker."""
        ...

    def first(self, method: str, *args: Any) -> Any:
        """`all` for what every worker would answer alike: only the first one's answer travels."""
        ...

    def saved(self, where: str) -> None:
        """What the workers are now lies in the folder `where`, and `resume` brings one there."""
        ...


class LocalGroup:
    """Workers that share this process and its models."""

    shared = True

    def __init__(self, workers: Sequence[Any]):
        if not workers:
            raise ValueError("a group needs at least one worker")
        self.workers = list(workers)

    @property
    def size(self) -> int:
        return len(self.workers)

    def each(self, method: str, shards: Sequence[Any]) -> list[Any]:
        check_shards(shards, self.size)
        return [getattr(w, method)(shard) for w, shard in zip(self.workers, shards, strict=True)]

    def all(self, method: str, *args: Any) -> list[Any]:
        return [getattr(w, method)(*args) for w in self.workers]

    def first(self, method: str, *args: Any) -> Any:
        return self.all(method, *args)[0]

    def saved(self, where: str) -> None:
        pass


Make = Callable[..., Any]
"""Makes a worker. Where workers are in other processes it travels there with its arguments: a function of a module."""


def check_shards(shards: Sequence[Any], size: int) -> None:
    if len(shards) != size:
        raise ValueError(f"{len(shards)} shards for {size} workers")
