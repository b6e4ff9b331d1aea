"""audiorl doctor --plan MODEL: the GPU memory that a run with these options needs, as a table or as JSON.

audiorl doctor --plan qwen2.5-omni-3b --gpu-gib 24 --lora-rank 16
audiorl doctor --plan runs/sft/checkpoints/sft/step_000100 --runtime.kind torchrun --runtime.ranks 8 --runtime.zero 3
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from audiorl.config import to_json
from audiorl.options import parse
from audiorl.plan.memory import GIB, GPU, PHASES, Change, MemoryPlan, PlanOptions, make_plan, suggestions
from audiorl.plan.models import RELEASED


@dataclass(frozen=True)
class Options(PlanOptions):
    """The memory of each GPU: parameters, optimizer, activations, logits and key-value cache."""

    path: Positional[str] = ""
    """A model folder or the name of a released model."""
    json: bool = False
    """Print everything as JSON."""


def plan(args: Sequence[str], console: Console | None = None) -> int:
    """Print the plan; the exit code is 0 when it fits, else 1. Raises ValueError for impossible options."""
    if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
        raise ValueError(f"doctor --plan: name a model folder or one of {', '.join(RELEASED)}")
    words = [arg.replace("--lora-rank", "--model.lora.rank", 1) for arg in args]  # the short form
    options: Options = parse(Options, words, prog="audiorl doctor --plan", description=__doc__)
    result = make_plan(options.size(options.path), options)
    advice = [] if result.fits else suggestions(options.path, options)
    if options.json:
        _print_json(options, result, advice)
    else:
        _print(options, result, advice, console or Console())
    return 0 if result.fits else 1


def _print(options: Options, result: MemoryPlan, advice: Sequence[tuple[Change, MemoryPlan]], console: Console) -> None:
    """Parameters, a table for each kind of GPU, the verdict."""
    size = result.size
    table = Table("part", title=f"{options.path}: parameters", title_justify="left")
    table.add_column("millions", justify="right")
    for name, number in size.parts.items():
        table.add_row(name, f"{number / 1e6:,.1f}")
    table.add_row("all", f"{size.total / 1e6:,.1f}", style="bold")
    table.add_row("trained", f"{(size.trained + size.adapters) / 1e6:,.1f}", style="bold")
    console.print(table)
    for gpu in result.gpus:
        console.print(_memory(gpu))
        if gpu.cache is not None:
            c, sequence = gpu.cache, f"{options.prompt_tokens} + {options.sampling.max_new_tokens}"
            console.print(
                f"key-value cache: {c.token_bytes:,} bytes a token and GPU, room for {c.tokens:,} tokens: "
                f"{c.sequences:,} sequences of {sequence}, or {c.shared:,} that share their group's prompt"
            )
    if result.host:
        console.print(f"memory of each node beside its GPUs: {result.host / GIB:.1f} GiB")
    for gpu in result.gpus:
        line = f"{gpu.name}: {gpu.peak / GIB:.1f} of {gpu.size / GIB:g} GiB, in the phase '{_phase(gpu)}'"
        if gpu.cache is not None and not gpu.cache.sequences:
            line += "; no sequence fits into the key-value cache"
        console.print(f"[{'green' if gpu.fits else 'red'}]{line}[/]")
    console.print("[green bold]fits[/]" if result.fits else "[red bold]does not fit[/]")
    if advice:
        console.print("It fits with one of:")
        for change, after in advice:
            console.print(f"  {_command_line(change)}   ({_peak(after) / GIB:.1f} GiB)")
    elif not result.fits:
        console.print(
            "No single change of the options makes it fit: combine some, use more or larger GPUs, or a smaller model"
        )


def _memory(gpu: GPU) -> Table:
    title = f"{gpu.name}: GiB on each of {gpu.count} GPUs of {gpu.size / GIB:g}"
    table = Table("part", title=title, title_justify="left")
    table.add_column("from", style="dim")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    for part in gpu.parts:
        table.add_row(part.name, part.how, *(f"{x / GIB:.2f}" if x else "" for x in part.bytes))
    totals = [f"{x / GIB:.2f}" if x <= gpu.size else f"[red]{x / GIB:.2f}[/]" for x in gpu.totals]
    table.add_row("all", "", *totals, style="bold")
    return table


def _print_json(options: Options, result: MemoryPlan, advice: Sequence[tuple[Change, MemoryPlan]]) -> None:
    said = {
        "model": options.path,
        "fits": result.fits,
        "size": to_json(result.size),
        "host_bytes": result.host,
        "gpus": [
            {
                **{"name": gpu.name, "count": gpu.count, "bytes": gpu.size, "fits": gpu.fits, "peak": gpu.peak},
                "total": dict(zip(PHASES, gpu.totals, strict=True)),
                "parts": {part.name: dict(zip(PHASES, part.bytes, strict=True)) for part in gpu.parts},
                "cache": to_json(gpu.cache),
            }
            for gpu in result.gpus
        ],
        "changes": [{"options": _command_line(change), "peak": _peak(after)} for change, after in advice],
    }
    print(json.dumps(said, indent=2))


def _command_line(change: Change) -> str:
    return " ".join(
        f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}" for name, value in change.items()
    )


def _phase(gpu: GPU) -> str:
    return PHASES[gpu.totals.index(gpu.peak)]


def _peak(result: MemoryPlan) -> float:
    return max(gpu.peak for gpu in result.gpus)
