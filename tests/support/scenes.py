"""Sounds in place of those of the packages, where the packages have theirs, and a corpus of scenes made of them."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import soundfile

from corpora.scenes.build import Layout, build_scenes
from corpora.scenes.sounds import CLASSES, SOURCES

RATE = 16_000
LAYOUT = Layout(seconds=2.0, rate=RATE, max_event_seconds=0.5)


def write_sounds(root: Path, source: str = "sonic-pi") -> Path:
    """Write a decaying tone with a click for each file of a source: its pitch is that of its class, with a little of
    the file in it."""
    time = np.arange(int(0.4 * RATE)) / RATE
    names = sorted(name for name, kind in CLASSES.items() if source in kind.files)
    for number, name in enumerate(names):
        for file in CLASSES[name].files[source]:
            own = 1 + (zlib.crc32(file.encode()) % 100) / 2500
            tone = np.sin(2 * np.pi * 200 * 1.45**number * own * time) * np.exp(-time * 12)
            path = root / SOURCES[source][1] / file
            path.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(path, np.pad(0.5 * tone, (800, 0)), RATE, format=path.suffix[1:].upper())
    licence = root / "usr/share/common-licenses/GPL-2"
    licence.parent.mkdir(parents=True, exist_ok=True)
    licence.write_text("GPL\n")
    return root


def scenes(out: Path, tree: Path, counts: tuple[int, int, int] = (24, 8, 8), edits: int = 2, seed: int = 0) -> Path:
    build_scenes(out, counts, edits, ["sonic-pi"], LAYOUT, seed=seed, tree=tree)
    return out
