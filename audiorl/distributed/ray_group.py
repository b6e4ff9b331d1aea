"""Groups of workers in a Ray cluster's processes: calls them, and replaces the processes that die.

The trainers form one torch process group, and critics another; engines and references belong to none. When a process
dies, a new one makes the worker again, and the group repeats the calls that changed it since the last checkpoint
(`changes_worker`, `replaces_worker`). All trainers, or all critics, are replaced together, because a process group does
not survive the death of a rank. A step depends on (seed, step) and the weights only, so the repeated steps are the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from audiorl.config.distributed import current
from audiorl.distributed.local import Group, MakeWorker, R, Shard, StateEffect
from audiorl.distributed.ray_cluster import Role, WorkerFailure, connected_cluster, import_ray
from audiorl.distributed.torchrun import RankError

COLLECTIVE_ROLES: tuple[Role, ...] = ("trainer", "critic")
"""Whose processes form a process group: they are started and replaced together."""

START_TIMEOUT_SECONDS = 600.0
"""For a process to start: it imports torch and transformers, perhaps from a slow disk."""
DEATH_NOTICE_SECONDS = 10.0
"""After a rank's collective failed: how long to look for the death of another rank that caused it."""


class _Died(Exception):
    """Processes of a group died."""

    def __init__(self, ranks: Sequence[int], reason: str):
        super().__init__(reason)
        self.ranks = tuple(ranks)


