"""Commands of Python in processes that have imported torch, transformers and audiorl before they begin.

A server that has imported them forks each process. To import them costs ten seconds of a core, more than what most
commands of a test do.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection, forkserver
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_forks = multiprocessing.get_context("forkserver")
# Of these the server leaves out what is not installed.
_forks.set_forkserver_preload(
    ["deepspeed", "audiorl.cli", "audiorl.models.families.qwen_omni", "audiorl.train.rl.train"]
)


def free_port() -> int:
    """A port of the loopback address that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _execute(arguments: Sequence[str], environment: Mapping[str, str], printed: str, errors: str | None) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for stream, file in ((1, printed), (2, errors or printed)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream)
    if errors:
        os.setsid()
    sys.path.insert(0, str(ROOT))
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


def start(
    arguments: Sequence[str], printed: Path, errors: Path | None = None, **environment: str
) -> multiprocessing.process.BaseProcess:
    """`python ARGUMENTS` as a process that writes what it prints to the file.

    With a file for its stderr it is in a process group of its own, which a signal can reach as a terminal's would.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()  # with one thread: the server's count is that of its children
    printed.touch()
    settings = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    process = _forks.Process(target=_execute, args=(arguments, settings, str(printed), str(errors) if errors else None))
    process.start()
    return process


def forked(*arguments: str, ranks: int = 1, timeout: float = 900) -> str:
    """What `python ARGUMENTS` prints, as one process or as the ranks that torchrun starts.

    AssertionError where one fails; the others are then killed, as torchrun does.
    """
    environments: list[dict[str, str]] = [{}]
    if ranks > 1:
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        world |= {"LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "none", "GLOO_SOCKET_IFNAME": "lo"}
        environments = [world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    with tempfile.NamedTemporaryFile("r") as printed:
        processes = [start(arguments, Path(printed.name), **own) for own in environments]
        ends = time.monotonic() + timeout
        while None in (codes := {p.exitcode for p in processes}) and codes <= {None, 0} and time.monotonic() < ends:
            connection.wait([p.sentinel for p in processes if p.exitcode is None], timeout=1.0)
        for process in processes:
            process.kill()
            process.join()
        said = printed.read()
        assert codes == {0}, f"exit statuses {codes}: {said[-6000:]}"
        return said
