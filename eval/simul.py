"""Simultaneous translation: latency and quality of a SimulEval log.

    python -m eval.simul --score results/simul --language es
    python -m eval.simul --score results/talks --language zh --segments tst.yaml --references tst.zh
    python -m eval.simul --plot tradeoff.png results/wait3 results/wait5 results/policy

The scored folder holds instances.log and config.yaml, as SimulEval writes them (see audiorl.simulst.logs). Writes into
it: scores.json (all scores, units and settings) and scores.tsv (SimulEval's table: a line of names, a line of values).
A folder of speech output is scored for quality when it holds asr_transcripts.txt, one line per instance.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from audiorl.metrics.latency import latency_unit
from audiorl.simulst.logs import Instance, SourceType, TargetType, read_log, read_types
from audiorl.simulst.plot import PlotQuality, plot_tradeoff
from audiorl.simulst.quality import NAMES, Quality, bleu_tokenizer
from audiorl.simulst.scoring import Segments, score
from audiorl.simulst.segments import match_segments, read_segments

TRANSCRIPTS = "asr_transcripts.txt"
_COUNTS = ("instances", "silent")


@dataclass(frozen=True)
class Options:
    """Score a log of simultaneous translation, or plot scored ones."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Scored folders to plot; one whose subfolders are scored becomes a line."""
    score: Path | None = None
    """Score the log in this folder."""
    language: str | None = None
    """Code of the output's language: decides on words or characters, and on BLEU's tokenizer."""
    segments: Path | None = None
    """Reference segments of unsegmented streams, .yaml, .json or .jsonl: wav, offset, duration (s), reference."""
    references: Path | None = None
    """References of the segments, one a line, where their file does not hold them."""
    sources: Path | None = None
    """Source sentences for COMET, one a line per instance or segment."""
    quality: tuple[Quality, ...] = ("bleu", "chrf")
    use_reference_length: bool = True
    """Latency against the reference's length; off it is that of the output."""
    cumulative_elapsed: bool = False
    """Elapsed times hold all computing since the start, as SimulEval logs them: count only that since the last write.
    For long streams."""
    plot: Path | None = None
    """Draw quality against latency of the folders into this PNG."""
    plot_quality: PlotQuality = "chrF"
    plot_latency: str | None = None
    """A latency of scores.json; by default StreamLAAL where all have it, else LAAL."""


def score_folder(options: Options) -> dict[str, Any]:
    """The scores of a log and what they were computed with; writes scores.json and scores.tsv beside it."""
    folder, language = options.score, options.language
    assert folder
    if not language:
        raise ValueError("--language: give the code of the output's language, such as de, zh or ar")
    instances = read_log(folder)
    source_type, target_type = types_of(folder, instances)
    transcripts = _lines(folder / TRANSCRIPTS) if target_type == "speech" else None
    sources = _lines(options.sources) if options.sources else None
    if options.sources and sources is None:
        raise ValueError(f"{options.sources}: no such file")
    scores: dict[str, Any] = score(
        instances,
        target_type,
        language,
        source_type=source_type,
        quality=options.quality,
        segments=_segments(options, instances),
        transcripts=transcripts,
        sources=sources,
        use_reference_length=options.use_reference_length,
        cumulative_elapsed=options.cumulative_elapsed,
    )
    scores |= {
        "language": language,
        "unit": latency_unit(language),
        "source_type": source_type,
        "target_type": target_type,
        "bleu_tokenizer": bleu_tokenizer(language),
        "use_reference_length": options.use_reference_length,
        "cumulative_elapsed": options.cumulative_elapsed,
        "segments": str(options.segments) if options.segments else None,
    }
    write_scores(folder, scores)
    return scores


def types_of(folder: Path, instances: list[Instance]) -> tuple[SourceType, TargetType]:
    """Source and target type of a log; the target is what the instances are, see `read_types`."""
    return read_types(folder)[0], "speech" if instances[0].speech else "text"


def write_scores(folder: Path, scores: dict[str, Any]) -> None:
    """scores.json, null where a value is not defined, and scores.tsv with three decimals."""
    defined = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in scores.items()}
    text = json.dumps(defined, indent=2, ensure_ascii=False, allow_nan=False)
    (folder / "scores.json").write_text(text + "\n", encoding="utf-8")
    names = metric_names(scores)
    values = ["" if math.isnan(scores[name]) else f"{scores[name]:.3f}" for name in names]
    (folder / "scores.tsv").write_text("\t".join(names) + "\n" + "\t".join(values) + "\n", encoding="utf-8")


def metric_names(scores: dict[str, Any]) -> list[str]:
    """The scores that are metrics, in order."""
    return [k for k, v in scores.items() if k not in _COUNTS and isinstance(v, int | float) and not isinstance(v, bool)]


def table(scores: dict[str, Any], title: str) -> Table:
    """The scores for people: latencies in seconds (words for written sources), their aware variant beside them."""
    words = scores["source_type"] == "text"
    out = Table(title=title)
    out.add_column("metric")
    out.add_column("value", justify="right")
    out.add_column("with computation", justify="right")
    for name in metric_names(scores):
        if not name.endswith("_CA"):
            aware = scores.get(f"{name}_CA")
            out.add_row(name, _shown(name, scores[name], words), "" if aware is None else _shown(name, aware, words))
    out.add_section()
    for name in _COUNTS:
        out.add_row(name, str(scores[name]), "")
    return out


def _shown(name: str, value: float, words: bool) -> str:
    if math.isnan(value):
        return "-"
    if name in NAMES.values():
        return f"{value:.2f}"
    if name.removesuffix("_CA") in ("AP", "NumChunks", "DiscontinuityNum"):
        return f"{value:.3f}"
    return f"{value:.3f} words" if words else f"{value / 1000:.3f} s"


def _segments(options: Options, instances: list[Instance]) -> Segments | None:
    if options.segments is None:
        if options.references is not None:
            raise ValueError("--references: belongs to --segments, the file of their times")
        return None
    return match_segments(instances, read_segments(options.segments, options.references))


def _lines(path: Path) -> list[str] | None:
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason}); save the file as UTF-8") from error


def run(options: Options) -> dict[str, Any]:
    """Do what the options say and return the scores (empty where only a picture was drawn)."""
    if options.plot is not None:
        path = plot_tradeoff(options.folders, options.plot, quality=options.plot_quality, latency=options.plot_latency)
        Console().print(f"wrote {path}")
        return {}
    if options.folders:
        raise ValueError("folders without an option are those of --plot OUT.png; one folder is scored by --score DIR")
    if options.score is None:
        raise ValueError("give --score DIR to score a log, or --plot OUT.png and scored folders")
    scores = score_folder(options)
    Console().print(table(scores, str(options.score)))
    return scores


if __name__ == "__main__":
    try:
        run(tyro.cli(Options, description=__doc__))
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"error: {error}") from error
