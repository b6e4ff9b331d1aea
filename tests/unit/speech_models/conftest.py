"""Tiny recognisers and speaker encoders of the real classes, saved as users' folders are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from audiorl.data.corpus import Utterance
from tests.support.speech_models import save_ctc, save_whisper, save_xvector

RATE = 16_000


@pytest.fixture(scope="session")
def clips(speech: list[Utterance]) -> list[np.ndarray]:
    """Four recordings of different length at 16 kHz."""
    return [speech[i].clip.load(RATE) for i in (3, 80, 200, 411)]


@pytest.fixture(scope="session")
def whisper_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whisper(tmp_path_factory.mktemp("judges") / "whisper")


@pytest.fixture(scope="session", params=["layer", "group"])
def ctc_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ctc(tmp_path_factory.mktemp("judges") / f"ctc-{request.param}", request.param)


@pytest.fixture(scope="session")
def xvector_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_xvector(tmp_path_factory.mktemp("judges") / "xvector")
