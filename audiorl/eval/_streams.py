"""Let a policy interpret streams, and measure what it wrote and said, and when: logs, scores, an entry of eval.json.

A folder of interpreted streams holds what SimulEval and the tools of long-form evaluation read:

    instances.log, config.yaml     SimulEval's log, one line a stream
    segments.yaml, segments.es     the streams' units as MuST-C's segments: {wav, offset, duration, reference}, and one
                                   reference a line (segments.en: the source texts, where all are known)

Speech is judged by what is heard: the quality of a transcript (ASR-BLEU, …), the voice, and how long it lasts.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from audiorl.config import SamplingConfig
from audiorl.data.rollout_rows import read_rollouts, rollout_row
from audiorl.data.rows import write_json_lines
from audiorl.eval._common import Judges, Row, generate_all
from audiorl.eval.metrics.corpus import TRANSLATION, bootstrap_interval, estimate, ratio
from audiorl.eval.metrics.latency import Unit, cut_text, laal, latency_unit, reference_length, split_words, tidy
from audiorl.eval.metrics.longform import ReferenceSegment, chunks, soft_cuts
from audiorl.eval.metrics.text import normalize
from audiorl.languages import written_in
from audiorl.models import AudioPolicy
from audiorl.protocols import Ended, Request, Reward, RolloutEngine, Schedule
from audiorl.rewards.combine import score_rollouts
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.run.folder import Run
from audiorl.tasks.simul.logs import Instance, read_log, write_log, write_speech_log
from audiorl.tasks.simul.quality import (
    NAMES,
    Metric,
    Quality,
    default_quality,
    quality_counts,
)
from audiorl.tasks.simul.scoring import degeneracy, score
from audiorl.tasks.simul.streams import ChunkConfig, Stream, chunk_ends, completed, interpretation_sample
from audiorl.types import Rollout

SEGMENTS = "segments.yaml"
DURATION_TOLERANCE = 0.2
"""A turn's speech may last so much longer or shorter than its reference, relative to it."""
MOST_PER_SECOND: dict[Unit, int] = {"word": 5, "char": 12}
"""Nobody says more; of scripts that spell, such as Thai's, twice as many characters. A recogniser that repeats itself
for ever writes more; that is cut off."""
RATE = 16_000
"""Hz of the sources for the speaker encoder."""


def interpret(
    policy: AudioPolicy,
    streams: Sequence[Stream],
    chunks: ChunkConfig,
    sampling: SamplingConfig,
    schedule: Schedule | None = None,
) -> list[Rollout]:
    """Return one greedy rollout a stream; with a `schedule` that one decides when to write, not the policy.

    Emit times are comparable with a batch of one stream only: `sampling.max_batch_tokens` 1.
    """
    sampling = sampling_of(schedule, replace(sampling, temperature=0.0), streams, chunks)
    engine = HFEngine(policy, sampling)
    return engine.generate([Request(interpretation_sample(s, chunks), schedule=schedule) for s in streams])


def sampling_of(
    schedule: Schedule | None, sampling: SamplingConfig, streams: Sequence[Stream], chunks: ChunkConfig
) -> SamplingConfig:
    """Return the sampling, for a schedule that leaves the rest to the last turn with room for all turns in one."""
    if schedule is None or schedule.review is not None:
        return sampling
    turns = max(len(chunk_ends(s.seconds, chunks.seconds)) for s in streams)
    tokens, frames = (turns * most for most in (sampling.max_new_tokens, sampling.max_frames))
    return replace(sampling, max_new_tokens=tokens, max_frames=frames)


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
    """Return one rollout a stream as the engine samples; its rows go to `path` (JSON lines) as they come.

    A later call continues from there, and returns the same rollouts whatever had been finished before; of their tokens
    only the number is kept. `batch_size`: streams side by side. Emit times are those of a single stream with 1 only.
    """
    samples = [interpretation_sample(s, chunks) for s in streams]
    scheduled = _Scheduled(engine, schedule)
    generate_all(scheduled, samples, path, batch_size, describe=lambda rollout: rollout_row(rollout, 0, 0.0))
    written = {r.sample.id: r for r in read_rollouts(path)}
    return [replace(written[s.id], sample=s) for s in samples]


