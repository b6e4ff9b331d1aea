"""Write the report of a run again: audiorl report runs/mmau."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from audiorl.options import first_word, parse


@dataclass(frozen=True)
class ReportOptions:
    """Write the report of a run, FOLDER/report.html, again; or that of the runs in FOLDER, one a seed."""

    folder: Positional[Path]
    """The run folder, or a folder with run folders."""
    audio_root: tuple[Path, ...] = ()
    """Folders whose audio may be embedded, besides the run folder and the run's data: see `audiorl.report`."""


def main(args: list[str]) -> int:
    """Write the report; return the exit code."""
    first_word(args, "report: name one run folder, for example: audiorl report runs/quickstart")
    options = parse(ReportOptions, args, prog="audiorl report")
    from audiorl.report import write_report

    print(write_report(options.folder, options.audio_root))
    return 0
