"""Answers of a policy, saved in the run folder: the data of iterative DPO and OPA-DPO.

Answers are saved chunk by chunk, so that an interrupted pass continues where it stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from audiorl.data.preferences import Pair, pairs_from_rollouts
from audiorl.errors import Interrupted
from audiorl.eval._common import finished_rows, generate_all
from audiorl.protocols import Request, Reward, RolloutEngine
from audiorl.rewards.check import scored_rollouts
from audiorl.run.folder import Run
from audiorl.run.progress import Progress
from audiorl.types import Sample


def sampled_pairs(
    run: Run,
    phase: str,
    engine: RolloutEngine,
    samples: Sequence[Sample],
    reward: Reward,
    answers: int,
    seed: int,
    chunk: int = 16,
) -> list[Pair]:
    """The best and the worst of `answers` answers to each prompt, where their rewards differ.

    Kept in answers/PHASE.jsonl, one row a prompt. Raises ValueError when no prompt gives a pair.
    """
    path = run.dir / "answers" / f"{phase}.jsonl"
    path.parent.mkdir(exist_ok=True)
    done = finished_rows(path)
    missing = [s for s in samples if s.id not in done]
    finished = len(samples) - len(missing)
    with run.interruptible(), path.open("a") as file, Progress(f"{phase} answers", len(samples), finished) as progress:
        for start in range(0, len(missing), chunk):
            batch = missing[start : start + chunk]
            rollouts = engine.generate([Request(s, answers, seed=seed) for s in batch])
            scored = scored_rollouts(reward, rollouts)
            pairs_by_id = {p.sample.id: p for p in pairs_from_rollouts(scored)}
            for sample in batch:
                totals = [r.score.total for r in scored if r.score and r.sample is sample]
                row: dict[str, Any] = {"id": sample.id, "score": _mean(totals) if totals else None}
                if pair := pairs_by_id.get(sample.id):
                    row |= {"chosen": pair.chosen, "rejected": pair.rejected, "margin": pair.margin}
                done[sample.id] = row
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            mean = _mean([x for s in samples if (x := done.get(s.id, {}).get("score")) is not None])
            progress.update(finished + start + len(batch), {"reward/mean": mean})
            if run.asked_to_stop:
                raise Interrupted(f"stopped while {phase} answers; continue with 'audiorl resume {run.dir}'")
    rows = [(s, done[s.id]) for s in samples]
    pairs = [Pair(s, row["chosen"], row["rejected"], row["margin"]) for s, row in rows if "chosen" in row]
    print(f"{phase}: {len(pairs)} pairs from {len(samples)} prompts", flush=True)
    if not pairs:
        raise ValueError(
            f"{phase}: the answers to each of {len(samples)} prompts were all rewarded the same, so there is nothing "
            "to prefer; ask for more answers, a higher temperature or another reward"
        )
    return pairs


def policy_answers(run: Run, phase: str, engine: RolloutEngine, samples: Sequence[Sample], seed: int) -> list[str]:
    """One answer to each prompt, in order; kept in answers/PHASE.jsonl."""
    rows = generate_all(engine, samples, run.dir / "answers" / f"{phase}.jsonl", batch_size=16, seed=seed)
    return [str(row["text"]) for row in rows]


def _mean(values: Sequence[float]) -> float:
    return float(sum(values)) / max(len(values), 1)
