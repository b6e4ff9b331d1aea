"""Sending weights from a trainer to engines in other processes.

A `WeightSender` and its receivers have a process group of their own: gloo between CPUs, NCCL between GPUs. Tensors are
broadcast in buckets, each after a header with its names, shapes and types. Between processes on one GPU ("ipc") a
bucket stays where it is: receivers get a CUDA IPC handle of its memory, without a GPU a file that both map. A receiver
yields tensors one by one and stores none, and at the end confirms, or sends the reason why it cannot.

    sender = WeightSender(receivers=2)                                 # the trainer's rank 0
    receiver = WeightReceiver(sender.address, number, receivers=2)     # engine `number`, 0 or 1, elsewhere
    sender.send(policy.weights())      and at the same time     receiver.update(engine.update_weights, version)

After an error the group is closed; make a new one. Whoever reaches the sender's host, by default this machine only, can
read the weights.
"""

from __future__ import annotations

import base64
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from audiorl.distributed.torchrun import listening_store
from audiorl.models.weights import Weights, named

Backend = Literal["gloo", "nccl", "ipc"]
BUCKET = 64 * 2**20
"""Bytes of tensors in one broadcast."""
IPC_BUCKET = 512 * 2**20
"""Bytes of tensors behind one CUDA IPC handle: this much of the GPU is used twice for a moment, by each side."""
TIMEOUT_SECONDS = 300.0
"""Seconds that one side waits for the other, unless `timeout` says otherwise."""
POLL_SECONDS = 0.0005
"""Seconds between two looks at an NCCL broadcast."""
LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT_SECONDS = 60.0
"""Seconds that receivers have to come once there are weights for them: they are asked at the same time."""


class SyncError(RuntimeError):
    """Weights did not arrive, at one receiver or at all."""


class _Peer:
    """One process of the group: rank 0 sends, rank k + 1 is receiver k."""

    def __init__(self, store: dist.TCPStore, rank: int, receivers: int, host: str, timeout: float, backend: Backend):
        self.receivers, self.backend = receivers, backend
        self._store, self._rank, self._host, self._timeout = store, rank, host, timeout
        on_gpu = backend == "nccl" or (backend == "ipc" and torch.cuda.is_available())
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._group: Any = None
        self._round = 0
        self._buckets = 0  # of this round, by shared memory
        self._closed = ""

    def _connect(self) -> None:
        """Make the process group at the first transfer: all sides are there then."""
        if self._group is not None or self.backend == "ipc":
            return
        store, size, wait = dist.PrefixStore("group", self._store), self.receivers + 1, timedelta(seconds=self._timeout)
        options: Any
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = 2 * wait  # NCCL's own watchdog ends the process: `_broadcast` raises before
            self._group = dist.ProcessGroupNCCL(store, self._rank, size, options)
            return
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = wait
        # Without a device of its own, gloo listens wherever this machine's name points to.
        options._devices = [gloo.create_device(hostname=self._host)]
        self._group = gloo(store, self._rank, size, options)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        work = self._group.broadcast([tensor], options)
        if self.backend == "nccl":
            wait_within(work, self._timeout, self._group.abort)
        work.wait()
        return tensor

    def _check_open(self) -> None:
        if self._closed:
            raise SyncError(f"this connection for weights is closed ({self._closed}); make a new one on both sides")

    def _key(self, what: str, number: int | None = None) -> str:
        return f"{what}/{self._round}" + ("" if number is None else f"/{number}")

    @property
    def is_open(self) -> bool:
        return not self._closed

    def close(self, reason: str = "it was closed") -> None:
        """Leave the group. The others' calls fail from here on."""
        self._closed = self._closed or reason
        if self._group is not None and self.backend == "nccl":
            self._group.abort()
        self._group = None


