"""Let a policy interpret streams, and measure what it wrote and when: SimulEval logs, scores, an entry of eval.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from audiorl.config import SamplingConfig
from audiorl.metrics.interval import bootstrap_interval
from audiorl.metrics.longform import ReferenceSegment
from audiorl.models import AudioPolicy
from audiorl.rewards.similarity import sentence_chrf
from audiorl.rollout.hf import HFEngine
from audiorl.simulst.logs import Instance, write_log
from audiorl.simulst.schedules import words_of
from audiorl.simulst.scoring import score
from audiorl.simulst.streams import ChunkConfig, Stream, interpretation
from audiorl.train.run import Run, rollout_row
from audiorl.types import Request, Reward, Rollout, Schedule


def interpret(
    policy: AudioPolicy,
    streams: Sequence[Stream],
    chunks: ChunkConfig,
    sampling: SamplingConfig,
    schedule: Schedule | None = None,
) -> list[Rollout]:
    """One greedy rollout a stream; `schedule` decides when to write in place of the policy.

    Emit times are comparable with a batch of one stream only: `sampling.max_batch_tokens` 1.
    """
    engine = HFEngine(policy, replace(sampling, temperature=0.0))
    return engine.generate([Request(interpretation(s, chunks), schedule=schedule) for s in streams])


def instance_of(rollout: Rollout, index: int, source: str = "") -> Instance:
    """The rollout as a line of SimulEval's log; a word is delayed until the chunk after which it was complete."""
    sample = rollout.sample
    language = str(sample.metadata.get("target_language", ""))
    final = words_of(rollout.text, language)
    delays = [0.0] * len(final)
    elapsed = [0.0] * len(final)
    settled, text = 0, ""
    for segment in rollout.segments:
        text += segment.text
        so_far = words_of(text, language)
        while settled < len(so_far) and so_far[settled] == final[settled]:
            assert segment.source_time is not None and segment.emit_time is not None
            delays[settled], elapsed[settled] = 1000 * segment.source_time, 1000 * segment.emit_time
            settled += 1
    return Instance(
        index=index,
        prediction=rollout.text.strip(),
        delays=tuple(delays),
        elapsed=tuple(elapsed),
        prediction_length=len(final),
        reference=" ".join(sample.references) if sample.references else None,
        source=source or sample.id,
        source_length=1000 * float(sample.metadata.get("seconds", sample.turns[-1].end)),
    )


def measure(streams: Sequence[Stream], rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """The scores of audiorl.simulst.scoring, and what reports read: `laal`, `stream_laal` (s), `chrf`, `bleu`.

    `low`, `high`: 95% bootstrap interval of the streams' mean chrF. `cut`: share of turns that did not end by
    themselves. `spoken`: share of turns with text. Raises ValueError for streams without reference.
    """
    for stream in streams:
        if not stream.units:
            raise ValueError(f"stream {stream.id!r}: no reference; without one it can be interpreted, not measured")
    instances = [instance_of(r, i) for i, r in enumerate(rollouts)]
    references = {
        i: [ReferenceSegment(1000 * u.start, 1000 * (u.end - u.start), u.target) for u in stream.units]
        for i, stream in enumerate(streams)
    }
    language = streams[0].target_language
    whole = score(instances, "text", language, use_reference_length=True)
    long = score(instances, "text", language, segments=references) if any(i.delays for i in instances) else {}
    each = [100 * sentence_chrf(i.prediction, i.reference or "") for i in instances]
    low, high = bootstrap_interval(each)
    turns = [s for r in rollouts for s in r.segments]
    return {
        "laal": whole["LAAL"] / 1000,
        "stream_laal": long.get("StreamLAAL", math.nan) / 1000,
        "chrf": whole["chrF"],
        "bleu": whole["BLEU"],
        "low": low,
        "high": high,
        "n": len(streams),
        "spoken": float(np.mean([bool(s.text.strip()) for s in turns])),
        "cut": float(np.mean([s.stop_reason == "length" for s in turns])),
        "scores": {name: None if math.isnan(value) else value for name, value in (whole | long).items()},
    }


def measure_streams(
    run: Run,
    name: str,
    policy: AudioPolicy,
    streams: Sequence[Stream],
    chunks: ChunkConfig,
    sampling: SamplingConfig,
    reward: Reward,
    schedule: Schedule | None = None,
) -> dict[str, Any]:
    """Measure once, as a phase of the run: eval/NAME.jsonl, a SimulEval log in eval/NAME/, an entry in eval.json."""
    if not run.finished(name):
        rollouts = interpret(policy, streams, chunks, sampling, schedule)
        scored = [r.with_score(s) for r, s in zip(rollouts, reward(rollouts), strict=True)]
        write_interpreted(run.dir / "eval" / name, streams, rollouts)
        rows = [rollout_row(r, 0, 0.0) for r in scored]
        path = run.dir / "eval" / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        result = measure(streams, rollouts)
        run.write_result(name, result)
        run.finish(name, result)
    result = run.result(name)
    print(
        f"{name}: LAAL {result['laal']:.2f} s (stream {result['stream_laal']:.2f} s), chrF {result['chrf']:.1f}, "
        f"BLEU {result['bleu']:.1f}, speaks in {result['spoken']:.0%} of turns, {result['n']} streams",
        flush=True,
    )
    return dict(result)


def probe_streams(
    policy: AudioPolicy, streams: Sequence[Stream], chunks: ChunkConfig, sampling: SamplingConfig
) -> Callable[[], dict[str, float]]:
    """A function for the training loop that measures the policy as it is at the moment."""

    def now() -> dict[str, float]:
        result = measure(streams, interpret(policy, streams, chunks, sampling))
        return {name: result[name] for name in ("laal", "stream_laal", "chrf", "spoken")}

    return now


def write_interpreted(folder: Path, streams: Sequence[Stream], rollouts: Sequence[Rollout]) -> None:
    """SimulEval's instances.log and config.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    instances = [
        instance_of(r, i, s.audio.path or s.id) for i, (s, r) in enumerate(zip(streams, rollouts, strict=True))
    ]
    write_log(folder, instances, "speech", "text")
