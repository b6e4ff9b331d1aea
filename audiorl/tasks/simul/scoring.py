"""Score the log of a simultaneous translator: latency as SimulEval 1.1.4 computes it, and quality.

Corpus latencies are means over the instances in which something was written. An instance without output has no latency
and is left out, as in SimulEval, and `silent` counts them: latency and quality are only read together with it. Where
nothing was written at all (SimulEval stops with an error), latencies are NaN, and BLEU and chrF are 0.

Values are ms for speech sources, words for written ones; AP is a ratio and NumChunks a count. `_CA` marks the
computation-aware variant, from elapsed times instead of delays. It is left out for written sources and where elapsed
times were not measured. (SimulEval 1.1.4's command line, asked for `--computation-aware`, prints the aware value under
both names.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from audiorl.eval.metrics import latency
from audiorl.eval.metrics.corpus import translation_counts
from audiorl.eval.metrics.latency import Unit, atd, latency_unit, reference_length, text_units, yaal
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
    """Quality, latencies, and the numbers of `instances` and `silent` ones. With quality come LengthRatio (words
    written over words of the reference) and Repetition (share of three-word sequences that were written before).

    AL, LAAL, AP, DAL, ATD, StartOffset, EndOffset, NumChunks and FLAL always; YAAL for text output; Discontinuity* for
    speech output. With `segments` (long streams, text output) the text is cut at them: quality is that of the pieces,
    and StreamLAAL and LongYAAL are added, means over the segments of all streams.
    `language` is the target's code and decides on the unit (characters for Chinese and Japanese) and the tokenizer of
    BLEU. Speech output has no text: its quality needs `transcripts`, one per instance, and is left out without them.
    `sources` are source sentences for COMET, one per instance or segment; of written sources they are known.
    `use_reference_length=False` is SimulEval's --no-use-ref-len. `cumulative_elapsed` says that elapsed times hold all
    computing since the start of the stream, as SimulEval logs them, and counts only that since the write before: see
    `elapsed_per_write`.
    Raises ValueError naming instance and field.
    """
    if not instances:
        raise ValueError("instances: none to score")
    if transcripts is not None and len(transcripts) != len(instances):
        raise ValueError(f"transcripts: {len(transcripts)} for {len(instances)} instances; give one per instance")
    unit = latency_unit(language)
    _check(instances, target_type, unit, language)
    if cumulative_elapsed:
        instances = [
            replace(i, elapsed=tuple(elapsed_per_write(i.delays, i.elapsed))) if i.timed else i for i in instances
        ]
    if segments is not None:
        if target_type == "speech":
            raise ValueError("segments: speech output cannot be cut at segments; score its transcript as text output")
        instances = [_with_reference(i, segments, unit) for i in instances]

    spoken = [instance for instance in instances if instance.delays]
    aware = source_type != "text" and bool(spoken) and all(instance.timed for instance in spoken)
    pieces = None if segments is None else [_cut(instance, segments[instance.index], unit) for instance in instances]

    scores: dict[str, float] = {}
    pairs = _pairs(instances, target_type, pieces, unit, transcripts)
    if pairs is not None:
        hypotheses, references = pairs
        if sources is None and source_type == "text" and pieces is None:
            sources = [i.source if isinstance(i.source, str) else " ".join(i.source) for i in instances]
        if sources is not None and len(sources) != len(references):
            raise ValueError(f"sources: {len(sources)} for {len(references)} references; give one per reference")
        for metric in quality:
            scores[NAMES[metric]] = quality_score(metric, hypotheses, references, language, sources)
        for name, sign in (("LengthRatio", "length_ratio"), ("Repetition", "repetition")) if quality else ():
            counts, share = translation_counts(hypotheses, references, sign)
            scores[name] = share(counts.sum(0))

    rows = [
        instance_latency(
            instance,
            target_type,
            unit,
            source_type=source_type,
            use_reference_length=use_reference_length,
            aware=with_elapsed,
        )
        for instance in spoken
        for with_elapsed in ([False, True] if aware else [False])
    ]
    for name in latency_names(target_type, aware):
        scores[name] = _mean([row.get(name) for row in rows])
    if pieces is not None:
        scores |= _long(pieces, unit, aware)
    return scores | {"instances": len(instances), "silent": len(instances) - len(spoken)}


_AWARE = ("AL", "LAAL", "AP", "DAL", "ATD", "StartOffset", "EndOffset")


def latency_names(target_type: TargetType, aware: bool) -> list[str]:
    """Return the names of the latencies in the order of tables."""
    names = [*_AWARE, "NumChunks", "FLAL"]
    if target_type == "speech":
        names += ["DiscontinuitySum", "DiscontinuityAve", "DiscontinuityNum"]
    else:
        names.append("YAAL")
    return names + [f"{name}_CA" for name in (*_AWARE, *(["YAAL"] if target_type == "text" else [])) if aware]


def instance_latency(
    instance: Instance,
    target_type: TargetType,
    unit: Unit,
    *,
    source_type: SourceType = "speech",
    use_reference_length: bool = True,
    aware: bool = False,
) -> dict[str, float]:
    """Return the latencies of one instance that wrote something; with `aware` the computation-aware ones.

    YAAL is left out where nothing was written before the end of the source. A reference is None or its length unused
    where SimulEval takes the number of units written instead.
    """
    times = instance.elapsed if aware else instance.delays
    length = instance.source_length
    wanted = len(times)
    if use_reference_length and instance.reference is not None:
        wanted = reference_length(instance.reference, unit)
    text = source_type == "text"
    spoken = target_type == "speech"
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
    if not spoken:
        lag = latency.yaal(times, length, wanted)
        values |= {"YAAL": lag} if lag is not None else {}
    if aware:
        return {f"{name}_CA": value for name, value in values.items()}
    values["NumChunks"] = len(times)
    values["FLAL"] = latency.flal(times)  # a log holds one paragraph a line, and nothing in it is retracted
    if instance.intervals is not None:
        values |= latency.discontinuity(instance.intervals)
    return values


def _check(instances: Sequence[Instance], target_type: TargetType, unit: Unit, language: str) -> None:
    for instance in instances:
        if instance.speech != (target_type == "speech"):
            raise ValueError(f"instance {instance.index}: durations: speech output has them, text output does not")
        if target_type == "text":
            count = len(text_units(instance.prediction, unit))
            if count != len(instance.delays):
                what = "characters" if unit == "char" else "words"
                raise ValueError(
                    f"instance {instance.index}: delays: {len(instance.delays)} for {count} {what} of prediction; "
                    f"delays in {language!r} are counted in {what}, is that the language of the output?"
                )


def _with_reference(instance: Instance, segments: Segments, unit: Unit) -> Instance:
    """Return the instance, with the references of its segments joined where it has none of its own."""
    if not segments.get(instance.index):
        raise ValueError(f"instance {instance.index}: no segments; give the reference segments of every instance")
    if instance.reference:
        return instance
    texts = [segment.reference for segment in segments[instance.index]]
    return replace(instance, reference=_join(texts, unit))


def _join(units: Sequence[str], unit: Unit) -> str:
    return ("" if unit == "char" else " ").join(units)


def _mean(values: Sequence[float | None]) -> float:
    defined = [value for value in values if value is not None]
    return fmean(defined) if defined else math.nan


@dataclass(frozen=True)
class _CutStream:
    """A long stream cut at its segments; `hard` and `soft` cuts as `mwer_cuts` and `soft_cuts` make them."""

    instance: Instance
    segments: Sequence[ReferenceSegment]
    units: list[str]
    hard: list[int]
    soft: list[int]


def _cut(instance: Instance, segments: Sequence[ReferenceSegment], unit: Unit) -> _CutStream:
    units = text_units(instance.prediction, unit)
    references = [text_units(segment.reference, unit) for segment in segments]
    if not any(references):
        raise ValueError(f"instance {instance.index}: reference: empty in every segment; the output cannot be cut")
    return _CutStream(instance, segments, units, mwer_cuts(references, units), soft_cuts(references, units, unit))


def _pairs(
    instances: Sequence[Instance],
    target_type: TargetType,
    streams: Sequence[_CutStream] | None,
    unit: Unit,
    transcripts: Sequence[str] | None,
) -> tuple[list[str], list[str]] | None:
    """Hypotheses and references, per instance or per segment; None where there is no text to compare."""
    if streams is not None:
        return (
            [_join(piece, unit) for stream in streams for piece in chunks(stream.units, stream.hard)],
            [segment.reference for stream in streams for segment in stream.segments],
        )
    if target_type == "speech" and transcripts is None:
        return None
    references = []
    for instance in instances:
        if instance.reference is None:
            raise ValueError(f"instance {instance.index}: reference: none; quality needs one, or segments")
        references.append(instance.reference)
    return list(transcripts) if transcripts is not None else [i.prediction for i in instances], references


def _long(streams: Sequence[_CutStream], unit: Unit, aware: bool) -> dict[str, float]:
    """StreamLAAL and LongYAAL, means over the segments of all streams."""
    scores: dict[str, float] = {}
    for suffix in ("", "_CA") if aware else ("",):
        laals: list[float | None] = []
        yaals: list[float | None] = []
        for stream in streams:
            times = stream.instance.elapsed if suffix else stream.instance.delays
            if times:
                laals += stream_laal(times, stream.hard, stream.segments, unit)
                yaals += long_yaal(times, stream.soft, stream.segments, unit)
        scores |= {f"StreamLAAL{suffix}": _mean(laals), f"LongYAAL{suffix}": _mean(yaals)}
    return scores


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
    hypotheses, references = [], []
    for instance in instances:
        if instance.reference is None:
            raise ValueError(f"instance {instance.index}: reference: none; a length cannot be compared with it")
        hypotheses.append(instance.prediction)
        references.append(instance.reference)

    def counted(metric: str, texts: Sequence[str]) -> float:
        counts, share = translation_counts(texts, references, metric)
        return share(counts.sum(0))

    if scores is None:
        length, repetition = counted("length_ratio", hypotheses), counted("repetition", hypotheses)
    else:
        length, repetition = scores["LengthRatio"], scores["Repetition"]
    of_references = counted("repetition", references)
    silent = sum(not i.delays for i in instances) / len(instances)
    swf, efsw = simultaneous_words(instances, language)
    dsptv = None if swf is None or efsw is None else efsw - swf
    signs = []
    if silent > SILENT:
        signs.append(f"nothing is written in {silent:.0%} of the streams")
    if length > LENGTHS[1]:
        signs.append(f"the output is {length:.2f} times as long as the references")
    elif length < LENGTHS[0]:
        signs.append(f"the output is only {length:.2f} times as long as the references")
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
        early += sum(delay < instance.source_length for delay in instance.delays)
        words += len(instance.delays)
        if not instance.delays:
            continue
        lag = yaal(instance.delays, instance.source_length, reference_length(instance.reference or "", unit))
        if lag is not None:
            before += max(0.0, instance.source_length - lag)
            total += instance.source_length
    return _percent(early, words), _percent(before, total)


def _percent(part: float, whole: float) -> float | None:
    return 100.0 * part / whole if whole else None
