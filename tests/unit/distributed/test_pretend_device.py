"""The tests of `on_device.py`, in a process of their own: torch takes a new device only before its first backward pass,
and other tests must not find one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parent / "on_device.py"


@pytest.mark.slow
def test_the_device_and_a_run_of_each_kind() -> None:
    run("smoke")


def test_everything_else_that_generates_and_trains() -> None:
    run("not smoke")


def run(marker: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FILE.parents[3])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
