"""Translation quality: of sentence pairs in [0, 1], for rewards, and of a whole log, by sacreBLEU, words, and models.

chrF weighs recall more than precision, so that writing more costs little; 1 - TER and word F1 punish both alike. chrF,
BLEU and TER need `audiorl[metrics]`. BERTScore, COMET and BLEURT load large models and are no part of any extra: their
own requirements clash with this project's, so they are installed by hand where they are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from audiorl.eval.metrics.corpus import TRANSLATION, Score, ratio, translation_counts
from audiorl.eval.metrics.latency import latency_unit, split_words
from audiorl.eval.metrics.longform import chunks, mwer_cuts
from audiorl.languages import language_code, written_in
from audiorl.speech_models.sentence import INSTALL, installed_encoder

Similarity = Callable[[str, str], float]
"""(written, reference) -> [0, 1]"""
Metric = Literal["chrf", "chrf++", "bleu", "ter", "word_f1", "bertscore", "comet"]


@dataclass(frozen=True)
class Translation:
    """A translation, its reference, the source text, which COMET reads too, and the target's code ("" if unknown)."""

    written: str
    reference: str
    source: str = ""
    language: str = ""


def similarities(metric: Metric | Similarity, pairs: Sequence[Translation]) -> list[float]:
    """Return one value a pair; BLEU and TER split it by its language. BLEU is smoothed, over the orders that it has.

    Raises ImportError that says what to install, ValueError for a name of no metric.
    """
    if callable(metric):
        return [float(metric(p.written, p.reference)) for p in pairs]
    metrics: dict[str, Callable[[Sequence[Translation]], list[float]]] = {
        "chrf": lambda pairs: [_counted(p, "chrf") for p in pairs],
        "chrf++": lambda pairs: [_counted(p, "chrf++") for p in pairs],
        "bleu": lambda pairs: [_counted(p, "sentence_bleu") for p in pairs],
        "ter": lambda pairs: [1.0 - min(1.0, _counted(p, "ter")) for p in pairs],
        "word_f1": lambda pairs: [_counted(p, "word_f1") for p in pairs],
        "bertscore": _bertscore,
        "comet": _comet,
    }
    if metric not in metrics:
        raise ValueError(f"no metric is called {metric!r}; choose from {', '.join(metrics)}, or give a function")
    return metrics[metric](pairs) if pairs else []


def _counted(pair: Translation, metric: str) -> float:
    """Return a metric of `translation_counts` for one pair, as a share."""
    counts, score = translation_counts([pair.written], [pair.reference], metric, bleu_tokenizer(pair.language))
    return score(counts.sum(0)) / 100


def _bertscore(pairs: Sequence[Translation]) -> list[float]:
    """Return BERTScore F1 (Zhang et al. 2020) of xlm-roberta-base, clipped to [0, 1]."""
    _, _, f1 = _bert_scorer().score([p.written for p in pairs], [p.reference for p in pairs])
    return [min(max(float(x), 0.0), 1.0) for x in f1]


def _comet(pairs: Sequence[Translation]) -> list[float]:
    """Return COMET (Rei et al. 2022), clipped to [0, 1]."""
    rows = [{"src": p.source, "mt": p.written, "ref": p.reference} for p in pairs]
    scores = _comet_model().predict(rows, batch_size=32, progress_bar=False).scores
    return [min(max(float(x), 0.0), 1.0) for x in scores]


@cache
def _bert_scorer() -> Any:
    try:
        from bert_score import BERTScorer
    except ImportError as error:
        raise ImportError("BERTScore needs its package: pip install bert-score") from error
    return BERTScorer(model_type="xlm-roberta-base", num_layers=9)


@cache
def _comet_model() -> Any:
    try:
        from comet import download_model, load_from_checkpoint
    except ImportError as error:
        raise ImportError("COMET needs its package: pip install unbabel-comet") from error
    return load_from_checkpoint(download_model("Unbabel/wmt22-comet-da"))