class WeightSender(_Peer):
    """The trainer's side. Making it does not wait for the receivers.

    timeout: seconds that one side waits for the other. host: the address of this machine that receivers connect to.
    """

    def __init__(
        self, receivers: int, *, host: str = LOOPBACK, timeout: float = TIMEOUT_SECONDS, backend: Backend = "gloo"
    ):
        store = listening_store(host, timeout=timedelta(seconds=timeout))
        self.address = f"{host}:{store.port}"
        super().__init__(store, 0, receivers, host, timeout, backend)

    def send(self, weights: Weights) -> None:
        """Send these tensors to every receiver; returns when all have confirmed.

        Raises SyncError that names the receivers that did not join, ended, or could not load the weights.
        """
        self._check_open()
        self._buckets = 0
        try:
            self._wait_for("joined", "did not join to receive weights", min(JOIN_TIMEOUT_SECONDS, self._timeout))
            self._store.set(self._key("go"), "")
            self._connect()
            for bucket in buckets(weights, IPC_BUCKET if self._device.type == "cuda" and not self._group else BUCKET):
                self._send_bucket(bucket)
            self._send_bucket([])
            self._wait_for("done", "did not confirm the weights", self._timeout)
        except BaseException as error:
            reason = self._refusal() or (str(error) if isinstance(error, SyncError) else None)
            self._store.set("failed", reason or f"the sender: {type(error).__name__}: {error}")
            for what in ("go", f"bucket {self._buckets}"):  # receivers that wait for it stop waiting
                self._store.set(self._key(what), "[]")
            self.close(reason or str(error))
            if isinstance(error, RuntimeError):  # SyncErrors too; a broken connection is one without a reason
                raise SyncError(reason or f"a receiver ended or broke off while weights were sent ({error})") from error
            raise
        self._round += 1

    def _send_bucket(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        header = json.dumps([[n, list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in bucket])
        parts = [t.detach().to(self._device).contiguous().view(-1).view(torch.uint8) for _, t in bucket]
        if self.backend != "ipc":
            data = header.encode()
            self._broadcast(torch.tensor([len(data)], device=self._device))
            self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device))
            if bucket:
                self._broadcast(torch.cat(parts))
            return
        key = self._key(f"bucket {self._buckets}")
        if not bucket:
            self._store.set(key, json.dumps([header, None]))
            return
        with shared_memory(torch.cat(parts)) as handle:
            self._store.set(key, json.dumps([header, handle]))
            self._wait_for(f"got {self._buckets}", "did not read the weights", self._timeout)
        self._store.delete_key(key)
        self._buckets += 1

    def _wait_for(self, what: str, missing: str, seconds: float) -> None:
        """Wait until all receivers have set key `what`. Raises SyncError naming those that have not."""
        keys = [self._key(what, k) for k in range(self.receivers)]
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError as error:  # DistStoreError, or a timeout
            absent = ", ".join(str(k) for k, key in enumerate(keys) if not self._store.check([key]))
            if absent:
                late = f"receiver {absent} of {self.receivers} {missing} within {seconds:g} s"
                raise SyncError(f"{late}; has its process ended?") from error
            return
        if what != "joined" and (reason := self._refusal()):
            raise SyncError(reason)

    def _refusal(self) -> str | None:
        """Return the reason of the first receiver that failed."""
        for k in range(self.receivers):
            if self._store.check([self._key("refused", k)]):
                return f"receiver {k}: {self._store.get(self._key('refused', k)).decode(errors='replace')}"
        return None


class WeightReceiver(_Peer):
    """One of the `receivers` engines, the one with this `number` (from 0). Raises SyncError without a sender there."""

    def __init__(
        self,
        address: str,
        number: int,
        receivers: int,
        *,
        host: str = LOOPBACK,
        timeout: float = TIMEOUT_SECONDS,
        backend: Backend = "gloo",
    ):
        there, _, port = address.rpartition(":")
        try:
            store = dist.TCPStore(there, int(port), is_master=False, timeout=timedelta(seconds=timeout))
        except RuntimeError as error:
            raise SyncError(f"no sender of weights at {address} within {timeout:g} s") from error
        super().__init__(store, number + 1, receivers, host, timeout, backend)
        self._number, self._sender = number, f"the sender of weights at {address}"

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the sender sends next, one by one; a bucket is freed before the next one comes.

        A caller that stops early ends the transfer for all receivers, and the sender raises SyncError.
        """
        self._check_open()
        self._buckets = 0
        try:
            self._tell("joined", "")
            self._store.wait([self._key("go")], timedelta(seconds=self._timeout))
            if self._store.check(["failed"]):
                raise SyncError(self._store.get("failed").decode(errors="replace"))
            self._connect()
            while bucket := self._receive_bucket():
                yield from bucket
                del bucket
        except GeneratorExit:
            self._refuse("stopped receiving weights before the last one")
            raise
        except RuntimeError as error:
            reason = str(error) if isinstance(error, SyncError) else self._why(error)
            self.close(reason)
            raise SyncError(reason) from error
        self._tell("done", "")
        self._round += 1

    def update(self, update_weights: Callable[[Weights, int], None], version: int) -> None:
        """Call `update_weights`, an engine's, with the weights that the sender sends next. Its error is sent back."""
        try:
            update_weights(self.weights(), version)
        except SyncError:
            raise
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error}")
            raise

    def _receive_bucket(self) -> list[tuple[str, Tensor]]:
        if self.backend == "ipc":
            key = self._key(f"bucket {self._buckets}")
            self._store.wait([key], timedelta(seconds=self._timeout))
            if not (message := json.loads(self._store.get(key))):
                raise SyncError(self._why(RuntimeError("it broke off")))
            header, handle = message
            if handle is None:
                return []
            with opened_memory(handle, self._device) as flat:
                tensors = _tensors(flat, json.loads(header))
            self._tell(f"got {self._buckets}", "")
            self._buckets += 1
            return tensors
        length = int(self._broadcast(torch.zeros(1, dtype=torch.long, device=self._device)))
        header = bytes(self._broadcast(torch.zeros(length, dtype=torch.uint8, device=self._device)).cpu().tolist())
        if not (entries := json.loads(header)):
            return []
        size = sum(map(_size, entries))
        return _tensors(self._broadcast(torch.empty(size, dtype=torch.uint8, device=self._device)), entries)

    def _refuse(self, reason: str) -> None:
        if self._closed:
            return
        self._tell("refused", reason)
        for what in ("done", f"got {self._buckets}"):
            self._tell(what, "")
        self.close(reason)

    def _tell(self, what: str, text: str) -> None:
        try:
            self._store.set(self._key(what, self._number), text)
        except RuntimeError as error:
            self.close(f"{self._sender} has ended")
            raise SyncError(f"{self._sender} has ended") from error

    def _why(self, error: RuntimeError) -> str:
        """Return the sender's reason for a broken transfer, if it can still be reached."""
        try:
            if self._store.check(["failed"]):
                return self._store.get("failed").decode(errors="replace")
        except RuntimeError:
            return f"{self._sender} has ended"
        return f"{self._sender} sent nothing within {self._timeout:g} s ({error})"


