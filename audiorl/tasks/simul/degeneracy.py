"""Does a log come from an interpreter at all? Signs of policies that gain in one metric by doing nothing useful.

Latency falls when more is said and rises with silence, and chrF weighs what is missing more than what is too much. A
policy that babbles, or one that says everything at the end, can look good in a table. None of these signs is a measure
of quality: they say which numbers not to trust.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from audiorl.eval.metrics.corpus import translation_counts
from audiorl.eval.metrics.latency import latency_unit, reference_length, yaal
from audiorl.tasks.simul.logs import Instance

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
    """What `degeneracy` measures. The first three are OmniSTEval's (0.1.10), in percent; None where not defined."""

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
    """Measure the text output of whole streams.

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
