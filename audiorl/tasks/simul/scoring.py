"""Score the log of a simultaneous translator: latency as SimulEval 1.1.4 computes it, and quality.

Corpus latencies are means over the instances in which something was written, and `silent` counts the others: latency
and quality are only read together with it. Where nothing was written at all (SimulEval stops with an error), latencies
are NaN. Values are ms for speech sources, words for written ones; AP is a ratio and NumChunks a count. `_CA` marks the
computation-aware variant, from elapsed times; it is left out for written sources and where they were not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from audiorl.eval.metrics import latency
from audiorl.eval.metrics.corpus import translation_counts
from audiorl.eval.metrics.latency import (
    Unit,
    atd,
    cut_text,
    join_texts,
    latency_unit,
    reference_length,
    split_words,
    yaal,
)
from audiorl.eval.metrics.longform import (
    ReferenceSegment,
    chunks,
    elapsed_per_write,
    long_yaal,
    mwer_cuts,
    soft_cuts,
    stream_laal,
)
from audiorl.tasks.simul.logs import Instance, SourceType, TargetType
from audiorl.tasks.simul.quality import NAMES, TEXT_METRICS, Quality, quality_score

Segments = Mapping[int, Sequence[ReferenceSegment]]
"""The reference segments of each instance, by its index."""


def score(
    instances: Sequence[Instance],
    target_type: TargetType,
    language: str,
    *,
    source_type: SourceType = "speech",
    quality: Sequence[Quality] = TEXT_METRICS,
    segments: Segments | None = None,
    transcripts: Sequence[str] | None = None,
    sources: Sequence[str] | None = None,
    use_reference_length: bool = True,
    cumulative_elapsed: bool = False,
) -> dict[str, float]:
    """Return quality, latencies, and the numbers of `instances` and `silent` ones. With quality come LengthRatio (words
    written over words of the reference) and Repetition (share of three-word sequences that were written before).

    AL, LAAL, AP, DAL, ATD, StartOffset, EndOffset and NumChunks always; YAAL for text output; Discontinuity* for
    speech output. With `segments` (long streams, text output) the text is cut at them: quality is that of the pieces,
    and StreamLAAL, LongYAAL and FLAL (a segment is a paragraph) are added, means over the segments of all streams.
    `language` is the target's code and decides on the unit (characters where its script has no spaces) and BLEU's
    tokenizer. Speech output has no text: its quality needs `transcripts`, one per instance, and is left out without.
    `sources` are source sentences for COMET, one per instance or segment; of written sources they are known.
    `use_reference_length=False` is SimulEval's --no-use-ref-len, which StreamLAAL and LongYAAL do not know.
    `cumulative_elapsed` says that elapsed times hold all computing since the start of the stream, as SimulEval logs
    them, and counts only that since the write before: see `elapsed_per_write`.
    Raises ValueError naming instance and field.
    """
    if not instances:
        raise ValueError("instances: none to score")
    if transcripts is not None and len(transcripts) != len(instances):
        raise ValueError(f"transcripts: {len(transcripts)} for {len(instances)} instances; give one per instance")
    if segments is not None and target_type == "speech":
        raise ValueError("segments: speech output cannot be cut at segments; score its transcript as text output")
    unit = latency_unit(language)
    _check(instances, target_type, unit, language)
    if cumulative_elapsed:
        instances = [
            replace(i, elapsed=tuple(elapsed_per_write(i.delays, i.elapsed))) if i.timed else i for i in instances
        ]
    streams: list[_CutStream] | None = None
    if segments is not None:
        streams = [_cut(instance, segments.get(instance.index) or (), language) for instance in instances]
        instances = [stream.instance for stream in streams]
    spoken = [instance for instance in instances if instance.delays]
    aware = source_type != "text" and bool(spoken) and all(instance.timed for instance in spoken)

    scores: dict[str, float] = {}
    if target_type == "text" or transcripts is not None:
        if streams is not None:
            cut = [cut_text(s.instance.prediction, chunks(s.units, s.hard)) for s in streams]
            hypotheses = [piece.strip() for pieces in cut for piece in pieces]
            references = [segment.reference for s in streams for segment in s.segments]
        else:
            hypotheses = [i.prediction for i in instances] if transcripts is None else list(transcripts)
            references = [_reference(i, "quality needs one, or segments") for i in instances]
        if sources is None and source_type == "text" and streams is None:
            sources = [i.source if isinstance(i.source, str) else " ".join(i.source) for i in instances]
        if sources is not None and len(sources) != len(references):
            raise ValueError(f"sources: {len(sources)} for {len(references)} references; give one per reference")
        for metric in quality:
            scores[NAMES[metric]] = quality_score(metric, hypotheses, references, language, sources)
        for name, sign in (("LengthRatio", "length_ratio"), ("Repetition", "repetition")) if quality else ():
            counts, share = translation_counts(hypotheses, references, sign)
            scores[name] = share(counts.sum(0))

    timed = [False, True] if aware else [False]
    rows = [_latencies(i, target_type, source_type, unit, use_reference_length, ca) for i in spoken for ca in timed]
    for name in _latency_names(target_type, aware):
        scores[name] = _mean([row.get(name) for row in rows])
    if streams is not None:
        pieces = [pair for s in streams for pair in zip(chunks(s.instance.delays, s.hard), s.segments, strict=True)]
        scores["FLAL"] = _mean([latency.flal(delays) - segment.start for delays, segment in pieces if delays])
    for suffix in ("", "_CA")[: 1 + aware] if streams is not None else ():
        laals: list[float | None] = []
        yaals: list[float | None] = []
        for s in streams or ():
            times = s.instance.elapsed if suffix else s.instance.delays
            if times:
                laals += stream_laal(times, s.hard, s.segments, unit)
                yaals += long_yaal(times, s.soft, s.segments, unit)
        scores |= {f"StreamLAAL{suffix}": _mean(laals), f"LongYAAL{suffix}": _mean(yaals)}
    return scores | {"instances": len(instances), "silent": len(instances) - len(spoken)}


def _check(instances: Sequence[Instance], target_type: TargetType, unit: Unit, language: str) -> None:
    what = "characters" if unit == "char" else "words"
    for instance in instances:
        where = f"instance {instance.index}"
        if instance.speech != (target_type == "speech"):
            raise ValueError(f"{where}: durations: speech output has them, text output does not")
        count = len(instance.units(unit))
        if target_type == "text" and count != len(instance.delays):
            raise ValueError(
                f"{where}: delays: {len(instance.delays)} for {count} {what} of prediction; delays in {language!r} are "
                f"counted in {what}, is that the language of the output?"
            )


def _reference(instance: Instance, why: str) -> str:
    if instance.reference is None:
        raise ValueError(f"instance {instance.index}: reference: none; {why}")
    return instance.reference


@dataclass(frozen=True)
class _CutStream:
    """A long stream cut at its segments; `hard` and `soft` cuts as `mwer_cuts` and `soft_cuts` make them."""

    instance: Instance
    segments: Sequence[ReferenceSegment]
    units: list[str]
    hard: list[int]
    soft: list[int]


def _cut(instance: Instance, segments: Sequence[ReferenceSegment], language: str) -> _CutStream:
    """Return the stream, with the references of its segments joined where it has none of its own."""
    if not segments:
        raise ValueError(f"instance {instance.index}: no segments; give the reference segments of every instance")
    unit = latency_unit(language)
    units = instance.units(unit)
    references = [split_words(segment.reference, language) for segment in segments]
    if not any(references):
        raise ValueError(f"instance {instance.index}: reference: empty in every segment; the output cannot be cut")
    joined = join_texts([segment.reference for segment in segments], language)
    instance = replace(instance, reference=instance.reference or joined)
    return _CutStream(instance, segments, units, mwer_cuts(references, units), soft_cuts(references, units, unit))


_AWARE = ("AL", "LAAL", "AP", "DAL", "ATD", "StartOffset", "EndOffset")


def _latency_names(target_type: TargetType, aware: bool) -> list[str]:
    """Return the names of the latencies in the order of tables."""
    text = ["YAAL"] if target_type == "text" else []
    gaps = [] if text else ["DiscontinuitySum", "DiscontinuityAve", "DiscontinuityNum"]
    return [*_AWARE, "NumChunks", *gaps, *text, *(f"{name}_CA" for name in (*_AWARE, *text) if aware)]


def _latencies(
    instance: Instance, target_type: TargetType, source_type: SourceType, unit: Unit, use_reference: bool, aware: bool
) -> dict[str, float]:
    """Return the latencies of one instance that wrote something; with `aware` the computation-aware ones.

    YAAL is left out where nothing was written before the end of the source. Where the reference is None or its length
    unused, SimulEval takes the number of units written instead.
    """
    times = instance.elapsed if aware else instance.delays
    length = instance.source_length
    wanted = len(times)
    if use_reference and instance.reference is not None:
        wanted = reference_length(instance.reference, unit)
    text, spoken = source_type == "text", target_type == "speech"
    values: dict[str, float] = {
        "AL": latency.al(times, length, wanted),
        "LAAL": latency.laal(times, length, wanted),
        "AP": latency.ap(times, length, wanted),
        "DAL": latency.dal(times, length),
        "ATD": atd(
            instance.delays,
            elapsed=times if aware else None,
            durations=instance.durations,
            source_token=1 if text else 300,
            target_token=1 if text else None,
        ),
        "StartOffset": latency.start_offset(times),
        # Of speech the end is that of the sound as it was played, computation or not.
        "EndOffset": latency.end_offset(latency.ends(instance.intervals or ()) if spoken else times, length),
    }
    lag = None if spoken else latency.yaal(times, length, wanted)
    values |= {} if lag is None else {"YAAL": lag}
    if aware:
        return {f"{name}_CA": value for name, value in values.items()}
    values["NumChunks"] = len(times)
    if instance.intervals is not None:
        values |= latency.discontinuity(instance.intervals)
    return values


def _mean(values: Sequence[float | None]) -> float:
    defined = [value for value in values if value is not None]
    return fmean(defined) if defined else math.nan


LENGTHS = (0.6, 1.4)
"""Words written over words of the references, between which a translation can lie."""
REPETITION = 0.1
"""Share of repeated three-word sequences that may go beyond that of the references."""
SILENT = 0.2
"""Share of streams in which nothing may be written."""
DSPTV = 20.0
"""OmniSTEval's limit, in percentage points."""


