"""What RL adds to a flow that cleans speech: unseen speakers, three seeds, against more supervision.

    python tools/fetch_judges.py models whisper-base
    python experiments/measure_enhancement.py --judge models/whisper-base --out runs/enhancement    # continues

A flow on latents `mels` learns to clean the bundled recordings of people in rooms and noise that are made up. Each arm
begins at its last checkpoint with three seeds, OUT/seed_N/ARM; SFT takes as many CPU seconds as the longest other arm.
All clean the same noisy recordings of five people that no phase heard. The reward is SI-SDR, as a share, and 0.1 for
each of an end, sound and no clipping; `--judge`, which no reward asks, transcribes. OUT/table.md has means over seeds
with 95 % intervals over recordings, changes paired.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import equal_steps, markdown, number, spaced, train_recipe

from audiorl.audio import write_wav
from audiorl.config.flow import FlowConfig
from audiorl.data.augment import noisy_recording
from audiorl.data.corpus import bundled_speech, unseen_speakers
from audiorl.data.rows import write_json_lines
from audiorl.eval._common import read_rows
from audiorl.eval.metrics.text import word_errors
from audiorl.protocols import Request
from audiorl.rollout.flow import FlowEngine, load_sounding
from audiorl.run.folder import newest_checkpoint
from audiorl.speech_models import Recogniser, load_recogniser
from audiorl.tasks.sound.rows import read_sounds
from audiorl.tasks.tts.rewards import signal_to_distortion
from audiorl.types import Sample

SHARED = "--task enhance --epochs 100000"
SFT = f"sound-sft {SHARED} --sft.drop 0 --sft.batch-size 16 --sft.save-every 500"
START = f"{SFT} --codec mels --network.width 128 --network.text-rows 64 --optim.lr 1e-3"
OTHERS = "--speech.understood 0 --speech.similarity 0 --speech.duration 0"
RL = f"sound-grpo {SHARED} --rl.prompts-per-step 8 --rl.eval-every 0 --sampling.steps 10 --optim.lr 3e-4 {OTHERS}"
ARMS = {
    "Fast-GRPO": RL,
    "NFT": f"{RL} --sampling.noisy none --rl.loss nft --rl.kl-beta 0.3",
    "SFT": f"{SFT} --optim.lr 3e-4 --optim.schedule constant --optim.warmup-steps 10",
}
RATE = 24_000
MEASURES = {"si_sdr": "SI-SDR dB", "wer": "WER %"}


@cache
def recogniser(judge: str, language: str) -> Recogniser:
    return load_recogniser(judge, language)


def heard(run: Path, system: str, samples: Sequence[Sample], judge: str) -> list[dict[str, Any]]:
    """Return what a run makes of the noisy recordings, kept in RUN/unseen.jsonl: SI-SDR, and the WER of the judge, at
    most 100 %, who knows the language; the sounds are in RUN/unseen."""
    if (run / "unseen.jsonl").exists():
        return list(read_rows(run / "unseen.jsonl"))
    if system in ("recordings", "noisy"):
        sounds = [s.metadata["audio"] if system == "recordings" else noisy_recording(s) for s in samples]
    else:
        engine = FlowEngine(load_sounding(newest_checkpoint(run)), FlowConfig(steps=10))
        sounds = [rollout.spoken_audio for rollout in engine.generate([Request(s, greedy=True) for s in samples])]
    rows = []
    for place, (sample, sound) in enumerate(zip(samples, sounds, strict=True)):
        assert sound is not None
        wave, language = sound.load(RATE), sample.metadata["language"]
        write_wav(run / "unseen" / f"{place:03d}.wav", wave, RATE)
        (said,) = recogniser(judge, language).transcribe([wave], RATE)
        wer = 100 * min(1.0, word_errors(sample.references[0], said, "basic", language).rate)
        ratio = signal_to_distortion(sample.metadata["audio"], wave, RATE)
        rows.append({"id": sample.id, "said": sample.references[0], "heard": said, "si_sdr": ratio, "wer": wer})
    write_json_lines(run / "unseen.jsonl", rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge", required=True, help="a recogniser that no reward asks")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and table.md")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=2000, help="of the start")
    parser.add_argument("--steps", type=int, default=25, help="of RL")
    parser.add_argument("--trained", type=int, help="recordings that are trained on (default: all)")
    parser.add_argument("--most", type=int, default=40, help="recordings that are measured")
    parser.add_argument("--options", default="", help="more of all arms of RL")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, speech in (
        ("train", spaced(bundled_speech(), args.trained)),
        ("unseen", spaced(unseen_speakers(), args.most)),
    ):
        rows = [
            {"id": u.id, "audio": str(Path(str(u.clip.path)).resolve()), "text": u.text, "language": u.language}
            for u in speech
        ]
        write_json_lines(args.out / f"{name}.jsonl", rows)
    data = f"--data {args.out}/train.jsonl --held-out-count 2"  # what is measured is measured once, below
    train_recipe(args.out / "start", f"{START} {data} --max-steps {args.updates}")
    start = newest_checkpoint(args.out / "start")
    for seed in args.seeds:
        folder = args.out / f"seed_{seed}"
        for arm, command in ARMS.items():
            steps, more = args.steps, args.options
            if arm == "SFT":
                steps, more = equal_steps(args.out / "start", folder, ARMS), ""
            train_recipe(folder / arm, f"{command} --path {start} {data} --max-steps {steps} --seed {seed} {more}")
    samples = read_sounds(args.out / "unseen.jsonl", task="enhance").samples
    lines, before = [], {}
    for system in ("recordings", "noisy", "start", *ARMS):
        alone = [args.out / system] if system not in ARMS else sorted(args.out.glob(f"seed_*/{system}"))
        found = [{row["id"]: row for row in heard(run, system, samples, args.judge)} for run in alone]
        cells = [system]
        for measure in MEASURES:
            each = np.array([[rows[id][measure] for id in found[0]] for rows in found])
            if system == "start":
                before[measure] = each[0]
            change = number(each.mean(0) - before[measure], "+") if system in ARMS else ""
            seeds = ", ".join(f"{x.mean():.1f}" for x in each) if system in ARMS else ""
            cells += ["" if system == "recordings" and measure == "si_sdr" else number(each.mean(0)), change, seeds]
        lines.append(cells)
    header = ["", *(head for title in MEASURES.values() for head in (title, "change", "each seed"))]
    (args.out / "table.md").write_text(markdown(header, lines))
    print(markdown(header, lines))


if __name__ == "__main__":
    main()
