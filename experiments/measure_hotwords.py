"""Hotwords for Whisper: without a prompt, with the prompt alone, after SFT, and after GRPO that weighs them.

    python tools/fetch_judges.py models whisper-base
    python experiments/measure_hotwords.py --path models/whisper-base --out runs/hotwords
    python experiments/measure_hotwords.py --path models/whisper-base --out runs/try --quick

Each seed is a run of `asr-grpo --control`, OUT/seed_N, some ten minutes on one thread; the same command continues
where it was stopped. A hotword is a word of five letters or more that at most two texts have, of the bundled prompts
and those of `unseen_speakers`.

Trained on are bundled recordings with a hotword, of two people in three languages. Tested are recordings of three
other people, of `unseen_speakers`, with a hotword: no phase has their voices, texts or hotwords. All have ten
distractors. OUT/table.md has B-WER, U-WER, recall and false alarms of greedy transcripts, means over seeds, with 95 %
bootstrap intervals over recordings.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from arms import markdown, seeds_with, train_recipe
from numpy.typing import NDArray

from audiorl.data.corpus import Utterance, bundled_speech, unseen_speakers
from audiorl.data.hotwords import with_context
from audiorl.data.manifest import read_samples
from audiorl.data.rows import write_json_lines
from audiorl.eval._common import read_rows
from audiorl.eval.asr import HOTWORD_NAMES, ASROptions, SystemScores, interval_text
from audiorl.eval.asr import main as evaluate
from audiorl.eval.metrics.corpus import estimate, ratio
from audiorl.eval.metrics.text import normalize

DISTRACTORS, TRAINED, TESTED = 10, 96, 100
SPEAKERS = "Tux Paint"
"""How those begin who are tested: one each in English, Spanish and French. They say what a drawing shows."""
RECIPE = """asr-grpo --model.dtype float32 --model.autocast --model.audio-cache-mb 1500
--hotword-weight 3 --false-hotword-weight 1 --hallucination-weight 0 --no-speech-held-out 0 --sampling.temperature 1.0
--sampling.max-new-tokens 48 --sampling.max-batch-tokens 400000 --optim.lr 1e-5 --optim.warmup-steps 2
--rl.group-size 8 --rl.prompts-per-step 8 --rl.micro-batch-tokens 16000 --rl.eval-every 0 --rl.save-every 4
--control --control-sft.batch-size 4 --control-sft.save-every 10"""
ARMS = {"start, no prompt": "", "start, prompt": "before", "SFT": "control", "GRPO": "after"}
DIFFERENCES = (
    ("start, prompt", "start, no prompt"),
    ("SFT", "start, prompt"),
    ("GRPO", "start, prompt"),
    ("GRPO", "SFT"),
)


def hotwords(utterances: Sequence[Utterance]) -> dict[str, list[str]]:
    """The hotwords of each text, by id: words that at most two texts have."""
    words = {u.id: [w for w in re.findall(r"[^\W\d_]{5,}", u.text)] for u in utterances}
    texts = {(u.language, normalize(u.text)): u.id for u in utterances}
    counts = Counter(word.lower() for id in texts.values() for word in {w.lower(): w for w in words[id]})
    return {id: list({w.lower(): w for w in of if counts[w.lower()] <= 2}.values()) for id, of in words.items()}


def write_rows(out: Path, quick: bool) -> None:
    """OUT/train.jsonl and OUT/test.jsonl."""
    if (out / "test.jsonl").exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    bundled, unseen = bundled_speech(max_seconds=6.0), unseen_speakers()
    of = hotwords([*bundled, *unseen])
    tested = [u for u in unseen if of[u.id] and u.duration <= 8 and u.speaker.startswith(SPEAKERS)]
    tested = random.Random(0).sample(tested, min(len(tested), 4 if quick else TESTED))
    heard = {word.lower() for u in unseen for word in of[u.id]} | {normalize(u.text) for u in unseen}
    texts = [u for u in bundled if of[u.id] and not heard & {normalize(u.text), *(w.lower() for w in of[u.id])}]
    texts = [u for u in texts if len(u.text.split()) > 2]
    trained = random.Random(1).sample(texts, 4 if quick else TRAINED)
    for name, utterances in (("train", trained), ("test", tested)):
        write_json_lines(out / f"{name}.jsonl", [_row(u, of) for u in utterances])


def _row(u: Utterance, of: dict[str, list[str]]) -> dict[str, Any]:
    about = {"id": u.id, "language": u.language, "text": u.text, "speaker": u.speaker}
    return about | {"audio": str(Path(str(u.clip.path)).absolute()), "hotwords": of[u.id]}


def table(out: Path, folders: Sequence[Path], distractors: int) -> str:
    """Metrics of each arm, and their differences on the same recordings."""
    samples = with_context(read_samples(out / "test.jsonl", think=False).samples, (), distractors)
    counts: dict[str, dict[str, NDArray[np.float64]]] = {}
    for arm, when in ARMS.items():
        files = (
            [folder / "eval" / f"{when}.jsonl" for folder in folders] if when else [out / "plain" / "predictions.jsonl"]
        )
        systems = []
        for file in files:
            texts = {row["id"]: row["text"] for row in read_rows(file)}
            rows = [
                {"id": s.id, "reference": s.references[0], "hypothesis": texts[s.id]}
                | {"language": s.metadata["language"], "hotwords": s.metadata["hotwords"]}
                for s in samples
            ]
            systems.append(SystemScores(rows, ASROptions()).counts)
        counts[arm] = {m: np.mean([system[m][0] for system in systems], 0) for m in ("wer", *HOTWORD_NAMES)}
    names = {"wer": "WER %", **HOTWORD_NAMES}
    lines = []
    for arm, of_arm in counts.items():
        lines.append([arm, *(interval_text(vars(estimate(of_arm[m], ratio)), m) for m in names)])
    for arm, other in DIFFERENCES:
        changes = (vars(estimate(counts[arm][m], ratio, baseline_NK=counts[other][m])) for m in names)
        lines.append([f"{arm} − {other}", *(interval_text(c, m, True) for c, m in zip(changes, names, strict=True))])
    return markdown((f"{len(samples)} recordings, seeds: {len(folders)}", *names.values()), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="the Whisper model: a folder or a hub id")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, seed_N, and of table.md")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of training")
    parser.add_argument("--steps", type=int, default=16, help="steps of GRPO")
    parser.add_argument("--quick", action="store_true", help="a few clips and steps: does the command work?")
    args = parser.parse_args()
    distractors = 2 if args.quick else DISTRACTORS
    write_rows(args.out, args.quick)
    test = args.out / "test.jsonl"
    asked: dict[str, Any] = {"kind": "auto", "max_new_tokens": 48, "distractors": distractors, "prompt_hotwords": False}
    evaluate(ASROptions(data=test, model=args.path, out=args.out / "plain", device="cpu", **asked))
    for seed in args.seeds[:1] if args.quick else args.seeds:
        sets = f"--path {args.path} --data {args.out}/train.jsonl --held-out {test} --seed {seed} --epochs 4"
        sets += f" --distractors {distractors} --max-steps {2 if args.quick else args.steps}"
        train_recipe(args.out / f"seed_{seed}", f"{RECIPE} {sets}")
        folders = seeds_with(args.out, "control")
        (args.out / "table.md").write_text(table(args.out, folders, distractors))
    print((args.out / "table.md").read_text())


if __name__ == "__main__":
    main()
