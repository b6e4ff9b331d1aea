"""GRPO on speech recognition from a released Whisper and SFT of equal compute, over seeds.

    audiorl data build corpus
    python experiments/measure_recognition.py --corpus corpus --path models/whisper-base --out runs/whisper
    python experiments/measure_recognition.py --corpus corpus --path models/whisper-base --out runs/try --quick

Each seed is a run of `asr-grpo --control`, OUT/seed_N, which takes one thread an hour and a half; the same command
continues where it was stopped. Trained on are the corpus's recordings of people in five languages, 0.5 to 8 s, at least
two words. Measured, greedily:

  known      a tenth of the texts, by the speakers of training; no recording of them is in training
  unseen     `unseen_speakers`: speakers and texts that no phase trains on
  retention  a language that no phase trains on: Russian
  no_speech  silence, noise, hum and clicks: how often something is written that is a word

OUT/table.md has WER and CER over all words, means over seeds with 95 % bootstrap intervals over clips, and the accuracy
of the texts as written, with case and punctuation, which nothing optimises.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from arms import hits, markdown, percent, seeds_with, train_recipe
from numpy.typing import NDArray

from audiorl.data.corpus import Utterance, corpus, unseen_speakers
from audiorl.eval._common import read_rows
from audiorl.eval.asr import error_counts
from audiorl.eval.metrics.corpus import estimate, ratio
from corpora import split

LANGUAGES = ("en", "es", "fr", "it", "ca")
"""Trained on."""
RETAINED = "IvrvoiceRU"
"""Speaker of a language that no phase trains on."""
RETENTION_CLIPS = 60
RECIPE = """asr-grpo --model.dtype float32 --model.autocast --model.audio-cache-mb 1500 --unit word
--sampling.temperature 0.6 --sampling.max-new-tokens 64 --sampling.max-batch-tokens 400000 --optim.lr 1e-5
--optim.warmup-steps 5 --rl.micro-batch-tokens 16000 --rl.eval-every 0 --retention-margin 1 --control"""
SETS = {"known": "", "unseen": "unseen_", "retention": "retention_"}
"""The prefix of a set's evaluations by its name here."""
ARMS = {"start": "before", "GRPO": "after", "SFT": "control"}
DIFFERENCES = (("GRPO", "start"), ("SFT", "start"), ("GRPO", "SFT"))


def write_rows(out: Path, folder: Path, quick: bool) -> None:
    """OUT/train.jsonl, held_out.jsonl and retention.jsonl. Raises ValueError for a corpus that lacks a language."""
    speakers = {u.speaker for u in unseen_speakers()}
    texts = {_text(u) for u in unseen_speakers()}
    said = [
        u
        for u in corpus(folder, min_seconds=0.5, max_seconds=8.0)
        if len(u.text.split()) > 1 and u.speaker not in speakers and _text(u) not in texts
    ]
    if missing := {*LANGUAGES, "ru"} - {u.language for u in said}:
        raise ValueError(f"{folder} has no speech in {', '.join(sorted(missing))}; build it with all sources")
    trained = [u for u in said if u.language in LANGUAGES]
    rows = {
        "train": [u for u in trained if _hash(u) % 10],
        "held_out": [u for u in trained if not _hash(u) % 10],
        "retention": sorted((u for u in said if u.speaker == RETAINED), key=_hash)[:RETENTION_CLIPS],
    }
    for name, utterances in rows.items():
        split.write_rows(out / f"{name}.jsonl", utterances[:: 100 if quick else 1])


def _text(u: Utterance) -> str:
    return u.text.lower().strip(" .")


def _hash(u: Utterance) -> int:
    return zlib.crc32(u.key.encode())


def train_seed(out: Path, model: str, seed: int, quick: bool) -> None:
    sets = f"--data {out}/train.jsonl --held-out {out}/held_out.jsonl --retention {out}/retention.jsonl"
    sets += f" --unseen unseen_speakers/manifest.jsonl{':20' if quick else ''}"
    size = "--no-speech-held-out 3" if quick else "--max-steps 100"
    train_recipe(out / f"seed_{seed}", f"{RECIPE} {sets} {size} --path {model} --seed {seed}")


# -- the tables --------------------------------------------------------------------------------------------------------


def errors_table(folders: Sequence[Path], metric: str, languages: Mapping[str, str]) -> str:
    """Errors by set and arm in percent of all words (wer) or characters (cer), with changes on the same clips."""
    rows = []
    for name, prefix in SETS.items():
        counts = {
            arm: [_counts(folder, prefix + when, metric, languages) for folder in folders] for arm, when in ARMS.items()
        }
        cells = [name, *(f"{100 * ratio(np.sum(of_arm, (0, 1))):.1f}" for of_arm in counts.values())]
        for arm, other in DIFFERENCES:
            change = estimate(np.sum(counts[arm], 0), ratio, baseline_NK=np.sum(counts[other], 0))
            each = (ratio(a.sum(0)) - ratio(b.sum(0)) for a, b in zip(counts[arm], counts[other], strict=True))
            seeds = ", ".join(f"{100 * one:+.1f}" for one in each)
            cells.append(f"{100 * change.value:+.1f} ({100 * change.low:+.1f} to {100 * change.high:+.1f}); {seeds}")
        rows.append(cells)
    header = (f"{metric.upper()} %", *ARMS, *(f"{arm} - {other}; each seed" for arm, other in DIFFERENCES))
    return markdown(header, rows)


def _counts(folder: Path, entry: str, metric: str, languages: Mapping[str, str]) -> NDArray[np.float64]:
    """[clip, 2] errors, and words or characters of the reference."""
    rows = []
    for row in read_rows(folder / "eval" / f"{entry}.jsonl"):
        texts = {"id": row["id"], "reference": row["references"][0], "hypothesis": row["text"]}
        errors = error_counts(texts, "basic", languages.get(row["id"]), metric)
        rows.append((errors.errors, errors.reference_length))
    return np.array(rows, np.float64)


def other_table(folders: Sequence[Path]) -> str:
    """What nothing optimises: accuracy of texts as written, and clips without speech for which a word is written."""
    rows = []
    for name, prefix in SETS.items():
        values = [hits(folders, prefix + when, "as_written") for when in ARMS.values()]
        changes = [percent(value - values[0], "+") for value in values[1:]]
        rows.append([f"{name}, as written, 1 - CER %", *(percent(value) for value in values), *changes])
    silent = [hits(folders, f"no_speech_{when}", "silent") for when in ARMS.values()]
    rows.append(["no_speech, no word written, %", *(f"{100 * s.mean():.1f}" for s in silent), "", ""])
    return markdown(("", *ARMS, "GRPO - start", "SFT - start"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder that `audiorl data build` wrote")
    parser.add_argument("--path", required=True, help="the Whisper model: a folder or a hub id")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, seed_N, and of table.md")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of training")
    parser.add_argument("--quick", action="store_true", help="a few clips and steps: does the command work?")
    args = parser.parse_args()
    write_rows(args.out, args.corpus, args.quick)
    for seed in args.seeds[:1] if args.quick else args.seeds:
        train_seed(args.out, args.path, seed, args.quick)
    languages = {u.id: u.language for u in [*corpus(args.corpus), *unseen_speakers()]}
    folders = seeds_with(args.out, "after")
    tables = [*(errors_table(folders, metric, languages) for metric in ("wer", "cer")), other_table(folders)]
    (args.out / "table.md").write_text("\n".join(tables))
    print("\n".join(tables))


if __name__ == "__main__":
    main()
