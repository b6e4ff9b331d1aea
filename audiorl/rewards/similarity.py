"""Similarity of a translation and its reference in [0, 1], by characters, words, or a learned model.

chrF weighs recall more than precision, so that writing more costs little; 1 - TER and word F1 punish both alike.
chrF, BLEU and TER need `audiorl[metrics]`; BERTScore and COMET the packages `bert-score` and `unbabel-comet`, which
load their own models. A batch of pairs is one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from audiorl.eval.metrics.corpus import translation_counts
from audiorl.eval.metrics.latency import latency_unit, separator, text_units
from audiorl.eval.metrics.longform import chunks, mwer_cuts

Similarity = Callable[[str, str], float]
"""(written, reference) -> [0, 1]"""
Metric = Literal["chrf", "chrf++", "bleu", "ter", "word_f1", "bertscore", "comet"]


@dataclass(frozen=True)
class Pair:
    """A translation, its reference, and the source text, which COMET reads too ("" if unknown)."""

    written: str
    reference: str
    source: str = ""


def similarities(metric: Metric | Similarity, pairs: Sequence[Pair]) -> list[float]:
    """One value a pair. Raises ImportError that says what to install, ValueError for a name that is no metric."""
    if callable(metric):
        return [float(metric(p.written, p.reference)) for p in pairs]
    metrics: dict[str, Callable[[Sequence[Pair]], list[float]]] = {
        "chrf": lambda pairs: [sentence_chrf(p.written, p.reference) for p in pairs],
        "chrf++": lambda pairs: [_counted(p, "chrf++") for p in pairs],
        "bleu": lambda pairs: [sentence_bleu(p.written, p.reference) for p in pairs],
        "ter": lambda pairs: [1.0 - min(1.0, _counted(p, "ter")) for p in pairs],
        "word_f1": lambda pairs: [_counted(p, "word_f1") for p in pairs],
        "bertscore": bertscore,
        "comet": comet,
    }
    if metric not in metrics:
        raise ValueError(f"no metric is called {metric!r}; choose from {', '.join(metrics)}, or give a function")
    return metrics[metric](pairs) if pairs else []


def _counted(pair: Pair, metric: str) -> float:
    """A metric of `translation_counts` for one pair, as a share."""
    counts, score = translation_counts([pair.written], [pair.reference], metric)
    return score(counts.sum(0)) / 100


def sentence_chrf(written: str, reference: str) -> float:
    """chrF of a sentence (Popović 2015), by sacreBLEU."""
    try:
        from sacrebleu import sentence_chrf as chrf
    except ImportError as error:
        raise ImportError("chrF needs sacrebleu: pip install 'audiorl[metrics]'") from error
    return float(chrf(written, [reference]).score) / 100


def sentence_bleu(written: str, reference: str) -> float:
    """BLEU of a sentence, smoothed, over the n-gram orders that it has, by sacreBLEU."""
    try:
        from sacrebleu import sentence_bleu as bleu
    except ImportError as error:
        raise ImportError("BLEU needs sacrebleu: pip install 'audiorl[metrics]'") from error
    return float(bleu(written, [reference], use_effective_order=True).score) / 100


def bertscore(pairs: Sequence[Pair], model: str = "xlm-roberta-base") -> list[float]:
    """BERTScore F1 (Zhang et al. 2020), clipped to [0, 1]; `model`: a hub id or folder."""
    _, _, f1 = _bert_scorer(model).score([p.written for p in pairs], [p.reference for p in pairs])
    return [min(max(float(x), 0.0), 1.0) for x in f1]


def comet(pairs: Sequence[Pair], model: str = "Unbabel/wmt22-comet-da") -> list[float]:
    """COMET (Rei et al. 2022), clipped to [0, 1]; `model`: a hub id or a checkpoint file."""
    rows = [{"src": p.source, "mt": p.written, "ref": p.reference} for p in pairs]
    scores = _comet_model(model).predict(rows, batch_size=32, progress_bar=False).scores
    return [min(max(float(x), 0.0), 1.0) for x in scores]


@functools.cache
def _bert_scorer(model: str) -> Any:
    try:
        from bert_score import BERTScorer
    except ImportError as error:
        raise ImportError("BERTScore needs its package: pip install bert-score") from error
    return BERTScorer(model_type=model, num_layers=9)


@functools.cache
def _comet_model(model: str) -> Any:
    try:
        from comet import download_model, load_from_checkpoint
    except ImportError as error:
        raise ImportError("COMET needs its package: pip install unbabel-comet") from error
    return load_from_checkpoint(model if model.endswith(".ckpt") else download_model(model))


def split_like_references(written: str, references: Sequence[str], language: str) -> list[str]:
    """The text in one piece a reference, split where the fewest word (or character) errors remain."""
    return [separator(language).join(piece) for piece in units_like_references(written, references, language)]


def units_like_references(written: str, references: Sequence[str], language: str) -> list[Sequence[str]]:
    """`split_like_references` with the words (or characters) of each piece."""
    unit = latency_unit(language)
    units, wanted = text_units(written, unit), [text_units(r, unit) for r in references]
    return chunks(units, mwer_cuts(wanted, units))
