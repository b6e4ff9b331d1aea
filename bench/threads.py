"""Seconds of a training step with one and with two threads, with and without a busy process, by OpenMP wait policy.

    python bench/threads.py [--rounds 3] [--seconds 3]

Each measurement is a process of its own, because OpenMP reads OMP_WAIT_POLICY when torch is loaded. "spinning" is
OpenMP's default: threads that wait at a barrier use their processor until the other threads arrive. "passive" threads
sleep; `audiorl` sets it unless the variable is set. The busy processes are as many as there are processors.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

from rich.console import Console
from rich.table import Table

STEP = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
layers = [torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256), torch.nn.LayerNorm(256)]
model = torch.nn.Sequential(*layers, *layers)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(128, 256)
def step():
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
step()
began, steps = time.perf_counter(), 0
while time.perf_counter() - began < float(sys.argv[2]):
    step()
    steps += 1
print((time.perf_counter() - began) / steps)
"""
CASES = {"1 thread": (1, None), "2 threads, spinning": (2, None), "2 threads, passive": (2, "passive")}


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that compute for the length of the block."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def seconds(threads: int, policy: str | None, duration: float) -> float:
    """Seconds of a step, measured in a new process for about `duration` seconds."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    if policy is not None:
        environment["OMP_WAIT_POLICY"] = policy
    command = [sys.executable, "-c", STEP, str(threads), str(duration)]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each case, in turns")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a measurement")
    args = parser.parse_args()
    loads = {"nothing else": 0, "busy processes": os.cpu_count() or 1}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in product(loads, CASES)}
    for _ in range(args.rounds):
        for load, count in loads.items():
            with busy(count):
                for case, (threads, policy) in CASES.items():
                    times[load, case].append(seconds(threads, policy, args.seconds))
                    print(f"{load}, {case}: {times[load, case][-1]:.4f} s", file=sys.stderr, flush=True)
    table = Table("beside", "step", "seconds (median)", "best", "worst", "ratio to 1 thread")
    for (load, case), values in times.items():
        ratio = statistics.median(values) / statistics.median(times[load, "1 thread"])
        table.add_row(load, case, *(f"{f(values):.4f}" for f in (statistics.median, min, max)), f"{ratio:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
