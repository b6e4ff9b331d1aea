"""Runs inputs in a process of its own: its memory and its time are limited, and its death is an outcome.

The process reads a line of JSON {"target", "name", "size"} and `size` bytes, and answers with a line of JSON {"kind",
"detail"}. Start it with `Attacker`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.support.attack.targets import Input, Outcome, Target

ROOT = Path(__file__).parents[3]
SECONDS = 30.0
"""For one input; most take milliseconds."""
START_SECONDS = 180.0
MEMORY = 2 * 2**30
"""Bytes of address space that an input may take beyond what was in use before it: the first table reserves 1 GiB for
pyarrow, and models and word lists that targets load once stay."""


class Attacker:
    """A process that takes inputs, started when the first arrives and again after it died or hung."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.process: subprocess.Popen[bytes] | None = None

    def attack(self, target: str, given: Input) -> Outcome:
        if self.process is None:
            self._start()
        assert self.process is not None and self.process.stdin is not None
        header = {"target": target, "name": given.name, "size": len(given.data)}
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(header).encode() + b"\n" + given.data)
            self.process.stdin.flush()
        line = self._line(self.seconds)
        if line is None:
            self.close()
            return Outcome("hang", f"no end within {self.seconds:g} s")
        if not line:
            code = self.process.wait()
            error = self.errors.read_text(errors="replace").rpartition("Fatal Python error")[2][:1500]
            self.close()
            return Outcome("death", f"exit status {code}: {error}")
        return Outcome(**json.loads(line))

    def _start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="attack"))
        self.errors = self.folder / "stderr"
        environment = os.environ | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1",
            "TMPDIR": str(self.folder),
        }  # fmt: skip
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.attack.process"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=ROOT,
            )  # fmt: skip
        if self._line(START_SECONDS) != b"ready\n":
            error = self.errors.read_text(errors="replace")[-3000:]
            self.close()
            raise RuntimeError(f"the process that takes inputs does not start: {error}")

    def _line(self, seconds: float) -> bytes | None:
        """A line of the process, b"" at its end, None after `seconds`."""
        assert self.process is not None and self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline() if ready else None

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            self.process = None

    def __enter__(self) -> Attacker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _end_badly(given: Input, folder: Path) -> None:
    """What an input must not do, for the test of this module."""
    match given.data:
        case b"die":
            os.kill(os.getpid(), signal.SIGSEGV)
        case b"hang":
            time.sleep(1e6)
        case b"memory":
            bytearray(4 * MEMORY)
        case b"unnamed":
            raise ValueError("something is wrong")
        case b"named":
            raise ValueError(f"{folder}: something is wrong")


BAD = Target("bad", _end_badly, lambda given, result: iter(["wrong"] if given.data == b"wrong" else []))


def outcome(target: Target, given: Input, folder: Path) -> Outcome:
    """How reading the input ends, in this process."""
    from audiorl.errors import RankError

    try:
        result = target.run(given, folder)
    except (ValueError, OSError, FloatingPointError, RankError) as error:  # what `audiorl` prints as one line
        named = any(word in str(error) for word in target.names or (str(folder),))
        return Outcome("error" if named else "unnamed", f"{type(error).__name__}: {error}"[:1000])
    except SystemExit as error:
        return Outcome("error" if error.code == 2 else "traceback", f"exit code {error.code}")
    except BaseException:
        return Outcome("traceback", traceback.format_exc()[-2500:])
    try:
        objections = list(target.judge(given, result))
    except Exception:
        return Outcome("silent", f"the judge fails: {traceback.format_exc()[-2500:]}")
    return Outcome("silent", "; ".join(objections)[:1000]) if objections else Outcome("accepted")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is attacked may print
    import torch

    from tests.support.attack.targets import all_targets

    torch.set_num_threads(1)
    targets = all_targets() | {BAD.name: BAD}
    work = Path(tempfile.mkdtemp())
    print("ready", file=answers, flush=True)
    while line := sys.stdin.buffer.readline():
        header: dict[str, Any] = json.loads(line)
        given = Input(header["name"], sys.stdin.buffer.read(header["size"]))
        folder = work / "input"
        folder.mkdir()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        ended = outcome(targets[header["target"]], given, folder)
        shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps({"kind": ended.kind, "detail": ended.detail}), file=answers, flush=True)


if __name__ == "__main__":
    main()
