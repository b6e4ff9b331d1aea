"""Recordings in several melodies: the F0 range is scaled, the length stays; without the vocoder nothing is written."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from audiorl.data.corpus import corpus
from audiorl.metrics.prosody import prosody

ROOT = Path(__file__).parents[2]


def build(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/build_melodies.py", str(out), "--max-seconds", "0.6", *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(find_spec("pyworld") is not None, reason="pyworld is installed")
def test_without_the_vocoder(tmp_path: Path) -> None:
    result = build(tmp_path / "out")
    assert result.returncode == 1 and "pyworld is not installed; pip install pyworld" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(find_spec("pyworld") is None, reason="needs pyworld")
def test_ranges_are_scaled(tmp_path: Path) -> None:
    assert build(tmp_path / "out", "--ranges", "0.1", "1", "1.6").returncode == 0
    ranges: dict[str, list[float]] = {}
    seconds: dict[str, set[int]] = {}
    for u in corpus(tmp_path / "out"):
        wav = u.clip.load(16_000)
        measured = prosody(wav, 16_000)
        seconds.setdefault(u.key, set()).add(len(wav))
        if measured is not None:
            ranges.setdefault(u.speaker.split()[-1], []).append(measured.f0_range)
    flat, usual, lively = (float(np.median(ranges[name])) for name in ("x0.1", "x1", "x1.6"))
    assert flat < 0.3 * usual < usual < 0.9 * lively
    assert all(len(lengths) == 1 for lengths in seconds.values())
    assert build(tmp_path / "out").returncode == 1, "a folder with files is not overwritten"
