"""Each adapter gives what transformers' own model gives, bit for bit, whole frames or not."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import DacModel, EncodecModel, MimiModel, XcodecModel
from transformers import __path__ as transformers_path

import tokenizers_audio
from tests.support.codecs import speech
from tokenizers_audio.audio import resample
from tokenizers_audio.mimi import MimiParts

FRAMES = (6.0, 4.4, 1.0, 0.3)


def pretrained(model_class: Any, folder: Path) -> Any:
    return model_class.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def encode(model: Any, wav: torch.Tensor, **options: Any) -> torch.Tensor:
    """[1, Q, F]"""
    codes = model.encode(wav[None, None], **options).audio_codes
    return codes[0] if codes.ndim == 4 else codes  # Encodec: one chunk


@pytest.mark.parametrize("name", ["encodec", "encodec-32k"])
@torch.no_grad()
def test_encodec(folders: dict[str, Path], name: str) -> None:
    codec, model = tokenizers_audio.load(folders[name]), pretrained(EncodecModel, folders[name])
    for frames in FRAMES:
        wav = speech(codec, frames / codec.frame_rate)
        codes = encode(model, wav, bandwidth=model.config.target_bandwidths[-1])
        assert codes.shape[2] == math.ceil(frames) and torch.equal(codec.encode(wav), codes)
        assert torch.equal(codec.decode(codes), model.decode(codes[None], [None]).audio_values[:, 0])


@torch.no_grad()
def test_mimi(folders: dict[str, Path]) -> None:
    codec, model = tokenizers_audio.load(folders["mimi"]), pretrained(MimiModel, folders["mimi"])
    for frames in FRAMES:
        wav = speech(codec, frames / codec.frame_rate)
        codes = encode(model, wav)
        assert codes.shape[2] == math.ceil(frames) and torch.equal(codec.encode(wav), codes)
        assert torch.equal(codec.decode(codes), model.decode(codes).audio_values[:, 0])


def test_weights_of_mimi_have_the_names_of_checkpoints(folders: dict[str, Path]) -> None:
    """Also in two halves, as transformers keeps them in memory since 5.21: the codec's identity depends on them."""
    file = folders["mimi"] / "model.safetensors"
    parts = MimiParts(pretrained(MimiModel, folders["mimi"]))
    first, second = (
        SimpleNamespace(encoder_transformer=parts.encoder_transformer, downsample=parts.downsample),
        SimpleNamespace(decoder_transformer=parts.decoder_transformer, upsample=parts.upsample),
    )
    first.encoder_seanet, second.decoder_seanet = parts.encoder, parts.decoder
    flat = SimpleNamespace(**dict(parts.named_children()))
    for model in (flat, SimpleNamespace(encoder=first, decoder=second, quantizer=parts.quantizer)):
        assert MimiParts(model).state_dict().keys() == load_file(file).keys()


@pytest.mark.parametrize("name", ["dac", "dac-16k"])
def test_dac(folders: dict[str, Path], name: str) -> None:
    """On whole frames, as its feature extractor makes them; odd strides leave the last samples to silence."""
    codec, model = tokenizers_audio.load(folders[name]), pretrained(DacModel, folders[name])
    hop = model.config.hop_length
    wav = speech(codec)[: 12 * hop + 5]
    whole = torch.nn.functional.pad(wav, (0, hop - 5))
    codes = encode(model, whole)
    assert codes.shape[2] == 13 and torch.equal(codec.encode(wav), codes)
    with torch.no_grad():
        audio = model.decode(audio_codes=codes).audio_values
    missing = 13 * hop - audio.shape[1]
    assert missing == (8 if name == "dac-16k" else 0)
    assert torch.equal(codec.decode(codes), torch.nn.functional.pad(audio, (0, missing)))


def test_xcodec(folders: dict[str, Path]) -> None:
    codec, model = tokenizers_audio.load(folders["xcodec"]), pretrained(XcodecModel, folders["xcodec"])
    hop = model.config.hop_length
    wav = speech(codec)[: 9 * hop]
    codes = encode(model, wav)
    assert codes.shape[2] == 9 and torch.equal(codec.encode(wav), codes)
    with torch.no_grad():
        assert torch.equal(codec.decode(codes), model.decode(codes).audio_values[:, 0])
        smaller = encode(model, wav, bandwidth=1)
    fewer = tokenizers_audio.load(folders["xcodec"], bandwidth=1)
    assert fewer.num_codebooks == 2 and torch.equal(fewer.encode(wav), smaller)


