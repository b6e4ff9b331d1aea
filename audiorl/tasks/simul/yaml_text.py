"""YAML by libyaml's fast loader, without its fault: it ends the process for a text that is nested very deeply."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any

import yaml

MAX_DEPTH = 100
"""Lists and objects within each other; segmentations have two."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STEP = {"[": 1, "{": 1, "]": -1, "}": -1}


def load_yaml(text: str | bytes) -> Any:
    """The document in `text`. Raises yaml.YAMLError, also for more than MAX_DEPTH levels, and ValueError."""
    if _may_be_deep(text if isinstance(text, str) else text.replace(b"\0", b"").decode("latin-1")):
        depth = 0
        for event in yaml.parse(text, Loader=_LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise yaml.YAMLError(f"nested in more than {MAX_DEPTH} levels")
    return yaml.load(text, _LOADER)


def _may_be_deep(text: str) -> bool:
    """Whether brackets, dashes in a line or indentation allow so many levels. Fast, since files have 200,000 lines."""
    brackets = accumulate(_STEP[bracket] for bracket in re.findall(r"[\[\]{}]", text))
    levels = MAX_DEPTH // 4
    indented = re.search(rf"(?:[-?:]\s+){{{levels}}}|^[ -]{{{levels}}}", text, re.MULTILINE)
    return max(brackets, default=0) > levels or indented is not None
