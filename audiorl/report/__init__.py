"""What a run achieved: report.html, a picture for a README, and the numbers of its evaluations.

The page of a run, top to bottom::

    page.py        write_report(run folder): header, then the sections below, settings and footer
    run.py         reads the run folder into a Run; what is absent is named on the page
    summary.py     evaluation_rows (before, after, control), the headline metric, the sentence at the top
    evaluation.py  held-out numbers as bars and a table; answers that changed
    curves.py      metrics.jsonl as small line charts; panels.py: which metrics share one; series.py: the lines
    speech.py      held-out texts as the policy spoke them; copies.py: recordings through a codec
    streams.py     interpreted streams on a time axis, with their audio
    rollouts.py    sampled responses and their rewards, by step
    audio.py       audio files as players inside the page; text.py: prompts, tags and rewards as HTML

Other pictures: picture.py (a PNG of a run), tradeoff.py (quality against latency of scored translators), listening.py
(a page of recordings by several systems), passk.py (pass@k of several models), eval_page.py (the frame of an
evaluation's page). They draw with figures.py; theme.py and style.py hold colours and CSS.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def write_report(run_dir: str | Path, audio_root: Sequence[Path] = ()) -> Path:
    """Write `report.html` into the run folder and return its path.

    Audio is embedded only from the run folder, from the data that the run's configuration names (files there by the
    paths in it, and folders) and from the folders `audio_root`; the page names other clips without reading them.

    Works while the run goes on and after it was killed: what is not there yet is named on the page. Raises ValueError
    where there is no such folder or where a file in it is damaged.
    """
    from audiorl.report.page import write  # loads matplotlib, which a recipe needs only when its run ends

    return write(run_dir, audio_root)


def plot_result(run_dir: str | Path, png_path: str | Path) -> Path:
    """Write a PNG of the run for a README: held-out evaluations on the left, curves on the right.

    Without evaluations or without curves that half is left out. Raises ValueError for a run with neither.
    """
    from audiorl.report.picture import plot

    return plot(run_dir, png_path)


__all__ = ["plot_result", "write_report"]