def instance_of(rollout: Rollout, index: int, source: str = "") -> Instance:
    """Write a rollout as a line of SimulEval's log; a word is delayed until the chunk after which it was `completed`.

    Raises ValueError, naming stream and turn, where time goes backwards: a clock was set back while the stream was
    interpreted, or a file of rollouts was edited.
    """
    sample = rollout.sample
    language = str(sample.metadata.get("target_language", ""))
    words = zip(split_words(rollout.text, language), completed(rollout.segments, language), strict=True)
    turns = [turn for word, turn in words if word.strip()]  # a blank that is no space is a character, but says nothing
    seconds = float(sample.metadata.get("seconds", sample.turns[-1].end))
    times: list[tuple[float, float]] = []
    computed = heard = 0.0
    for count, segment in enumerate(rollout.segments, 1):
        assert segment.source_time is not None and segment.emit_time is not None
        if segment.source_time < heard or segment.emit_time - segment.source_time < computed - 1e-6:
            raise ValueError(
                f"stream {sample.id!r}: turn {count}: written at {segment.emit_time:g} s after "
                f"{segment.source_time:g} s of source, {computed:g} s of computing until the turn before: time goes "
                "backwards; interpret it again"
            )
        heard, computed = segment.source_time, segment.emit_time - segment.source_time
        times.append((segment.source_time, segment.emit_time))
    times.append((seconds, seconds + computed))
    return Instance(
        index=index,
        prediction=tidy(rollout.text, language),
        delays=tuple(1000 * times[turn][0] for turn in turns),
        elapsed=tuple(1000 * times[turn][1] for turn in turns),
        prediction_length=len(turns),
        reference=tidy(" ".join(sample.references), language) if sample.references else None,
        source=source or sample.id,
        source_length=1000 * seconds,
    )


def measure(streams: Sequence[Stream], rollouts: Sequence[Rollout]) -> Row:
    """Return the `scores` of audiorl.tasks.simul.scoring, and what reports read.

    Latencies are None where nothing was said; computation-aware ones count the computing since the last write. `low`,
    `high`: 95% bootstrap interval of chrF over streams. `cut`: share of turns that did not end by themselves.
    `spoken`: share of turns with text. Raises ValueError for streams without reference.
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
    said, wanted = [i.prediction for i in instances], [i.reference or "" for i in instances]
    chrf = estimate(*quality_counts("chrf", said, wanted, language))
    turns = [s for r in rollouts for s in r.segments]
    return {
        "laal": None if math.isnan(whole["LAAL"]) else whole["LAAL"] / 1000,
        "stream_laal": None if math.isnan(long["StreamLAAL"]) else long["StreamLAAL"] / 1000,
        **{metric: whole[NAMES[metric]] for metric in qualities},
        "length_ratio": whole["LengthRatio"],
        "repetition": whole["Repetition"],
        "degenerate": list(degeneracy(instances, language, whole).signs),
        "low": chrf.low,
        "high": chrf.high,
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
) -> Row:
    """Measure once, as a phase of the run: eval/NAME.jsonl, a SimulEval log in eval/NAME/, an entry in eval.json.

    With a `speech_decoder` also tracks, with a log of their own, in eval/NAME/speech/. `optimised`: the quality that
    the rewards compare with. `baseline`: the phase of the same streams from which changes are measured.
    """
    if not run.finished(name):
        rollouts = interpret(policy, streams, chunks, sampling, schedule)
        scores = score_rollouts(reward, rollouts)
        write_interpreted(run.dir / "eval" / name, streams, rollouts)
        scored = [r if s is None else r.with_score(s) for r, s in zip(rollouts, scores, strict=True)]
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
) -> Row:
    """Return `outside`, the intervals of the qualities that no reward asks, and `changes` since the `baseline`.

    The changes are those of all qualities and of `laal` (s), each with its paired interval over streams.
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
        change = estimate(laal_counts(later, language), ratio, baseline_NK=laal_counts(earlier, language))
        changes["laal"] = [change.value, change.low, change.high]
    return {"outside": outside} | ({"changes": changes} if changes else {})


def laal_counts(instances: Sequence[Instance], language: str) -> NDArray[np.float64]:
    """Return [N, 2]: LAAL in seconds and 1; zeros where nothing was written."""
    unit = latency_unit(language)
    counts_N2 = np.zeros((len(instances), 2))
    for i, instance in enumerate(instances):
        if instance.delays:
            wanted = reference_length(instance.reference or "", unit)
            counts_N2[i] = laal(instance.delays, instance.source_length, wanted) / 1000, 1.0
    return counts_N2


def probe_streams(
    policy: AudioPolicy, streams: Sequence[Stream], chunks: ChunkConfig, sampling: SamplingConfig
) -> Callable[[], dict[str, float]]:
    """Return a function for the training loop that measures the policy as it is at the moment."""

    def now() -> dict[str, float]:
        result = measure(streams, interpret(policy, streams, chunks, sampling))
        named = ("laal", "stream_laal", "chrf", "spoken")
        return {name: result[name] for name in named if result[name] is not None}

    return now


