"""audiorl doctor --plan MODEL: the GPU memory that a run with these options needs, as a table or as JSON.

audiorl doctor --plan qwen2.5-omni-3b --gpu-gib 24 --lora-rank 16
audiorl doctor --plan runs/sft/checkpoints/sft/step_000100 --runtime.kind torchrun --runtime.ranks 8 --runtime.zero 3
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from audiorl.config import to_json
from audiorl.options import parse
from audiorl.plan.checkpoint import SavedFile, checkpoint_files
from audiorl.plan.layout import GIB, PHASES
from audiorl.plan.options import Change, PlanOptions, command_line, suggestions
from audiorl.plan.parts import GPU, Plan
from audiorl.plan.released import RELEASED
from audiorl.plan.sizes import Size, count

RENAMED = {
    "--gpus": "--runtime.ranks",
    "--nodes": "--gpus-per-node",
    "--zero": "--runtime.zero",
    "--offload-optimizer": "--runtime.offload",
    "--engine": "--runtime.engine",
    "--placement": "--runtime.placement",
    "--engine-gpus": "--runtime.engines",
    "--tensor-parallel": "--runtime.engine-gpus",
    "--gpu-fraction": "--runtime.gpu-fraction",
    "--reference": "--runtime.references",
    "--reference-gpus": "--runtime.references",
    "--dtype": "--model.dtype",
    "--autocast": "--model.autocast",
    "--audio": "--model.audio",
    "--gradient-checkpointing": "--model.gradient-checkpointing",
    "--group-size": "--grpo.group-size",
    "--share-prompts": "--grpo.share-prompts",
    "--micro-batch-tokens": "--grpo.micro-batch-tokens",
    "--critic": "--grpo.advantage",
    "--response-tokens": "--sampling.max-new-tokens",
    "--max-batch-tokens": "--sampling.max-batch-tokens",
}
"""Options of 0.1, where the planner had its own names, and the run's options that replace them."""


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
    for name in (arg.split("=")[0] for arg in args):
        if name in RENAMED:
            raise ValueError(f"doctor --plan: {name} is now {RENAMED[name]}, the option of the run")
    words = [arg.replace("--lora-rank", "--model.lora.rank", 1) for arg in args]  # the short form
    options: Options = parse(Options, words, prog="audiorl doctor --plan", description=__doc__)
    policy = options.policy(options.path)
    result = options.plan(count(policy))
    files = checkpoint_files(policy, result.layout)
    advice = [] if result.fits else suggestions(options.path, options)
    if options.json:
        print(json.dumps(as_json(options, result, advice, files), indent=2))
    else:
        show(options.path, result, advice, files, console or Console())
    return 0 if result.fits else 1


def show(
    model: str, plan: Plan, advice: Sequence[tuple[Change, Plan]], files: Sequence[SavedFile], console: Console
) -> None:
    """Parameters, a table for each kind of GPU, what a checkpoint is, the verdict."""
    console.print(parameters(model, plan.size))
    for gpu in plan.gpus:
        console.print(memory(gpu))
        if gpu.cache is not None:
            c = gpu.cache
            layout = plan.layout
            console.print(
                f"key-value cache: {c.token_bytes:,} bytes a token and GPU, room for {c.tokens:,} tokens: "
                f"{c.sequences:,} sequences of {layout.prompt_tokens} + {layout.response_tokens}, or {c.shared:,} that "
                "share their group's prompt"
            )
    if plan.host:
        console.print(f"memory of each node beside its GPUs: {plan.host / GIB:.1f} GiB")
    console.print(checkpoint(files))
    verdict(plan, advice, console)


def checkpoint(files: Sequence[SavedFile]) -> str:
    """One line: what each trainer and each critic writes."""
    critics = [file for file in files if file.name.startswith("trainer-critic")]
    trainers = [file for file in files if file.name.startswith("trainer") and file not in critics]
    model = sum(file.bytes for file in files if file not in (*trainers, *critics))
    states = [_states("trainers", trainers), *([_states("critics", critics)] if critics else [])]
    return (
        f"a checkpoint: the model {model / GIB:.2f} GiB, written by the first trainer; {'; '.join(states)}; while they "
        "are written a copy lies in CPU memory"
    )


def _states(writers: str, files: Sequence[SavedFile]) -> str:
    each = f"each of {len(files)} {writers} {files[0].name} and so on" if len(files) > 1 else files[0].name
    return f"{each}, {max(file.bytes for file in files) / GIB:.2f} GiB"


def parameters(model: str, size: Size) -> Table:
    table = Table(title=f"{model}: parameters", title_justify="left")
    table.add_column("part")
    table.add_column("millions", justify="right")
    for name, number in size.parts.items():
        table.add_row(name, f"{number / 1e6:,.1f}")
    table.add_row("all", f"{size.total / 1e6:,.1f}", style="bold")
    table.add_row("trained", f"{(size.trained + size.adapters) / 1e6:,.1f}", style="bold")
    return table


def memory(gpu: GPU) -> Table:
    table = Table(title=f"{gpu.name}: GiB on each of {gpu.count} GPUs of {gpu.size / GIB:g}", title_justify="left")
    table.add_column("part")
    table.add_column("from", style="dim")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    for part in gpu.parts:
        table.add_row(part.name, part.how, *(f"{x / GIB:.2f}" if x else "" for x in part.bytes))
    totals = [f"{x / GIB:.2f}" if x <= gpu.size else f"[red]{x / GIB:.2f}[/]" for x in gpu.totals]
    table.add_row("all", "", *totals, style="bold")
    return table


def verdict(plan: Plan, advice: Sequence[tuple[Change, Plan]], console: Console) -> None:
    for gpu in plan.gpus:
        phase = PHASES[gpu.totals.index(gpu.peak)]
        line = f"{gpu.name}: {gpu.peak / GIB:.1f} of {gpu.size / GIB:g} GiB, in the phase '{phase}'"
        if gpu.cache is not None and not gpu.cache.sequences:
            line += "; no sequence fits into the key-value cache"
        console.print(f"[{'green' if gpu.fits else 'red'}]{line}[/]")
    console.print("[green bold]fits[/]" if plan.fits else "[red bold]does not fit[/]")
    if advice:
        console.print("It fits with one of:")
        for change, changed in advice:
            console.print(f"  {command_line(change)}   ({_peak(changed) / GIB:.1f} GiB)")
    elif not plan.fits:
        console.print("No change of the options makes it fit: use more or larger GPUs, or a smaller model")


def as_json(
    options: Options, plan: Plan, advice: Sequence[tuple[Change, Plan]], files: Sequence[SavedFile]
) -> dict[str, Any]:
    return {
        "model": options.path,
        "checkpoint": [{"name": file.name, "rank": file.rank, "bytes": file.bytes} for file in files],
        "fits": plan.fits,
        "size": to_json(plan.size),
        "layout": to_json(plan.layout),
        "host_bytes": plan.host,
        "gpus": [
            {
                "name": gpu.name,
                "count": gpu.count,
                "bytes": gpu.size,
                "fits": gpu.fits,
                "peak": gpu.peak,
                "total": dict(zip(PHASES, gpu.totals, strict=True)),
                "parts": {part.name: dict(zip(PHASES, part.bytes, strict=True)) for part in gpu.parts},
                "cache": to_json(gpu.cache),
            }
            for gpu in plan.gpus
        ],
        "changes": [{"options": command_line(change), "peak": _peak(changed)} for change, changed in advice],
    }


def _peak(plan: Plan) -> float:
    return max(gpu.peak for gpu in plan.gpus)
