"""The part `reward`: reward models from the biased pairs, with and without length debiasing."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from arms import markdown

from audiorl.config import OptimConfig, RewardModelConfig
from audiorl.models.examples import Example
from audiorl.models.value import ValueModel, score_answers
from audiorl.train.reward_model import train_reward_model
from preferences.bench import BUDGET, Bench, Row, read
from preferences.tables import interval, mean


def run(bench: Bench, seeds: Sequence[int]) -> None:
    """Reward models from the biased pairs, with and without length debiasing."""
    size = bench.size

    def train(debias: bool, seed: int) -> Row:
        name = f"reward/{debias}/{seed}"
        run = bench.run(name)
        torch.manual_seed(seed)
        model = ValueModel(bench.load(), spread=1.0)
        config = RewardModelConfig(
            steps=size.steps,
            batch_size=size.batch,
            length_debias=debias,
            micro_batch_tokens=BUDGET,
            save_every=size.steps,
        )
        optim = OptimConfig(lr=1e-4, warmup_steps=5)
        train_reward_model(model, bench.training_pairs(seed), run, config=config, optim=optim, seed=seed)
        held_out_questions = next(iter(bench.measured.values()))
        answers = [
            (s, list({a.text: a for a in given}.values())) for s, given in bench.answers("test", held_out_questions)
        ]
        answers = [(s, [a for a in given if a.well_formed]) for s, given in answers]
        scores = iter(score_answers(model, [Example(s, a.text) for s, given in answers for a in given], BUDGET))
        rows = [[(next(scores), a.tokens, a.right) for a in given] for _, given in answers]
        run.close()
        shutil.rmtree(run.dir)
        return {"answers": rows}

    for seed in seeds:
        for debias in (False, True):
            bench.result(f"reward/{'debiased' if debias else 'plain'}/{seed}", partial(train, debias, seed))


def tables(bench: Bench) -> dict[str, str]:
    """Correlations over answers, and the share of right-wrong pairs that are in order, by which answer is longer."""
    header = ["", "seeds", "correlation of score and tokens", "the same, within a question"]
    header += ["right = wrong in length", "right longer", "right shorter", "80 % longer, as in training"]
    lines = []
    for name in ("plain", "debiased"):
        seed_results = [read(p)["answers"] for p in sorted((bench.out / "results" / "reward" / name).glob("*.json"))]
        if not seed_results:
            continue
        cells = [name, str(len(seed_results))]
        rows = [given for answers in seed_results for given in answers]
        within = [(s - mean([x for x, _, _ in g]), t - mean([x for _, x, _ in g])) for g in rows for s, t, _ in g]
        overall = [(s, t) for g in rows for s, t, _ in g]
        cells += [f"{np.corrcoef(np.array(pairs).T)[0, 1]:+.2f}" for pairs in (overall, within)]
        shares: dict[int, list[float]] = {}
        for sign in (0, 1, -1):  # one value a question: the share of its pairs of this kind that are in order
            for g in rows:
                good, bad = ([x for x in g if bool(x[2]) is right] for right in (True, False))
                order = [float(r[0] > w[0]) for r in good for w in bad if np.sign(r[1] - w[1]) == sign]
                if order:
                    shares.setdefault(sign, []).append(mean(order))
        cells += [interval(shares.get(sign, [])) for sign in (0, 1, -1)]
        cells.append(f"{100 * (0.8 * mean(shares.get(1, [])) + 0.2 * mean(shares.get(-1, []))):.1f}")
        lines.append(cells)
    return {"Reward models": markdown(header, lines)}
