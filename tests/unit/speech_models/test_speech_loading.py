"""Judges of the user's own Python files, by FILE.py:FOLDER."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from audiorl.recipes._speech import write_tiny_part
from audiorl.speech_models import load_recogniser, load_speaker_encoder

JUDGE = """
from dataclasses import dataclass

@dataclass
class Judge:
    name: str
    device: str

    def transcribe(self, waveforms, sample_rate):
        return [self.device for _ in waveforms]

def load(folder="nothing", device="cpu"):
    return Judge(folder, device)
"""
WAVES = [np.ones(16_000, np.float32)]


def test_the_file_gets_folder_and_device(tmp_path: Path) -> None:
    (tmp_path / "x.pyjudge.py").write_text(JUDGE)
    judge = load_recogniser(f"{tmp_path}/x.pyjudge.py:some/folder.py:1", device="cuda:1")
    assert judge.name == "some/folder.py:1" and judge.transcribe(WAVES, 16_000) == ["cuda:1"]
    assert load_recogniser(tmp_path / "x.pyjudge.py").name == "nothing"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, r"speech model file '.*judge\.py': no such file"),
        ("", r"speech model file '.*judge\.py': defines no module-level name 'load'"),
        ("load = 3", r"speech model file '.*judge\.py': 'load' is a int, expected a function"),
        ("def load(folder): ...", r"speech model file '.*judge\.py': load: got an unexpected keyword.*device"),
        (JUDGE, r"judge\.py:f: load returned a Judge without embed"),
    ],
)
def test_what_is_missing_is_named(source: str | None, message: str, tmp_path: Path) -> None:
    if source is not None:
        (tmp_path / "judge.py").write_text(source)
    with pytest.raises(ValueError, match=message):
        load_speaker_encoder(f"{tmp_path}/judge.py:f")
    if source == JUDGE:
        (tmp_path / "judge.py").write_text("def load(folder, device): ...")
        with pytest.raises(ValueError, match=r"judge\.py'.*missing a required argument: 'folder'.*FILE\.py:FOLDER"):
            load_recogniser(tmp_path / "judge.py")


def test_folders_that_our_tools_write_load_by_their_kind(tmp_path: Path) -> None:
    write_tiny_part("asr", tmp_path / "asr")
    write_tiny_part("speaker", tmp_path / "speaker")
    recogniser, encoder = load_recogniser(tmp_path / "asr"), load_speaker_encoder(tmp_path / "speaker")
    assert (recogniser.name, encoder.name) == ("asr", "speaker")
    assert len(recogniser.transcribe(WAVES, 16_000)) == len(WAVES) == len(encoder.embed(WAVES, 16_000))
    with pytest.raises(ValueError, match="speaker: a speaker encoder, which transcribes nothing"):
        load_recogniser(tmp_path / "speaker")
    with pytest.raises(ValueError, match="asr: a recogniser, which embeds no voices"):
        load_speaker_encoder(tmp_path / "asr")
