"""A Whisper with a shorter window is an ordinary checkpoint, and the same model up to what its window no longer has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from audiorl.audio import AudioClip
from audiorl.models import load_policy
from audiorl.models.families import whisper
from tests.support.tools import run_tool


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    whisper.tiny(["hello"], window=10).save(str(tmp_path / "whole"))
    return tmp_path / "whole"


def clip(seconds: float) -> AudioClip:
    wave = np.sin(2 * np.pi * 440 * np.arange(int(16_000 * seconds)) / 16_000)
    return AudioClip(array=wave.astype(np.float32), sample_rate=16_000)


def test_positions_are_cut_off_and_all_other_weights_stay(tmp_path: Path, whole: Path) -> None:
    run_tool("shorten_whisper", str(whole), str(tmp_path / "short"), "--seconds", "4")
    before, after = (WhisperForConditionalGeneration.from_pretrained(f) for f in (whole, tmp_path / "short"))
    assert after.config.max_source_positions == 200
    cut = "model.encoder.embed_positions.weight"
    old, new = before.state_dict(), after.state_dict()
    assert old.keys() == new.keys() and torch.equal(old[cut][:200], new[cut])
    assert all(torch.equal(old[name], new[name]) for name in old if name != cut)
    extractor = WhisperFeatureExtractor.from_pretrained(tmp_path / "short")
    assert extractor(np.zeros(16_000), sampling_rate=16_000)["input_features"][0].shape == (80, 400)

    policy = load_policy(str(tmp_path / "short"))
    assert policy.audio.encoder_output(clip(3.5)).shape[0] == 200
    with pytest.raises(ValueError, match=r"audio of 4\.5 s is longer than the 4 s that Whisper encodes"):
        policy.audio.encoder_output(clip(4.5))


def test_a_window_that_is_not_shorter_is_refused(tmp_path: Path, whole: Path) -> None:
    with pytest.raises(SystemExit, match="is 10 s; give less"):
        run_tool("shorten_whisper", str(whole), str(tmp_path / "short"), "--seconds", "10")
    assert not (tmp_path / "short").exists()
