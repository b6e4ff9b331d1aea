"""What RL adds to a flow that makes sound, against guidance, the best of several samples, and more supervision.

    audiorl data build-scenes scenes --sources sonic-pi --channels 1 --seconds 1 --max-events 2 \\
        --max-event-seconds 0.6 --edits 0
    audiorl data train-tagger scenes --out tagger
    audiorl data train-tagger scenes --out other_tagger --seed 1 --width 24
    audiorl train sound-sft --codec mels --data scenes/train.jsonl --max-steps 4000 --epochs 1000 --optim.lr 2e-3 \\
        --network.width 96 --network.single-blocks 2 --network.text-rows 4096 --network.max-seconds 2 \\
        --held-out-count 8 --out runs/sound
    python experiments/measure_sounds.py runs/sound --scenes scenes --tagger tagger --judge other_tagger \\
        --out runs/sounds

Each arm begins at the newest checkpoint of the run and is trained with three seeds, OUT/seed_N/ARM; SFT goes on for as
many CPU seconds as the longest other arm. Guidance is chosen for the start and for each arm by the reward of some
scenes that are trained on. Then all make the scenes of new files and of new combinations once, from caption and thought
(`caption alone`: without the thought; `best of N`, of the start and of the first arm: so many times, and the one that
the reward prefers is kept), and `--judge`, which no reward asked, hears them.
OUT/table.md has means over seeds with 95 % intervals over scenes, the Fréchet distance of the judge's embeddings from
those of the recordings (FD), and the changes, paired, from the start at its best guidance and from the best of
`--best-of`; `audiorl eval sound` of each seed, with a page to listen to, is in OUT/seed_N/SET. What is there is not
computed again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import equal_steps, markdown, number, spaced, train_recipe

from audiorl.audio import write_wav
from audiorl.config.flow import FlowConfig
from audiorl.eval._common import read_rows
from audiorl.eval.sound import SoundOptions
from audiorl.eval.sound import main as eval_sound
from audiorl.models.flow import FlowPolicy
from audiorl.protocols import Request, Reward
from audiorl.recipes._sound import SoundRewards, sound_reward
from audiorl.rewards.combine import score_rollouts
from audiorl.rollout.flow import FlowEngine, load_sounding
from audiorl.run.folder import newest_checkpoint
from audiorl.run.records import read_record, write_json
from audiorl.tasks.sound.rows import read_sounds
from audiorl.types import Rollout, Sample

STEPS = 8
"""Steps of the sampler, in training and in measurements."""
RL = (
    f"sound-grpo --sampling.steps {STEPS} --rl.prompts-per-step 16 --rl.eval-every 0 --rl.save-every 10 --epochs 1000 "
    "--optim.lr 3e-4"
)
NFT = f"{RL} --rl.loss nft --sampling.noisy none --rl.kl-beta 0.3"
ARMS = {
    "NFT": NFT,
    "Fast-GRPO": RL,
    "RAFT": f"{RL} --rl.loss raft --sampling.noisy none --rl.kl-beta 0.3 --optim.lr 1e-4",
    "NFT, events alone": f"{NFT} --parts events",
    "SFT": "sound-sft --epochs 1000 --optim.schedule constant --optim.warmup-steps 10 --sft.save-every 500",
}
SETS = ("new_files", "new_combinations")
GUIDANCE = (1.0, 1.5, 2.0, 3.0)
MEASURES = {"events_right": ("events right %", 100), "onset_f1": ("onset F1 %", 100), "onset_lag": ("lag ms", 1000),
            "azimuth_error": ("azimuth °", 1), "clean": ("clean %", 100)}  # fmt: skip
START, BEST = "start", "best of"
UNGUIDED, CAPTION = f"{START}, unguided", f"{START}, caption alone"


def made(policy: FlowPolicy, samples: Sequence[Sample], sampling: FlowConfig, seed: int) -> list[Rollout]:
    """Make each sound once by the ODE."""
    return FlowEngine(policy, sampling).generate([Request(s, seed=seed, greedy=True) for s in samples])


def totals(reward: Reward, rollouts: Sequence[Rollout]) -> list[float]:
    return [score.total for score in score_rollouts(reward, rollouts) if score is not None]


def best_guidance(file: Path, policy: FlowPolicy, samples: Sequence[Sample], reward: Reward) -> FlowConfig:
    """The guidance with the highest mean reward, kept in `file`."""
    if not file.exists():
        grid = {}
        for scale in GUIDANCE:
            rollouts = made(policy, samples, FlowConfig(steps=STEPS, guidance_scale=scale), 1000)
            grid[str(scale)] = float(np.mean(totals(reward, rollouts)))
        write_json(file, grid)
    grid = read_record(file, dict[str, float])
    return FlowConfig(steps=STEPS, guidance_scale=float(max(grid, key=lambda scale: grid[scale])))


def write_sounds(
    folder: Path, policy: FlowPolicy, samples: Sequence[Sample], sampling: FlowConfig, seed: int, n: int, reward: Reward
) -> None:
    """Write folder/ID.wav: of `n` sounds for each sample the one that the reward prefers."""
    missing = [s for s in samples if not (folder / f"{s.id}.wav").exists()]
    if not missing:
        return
    tries = [made(policy, missing, sampling, 100 * seed + i) for i in range(n)]
    scores = np.array([totals(reward, rollouts) for rollouts in tries]) if n > 1 else np.zeros((1, len(missing)))
    for place, sample in enumerate(missing):
        sound = tries[int(scores[:, place].argmax())][place].spoken_audio
        assert sound is not None and sound.array is not None and sound.sample_rate is not None
        write_wav(folder / f"{sample.id}.wav", sound.array, sound.sample_rate)


def tables(out: Path, seeds: Sequence[int], name: str, systems: Sequence[str], baselines: Sequence[str]) -> str:
    """Return the means of each system on a set, and the changes from each baseline; azimuths of stereo sounds."""
    values: dict[str, dict[str, Any]] = {}
    means, changes = [], []
    for system in systems:
        rows = [
            {row["id"]: row for row in read_rows(out / f"seed_{s}" / name / system / "sounds.jsonl")} for s in seeds
        ]
        measured = [m for m in MEASURES if all(m in r[i] for r in rows for i in r)]
        own = {m: MEASURES[m][1] * np.array([[r[i][m] for i in rows[0]] for r in rows]) for m in measured}
        values[system] = {m: each.mean(0) for m, each in own.items()}
        scores = [read_record(out / f"seed_{s}" / name / "scores.json", dict[str, Any])["systems"] for s in seeds]
        distances = [value for each in scores for key, value in each[system].items() if key.startswith("FD_")]
        seen = [f"{r.mean():.1f}" for r in own["events_right"]]
        means.append([
            system, *(f"{values[system][m].mean():.1f}" for m in measured),
            f"{np.mean(distances):.1f}" if distances else "", ", ".join(seen),
        ])  # fmt: skip
        for base in baselines:
            if base in values and base != system:
                differences = (values[system][m] - values[base][m] for m in measured)
                changes.append([system, base, *(number(d, "+") for d in differences)])
    heads = [MEASURES[m][0] for m in measured]
    first, second = ["", *heads, "FD", "events, each seed"], ["", "change from", *heads]
    return f"## {name}\n\n{markdown(first, means)}\n{markdown(second, changes)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", type=Path, help="a run of sound-sft")
    parser.add_argument("--scenes", type=Path, required=True, help="folder of `audiorl data build-scenes`")
    parser.add_argument("--tagger", required=True, help="the one that the reward asks")
    parser.add_argument("--judge", required=True, help="another, such as one of another seed and width")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and table.md")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="; ".join(ARMS))
    parser.add_argument("--steps", type=int, default=60, help="of RL")
    parser.add_argument("--options", default="", help="more of all arms of RL")
    parser.add_argument("--best-of", type=int, default=4, help="sounds of the start of which the best is kept")
    parser.add_argument("--most", type=int, help="scenes of a set (default: all)")
    args = parser.parse_args()
    if args.only == ["SFT"]:
        parser.error("--only SFT: it goes on for as long as another arm takes; name one, too")
    torch.set_num_threads(1)
    start, best = Path(newest_checkpoint(args.start)), f"{BEST} {args.best_of}"
    channels = load_sounding(start).model.config.channels
    reward = sound_reward(SoundRewards(tagger=args.tagger), channels, "cpu")
    train = spaced(read_sounds(args.scenes / "train.jsonl", scenes=True).samples, 50)
    sets = {name: read_sounds(args.scenes / f"{name}.jsonl", scenes=True).samples[: args.most] for name in SETS}
    systems = [UNGUIDED, CAPTION, START, best, *args.only, f"{args.only[0]}, {best}"]
    for seed in args.seeds:
        folder = args.out / f"seed_{seed}"
        for arm in args.only:
            command = f"{ARMS[arm]} --path {start} --data {args.scenes}/train.jsonl --held-out-count 8 --seed {seed} "
            if arm == "SFT":
                command += f"--max-steps {equal_steps(args.start, folder, args.only)} --optim.lr 3e-4"
            else:
                command += f"--tagger {args.tagger} --max-steps {args.steps} {args.options}"
            train_recipe(folder / arm, command)
        for system in systems:
            arm = system.removesuffix(f", {best}")
            own = arm in args.only
            policy = load_sounding(newest_checkpoint(folder / arm) if own else start)
            chosen = best_guidance(folder / f"{arm}.json" if own else args.out / "start.json", policy, train, reward)
            sampling = replace(chosen, guidance_scale=1.0) if system == UNGUIDED else chosen
            for name, asked in sets.items():
                samples = list(asked)
                if system == CAPTION:
                    samples = [replace(s, metadata={**s.metadata, "thought": ""}) for s in samples]
                n = args.best_of if system.endswith(best) else 1
                write_sounds(folder / name / "made" / system, policy, samples, sampling, seed, n, reward)
    for seed in args.seeds:
        for name in SETS:
            folder = args.out / f"seed_{seed}" / name
            eval_sound(SoundOptions(
                data=args.scenes / f"{name}.jsonl", judge=args.judge, out=folder, limit=args.most,
                classes=args.scenes / "classes.json", sounds=tuple(folder / "made" / system for system in systems),
            ))  # fmt: skip
    text = "\n".join(tables(args.out, args.seeds, name, ["recordings", *systems], [START, best]) for name in SETS)
    (args.out / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
