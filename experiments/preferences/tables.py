"""Cells of the tables: means with intervals, and how answers read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from arms import markdown

from audiorl.eval.metrics.corpus import bootstrap_interval
from audiorl.rewards import ThinkTranscript
from audiorl.rewards.answers import extract_think
from audiorl.rewards.text_quality import Repetition
from audiorl.types import Rollout, Sample, Score, Segment
from preferences.bench import Bench, read, slug

CHOSEN = "preference/chosen_logprob"
"""Of a training run's last step: the log-prob of the chosen answers."""


def policy_table(bench: Bench, runs: Sequence[tuple[str, str]]) -> str:
    """One line for each (title, pattern of run names): means over the seeds, with intervals over the questions."""
    labels = list(bench.measured)
    header = ["", "seeds", *(f"accuracy on {label}" for label in labels), f"{labels[-1]}: each seed", "mean of tasks"]
    header += ["tokens", "well-formed %", "KL to the start", "chosen log-prob", "repeated words %", "thoughts said %"]
    transcripts = {s.id: s for s in bench.measured[labels[0]]}
    tasks = [s.task for s in bench.measured[labels[-1]]]
    lines = []
    for title, pattern in runs:
        folders = sorted((bench.out / "results").glob(pattern))
        files = ["kl.json", *(f"{slug(label)}.json" for label in labels)]
        folders = [f for f in folders if all((f / file).exists() for file in files)]
        if not folders:
            continue
        answers = {label: [read(f / f"{slug(label)}.json")["answers"] for f in folders] for label in labels}
        first = [a for rows in answers[labels[0]] for a in rows]
        cells = [title, str(len(folders))]
        cells += [share_with_interval([[float(a["right"]) for a in rows] for rows in answers[s]]) for s in labels]
        right_SN = 100 * np.array([[a["right"] for a in rows] for rows in answers[labels[-1]]])
        of_tasks = [right_SN[:, [task == one for task in tasks]].mean() for one in sorted(set(tasks))]
        cells += [", ".join(f"{seed.mean():.1f}" for seed in right_SN), f"{np.mean(of_tasks):.1f}"]
        cells.append(f"{np.mean([a['tokens'] for a in first]):.1f}")
        cells.append(f"{100 * np.mean([a['well_formed'] for a in first]):.0f}")
        cells.append(f"{np.mean([gap for f in folders for gap in read(f / 'kl.json')['kl']]):.2f}")
        trained = [read(f / "train.json") for f in folders if (f / "train.json").exists()]
        chosen = [row[CHOSEN] for row in trained if CHOSEN in row]
        cells.append(f"{mean(chosen):.1f}" if chosen else "")
        cells.append(f"{100 * np.mean([repeated(a['text']) for a in first]):.1f}")
        cells.append(f"{100 * np.mean([all_said(transcripts[a['id']], a['text']) for a in first]):.1f}")
        lines.append(cells)
    return markdown(header, lines)


def all_said(sample: Sample, text: str) -> float:
    """1 where the thought has words and each of them is a word of the transcript."""
    return transcribed(sample, text).parts["said"]


def transcribed(sample: Sample, text: str, words: int | None = None) -> Score:
    """How far the thought is what is said, compared with so many words of the transcript."""
    nothing = torch.zeros(0, dtype=torch.long)
    (score,) = ThinkTranscript(words)([Rollout(sample, (Segment(nothing, nothing, torch.zeros(0), text),), sample.id)])
    return score


def repeated(text: str) -> float:
    """The share of a thought's words that it has had before."""
    return -Repetition(n=1, unit="words").value(extract_think(text) or text)


def share_with_interval(columns: Sequence[Sequence[float]]) -> str:
    """Percent of the mean over seeds, with the 95 % bootstrap interval over questions of their means over seeds."""
    return interval(list(np.mean(np.array(columns), axis=0)))


def interval(values: Sequence[float], scale: float = 100.0, digits: int = 1) -> str:
    """The mean with its 95 % bootstrap interval, empty without values."""
    if not values:
        return ""
    low, high = bootstrap_interval(values)
    return f"{scale * mean(values):.{digits}f} ({scale * low:.{digits}f}–{scale * high:.{digits}f})"


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
