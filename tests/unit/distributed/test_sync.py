"""Weights from one process to others, and what each says when another does not do its part."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.multiprocessing import reductions

from audiorl.models.weights import named
from audiorl.rollout import weight_transfer
from audiorl.rollout.weight_transfer import (
    Backend,
    SyncError,
    WeightReceiver,
    WeightSender,
    buckets,
    opened_memory,
    shared_memory,
    wait_within,
)
from tests.support import sync_peers
from tests.support.sync_peers import weights

SOON = 8.0
"""Seconds that a side waits for another that does not come."""
Start = Callable[..., multiprocessing.Process]


@pytest.fixture(scope="module")
def context() -> Any:
    # The processes are made by one that has imported what they need.
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.support.sync_peers"])
    return found


@pytest.fixture
def start(context: Any) -> Iterator[Start]:
    """Run a function in a process of its own."""
    processes = []

    def run(function: Callable[..., None], *args: Any) -> Any:
        process = context.Process(target=function, args=args)
        process.start()
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.join(SOON)
        if process.is_alive():
            process.kill()


def receivers(start: Start, context: Any, sender: WeightSender, rounds: int, names: dict[int, set[str]]) -> Any:
    out = context.Queue()
    for number, known in names.items():
        args = sender.address, number, sender.receivers, rounds, SOON, known, out, sender.backend
        start(sync_peers.receive, *args)
    return out


def reports(out: Any, count: int) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for _ in range(count):
        number, said = out.get(timeout=60)
        found.setdefault(number, []).append(said)
    return found


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
@pytest.mark.parametrize("count", [1, 2])
def test_every_receiver_gets_every_tensor_as_it_is(start: Start, context: Any, count: int, backend: Backend) -> None:
    sender = WeightSender(count, backend=backend)
    names = set(weights(0))
    out = receivers(start, context, sender, 3, dict.fromkeys(range(count), names))
    for version in range(3):
        # As a mapping, or as tensors that are made one after the other.
        sender.send(weights(version) if version else iter(weights(version).items()))
    assert reports(out, 3 * count) == {k: [True, True, True] for k in range(count)}


def test_only_this_machine_can_reach_the_sender() -> None:
    sender = WeightSender(1)
    host, port = sender.address.split(":")
    assert host == "127.0.0.1"
    with socket.create_connection((host, int(port)), timeout=5):
        pass
    with pytest.raises(OSError):  # another address of this machine
        socket.create_connection(("127.0.0.2", int(port)), timeout=1)


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_a_receiver_that_does_not_come_is_named(start: Start, context: Any, backend: Backend) -> None:
    sender = WeightSender(3, timeout=3.0, backend=backend)
    out = receivers(start, context, sender, 1, {1: set(weights(0))})
    with pytest.raises(SyncError, match=r"receiver 0, 2 of 3 did not join to receive weights within 3 s"):
        sender.send(weights(0))
    assert "receiver 0, 2 of 3 did not join" in reports(out, 1)[1][0]
    with pytest.raises(SyncError, match="closed"):
        sender.send(weights(0))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_a_receiver_that_dies_is_an_error_at_the_sender_and_at_the_others(
    start: Start, context: Any, backend: Backend
) -> None:
    sender = WeightSender(2, timeout=SOON, backend=backend)
    out = receivers(start, context, sender, 1, {0: {"a", "b", "c"}})
    start(sync_peers.die_while_receiving, sender.address, 1, 2, SOON, backend)
    big = {name: torch.zeros(2**24) for name in "abc"}
    with pytest.raises(SyncError, match=r"receiver"):
        sender.send(big)
    assert "SyncError" in reports(out, 1)[0][0]


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_a_sender_that_dies_is_an_error_at_the_receivers(start: Start, context: Any, backend: Backend) -> None:
    out = context.Queue()
    start(sync_peers.die_while_sending, 1, SOON, backend, out)
    receiver = WeightReceiver(out.get(timeout=60), 0, 1, timeout=SOON, backend=backend)
    got = []
    with pytest.raises(SyncError, match=r"the sender of weights at 127.0.0.1:\d+ has ended"):
        got += [name for name, _ in receiver.weights()]
    assert not got or got == ["first"]
    with pytest.raises(SyncError, match="closed"):
        next(receiver.weights())


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_what_an_engine_has_against_weights_is_the_senders_error(start: Start, context: Any, backend: Backend) -> None:
    sender = WeightSender(2, timeout=SOON, backend=backend)
    known = set(weights(0))
    out = receivers(start, context, sender, 1, {0: known, 1: known - {"double"}})
    with pytest.raises(SyncError, match="receiver 1: ValueError: weight 'double' is not in this model"):
        sender.send(weights(0))
    said = reports(out, 2)
    assert said[1] == ["ValueError: weight 'double' is not in this model"]


def test_a_cuda_handle_reaches_the_other_side_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch exports, through JSON, to what torch rebuilds; the receiver's own device in place of the sender's."""
    sent = (3, b"memory", 640, 64, False, b"\x00counter", 2, b"event", True)
    rebuilt: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(weight_transfer, "reduce_tensor", lambda flat: (None, (None,) * 6 + sent))
    monkeypatch.setattr(weight_transfer, "rebuild_cuda_tensor", lambda *a: rebuilt.extend(a))

    flat = MagicMock(device=torch.device("cuda", 3), __len__=lambda self: 576)
    with shared_memory(flat) as handle, opened_memory(json.loads(json.dumps(handle)), torch.device("cuda", 1)):
        pass
    assert rebuilt[:6] == [torch.Tensor, (576,), (1,), 0, torch.UntypedStorage, torch.uint8]
    assert rebuilt[6:] == [1, *sent[1:]]
    (_, *names) = inspect.signature(reductions.rebuild_cuda_tensor).parameters
    assert names[5:] == [
        "storage_device", "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad",
        "ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required",
    ]  # fmt: skip


def test_a_broadcast_that_nobody_joins_is_aborted() -> None:
    aborted: list[int] = []
    looks = iter([False, False, True])
    wait_within(SimpleNamespace(is_completed=lambda: next(looks)), 5.0, lambda: aborted.append(1))
    assert not aborted
    with pytest.raises(RuntimeError, match=r"did not take part in a broadcast within 0\.05 s"):
        wait_within(SimpleNamespace(is_completed=lambda: False), 0.05, lambda: aborted.append(1))
    assert aborted == [1]


def test_buckets_keep_order_and_size() -> None:
    tensors = {str(i): torch.zeros(n) for i, n in enumerate([10, 10, 100, 1, 1, 30])}
    found = list(buckets(tensors, 80))
    assert [[name for name, _ in b] for b in found] == [["0", "1"], ["2"], ["3", "4"], ["5"]]
    assert [name for name, _ in named(tensors)] == list(tensors)
