"""What GRPO adds to a model that hears a sound and writes its thought, by the sounds that a flow makes of the thoughts.

    audiorl train thought-grpo --path new --hear True --model.audio projector --flow runs/sounds/seed_0/NFT \\
        --tagger tagger --data scenes/few.jsonl --held-out-count 32 --sound.steps 8 --sampling.max-new-tokens 96 \\
        --sft.steps 200 --sft.batch-size 16 --sft.save-every 50 --sft-optim.lr 1e-3 --max-steps 1 --out runs/thoughts
    python experiments/measure_thoughts.py runs/thoughts --data scenes/few.jsonl --flow runs/sounds/seed_0/NFT \\
        --guidance 1.5 --scenes scenes --tagger tagger --judge other_tagger --out runs/thought_arms

few.jsonl: scenes to train on, of which some have a thought, which the supervised phase learns.

Three seeds of GRPO begin where the supervised phase of the run ended, and of more supervision for as many seconds each.
Then the flow makes the sounds of new files and of new combinations of what each wrote, greedily, and of the thoughts
that the scenes have (`given`), and `--judge`, which no reward asked, hears them. OUT/table.md has means over seeds
with 95 % intervals over scenes, and changes, paired. What is there is not computed again.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from arms import train_recipe
from measure_sounds import SETS, STEPS, tables, write_sounds

from audiorl.config.flow import FlowConfig
from audiorl.eval._common import read_rows
from audiorl.eval.sound import SoundOptions
from audiorl.eval.sound import main as eval_sound
from audiorl.recipes._sound import SoundRewards, sound_reward
from audiorl.rollout.flow import load_sounding
from audiorl.run.folder import newest_checkpoint
from audiorl.tasks.sound.rows import read_sounds
from audiorl.types import Message

WRITTEN = {"start": "before", "GRPO": "after", "more SFT": "control"}
"""Who wrote, and the evaluation of the run that holds it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", type=Path, help="a run of thought-grpo")
    parser.add_argument("--flow", required=True, help="a run of sound-sft or sound-grpo")
    parser.add_argument("--guidance", type=float, default=1.0, help="of the flow")
    parser.add_argument("--scenes", type=Path, required=True, help="folder of `audiorl data build-scenes`")
    parser.add_argument("--data", type=Path, required=True, help="rows of scenes to train on, some with thoughts")
    parser.add_argument("--tagger", required=True, help="the one that the reward asks")
    parser.add_argument("--judge", required=True, help="another, such as one of another seed and width")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and table.md")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200, help="of GRPO")
    parser.add_argument("--options", default="", help="more of the recipe")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = max((args.start / "checkpoints" / "sft").glob("step_*"))
    held_out = " ".join(f"{args.scenes}/{name}.jsonl" for name in SETS)
    flow = load_sounding(newest_checkpoint(args.flow))
    sampling = FlowConfig(steps=STEPS, guidance_scale=args.guidance)
    reward = sound_reward(SoundRewards(tagger=args.tagger), flow.model.config.channels, "cpu")
    systems = ["given", *WRITTEN]
    for seed in args.seeds:
        folder = args.out / f"seed_{seed}"
        train_recipe(
            folder / "run",
            f"thought-grpo --path {start} --hear True --model.audio projector --flow {args.flow} "
            f"--tagger {args.tagger} --data {args.data} --held-out {held_out} --sound.steps {STEPS} "
            f"--sound.guidance-scale {args.guidance} --sampling.max-new-tokens 96 --sft.steps 1 --sft-optim.lr 1e-9 "
            f"--control True --control-optim.lr 3e-4 --rl-optim.lr 2e-5 --rl.eval-every 0 --rl.save-every 10 "
            f"--sampling.temperature 0.8 --rl.prompts-per-step 8 --max-steps {args.steps} --seed {seed} "
            f"{args.options}",
        )
        for name in SETS:
            samples = [  # without the caption, which the flow is not told in training either
                replace(s, messages=(Message("user", ("",)),))
                for s in read_sounds(args.scenes / f"{name}.jsonl", scenes=True).samples
            ]
            for system in systems:
                asked = samples
                if system in WRITTEN:
                    rows = {r["id"]: r["text"] for r in read_rows(folder / "run" / "eval" / f"{WRITTEN[system]}.jsonl")}
                    asked = [replace(s, metadata={**s.metadata, "thought": rows[s.id]}) for s in samples]
                write_sounds(folder / name / "made" / system, flow, asked, sampling, seed, 1, reward)
            eval_sound(SoundOptions(
                data=args.scenes / f"{name}.jsonl", judge=args.judge, out=folder / name,
                classes=args.scenes / "classes.json", sounds=tuple(folder / name / "made" / s for s in systems),
            ))  # fmt: skip
    text = "\n".join(
        tables(args.out, args.seeds, name, ["recordings", *systems], ["start", "more SFT"]) for name in SETS
    )
    (args.out / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
