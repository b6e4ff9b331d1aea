"""How CPU threads wait for each other. Imports no torch: OpenMP reads these settings when torch is loaded."""

import os


def use_passive_waiting() -> None:
    """Let OpenMP's threads sleep at barriers, unless OMP_WAIT_POLICY is set.

    By default they spin. On a machine with other work a spinning thread keeps its processor from the thread that it
    waits for, which made steps with two threads many times slower than with one (bench/threads.py,
    docs/performance.md).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
