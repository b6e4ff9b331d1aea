"""Score random logs with SimulEval 1.1.4's own instances and scorers; save the logs and the scores.

    python -m venv /tmp/simuleval && /tmp/simuleval/bin/pip install simuleval==1.1.4 textgrid
    /tmp/simuleval/bin/python tools/simuleval_vectors.py tests/data/simuleval_1.1.4.json

The tests compare the project's own functions with the result to 1e-6. Instances are SimulEval's live ones: a log that
is read back (`--score-only`) has lost whether its source and target are text or speech, which ATD depends on.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from simuleval.evaluator.instance import SpeechToSpeechInstance, SpeechToTextInstance, TextToTextInstance
from simuleval.evaluator.scorers import get_scorer_class

LATENCY = ["AL", "LAAL", "AP", "DAL", "ATD", "StartOffset", "EndOffset", "NumChunks"]
SPEECH_ONLY = ["DiscontinuitySum", "DiscontinuityAve", "DiscontinuityNum"]
WORDS = ["we", "go", "to", "the", "sea", "today", "because", "it", "is", "warm", "and", "nobody", "works"]
WORDS += ["—", "مرحبا", "שלום"]
CHARACTERS = "我们今天去看海天气很好他也想来。"


class Sources:
    """Stands in for SimulEval's data loader: one recording or sentence per index."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def get_source_audio_path(self, index: int) -> str:
        return f"{index}.wav"


def timed(kind: type) -> type:
    """SimulEval's instance whose source is as long as the row says, without a recording."""
    if kind is TextToTextInstance:
        return kind

    class Timed(kind):  # type: ignore[misc, valid-type]
        source_length = property(lambda self: self.dataloader[self.index]["length"])
        source_info = property(lambda self: [f"{self.index}.wav", "samplerate: 16000 Hz"])

    return Timed


def delays_of(rng: random.Random, count: int, length: float, step: float, whole: bool) -> list[float]:
    """Rising delays on a grid of `step`, some repeated; the last ones often at the end of the source."""
    grid = [min(length, step * (1 + int(i))) for i in range(int(length // step) + 1)]
    delays = sorted(rng.choice(grid) for _ in range(count))
    late = rng.randrange(0, count + 1) if rng.random() < 0.5 else 0
    delays[count - late :] = [length] * late
    return [int(d) for d in delays] if whole else delays


def build(rng: random.Random, source: str, target: str, unit: str, folder: Path, size: int) -> list:
    """A log of `size` instances; the first five are the edge cases."""
    kind = {"text-text": TextToTextInstance, "speech-text": SpeechToTextInstance}.get(
        f"{source}-{target}", SpeechToSpeechInstance
    )
    vocabulary = CHARACTERS if unit == "char" else WORDS
    rows, written = [], []
    for i in range(size):
        words = rng.randrange(1, 12)
        reference = ("" if unit == "char" else " ").join(rng.choices(vocabulary, k=words))
        count = max(1, words + rng.randrange(-4, 5))
        length: Any = rng.randrange(2, 15) if source == "text" else rng.choice([2400.0, 3317.5, 961.0, 5000.0, 299.0])
        if i == 0:
            count = 0  # nothing written
        if i == 1:
            count, reference = 3 * words, reference + "  " + reference  # too much; a double space
        if i == 2 and unit == "word":
            reference = ""
        if i == 3:
            count = 1
        rows.append({"source": ["w"] * length if source == "text" else None, "target": reference, "length": length})
        rows[-1]["tgt_lang"] = None
        written.append(count)

    args = argparse.Namespace(eval_latency_unit=unit, output=str(folder))
    loader = Sources(rows)
    instances = []
    for i, (row, count) in enumerate(zip(rows, written, strict=True)):
        one = timed(kind)(i, loader, args)
        step = 1 if source == "text" else rng.choice([40.0, 320.0, 640.0, 1000.0 / 3])
        one.delays = delays_of(rng, count, row["length"], step, source == "text") if count else []
        if i == 4 and source == "speech":
            one.delays = [row["length"]] * count  # everything at the end
        overhead = sorted(rng.uniform(1, 900) for _ in range(count))
        if i == 5 and source == "speech":
            overhead = [o + row["length"] for o in overhead]  # elapsed passes the end of the source at once
        one.elapsed = [0] * count if source == "text" else [d + o for d, o in zip(one.delays, overhead, strict=True)]
        if target == "speech":
            one.durations = [rng.choice([80.0, 240.0, 300.0, 600.0, 710.5]) for _ in range(count)]
            one.target_sample_rate = 1000
            one.prediction_list = [[0.0] * int(d) for d in one.durations]
        else:
            one.prediction_list = rng.choices(vocabulary, k=count)
        one.finish_prediction = True
        instances.append(one)
    return instances


def scores_of(instances: list, names: list[str], aware: bool, use_reference: bool) -> tuple[dict, list[dict]]:
    """The corpus scores, and each instance's own; nothing for instances that SimulEval skips."""
    suffix = "_CA" if aware else ""
    corpus, single = {}, [{} for _ in instances]
    for name in names:
        scorer = get_scorer_class("latency", name)(computation_aware=aware, use_ref_len=use_reference)
        corpus[name + suffix] = scorer(dict(enumerate(instances)))
        for one, values in zip(instances, single, strict=True):
            if one.delays:
                values[name + suffix] = scorer({0: one})
    return corpus, single


def log(seed: int, source: str, target: str, unit: str, use_reference: bool = True, size: int = 12) -> dict[str, Any]:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        instances = build(rng, source, target, unit, Path(folder), size)
        lines = [one.summarize() for one in instances]
        for line, one in zip(lines, instances, strict=True):
            if target == "speech":
                line["prediction"] = f"wavs/{one.index}_pred.wav"
            if "prediction_spm" in line:
                del line["prediction_spm"]
    names = LATENCY + (SPEECH_ONLY if target == "speech" else [])
    corpus, single = scores_of(instances, names, False, use_reference)
    if source == "speech":
        aware, single_aware = scores_of(instances, names, True, use_reference)
        corpus |= aware
        single = [a | b for a, b in zip(single, single_aware, strict=True)]
    return {
        "source_type": source,
        "target_type": target,
        "unit": unit,
        "use_reference_length": use_reference,
        "instances": lines,
        "elapsed": [one.elapsed for one in instances],  # the lines of speech output lack it
        "scores": corpus,
        "instance_scores": single,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    logs = [
        log(0, "speech", "text", "word"),
        log(1, "speech", "text", "char"),
        log(2, "speech", "text", "word", use_reference=False),
        log(3, "text", "text", "word"),
        log(4, "text", "text", "char"),
        log(5, "speech", "speech", "word"),
        log(6, "speech", "speech", "word", use_reference=False),
        log(7, "speech", "speech", "char"),
    ]
    data = {"made_by": "tools/simuleval_vectors.py with SimulEval 1.1.4", "logs": logs}
    args.out.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
