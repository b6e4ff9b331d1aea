"""audiorl doctor --plan MODEL: the GPU memory that a run with these options needs, as a table or as JSON.

audiorl doctor --plan qwen2.5-omni-3b --gpu-gib 24 --lora-rank 16
audiorl doctor --plan runs/sound/checkpoints/sft/step_001000 --gpu-gib 24 --frames 430 --rl.group-size 24
audiorl doctor --plan flow --network.width 1024 --network.heads 16 --network.joint-blocks 7 --network.single-blocks 14
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from audiorl.config import to_json
from audiorl.options import first_word, parse
from audiorl.plan.flow import NEW, FlowPlanOptions, is_flow, plan_flow
from audiorl.plan.memory import GIB, PHASES, Change, MemoryPlan, PlanOptions, make_plan, suggestions
from audiorl.plan.models import RELEASED
from audiorl.run.folder import newest_checkpoint


@dataclass(frozen=True)
class Options(PlanOptions):
    """The memory of each GPU: parameters, optimizer, activations, logits and key-value cache."""

    path: Positional[str] = ""
    """A model folder or the name of a released model."""
    json: bool = False
    """Print everything as JSON."""


@dataclass(frozen=True)
class FlowOptions(FlowPlanOptions):
    """The memory of a GPU that trains a flow: parameters, optimizer and activations."""

    path: Positional[str] = ""
    """The folder of a flow, or `flow` for a new one of the size --network."""
    json: bool = False
    """Print everything as JSON."""


def plan(args: Sequence[str]) -> int:
    """Print the plan; the exit code is 0 when it fits, else 1. Raises ValueError for impossible options."""
    first_word(args, f"doctor --plan: name a model folder or one of {NEW}, {', '.join(RELEASED)}")
    words = [arg.replace("--lora-rank", "--model.lora.rank", 1) for arg in args]  # the short form
    options: Options | FlowOptions
    words[0] = newest_checkpoint(words[0])
    if is_flow(words[0]):
        options = parse(FlowOptions, words, prog="audiorl doctor --plan", description=__doc__)
        result, advice = plan_flow(options.path, options), []
    else:
        options = parse(Options, words, prog="audiorl doctor --plan", description=__doc__)
        result = make_plan(options.size(options.path), options)
        advice = [] if result.fits else suggestions(options.path, options)
    changes = [(_command_line(change), max(gpu.peak for gpu in after.gpus)) for change, after in advice]
    if options.json:
        gpus = [
            {
                **{"name": gpu.name, "count": gpu.count, "bytes": gpu.size, "fits": gpu.fits, "peak": gpu.peak},
                "total": dict(zip(PHASES, gpu.totals, strict=True)),
                "parts": {part.name: dict(zip(PHASES, part.bytes, strict=True)) for part in gpu.parts},
                "cache": to_json(gpu.cache),
            }
            for gpu in result.gpus
        ]
        said = {"model": options.path, "fits": result.fits, "size": to_json(result.size), "host_bytes": result.host}
        more = {"gpus": gpus, "changes": [{"options": line, "peak": peak} for line, peak in changes]}
        print(json.dumps(said | more, indent=2))
    else:
        _print(options, result, changes)
    return 0 if result.fits else 1


def _print(options: Options | FlowOptions, result: MemoryPlan, changes: Sequence[tuple[str, float]]) -> None:
    """Parameters, a table for each kind of GPU, the verdict."""
    console, size = Console(), result.size
    table = Table("part", title=f"{options.path}: parameters", title_justify="left")
    table.add_column("millions", justify="right")
    for name, number in {**size.parts, "all": size.total, "trained": size.trained + size.adapters}.items():
        table.add_row(name, f"{number / 1e6:,.1f}", style=None if name in size.parts else "bold")
    console.print(table)
    verdicts = []
    for gpu in result.gpus:
        title = f"{gpu.name}: GiB on each of {gpu.count} GPUs of {gpu.size / GIB:g}"
        table = Table("part", title=title, title_justify="left")
        table.add_column("from", style="dim")
        for phase in PHASES:
            table.add_column(phase, justify="right")
        for part in gpu.parts:
            table.add_row(part.name, part.how, *(f"{x / GIB:.2f}" if x else "" for x in part.bytes))
        totals = [f"{x / GIB:.2f}" if x <= gpu.size else f"[red]{x / GIB:.2f}[/]" for x in gpu.totals]
        table.add_row("all", "", *totals, style="bold")
        console.print(table)
        phase = PHASES[gpu.totals.index(gpu.peak)]
        verdict = f"{gpu.name}: {gpu.peak / GIB:.1f} of {gpu.size / GIB:g} GiB, in the phase '{phase}'"
        if gpu.cache is not None and isinstance(options, Options):
            c, sequence = gpu.cache, f"{options.prompt_tokens} + {options.sampling.max_new_tokens}"
            console.print(
                f"key-value cache: {c.token_bytes:,} bytes a token and GPU, room for {c.tokens:,} tokens: "
                f"{c.sequences:,} sequences of {sequence}, or {c.shared:,} that share their group's prompt"
            )
            verdict += "" if c.sequences else "; no sequence fits into the key-value cache"
        verdicts.append(f"[{'green' if gpu.fits else 'red'}]{verdict}[/]")
    if result.host:
        console.print(f"memory of each node beside its GPUs: {result.host / GIB:.1f} GiB")
    console.print("\n".join([*verdicts, "[green bold]fits[/]" if result.fits else "[red bold]does not fit[/]"]))
    if changes:
        console.print("It fits with one of:")
        for line, peak in changes:
            console.print(f"  {line}   ({peak / GIB:.1f} GiB)")
    elif not result.fits:
        console.print(
            "No single change of the options makes it fit: combine some, use more or larger GPUs, or a smaller model"
        )


def _command_line(change: Change) -> str:
    return " ".join(f"--{n} {v:g}" if isinstance(v, float) else f"--{n} {v}" for n, v in change.items())
