"""The generation engines of a phase as one engine, and how the trainers' weights reach them before each step.

The engines are the trainers' own models, or workers with processes and weights of their own. The first trainer sends
its weights to all separate engines at once (`rollout.weight_transfer`); the connection is opened again when one end was
replaced. A replaced engine holds the weights that the phase began with: asked for another version it generates nothing,
then all engines are sent the weights again, and are asked again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import groupby
from typing import TypeVar

from audiorl.algos.packing import balance
from audiorl.data.schedule import rough_length
from audiorl.distributed.local import Group, LocalGroup
from audiorl.distributed.ray_group import RayGroup
from audiorl.errors import RankError
from audiorl.protocols import Ended, Request
from audiorl.train.rl.workers import Actor, EngineWorker
from audiorl.types import Rollout

T = TypeVar("T")

ATTEMPTS = 5
"""How many times weights are sent when they do not arrive, before the run stops."""


class StaleWeights(Exception):
    """A replaced engine has other weights than the version that was asked for."""


class GroupEngine:
    """The engines of a phase as one engine: the requests are divided by their expected lengths.

    `engines`: workers with their own weights; None: the trainers generate. `overlap`: the next step's rollouts are
    generated during an update, so the weights of before must be kept. `colocated`: the engines share the trainers'
    GPUs, where only one of the two may use memory at a time.
    """

    def __init__(self, trainers: Group, engines: Group | None = None, overlap: bool = False, colocated: bool = False):
        if overlap and colocated:
            raise ValueError(
                "overlap: engines generate while trainers train, but with runtime.placement colocated they take turns "
                "on one GPU; use --runtime.placement dedicated, or switch overlap off"
            )
        self.trainers, self.engines, self._snapshots, self._colocated = trainers, engines, overlap, colocated
        self._version = 0
        self._synced: int | None = None
        self._training = False

    @property
    def size(self) -> int:
        """How many engines there are."""
        return (self.trainers if self.engines is None else self.engines).size

    def generate(self, requests: Sequence[Request], ended: Ended | None = None) -> list[Rollout]:
        """Rollouts in the order of the requests.

        `ended` is called with those of a request when all of them have ended; with engines in processes of Ray, when
        all requests of a process have.
        """
        group = self.trainers if self.engines is None else self.engines
        shares = balance([r.n * rough_length(r.sample) for r in requests], group.size)
        generated = self._generate([[requests[i] for i in share] for share in shares], ended)
        by_request: dict[int, list[Rollout]] = {}
        for share, rollouts in zip(shares, generated, strict=True):
            start = 0
            for i in share:
                by_request[i] = rollouts[start : start + requests[i].n]
                start += requests[i].n
        return [rollout for i in range(len(requests)) for rollout in by_request[i]]

    def _generate(self, shards: Sequence[Sequence[Request]], ended: Ended | None) -> list[list[Rollout]]:
        def arrived(rollouts: list[Rollout] | None) -> None:
            for _, several in groupby(rollouts or (), key=lambda r: r.group_id):
                assert ended is not None
                ended(list(several))

        if self.engines is None:
            if isinstance(self.trainers, LocalGroup):  # in this process a request is reported as soon as it has ended
                return [w.generate(shard, ended) for w, shard in zip(self.trainers.workers, shards, strict=True)]
            if ended is not None and isinstance(self.trainers, RayGroup):
                return self.trainers.each(Actor.generate, shards, arrived)
            return self.trainers.each(Actor.generate, shards)
        asked = [(self._version, shard) for shard in shards]
        for _ in range(ATTEMPTS):
            if ended is not None and isinstance(self.engines, RayGroup):
                answers = self.engines.each(EngineWorker.generate, asked, arrived)
            else:
                answers = self.engines.each(EngineWorker.generate, asked)
            rollouts = [answer for answer in answers if answer is not None]
            if len(rollouts) == len(answers):
                return rollouts
            if self._training:
                raise StaleWeights
            self._send(self.engines)
        raise RankError("engines died again and again while they generated; resume from the last checkpoint")

    def sync(self, version: int) -> None:
        """Send the trainers' current weights, those after `version` steps, to the engines that do not have them."""
        if self.engines is None:
            return
        if self._colocated:
            self.trainers.all(Actor.free_memory)
        if version == self._synced:
            return
        self._version = version
        if self._snapshots:
            self.trainers.all(Actor.snapshot)
        self._send(self.engines)
        self._synced = version

    def free_gpus(self) -> None:
        """Before trainers update: colocated engines sleep."""
        if self.engines is not None and self._colocated:
            self.engines.all(EngineWorker.sleep)

    @contextmanager
    def overlap(self, generate: Callable[[], T]) -> Iterator[Callable[[], T]]:
        """Generate with the weights as they are while the block trains; the given function then returns the result.

        At the same time where engines have their own processes, else before the block. `generate` must not call the
        trainers.
        """
        if self.engines is None:
            rollouts = generate()
            yield lambda: rollouts
            return
        engines = self.engines

        def result() -> T:
            try:
                return future.result()
            except StaleWeights:  # an engine was replaced meanwhile and has other weights
                self._send(engines)
                return generate()

        self._training = True
        try:
            with _in_background(generate) as future:
                yield result
        finally:
            self._training = False

    def close(self) -> None:
        """After the phase."""
        if self.engines is not None:
            self.engines.all(EngineWorker.close)

    def _send(self, engines: Group) -> None:
        """Send the weights until all engines have them. The groups count the processes that die meanwhile."""
        for _ in range(ATTEMPTS):
            self._connect(engines)
            with _in_background(lambda: engines.all(EngineWorker.receive, self._version)) as received:
                sent = self.trainers.all(Actor.send)
            reasons = [reason for reason in [*received.result(), *sent] if reason]
            if not reasons:
                return
        raise RankError(f"weights did not reach the engines: {reasons[0]}; resume the run from the last checkpoint")

    def _connect(self, engines: Group) -> None:
        """Connect all engines to the trainers that send. When one end is new, all connections are opened again."""
        for restart in (False, True):
            sources = self.trainers.all(Actor.weight_source, engines.size, restart)
            senders = [source for source in sources if source is not None]
            if len(senders) == 1:
                senders = [senders[0]._replace(number=k) for k in range(engines.size)]
            if all(engines.each(EngineWorker.connect, senders)):
                return


@contextmanager
def _in_background(function: Callable[[], T]) -> Iterator[Future[T]]:
    """Run `function` in a thread, which has ended when the block has. Ctrl-C does not wait for the thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield future
    except Exception:
        thread.join()
        raise
    thread.join()
