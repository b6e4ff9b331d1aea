"""Metrics: how good is a set of outputs. Pure functions of texts and numbers; rewards and evaluations share them.

>>> from audiorl import metrics
>>> metrics.wer(["a cat sat down"], ["a bat sat down"]).rate
0.25
"""

from audiorl.eval.metrics.choice import mmau_match, pass_at_k, pass_at_k_curve
from audiorl.eval.metrics.latency import al, ap, atd, dal, end_offset, flal, laal, start_offset, wait_k, yaal
from audiorl.eval.metrics.longform import ReferenceSegment, long_yaal, mwer_cuts, soft_cuts, stream_laal
from audiorl.eval.metrics.text import (
    CorpusErrors,
    ErrorCounts,
    Normalizer,
    cer,
    char_errors,
    normalize,
    wer,
    word_errors,
)

__all__ = [
    "CorpusErrors",
    "ErrorCounts",
    "Normalizer",
    "ReferenceSegment",
    "al",
    "ap",
    "atd",
    "cer",
    "char_errors",
    "dal",
    "end_offset",
    "flal",
    "laal",
    "long_yaal",
    "mmau_match",
    "mwer_cuts",
    "normalize",
    "pass_at_k",
    "pass_at_k_curve",
    "soft_cuts",
    "start_offset",
    "stream_laal",
    "wait_k",
    "wer",
    "word_errors",
    "yaal",
]