Entry = tuple[str, list[int], str]
"""Name, shape and type of a tensor in a bucket."""


def _size(entry: Entry) -> int:
    """Count bytes."""
    return torch.Size(entry[1]).numel() * int(getattr(torch, entry[2]).itemsize)


def _tensors(flat: Tensor, entries: Sequence[Entry]) -> list[tuple[str, Tensor]]:
    """Copy tensors: an offset among the bytes may not be aligned for their type, and shared memory is used again."""
    parts = zip(flat.split([_size(e) for e in entries]), entries, strict=True)
    return [(name, part.clone().view(getattr(torch, dtype)).view(shape)) for part, (name, shape, dtype) in parts]


@contextmanager
def shared_memory(flat: Tensor) -> Iterator[Any]:
    """Share bytes while the block lasts: yields a handle, as JSON, of CUDA IPC or of a file."""
    if flat.device.type == "cuda":
        _, arguments = reduce_tensor(flat)
        torch.cuda.synchronize(flat.device)
        yield [base64.b64encode(x).decode() if isinstance(x, bytes) else x for x in arguments[6:]] + [len(flat)]
        return
    with tempfile.TemporaryDirectory(prefix="audiorl-weights-") as folder:
        path = f"{folder}/bucket"
        torch.from_file(path, shared=True, size=len(flat), dtype=torch.uint8).copy_(flat)
        yield [path, len(flat)]


@contextmanager
def opened_memory(handle: Any, device: torch.device) -> Iterator[Tensor]:
    """Open a handle of `shared_memory`; what is read of its bytes is complete when the block ends."""
    *place, count = handle
    if device.type != "cuda":
        yield torch.from_file(place[0], shared=True, size=count, dtype=torch.uint8)
        return
    _, memory, storage_bytes, offset, grad, counter, counter_offset, event, wait = place
    memory, counter, event = (None if x is None else base64.b64decode(x) for x in (memory, counter, event))
    flat = rebuild_cuda_tensor(
        Tensor, (count,), (1,), 0, torch.UntypedStorage, torch.uint8, device.index,
        memory, storage_bytes, offset, grad, counter, counter_offset, event, wait,
    )  # fmt: skip
    try:
        yield flat
    finally:
        torch.cuda.synchronize(device)


def wait_within(work: Any, seconds: float, abort: Callable[[], None]) -> None:
    """Wait for a broadcast of NCCL. After so many seconds it is aborted, and RuntimeError raised."""
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > deadline:
            abort()
            raise RuntimeError(f"the other side did not take part in a broadcast within {seconds:g} s")
        time.sleep(POLL_SECONDS)


def buckets(weights: Weights, size: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Named tensors in order, in lists of at most `size` bytes; a larger tensor has its own."""
    bucket: list[tuple[str, Tensor]] = []
    room = size
    for name, tensor in named(weights):
        if bucket and tensor.nbytes > room:
            yield bucket
            bucket, room = [], size
        bucket.append((name, tensor))
        room -= tensor.nbytes
    if bucket:
        yield bucket
