"""Recordings in other voices: pitch, formants and melody are scaled, the length stays; refusals write nothing."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from audiorl.data.corpus import corpus
from audiorl.eval.metrics.prosody import prosody
from tests.support.tools import load_tool, run_tool


def build(out: Path, *voices: str) -> None:
    run_tool("build_voices", str(out), "--max-seconds", "0.6", "--voices", *voices)


@pytest.mark.skipif(find_spec("pyworld") is not None, reason="pyworld is installed")
def test_without_the_vocoder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pyworld is not installed; pip install pyworld"):
        build(tmp_path / "out", "1:1:1")
    assert not (tmp_path / "out").exists()


def test_a_voice_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        build(tmp_path / "out", "1:1:1", "1:1")
    assert "'1:1' is not PITCH:FORMANTS:RANGE" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_recordings_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no recording in en, es has a key that begins with --keys"):
        build(tmp_path / "out", "1:1:1", "--languages", "en", "es", "--keys", "numbers/")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("voice", ["a:1:1", "9:1:1", "1:0.1:1", "1:1:-1"])
def test_numbers_that_are_no_voice(voice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{voice}'"):
        load_tool("build_voices", monkeypatch).Voice.parse(voice)


@pytest.mark.skipif(find_spec("pyworld") is None, reason="needs pyworld")
def test_factors_are_heard(tmp_path: Path) -> None:
    voices = ("1:1:1", "1:1:0.1", "1:1:1.6", "0.6:1:1", "1:1.2:1")
    build(tmp_path / "out", *voices)
    ranges: dict[str, list[float]] = {}
    pitches: dict[str, list[float]] = {}
    centroids: dict[str, list[float]] = {}
    seconds: dict[str, set[int]] = {}
    for u in corpus(tmp_path / "out"):
        wav, voice = u.clip.load(16_000), u.speaker.split()[-1]
        seconds.setdefault(u.key, set()).add(len(wav))
        power = np.abs(np.fft.rfft(wav)) ** 2
        centroids.setdefault(voice, []).append(float((power * np.arange(len(power))).sum() / power.sum() / len(power)))
        f0 = pyworld_f0(wav)
        if len(f0):
            pitches.setdefault(voice, []).append(float(np.median(f0)))
        measured = prosody(wav, 16_000)
        if measured is not None:
            ranges.setdefault(voice, []).append(measured.f0_range)
    usual, flat, lively, low, small = voices
    assert np.median(ranges[flat]) < 0.3 * np.median(ranges[usual]) < 0.9 * np.median(ranges[lively])
    assert np.median(pitches[low]) == pytest.approx(0.6 * np.median(pitches[usual]), rel=0.1)
    assert np.median(centroids[small]) > 1.1 * np.median(centroids[usual])
    assert all(len(lengths) == 1 for lengths in seconds.values())
    with pytest.raises(ValueError, match="not empty"):
        build(tmp_path / "out", "1:1:1")


def pyworld_f0(wav: np.ndarray) -> np.ndarray:
    """In Hz, of the voiced frames."""
    import pyworld

    f0, _ = pyworld.harvest(wav.astype(np.float64), 16_000)
    return f0[f0 > 0]