@dataclass(frozen=True)
class Degeneracy:
    """The measures of `degeneracy`. The first three are OmniSTEval's (0.1.10), in percent; None where not defined."""

    swf: float | None
    """Simultaneous words: the share of units written before the end of their source."""
    efsw: float | None
    """The share expected from YAAL: how much of the sources lies before it."""
    dsptv: float | None
    """efsw - swf: far from 0 where a few early words hide that the others come at the end, or the reverse."""
    length_ratio: float
    repetition: float
    silent: float
    signs: tuple[str, ...]
    """What speaks against the policy, in words; empty for a sound one."""


def degeneracy(instances: Sequence[Instance], language: str, scores: Mapping[str, float] | None = None) -> Degeneracy:
    """Look for signs of a policy that gains in one metric by doing nothing useful, in the text output of whole streams.

    Latency falls when more is said and rises with silence, and chrF weighs what is missing more than what is too much:
    a policy that babbles, or says everything at the end, can look good in a table. No sign measures quality; they say
    which numbers not to trust.

    scores: LengthRatio and Repetition, where `score` has counted them for these streams as a whole; else they are
    counted here. Raises ValueError for no instances and for one without reference.
    """
    if not instances:
        raise ValueError("degeneracy: no instances")
    hypotheses = [instance.prediction for instance in instances]
    references = [_reference(instance, "a length cannot be compared with it") for instance in instances]

    def counted(metric: str, texts: Sequence[str]) -> float:
        counts, share = translation_counts(texts, references, metric)
        return share(counts.sum(0))

    length = counted("length_ratio", hypotheses) if scores is None else scores["LengthRatio"]
    repetition = counted("repetition", hypotheses) if scores is None else scores["Repetition"]
    of_references = counted("repetition", references)
    silent = sum(not i.delays for i in instances) / len(instances)
    swf, efsw = simultaneous_words(instances, language)
    dsptv = None if swf is None or efsw is None else efsw - swf
    signs = []
    if silent > SILENT:
        signs.append(f"nothing is written in {silent:.0%} of the streams")
    if not LENGTHS[0] <= length <= LENGTHS[1]:
        only = "" if length > LENGTHS[1] else "only "
        signs.append(f"the output is {only}{length:.2f} times as long as the references")
    if repetition > of_references + REPETITION:
        signs.append(
            f"{repetition:.0%} of its three-word sequences were written before, {of_references:.0%} in references"
        )
    if dsptv is not None and abs(dsptv) > DSPTV:
        signs.append(
            f"{swf:.0f} % of the words come before the end of the source, where its latency suggests {efsw:.0f} %"
        )
    return Degeneracy(swf, efsw, dsptv, length, repetition, silent, tuple(signs))


def simultaneous_words(instances: Sequence[Instance], language: str) -> tuple[float | None, float | None]:
    """OmniSTEval's SWF and EFSW in percent, for the logs of short streams; None where nothing was written in time."""
    unit = latency_unit(language)
    early = words = 0
    before = total = 0.0
    for instance in instances:
        length = instance.source_length
        early += sum(delay < length for delay in instance.delays)
        words += len(instance.delays)
        wanted = reference_length(instance.reference or "", unit)
        lag = yaal(instance.delays, length, wanted) if instance.delays else None
        if lag is not None:
            before += max(0.0, length - lag)
            total += length
    return 100.0 * early / words if words else None, 100.0 * before / total if total else None
