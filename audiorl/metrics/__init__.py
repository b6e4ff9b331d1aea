"""Metrics: how good is a set of outputs. Pure functions of texts and numbers; rewards and evaluations share them."""

from audiorl.metrics.choice import Accuracy, bootstrap_accuracy, mmau_match
from audiorl.metrics.passk import pass_at_k, pass_at_k_curve
from audiorl.metrics.text import CorpusErrors, ErrorCounts, Normalizer, cer, char_errors, normalize, wer, word_errors

__all__ = [
    "Accuracy",
    "CorpusErrors",
    "ErrorCounts",
    "Normalizer",
    "bootstrap_accuracy",
    "cer",
    "char_errors",
    "mmau_match",
    "normalize",
    "pass_at_k",
    "pass_at_k_curve",
    "wer",
    "word_errors",
]