@pytest.fixture
def higgs_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' own HiggsAudioV2TokenizerModel. Where torchaudio is missing, our resampler stands in for its."""
    if importlib.util.find_spec("torchaudio") is None:
        stand_in, functional = ModuleType("torchaudio"), ModuleType("torchaudio.functional")
        functional.resample = resample  # type: ignore[attr-defined]
        stand_in.functional = functional  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torchaudio", stand_in)
        monkeypatch.setitem(sys.modules, "torchaudio.functional", functional)
    module = "transformers.models.higgs_audio_v2_tokenizer.modeling_higgs_audio_v2_tokenizer"
    model_class = importlib.import_module(module).HiggsAudioV2TokenizerModel
    assert sys.modules[module].__file__.startswith(transformers_path[0])  # type: ignore[union-attr]
    return model_class


def test_higgs(folders: dict[str, Path], higgs_class: Any, tmp_path: Path) -> None:
    codec, model = tokenizers_audio.load(folders["higgs"]), pretrained(higgs_class, folders["higgs"])
    assert (codec.sample_rate, codec.frame_rate, codec.num_codebooks, codec.codebook_size) == (24_000, 25, 8, 1024)
    ours, theirs = codec.model.state_dict(), model.state_dict()  # type: ignore[attr-defined]
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    wav = speech(codec)[: 9 * 960]
    codes = encode(model, wav)
    assert codes.shape == (1, 8, 9) and torch.equal(codec.encode(wav), codes)
    with torch.no_grad():
        assert torch.equal(codec.decode(codes), model.decode(codes).audio_values[:, 0])
        smaller = encode(model, wav, bandwidth=0.5)
    fewer = tokenizers_audio.load(folders["higgs"], bandwidth=0.5)
    assert fewer.num_codebooks == 2 and torch.equal(fewer.encode(wav), smaller)
    model.save_pretrained(tmp_path)
    assert tokenizers_audio.load(tmp_path).identity == codec.identity


def test_resampling_is_torchaudios() -> None:
    """Numbers of torchaudio 2.11's functional.resample; whole recordings were compared bit for bit."""
    wave = torch.sin(torch.arange(12) * 0.7)
    down = [0.07174777239561081, 0.852414071559906, 0.8707175254821777, -0.01283852756023407, -0.8705644011497498]
    down += [-0.8544016480445862, 0.0025131404399871826, 0.9097747802734375]
    up = [0.00184385827742517, 0.4023151993751526, 0.8291160464286804, 0.9869054555892944, 0.9461240172386169]
    up += [0.7283859848976135, 0.3354935646057129, -0.12526796758174896, -0.5574275851249695, -0.8716647624969482]
    up += [-0.9972223043441772, -0.9190559387207031, -0.6293591856956482, -0.1907602697610855, 0.20346751809120178]
    up += [0.661577045917511, 1.0498452186584473, 0.7015190124511719]
    torch.testing.assert_close(resample(wave, 24_000, 16_000), torch.tensor(down), rtol=0, atol=2e-7)
    torch.testing.assert_close(resample(wave, 16_000, 24_000), torch.tensor(up), rtol=0, atol=2e-7)
    assert resample(wave, 16_000, 16_000) is wave


def test_resampling_keeps_low_tones_and_drops_high_ones() -> None:
    time = torch.arange(24_000) / 24_000
    low, high = torch.sin(2 * math.pi * 1000 * time), torch.sin(2 * math.pi * 10_000 * time)
    heard = resample(torch.stack([low, high])[:, None], 24_000, 16_000)
    assert heard.shape == (2, 1, 16_000)
    wanted = torch.sin(2 * math.pi * 1000 * torch.arange(16_000) / 16_000)
    inner = slice(100, -100)
    torch.testing.assert_close(heard[0, 0, inner], wanted[inner], rtol=0, atol=2e-3)
    assert heard[1, 0, inner].abs().max() < 1e-2