def write_interpreted(folder: Path, streams: Sequence[Stream], rollouts: Sequence[Rollout]) -> None:
    """Write SimulEval's log, and the segments of the streams that have units.

    They call a stream by its recording where that is its own, else by its id.
    """
    paths = Counter(s.audio.path for s in streams)
    names = [s.audio.path if s.audio.path and paths[s.audio.path] == 1 and not s.audio.start else s.id for s in streams]
    instances = [instance_of(r, i, name) for i, (r, name) in enumerate(zip(rollouts, names, strict=True))]
    write_log(folder, instances, "speech", "text")
    rows, targets, sources = [], [], []
    for name, stream in zip(names, streams, strict=True):
        for u in stream.units:
            targets.append(" ".join(u.target.split()))
            sources.append(" ".join(u.source.split()))
            rows.append({"wav": name, "offset": u.start, "duration": u.end - u.start, "reference": targets[-1]})
    if not rows:
        return
    segments = yaml.safe_dump(rows, default_flow_style=None, sort_keys=False, allow_unicode=True, width=math.inf)
    (folder / SEGMENTS).write_text(segments, "utf-8")
    first = next(stream for stream in streams if stream.units)
    texts = {first.source_language: sources} if all(sources) else {}
    for language, lines in (texts | {first.target_language: targets}).items():
        (folder / SEGMENTS).with_suffix(f".{language}").write_text("".join(f"{x}\n" for x in lines), "utf-8")


# -- speech ------------------------------------------------------------------------------------------------------------


def measure_spoken(
    streams: Sequence[Stream], rollouts: Sequence[Rollout], speech_decoder: CodecSpeechDecoder, judges: Judges
) -> tuple[Row, list[str]]:
    """Return scores, with their 95 % bootstrap intervals over streams in `intervals`, and the raw transcripts.

    With a recogniser ASR-BLEU and the like, and ASR-Cut, the share of transcripts with more than MOST_PER_SECOND, of
    which the rest is not counted. With an encoder `own_voice`, and where streams have several speakers MixedTurns,
    the share of spoken turns that translate several. Always DurationWithin20: whether a spoken turn lasts as long as
    its spoken reference, to 20 %; and DurationRatio: all speech of a stream over that of all references.
    """
    rate, language = speech_decoder.sample_rate, streams[0].target_language
    waves = speech_decoder.waveforms(rollouts)
    spoken = [np.zeros(0, np.float32) if wav is None else wav for wav in waves]
    scores: Row = {}
    intervals: dict[str, list[float]] = {}
    transcripts: list[str] = []
    values: dict[str, list[float]] = {}
    if judges.recogniser:
        transcripts = [" ".join(text.split()) for text in judges.recogniser.transcribe(spoken, rate)]
        counted = [said_in(len(wav) / rate, text, language) for wav, text in zip(spoken, transcripts, strict=True)]
        # References in words, as they are said, do not compare with digits; SimulEval only drops case and punctuation.
        references = [stream.reference for stream in streams]
        said, wanted = ([normalize(text, "basic", language) for text in texts] for texts in (counted, references))
        metrics: dict[str, str] = {metric: NAMES[metric] for metric in default_quality(language)}
        for metric, name in (metrics | {"length_ratio": "LengthRatio"}).items():
            quality = estimate(*quality_counts(metric, said, wanted, language))
            scores[f"ASR-{name}"], intervals[f"ASR-{name}"] = quality.value, [quality.low, quality.high]
        scores["ASR-Cut"] = float(np.mean([a != b for a, b in zip(counted, transcripts, strict=True)]))
    if judges.encoder:
        parts, values["MixedTurns"] = speaker_parts(streams, rollouts, speech_decoder)
        sources_ND = np.asarray(judges.encoder.embed([part.source for part in parts], RATE))
        voices_ND = np.asarray(judges.encoder.embed([part.spoken for part in parts], rate))
        values |= own_voice(voices_ND @ sources_ND.T, [part.speaker for part in parts], [p.stream for p in parts])
    within, ratios = [], []
    for rollout in rollouts:
        lengths = [len(wav) / rate for wav in speech_decoder.by_segment(rollout)]
        asked = [turn.reference_seconds or 0.0 for turn in rollout.sample.turns]
        pairs = [(a, b) for a, b in zip(lengths, asked, strict=True) if a and b]
        within += [float(abs(a - b) <= DURATION_TOLERANCE * b) for a, b in pairs]
        ratios += [sum(lengths) / sum(asked)] if sum(asked) else []
    values |= {"DurationWithin20": within, "DurationRatio": ratios}
    for name, column in values.items():
        if column:
            scores[name], intervals[name] = float(np.mean(column)), list(bootstrap_interval(column))
    return scores | {"intervals": intervals}, transcripts


