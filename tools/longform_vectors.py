"""Score random long streams with mweralign 1.4.1, simulstream 1.0.0 and OmniSTEval 0.1.10; save inputs and results.

    python -m venv /tmp/peers && /tmp/peers/bin/pip install mweralign==1.4.1 simulstream==1.0.0 omnisteval==0.1.10
    /tmp/peers/bin/python tools/longform_vectors.py tests/data/longform.json

The tests compare the project's own functions with the result. Delays and offsets are ms; the peers get seconds where
they ask for them.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from mweralign import mweralign
from omnisteval.alignment import Word
from omnisteval.resegment import resegment
from omnisteval.scoring import YAALScorer
from simulstream.metrics.readers import ReferenceSentenceDefinition
from simulstream.metrics.scorers.latency.stream_laal import StreamLaal

WORDS = ["the", "cat", "Cat", "sat", "on", "a", "mat", ".", ",", "and", "then", "it", "went", "home", "again"]
WORDS += ["because", "dogs", "bark", "!"]
CHARACTERS = "我们今天去看海，天气很好。他们也想来！"


def stream(rng: random.Random, unit: str) -> dict:
    """References with times, and a translation of them with words lost, added, changed and moved across borders."""
    vocabulary = WORDS if unit == "word" else list(CHARACTERS)
    segments, hypothesis, clock = [], [], float(rng.randrange(0, 2000))
    for _ in range(rng.randrange(1, 7)):
        reference = [rng.choice(vocabulary) for _ in range(rng.randrange(1, 9))]
        duration = float(rng.randrange(500, 4000))
        segments.append({"start": clock, "duration": duration, "reference": reference})
        for word in reference:
            draw = rng.random()
            if draw < 0.65:
                hypothesis.append(word)
            elif draw < 0.8:
                hypothesis.append(rng.choice(vocabulary))
            if rng.random() < 0.12:
                hypothesis += rng.choices(vocabulary, k=rng.randrange(1, 4))
        clock += duration + rng.randrange(0, 800)
    if not hypothesis:
        hypothesis = [rng.choice(vocabulary)]
    delays = sorted(float(rng.randrange(500, int(clock) + 800)) for _ in hypothesis)
    overhead = sorted(float(rng.randrange(0, 900)) for _ in hypothesis)
    elapsed = [d + o for d, o in zip(delays, overhead, strict=True)]
    return {"unit": unit, "segments": segments, "hypothesis": hypothesis, "delays": delays, "elapsed": elapsed}


def pieces_of(lines: list[int], units: list) -> list[list]:
    out, at = [], 0
    for count in lines:
        out.append(units[at : at + count])
        at += count
    assert at == len(units)
    return out


def score(one: dict) -> dict:
    """What the peers make of a stream: pieces as numbers of units, latencies per segment in ms."""
    references = [" ".join(s["reference"]) for s in one["segments"]]
    cut = mweralign.align_texts("\n".join(references), " ".join(one["hypothesis"])).split("\n")
    counts = [len(line.split()) for line in cut]
    assert len(counts) == len(references)
    mwer = {"counts": counts}
    for name in ("delays", "elapsed"):
        values = []
        for segment, piece in zip(one["segments"], pieces_of(counts, one[name]), strict=True):
            definition = ReferenceSentenceDefinition("", segment["start"], segment["duration"])
            shifted = [delay - definition.start_time for delay in piece]
            laal = StreamLaal._sentence_level_laal
            values.append(laal(shifted, definition.duration, len(segment["reference"])) if piece else None)
        mwer[name] = values

    char_level = one["unit"] == "char"
    end = max(s["start"] + s["duration"] for s in one["segments"])
    segmentation = [
        {"offset": s["start"], "duration": s["duration"], "time_to_recording_end": end - s["start"]}
        for s in one["segments"]
    ]
    joined = ["".join(s["reference"]) if char_level else " ".join(s["reference"]) for s in one["segments"]]
    wanted = [Word(unit.lower(), seq_id=i) for i, s in enumerate(one["segments"]) for unit in s["reference"]]
    rows = zip(one["hypothesis"], one["delays"], one["elapsed"], strict=True)
    written = [Word(unit, emission_cu=delay, emission_ca=elapsed) for unit, delay, elapsed in rows]
    instances, _ = resegment([wanted], [written], segmentation, joined, char_level=char_level)
    soft: dict = {"counts": [len(i.emission_cu or ()) for i in instances]}
    for name, aware in (("delays", False), ("elapsed", True)):
        scorer = YAALScorer(computation_aware=aware, is_longform=True)
        soft[name] = [scorer.compute(i) if i.emission_cu else None for i in instances]
    short = YAALScorer()
    soft["short"] = [short.compute(i) if i.emission_cu else None for i in instances]
    return {"mwer": mwer, "soft": soft}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--streams", type=int, default=60)
    args = parser.parse_args()
    rng = random.Random(0)
    streams = [stream(rng, "char" if i % 3 == 2 else "word") for i in range(args.streams)]
    data = {
        "made_by": "tools/longform_vectors.py with mweralign 1.4.1, simulstream 1.0.0 and OmniSTEval 0.1.10",
        "streams": [{**one, **score(one)} for one in streams],
    }
    args.out.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
