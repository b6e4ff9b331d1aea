"""Look at runs in a browser while they train, and label answers: audiorl view runs/*."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from audiorl.errors import install
from audiorl.options import first_word, parse


@dataclass(frozen=True)
class ViewOptions:
    """Look at runs in a browser while they train: curves, rollouts with their audio, evaluations; and label answers."""

    runs: Positional[tuple[Path, ...]]
    """Run folders."""
    port: int = 8310
    """Port on this machine; 0: any free one."""
    labels: Path | None = None
    """File to which labels are appended; by default there is nothing to label, and nothing is written."""
    label: Literal["pairs", "scores"] = "pairs"
    """Question to ask: which of two answers is better, or a score from 1 to 5."""


def main(args: list[str]) -> int:
    """Serve the pages until Ctrl-C."""
    first_word(args, "view: name run folders, for example: audiorl view runs/*")
    options = parse(ViewOptions, args, prog="audiorl view")
    try:
        from audiorl.report.view.server import serve
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "starlette", "uvicorn"):
            raise
        raise ValueError(f"view: needs fastapi and uvicorn: {install('serve')}") from error
    from audiorl.cli.sound import edited

    serve(options.runs, options.port, options.labels, options.label, edited)
    return 0
