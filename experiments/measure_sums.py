"""Does RL add something where more supervision adds nothing? Spoken sums, three seeds, unseen speakers.

    python experiments/measure_sums.py --out runs/sums --words fsdd/recordings       # two hours and more; continues
    python experiments/measure_sums.py --out runs/try --words fsdd/recordings --quick        # too small to mean much

`fsdd` is a clone of the Free Spoken Digit Dataset (six speakers, CC BY-SA 4.0). Training hears the package's English
voice, george, jackson and nicolas; rates and the plateau of the start are chosen on theo; measured are lucas and
yweweler. A start, one with thoughts and one without, learns from synthetic voices until three rounds in a row gain
less than a point on theo. Each arm begins there with three seeds, and SFT takes as many CPU seconds as GRPO:
OUT/seed_N/ARM. Then all answer longer sequences and the strangers by a noisy telephone, OUT/harder, and the start is
asked 16 times for pass@k, beside GRPO and SFT, OUT/passk. OUT/table.md has means over seeds with 95 % intervals over
sequences, the change from the start paired, and each seed; start_*/curve.json the rounds of each start.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from arms import hits, markdown, percent, places, seconds_of, train_recipe

from audiorl.data.augment import add_noise, telephone
from audiorl.data.sums import number_words, spoken_numbers, write_rows
from audiorl.eval._common import Row, read_rows
from audiorl.eval.metrics.corpus import UNSEEN
from audiorl.eval.passk import PassKOptions
from audiorl.eval.passk import main as eval_passk
from audiorl.eval.qa import QAOptions
from audiorl.eval.qa import main as eval_qa
from audiorl.run.folder import newest_checkpoint
from audiorl.run.records import read_record, write_json

TRAINED = ("Allison Smith", "george", "jackson", "nicolas")
VALIDATION, STRANGERS = ("theo",), ("lucas", "yweweler")
OUTSIDE = "experiments/sums_thought.py"
RAFT = "experiments/raft.py"
SHARED = "--model.audio projector --eval-tokens 48 --optim.warmup-steps 5"
RL = f"{SHARED} --sampling.max-new-tokens 48 --sampling.max-batch-tokens 32768 --rl.eval-every 0 \
--rl.micro-batch-tokens 1600 --epochs 1000"
GROUPS = "--rl.prompts-per-step 16 --rl.group-size 8"
SFT = f"sft-audio {SHARED} --sft.batch-size 24 --sft.micro-batch-tokens 1600 --epochs 1000 --optim.schedule constant"
ARMS = {
    "GRPO": f"mmau-grpo {RL} {GROUPS}",
    "RAFT": f"mmau-grpo {RL} {GROUPS} --rl.advantage {RAFT}:best_of_group --rl.loss reinforce",
    "PPO": f"ppo-audio-qa {RL} --rl.prompts-per-step 64 --rl.group-size 2 --rl.mini-batches 2 \
--rl.critic.warmup-steps 5 --rl.critic.optim.lr 1e-4",
    "GRPO without thought": f"mmau-grpo {RL} {GROUPS} --think False",
    "SFT, synthetic": f"{SFT} --thought thought",
    "SFT, human answers": SFT,
    "GRPO, one voice": f"mmau-grpo {RL} {GROUPS}",
    "GRPO, two voices": f"mmau-grpo {RL} {GROUPS}",
}
HARDER = {"longer": "Four and five numbers", "telephone": "By telephone, with noise at 10 dB"}
"""Sets that are measured after training, with thoughts."""
ROUND = 100
"""Steps of SFT between two measurements of a start."""
GRID = ("--optim.lr 3e-5 --rl.kl-beta 0", "--optim.lr 1e-4 --rl.kl-beta 0", "--optim.lr 1e-4 --rl.kl-beta 0.01")


def write_data(out: Path, folders: Sequence[str], quick: bool) -> None:
    """Write the rows of all sets once: training voices by their number, validation, strangers, what is harder."""
    words = [w for source in ("bundled", *folders) for w in number_words(source)]
    size = 24 if quick else 600

    def said(names: Sequence[str], count: int, seed: int, **options: object) -> list:  # type: ignore[type-arg]
        return spoken_numbers([w for w in words if w.speaker in names], count, seed=seed, **options)  # type: ignore[arg-type]

    def noisy(wav: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return add_noise(telephone(wav), 10, rng)

    sets = {
        "human": said(TRAINED, size, 1),
        "two_voices": said(TRAINED[:2], size, 1),
        "one_voice": said(TRAINED[:1], size, 1),
        "validation": said(VALIDATION, size // 3, 2),
        "unseen": said(STRANGERS, size // 2, 3),
        "longer": said(STRANGERS, size // 2, 4, lengths=(4, 5)),
        "telephone": said(STRANGERS, size // 2, 5, change=noisy),
        "synthetic": spoken_numbers(number_words("synthetic:10"), size + size // 2, seed=6),
    }
    for name, samples in sets.items():
        if not (out / f"{name}.jsonl").exists():
            write_rows(samples, out, name)


def start_of(folder: Path, data: Path, think: bool, quick: bool) -> Path:
    """Train a start to its plateau on synthetic voices. Returns its checkpoint."""
    command = f"spoken-sums --think {think} --control False --rl.steps 1 --threads 1 --measured 8"
    train_recipe(folder / "first", command + (" --tiny" if quick else ""))
    path, curve = max((folder / "first" / "checkpoints" / "sft").glob("step_*")), list[float]()
    for number in range(1, 2 if quick else 13):
        lesson = f"{SFT} --seed {number} --path {path} --data {data}/synthetic.jsonl --optim.lr 3e-4"
        lesson += f" --max-steps {2 if quick else ROUND} --held-out {data}/validation.jsonl"
        train_recipe(folder / f"round_{number}", lesson + (" --thought thought" if think else ""))
        results = json.loads((folder / f"round_{number}" / "eval.json").read_text())
        curve = [*(curve or [results["before"]["accuracy"]]), results["after"]["accuracy"]]
        write_json(folder / "curve.json", curve)
        path = Path(newest_checkpoint(folder / f"round_{number}"))
        if len(curve) > 3 and max(curve[-3:]) < max(curve[:-3]) + 0.01:
            break
    return path


def train_arm(
    folder: Path, arm: str, options: str, trained: str, data: Path, start: Path, steps: int, seed: int
) -> None:
    recipe, rest = f"{ARMS[arm]} {options}".split(" ", 1)
    thought = "" if "without" in arm or "answers" in arm else f"--outside-file {OUTSIDE}"
    sets = f"--data {data}/{trained}.jsonl --held-out {data}/validation.jsonl --unseen {data}/unseen.jsonl"
    command = f"{recipe} --path {start} {rest} {sets} {thought} --max-steps {steps} --seed {seed}"
    train_recipe(folder, command, trust=[OUTSIDE, RAFT])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the data, the runs and table.md")
    parser.add_argument("--words", nargs="+", required=True, help="folders of recordings of number words")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="; ".join(ARMS))
    parser.add_argument("--quick", action="store_true", help="every arm once, too small to mean much")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data, steps = args.out / "data", 2 if args.quick else 40
    write_data(data, args.words, args.quick)
    starts = {think: start_of(args.out / f"start_{think}", data, think, args.quick) for think in (True, False)}
    chosen = args.out / "grid.json"
    if not chosen.exists():  # the rate and the KL, on the validation speaker
        grid = {}
        for i, options in enumerate(GRID):
            folder = args.out / f"grid_{i}"
            train_arm(folder, "GRPO", options, "human", data, starts[True], steps, 0)
            grid[options] = json.loads((folder / "eval.json").read_text())["after"]["accuracy"]
        write_json(chosen, grid)
    grid = read_record(chosen, dict[str, float])
    best = max(grid, key=lambda o: grid[o])
    last = max((args.out / "start_True").glob("round_*"), key=lambda p: int(p.name.split("_")[1]))
    pace = seconds_of(last) / (2 if args.quick else ROUND)
    for arm in args.only:
        sources = {"synthetic": "synthetic", "one voice": "one_voice", "two voices": "two_voices"}
        place = next((rows for kind, rows in sources.items() if kind in arm), "human")
        start = starts["without" not in arm and "answers" not in arm]
        for seed in args.seeds[:1] if args.quick else args.seeds:
            folder, options, count = args.out / f"seed_{seed}", best, steps
            if arm.startswith("SFT"):  # as many steps as take GRPO's seconds, by the pace of the start's last round
                options, count = "--optim.lr 3e-4", max(1, round(seconds_of(folder / "GRPO") / pace))
            train_arm(folder / arm, arm, options, place, data, start, count, seed)
    tables = [
        f"## {title}\n\n{table(args.out, args.only, prefix)}"
        for title, prefix in (("Validation speaker", ""), ("Unseen speakers", f"{UNSEEN}_"))
    ]
    thinking = [arm for arm in args.only if "without" not in arm and "answers" not in arm]
    tables += [f"## {title}\n\n{harder(args.out, starts[True], name, thinking)}" for name, title in HARDER.items()]
    tables.append(f"## pass@k\n\n{coverage(args.out, starts[True], thinking)}")
    (args.out / "table.md").write_text("\n".join(tables))
    print("\n".join(tables))


def table(out: Path, arms: Sequence[str], prefix: str) -> str:
    header = ("", "accuracy %", "each seed", "change", "from more SFT", "by length", "exact %", "right, misheard %")

    def measured(arm: str) -> list[Path]:
        return [f for f in sorted(out.glob(f"seed_*/{arm}")) if (f / "eval" / f"{prefix}after.jsonl").exists()]

    rows, sft = [], measured("SFT, synthetic")
    for arm in arms:
        folders = measured(arm)
        for name, when in (("start without thought" if "without" in arm else "start", "before"), (arm, "after")):
            if not folders or (when == "before" and arm not in ("GRPO", "GRPO without thought")):
                continue
            entry = f"{prefix}{when}"
            right, before = hits(folders, entry), hits(folders, f"{prefix}before")
            each = ", ".join(f"{100 * hits([f], entry).mean():.1f}" for f in folders)
            lengths = places(folders[0] / "eval" / f"{entry}.jsonl", lambda row: row["task"])
            by_length = ", ".join(f"{k.split()[0]}: {100 * right[v].mean():.0f}" for k, v in sorted(lengths.items()))
            thinks = "without" not in name and "answers" not in name
            parts = [
                percent(hits(folders, entry, p)) if thinks else "" for p in ("sums_thought/exact", "sums_thought/luck")
            ]
            change = percent(right - before, "+") if when == "after" else ""
            gain = percent(right - hits(sft, entry), "+") if sft and when == "after" and folders != sft else ""
            rows.append([name, percent(right), each, change, gain, by_length, *parts])
    return markdown(header, rows)


def harder(out: Path, start: Path, name: str, arms: Sequence[str]) -> str:
    """Measure the start and all seeds of the arms on a set, and return the table."""

    def right(model: str | Path, place: Path) -> np.ndarray:
        folder = out / "harder" / name / place
        if not (folder / "results.jsonl").exists():
            common = {"think": True, "max_new_tokens": 80, "batch_size": 64}
            eval_qa(QAOptions(data=out / "data" / f"{name}.jsonl", model=str(model), out=folder, **common))  # type: ignore[arg-type]
        return np.array([float(row["right"]) for row in read_rows(folder / "results.jsonl")])

    before = right(start, Path("start"))
    lines = [["start", percent(before), "", ""]]
    for arm in arms:
        runs = sorted(out.glob(f"seed_*/{arm}"))
        seeds = [right(newest_checkpoint(run), run.relative_to(out)) for run in runs]
        after = np.mean(seeds, axis=0)
        lines.append(
            [arm, percent(after), percent(after - before, "+"), ", ".join(f"{100 * s.mean():.1f}" for s in seeds)]
        )
    return markdown(("", "accuracy %", "change", "each seed"), lines)


def coverage(out: Path, start: Path, arms: Sequence[str]) -> str:
    """Answer the strangers' questions 16 times with the start and each seed of GRPO and SFT, and return pass@k."""
    arms = [arm for arm in arms if arm in ("GRPO", "SFT, synthetic")]
    runs = [run for arm in arms for run in sorted(out.glob(f"seed_*/{arm}"))]
    names = [f"{run.name.split(',')[0]} {run.parent.name.removeprefix('seed_')}" for run in runs]
    trained = tuple(f"{name}={newest_checkpoint(run)}" for name, run in zip(names, runs, strict=True))
    scores: Row = eval_passk(PassKOptions(
        data=out / "data" / "unseen.jsonl", model=f"start={start}", trained=trained, out=out / "passk",
        think=True, max_new_tokens=48, batch_size=8,
    ))  # fmt: skip
    rows = [
        [
            name,
            *(f"{100 * m['mean']:.1f} ({100 * m['low']:.1f} to {100 * m['high']:.1f})" for m in model["pass"].values()),
        ]
        for name, model in scores["models"].items()
    ]
    return markdown(("", *(f"pass@{k}" for k in scores["ks"])), rows)


if __name__ == "__main__":
    main()
