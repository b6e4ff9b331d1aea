"""One kit of pages: the report of a run, the live view, the study of rewards, benchmark pages.

kit.py         the document, tables, text and rewards as HTML; assets/ holds templates, style sheets and scripts
audio.py       players, which files they may embed, pitch and level below them
charts.py      pictures: curves, bars, quality against latency, pass@k
rollouts.py    questions, responses, held-out examples; streams.py: interpreted streams on a time axis
run.py         reads a run folder; summary.py: its held-out numbers, the headline, the sentence at the top
page.py        the report of a run, or of several seeds; listening.py: pages of recordings and questions
view/, study/  the live view of runs; rewards on recorded rollouts
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def write_report(run_dir: str | Path, audio_root: Sequence[Path] = ()) -> Path:
    """Write `report.html` into the run folder, or into a folder of runs that differ by their seed; return its path.

    Audio is embedded only from the run folder, from the data that the run's configuration names (files there by the
    paths in it, and folders) and from the folders `audio_root`; the page names other clips without reading them.

    Works while the run goes on and after it was killed: what is not there yet is named on the page. Raises ValueError
    where there is no such folder or where a file in it is damaged.
    """
    from audiorl.report.page import write  # loads matplotlib, which a recipe needs only when its run ends

    return write(run_dir, audio_root)


__all__ = ["write_report"]
