"""The numbers of a finished run in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from audiorl.report.summary import disagreements, entry_names, evaluation_rows, read_json_object
from audiorl.run.metrics_log import read_metrics


def print_results(folder: Path, console: Console | None = None) -> None:
    """A table of the held-out numbers: before → after → control, then the other evaluations and the change;
    below it the outside measures and unseen speakers that did not follow the headline.

    Prints nothing for a run without evaluations. Raises ValueError for a damaged eval.json.
    """
    rows = evaluation_rows(folder)
    rows = [row for row in rows if "/" not in row.metric]  # parts of parts are in the report
    if not rows:
        return
    columns = entry_names(rows)
    table = Table(title="held out: " + " → ".join(columns))
    table.add_column("")
    for name in (*columns, "change"):
        table.add_column(name, justify="right")
    for row in rows:
        change = row.change_text()
        table.add_row(row.label, *map(row.cell, columns), f"[red]{change}[/]" if row.worse else change)
    console = console or Console()
    console.print(table)
    metrics = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    for text in disagreements(read_json_object(folder / "eval.json") or {}, metrics):
        console.print(f"[red]▼ {text}[/]")
