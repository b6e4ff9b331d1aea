"""The scores of generated speech for people: a table, and a page that plays the recordings with the most errors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import soundfile
from rich.table import Table

from audiorl.audio import AudioClip
from audiorl.eval._generate import Row
from audiorl.eval._seedtts import Judged, grouped
from audiorl.eval._speech import RATE
from audiorl.eval.metrics.prosody import MEASURES
from audiorl.eval.metrics.text import ErrorCounts
from audiorl.report.listening import Card, Take, listening_page
from audiorl.report.summary import metric_name, show


def joint_rows(scores: Row) -> list[tuple[str, str]]:
    """(label, text) of the steps at joints between pieces, with those in the middle of pieces, which is usual."""
    rows = []
    for name, unit in (("level", "dB"), ("pitch", "semitones")):
        if f"{name}_step" in scores:
            usual = scores.get(f"usual_{name}_step")
            elsewhere = "" if usual is None else f" ({usual:.1f} in the middle of pieces)"
            rows.append((f"{name} step at joints, {unit}", f"{scores[f'{name}_step']:.1f}{elsewhere}"))
    return rows


def _prosody_rows(scores: Row) -> list[tuple[str, str]]:
    """(label, text) of the means of prosody with their intervals, and of the prompts'."""
    rows = []
    for name in MEASURES:
        if (value := scores.get(name)) is not None:
            mean, low, high = (show(value[key], name) for key in ("mean", "low", "high"))
            prompts = scores.get("reference_prosody")
            compared_with = "" if prompts is None else f", prompts {show(prompts[name], name)}"
            rows.append((metric_name(name), f"{mean} ({low} to {high}){compared_with}"))
    return rows


def _other_rows(scores: Row) -> list[tuple[str, str]]:
    """(label, text) of prosody, joints and counts."""
    counts = [(key, str(scores[key])) for key in ("utterances", "recordings", "missing", "unreadable")]
    return [*_prosody_rows(scores), *joint_rows(scores), *counts]


def score_table(scores: Row, title: str) -> Table:
    """The scores for people, rates and similarities in percent."""
    out = Table(title=title, show_header=False)

    def percent(label: str, value: Any) -> None:
        interval = f" ({100 * value['low']:.2f}–{100 * value['high']:.2f})" if isinstance(value, dict) else ""
        out.add_row(label, f"{100 * (value['mean'] if isinstance(value, dict) else value):.2f}{interval}")

    percent("WER % (mean over utterances)", scores["mean_wer"])
    percent("WER % (corpus)", scores["wer"])
    for key, label in (
        ("intra", "cosine × 100 between turns of one speaker"),
        ("inter", "cosine × 100 between turns of two speakers"),
        ("similarity", "SIM × 100"),
        ("own_voice", "turns nearest to their own voice, %"),
        ("voice_similarity", "cosine × 100 with their own voice"),
        ("voice_drift", "its change per minute, × 100"),
    ):
        if key in scores:
            percent(label, scores[key])
    for label, text in _other_rows(scores):
        out.add_row(label, text)
    return out


def score_page(judged: Sequence[Judged], scores: Row, about: str, out: Path, worst: int) -> str:
    """A page in the folder `out`: the scores, and the `worst` recordings with the most errors, each with its prompt; of
    conversations all turns. `about`: which texts, and by which recogniser."""
    groups = grouped(judged)
    rates = {name: sum((e for _, _, e in group), ErrorCounts()).rate for name, group in groups.items()}
    cards = []
    for name in sorted(groups, key=lambda n: -rates[n])[:worst]:
        takes = []
        for item, row, errors in groups[name]:
            if item.prompt is not None:
                takes.append(Take("prompt", _playable(item.prompt, out)))
            values = {"WER %": 100 * errors.rate}
            values |= {"SIM": row["similarity"]} if "similarity" in row else {}
            values |= {metric_name(name): row[name] for name in MEASURES[:2] if name in row}
            values |= {"pauses %": 100 * row["pauses"]} if "pauses" in row else {}
            transcript = row.get("hypothesis") if "problem" not in row else f"({row['problem']})"
            said = f"{item.speaker}: {item.text}" if item.group else "generated"
            takes.append(Take(said, None if "problem" in row else _playable(item.clip, out), values, transcript))
        text = "" if groups[name][0][0].group else groups[name][0][0].text
        cards.append(Card(f"{name} · WER {100 * rates[name]:.1f}%", text, tuple(takes)))
    rows = [("WER % (mean over utterances)", f"{100 * scores['mean_wer']['mean']:.2f}")]
    if "similarity" in scores:
        similarity = scores["similarity"]
        mean = similarity["mean"] if isinstance(similarity, dict) else similarity
        rows.append(("SIM × 100", f"{100 * mean:.2f}"))
    lead = f"{about}. The worst {len(cards)} first."
    return listening_page("Text to speech", lead, ["", ""], rows + _other_rows(scores), cards, out)


def _playable(clip: AudioClip | None, out: Path) -> str | None:
    """The file itself; a part of one is written as a file for the page."""
    if clip is None or clip.path is None:
        return None
    if clip.duration is None and not clip.start:
        return str(Path(clip.path).resolve())
    name = f"parts/{hashlib.sha256(clip.key.encode()).hexdigest()[:16]}.flac"
    (out / "parts").mkdir(exist_ok=True)
    soundfile.write(out / name, clip.load(RATE), RATE, format="FLAC", subtype="PCM_16")
    return name
