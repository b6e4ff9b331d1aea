"""What tests of remote rewards share: servers in a thread and in a process, and every fault that an answer can have."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from audiorl.config import RewardServerConfig
from audiorl.rewards import FileReward, load_reward
from audiorl.rewards.serve import make_app

FAULTS = ("error", "busy", "garbage", "not json", "short", "null", "nan", "other", "cut")


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address of an ASGI application that really listens, in a thread of this process."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def app_of(file: Path, token: str | None = None, reward: Callable[..., Any] | None = None, **options: Any) -> Any:
    """The server's application for the reward in `file`, or another one in its name."""
    loaded = load_reward(file)
    config = RewardServerConfig(str(file), **options)
    return make_app(loaded if reward is None else FileReward(str(file), reward), config, token)


class Faulty:
    """An application in front of another: of its calls a share fails in one of FAULTS, another share is late."""

    def __init__(self, app: Any, fail: float = 0.0, late: float = 0.0, delay: float = 0.0, kinds: Any = FAULTS):
        self.app, self.fail, self.late, self.delay, self.kinds = app, fail, late, delay, kinds
        self.rng = random.Random(0)
        self.calls: Counter[str] = Counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/scores":
            return await self.app(scope, receive, send)
        draw = self.rng.random()
        kind = self.rng.choice(self.kinds) if draw < self.fail else "late" if draw < self.fail + self.late else "right"
        self.calls[kind] += 1
        if kind == "late":
            await asyncio.sleep(self.delay)
        answer: list[dict[str, Any]] = []

        async def keep(message: dict[str, Any]) -> None:
            answer.append(message)

        await self.app(scope, receive, keep)
        body = b"".join(m.get("body", b"") for m in answer)
        status, body, length = spoiled(kind, answer[0]["status"], body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": len(body) < length})


def spoiled(kind: str, status: int, body: bytes) -> tuple[int, bytes, int]:
    """Status, body and declared length of a right answer after one fault."""
    if kind == "error":
        status, body = 500, b"Internal Server Error"
    elif kind == "busy":
        status, body = 503, b'{"error": "busy"}'
    elif kind == "garbage":
        body = bytes(range(256))
    elif kind == "not json":
        body = b"<html>a proxy's page</html>"
    elif kind in ("short", "null", "nan", "other"):
        answer = json.loads(body)
        if kind == "short":
            answer["scores"].pop()
        elif kind == "other":
            answer["request"] = "0" * 32
        else:
            answer["scores"][-1]["total"] = None if kind == "null" else float("nan")
        body = json.dumps(answer).encode()
    return status, body[: len(body) // 2] if kind == "cut" else body, len(body)


class Process:
    """`audiorl rewards serve` as a process of its own, which can be killed and started again on the same port."""

    def __init__(self, file: Path, *options: str, env: dict[str, str] | None = None):
        self.file, self.options, self.env = file, options, env or {}
        self.port = 0
        self.start()

    def start(self) -> None:
        code = "import sys; from audiorl.cli import main; main(['rewards', 'serve', *sys.argv[1:]])"
        command = [sys.executable, "-c", code, str(self.file), "--port", str(self.port)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | self.env
        self.process = subprocess.Popen([*command, *self.options], stdout=subprocess.PIPE, env=environment, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "http://127.0.0.1:" in line, line
        self.url = line.split()[-1]
        self.port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
