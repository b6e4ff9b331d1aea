"""What a speech model says about each segment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from corpora.annotate.recognisers import BATCH, Captioner, files_mark
from corpora.annotate.recordings import RATE, Recording


@dataclass(frozen=True)
class Captions:
    """A text for each span of the stage `spans`, "segments" or "sounds"."""

    captioner: Captioner
    spans: str = "segments"

    @property
    def name(self) -> str:
        return f"captions of {self.spans}"

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.spans,)

    @property
    def settings(self) -> Mapping[str, Any]:
        path = self.captioner.path
        return {"model": path, "files": files_mark(path), "prompt": self.captioner.prompt}

    def __call__(self, recording: Recording) -> list[str]:
        spans = recording.results[self.spans]
        texts: list[str] = []
        for start in range(0, len(spans), BATCH):
            texts += self.captioner.describe([recording.read(s) for s in spans[start : start + BATCH]], RATE)
        return texts
