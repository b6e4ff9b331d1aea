"""Codes on disk, codecs on disk, and audio as files hold it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import EncodecConfig, EncodecModel

import tokenizers_audio
from tokenizers_audio import CodeShards, load_codes, prepare, save_codes, write_shards
from tokenizers_audio.codec import codebooks
from tokenizers_audio.encodec import Encodec
from tokenizers_audio.loading import check_loaded
from tokenizers_audio.protocol import AudioTokenizer


@pytest.fixture(scope="module")
def codec(folders: dict[str, Path]) -> AudioTokenizer:
    return tokenizers_audio.load(folders["dac-16k"])  # 3 codebooks of 64


@pytest.fixture(scope="module")
def other(folders: dict[str, Path]) -> AudioTokenizer:
    return tokenizers_audio.load(folders["dac"])  # 3 codebooks of 64 too


def random_codes(codec: AudioTokenizer, frames: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(codec.codebook_size, (codec.num_codebooks, frames), generator=generator)


def test_codes_come_back(codec: AudioTokenizer, folders: dict[str, Path], tmp_path: Path) -> None:
    codes = random_codes(codec, 40)
    save_codes(tmp_path / "a.safetensors", codes, codec)
    back = load_codes(tmp_path / "a.safetensors", tokenizers_audio.load(folders["dac-16k"]))
    assert torch.equal(back, codes) and back.dtype == torch.int64
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.get_tensor("codes").dtype == torch.uint8 and file.metadata()["tokenizer"] == codec.identity
    save_codes(tmp_path / "batch.safetensors", torch.stack([codes, codes]), codec)
    assert load_codes(tmp_path / "batch.safetensors", codec).shape == (2, *codes.shape)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a.safetensors", "batch.safetensors"]


def test_files_that_are_no_codes(codec: AudioTokenizer, other: AudioTokenizer, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"

    def refused(message: str, reader: AudioTokenizer = codec) -> None:
        with pytest.raises(ValueError, match=rf"a\.safetensors: {message}"):
            load_codes(file, reader)

    refused("no such file")
    save_file({"codes": torch.zeros(3, 4)}, file)
    refused("holds no codes")
    with pytest.raises(ValueError, match=r"a\.safetensors: codes .* Q = 3"):
        save_codes(file, random_codes(codec, 4)[:2], codec)
    save_codes(file, random_codes(codec, 100), codec)
    refused(rf".*\[{re.escape(codec.identity)}\], not of", other)
    file.write_bytes(file.read_bytes()[:-50])
    refused("damaged")
    for codes, message in (
        (torch.zeros(3, 5), "codes must be integers, got torch.float32"),
        (torch.zeros(2, 5, dtype=torch.int16), ".*this codec has Q = 3 codebooks"),
        (torch.zeros(5, dtype=torch.int16), r"codes must be \[.*Q, F\], got \[5\]"),
        (torch.full((3, 5), 64, dtype=torch.int16), "codes reach from 64 to 64, this codec's from 0 to 63"),
    ):
        save_file({"codes": codes}, file, {"format": "audiorl_codes", "tokenizer": codec.identity})
        refused(message)


def test_shards_that_do_not_belong_together(codec: AudioTokenizer, other: AudioTokenizer, tmp_path: Path) -> None:
    codes = random_codes(codec, 5)
    write_shards(tmp_path / "a", ["x"], lambda name: codes, codec)
    with pytest.raises(ValueError, match="load the codec that made them"):
        CodeShards(tmp_path / "a", other)
    with pytest.raises(ValueError, match="load the codec that made them"):
        write_shards(tmp_path / "a", ["y"], lambda name: codes, other)
    with pytest.raises(ValueError, match="recording 'x' comes twice"):
        write_shards(tmp_path / "b", ["x", "y", "x"], lambda name: pytest.fail("encoded"), codec)
    with pytest.raises(ValueError, match="holds no shards"):
        CodeShards(tmp_path / "c", codec)
    shutil.copy(tmp_path / "a" / "00000.safetensors", tmp_path / "a" / "00001.safetensors")
    with pytest.raises(ValueError, match=r"00001\.safetensors: recording 'x' is also in .*00000"):
        CodeShards(tmp_path / "a", codec)
    with pytest.raises(ValueError, match="read its folder with CodeShards"):
        load_codes(tmp_path / "a" / "00000.safetensors", codec)
    metadata = {"format": "audiorl_codes", "tokenizer": codec.identity}
    (tmp_path / "d").mkdir()
    for listed, message in (("[1]", "its metadata has no list of ids"), ('["x", "y"]', "1 tensors for 2 ids")):
        save_file({"0": codes}, tmp_path / "d" / "00000.safetensors", metadata | {"ids": listed})
        with pytest.raises(ValueError, match=rf"00000\.safetensors: {message}"):
            CodeShards(tmp_path / "d", codec)


def test_shards_keep_order_and_read_one_by_one(codec: AudioTokenizer, tmp_path: Path) -> None:
    corpus = {f"speaker/{i}": random_codes(codec, 3 + i, i) for i in reversed(range(11))}
    assert write_shards(tmp_path / "codes", corpus, corpus.__getitem__, codec, per_shard=4) == 11
    assert len(list((tmp_path / "codes").iterdir())) == 3
    with patch.object(type(codec), "identity", new_callable=PropertyMock, return_value=codec.identity) as hashed:
        shards = CodeShards(tmp_path / "codes", codec)
    assert hashed.call_count == 1
    assert list(shards) == list(corpus) and len(shards) == 11 and "speaker/3" in shards
    assert all(torch.equal(shards[name], codes) for name, codes in corpus.items())
    assert shards["speaker/3"].dtype == torch.int64
    with pytest.raises(KeyError):
        shards["speaker/11"]
    (tmp_path / "codes" / "00001.safetensors").unlink()  # what is missing comes after the last shard, over none
    encoded: list[str] = []
    assert write_shards(tmp_path / "codes", corpus, lambda name: encoded.append(name) or corpus[name], codec) == 4
    assert encoded == list(corpus)[4:8] and {*CodeShards(tmp_path / "codes", codec)} == {*corpus}
    assert (tmp_path / "codes" / "00003.safetensors").is_file()


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", None, "holds no config.json"),
        ("config.json", b"{", "config.json: not JSON"),
        ("config.json", b'{"model_type": "llama"}', "'llama' is no codec"),
        ("config.json", {"n_codebooks": 4}, r"quantizer.quantizers.3.*missing from"),
        ("config.json", {"codebook_dim": 8}, "of another shape"),
        ("model.safetensors", None, "config or weights cannot be read"),
        ("model.safetensors", b"12345678", "damaged"),
    ],
)
def test_folders_that_are_no_codec(
    folders: dict[str, Path], tmp_path: Path, file: str, changes: Any, message: str
) -> None:
    folder = tmp_path / "codec"
    shutil.copytree(folders["dac-16k"], folder)
    if isinstance(changes, dict):
        changes = json.dumps(json.loads((folder / file).read_text()) | changes).encode()
    if changes is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(changes)
    with pytest.raises(ValueError, match=message) as error:
        tokenizers_audio.load(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["dac-16k", "encodec", "unified"])
def test_weights_that_are_not_finite_are_not_loaded(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    shutil.copytree(folders[kind], tmp_path / "codec")
    (file,) = (tmp_path / "codec").glob("*.safetensors")
    weights = load_file(file)
    name = max(n for n in weights if weights[n].is_floating_point())
    weights[name].view(-1)[-1] = float("nan")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{tmp_path}.*: weight '{name}' holds values that are not finite"):
        tokenizers_audio.load(tmp_path / "codec")


def test_a_buffer_may_be_infinite_but_not_nan(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(2)  # stands for Gemma 4's clipped linear layers, whose bounds are buffers
    assert model.running_var is not None
    model.running_var[1] = math.inf
    check_loaded(model, tmp_path, (), ())
    model.running_var[1] = math.nan
    with pytest.raises(ValueError, match="weight 'running_var' holds values that are not finite"):
        check_loaded(model, tmp_path, (), ())


def test_paths_and_options_that_lead_nowhere(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a folder nor a codec that the hub gives"):
        tokenizers_audio.load("nobody/nothing")
    with pytest.raises(ValueError, match="a file; name the codec's folder"):
        tokenizers_audio.load(folders["dac"] / "config.json")
    with pytest.raises(ValueError, match="a codec of type dac has no option block_seconds; it has num_codebooks"):
        tokenizers_audio.load(folders["dac"], block_seconds=1.0)
    with pytest.raises(ValueError, match=r"dac.*num_codebooks 4 makes 4 codebooks; this codec has 1 to 3"):
        tokenizers_audio.load(folders["dac"], num_codebooks=4)
    with pytest.raises(ValueError, match=r"xcodec.*block_seconds 1 and overlap_seconds 2"):
        tokenizers_audio.load(folders["xcodec"], block_seconds=1.0, overlap_seconds=2.0)


def test_the_48_khz_encodec_is_refused() -> None:
    for change in (
        dict(normalize=True),
        dict(audio_channels=2),
        dict(norm_type="time_group_norm"),
        dict(chunk_length_s=1.0, overlap=0.01),
    ):
        config = EncodecConfig(num_filters=2, hidden_size=4, codebook_size=4, target_bandwidths=[0.15], **change)
        with pytest.raises(ValueError, match="needs more than codes"):
            Encodec(EncodecModel(config))


def test_how_many_codebooks() -> None:
    def choose(number: int | None = None, bandwidth: float | None = None) -> int:
        return codebooks(8, 25, 1024, number, bandwidth)  # 0.25 kbit/s each

    assert [choose(), choose(3), choose(bandwidth=2), choose(bandwidth=0.6), choose(bandwidth=0.75)] == [8, 3, 8, 2, 3]
    with pytest.raises(ValueError, match="not both"):
        choose(3, 1.0)
    with pytest.raises(ValueError, match=r"num_codebooks 9 makes 9 codebooks; this codec has 1 to 8 of 0.25 kbit/s"):
        choose(9)
    with pytest.raises(ValueError, match=r"bandwidth 0.2 kbit/s makes 0 codebooks"):
        choose(bandwidth=0.2)


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 44_100, 48_000])
def test_prepared_audio_has_the_codecs_rate(codec: AudioTokenizer, rate: int) -> None:
    tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)).astype(np.float32)
    wav = prepare(tone, rate, codec)
    assert wav.dtype == torch.float32 and abs(len(wav) - 16_000) <= 1
    wanted = 0.5 * torch.sin(2 * math.pi * 440 * torch.arange(len(wav)) / 16_000)
    torch.testing.assert_close(wav[800:-800], wanted[800:-800], rtol=0, atol=2e-3)
    assert codec.encode(wav).shape[2] == 50


def test_prepared_audio_is_mono_and_within_full_scale(codec: AudioTokenizer) -> None:
    left, right = torch.full((8,), 0.5, dtype=torch.float64), torch.full((8,), -0.1, dtype=torch.float64)
    assert prepare(torch.stack([left, right], 1), 16_000, codec).tolist() == pytest.approx([0.2] * 8)
    loud = np.array([0.5, 1.3, -1.2])
    assert prepare(loud, 16_000, codec).tolist() == [0.5, 1.0, -1.0]
    square = np.sign(np.sin(np.arange(4800) / 20)).astype(np.float32)  # resampling overshoots
    assert prepare(square, 48_000, codec).abs().max() == 1.0
    assert loud.tolist() == [0.5, 1.3, -1.2]  # what was given stays as it was


@pytest.mark.parametrize(
    ("wav", "rate", "message"),
    [
        (np.zeros((0, 2), np.float32), 16_000, "no samples"),
        (np.array([0.0, np.nan]), 16_000, "1 of 2 samples are NaN"),
        (np.zeros(5, np.int16), 16_000, "int16"),
        (np.array([0.0, 12_000.0]), 16_000, r"far beyond \[-1, 1\]"),
        (np.zeros((2, 16_000)), 16_000, r"transpose \[channels, T\]"),
        (np.zeros(5), 0, "sample_rate is 0"),
    ],
)
def test_audio_that_cannot_be_prepared(codec: AudioTokenizer, wav: np.ndarray, rate: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(wav, rate, codec)


@pytest.mark.slow
def test_the_package_needs_neither_audiorl_nor_torchaudio() -> None:
    modules = "codec, dac, encodec, higgs, mimi, xcodec"
    check = f"import sys, tokenizers_audio; from tokenizers_audio import {modules}; "
    check += "print([m for m in ('audiorl', 'torchaudio', 'torchvision') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
