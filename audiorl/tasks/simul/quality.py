"""Translation quality: of sentence pairs in [0, 1], for rewards, and of a whole log, by sacreBLEU, words, and models.

chrF weighs recall more than precision, so that writing more costs little; 1 - TER and word F1 punish both alike. chrF,
BLEU and TER need `audiorl[metrics]`. BERTScore, COMET and BLEURT load large models and are no part of any extra: their
own requirements clash with this project's, so they are installed by hand where they are wanted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from audiorl.eval.metrics.corpus import TRANSLATION, Score, ratio, translation_counts
from audiorl.eval.metrics.latency import latency_unit, separator, text_units
from audiorl.eval.metrics.longform import chunks, mwer_cuts
from audiorl.speech_models.sentence import INSTALL, SentenceEncoder, installed_encoder

COMET_MODEL = "Unbabel/wmt22-comet-da"
Similarity = Callable[[str, str], float]
"""(written, reference) -> [0, 1]"""
Metric = Literal["chrf", "chrf++", "bleu", "ter", "word_f1", "bertscore", "comet"]


@dataclass(frozen=True)
class Translation:
    """A translation, its reference, and the source text, which COMET reads too ("" if unknown)."""

    written: str
    reference: str
    source: str = ""


def similarities(metric: Metric | Similarity, pairs: Sequence[Translation]) -> list[float]:
    """One value a pair. Raises ImportError that says what to install, ValueError for a name that is no metric."""
    if callable(metric):
        return [float(metric(p.written, p.reference)) for p in pairs]
    metrics: dict[str, Callable[[Sequence[Translation]], list[float]]] = {
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


def _counted(pair: Translation, metric: str) -> float:
    """Return a metric of `translation_counts` for one pair, as a share."""
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


def bertscore(pairs: Sequence[Translation], model: str = "xlm-roberta-base") -> list[float]:
    """BERTScore F1 (Zhang et al. 2020), clipped to [0, 1]; `model`: a hub id or folder."""
    _, _, f1 = _bert_scorer(model).score([p.written for p in pairs], [p.reference for p in pairs])
    return [min(max(float(x), 0.0), 1.0) for x in f1]


def comet(pairs: Sequence[Translation], model: str = COMET_MODEL) -> list[float]:
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
    """Return the text in one piece a reference, split where the fewest word (or character) errors remain."""
    return [separator(language).join(piece) for piece in units_like_references(written, references, language)]


def units_like_references(written: str, references: Sequence[str], language: str) -> list[Sequence[str]]:
    """`split_like_references` with the words (or characters) of each piece."""
    unit = latency_unit(language)
    units, wanted = text_units(written, unit), [text_units(r, unit) for r in references]
    return chunks(units, mwer_cuts(wanted, units))


Quality = Literal["bleu", "chrf", "chrf++", "ter", "word_f1", "semantic", "comet", "bleurt"]
TEXT_METRICS: tuple[Quality, ...] = ("bleu", "chrf", "chrf++", "ter", "word_f1")
"""The metrics that load no model. chrF weighs recall more, the last two also punish what is too much."""

NAMES: dict[Quality, str] = {
    "bleu": "BLEU",
    "chrf": "chrF",
    "chrf++": "chrF++",
    "ter": "TER",
    "word_f1": "WordF1",
    "semantic": "Semantic",
    "comet": "COMET",
    "bleurt": "BLEURT",
}
"""How tables and files call the metrics."""

BLEURT_MODEL = "BLEURT-20"


def bleu_tokenizer(language: str) -> str:
    """SacreBLEU's tokenizer: "zh" for Chinese, "char" for Japanese (needs no MeCab), else "13a"."""
    if latency_unit(language) == "word":
        return "13a"
    return "char" if language.lower().startswith("ja") or language.lower().startswith("jpn") else "zh"


def is_english(language: str) -> bool:
    return language.lower().replace("_", "-").split("-")[0] in ("en", "eng")


def default_quality(language: str) -> tuple[Quality, ...]:
    """`TEXT_METRICS`, and the similarity of sentence embeddings where the encoder is installed and reads `language`."""
    semantic: tuple[Quality, ...] = ("semantic",)
    return TEXT_METRICS + (semantic if is_english(language) and installed_encoder() is not None else ())


def quality_counts(
    metric: str, hypotheses: Sequence[str], references: Sequence[str], language: str
) -> tuple[NDArray[Any], Score]:
    """Counts [N, K] and their score, for intervals: a metric of `TRANSLATION`, or "semantic"."""
    if metric in TRANSLATION:
        return translation_counts(hypotheses, references, metric, bleu_tokenizer(language))
    similarities = _encoder(language).similarities(hypotheses, references)
    return np.array([[100 * x, 1.0] for x in similarities]), ratio


def _encoder(language: str) -> SentenceEncoder:
    if not is_english(language):
        raise ValueError(f"semantic: all-MiniLM-L6-v2 reads English, not {language!r}; leave it out of --quality")
    encoder = installed_encoder()
    if encoder is None:
        raise ImportError(f"the similarity of sentence embeddings needs a model: {INSTALL}")
    return encoder


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
        return _comet(hypotheses, references, sources)
    if metric == "bleurt":
        return _bleurt(hypotheses, references)
    raise ValueError(f"quality: {metric!r} is not one of {', '.join(NAMES)}")


def _comet(hypotheses: Sequence[str], references: Sequence[str], sources: Sequence[str] | None) -> float:
    if sources is None:
        raise ValueError("comet: needs the source sentences, one per reference (--sources FILE)")
    rows = [{"src": s, "mt": h, "ref": r} for s, h, r in zip(sources, hypotheses, references, strict=True)]
    return float(_comet_model(COMET_MODEL).predict(rows, batch_size=8, gpus=0).system_score)


def _bleurt(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    try:
        from bleurt.score import BleurtScorer
    except ImportError as error:
        raise ImportError(
            "BLEURT needs its own package: pip install git+https://github.com/google-research/bleurt, and the "
            f"checkpoint {BLEURT_MODEL} in the working folder"
        ) from error
    scores = BleurtScorer(BLEURT_MODEL).score(references=list(references), candidates=list(hypotheses))
    return float(sum(scores) / len(scores))
