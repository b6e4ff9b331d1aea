"""The part `weights`: LongAlign's loss weighting, the loss on short and on long answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from arms import markdown

from audiorl.config import OptimConfig, SFTConfig
from audiorl.data.bundled import bundled_transcripts
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example
from audiorl.run.folder import Run
from audiorl.train.sft import sft
from audiorl.types import Sample
from preferences.bench import BUDGET, MAX_SECONDS, Bench, Row, read
from preferences.tables import interval, mean


def run(bench: Bench, seeds: Sequence[int]) -> None:
    """SFT on short answers (which language?) and long ones (what is said?), by token and by sequence."""
    size = bench.size
    test = {s.audio[0].key for s in next(iter(bench.measured.values()))}

    def short(samples: Sequence[Sample]) -> list[Example]:
        return [Example(s, f"<answer>{s.references[0]}</answer>") for s in samples]

    def long(held_out: bool) -> list[Example]:
        samples = [s for s in bundled_transcripts(max_seconds=MAX_SECONDS) if (s.audio[0].key in test) is held_out]
        return [Example(s, s.references[0]) for s in samples]

    def train(weighting: str, seed: int, policy: AudioPolicy, run: Run) -> Row:
        examples = [*short(bench.questions), *long(held_out=False)[: len(bench.questions)]]
        config = SFTConfig(
            steps=size.steps,
            batch_size=size.batch,
            weighting=weighting,  # type: ignore[arg-type]
            micro_batch_tokens=BUDGET,
            save_every=size.steps,
        )
        sft(policy, examples, run, config=config, optim=OptimConfig(lr=3e-4, warmup_steps=5), seed=seed)
        held_out_questions = next(iter(bench.measured.values()))
        targets = [len(policy.tokenizer.encode(e.target)) + 1 for e in examples]
        row: Row = {
            "short tokens": mean(targets[: len(targets) // 2]),
            "long tokens": mean(targets[len(targets) // 2 :]),
        }
        return row | {
            "short": bench.nll(short(held_out_questions)),
            "long": bench.nll(long(held_out=True)[: len(held_out_questions)]),
        }

    for seed in seeds:
        for weighting in ("token", "sequence"):
            bench.trained(f"weights/{weighting}/{seed}", partial(train, weighting, seed))


def tables(bench: Bench) -> dict[str, str]:
    header = ["a loss of", "seeds", "short answers, nats per token", "long answers, nats per token"]
    lines = []
    for weighting in ("token", "sequence"):
        seed_results = [read(p) for p in sorted((bench.out / "results" / "weights" / weighting).glob("*/train.json"))]
        if seed_results:
            columns = [np.mean([row[kind] for row in seed_results], axis=0) for kind in ("short", "long")]
            cells = [interval(list(c), 1.0, 3) for c in columns]
            tokens = " and ".join(f"{seed_results[0][f'{kind} tokens']:.1f}" for kind in ("short", "long"))
            lines.append([f"every {weighting} alike ({tokens} tokens)", str(len(seed_results)), *cells])
    return {"Loss weighting": markdown(header, lines)}
