"""Translation quality of a log: BLEU, chrF and TER by sacreBLEU, words, and models where they are installed: the
similarity of sentence embeddings, COMET and BLEURT.

COMET and BLEURT load large models and are no part of any extra: their own requirements clash with this project's, so
they are installed by hand where they are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from audiorl.eval.metrics.corpus import TRANSLATION, Score, ratio, translation_counts
from audiorl.eval.metrics.latency import latency_unit
from audiorl.speech_models.sentence import INSTALL, SentenceEncoder, installed_encoder

Quality = Literal["bleu", "chrf", "chrf++", "ter", "word_f1", "semantic", "comet", "bleurt"]
TEXT_METRICS: tuple[Quality, ...] = ("bleu", "chrf", "chrf++", "ter", "word_f1")
"""Those that load no model. chrF weighs recall more, the last two also punish what is too much."""

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

COMET_MODEL = "Unbabel/wmt22-comet-da"
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
    """The corpus score: BLEU, chrF, chrF++ and word F1 in [0, 100]; TER in percent, where less is better and silence
    has 100; semantic similarity 100 times the mean cosine of the pairs; COMET and BLEURT about [0, 1].

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
    try:
        from comet import download_model, load_from_checkpoint
    except ImportError as error:
        raise ImportError("COMET needs its own package: pip install unbabel-comet") from error
    model = load_from_checkpoint(download_model(COMET_MODEL))
    rows = [
        {"src": source, "mt": hypothesis, "ref": reference}
        for source, hypothesis, reference in zip(sources, hypotheses, references, strict=True)
    ]
    return float(model.predict(rows, batch_size=8, gpus=0).system_score)


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
