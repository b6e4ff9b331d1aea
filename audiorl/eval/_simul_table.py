"""The scores of simultaneous translation in files and as a table for people."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.table import Table

from audiorl.eval._options import write_scores as write_json
from audiorl.tasks.simul.quality import NAMES

_COUNTS = ("instances", "silent", "skipped", "unscored")
_WITHOUT_UNIT = {
    *("AP", "NumChunks", "DiscontinuityNum", "LengthRatio", "Repetition", "DecoderPasses"),
    *("DurationWithin20", "DurationRatio", "OwnVoice", "OwnVoiceInStream", "MixedTurns"),
}
"""Neither qualities nor latencies."""


def write_scores(folder: Path, scores: dict[str, Any]) -> None:
    """scores.json, null where a value is not defined, and scores.tsv with three decimals."""
    defined = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in scores.items()}
    write_json(folder, defined)
    names = metric_names(scores)
    values = ["" if math.isnan(scores[name]) else f"{scores[name]:.3f}" for name in names]
    (folder / "scores.tsv").write_text("\t".join(names) + "\n" + "\t".join(values) + "\n", encoding="utf-8")


def metric_names(scores: dict[str, Any]) -> list[str]:
    """The scores that are metrics, in order."""
    return [k for k, v in scores.items() if k not in _COUNTS and isinstance(v, int | float) and not isinstance(v, bool)]


def table(scores: dict[str, Any], title: str) -> Table:
    """The scores for people: latencies in seconds (words for written sources), with their computation-aware variant."""
    words = scores["source_type"] == "text"
    out = Table(title=title)
    out.add_column("metric")
    out.add_column("value", justify="right")
    size = scores.get("run", {}).get("batch_size", 1)
    out.add_column("with computation" if size == 1 else f"with computation ({size} streams at once)", justify="right")
    for name in metric_names(scores):
        if not name.endswith("_CA"):
            aware = scores.get(f"{name}_CA")
            out.add_row(name, _shown(name, scores[name], words), "" if aware is None else _shown(name, aware, words))
    out.add_section()
    for sign in scores.get("degenerate", ()):
        out.add_row("degenerate", sign, "")
    for name in _COUNTS:
        if name in scores:
            out.add_row(name, str(scores[name]), "")
    return out


def _shown(name: str, value: float, words: bool) -> str:
    plain = name.removesuffix("_CA")
    if math.isnan(value):
        return "-"
    if name.removeprefix("ASR-") in NAMES.values():
        return f"{value:.2f}"
    if plain in _WITHOUT_UNIT or name.startswith("ASR-") or name.endswith(("Similarity", "SimilarityDifference")):
        return f"{value:.3f}"
    return f"{value:.3f} words" if words else f"{value / 1000:.3f} s"
