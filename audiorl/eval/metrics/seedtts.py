"""The word errors of Seed-TTS-eval (Anastassiou et al. 2024, arXiv 2406.02430): its own texts to compare, its own mean.

Punctuation goes, apostrophes stay; English is compared by words in lower case, Chinese by characters, and other
languages, which the benchmark lacks, as English, with scripts without spaces by characters. The score is the mean of
the utterances' rates in percent: a short utterance weighs as much as a long one, and one that babbles far more than its
own share.
"""

from __future__ import annotations

import string
import unicodedata

from audiorl.eval.metrics.scripts import units
from audiorl.eval.metrics.text import ErrorCounts, word_errors

# The Chinese punctuation of zhon.hanzi, which the benchmark's script removes, and that of ASCII.
_CHINESE = (
    "＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､\u3000、〃〈〉《》「」『』【】"
    "〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏﹑﹔·．！？｡。"
)
_REMOVED = str.maketrans("", "", (_CHINESE + string.punctuation).replace("'", ""))


def compared(text: str, language: str) -> str:
    """What is compared, words or characters divided by single spaces.

    >>> compared("Don't, please – stop!", "en"), compared("你好，世界。", "zh"), compared("¿Qué «dice»?", "es")
    ("don't please stop", '你 好 世 界', 'qué dice')
    """
    text = text.translate(_REMOVED)
    if language == "zh":
        return " ".join(character for character in text if not character.isspace())
    if language == "en":
        return " ".join(text.lower().split())
    return " ".join(units("".join(c for c in text.lower() if c == "'" or not unicodedata.category(c).startswith("P"))))


def utterance_errors(reference: str, hypothesis: str, language: str) -> ErrorCounts:
    """Word errors of one utterance, in Chinese character errors; `.rate` may exceed 1."""
    return word_errors(compared(reference, language), compared(hypothesis, language))
