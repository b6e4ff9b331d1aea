"""Recordings to annotate, and options that need no model but Silero."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import soundfile

from audiorl.data.corpus import Utterance
from corpora.annotate.options import Annotate
from tests.support.annotation import JUDGE, RATE, joined


@pytest.fixture(scope="session")
def english(speech: list[Utterance]) -> list[Utterance]:
    """Six English clips of about two seconds."""
    return [u for u in speech if u.language == "en" and u.duration > 1.6 and len(u.text.split()) > 3][:6]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, english: list[Utterance]) -> Path:
    """a.flac and deep/b.wav with three clips each; their labels are in `spans_of`."""
    folder = tmp_path_factory.mktemp("recordings")
    (folder / "deep").mkdir()
    for name, clips in (("a.flac", english[:3]), ("deep/b.wav", english[3:])):
        soundfile.write(folder / name, joined(clips), RATE, subtype="PCM_16")
    (folder / "notes.txt").write_text("no audio")
    return folder


@pytest.fixture
def judge(tmp_path: Path) -> Path:
    """The file of the counting recogniser; `calls` reads its log."""
    file = tmp_path / "counting.py"
    file.write_text(JUDGE)
    return file


@pytest.fixture
def options(folder: Path, judge: Path, tmp_path: Path) -> Callable[..., Annotate]:
    """Options that need no model but Silero, with changes."""
    plain = Annotate(inputs=(str(folder),), out=tmp_path / "out", asr=(str(judge),), language="en", quality="none")
    return lambda **changes: replace(plain, **changes)
