"""The recogniser that is trained here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from audiorl.data.corpus import bundled_speech
from audiorl.speech_models import load_recogniser
from audiorl.speech_models.character_ctc import (
    BLANK,
    CHARACTERS,
    CharacterCTC,
    _text,
    load,
    plain,
    train_character_ctc,
)

RATE = 16_000
SPOKEN = [u for u in bundled_speech(("en",), 0.5, 1.5) if len(plain(u.text)) > 4][:8]


@pytest.fixture(scope="module")
def judge() -> CharacterCTC:
    waves = [u.clip.load(RATE) for u in SPOKEN]
    return train_character_ctc(waves, [u.text for u in SPOKEN], RATE, steps=150, batch_size=8, seed=0)


def test_it_learns_what_people_say(judge: CharacterCTC) -> None:
    heard = judge.transcribe([u.clip.load(RATE) for u in SPOKEN], RATE)
    right = sum(h == plain(u.text) for h, u in zip(heard, SPOKEN, strict=True))
    assert right >= 7, heard


def test_it_hears_any_rate_and_silence(judge: CharacterCTC) -> None:
    wav = SPOKEN[0].clip.load(24_000)
    empty, spoken = judge.transcribe([np.zeros(0, np.float32), wav], 24_000)
    assert empty == "" and spoken == plain(SPOKEN[0].text)


def test_a_saved_one_is_the_same(judge: CharacterCTC, tmp_path: Path) -> None:
    judge.save(tmp_path / "ear")
    wav = SPOKEN[1].clip.load(RATE)
    for same in (load(tmp_path / "ear"), load_recogniser(tmp_path / "ear")):
        assert same.name == "ear" and same.transcribe([wav], RATE) == judge.transcribe([wav], RATE)


@pytest.mark.slow
def test_it_learns_from_mel_frames(tmp_path: Path) -> None:
    waves = [u.clip.load(RATE) for u in SPOKEN]
    texts = [u.text for u in SPOKEN]
    judge = train_character_ctc(waves, texts, RATE, steps=150, batch_size=8, seed=0, features="mel")
    judge.save(tmp_path)
    understood = load(tmp_path).transcribe(waves, RATE)
    assert understood == judge.transcribe(waves, RATE)
    assert sum(text == plain(u.text) for text, u in zip(understood, SPOKEN, strict=True)) >= 6, understood
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"mel"', '"lpc"'))
    with pytest.raises(ValueError, match="features 'lpc' is not one of whisper, mel"):
        load(tmp_path)


def test_damaged_weights_are_refused(judge: CharacterCTC, tmp_path: Path) -> None:
    judge.save(tmp_path)
    whole = (tmp_path / "head.safetensors").read_bytes()
    (tmp_path / "head.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"head\.safetensors"):
        load(tmp_path)


def test_labels_become_text() -> None:
    """Greedy CTC by hand: a a blank a space space b reads "aa b"."""
    a, b, space = (CHARACTERS.index(c) + 1 for c in "ab ")
    best = torch.tensor([a, a, BLANK, a, space, space, b])
    assert _text(torch.nn.functional.one_hot(best, len(CHARACTERS) + 1).float()) == "aa b"


@pytest.mark.parametrize(("text", "said"), [("Press 2, now!", "press two now"), ("It's  P.M.", "it s p m"), ("¿?", "")])
def test_plain_text(text: str, said: str) -> None:
    assert plain(text) == said


def test_clips_that_cannot_be_learned() -> None:
    with pytest.raises(ValueError, match="no letters"):
        train_character_ctc([np.zeros(RATE, np.float32)], ["…"], RATE, steps=1)
    with pytest.raises(ValueError, match="too long for its clip"):
        train_character_ctc([np.zeros(RATE // 5, np.float32)], ["far too many letters for this"], RATE, steps=1)
