"""What a question benchmark gives to who listens, and to who only reads.

    audiorl data build-qa qa --speech corpus
    python bench/question_probe.py qa

For every kind of question whose answers occur in both splits, two accuracies on the held-out questions. One is of ridge
regression on what the bundled Whisper tiny.en encoder makes of the clips (the means of eight equal parts), fitted to
the training questions. The other is of naive Bayes over the words of the choices, their length and their place, which
never listens; chance is 25 %. Neither reads the question: it is the same for all of a kind.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from audiorl.audio import AudioClip
from audiorl.eval.metrics.corpus import bootstrap_interval
from audiorl.models import AudioPolicy
from audiorl.models.families.qwen_omni import tiny

PARTS = 8
RIDGE = 300.0
Row = dict[str, Any]


def features(policy: AudioPolicy, folder: Path, rows: Sequence[Row], batch: int = 16) -> np.ndarray:
    """[rows, PARTS * hidden]: the encoder's output, averaged over equal parts of each clip."""
    out = []
    for start in range(0, len(rows), batch):
        clips = [AudioClip(path=str(folder / row["audio_id"])) for row in rows[start : start + batch]]
        with torch.no_grad():
            for encoded in policy.encode_audio(clips):
                parts = torch.tensor_split(encoded.float(), PARTS)
                out.append(torch.cat([p.mean(0) if len(p) else torch.zeros(encoded.shape[1]) for p in parts]).numpy())
    return np.stack(out)


def probe(train: Sequence[Row], x: np.ndarray, held_out: Sequence[Row], y: np.ndarray) -> list[bool]:
    """Whether ridge regression on x [train, D] answers each held-out question, with features y [held_out, D]."""
    names = sorted({row["answer"] for row in train})
    mean, deviation = x.mean(0), x.std(0) + 1e-6
    x, y = (x - mean) / deviation, (y - mean) / deviation
    target = np.eye(len(names))[[names.index(row["answer"]) for row in train]]
    weights = x.T @ np.linalg.solve(x @ x.T + RIDGE * np.eye(len(x)), target - target.mean(0))
    scores = y @ weights + target.mean(0)
    return [
        _best(row, lambda c, s=s: s[names.index(c)] if c in names else -1.0)
        for row, s in zip(held_out, scores, strict=True)
    ]


def reader(train: Sequence[Row], held_out: Sequence[Row]) -> list[bool]:
    """Whether naive Bayes over the choices' words, ranks by length and places answers each held-out question."""
    counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for row in train:
        for choice in row["choices"]:
            counts[choice == row["answer"]].update(_marks(row, choice))

    def score(row: Row) -> Callable[[str], float]:
        return lambda choice: sum(
            math.log((counts[True][mark] + 1) / (counts[False][mark] + 3)) for mark in _marks(row, choice)
        )

    return [_best(row, score(row)) for row in held_out]


def _marks(row: Row, choice: str) -> list[str]:
    rank = sorted(row["choices"], key=len).index(choice)
    return [*re.findall(r"\w+", choice.lower()), f"rank {rank}", f"place {row['choices'].index(choice)}"]


def _best(row: Row, score: Callable[[str], float]) -> bool:
    return bool(max(row["choices"], key=score) == row["answer"])


def _percent(right: Sequence[bool]) -> str:
    low, high = bootstrap_interval([float(r) for r in right], share=True)
    return f"{100 * np.mean(right):.1f} ({100 * low:.0f}–{100 * high:.0f})"


def main(folder: Path) -> None:
    splits = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("train", "held_out")}
    policy = tiny(hidden=384, layers=1)  # of the width of the encoder: the random projector loses nothing
    table = Table("task", "kind", "train", "held out", "encoder %", "text only %", title=str(folder))
    every: dict[str, list[bool]] = {"encoder": [], "text": []}
    for task, kind in dict.fromkeys((row["task"], row["sub-category"]) for row in splits["train"]):
        train, held_out = ([r for r in split if r["sub-category"] == kind] for split in splits.values())
        if not {r["answer"] for r in held_out} <= {r["answer"] for r in train}:
            continue
        right = probe(train, features(policy, folder, train), held_out, features(policy, folder, held_out))
        read = reader(train, held_out)
        every["encoder"] += right
        every["text"] += read
        table.add_row(task, kind, str(len(train)), str(len(held_out)), _percent(right), _percent(read))
        print(kind, _percent(right), _percent(read), flush=True)
    table.add_section()
    table.add_row("all", "", "", str(len(every["text"])), _percent(every["encoder"]), _percent(every["text"]))
    Console().print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
