"""The tokens of a rollout as HTML, each with the numbers that the run recorded of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from html import escape
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from audiorl.data.rollout_rows import array_of
from audiorl.report.run import Row

_HALF = {"advantages": "advantage", "ratios": "ratio", "entropies": "entropy"}
"""Fields of a recorded segment that hold a 16-bit float a token, and their names on the page."""


def tokens(row: Row, run_folder: Path) -> str:
    """The sampled tokens as `<span>`s with data-log-prob, data-advantage, …; "" where ids or tokenizer are missing.

    Where every token of the response has the same advantage, that of the row is given.
    """
    tokenizer = _tokenizer(run_folder)
    segments = [segment for segment in row.get("segments") or () if isinstance(segment.get("ids"), dict)]
    if tokenizer is None or not segments:
        return ""
    advantage = row.get("advantage")
    try:
        return "".join(_segment(segment, tokenizer, advantage) for segment in segments)
    except (ValueError, KeyError, TypeError, OverflowError):
        return ""  # edited or damaged: the plain text is shown


def _segment(segment: Row, tokenizer: Tokenizer, advantage: float | None) -> str:
    ids = array_of(segment["ids"])
    numbers = {"log-prob": array_of(segment["logprobs"]).reshape(len(ids), -1).sum(1)}
    if advantage is not None:
        numbers["advantage"] = np.full(len(ids), float(advantage))
    numbers |= {name: array_of(segment[field]) for field, name in _HALF.items() if segment.get(field)}
    has_codes = segment.get("codes") is not None
    frames = [bool((row >= 0).any()) for row in array_of(segment["codes"])] if has_codes else [False] * len(ids)
    texts = pieces(tokenizer, [int(i) for i in ids], frames)
    return "".join(
        f"<span class='token{' frame' if frames[i] else ''}'"
        + "".join(f" data-{name}='{float(values[i]):.4g}'" for name, values in numbers.items())
        + f">{escape(text)}</span>"
        for i, text in enumerate(texts)
    )


def pieces(tokenizer: Tokenizer, ids: Sequence[int], frames: Sequence[bool]) -> list[str]:
    """The text of each token. Of a character in several tokens the last one has it; a codec frame is a small square."""
    texts: list[str] = []
    pending: list[int] = []
    for token, is_frame in zip(ids, frames, strict=True):
        pending.append(token)
        text = "▪" if is_frame else tokenizer.decode(pending, skip_special_tokens=False)
        if text.endswith("\ufffd") and len(pending) < 4:
            texts.append("")
            continue
        texts.append(text)
        pending = []
    return texts


def _tokenizer(run_folder: Path) -> Tokenizer | None:
    """That of the newest checkpoint, which all checkpoints of a run share."""
    files = sorted(run_folder.glob("checkpoints/*/*/tokenizer.json"), key=lambda file: file.stat().st_mtime)
    return _load(files[-1], files[-1].stat().st_mtime_ns) if files else None


@lru_cache(maxsize=8)
def _load(file: Path, _modified: int) -> Tokenizer | None:
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # tokenizers raises plain Exception for a damaged file
        return None
