"""Writing systems: which script a letter belongs to, and what counts as one unit of length.

Counting whitespace-separated words gives 1 for any Chinese sentence. `units` counts what a reader would count: words
where words are spaced, single characters where they are not.
"""

from __future__ import annotations

import re

# Character ranges per script, ready to stand inside a regular expression's [...].
SCRIPTS: dict[str, str] = {
    "latin": "A-Za-zªºÀ-ÖØ-öø-ʯ\u1e00-\u1eff\uff21-\uff3a\uff41-\uff5a",
    "greek": "\u0370-\u03ff\u1f00-\u1fff",
    "cyrillic": "\u0400-\u052f\u1c80-\u1c8f",
    "armenian": "\u0530-\u058f",
    "hebrew": "\u0590-\u05ff",
    "arabic": "\u0600-\u06ff\u0750-\u077f\u08a0-\u08ff\ufb50-\ufdff\ufe70-\ufeff",
    "devanagari": "\u0900-\u097f",
    "bengali": "\u0980-\u09ff",
    "gurmukhi": "\u0a00-\u0a7f",
    "gujarati": "\u0a80-\u0aff",
    "tamil": "\u0b80-\u0bff",
    "telugu": "\u0c00-\u0c7f",
    "kannada": "\u0c80-\u0cff",
    "malayalam": "\u0d00-\u0d7f",
    "thai": "\u0e00-\u0e7f",
    "lao": "\u0e80-\u0eff",
    "myanmar": "\u1000-\u109f",
    "georgian": "\u10a0-\u10ff",
    "hangul": "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af",
    "ethiopic": "\u1200-\u139f",
    "khmer": "\u1780-\u17ff",
    "kana": "\u3041-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f",
    "han": "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003fa1f",
}

UNSPACED = "".join(SCRIPTS[s] for s in ("han", "kana", "thai", "lao", "myanmar", "khmer"))

_UNIT = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
_SPACE_NEXT_TO_UNSPACED = re.compile(rf"(?<=[{UNSPACED}])\s+|\s+(?=[{UNSPACED}])")
_SCRIPT_PATTERNS = {name: re.compile(f"[{ranges}]") for name, ranges in SCRIPTS.items()}


def units(text: str) -> list[str]:
    """Words, except that each character of a script written without spaces stands alone.

    >>> units("play 音乐 now")
    ['play', '音', '乐', 'now']
    """
    return _UNIT.findall(text)


def join_unspaced(text: str) -> str:
    """Drop whitespace next to characters of scripts written without spaces; it carries no meaning there."""
    return _SPACE_NEXT_TO_UNSPACED.sub("", text)


def script_counts(text: str) -> dict[str, int]:
    """How many letters of each script `text` holds; letters of scripts not listed above count as "other"."""
    counts: dict[str, int] = {}
    for char in text:
        if char.isalpha():
            name = next((n for n, p in _SCRIPT_PATTERNS.items() if p.match(char)), "other")
            counts[name] = counts.get(name, 0) + 1
    return counts