def said_in(seconds: float, text: str, language: str) -> str:
    """Return the beginning of a transcript that can be said in so many seconds."""
    words, unit = split_words(text, language), latency_unit(language)
    spelled = unit == "char" and "han" not in written_in(language)
    most = math.ceil(MOST_PER_SECOND[unit] * (1 + spelled) * seconds)
    return text if len(words) <= most else tidy(cut_text(text, [words[:most]])[0], language)


@dataclass(frozen=True)
class SpeakerPart:
    """The words of a speaker in a stream, and their translation."""

    stream: int
    speaker: str
    source: NDArray[np.float32]
    """float32 [T] at RATE Hz."""
    spoken: NDArray[np.float32]
    """float32 [T] at the codec's rate."""


def speaker_parts(
    streams: Sequence[Stream], rollouts: Sequence[Rollout], speech_decoder: CodecSpeechDecoder
) -> tuple[list[SpeakerPart], list[float]]:
    """Return the parts with speech; and for each spoken turn in streams of several speakers, 1.0 if it mixes them.

    A stream of one speaker is a part.
    """
    parts, mixed = [], []
    for index, (stream, rollout) in enumerate(zip(streams, rollouts, strict=True)):
        waves, source = speech_decoder.by_segment(rollout), stream.audio.load(RATE)
        speakers = sorted({u.speaker for u in stream.units if u.target})
        if len(speakers) < 2:
            whole = speech_decoder.waveform(rollout)
            speaker = str(stream.metadata.get("speaker", "")) or next(iter(speakers), "")
            parts += [] if whole is None else [SpeakerPart(index, speaker, source, whole)]
            continue
        spoken = [(of_turn, w) for of_turn, w in zip(turn_speakers(stream, rollout), waves, strict=True) if len(w)]
        mixed += [float(len(of_turn) > 1) for of_turn, _ in spoken]
        for speaker in speakers:
            said = [wav for of_turn, wav in spoken if of_turn == {speaker}]
            own = [source[round(u.start * RATE) : round(u.end * RATE)] for u in stream.units if u.speaker == speaker]
            if said:
                parts.append(SpeakerPart(index, speaker, np.concatenate(own), np.concatenate(said)))
    return parts, mixed


def turn_speakers(stream: Stream, rollout: Rollout) -> list[set[str]]:
    """Find whose words each turn translates: its text is aligned with the units' translations (`soft_cuts`)."""
    language, units = stream.target_language, [u for u in stream.units if u.target]
    written = [split_words(segment.text, language) for segment in rollout.segments]
    words = [word for turn in written for word in turn]
    wanted = [split_words(u.target, language) for u in units]
    pieces = chunks(range(len(words)), soft_cuts(wanted, words, latency_unit(language)))
    speaker_of_word = [u.speaker for u, piece in zip(units, pieces, strict=True) for _ in piece]
    ends = np.cumsum([len(turn) for turn in written])
    return [set(speaker_of_word[end - len(turn) : end]) for end, turn in zip(ends, written, strict=True)]


def own_voice(
    cosines_NN: NDArray[np.float32], speakers: Sequence[str], streams: Sequence[int]
) -> dict[str, list[float]]:
    """Compare N translations (rows) with their sources (columns), by speaker and stream of each.

    SourceSimilarity: cosine of the translation and its source. Of parts whose speaker has others, and where there are
    several speakers: OwnSimilarity, the mean cosine with that speaker's other sources; OtherSimilarity, the same of the
    other speakers, as the mean over them; SimilarityDifference between the two; OwnVoice, 1 where no other speaker's
    mean is above the own. OwnVoiceInStream, of parts with others in their stream: 1 where no other source is nearer.
    """
    values: dict[str, list[float]] = {"SourceSimilarity": np.diag(cosines_NN).tolist()}
    names = sorted(set(speakers))
    for i, speaker in enumerate(speakers):
        rest = [j for j in range(len(speakers)) if j != i]
        by_name = {name: [cosines_NN[i, j] for j in rest if speakers[j] == name] for name in names}
        if len(names) > 1 and "" not in names and by_name[speaker]:
            own = np.mean(by_name.pop(speaker))
            others = [np.mean(column) for column in by_name.values()]
            values.setdefault("OwnSimilarity", []).append(float(own))
            values.setdefault("OtherSimilarity", []).append(float(np.mean(others)))
            values.setdefault("SimilarityDifference", []).append(float(own - np.mean(others)))
            values.setdefault("OwnVoice", []).append(float(own >= max(others)))
        if beside := [cosines_NN[i, j] for j in rest if streams[j] == streams[i]]:
            values.setdefault("OwnVoiceInStream", []).append(float(cosines_NN[i, i] >= max(beside)))
    return values
