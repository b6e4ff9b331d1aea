"""The generation engines of a phase, and how the trainers' weights reach them before each step.

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
from typing import Any, NamedTuple, TypeVar

import torch

from audiorl.algos.packing import balance
from audiorl.config.distributed import current
from audiorl.data.schedule import rough_length
from audiorl.distributed.local import Group, LocalGroup
from audiorl.distributed.ray_cluster import import_ray
from audiorl.distributed.ray_group import RayGroup
from audiorl.distributed.torchrun import RankError
from audiorl.protocols import Ended, Request, Sleep
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.vllm import VLLMEngine
from audiorl.rollout.weight_transfer import Backend, SyncError, WeightReceiver
from audiorl.types import Rollout

T = TypeVar("T")

ATTEMPTS = 5
"""How many times weights are sent when they do not arrive, before the run stops."""


class WeightSource(NamedTuple):
    """The sender that an engine receives weights from."""

    address: str
    """HOST:PORT of the sender."""
    backend: Backend
    receivers: int
    """How many engines receive."""
    number: int = 0
    """Which of them this engine is."""


class EngineWorker:
    """A worker that generates rollouts with its own copy of the weights. It wakes its engine when it is called."""

    def __init__(self, engine: HFEngine | VLLMEngine):
        self._engine = engine
        self._asleep = False
        self._source: WeightSource | None = None
        self._receiver: WeightReceiver | None = None
        self._workers_connected = False

    def connect(self, source: WeightSource) -> bool:
        """Connect to a sender of weights. Returns whether this worker was already connected to it.

        Of an engine of several GPUs vLLM's workers connect, one on each.
        """
        if (self._receiver is not None or self._workers_connected) and source == self._source:
            return True
        self._disconnect("another connection was made")
        self._source = source
        options: dict[str, Any] = {
            "host": node_address(),
            "timeout": current().sync_timeout,
            "backend": source.backend,
        }
        workers = current().engine_gpus
        if isinstance(self._engine, VLLMEngine) and workers > 1:
            first = source.number * workers
            self._workers_connected = self._engine.connect(source.address, first, source.receivers, options) is None
            return False
        try:
            self._receiver = WeightReceiver(source.address, source.number, source.receivers, **options)
        except SyncError:
            self._receiver = None  # the sender has ended; `receive` reports it
        return False

    def receive(self, version: int) -> str | None:
        """Load the weights that are sent next. Returns None, or why they did not arrive."""
        self._wake()
        if self._workers_connected and isinstance(self._engine, VLLMEngine):
            reason = self._engine.receive(version)
            if reason is not None:
                self._disconnect(reason)
            return reason
        if self._receiver is None:
            return "an engine has no connection for weights"
        try:
            self._receiver.update(self._engine.update_weights, version)
        except SyncError as error:
            self._disconnect(str(error))
            return str(error)
        return None

    def generate(self, version_and_requests: tuple[int, Sequence[Request]]) -> list[Rollout] | None:
        """Rollouts of the requests; None where the engine's weights are of another version."""
        version, requests = version_and_requests
        if self._engine.policy_version != version:
            return None
        self._wake()
        return self._engine.generate(requests)

    def sleep(self) -> None:
        """Free GPU memory for a colocated trainer, if the engine can."""
        if isinstance(self._engine, Sleep) and self._engine.can_sleep and not self._asleep:
            self._engine.sleep()
            self._asleep = True
        free_cached()

    def _wake(self) -> None:
        if self._asleep and isinstance(self._engine, Sleep):
            self._engine.wake()
        self._asleep = False

    def close(self) -> None:
        self._disconnect("the phase has ended")
        if isinstance(self._engine, VLLMEngine):
            self._engine.close()

    def _disconnect(self, reason: str) -> None:
        if self._receiver is not None:
            self._receiver.close(reason)
        self._receiver = None
        if self._workers_connected and isinstance(self._engine, VLLMEngine):
            self._engine.disconnect(reason)
        self._workers_connected = False


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

        if self.engines is None and isinstance(self.trainers, LocalGroup):
            return [w.generate(shard, ended) for w, shard in zip(self.trainers.workers, shards, strict=True)]
        group = self.trainers if self.engines is None else self.engines
        report = {"arrived": arrived} if ended is not None and isinstance(group, RayGroup) else {}
        if self.engines is None:
            return group.each("generate", shards, **report)
        for _ in range(ATTEMPTS):
            rollouts = group.each("generate", [(self._version, shard) for shard in shards], **report)
            if None not in rollouts:
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
            self.trainers.all("free_memory")
        if version == self._synced:
            return
        self._version = version
        if self._snapshots:
            self.trainers.all("snapshot")
        self._send(self.engines)
        self._synced = version

    def free_gpus(self) -> None:
        """Before trainers update: colocated engines sleep."""
        if self.engines is not None and self._colocated:
            self.engines.all("sleep")

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
            self.engines.all("close")

    def _send(self, engines: Group) -> None:
        """Send the weights until all engines have them. The groups count the processes that die meanwhile."""
        for _ in range(ATTEMPTS):
            self._connect(engines)
            with _in_background(lambda: engines.all("receive", self._version)) as received:
                sent = self.trainers.all("send")
            reasons = [reason for reason in [*received.result(), *sent] if reason]
            if not reasons:
                return
        raise RankError(f"weights did not reach the engines: {reasons[0]}; resume the run from the last checkpoint")

    def _connect(self, engines: Group) -> None:
        """Connect all engines to the trainers that send. When one end is new, all connections are opened again."""
        for restart in (False, True):
            sources: list[WeightSource | None] = self.trainers.all("weight_source", engines.size, restart)
            senders = [source for source in sources if source is not None]
            if len(senders) == 1:
                senders = [senders[0]._replace(number=k) for k in range(engines.size)]
            if all(engines.each("connect", senders)):
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


def free_cached() -> None:
    """Return torch's cached but unused GPU memory, so that other processes can use it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def node_address() -> str:
    """This node's address in the Ray cluster."""
    address: Any = import_ray().util.get_node_ip_address()
    return str(address)
