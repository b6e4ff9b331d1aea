"""The preference family at equal data and equal steps, on pairs with a length bias that is known by construction.

    python experiments/measure_preferences.py --out runs/preferences     # hours on one thread; continues where it
    stopped
    python experiments/measure_preferences.py --out runs/try --quick     # minutes: every part once, too small to
    mean much
    python experiments/measure_preferences.py --out runs/smol --path FOLDER --data questions.jsonl --held-out test.jsonl

The policy is the supervised start of the quickstart, made here if it is not given: asked which language is spoken, it
thinks, then answers. It answers every training question at temperature 1. A pair is a right and a wrong answer to one
question, both in the right format; in 80 % of the pairs the right one is longer, in 20 % the wrong one, by as many
tokens as the answers allow. Only questions with both kinds of pairs take part and chance decides which kind is taken,
so the length of an answer says nothing about the question. Every loss gets the same pairs, batches, steps and learning
rate, and starts from the same weights.

Parts, by `--only`:

  losses    each loss of the family on these pairs
  audio     OPA-DPO, with and without its parts, on the policy's answers and their corrections
  reward    reward models with and without length debiasing: correlation of score and length, accuracy on pairs
  process   GRPO and PPO from a process reward model: one total for an answer against credit for each step
  weights   LongAlign's loss weighting: the loss on short and on long answers

Policies are measured by greedy answers to held-out questions (right answers with 95 % intervals, tokens, repeated
words, thoughts whose words are all said) and by their KL to the start.

The result of every run is a file of its own under OUT/results, so an interrupted command continues with the run that is
missing. OUT/table.md holds the tables. The speed of packing is in `bench/longalign.py`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from arms import supervised_start
from preferences import losses, opa, process, reward_models, weights
from preferences.bench import QUICK, UNSEEN, Bench, Settings

from audiorl.errors import Interrupted

PARTS = {"losses": losses, "audio": opa, "reward": reward_models, "process": process, "weights": weights}
"""Each has `run(bench, seeds)` and `tables(bench)`, its tables in Markdown by title."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of answers, results and tables")
    parser.add_argument("--path", type=Path, help="a policy's folder; the quickstart's supervised start by default")
    parser.add_argument("--data", nargs="+", default=["bundled:languages/train"], help="questions to train on")
    parser.add_argument(
        "--held-out", nargs="+", default=["bundled:languages/test", UNSEEN], help="sets of questions to measure on"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the pairs and of their order")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    names = [loss.name for loss in losses.LOSSES]
    parser.add_argument("--losses", nargs="+", choices=names, default=names, help="rows of the part losses")
    parser.add_argument("--lr", type=float, default=Settings.lr, help="learning rate of every loss")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="updates of supervised and preference runs")
    parser.add_argument("--rl-steps", type=int, default=Settings.rl_steps, help="steps of GRPO and of PPO")
    parser.add_argument("--quick", action="store_true", help="a few questions and steps: does the command work?")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size = QUICK if args.quick else replace(Settings(), lr=args.lr, steps=args.steps, rl_steps=args.rl_steps)
    path = args.path or supervised_start(args.out / "start", quick=args.quick)
    bench = Bench(args.out, path, size, args.data, args.held_out)
    seeds = args.seeds[:1] if args.quick else args.seeds
    try:
        for name, part in PARTS.items():
            if name in args.only:
                part.run(bench, seeds, **({"names": args.losses} if part is losses else {}))
    except Interrupted:
        sys.exit("stopped; the same command continues")
    write_tables(bench)


def write_tables(bench: Bench) -> None:
    """OUT/table.md from the results that are there."""
    tables = [f"## {title}\n\n{table}" for part in PARTS.values() for title, table in part.tables(bench).items()]
    (bench.out / "table.md").write_text("\n".join(tables))
    print("\n".join(tables))


if __name__ == "__main__":
    main()
