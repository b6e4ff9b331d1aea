"""audiorl doctor --plan MODEL: the GPU memory of a run before there is a GPU, as a table or as JSON.

audiorl doctor --plan qwen2.5-omni-3b --gpu-gib 24 --lora-rank 16 --gradient-checkpointing True
audiorl doctor --plan runs/sft/checkpoints/sft/step_000100 --gpus 8 --zero 3 --json True
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from audiorl.config import to_json
from audiorl.plan.memory import GIB, GPU, PHASES, Layout, Plan, changes, make_plan
from audiorl.plan.released import RELEASED
from audiorl.plan.sizes import Size, size_of


@dataclass(frozen=True)
class Options:
    """What a run would need of each GPU: parameters, optimizer, activations, logits and key-value cache."""

    model: Annotated[str, tyro.conf.Positional]
    """A model folder or the name of a released model."""
    layout: Annotated[Layout, tyro.conf.arg(name="")] = field(default_factory=Layout)
    json: bool = False
    """Print everything as JSON."""


def plan(args: Sequence[str], console: Console | None = None) -> int:
    """Print the plan; the exit code is 0 when it fits, else 1. Raises ValueError for impossible options."""
    if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
        raise ValueError(f"doctor --plan: name a model folder or one of {', '.join(RELEASED)}")
    options = tyro.cli(
        Options,
        args=list(args),
        prog="audiorl doctor --plan",
        description=__doc__,
        config=(tyro.conf.FlagConversionOff,),
    )
    layout = options.layout
    size = sized(options.model, layout)
    found = make_plan(size, layout)
    advice = [] if found.fits else suggestions(options.model, found)
    if options.json:
        print(json.dumps(as_json(options.model, found, advice), indent=2))
    else:
        show(options.model, found, advice, console or Console())
    return 0 if found.fits else 1


def sized(model: str, layout: Layout) -> Size:
    return size_of(model, layout.model_config(), layout.codebooks, layout.codebook_size)


def suggestions(model: str, found: Plan) -> list[tuple[str, float]]:
    """Options to add and the peak [bytes] that then remains: single ones that make it fit, or else several together.

    Several are found one at a time, always the one that helps most.
    """
    layout = found.layout
    chosen: list[str] = []
    sizes = {bool(layout.lora_rank): found.size}
    if not layout.lora_rank:
        sizes[True] = sized(model, Layout(lora_rank=16, codebooks=layout.codebooks, codebook_size=layout.codebook_size))

    def over(plan: Plan) -> float:
        short = 0.0 if all(g.cache is None or g.cache.sequences for g in plan.gpus) else plan.gpus[0].size
        return sum(max(gpu.peak - gpu.size, 0) for gpu in plan.gpus) + short

    while not found.fits:
        tried = [(words, make_plan(sizes[bool(new.lora_rank)], new)) for words, new in changes(sizes, found.layout)]
        fitting = [(words, _peak(new)) for words, new in tried if new.fits]
        if fitting:
            return [(" ".join([*chosen, words]), peak) for words, peak in fitting]
        words, best = min(tried, key=lambda t: over(t[1]), default=("", found))
        if over(best) >= over(found):
            return []
        chosen.append(words)
        found = best
    return []


def _peak(found: Plan) -> float:
    return max(gpu.peak for gpu in found.gpus)


def show(model: str, found: Plan, advice: Sequence[tuple[str, float]], console: Console) -> None:
    """Parameters, a table for each kind of GPU, the verdict."""
    console.print(parameters(model, found.size))
    for gpu in found.gpus:
        console.print(memory(gpu))
        if gpu.cache is not None:
            c = gpu.cache
            layout = found.layout
            console.print(
                f"key-value cache: {c.token_bytes:,} bytes a token and GPU, room for {c.tokens:,} tokens: "
                f"{c.sequences:,} sequences of {layout.prompt_tokens} + {layout.response_tokens}, or {c.shared:,} that "
                "share their group's prompt"
            )
    if found.host:
        console.print(f"memory of each node beside its GPUs: {found.host / GIB:.1f} GiB")
    verdict(found, advice, console)


def parameters(model: str, size: Size) -> Table:
    table = Table(title=f"{model}: parameters", title_justify="left")
    table.add_column("part")
    table.add_column("millions", justify="right")
    for name, count in size.parts.items():
        table.add_row(name, f"{count / 1e6:,.1f}")
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


def verdict(found: Plan, advice: Sequence[tuple[str, float]], console: Console) -> None:
    for gpu in found.gpus:
        phase = PHASES[gpu.totals.index(gpu.peak)]
        line = f"{gpu.name}: {gpu.peak / GIB:.1f} of {gpu.size / GIB:g} GiB, in the phase '{phase}'"
        if gpu.cache is not None and not gpu.cache.sequences:
            line += "; no sequence fits into the key-value cache"
        console.print(f"[{'green' if gpu.fits else 'red'}]{line}[/]")
    console.print("[green bold]fits[/]" if found.fits else "[red bold]does not fit[/]")
    if advice:
        console.print("It would with one of:")
        for words, peak in advice:
            console.print(f"  {words}   ({peak / GIB:.1f} GiB)")
    elif not found.fits:
        console.print("None of the known changes make it fit: more or larger GPUs, or a smaller model")


def as_json(model: str, found: Plan, advice: Sequence[tuple[str, float]]) -> dict[str, Any]:
    return {
        "model": model,
        "fits": found.fits,
        "size": to_json(found.size),
        "layout": to_json(found.layout),
        "host_bytes": found.host,
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
            for gpu in found.gpus
        ],
        "changes": [{"options": words, "peak": peak} for words, peak in advice],
    }