class RayGroup(Group):
    """A worker in each of the run's processes of one role, made by `make(*args)`; the role's earlier group ends."""

    shared = False

    def __init__(self, role: Role, make: MakeWorker, *args: Any):
        self._cluster = connected_cluster()
        self._role: Role = role
        self._collective = role in COLLECTIVE_ROLES
        self._indices = self._cluster.indices(role)
        self.size = len(self._indices)
        self._make_args = (current(), torch.get_num_threads(), make, *args)
        self._ready: set[int] = set()
        self._effects: dict[str, StateEffect] = {}
        self._replay: list[tuple[str, Sequence[tuple[Any, ...]]]] = []  # calls that a new worker must repeat
        self._replay_after_save = 0  # from here on also when the checkpoint that is being written is complete

    def each(
        self, method: Callable[[Any, Shard], R], shards: Sequence[Shard], arrived: Callable[[R], None] | None = None
    ) -> list[R]:
        """Call as every group does. `arrived` gets each worker's result when it is there, again when it is repeated."""

        def receive(reference: Any) -> Any:
            result = import_ray().get(reference)
            if arrived is not None:
                arrived(result)
            return result

        assert len(shards) == self.size, f"{len(shards)} shards for {self.size} workers"
        return self._call(method.__name__, [(shard,) for shard in shards], receive=receive)

    def cpu_seconds(self) -> list[float | None]:
        return self._cluster.cpu_seconds(self._indices)

    def saving(self) -> None:
        self._replay_after_save = len(self._replay)

    def saved(self, where: str) -> None:
        self._replay = [("resume", [(where,)] * self.size), *self._replay[self._replay_after_save :]]

    def pids(self) -> list[int]:
        """Return the processes' ids on their nodes."""
        return import_ray().get([self._cluster.process(index).pid.remote() for index in self._indices])

    # -- calls and failures ----------------------------------------------------------------------------------------

    def _call(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        answer: bool = True,
        receive: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        """Call `method` of every rank until all have answered, replacing the processes that die.

        receive: what is done with Ray's reference of a result; by default it is fetched.
        """
        get = import_ray().get
        results: dict[int, Any] = {}
        if not answer:
            return [get(self._call(method, arguments, receive=lambda reference: reference)[0])]
        receive = receive or get
        while len(results) < self.size:
            try:
                self._prepare()
                self._ask(method, {r: a for r, a in enumerate(arguments) if r not in results}, receive, results)
            except _Died as death:
                if self._collective:
                    self._end()
                    results.clear()
                for rank in death.ranks:
                    self._cluster.kill(self._indices[rank])
                    self._ready.discard(rank)
                self._cluster.count_restart(self._name(death.ranks), str(death))
        effect = self._effects.get(method)
        if effect == "replaces":
            self._replay.clear()
        if effect:
            self._replay.append((method, list(arguments)))
        return [results[rank] for rank in range(self.size)]

    def _prepare(self) -> None:
        """Make the missing workers and repeat the calls that changed their predecessors."""
        missing = [rank for rank in range(self.size) if rank not in self._ready]
        if not missing:
            return
        if self._collective:
            missing = list(range(self.size))
        started = {self._process(rank).started.remote(): rank for rank in missing}
        self._wait(started, within=START_TIMEOUT_SECONDS)
        if self._collective:  # they join one process group
            store = self._process(0).open_store.options(num_returns=2).remote()
            self._wait({store[0]: 0})
            address = import_ray().get(store[1])
            self._wait({self._process(r).join.remote(r, self.size, *address): r for r in missing})
        made = {r: self._process(r).make.options(num_returns=2).remote(*self._make_args) for r in missing}
        self._wait({failure: rank for rank, (failure, _) in made.items()})
        self._effects = import_ray().get(made[missing[0]][1])
        for method, arguments in self._replay:
            self._ask(method, {r: arguments[r] for r in missing}, lambda reference: None, {})
        self._ready.update(missing)

    def _ask(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        receive: Callable[[Any], Any],
        results: dict[int, Any],
    ) -> None:
        """Call a method of the ranks in `arguments`; fills `results` by rank as the answers arrive."""
        answers = {r: self._process(r).call.options(num_returns=2).remote(method, *a) for r, a in arguments.items()}

        def arrived(rank: int) -> None:
            results[rank] = receive(answers[rank][1])

        self._wait({failure: rank for rank, (failure, _) in answers.items()}, arrived)

    def _wait(
        self, pending: dict[Any, int], arrived: Callable[[int], None] = lambda rank: None, within: float | None = None
    ) -> None:
        """Wait until every rank of `pending` (Ray reference to rank) has answered.

        Raises RankError for what a worker raised, or when no answer comes for `within` seconds; _Died when processes
        died.
        """
        ray = import_ray()
        dead: dict[int, str] = {}
        while pending:
            answered, _ = ray.wait(list(pending), num_returns=1, timeout=within)
            if not answered:
                self._end()
                raise RankError(f"{self._name(list(pending.values()))} did not start within {within:g} s")
            reference = answered[0]
            rank = pending.pop(reference)
            try:
                failure = ray.get(reference)
                if failure is None:
                    arrived(rank)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                said = f"{type(cause or error).__name__}: {_reason(error)}"
                failure = WorkerFailure(said, isinstance(cause, RuntimeError))
            except ray.exceptions.RayError as error:
                dead[rank] = _reason(error)
                failure = None
            if failure is not None:
                self._fail(rank, failure)
            if dead and self._collective:
                break  # the other ranks never answer: they wait for the dead one in a collective
        if dead:
            raise _Died(list(dead), next(iter(dead.values())))

    def _fail(self, rank: int, failure: WorkerFailure) -> None:
        """Stop the run for what a worker raised. Raises _Died instead if another rank's death was the cause."""
        ray = import_ray()
        if failure.maybe_secondary and self._collective:
            pids = {self._process(r).pid.remote(): r for r in range(self.size) if r != rank}
            for pid in ray.wait(list(pids), num_returns=len(pids), timeout=DEATH_NOTICE_SECONDS)[0] if pids else []:
                try:
                    ray.get(pid)
                except ray.exceptions.RayError as error:
                    raise _Died([pids[pid]], _reason(error)) from error
        self._end()  # the other ranks wait for this one in a collective that it will not join
        raise RankError(f"{self._name([rank])}: {failure.message}; the run stopped, resume it from the last checkpoint")

    def _end(self) -> None:
        for index in self._indices:
            self._cluster.kill(index)
        self._ready.clear()

    def _process(self, rank: int) -> Any:
        return self._cluster.process(self._indices[rank])

    def _name(self, ranks: Sequence[int]) -> str:
        role = "rank" if self._role == "trainer" else self._role
        return f"{role} {', '.join(map(str, ranks))}"


def _reason(error: Exception) -> str:
    """Ray's explanation of a death, or of a task that could not start, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = (lines or [type(error).__name__])[-1]
    return last.partition(" Some common causes")[0].rpartition("exit detail: ")[2].rstrip(".")
