"""How long `audiorl view` takes to index and to search 50,000 recorded rollouts, and what a trigram index would cost.

python bench/view.py                       50,000 rollouts of 60 to 300 words in 500 steps
python bench/view.py --rollouts 5000
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sqlite3
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from audiorl.data.corpus import bundled_speech
from audiorl.report.view.server import RunsView, open_view

QUERIES = (
    "",
    "conference",
    '"please enter"',
    "xylophone",
    "reward>0.9 accuracy=1 task:asr",
    "conference -number advantage<0 step<=250",
    "prompt:french reward<0.1",
)
_STEP = 100  # rollouts of a step


def write_run(folder: Path, count: int) -> int:
    """Write a run folder of rollouts: words of real transcripts, tensors as long as the text. Returns its bytes."""
    rng = random.Random(0)
    words = [word for utterance in bundled_speech() for word in utterance.text.split()]
    tensor = "A" * 8
    size = 0
    (folder / "rollouts").mkdir(parents=True)
    for step in range(count // _STEP):
        rows = []
        for i in range(_STEP):
            length = rng.randint(60, 300)
            score = {"total": rng.random(), "parts": {"accuracy": float(rng.random() < 0.5), "format": 1.0}}
            segment = {
                "ids": {"dtype": "int64", "shape": [length], "data": tensor * (length * 4 // 3)},
                "logprobs": {"dtype": "float32", "shape": [length], "data": tensor * (length * 2 // 3)},
                "text": " ".join(rng.choices(words, k=length)),
                "stop_reason": "eos",
                "num_tokens": length,
            }
            sample = {"id": f"clip-{i // 8}", "prompt": "Write down what is said in this French recording."}
            sample |= {"task": rng.choice(("asr", "translation")), "references": ["oui"], "audio": [{"path": "a.wav"}]}
            row = {"step": step, "group_id": f"{step}/{i // 8}", "index": i % 8, "sample": sample, "score": score}
            rows.append({**row, "segments": [segment], "text": segment["text"], "advantage": rng.gauss(0, 1)})
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "rollouts" / f"step_{step + 1:06d}.jsonl").write_text(text)
        size += len(text)
    return size


def seconds(function: Callable[[], Any], repeat: int = 5) -> float:
    """The median of some calls."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeat // 2]


def trigrams(view: RunsView, folder: Path) -> tuple[float, float, float]:
    """(seconds to build, MB, seconds of a search) of SQLite's trigram index over the same texts."""
    texts = view.index.select("rowid, folded", "")
    file = folder / "trigrams.sqlite"
    database = sqlite3.connect(file)
    database.execute("CREATE VIRTUAL TABLE texts USING fts5(folded, tokenize='trigram', content='')")
    build = seconds(lambda: database.executemany("INSERT INTO texts(rowid, folded) VALUES (?, ?)", texts), 1)
    database.commit()
    search = seconds(
        lambda: database.execute("SELECT count(*) FROM texts WHERE texts MATCH '\"conference\"'").fetchone()
    )
    return build, file.stat().st_size / 1e6, search


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=50_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_run(folder / "run", options.rollouts)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        view = open_view([folder / "run"], file=folder / "index.sqlite")
        print(f"{options.rollouts} rollouts, {size / 1e6:.0f} MB of rollout files")
        print(
            f"index: {seconds(view.poll, 1):.2f} s, {(folder / 'index.sqlite').stat().st_size / 1e6:.0f} MB on disk",
            end=", ",
        )
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(f"{grown / 1000:.0f} MB more memory")
        print(f"nothing new: {seconds(view.poll):.3f} s; state: {seconds(view.state):.3f} s")
        for query in QUERIES:
            for order in ("newest", "reward ↓"):
                search = partial(view.index.search, query, order=order)
                print(f"{seconds(search):7.3f} s  {search().count:6} {order:9} {query}")
        build, megabytes, word = trigrams(view, folder)
        print(f"trigram index: {build:.2f} s to build, {megabytes:.0f} MB more, {word:.3f} s for a word")


if __name__ == "__main__":
    main()
