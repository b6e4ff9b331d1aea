"""An extension of griffe: examples (`>>>`) in docstrings become code blocks of the built pages."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n).+)*", re.MULTILINE)


class FencedExamples(griffe.Extension):
    """Fences each run of lines that begins with `>>>` and ends at an empty line; `::` before a block becomes `:`."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = EXAMPLE.sub(lambda m: f"```pycon\n{m[0]}\n```", obj.docstring.value)
            obj.docstring.value = re.sub(r"::\n\n(?= )", ":\n\n", text)
