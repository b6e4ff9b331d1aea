"""Speaker encoders: as transformers computes them, GE2E step by step; the quality model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import Wav2Vec2FeatureExtractor, WavLMForXVector

from audiorl.data.corpus import Utterance
from audiorl.speech_models import load_quality_model, load_speaker_encoder
from audiorl.speech_models.speakers import (
    BANDS,
    FRAMES,
    GE2E,
    HOP,
    STEP,
    GE2ENetwork,
    XVector,
    partials,
    raised,
)

RATE = 16_000


def test_xvectors_are_those_of_transformers(xvector_folder: Path, clips: list[np.ndarray]) -> None:
    encoder = load_speaker_encoder(xvector_folder)
    assert isinstance(encoder, XVector) and encoder.name == "xvector"
    model = WavLMForXVector.from_pretrained(xvector_folder).eval()
    extractor = Wav2Vec2FeatureExtractor.from_pretrained(xvector_folder)
    found = encoder.embed(clips, RATE)
    assert found.shape == (4, 24) and found.dtype == np.float32
    with torch.no_grad():
        for wav, vector in zip(clips, found, strict=True):
            alone = model(extractor(wav, sampling_rate=RATE, return_tensors="pt").input_values).embeddings[0]
            np.testing.assert_allclose(vector, (alone / alone.norm()).numpy(), atol=2e-5)
    assert np.abs(found[0] - found[1]).max() > 1e-3
    np.testing.assert_allclose(encoder.embed(clips[::-1], RATE), found[::-1], atol=2e-5)


def test_short_clips_have_a_voice_and_nothing_has_none(xvector_folder: Path) -> None:
    encoder = load_speaker_encoder(xvector_folder)
    assert np.isfinite(encoder.embed([np.full(10, 0.1, np.float32)], RATE)).all()
    assert encoder.embed([], RATE).shape == (0, 24)
    with pytest.raises(ValueError, match="waveform 1: holds no samples"):
        encoder.embed([np.ones(10, np.float32), np.zeros(0, np.float32)], RATE)


@pytest.fixture(scope="module")
def ge2e_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judges") / "speaker"
    folder.mkdir()
    torch.manual_seed(0)
    save_file(GE2ENetwork().state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "ge2e"}')
    return folder


def test_ge2e_is_the_mean_of_its_parts(ge2e_folder: Path, clips: list[np.ndarray]) -> None:
    encoder = load_speaker_encoder(ge2e_folder)
    assert isinstance(encoder, GE2E)
    wav = np.tile(clips[0], 5)[: 4 * RATE]
    parts = partials(wav)
    # 4 s: partial utterances begin every 0.77 s; the fifth, at 3.08 s, would be covered by half only
    assert parts.shape == (4, FRAMES, BANDS)
    lstm = torch.nn.LSTM(BANDS, 256, 3, batch_first=True)
    lstm.load_state_dict({k.removeprefix("lstm."): v for k, v in encoder.network.state_dict().items() if "lstm" in k})
    vectors = []
    with torch.no_grad():
        for part in parts:
            output, _ = lstm(torch.from_numpy(part)[None])
            vector = encoder.network.linear(output[0, -1]).clamp(min=0)
            vectors.append(vector / vector.norm())
    mean = torch.stack(vectors).mean(0)
    np.testing.assert_allclose(encoder.embed([wav], RATE)[0], (mean / mean.norm()).numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("samples", "count"),
    [
        (1, 1),
        (FRAMES * HOP, 1),
        (STEP * HOP + int(0.75 * FRAMES * HOP) - 1, 1),  # just under three quarters of the second part
        (STEP * HOP + int(0.75 * FRAMES * HOP), 2),
        (2 * STEP * HOP + FRAMES * HOP, 3),
    ],
)
def test_how_many_parts_a_clip_has(samples: int, count: int) -> None:
    assert len(partials(np.zeros(samples, np.float32))) == count


def test_quiet_clips_are_raised_and_loud_ones_kept() -> None:
    wave = np.sin(np.arange(RATE) / 7).astype(np.float32)
    assert raised(wave) is wave
    assert np.mean(raised(wave * 1e-4) ** 2) == pytest.approx(1e-3, rel=1e-3)  # -30 dB
    assert not raised(np.zeros(9, np.float32)).any()


def test_folders_that_are_no_encoder(ge2e_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "ge2e"}')
    wav = [np.ones(100, np.float32)]
    with pytest.raises(ValueError, match=r"model\.safetensors: missing"):
        load_speaker_encoder(tmp_path).embed(wav, RATE)
    save_file({"lstm.weight_ih_l0": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not the weights of this encoder"):
        load_speaker_encoder(tmp_path).embed(wav, RATE)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="damaged"):
        load_speaker_encoder(tmp_path).embed(wav, RATE)


@pytest.mark.slow
def test_dnsmos_hears_noise(speech: list[Utterance]) -> None:
    pytest.importorskip("speechmos")
    model = load_quality_model("dnsmos")
    clean = max(speech, key=lambda u: u.duration).clip.load(RATE)
    noise = np.random.default_rng(0).standard_normal(len(clean)).astype(np.float32)
    good, bad = model.rate([clean, clean + 0.1 * noise], RATE)
    assert 1 <= bad < good - 0.5 and good <= 5
    assert model.rate([clean], RATE) == pytest.approx([good], abs=1e-4)
    with pytest.raises(ValueError, match="waveform 0: holds no samples"):
        model.rate([np.zeros(0, np.float32)], RATE)


def test_only_known_quality_models() -> None:
    with pytest.raises(ValueError, match="'utmos'; there is 'dnsmos'"):
        load_quality_model("utmos")
