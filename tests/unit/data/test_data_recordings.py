"""Recordings of any kind become crops; what cannot be used is named, what was done is counted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from audiorl.data.corpus import bundled_speech
from audiorl.data.recordings import Crops, Place, Recordings, read_recordings

RATE = 24_000


def tone(seconds: float, rate: int, level: float = 0.3) -> np.ndarray:
    return (level * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One file of every kind."""
    files = {
        "a8.wav": (tone(0.5, 8_000), 8_000),
        "b24.flac": (tone(1.0, RATE), RATE),
        "c44.wav": (np.stack([tone(0.5, 44_100), tone(0.5, 44_100, 0.1)], 1), 44_100),
        "d48.wav": (tone(0.25, 48_000), 48_000),
        "e_clipped.wav": (np.clip(tone(0.5, RATE, 1.5), -1, 1), RATE),
        "f_short.wav": (tone(0.05, RATE), RATE),
        "g_silent.wav": (np.zeros(RATE, np.float32), RATE),
    }
    for name, (wav, rate) in files.items():
        (tmp_path / "sounds" / name[0]).mkdir(parents=True)
        soundfile.write(tmp_path / "sounds" / name[0] / name, wav, rate, subtype="PCM_16")
    return tmp_path / "sounds"


def test_every_rate_is_heard_and_counted(folder: Path) -> None:
    found = read_recordings([str(folder)], RATE)
    assert [Path(c.path or "").name[0] for c in found.clips] == list("abcde")
    assert found.lengths == pytest.approx((0.5, 1.0, 0.5, 0.25, 0.5))
    assert found.noted == {
        "resampled from 8000 Hz": 1,
        "resampled from 44100 Hz": 1,
        "resampled from 48000 Hz": 1,
        "mixed down to mono": 1,
        "clipped": 1,
        "shorter than 0.1 s": 1,
        "silent": 1,
    }
    assert found.summary().startswith("5 recordings, 0.0 min; 1 clipped, 1 mixed down to mono")
    assert len(found.skipped) == 2 and "f_short.wav: shorter than 0.1 s" in found.skipped[0]
    unheard = read_recordings([str(folder)], RATE, check_audio=False)
    assert len(unheard.clips) == 6 and "clipped" not in unheard.noted  # only headers were read


def write(path: Path, wav: np.ndarray) -> None:
    soundfile.write(path, wav, RATE, subtype="FLOAT")


@pytest.mark.parametrize(
    ("wav", "message"),
    [
        (np.full(RATE, np.nan, np.float32), "bad.wav: 24000 of 24000 samples are NaN or infinite"),
        (tone(1, RATE, 4), "bad.wav: samples reach 4, far beyond 1"),
        (np.zeros(0, np.float32), "bad.wav: "),
    ],
)
def test_unusable_recordings_stop_or_are_counted(tmp_path: Path, wav: np.ndarray, message: str) -> None:
    write(tmp_path / "bad.wav", wav)
    write(tmp_path / "good.wav", tone(1, RATE))
    if len(wav):
        with pytest.raises(ValueError, match=message.replace("+", r"\+")):
            read_recordings([str(tmp_path)], RATE)
    found = read_recordings([str(tmp_path)], RATE, on_error="skip")
    assert [Path(c.path or "").name for c in found.clips] == ["good.wav"]
    assert len(found.skipped) == 1 and message in found.skipped[0]


def test_manifests_name_recordings_and_parts_of_them(folder: Path, tmp_path: Path) -> None:
    rows = [
        {"audio": "sounds/b/b24.flac", "start": 0.25, "duration": 0.5},
        {"text": "no audio"},
        {"audio_filepath": "sounds/missing.wav"},
    ]
    manifest = tmp_path / "rows.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"rows\.jsonl: row 2, field 'audio': missing or empty"):
        read_recordings([str(manifest)], RATE)
    found = read_recordings([str(manifest), str(folder / "d" / "d48.wav")], RATE, on_error="skip")
    assert found.lengths == pytest.approx((0.5, 0.25)) and found.noted["unusable"] == 2
    assert "rows.jsonl: row 3, field 'audio_filepath': " in found.skipped[1]
    assert "missing.wav: missing; check the path" in found.skipped[1]


def test_paths_without_audio(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no audio files below it"):
        read_recordings([str(tmp_path)], RATE)
    with pytest.raises(ValueError, match="missing; check the path"):
        read_recordings([str(tmp_path / "none.jsonl")], RATE)
    with pytest.raises(ValueError, match="nothing to train on"):
        Crops(Recordings((), ()), RATE, 960)


def speech(count: int = 3) -> Recordings:
    found = bundled_speech(("en",), min_seconds=1.0, max_seconds=3.0)[:count]
    return Recordings(tuple(u.clip for u in found), tuple(u.duration for u in found))


def test_an_epoch_visits_every_piece_of_every_recording() -> None:
    recordings = Recordings(speech(2).clips, (2.2, 0.3))
    crops = Crops(recordings, RATE, RATE // 2)
    assert len(crops) == 4 + 1
    assert list(crops) == [*(Place(0, k, 4) for k in range(4)), Place(1, 0, 1)]


@pytest.mark.parametrize("cache_mb", [1024, 0])
def test_crops_are_parts_of_their_recording(cache_mb: int) -> None:
    recordings = speech()
    crops = Crops(recordings, RATE, RATE // 2, seed=1, cache_mb=cache_mb)
    places = [crops[0], crops[1], crops[len(crops) - 1]]
    wavs = crops.read(places, step=5)
    assert wavs.shape == (3, RATE // 2) and wavs.dtype == np.float32
    again = Crops(recordings, RATE, RATE // 2, seed=1, cache_mb=cache_mb).read(places, step=5)
    assert np.array_equal(wavs, again) and not np.array_equal(wavs, crops.read(places, step=6))
    for place, wav in zip(places, wavs, strict=True):
        whole = recordings.clips[place.clip].load(RATE)
        inner = wav[2000:-2000]  # a part resampled on its own differs near its ends
        products = np.correlate(whole, inner, "valid")
        start = int(np.abs(products).argmax())
        np.testing.assert_allclose(whole[start : start + len(inner)], inner, atol=2e-3)
        piece = (start - 2000) / len(whole) * place.pieces
        assert place.piece - 0.05 <= piece or start + len(wav) >= len(whole) - 4000
        assert piece <= place.piece + 1.05


def test_short_recordings_are_followed_by_silence() -> None:
    recordings = Recordings(speech(1).clips, speech(1).lengths)
    samples = 4 * RATE
    (wav,) = Crops(recordings, RATE, samples).read([Place(0, 0, 1)], step=0)
    length = len(recordings.clips[0].load(RATE))
    assert len(wav) == samples and np.abs(wav[:length]).max() > 0.05 and not wav[length:].any()
