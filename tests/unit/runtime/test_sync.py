"""Weights from one process to others, and what each says when another does not do its part."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from audiorl.models.weights import named
from audiorl.rollout.weight_transfer import SyncError, WeightReceiver, WeightSender, buckets
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
        start(sync_peers.receive, sender.address, number, sender.receivers, rounds, SOON, known, out)
    return out


def reports(out: Any, count: int) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for _ in range(count):
        number, said = out.get(timeout=60)
        found.setdefault(number, []).append(said)
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_every_receiver_gets_every_tensor_as_it_is(start: Start, context: Any, count: int) -> None:
    sender = WeightSender(count)
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
    with pytest.raises(OSError):
        socket.create_connection((_other_address(), int(port)), timeout=1)


def _other_address() -> str:
    """An address of this machine that is not the one above: another loopback address, which every Linux answers on."""
    return "127.0.0.2"


def test_a_receiver_that_does_not_come_is_named(start: Start, context: Any) -> None:
    sender = WeightSender(3, timeout=3.0)
    out = receivers(start, context, sender, 1, {1: set(weights(0))})
    with pytest.raises(SyncError, match=r"receiver 0, 2 of 3 did not join to receive weights within 3 s"):
        sender.send(weights(0))
    assert "receiver 0, 2 of 3 did not join" in reports(out, 1)[1][0]
    with pytest.raises(SyncError, match="closed"):
        sender.send(weights(0))


def test_a_receiver_that_dies_is_an_error_at_the_sender_and_at_the_others(start: Start, context: Any) -> None:
    sender = WeightSender(2, timeout=SOON)
    out = receivers(start, context, sender, 1, {0: {"a", "b", "c"}})
    start(sync_peers.die_while_receiving, sender.address, 1, 2, SOON)
    big = {name: torch.zeros(2**24) for name in "abc"}
    with pytest.raises(SyncError, match=r"receiver"):
        sender.send(big)
    assert "SyncError" in reports(out, 1)[0][0]


def test_a_sender_that_dies_is_an_error_at_the_receivers(start: Start, context: Any) -> None:
    out = context.Queue()
    start(sync_peers.die_while_sending, 1, SOON, out)
    receiver = WeightReceiver(out.get(timeout=60), 0, 1, timeout=SOON)
    got = []
    with pytest.raises(SyncError, match=r"the sender of weights at 127.0.0.1:\d+ has ended"):
        got += [name for name, _ in receiver.weights()]
    assert not got or got == ["first"]
    with pytest.raises(SyncError, match="closed"):
        next(receiver.weights())


def test_a_receiver_without_a_sender(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(SyncError, match=rf"no sender of weights at 127.0.0.1:{port} within 2 s"):
        WeightReceiver(f"127.0.0.1:{port}", 0, 1, timeout=2.0)
    assert time.monotonic() - began < 20


def test_what_an_engine_has_against_weights_is_the_senders_error(start: Start, context: Any) -> None:
    sender = WeightSender(2, timeout=SOON)
    known = set(weights(0))
    out = receivers(start, context, sender, 1, {0: known, 1: known - {"double"}})
    with pytest.raises(SyncError, match="receiver 1: ValueError: weight 'double' is not in this model"):
        sender.send(weights(0))
    said = reports(out, 2)
    assert said[1] == ["ValueError: weight 'double' is not in this model"]


def test_buckets_keep_order_and_size() -> None:
    tensors = {str(i): torch.zeros(n) for i, n in enumerate([10, 10, 100, 1, 1, 30])}
    found = list(buckets(tensors, 80))
    assert [[name for name, _ in b] for b in found] == [["0", "1"], ["2"], ["3", "4"], ["5"]]
    assert [name for name, _ in named(tensors)] == list(tensors)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WeightSender(0), "receivers is 0"),
        (lambda: WeightReceiver("127.0.0.1:1", 2, 2), "number is 2"),
        (lambda: WeightReceiver("somewhere", 0, 1), "host:port"),
    ],
)
def test_bad_options(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