def units_like_references(written: str, references: Sequence[str], language: str) -> list[Sequence[str]]:
    """Return the words (or characters) in one piece a reference, split where the fewest errors remain."""
    words, wanted = split_words(written, language), [split_words(r, language) for r in references]
    return chunks(words, mwer_cuts(wanted, words))


Quality = Literal["bleu", "chrf", "chrf++", "ter", "word_f1", "semantic", "comet", "bleurt"]
TEXT_METRICS: tuple[Quality, ...] = ("bleu", "chrf", "chrf++", "ter", "word_f1")
"""The metrics that load no model. chrF weighs recall more, the last two also punish what is too much."""
NAMES: dict[Quality, str] = {"bleu": "BLEU", "chrf": "chrF", "chrf++": "chrF++", "ter": "TER", "word_f1": "WordF1"}
NAMES |= {"semantic": "Semantic", "comet": "COMET", "bleurt": "BLEURT"}
"""How tables and files call the metrics."""


def bleu_tokenizer(language: str) -> str:
    """Return SacreBLEU's tokenizer: "zh" for Chinese, "char" for other scripts without spaces (so Japanese needs no
    MeCab), else "13a"."""
    if latency_unit(language) == "word":
        return "13a"
    return "zh" if written_in(language) == ("han",) else "char"


def is_english(language: str) -> bool:
    return language_code(language) == "en"


def default_quality(language: str) -> tuple[Quality, ...]:
    """Return `TEXT_METRICS`, and the similarity of sentence embeddings where its encoder is there and reads it."""
    semantic: tuple[Quality, ...] = ("semantic",)
    return TEXT_METRICS + (semantic if is_english(language) and installed_encoder() is not None else ())


def quality_counts(
    metric: str, hypotheses: Sequence[str], references: Sequence[str], language: str
) -> tuple[NDArray[Any], Score]:
    """Return counts [N, K] and their score, for intervals: a metric of `TRANSLATION`, or "semantic"."""
    if metric in TRANSLATION:
        return translation_counts(hypotheses, references, metric, bleu_tokenizer(language))
    if not is_english(language):
        raise ValueError(f"semantic: all-MiniLM-L6-v2 reads English, not {language!r}; leave it out of --quality")
    encoder = installed_encoder()
    if encoder is None:
        raise ImportError(f"the similarity of sentence embeddings needs a model: {INSTALL}")
    return np.array([[100 * x, 1.0] for x in encoder.similarities(hypotheses, references)]), ratio


def quality_score(
    metric: Quality,
    hypotheses: Sequence[str],
    references: Sequence[str],
    language: str,
    sources: Sequence[str] | None = None,
) -> float:
    """Return the corpus score: BLEU, chrF, chrF++ and word F1 in [0, 100]; TER in percent, where less is better and
    silence has 100; semantic similarity 100 times the mean cosine of the pairs; COMET and BLEURT about [0, 1].

    COMET reads the source sentences too. Raises ImportError that says what to install.
    """
    if metric in TEXT_METRICS or metric == "semantic":
        counts, quality = quality_counts(metric, hypotheses, references, language)
        return quality(counts.sum(0))
    if metric == "comet":
        if sources is None:
            raise ValueError("comet: needs the source sentences, one per reference (--sources FILE)")
        rows = [{"src": s, "mt": h, "ref": r} for s, h, r in zip(sources, hypotheses, references, strict=True)]
        return float(_comet_model().predict(rows, batch_size=8, gpus=0).system_score)
    if metric != "bleurt":
        raise ValueError(f"quality: {metric!r} is not one of {', '.join(NAMES)}")
    try:
        from bleurt.score import BleurtScorer
    except ImportError as error:
        package = "git+https://github.com/google-research/bleurt"
        need = f"pip install {package}, and the checkpoint BLEURT-20 in the working folder"
        raise ImportError(f"BLEURT needs its own package: {need}") from error
    scores = BleurtScorer("BLEURT-20").score(references=list(references), candidates=list(hypotheses))
    return float(sum(scores) / len(scores))
