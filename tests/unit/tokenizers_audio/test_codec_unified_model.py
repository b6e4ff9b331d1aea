"""The tokenizer's parts: what it hears, how far it looks, its semantic branches, its folder.

What every codec keeps to is tested in test_codec_families.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tokenizers_audio
from audiorl.eval.metrics.speech import mel_filters
from tests.support.unified_codec import clips, tiny, tiny_config, tiny_hubert
from tokenizers_audio.audio import resample
from tokenizers_audio.unified import UnifiedTokenizer
from tokenizers_audio.unified import model as model_module
from tokenizers_audio.unified.layers import Cache
from tokenizers_audio.unified.semantic import MelStatistics, SpeechModelFeatures, load_speech_model
from tokenizers_audio.unified.spectrum import Analysis, OverlapAdd, PeakPhases, Synthesis


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_codebooks=0), "num_codebooks is 0"),
        (dict(strides=()), "strides"),
        (dict(channels=(16, 16)), "channels has 2 entries; give one more than strides"),
        (dict(quantizer="grouped", num_codebooks=3), "cannot be cut into 3 equal groups"),
        (dict(window=1000), "window 1000 must be a multiple of spectrum_hop 240"),
        (dict(window=480), "at least 3 of them"),
        (dict(lookahead=-1), "lookahead"),
        (dict(phases="peaks", spectrum_hop=None), "works on spectra; set spectrum_hop"),
    ],
)
def test_a_geometry_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


@pytest.mark.parametrize(
    "changes", [{}, dict(phases="peaks"), dict(spectrum_hop=None, strides=(8, 5, 4, 2, 3), channels=(4, 4, 4, 8, 8, 8))]
)
def test_a_frame_hears_nothing_after_it_and_speech_waits_for_one_frame(changes: dict[str, Any]) -> None:
    tokenizer = tiny(**changes)
    wav = clips(1, 8)
    later = wav.clone()
    later[:, 5 * 960 :] = clips(2, 8)[1:, 5 * 960 :]
    with torch.no_grad():
        a, b = (tokenizer.latents_of(torch.nn.functional.pad(w, (720, 0)), None)[0] for w in (wav, later))
    assert torch.equal(a[..., :5], b[..., :5]) and not torch.equal(a[..., 5], b[..., 5])
    codes = torch.randint(16, (1, 4, 8), generator=torch.Generator().manual_seed(0))
    other = codes.clone()
    other[..., 5] = (other[..., 5] + 1) % 16
    a, b = tokenizer.decode(codes), tokenizer.decode(other)
    assert torch.equal(a[:, : 4 * 960], b[:, : 4 * 960]) and not torch.equal(
        a[:, 4 * 960 : 5 * 960], b[:, 4 * 960 : 5 * 960]
    )


def test_long_recordings_go_through_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = UnifiedTokenizer(tiny_config(semantic="model", semantic_block=3), tiny_hubert())
    wav = clips(1, 20)[:, :-100]
    codes, longest = tokenizer.encode(wav), 0
    audio = tokenizer.decode(codes)
    monkeypatch.setattr(model_module, "PIECE_SECONDS", 7 / 25)
    features = tokenizer.features
    assert isinstance(features, SpeechModelFeatures)
    original = features.forward

    def forward(piece: Tensor) -> Tensor:
        nonlocal longest
        longest = max(longest, piece.shape[-1])
        return original(piece)

    monkeypatch.setattr(features, "forward", forward)
    assert torch.equal(tokenizer.encode(wav), codes)
    assert longest == (6 + 3 + 1) * 960  # two blocks of the seven frames, what is heard before and after them
    torch.testing.assert_close(tokenizer.decode(codes), audio, rtol=0, atol=1e-6)


def test_spectra_written_as_they_were_heard_give_the_samples_back() -> None:
    wav = clips(1, 8)
    analysis, synthesis = Analysis(960, 240), Synthesis(960, 240)
    padded = torch.nn.functional.pad(wav, (720, 0))
    spectra = torch.fft.rfft(padded.unfold(-1, 960, 240) * analysis.window).transpose(1, 2)
    heard = analysis(wav[:, None])
    assert heard.shape == (1, 481, 32)
    expected = (spectra.abs() / 240).clamp_min(1e-4).log10() / 2 + 1
    torch.testing.assert_close(heard, expected, rtol=0, atol=1e-5)
    # Written to begin where each frame was heard to begin, 720 samples before its own hop.
    out = synthesis(torch.cat([spectra.abs().clamp_min(1e-20).log(), spectra.angle()], 1))
    torch.testing.assert_close(out[0, :, 720:], wav[:, : 32 * 240 - 720], rtol=0, atol=1e-4)


def test_phases_from_peaks_are_those_of_the_tones_that_were_heard() -> None:
    """Two steady tones between bins come back as they are, but for a constant phase each, whatever the pieces."""
    t = torch.arange(24_000, dtype=torch.float64) / 24_000
    tones = [a * torch.sin(2 * torch.pi * f * t + p) for a, f, p in ((0.5, 437.0, 0.3), (0.2, 1913.0, 2.0))]
    windows = sum(tones)[None].unfold(-1, 960, 240) * torch.hann_window(960, dtype=torch.float64)
    magnitudes = torch.fft.rfft(windows).abs()
    phases, add = PeakPhases(960, 240), OverlapAdd(960, 240).double()
    out = add(magnitudes, phases(magnitudes))[0, 0, 4800:19200]
    # What no sine or cosine of the two frequencies explains is little: the interpolation of peaks is not exact.
    basis = torch.stack(
        [g(2 * torch.pi * f * t[4800:19200]) for f in (437.0, 1913.0) for g in (torch.sin, torch.cos)], 1
    )
    fit = torch.linalg.lstsq(basis, out[:, None]).solution
    assert float((out - (basis @ fit)[:, 0]).square().mean() / out.square().mean()) < 0.05
    amplitudes = fit.reshape(2, 2).norm(dim=1)
    torch.testing.assert_close(amplitudes, torch.tensor([0.5, 0.2], dtype=torch.float64), rtol=0.1, atol=0)
    cache: Cache = {}
    pieces = [phases(part, cache) for part in magnitudes.split(7, 1)]
    assert torch.equal(torch.cat(pieces, 1), phases(magnitudes))


def test_the_straight_ways_begin_at_principal_components_and_least_squares() -> None:
    """With as many coordinates as mels nothing is lost on the way there, and little on the way back."""
    tokenizer = tiny(phases="peaks", codebook_dim=80, mels=20, semantic="none")
    wav = clips(4, 12)
    latents = tokenizer.begin(wav, torch.Generator().manual_seed(0))
    assert latents.shape == (48, 80)
    torch.testing.assert_close(latents.mean(0), torch.zeros(80), rtol=0, atol=1e-2)
    assert float(latents.square().mean()) == pytest.approx(1.0, abs=0.05)
    patches = tokenizer.patch_encoder.patches(wav, None).flatten(0, 1)
    map = tokenizer.patch_encoder.map
    back = torch.linalg.lstsq(map.weight.double(), (latents - map.bias).double().T).solution.T
    torch.testing.assert_close(back.float(), patches, rtol=0, atol=5e-2)
    out = tokenizer.reconstruct(wav, None, sound=False)
    assert out.wav is None and out.mels is not None and out.target_mels is not None
    assert out.mels.shape == out.target_mels.shape == (4, 20, 48)
    flat = (out.target_mels - out.target_mels.mean((0, 2), keepdim=True)).abs().mean()
    assert float((out.mels - out.target_mels)[..., :40].abs().mean()) < 0.1 * float(flat)
    with pytest.raises(ValueError, match="only a tokenizer whose decoder says log-mels"):
        tiny().begin(wav, torch.Generator())


def test_mel_statistics_are_mean_and_deviation_of_a_frames_four_steps() -> None:
    config = tiny_config(mels=20)
    features = MelStatistics(config)
    wav = clips(1, 4)
    found = features(torch.nn.functional.pad(wav, (features.past, 0)))[0].numpy()
    x = np.pad(wav[0].double().numpy(), (720, 0))
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(960) / 960)
    steps = np.stack([np.abs(np.fft.rfft(x[k * 240 : k * 240 + 960] * window)) for k in range(16)])
    mel = (np.log10(np.maximum(steps @ mel_filters(24_000, 960, 20).T, 1e-5)) + 1.5) / 2
    by_frame = mel.reshape(4, 4, 20)
    np.testing.assert_allclose(found[:20].T, by_frame.mean(1), atol=1e-4)
    np.testing.assert_allclose(found[20:].T, by_frame.std(1), atol=1e-4)


@pytest.mark.parametrize("norm", ["group", "layer"])
def test_a_speech_models_features_are_the_mean_of_its_hidden_states(norm: str) -> None:
    model = tiny_hubert(feat_extract_norm=norm, conv_bias=norm == "layer")
    features = SpeechModelFeatures(model, tiny_config(semantic="model", semantic_block=5))
    assert (features.block, features.past, features.ahead) == (5, 5 * 960, 960)
    wav = clips(1, 16)
    found = features(wav)  # two blocks: frames 5 … 14 of what is given
    assert found.shape == (1, 16, 10)
    heard = resample(wav[:, 5 * 960 : 16 * 960], 24_000, 16_000)  # the second block with its surroundings
    if norm == "layer":
        heard = (heard - heard.mean()) / heard.std(correction=0)
    with torch.no_grad():
        states = torch.stack(model(heard, output_hidden_states=True).hidden_states).mean(0)  # 50 a second
    torch.testing.assert_close(found[0, :, 5:].T, states[0, 10:20:2], rtol=0, atol=1e-4)


def test_a_speech_model_comes_from_its_folder_and_stays_frozen(tmp_path: Path) -> None:
    tiny_hubert(hidden_dropout=0.5, attention_dropout=0.5).save_pretrained(tmp_path / "hubert")
    tokenizer = UnifiedTokenizer(tiny_config(semantic="model"), load_speech_model(tmp_path / "hubert"))
    tokenizer.train()
    wav = clips(1)
    assert torch.equal(tokenizer.encode(wav), tokenizer.encode(wav))
    assert not any(name.startswith("features") for name in tokenizer.trainable())
    tokenizer.save(tmp_path / "codec")
    again = tokenizers_audio.load(tmp_path / "codec")
    assert again.identity == tokenizer.identity and torch.equal(again.encode(wav), tokenizer.encode(wav))
    (tmp_path / "hubert" / "config.json").write_text(json.dumps({"model_type": "whisper"}))
    with pytest.raises(ValueError, match="a whisper model; the semantic branch takes hubert, wavlm, wav2vec2"):
        load_speech_model(tmp_path / "hubert")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(colour="red"), r"config.json: 'colour' is not known"),
        (dict(codebook_size=32), "weight 'quantizer.codebooks' does not fit config.json"),
        (dict(semantic="none"), "does not fit config.json"),
        (dict(semantic="model"), "does not say which speech model"),
    ],
)
def test_a_damaged_folder(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    tiny().save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        tokenizers_audio.load(tmp_path)
