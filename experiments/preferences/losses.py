"""The part `losses`: each loss of the family on the same pairs, whose length bias is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from audiorl.config import OptimConfig, PreferenceConfig
from audiorl.data.preferences import pairs_to_judged
from audiorl.models import AudioPolicy
from audiorl.run.folder import Run
from audiorl.train.preference import prefer
from preferences.bench import BUDGET, Bench, Row, last_metrics, slug
from preferences.tables import policy_table


@dataclass(frozen=True)
class Loss:
    """A row of the table: a preference loss with its options."""

    name: str
    config: PreferenceConfig
    balanced: bool = False
    """Pairs without the length bias."""


LOSSES = (
    Loss("DPO", PreferenceConfig(loss="dpo")),
    Loss("DPO, pairs without the bias", PreferenceConfig(loss="dpo"), balanced=True),
    Loss("DPO + NLL", PreferenceConfig(loss="dpo", sft_coef=1.0)),
    Loss("R-DPO, α 0.2", PreferenceConfig(loss="r-dpo", alpha=0.2)),
    Loss("SamPO", PreferenceConfig(loss="sampo")),
    Loss("LD-DPO, α 0.5", PreferenceConfig(loss="ld-dpo", alpha=0.5)),
    Loss("SimPO", PreferenceConfig(loss="simpo")),
    Loss("IPO", PreferenceConfig(loss="ipo")),
    Loss("ORPO", PreferenceConfig(loss="orpo")),
    Loss("KTO", PreferenceConfig(loss="kto")),
)


def run(bench: Bench, seeds: Sequence[int], names: Sequence[str]) -> None:
    """Train with every loss and measure it."""
    bench.measure("start")
    for seed in seeds:
        for loss in (x for x in LOSSES if x.name in names):
            name = f"losses/{slug(loss.name)}/{seed}"
            bench.trained(name, partial(prefer_pairs, bench, loss, seed))
            bench.measure(name)


def prefer_pairs(bench: Bench, loss: Loss, seed: int, policy: AudioPolicy, run: Run) -> Row:
    """One run of a preference loss on the pairs of `seed`."""
    pairs = bench.training_pairs(seed, bias=0.5 if loss.balanced else None)
    kto = loss.config.loss == "kto"
    size = bench.size
    config = replace(
        loss.config,
        steps=size.steps,
        batch_size=2 * size.batch if kto else size.batch,
        micro_batch_tokens=BUDGET,
        save_every=size.steps,
    )
    optim = OptimConfig(lr=size.lr, warmup_steps=5)
    prefer(policy, pairs_to_judged(pairs) if kto else pairs, run, config=config, optim=optim, seed=seed)
    return {"pairs": len(pairs), **last_metrics(run)}


def tables(bench: Bench) -> dict[str, str]:
    runs = [("start", "start")] + [(x.name, f"losses/{slug(x.name)}/*") for x in LOSSES]
    return {"Preference losses": policy_table(bench, runs)}
