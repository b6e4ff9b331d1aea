"""The part `audio`: OPA-DPO against its parts, on the answers of the policy and their corrections."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from audiorl.config import OptimConfig, PreferenceConfig, SFTConfig
from audiorl.data.preferences import Pair
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example
from audiorl.recipes._loader import load_recipe
from audiorl.run.folder import Run
from audiorl.train.preference import prefer
from audiorl.train.sft import sft
from preferences.bench import BUDGET, Bench, Row, last_metrics, slug
from preferences.tables import policy_table


def run(bench: Bench, seeds: Sequence[int]) -> None:
    """OPA-DPO against its parts: as many updates in all, on the same answers and corrections."""
    size, correct = bench.size, load_recipe("opa_dpo").correct

    def data(seed: int) -> tuple[list[Example], list[Pair]]:
        """Corrected answers to learn, and pairs that prefer them to the answers as they were."""
        examples, pairs = [], []
        for sample, given in bench.answers("train", bench.questions):
            text = random.Random(f"own {seed} {sample.id}").choice(given).text
            corrected = correct(sample, text)
            examples.append(Example(sample, corrected))
            if text.strip() and text.strip() != corrected.strip():
                pairs.append(Pair(sample, corrected, text))
        return examples, pairs

    def supervised(steps: int, seed: int, policy: AudioPolicy, run: Run) -> Row:
        examples, _ = data(seed)
        config = SFTConfig(steps=steps, batch_size=size.batch, micro_batch_tokens=BUDGET, save_every=steps)
        sft(policy, examples, run, config=config, optim=OptimConfig(lr=1e-4, warmup_steps=5), seed=seed)
        return {"examples": len(examples), **last_metrics(run)}

    def preferred(steps: int, options: Row, seed: int, policy: AudioPolicy, run: Run) -> Row:
        _, pairs = data(seed)
        config = PreferenceConfig(
            steps=steps, batch_size=size.batch, micro_batch_tokens=BUDGET, save_every=steps, **options
        )
        prefer(policy, pairs, run, config=config, optim=OptimConfig(lr=size.lr, warmup_steps=5), seed=seed)
        return {"pairs": len(pairs), **last_metrics(run)}

    half = size.steps // 2
    for seed in seeds:
        bench.trained(f"audio/sft-half/{seed}", partial(supervised, half, seed))
        for name, (aligned, options) in AUDIO.items():
            run = f"audio/{slug(name)}/{seed}"
            if options is None:
                bench.trained(run, partial(supervised, half, seed), f"audio/sft-half/{seed}")
            elif aligned:
                bench.trained(run, partial(preferred, half, options, seed), f"audio/sft-half/{seed}")
            else:
                bench.trained(run, partial(preferred, size.steps, options, seed))
            bench.measure(run)


AUDIO: dict[str, tuple[bool, Row | None]] = {
    "DPO on corrections": (False, {}),
    "SFT on corrections": (True, None),
    "SFT, then DPO": (True, {}),
    "SFT, then DPO + anchor": (True, {"anchor_coef": 1.0}),
    "SFT, then DPO + anchor + audio (OPA-DPO)": (True, {"anchor_coef": 1.0, "audio_coef": 0.2}),
}
"""By name: whether SFT on the corrections comes first, and the options of DPO; None: more SFT."""


def tables(bench: Bench) -> dict[str, str]:
    return {"OPA-DPO": policy_table(bench, [(name, f"audio/{slug(name)}/*") for name in AUDIO])}
