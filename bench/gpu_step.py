"""Everything that is claimed of a GPU, in one run of less than eight minutes, against its targets.

    python bench/gpu_step.py                              # on a GPU; the parts may be named: steps quickstart doctor
    python bench/gpu_step.py steps --side eager fp32      # GRPO steps of 3B with other settings, see SIDES
    python bench/gpu_step.py --tiny                       # small, on a CPU too: it shows that the script runs

steps: GRPO of a Qwen2.5-Omni-3B thinker of its real sizes, random weights, 8 prompts of 20 s of audio x 8 answers of
256 tokens; seconds of rollout and update, ms for each token of all answers, MFU of the update, peak of memory.
quickstart: `audiorl train quickstart` without its control, its seconds and its gain on people it never heard.
doctor: `audiorl doctor --gpu`, with the step against TRL where that is installed.

gpu-step.json is written after each part. Run it from a checkout; what it needs is in docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from audiorl.config import ModelConfig, SamplingConfig
from audiorl.gpu_check.run import describe
from audiorl.gpu_check.setup import GPU_SCALE, PRETEND_SCALE, Setup
from audiorl.gpu_check.steps import (
    MFU,
    QUICKSTART_SECONDS,
    ROLLOUT_SECONDS,
    UPDATE_SECONDS,
    thinker,
    time_steps,
)

CUDA = torch.cuda.is_available()
DTYPE = "bfloat16" if CUDA else "float32"
SIDES = {
    "captured": (ModelConfig(dtype=DTYPE, gradient_checkpointing=True), True),
    "eager": (ModelConfig(dtype=DTYPE, gradient_checkpointing=True), False),
    "fp32": (ModelConfig(dtype="float32", autocast=True, gradient_checkpointing=True), True),
    "no checkpointing": (ModelConfig(dtype=DTYPE), True),
}
"""By name: the model's options, and whether decoding steps are captured as CUDA graphs."""
MS_A_TOKEN, TRL_RATIO, DOCTOR_SECONDS = 9.0, 3.0, 240.0


def verdict(name: str, value: float, target: float, unit: str, most: bool = True) -> dict[str, Any]:
    """Print a line, and return it: `value` must be at most `target`, or at least."""
    reached = value <= target if most else value >= target
    mark = ("ok  " if reached else "MISS") if CUDA else "    "
    print(f"{mark} {name}: {value:.3g} {unit}, {'at most' if most else 'at least'} {target:g}", flush=True)
    return {"value": value, "target": target, "reached": reached}


def steps(options: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    """GRPO steps of each side, in turn; the last step counts."""
    prompts, group, most, seconds = (2, 2, 6, 2.0) if options.tiny else (8, 8, 256, 20.0)
    out: dict[str, Any] = {}
    for side in options.side:
        config, captured = SIDES[side]
        policy = thinker(setup, config)
        sampling = SamplingConfig(max_new_tokens=most, cuda_graphs=captured)
        found = time_steps(policy, setup, sampling, options.steps, prompts, group, seconds)
        for k, t in enumerate(found):
            numbers = f"rollout {t.rollout:.2f} s ({t.ms_a_token(most):.1f} ms a token), update {t.update:.2f} s"
            print(f"     {side}, step {k}: {numbers}, MFU {t.mfu:.1%}, peak {t.peak_gb:.1f} GB", flush=True)
        last = found[-1]
        out[side] = {"steps": [asdict(t) for t in found]}
        out[side] |= {
            "rollout": verdict(f"{side}: rollout", last.rollout, ROLLOUT_SECONDS, "s"),
            "ms_a_token": verdict(f"{side}: decoding", last.ms_a_token(most), MS_A_TOKEN, "ms a token"),
            "update": verdict(f"{side}: update", last.update, UPDATE_SECONDS, "s"),
            "step": verdict(f"{side}: step", last.rollout + last.update, 4.0, "s"),
            "mfu": verdict(f"{side}: MFU of the update", last.mfu, MFU, "", most=False),
        }
        del policy
        if CUDA:
            torch.cuda.empty_cache()
    return out


def quickstart(options: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    """The whole command, as a user gives it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "quickstart"
        command = [sys.executable, "-m", "audiorl", "train", "quickstart", "--out", str(out), "--control", "False"]
        began = time.perf_counter()
        done = subprocess.run([*command, *(["--tiny"] * options.tiny)], capture_output=True, text=True, timeout=300)
        seconds = time.perf_counter() - began
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
            return {"failed": done.returncode}
        found = json.loads((out / "eval.json").read_text())
        gain = found["after"]["accuracy"] - found["before"]["accuracy"]
    took = verdict("quickstart", seconds, QUICKSTART_SECONDS, "s")
    return {"seconds": took, "gain": verdict("its gain in accuracy", gain, 0.05, "", most=False)}


def doctor(options: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    """Every check, with a report of its own."""
    report = options.out.with_name("gpu-report.json")
    command = [sys.executable, "-m", "audiorl.gpu_check", "--out", str(report)]
    if options.tiny:
        command += ["--pretend", "--only", "packed|GRPO|quickstart|experts"]
    began = time.perf_counter()
    code = subprocess.run(command).returncode
    checks = json.loads(report.read_text())["checks"]
    out: dict[str, Any] = {"code": code}
    out["seconds"] = verdict("doctor", time.perf_counter() - began, DOCTOR_SECONDS + 60, "s")
    if (ratio := checks.get("step against TRL", {}).get("numbers", {}).get("ratio")) is not None:
        out["trl"] = verdict("TRL takes", ratio, TRL_RATIO, "times as long", most=False)
    return out


PARTS = {"steps": steps, "quickstart": quickstart, "doctor": doctor}


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all, where none is named")
    parser.add_argument("--side", nargs="+", choices=SIDES, default=["captured"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("gpu-step.json"))
    options = parser.parse_args(args)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {min(unknown)!r}; give some of {', '.join(PARTS)}")
    if not CUDA and not options.tiny:
        parser.error("torch sees no GPU; --tiny runs everything small on the CPU")
    device = torch.device("cuda", 0) if CUDA else torch.device("cpu")
    setup = Setup(device, GPU_SCALE) if CUDA and not options.tiny else Setup(torch.device("cpu"), PRETEND_SCALE)
    report: dict[str, Any] = {"machine": describe(device), "tiny": options.tiny}
    for name in options.parts or PARTS:
        began = time.perf_counter()
        report[name] = PARTS[name](options, setup)
        report[name]["took"] = time.perf_counter() - began
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
