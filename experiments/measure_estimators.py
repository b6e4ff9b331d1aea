"""Estimators of policy gradients and losses of preferences, from one supervised start on the same questions.

    python experiments/measure_estimators.py --out runs/estimators      # half an hour a seed; continues where it
    stopped
    python experiments/measure_estimators.py --out runs/try --quick     # minutes: every arm once, too small to
    mean much

The start is the quickstart's supervised model, which was trained on synthetic speech: asked which language is spoken,
it thinks, then answers. Each arm is a run of a recipe on the same human recordings, OUT/ARM/seed_N. Measured are other
phrases by the speakers of training and five speakers that no phase trains on. Two measures nothing optimises: whether a
thought is made of words (`experiments/thought_words.py`), and what the right audio adds to the log-prob of the
right answer
(`audiorl.eval._listening`). OUT/table.md has means over seeds with 95 % bootstrap intervals over questions.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

import torch
from arms import (
    check_listening,
    hits,
    listening_table,
    markdown,
    percent,
    places,
    seeds_with,
    supervised_start,
    train_recipe,
)

from audiorl.config import ModelConfig
from audiorl.data.bundled import bundled_languages
from audiorl.eval.metrics.corpus import UNSEEN
from audiorl.models import load_policy
from audiorl.models.examples import Example
from audiorl.run.folder import Run, newest_checkpoint

RL = "--epochs 20 --max-steps 80 --sampling.max-new-tokens 20 --sampling.max-batch-tokens 32768 --optim.lr 1e-4 \
--optim.warmup-steps 5"
GRPO = f"mmau-grpo {RL} --rl.prompts-per-step 16 --rl.group-size 8 --rl.micro-batch-tokens 800 --rl.eval-every 0"
DPO = "dpo-audio-qa --think True --epochs 4 --dpo.micro-batch-tokens 800 --dpo.eval-every 0"
ARMS = {
    "GRPO": GRPO,
    "RLOO": f"{GRPO} --rl.advantage rloo",
    "REINFORCE++-baseline": f"{GRPO} --rl.advantage reinforce++-baseline",
    "PPO": f"ppo-audio-qa {RL} --rl.prompts-per-step 64 --rl.group-size 2 --rl.mini-batches 2 --rl.kl-beta 0.02 \
--rl.micro-batch-tokens 800 --rl.eval-every 0 --rl.critic.warmup-steps 5 --rl.critic.optim.lr 1e-4",
    "online-DPO": "dpo-online --think True --rounds 3 --prompts-per-round 512 --epochs 2 --optim.lr 1e-4 \
--sampling.max-new-tokens 20 --sampling.max-batch-tokens 32768 --dpo.micro-batch-tokens 800",
    "DPO": f"{DPO} --optim.lr 3e-5",
    "DPO+NLL": f"{DPO} --optim.lr 1e-4 --dpo.sft-coef 1",
    "SFT": "sft-audio --epochs 4 --sft.micro-batch-tokens 800 --optim.lr 3e-4",
}
"""Recipe and options by arm. All but SFT, which learns the answer alone, think before they answer."""
OUTSIDE = "experiments/thought_words.py"
MEASURED = f"--data bundled:languages/train --model.audio projector --eval-tokens 20 --outside-file {OUTSIDE}"
SETS = "--held-out bundled:languages/test{0} --unseen bundled:languages/unseen{0}"


def train_arm(out: Path, arm: str, seed: int, start: Path, quick: bool) -> None:
    folder = out / arm / f"seed_{seed}"
    sets = SETS.format(":40") + " --max-steps 2" if quick else SETS.format("")
    recipe, *options = f"{ARMS[arm]} {MEASURED} {sets} --seed {seed}".split()
    train_recipe(folder, f"{recipe} --path {start} {' '.join(options)}", trust=[OUTSIDE])
    run = Run.open(folder)
    policy = load_policy(newest_checkpoint(folder), ModelConfig(audio="projector"))
    labels = bundled_languages("test")[:: 100 if quick else 4]
    check_listening(run, arm, policy, [Example(s, f"<answer>{s.references[0]}</answer>") for s in labels])
    run.close()


def table(out: Path, prefix: str = "") -> str:
    """Of one set, each arm over its seeds."""
    header = ("", "accuracy %", "each seed", "change", "mean of languages", "thoughts of words %")
    rows = []
    first = next(arm for arm in ARMS if seeds_with(out / arm, "after"))
    for name, arm, when in [("start", first, "before"), *((arm, arm, "after") for arm in ARMS)]:
        if folders := seeds_with(out / arm, entry := f"{prefix}{when}"):
            right, before = (hits(folders, f"{prefix}{which}") for which in (when, "before"))
            each = ", ".join(f"{100 * hits([folder], entry).mean():.1f}" for folder in folders)
            words = hits(folders, entry, "thought_words") if name != "SFT" else None
            languages = places(folders[0] / "eval" / f"{entry}.jsonl", lambda row: row["task"]).values()
            mean = fmean(right[of_language].mean() for of_language in languages)
            cells = [name, percent(right), each, "" if name == "start" else percent(right - before, "+")]
            rows.append([*cells, f"{100 * mean:.1f}", "" if words is None else percent(words)])
    return markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, ARM/seed_N, and of table.md")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the start and of training")
    parser.add_argument("--only", nargs="+", choices=list(ARMS), default=list(ARMS), help="arms to train")
    parser.add_argument("--quick", action="store_true", help="a few questions and steps: does the command work?")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in args.seeds[:1] if args.quick else args.seeds:
        start = supervised_start(args.out / "start" / f"seed_{seed}", seed, args.quick)
        for arm in args.only:
            train_arm(args.out, arm, seed, start, args.quick)
    tables = [
        f"## Known speakers, new phrases\n\n{table(args.out)}",
        f"## Unseen speakers\n\n{table(args.out, f'{UNSEEN}_')}",
        listening_table({arm: seeds_with(args.out / arm, "after") for arm in ARMS}),
    ]
    (args.out / "table.md").write_text("\n".join(tables))
    print("\n".join(tables))


if __name__ == "__main__":
    main()
