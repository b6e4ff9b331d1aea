"""What RL adds to a flow that cleans speech: unseen speakers, three seeds, against more supervision.

    python tools/fetch_judges.py models whisper-base
    python experiments/measure_enhancement.py --judge models/whisper-base --out runs/enhancement    # continues

A flow on latents `mels` learns to clean the bundled recordings of people in rooms and noise that are made up. Each arm
begins at its last checkpoint with three seeds, OUT/seed_N/ARM; SFT takes as many CPU seconds as the longest other arm.
All clean the same noisy recordings of five people that no phase heard. The reward is SI-SDR; `--judge`, which no reward
asks, transcribes. OUT/table.md has means over seeds with 95 % intervals over recordings, changes paired.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from arms import equal_steps, markdown, number, spaced, train_recipe

from audiorl.config.flow import FlowConfig, FlowSFTConfig
from audiorl.data.corpus import bundled_speech, unseen_speakers
from audiorl.data.rows import write_json_lines
from audiorl.eval._common import read_rows
from audiorl.recipes._sound import SoundConfig, sound_scores
from audiorl.rollout.flow import load_sounding
from audiorl.run.folder import newest_checkpoint
from audiorl.tasks.sound.rows import read_sounds

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
MEASURES = {"si_sdr": ("SI-SDR dB", 1), "wer": ("WER %", 100)}


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
        rows = [{"id": u.id, "audio": str(Path(str(u.clip.path)).resolve()), "text": u.text} for u in speech]
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
    unseen = read_sounds(args.out / "unseen.jsonl", task="enhance").samples
    asked = SoundConfig(task="enhance", judge=args.judge, sampling=FlowConfig(steps=10))
    lines, before = [], {}
    for system in ("noisy", "start", *ARMS):
        runs = [args.out / "start"] if system in ("noisy", "start") else sorted(args.out.glob(f"seed_*/{system}"))
        for run in runs:
            if not (run / "unseen.jsonl").exists():
                policy = load_sounding(newest_checkpoint(run))
                values = sound_scores(policy, unseen, asked, FlowSFTConfig(), None, run / "unseen")
                write_json_lines(run / "unseen.jsonl", values)
        found = [{row["id"]: row for row in read_rows(run / "unseen.jsonl")} for run in runs]
        cells = [system]
        for measure in MEASURES if system != "noisy" else ("noisy_si_sdr",):
            scale = MEASURES.get(measure, ("", 1))[1]
            each = np.array([[scale * rows[id][measure] for id in found[0]] for rows in found])
            if system == "start":
                before[measure] = each[0]
            change = number(each.mean(0) - before[measure], "+") if system in ARMS else ""
            seeds = ", ".join(f"{x.mean():.1f}" for x in each) if system in ARMS else ""
            cells += [number(each.mean(0)), change, seeds]
        lines.append([*cells, *[""] * (1 + 3 * len(MEASURES) - len(cells))])
    header = ["", *(head for title, _ in MEASURES.values() for head in (title, "change", "each seed"))]
    (args.out / "table.md").write_text(markdown(header, lines))
    print(markdown(header, lines))


if __name__ == "__main__":
    main()
