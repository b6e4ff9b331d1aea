"""Let a policy interpret streams, and measure what it wrote and when: SimulEval logs, scores, an entry of eval.json.

A folder of interpreted streams holds what SimulEval and the tools of long-form evaluation read:

    instances.log, config.yaml     SimulEval's log, one line a stream
    segments.yaml, segments.es     the streams' units as MuST-C's segments: {wav, offset, duration, reference}, and one
                                   reference a line (segments.en: the source texts, where all are known)
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from audiorl.config import SamplingConfig
from audiorl.data.rollout_rows import read_rollouts, rollout_row
from audiorl.data.rows import write_json_lines
from audiorl.eval._generate import generate_all
from audiorl.eval.metrics.corpus import TRANSLATION, bootstrap_interval, estimate, ratio
from audiorl.eval.metrics.latency import laal, latency_unit, reference_length
from audiorl.eval.metrics.longform import ReferenceSegment
from audiorl.models import AudioPolicy
from audiorl.protocols import Ended, Request, Reward, RolloutEngine, Schedule
from audiorl.rewards.check import score_rollouts
from audiorl.rewards.similarity import Metric, sentence_chrf
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.run.folder import Run
from audiorl.tasks.simul.degeneracy import degeneracy
from audiorl.tasks.simul.logs import Instance, read_log, write_log
from audiorl.tasks.simul.quality import NAMES, Quality, default_quality, quality_counts
from audiorl.tasks.simul.schedules import split_words
from audiorl.tasks.simul.scoring import score
from audiorl.tasks.simul.speech import write_speech_log
from audiorl.tasks.simul.streams import ChunkConfig, Stream, interpretation_sample
from audiorl.types import Rollout, Segment

SEGMENTS = "segments.yaml"


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
    return engine.generate([Request(interpretation_sample(s, chunks), schedule=schedule) for s in streams])


@dataclass
class _Scheduled:
    """An engine whose streams follow a schedule."""

    engine: RolloutEngine
    schedule: Schedule | None

    def generate(self, requests: Sequence[Request], ended: Ended | None = None) -> list[Rollout]:
        return self.engine.generate([replace(r, schedule=self.schedule) for r in requests])


def interpret_into(
    path: Path,
    engine: RolloutEngine,
    streams: Sequence[Stream],
    chunks: ChunkConfig,
    schedule: Schedule | None = None,
    batch_size: int = 1,
) -> list[Rollout]:
    """One rollout a stream as the engine samples; its rows go to `path` (JSON lines) as they come.

    A later call goes on from there, and returns the same rollouts whatever had been finished before; of their tokens
    only the number is kept. `batch_size`: streams side by side. Emit times are those of a single stream with 1 only.
    """
    samples = [interpretation_sample(s, chunks) for s in streams]
    generate_all(
        _Scheduled(engine, schedule), samples, path, batch_size, describe=lambda rollout: rollout_row(rollout, 0, 0.0)
    )
    written = {r.sample.id: r for r in read_rollouts(path)} if samples else {}
    return [replace(written[s.id], sample=s) for s in samples]


def settled(segments: Sequence[Segment], language: str) -> str:
    """What has been written, without a last word at which the policy was cut off: the next turn may go on with it."""
    text = "".join(s.text for s in segments)
    cut = bool(segments) and segments[-1].stop_reason == "length" and latency_unit(language) == "word"
    return re.sub(r"\S+$", "", text) if cut else text


def instance_of(rollout: Rollout, index: int, source: str = "") -> Instance:
    """The rollout as a line of SimulEval's log; a word is delayed until the chunk after which it was complete.

    Complete is a word that no later turn adds to; of a turn that was cut off the last word is open until the next one,
    or the end of the source. Raises ValueError, naming stream and turn, where time goes backwards: a clock was set back
    while the stream was interpreted, or a file of rollouts was edited.
    """
    sample = rollout.sample
    language = str(sample.metadata.get("target_language", ""))
    final = split_words(rollout.text, language)
    seconds = float(sample.metadata.get("seconds", sample.turns[-1].end))
    delays: list[float] = []
    elapsed: list[float] = []
    computed = 0.0
    for count, segment in enumerate(rollout.segments, 1):
        assert segment.source_time is not None and segment.emit_time is not None
        last = rollout.segments[count - 2].source_time if count > 1 else 0.0
        if segment.source_time < (last or 0.0) or segment.emit_time - segment.source_time < computed - 1e-6:
            raise ValueError(
                f"stream {sample.id!r}: turn {count}: written at {segment.emit_time:g} s after "
                f"{segment.source_time:g} s of source, {computed:g} s of computing until the turn before: time goes "
                "backwards; interpret it again"
            )
        so_far = split_words(settled(rollout.segments[:count], language), language)
        computed = segment.emit_time - segment.source_time
        while len(delays) < len(so_far) and so_far[len(delays)] == final[len(delays)]:
            delays.append(1000 * segment.source_time)
            elapsed.append(1000 * segment.emit_time)
    left = len(final) - len(delays)
    delays += [1000 * seconds] * left
    elapsed += [1000 * (seconds + computed)] * left
    return Instance(
        index=index,
        prediction=("" if latency_unit(language) == "char" else " ").join(final),
        delays=tuple(delays),
        elapsed=tuple(elapsed),
        prediction_length=len(final),
        reference=" ".join(sample.references) if sample.references else None,
        source=source or sample.id,
        source_length=1000 * seconds,
    )


def measure(streams: Sequence[Stream], rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """The scores of audiorl.tasks.simul.scoring, and what reports read: `laal`, `stream_laal` (s), the qualities
    `chrf`,
    `bleu`, `chrf++`, `ter` and `word_f1` (of English also `semantic`, where the encoder is installed), `length_ratio`
    and `repetition`, and the signs of `degeneracy`.

    Latencies are None where nothing was said.

    Computation-aware ones count the computing since the last write: a stream is read on while the policy computes.
    `low`, `high`: 95% bootstrap interval of the streams' mean chrF. `cut`: share of turns that did not end by
    themselves. `spoken`: share of turns with text. Raises ValueError for streams without reference.
    """
    for stream in streams:
        if not stream.reference:
            raise ValueError(f"stream {stream.id!r}: no reference; without one it can be interpreted, not measured")
    instances = [instance_of(r, i) for i, r in enumerate(rollouts)]
    references = {
        i: [ReferenceSegment(1000 * u.start, 1000 * (u.end - u.start), u.target) for u in stream.units]
        for i, stream in enumerate(streams)
    }
    language = streams[0].target_language
    qualities = default_quality(language)
    whole = score(instances, "text", language, quality=qualities)
    long = score(instances, "text", language, segments=references, cumulative_elapsed=True)
    each = [100 * sentence_chrf(i.prediction, i.reference or "") for i in instances]
    low, high = bootstrap_interval(each)
    turns = [s for r in rollouts for s in r.segments]
    return {
        "laal": _seconds(whole["LAAL"]),
        "stream_laal": _seconds(long["StreamLAAL"]),
        **{metric: whole[NAMES[metric]] for metric in qualities},
        "length_ratio": whole["LengthRatio"],
        "repetition": whole["Repetition"],
        "degenerate": list(degeneracy(instances, language, whole).signs),
        "low": low,
        "high": high,
        "n": len(streams),
        "spoken": float(np.mean([bool(s.text.strip()) for s in turns])),
        "cut": float(np.mean([s.stop_reason == "length" for s in turns])),
        "scores": {name: None if math.isnan(value) else value for name, value in long.items()},
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
    speech_decoder: CodecSpeechDecoder | None = None,
    optimised: Quality | Metric = "chrf",
    baseline: str = "before",
) -> dict[str, Any]:
    """Measure once, as a phase of the run: eval/NAME.jsonl, a SimulEval log in eval/NAME/, an entry in eval.json.

    With the `speech_decoder` of a policy that speaks also what it said, with a log of its own, in eval/NAME/speech/.
    `optimised`: the quality that the rewards compare with. `baseline`: the phase of the same streams from which changes
    are measured.
    """
    if not run.finished(name):
        rollouts = interpret(policy, streams, chunks, sampling, schedule)
        scores = score_rollouts(reward, rollouts)
        scored = [r if s is None else r.with_score(s) for r, s in zip(rollouts, scores, strict=True)]
        write_interpreted(run.dir / "eval" / name, streams, rollouts)
        rows = [rollout_row(r, 0, 0.0) for r in scored]
        if speech_decoder is not None:
            tracks = write_speech_log(run.dir / "eval" / name / "speech", rollouts, speech_decoder)
            for row, track in zip(rows, tracks, strict=True):
                row["spoken_audio"] = {"path": str(track.relative_to(run.dir))}
        write_json_lines(run.dir / "eval" / f"{name}.jsonl", rows)
        result = measure(streams, rollouts) | outside_quality(run.dir / "eval", name, streams, optimised, baseline)
        run.write_result(name, result)
        run.finish(name, result)
    result = run.result(name)
    late, stream = ("-" if x is None else f"{x:.2f} s" for x in (result["laal"], result["stream_laal"]))
    print(
        f"{name}: LAAL {late} (stream {stream}), chrF {result['chrf']:.1f}, BLEU {result['bleu']:.1f}, TER "
        f"{result['ter']:.0f}, length {result['length_ratio']:.2f}, speaks in {result['spoken']:.0%} of turns, "
        f"{result['n']} streams",
        flush=True,
    )
    for sign in result["degenerate"]:
        print(f"{name}: degenerate: {sign}", file=sys.stderr)
    return dict(result)


def outside_quality(
    folder: Path, name: str, streams: Sequence[Stream], optimised: Quality | Metric, baseline: str = "before"
) -> dict[str, Any]:
    """`outside`, the intervals of the qualities that no reward asks, and `changes` of all and of `laal` (s) since the
    `baseline`, each with its paired interval.

    The qualities are those of `TRANSLATION` and `default_quality`, over all streams; the streams are drawn.
    """
    language = streams[0].target_language
    later, earlier = read_log(folder / name), read_log(folder / baseline) if name != baseline else []
    paired = [i.source for i in earlier] == [i.source for i in later]
    outside, changes = {}, {}
    for metric in dict.fromkeys((*TRANSLATION, *default_quality(language))):
        (counts, quality), before = (
            quality_counts(metric, [i.prediction for i in log], [i.reference or "" for i in log], language)
            for log in (later, earlier if paired else later)
        )
        if metric != optimised and metric != "length_ratio":
            interval = estimate(counts, quality)
            outside[metric] = [interval.low, interval.high]
        if paired:
            change = estimate(counts, quality, baseline_NK=before[0])
            changes[metric] = [change.value, change.low, change.high]
    if paired and all(any(i.delays for i in log) for log in (later, earlier)):
        after_NK, before_NK = (laal_counts(log, language) for log in (later, earlier))
        change = estimate(after_NK, ratio, baseline_NK=before_NK)
        changes["laal"] = [change.value, change.low, change.high]
    return {"outside": outside} | ({"changes": changes} if changes else {})


def laal_counts(instances: Sequence[Instance], language: str) -> NDArray[np.float64]:
    """[N, 2]: LAAL in seconds and 1; zeros where nothing was written."""
    unit = latency_unit(language)
    lags = [
        (laal(i.delays, i.source_length, reference_length(i.reference or "", unit)) / 1000, 1.0) if i.delays else (0, 0)
        for i in instances
    ]
    return np.array(lags, np.float64)


def _seconds(ms: float) -> float | None:
    """None where nothing was said."""
    return None if math.isnan(ms) else ms / 1000


def probe_streams(
    policy: AudioPolicy, streams: Sequence[Stream], chunks: ChunkConfig, sampling: SamplingConfig
) -> Callable[[], dict[str, float]]:
    """A function for the training loop that measures the policy as it is at the moment."""

    def now() -> dict[str, float]:
        result = measure(streams, interpret(policy, streams, chunks, sampling))
        named = ("laal", "stream_laal", "chrf", "spoken")
        return {name: result[name] for name in named if result[name] is not None}

    return now


def write_interpreted(folder: Path, streams: Sequence[Stream], rollouts: Sequence[Rollout]) -> None:
    """SimulEval's log, and the segments of the streams that have units. They call a stream by its recording where that
    is its own, else by its id."""
    paths = Counter(s.audio.path for s in streams)
    names = [s.audio.path if s.audio.path and paths[s.audio.path] == 1 and not s.audio.start else s.id for s in streams]
    instances = [instance_of(r, i, name) for i, (r, name) in enumerate(zip(rollouts, names, strict=True))]
    write_log(folder, instances, "speech", "text")
    units = [(name, stream, unit) for name, stream in zip(names, streams, strict=True) for unit in stream.units]
    if not units:
        return
    rows = [
        {"wav": name, "offset": u.start, "duration": u.end - u.start, "reference": _line(u.target)}
        for name, _, u in units
    ]
    (folder / SEGMENTS).write_text(
        yaml.safe_dump(rows, default_flow_style=None, sort_keys=False, allow_unicode=True, width=math.inf), "utf-8"
    )
    texts = {units[0][1].target_language: [_line(u.target) for _, _, u in units]}
    if all(u.source.strip() for _, _, u in units):
        texts = {units[0][1].source_language: [_line(u.source) for _, _, u in units]} | texts
    for language, lines in texts.items():
        (folder / SEGMENTS).with_suffix(f".{language}").write_text("".join(f"{x}\n" for x in lines), "utf-8")


def _line(text: str) -> str:
    return " ".join(text.split())
