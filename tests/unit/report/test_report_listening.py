"""The page of recordings: what is shown, what is escaped, and what stands in place of missing audio."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import soundfile

from audiorl.report.listening import Card, Take, listening_page


def test_takes_side_by_side(tmp_path: Path) -> None:
    wav = (0.2 * np.sin(np.arange(12_000) / 20)).astype(np.float32)
    soundfile.write(tmp_path / "a.flac", wav, 24_000, subtype="PCM_16")
    takes = (
        Take("original", "a.flac"),
        Take("codec <1>", "a.flac", {"STOI ↑": 0.91234}, "he said <hello>"),
        Take("codec 2", "gone.flac"),
        Take("codec 3", None),
    )
    card = Card("clip & co", "Hello <there>", takes)
    page = listening_page("Codecs", "lead", ["", "WER"], [["codec <1>", "2.50"]], [card], tmp_path)
    assert page.count("<audio") == 2
    for text in ("codec &lt;1&gt;", "he said &lt;hello&gt;", "clip &amp; co", "Hello &lt;there&gt;", "0.912", "2.50"):
        assert text in page
    assert "<hello>" not in page and "<there>" not in page
    assert "audio file not found: gone.flac" in page and "no audio" in page
    assert "http" not in page  # nothing is fetched
    sound = base64.b64decode(page.split("audio/flac;base64,")[1].split('"')[0])
    samples, rate = soundfile.read(io.BytesIO(sound))
    assert rate == 24_000 and np.abs(samples - wav).max() < 1e-4  # as it is: codecs are not coded again


def test_a_page_stays_small(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 24_000)
    soundfile.write(tmp_path / "a.flac", noise, 24_000, subtype="PCM_16")
    cards = [Card(str(i), "", (Take("x", "a.flac"),)) for i in range(9)]
    page = listening_page("Codecs", "", [""], [], cards, tmp_path, max_bytes=200_000)
    assert 2 <= page.count("<audio") <= 5
    assert "more recordings lie in the folder" in page
