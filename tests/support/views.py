"""Run folders for the view, and requests with its token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from audiorl.report.view.server import RunsView, make_app, open_view

TOKEN = "the-token"
CHROMIUM = Path("/usr/bin/chromium")


def viewed(*folders: Path, **options: Any) -> RunsView:
    """A view that has read everything once."""
    view = open_view(folders, **options)
    view.poll()
    return view


def client(view: RunsView) -> TestClient:
    """Requests as a browser sends them after it has opened the printed address."""
    return TestClient(make_app(view, TOKEN), base_url="http://127.0.0.1:8310", cookies={"audiorl_view": TOKEN})


@contextmanager
def view_process(*arguments: object) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """(printed address, process) of `audiorl view` on a free port; it is killed at the end."""
    command = [sys.executable, "-m", "audiorl.cli", "view", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("open http://127.0.0.1:"), line
        yield line.split()[1], process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def opened(address: str) -> httpx.Client:
    """A client that has the cookie of a printed address."""
    requests = httpx.Client(base_url=address.partition("/?")[0], follow_redirects=True, timeout=30)
    assert requests.get(address).status_code == 200
    return requests


@contextmanager
def browser_page(address: str, width: int = 1400, height: int = 900) -> Iterator[Any]:
    """A page of headless Chromium that fails the test on an error of a script; skips where there is no browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if not CHROMIUM.exists():
        pytest.skip(f"no browser at {CHROMIUM}: apt-get install chromium")
    errors: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(120_000)  # a busy machine imports for a while before it answers
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "console", lambda m: errors.append(m.text) if m.type == "error" and "status of 400" not in m.text else None
        )
        page.goto(address)
        yield page
        browser.close()
    assert not errors


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait until a condition holds. The pages forbid eval, which Playwright's own waiting for functions needs."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def append_line(path: Path, row: dict[str, Any], newline: bool = True) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n" * newline)
