"""A reward server under load: good clients with and without slow ones, and the memory of server and client.

    python bench/reward_server.py                        200 clients, 20 of them slow
    python bench/reward_server.py --clients 50 --slow 5

Good clients send one small request after the other and wait for its scores. Slow clients have no token and send a byte
of their body a second. First all good clients run alone, then next to the slow ones. The reward sleeps 2 ms a call.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import torch

from audiorl.data.serialization import serialize_rollouts
from audiorl.types import Rollout, Sample, Segment

REWARD = """
import time
from audiorl.types import Score

def reward(rollouts):
    time.sleep(0.002)
    return [Score(float(len(r.text))) for r in rollouts]
"""
TOKEN = "bench"


def document() -> bytes:
    """Four rollouts of 200 tokens."""
    sample = Sample("q", ())
    segment = Segment(torch.arange(50), torch.arange(200), torch.zeros(200), "an answer")
    return serialize_rollouts([Rollout(sample, (segment,), "g", i) for i in range(4)])


@contextlib.contextmanager
def server(clients: int):  # type: ignore[no-untyped-def]
    """(address, process id) of `audiorl rewards serve` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reward.py"
        file.write_text(REWARD)
        command = [sys.executable, "-m", "audiorl.cli", "rewards", "serve", str(file), "--port", "0"]
        command += ["--max-queue", str(2 * clients)]
        environment = os.environ | {"AUDIORL_REWARD_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1], process.pid
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()


def memory(pid: int | str = "self") -> float:
    """Resident MiB of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


async def good(url: str, body: bytes, seconds: float, times: list[float]) -> None:
    """Requests with scores until `seconds` have passed; their durations go to `times`."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(headers=headers, timeout=60.0, trust_env=False) as client:
        while time.monotonic() < end:
            begin = time.monotonic()
            response = await client.post(f"{url}/v1/scores", content=body)
            assert response.status_code == 200, response.text
            times.append(time.monotonic() - begin)


async def slow(url: str) -> None:
    """A body without a token, a byte a second; again when the server has closed the connection."""
    host, _, port = url.removeprefix("http://").partition(":")
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(b"POST /v1/scores HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(1.0)
            finally:
                writer.close()


async def load(url: str, body: bytes, clients: int, slow_clients: int, seconds: float) -> np.ndarray:
    """Durations of the good clients' requests [N], in seconds."""
    slow_tasks = [asyncio.create_task(slow(url)) for _ in range(slow_clients)]
    await asyncio.sleep(1.0 if slow_clients else 0.0)
    times: list[float] = []
    try:
        await asyncio.gather(*(good(url, body, seconds, times) for _ in range(clients)))
    finally:
        for task in slow_tasks:
            task.cancel()
        await asyncio.gather(*slow_tasks, return_exceptions=True)
    return np.array(times)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200, help="clients, the slow ones among them")
    parser.add_argument("--slow", type=int, default=20, help="slow clients")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    options = parser.parse_args(arguments)
    body = document()
    count = options.clients - options.slow
    with server(options.clients) as (url, pid):
        asyncio.run(load(url, body, 4, 0, 2.0))  # warm up
        before = memory(pid), memory()
        for name, slow_clients in (("alone", 0), (f"next to {options.slow} slow clients", options.slow)):
            times = 1000 * asyncio.run(load(url, body, count, slow_clients, options.seconds))
            p50, p99 = np.percentile(times, (50, 99))
            print(
                f"{count} good clients {name}: {len(times) / options.seconds:.0f} requests/s, p50 {p50:.0f} ms, "
                f"p99 {p99:.0f} ms; server {memory(pid):.0f} MiB, clients {memory():.0f} MiB",
                flush=True,
            )
        print(f"before: server {before[0]:.0f} MiB, clients {before[1]:.0f} MiB")


if __name__ == "__main__":
    main()
