"""How good the rows of `audiorl annotate` are, on recordings with known labels.

    python experiments/measure_annotation.py build CORPUS RECORDINGS        # from the corpus of `audiorl data build`
    audiorl annotate RECORDINGS --out ANNOTATED --asr … --speaker …
    python experiments/measure_annotation.py score RECORDINGS ANNOTATED

`build` joins clips of two speakers of each of five languages, in random order, with pauses of 0.4 to 1.5 s and noise at
-55 dB, into one FLAC file a language, and writes labels.json. `score` prints: word error rates by language of each
recogniser and of the chosen transcript; the same where the agreement of the recognisers is high; speakers, languages,
and the boundaries of speech. A unit of the error rates is a group of clips and rows that overlap.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from audiorl.data.corpus import corpus
from audiorl.data.silence import RATE, speech_in
from audiorl.eval.metrics.text import ErrorCounts, word_errors

VOICES = {
    "en": ("en", "tuxpaint-en"),
    "es": ("es", "tuxpaint-es"),
    "fr": ("fr", "tuxpaint-fr"),
    "it": ("it", "it-menardi"),
    "ru": ("ru", "tuxpaint-ru"),
}
SECONDS = (1.2, 6.0)
NOISE = 10 ** (-55 / 20)
THRESHOLDS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
Label = dict[str, Any]
Row = dict[str, Any]


def build(folder: Path, out: Path, clips: int, seed: int) -> None:
    """Write the recordings and their labels."""
    utterances = corpus(folder)
    labels: list[Label] = []
    out.mkdir(parents=True, exist_ok=True)
    for language, voices in VOICES.items():
        rng = np.random.default_rng((seed, *language.encode()))
        chosen = []
        for voice in voices:
            own = [u for u in utterances if u.id.startswith(f"{voice}/") and len(u.text) > 6]
            fitting = [u for u in own if SECONDS[0] <= u.duration <= SECONDS[1]]
            if len(fitting) < clips:  # a voice of short clips
                fitting = sorted(own, key=lambda u: -u.duration)[: 2 * clips]
            chosen += [fitting[i] for i in rng.permutation(len(fitting))[:clips]]
        pieces, position = [np.zeros(RATE, np.float32)], RATE
        for i in rng.permutation(len(chosen)):
            u = chosen[i]
            wav = u.clip.load(RATE)
            first, end = speech_in(wav)
            pause = round(RATE * rng.uniform(0.4, 1.5))
            label = {"audio": f"{language}.flac", "start": position / RATE, "end": (position + end - first) / RATE}
            labels.append(label | {"text": u.text, "language": language, "speaker": u.speaker, "id": u.id})
            pieces += [wav[first:end], np.zeros(pause, np.float32)]
            position += end - first + pause
        wav = np.concatenate(pieces)
        wav = wav + NOISE * rng.standard_normal(len(wav)).astype(np.float32)
        soundfile.write(out / f"{language}.flac", wav.clip(-1, 1), RATE, subtype="PCM_16")
    (out / "labels.json").write_text(json.dumps(labels, ensure_ascii=False, indent=0), encoding="utf-8")
    minutes = max(label["end"] for label in labels) * len(VOICES) / 60
    print(f"{out}: {len(labels)} clips in {len(VOICES)} recordings of about {minutes / len(VOICES):.1f} minutes")


def units(labels: Sequence[Label], rows: Sequence[Row]) -> Iterator[tuple[list[Label], list[Row]]]:
    """Groups of labels and rows of one recording that overlap, in order."""
    for audio in sorted({label["audio"] for label in labels}):
        spans = [(r["start"], r["start"] + r["duration"], r) for r in rows if Path(r["audio"]).name == audio]
        spans += [(label["start"], label["end"], label) for label in labels if label["audio"] == audio]
        group: tuple[list[Label], list[Row]] = ([], [])
        reach = -1.0
        for start, end, item in sorted(spans, key=lambda span: span[:2]):
            if start >= reach and (group[0] or group[1]):
                yield group
                group = ([], [])
            group["duration" in item].append(item)
            reach = max(reach, end)
        yield group


def joined(texts: Sequence[str | None]) -> str:
    return " ".join(text for text in texts if text)


def errors(labels: Sequence[Label], texts: Sequence[str | None]) -> ErrorCounts:
    return word_errors(joined([label["text"] for label in labels]), joined(texts), "basic", labels[0]["language"])


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def print_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    for line in (head, ["---"] * len(head), *lines):
        print("| " + " | ".join(line) + " |")
    print()


def score(recordings: Path, annotated: Path) -> None:
    """Print the tables."""
    labels = json.loads((recordings / "labels.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (annotated / "manifest.jsonl").read_text(encoding="utf-8").splitlines()]
    left_out = [json.loads(line) for line in (annotated / "left_out.jsonl").read_text(encoding="utf-8").splitlines()]
    annotated_audio = {Path(row["audio"]).name for row in (*rows, *left_out)}
    labels = [label for label in labels if label["audio"] in annotated_audio]
    groups = list(units(labels, rows))
    said = [(ls, rs) for ls, rs in groups if ls]
    names = list(dict.fromkeys(name for row in rows for name in row["transcripts"]))
    languages = sorted({label["language"] for label in labels})

    def counts(language: str, name: str | None) -> ErrorCounts | None:
        own = [(ls, rs) for ls, rs in said if ls[0]["language"] == language]
        if name and not any(name in r["transcripts"] for _, rs in own for r in rs):
            return None
        picked = (errors(ls, [r["text"] if name is None else r["transcripts"].get(name) for r in rs]) for ls, rs in own)
        return sum(picked, ErrorCounts())

    lines = []
    for name in (*names, None):
        cells = [counts(language, name) for language in languages]
        lines.append([name or "chosen", *("–" if c is None else percent(c.rate) for c in cells)])
    print_table(["word errors in %", *languages], lines)

    with_agreement = [
        (errors(ls, [r["text"] for r in rs]), float(np.average([r["confidence"] for r in rs], weights=lengths(rs))))
        for ls, rs in said
        if rs and all("confidence" in r for r in rs)
    ]
    total = sum(c.reference_length for c, _ in with_agreement)
    lines = []
    for threshold in THRESHOLDS if with_agreement else ():
        above = [c for c, agreement in with_agreement if agreement >= threshold]
        below = [c for c, agreement in with_agreement if agreement < threshold]
        share = sum(c.reference_length for c in above) / total
        rates = [percent(sum(some, ErrorCounts()).rate) if some else "–" for some in (above, below)]
        lines.append([f"{threshold:g}", str(len(above)), percent(share), *rates])
    print_table(["agreement at least", "units", "words kept in %", "word errors of them", "of the others"], lines)

    owners = [(r, max(ls, key=lambda label: overlap(label, r))) for ls, rs in said for r in rs]
    right = np.mean([r["language"] == label["language"] for r, label in owners])
    print(f"language: right for {percent(float(right))} % of {len(owners)} rows")
    if all("speaker" in row for row in rows):
        scores = compare_clusters([label["speaker"] for _, label in owners], [r["speaker"] for r, _ in owners])
        true = len({label["speaker"] for label in labels})
        print(
            f"speakers: {len({r['speaker'] for r, _ in owners})} clusters of {true} speakers, purity "
            f"{scores.purity:.3f}, homogeneity {scores.homogeneity:.3f}, completeness {scores.completeness:.3f}, "
            f"V-measure {scores.v_measure:.3f}"
        )
    starts = [rs[0]["start"] - ls[0]["start"] for ls, rs in said if rs]
    ends = [rs[-1]["start"] + rs[-1]["duration"] - ls[-1]["end"] for ls, rs in said if rs]
    for what, differences in (("start", starts), ("end", ends)):
        low, middle, high = np.percentile(differences, (5, 50, 95))
        print(f"{what} of rows minus {what} of speech: median {middle:+.2f} s, 90 % in {low:+.2f} to {high:+.2f} s")
    missed = sum(len(ls) for ls, rs in said if not rs)
    print(f"clips without a row: {missed} of {len(labels)}; rows without speech: {sum(not ls for ls, _ in groups)}")


@dataclass(frozen=True)
class ClusterScores:
    """Each in [0, 1], 1 for a perfect clustering.

    purity: share of items that belong to the most frequent class of their cluster; 1 for clusters of single items.
    homogeneity = 1 - H(class | cluster) / H(class), 1 where each cluster holds one class. completeness: the same with
    the roles exchanged, 1 where each class lies in one cluster. v_measure: their harmonic mean. Source: Rosenberg and
    Hirschberg 2007.
    """

    purity: float
    homogeneity: float
    completeness: float
    v_measure: float


def compare_clusters(classes: Sequence[Hashable], clusters: Sequence[Hashable]) -> ClusterScores:
    """Of items with these classes that were put into these clusters. ValueError for no items or unequal lengths."""
    if len(classes) != len(clusters) or not classes:
        raise ValueError(f"compare_clusters: {len(classes)} classes and {len(clusters)} clusters; give one an item")
    pairs = Counter(zip(classes, clusters, strict=True))
    best: Counter[Hashable] = Counter()
    for (_, cluster), count in pairs.items():
        best[cluster] = max(best[cluster], count)
    joint, of_class, of_cluster = (_entropy(c) for c in (pairs, Counter(classes), Counter(clusters)))
    homogeneity = 1 - (joint - of_cluster) / of_class if of_class else 1.0
    completeness = 1 - (joint - of_class) / of_cluster if of_cluster else 1.0
    total = homogeneity + completeness
    v_measure = 2 * homogeneity * completeness / total if total > 0 else 0.0
    return ClusterScores(sum(best.values()) / len(classes), homogeneity, completeness, v_measure)


def _entropy(counts: Counter) -> float:
    """In nats."""
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def lengths(rows: Sequence[Row]) -> list[float]:
    return [row["duration"] for row in rows]


def overlap(label: Label, row: Row) -> float:
    return min(label["end"], row["start"] + row["duration"]) - max(label["start"], row["start"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build")
    builder.add_argument("corpus", type=Path)
    builder.add_argument("out", type=Path)
    builder.add_argument("--clips", type=int, default=16, help="clips of each speaker")
    builder.add_argument("--seed", type=int, default=0)
    scorer = commands.add_parser("score")
    scorer.add_argument("recordings", type=Path)
    scorer.add_argument("annotated", type=Path)
    args = parser.parse_args()
    if args.command == "build":
        build(args.corpus, args.out, args.clips, args.seed)
    else:
        score(args.recordings, args.annotated)


if __name__ == "__main__":
    main()
