"""The engines of a phase: the trainers' own, or others apart from them, with weights that follow the trainers'.

Weights travel from the first trainer to all engines apart at once (`runtime.sync`), over a connection that is made anew
when one of its ends was replaced. An engine that was replaced has the weights that the phase began with: asked to write
with others it writes nothing, all are sent the weights once more, and are asked again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from audiorl.algos.packing import balance
from audiorl.data.schedule import rough_length
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.vllm import VLLMEngine
from audiorl.rollout.weight_transfer import SyncError, WeightReceiver
from audiorl.runtime.local import Group
from audiorl.runtime.ray_cluster import import_ray
from audiorl.runtime.torchrun import RankError
from audiorl.types import Request, Rollout

T = TypeVar("T")
S = TypeVar("S")

ATTEMPTS = 5
"""How often weights are sent when they do not arrive, before the run stops."""


class Source(NamedTuple):
    """Where an engine takes weights from: the sender's address, and which of its receivers it is."""

    address: str
    backend: Literal["gloo", "nccl"]
    receivers: int
    number: int = 0


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can leave its GPU to others, as `VLLMEngine` can; asleep it neither writes nor takes weights."""

    @property
    def can_sleep(self) -> bool: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class EngineApart:
    """A worker that writes rollouts with weights of its own. Asleep it wakes for what it is asked to do."""

    def __init__(self, engine: HFEngine | VLLMEngine):
        self._engine = engine
        self._asleep = False
        self._source: Source | None = None
        self._receiver: WeightReceiver | None = None

    def follow(self, source: Source) -> bool:
        """Take weights from there. Says whether it already did."""
        if self._receiver is not None and source == self._source:
            return True
        self._leave("another connection was made")
        self._source = source
        try:
            self._receiver = WeightReceiver(
                source.address, source.number, source.receivers, host=node_address(), backend=source.backend
            )
        except SyncError:
            self._receiver = None  # the sender has ended; `receive` says so
        return False

    def receive(self, version: int) -> str | None:
        """The weights that are sent next; what went wrong if they did not arrive."""
        if self._receiver is None:
            return "an engine has no connection for weights"
        self._wake()
        try:
            self._receiver.update(self._engine, version)
        except SyncError as error:
            self._leave(str(error))
            return str(error)
        return None

    def write(self, asked: tuple[int, Sequence[Request]]) -> list[Rollout] | None:
        """Rollouts written with the weights of a version; None where these are others."""
        version, requests = asked
        if self._engine.policy_version != version:
            return None
        self._wake()
        return self._engine.generate(requests)

    def sleep(self) -> None:
        """Leave the GPU to a trainer, as far as the engine can."""
        if isinstance(self._engine, Sleeper) and self._engine.can_sleep and not self._asleep:
            self._engine.sleep()
            self._asleep = True
        free_cached()

    def _wake(self) -> None:
        if self._asleep and isinstance(self._engine, Sleeper):
            self._engine.wake()
        self._asleep = False

    def close(self) -> None:
        self._leave("the phase has ended")
        if isinstance(self._engine, VLLMEngine):
            self._engine.close()

    def _leave(self, reason: str) -> None:
        if self._receiver is not None:
            self._receiver.close(reason)
        self._receiver = None


class _Behind(Exception):
    """An engine has other weights than those that are to be written with."""


class GroupEngine:
    """The engines of a phase as one: each gets a part of the requests, about equally much to write.

    They are the trainers' own, or those of the group `apart`. `ahead`: whether weights are wanted again after they have
    changed, to write with them beside an update. `together`: those of the group are on the trainers' GPUs, and only one
    side at a time has memory there for its work.
    """

    def __init__(self, trainers: Group, apart: Group | None = None, ahead: bool = False, together: bool = False):
        if ahead and together:
            raise ValueError(
                "overlap: engines write while trainers train, but with runtime.placement together they take turns on "
                "one GPU; put the engines apart (--runtime.placement apart), or leave overlap out"
            )
        self.trainers, self.apart, self._ahead, self._together = trainers, apart, ahead, together
        self._version = 0
        self._training = False

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        group = self.trainers if self.apart is None else self.apart
        shares = balance([r.n * rough_length(r.sample) for r in requests], group.size)
        written = self._written([[requests[i] for i in share] for share in shares])
        by_request: dict[int, list[Rollout]] = {}
        for share, rollouts in zip(shares, written, strict=True):
            at = 0
            for i in share:
                by_request[i] = rollouts[at : at + requests[i].n]
                at += requests[i].n
        return [rollout for i in range(len(requests)) for rollout in by_request[i]]

    def _written(self, parts: Sequence[Sequence[Request]]) -> list[list[Rollout]]:
        if self.apart is None:
            return self.trainers.each("generate", parts)
        for _ in range(ATTEMPTS):
            written = self.apart.each("write", [(self._version, part) for part in parts])
            if None not in written:
                return written
            if self._training:
                raise _Behind
            self._send(self.apart)
        raise RankError("engines were replaced again and again while they wrote; resume from the last checkpoint")

    def sync(self, version: int) -> None:
        """Write with the weights that the trainers have now, after `version` steps."""
        if self.apart is None:
            return
        self._version = version
        if self._together:
            self.trainers.all("make_room")
        if self._ahead:
            self.trainers.all("keep")
        self._send(self.apart)

    def rest(self) -> None:
        """Before trainers train: engines leave them the GPUs that they share."""
        if self.apart is not None and self._together:
            self.apart.all("sleep")

    def beside(self, train: Callable[[], T], write: Callable[[], S]) -> tuple[T, S]:
        """Update the trainers, and write with the weights of before: at the same time where engines are apart.

        What writes must ask nothing of the trainers.
        """
        if self.apart is None:
            written = write()
            return train(), written
        self._training = True
        try:
            trained, writing = _both(train, write)
        finally:
            self._training = False
        try:
            return trained, writing.result()
        except _Behind:
            self._send(self.apart)
            return trained, write()

    def close(self) -> None:
        """After the phase."""
        if self.apart is not None:
            self.apart.all("close")

    def _send(self, engines: Group) -> None:
        """Deaths on the way are counted where processes are replaced; here it is only tried again."""
        for _ in range(ATTEMPTS):
            self._connect(engines)
            sent, received = _both(lambda: self.trainers.first("send"), lambda: engines.all("receive", self._version))
            reasons = [reason for reason in [*received.result(), sent] if reason]
            if not reasons:
                return
        raise RankError(f"weights did not reach the engines: {reasons[0]}; resume the run from the last checkpoint")

    def _connect(self, engines: Group) -> None:
        """One connection for all: with an end that is new the others start anew, too."""
        for anew in (False, True):
            source: Source = self.trainers.first("source", engines.size, anew)
            known = engines.each("follow", [source._replace(number=k) for k in range(engines.size)])
            if all(known):
                return


def _both(here: Callable[[], T], there: Callable[[], S]) -> tuple[T, Future[S]]:
    """Call both at once, `there` in a thread, which has ended when this returns. Ctrl-C does not wait for it."""
    found: Future[S] = Future()

    def run() -> None:
        try:
            found.set_result(there())
        except BaseException as error:
            found.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        result = here()
    except Exception:
        thread.join()
        raise
    thread.join()
    return result, found


def free_cached() -> None:
    """Give other processes what torch keeps of the GPU without using it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def node_address() -> str:
    """Where other nodes of the cluster find this one."""
    address: Any = import_ray().util.get_node_ip_address()
    return str(address)
