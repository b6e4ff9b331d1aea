"""Clients that hang up, and rewards that never return while a process is asked to stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from audiorl.report.view.server import make_app
from audiorl.rewards import RemoteReward, RewardServerError
from audiorl.rewards.concurrency import EarlyScores
from audiorl.types import Rollout, Sample, Score, Segment
from tests.support.reports import write_run
from tests.support.reward_servers import app_of, serving
from tests.support.views import TOKEN, viewed

COOKIE = f"Host: 127.0.0.1\r\nCookie: audiorl_view={TOKEN}\r\n"
ROLLOUT = Rollout(Sample("q", ()), (Segment(torch.zeros(0).long(), torch.tensor([1]), torch.zeros(1), "x"),), "g", 0)


def hang_up(address: str, request: str) -> None:
    """Send a request, or a part of one, and reset the connection."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(request.encode())
        time.sleep(0.05)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


@pytest.mark.parametrize("token", [None, "secret"])
def test_a_client_of_a_reward_server_hangs_up(
    tmp_path: Path, token: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "r.py").write_text("def reward(rollouts):\n    return [0.0 for _ in rollouts]\n")
    with serving(app_of(tmp_path / "r.py", token=token)) as address, caplog.at_level(logging.WARNING):
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        for body in ("Content-Length: 1000\r\n\r\n{abc", "Transfer-Encoding: chunked\r\n\r\n5\r\nabc"):
            hang_up(address, f"POST /v1/scores HTTP/1.1\r\nHost: x\r\n{body}")
        hang_up(address, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.3)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_browser_hangs_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    view = viewed(write_run(tmp_path / "run"), labels=tmp_path / "labels.jsonl")
    with serving(make_app(view, TOKEN)) as address, caplog.at_level(logging.WARNING):
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        hang_up(address, f"POST /labels HTTP/1.1\r\n{COOKIE}Content-Length: 100\r\n\r\n{{")
        for path in ("/", "/state", "/events", "/rollouts", "/question"):
            hang_up(address, f"GET {path} HTTP/1.1\r\n{COOKIE}\r\n")
        time.sleep(0.3)
        view.stop.set()
    assert not [record for record in caplog.records if record.exc_info]


def test_an_interrupt_does_not_wait_for_a_reward_that_hangs() -> None:
    release, begun = threading.Event(), threading.Event()

    class Hanging:
        by_group = True

        def __call__(self, rollouts: object) -> list[Score]:
            begun.set()
            release.wait()
            return [Score(0.0)]

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), EarlyScores(Hanging()) as early:  # type: ignore[arg-type]
        early.add([ROLLOUT])
        assert begun.wait(10)
        raise KeyboardInterrupt
    assert time.monotonic() - began < 5
    release.set()


def test_a_reward_server_whose_reward_hangs_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "import time\nfrom pathlib import Path\n\ndef reward(rollouts):\n"
        "    Path(__file__).with_suffix('.begun').touch()\n    time.sleep(1000)\n"
    )
    command = [sys.executable, "-c", "import sys; from audiorl.cli import main; sys.exit(main(sys.argv[1:]))"]
    process = subprocess.Popen(
        [*command, "rewards", "serve", str(tmp_path / "r.py"), "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().split()[-1]
        errors: list[Exception] = []

        def ask() -> None:
            try:
                RemoteReward(address, tries=1)([ROLLOUT])
            except RewardServerError as error:
                errors.append(error)

        client = threading.Thread(target=ask)
        client.start()
        while not (tmp_path / "r.begun").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        client.join(30)
        assert "the server is stopping" in str(errors[0])
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
