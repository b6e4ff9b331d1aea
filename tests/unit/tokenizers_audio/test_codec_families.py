"""What every codec keeps to: exact durations, streams that equal the whole, states that return, clear errors."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tokenizers_audio
from tests.support.codecs import FAMILIES, speech
from tokenizers_audio.codec import Codec
from tokenizers_audio.protocol import AudioTokenizer, Streaming

BLOCKS = ("higgs", "xcodec")  # whose encoders hear blocks


@pytest.fixture(scope="module", params=[family.name for family in FAMILIES])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def codec(folders: dict[str, Path], name: str) -> Any:
    return load(folders[name], name)


@pytest.fixture(scope="module")
def rounding(name: str) -> float:
    return next(family.rounding for family in FAMILIES if family.name == name)


def load(folder: Path, name: str) -> AudioTokenizer:
    # Blocks short enough for a few frames of speech to need several.
    return tokenizers_audio.load(folder, **dict(block_seconds=0.2, overlap_seconds=0.08) if name in BLOCKS else {})


def hop(codec: AudioTokenizer) -> int:
    return round(codec.sample_rate / codec.frame_rate)


def frames_of_speech(codec: AudioTokenizer, frames: float, key: str = "agent-alreadyon") -> Tensor:
    return speech(codec, frames / codec.frame_rate, key)


def chunks(x: Tensor, sizes: Iterator[int]) -> list[Tensor]:
    """x cut along its last axis."""
    parts, start = [], 0
    while start < x.shape[-1]:
        parts.append(x[..., start : start + next(sizes)])
        start += parts[-1].shape[-1]
    return parts


def sizes(kind: str, unit: int) -> Iterator[int]:
    """Chunk sizes for ever: alike, random and sometimes empty, or more than there is."""
    rng = random.Random(0)
    while True:
        yield {"ones": 1, "units": unit, "random": rng.choice([0, 1, rng.randrange(3 * unit)]), "all": 10**9}[kind]


def encode(stream: Streaming, wav: Tensor, kind: str, unit: int) -> Tensor:
    return torch.cat([*(stream.encode(part) for part in chunks(wav, sizes(kind, unit))), stream.finish()], 1)


def decode(stream: Streaming, codes: Tensor, kind: str) -> Tensor:
    return torch.cat([*(stream.decode(part) for part in chunks(codes, sizes(kind, 3))), stream.flush()])


def test_shapes_and_durations(codec: AudioTokenizer) -> None:
    step = hop(codec)
    for samples in (1, step - 1, step, step + 1, 3 * step + 7):
        codes = codec.encode(speech(codec)[:samples])
        frames = math.ceil(samples / step)
        assert codes.shape == (1, codec.num_codebooks, frames) and codes.dtype == torch.int64
        assert int(codes.min()) >= 0 and int(codes.max()) < codec.codebook_size
        wav = codec.decode(codes)
        assert wav.shape == (1, frames * step) and wav.dtype == torch.float32 and wav.isfinite().all()
    assert codec.decode(codes[..., :0]).shape == (1, 0)


def test_codes_of_speech_vary_and_rows_of_a_batch_are_their_own(codec: AudioTokenizer, rounding: float) -> None:
    wavs = torch.stack([frames_of_speech(codec, 16), frames_of_speech(codec, 16, "conf-locked")])
    codes = codec.encode(wavs)
    assert all(len(codebook.unique()) >= 3 for codebook in codes[0])
    audio = codec.decode(codes)
    for i in range(2):
        assert torch.equal(codec.encode(wavs[i])[0], codes[i])
        torch.testing.assert_close(codec.decode(codes[i : i + 1])[0], audio[i], rtol=0, atol=rounding)
    assert (audio[0] - audio[1]).abs().max() > 0.05


@pytest.mark.parametrize("kind", ["random", "all"])
def test_a_stream_gives_what_the_whole_gives(codec: AudioTokenizer, kind: str, rounding: float) -> None:
    step, stream = hop(codec), codec.streaming()
    for frames in (16.3, 2.3):  # the second recording is shorter than any look-ahead
        wav = frames_of_speech(codec, frames)
        codes = codec.encode(wav)
        assert torch.equal(encode(stream, wav, kind, step), codes[0])
        torch.testing.assert_close(decode(stream, codes[0], kind), codec.decode(codes)[0], rtol=0, atol=rounding)


def test_both_directions_of_a_stream_and_two_streams_do_not_mix(codec: AudioTokenizer, rounding: float) -> None:
    wavs = [frames_of_speech(codec, 9), frames_of_speech(codec, 9, "conf-locked")]
    codes = [codec.encode(wav)[0] for wav in wavs]
    streams = [codec.streaming(), codec.streaming()]
    heard: list[list[Tensor]] = [[], []]
    said: list[list[Tensor]] = [[], []]
    for part in range(5):
        for i, stream in enumerate(streams):
            heard[i].append(stream.encode(wavs[i].tensor_split(5)[part]))
            said[i].append(stream.decode(codes[i].tensor_split(5, 1)[part]))
    for i, stream in enumerate(streams):
        assert torch.equal(torch.cat([*heard[i], stream.finish()], 1), codes[i])
        whole = codec.decode(codes[i][None])[0]
        torch.testing.assert_close(torch.cat([*said[i], stream.flush()]), whole, rtol=0, atol=rounding)


def test_the_state_of_a_stream_does_not_grow(name: str, codec: AudioTokenizer) -> None:
    wav = speech(codec)[: 6 * hop(codec)]
    codes = codec.encode(wav)[0]
    stream, size = codec.streaming(), []
    for _ in range(12):
        stream.encode(wav)
        stream.decode(codes)
        size.append(state_bytes(stream))
    slack = 4 * len(wav) if name == "unified-spectra" else 0  # whose blocks end in the middle of what is pushed
    assert 0 < max(size[8:]) <= max(size[4:8]) + slack


def state_bytes(root: Any) -> int:
    """Memory of all tensors that an object holds, weights left out."""
    seen: set[int] = set()
    storages: dict[int, int] = {}

    def visit(value: Any) -> None:
        if id(value) in seen or isinstance(value, nn.Module | type | str):
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)
        elif hasattr(value, "__dict__"):
            visit(vars(value))

    visit(root)
    return sum(storages.values())


def test_saved_and_loaded_it_is_the_same_codec(
    folders: dict[str, Path], name: str, codec: AudioTokenizer, tmp_path: Path
) -> None:
    again = load(folders[name], name)
    wav = frames_of_speech(codec, 4)
    assert codec.identity == again.identity and torch.equal(codec.encode(wav), again.encode(wav))
    (tmp_path / "config.json").write_text((folders[name] / "config.json").read_text())
    weights = load_file(folders[name] / "model.safetensors")
    key = next(key for key, value in sorted(weights.items()) if value.dtype == torch.float32 and value.numel() > 10)
    weights[key] = weights[key] * 1.01
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    other = tokenizers_audio.load(tmp_path)
    assert other.identity != codec.identity
    assert other.identity.rsplit(" ", 1)[0] == codec.identity.rsplit(" ", 1)[0]


def test_fewer_codebooks_are_the_first_ones(folders: dict[str, Path], name: str, codec: AudioTokenizer) -> None:
    two = tokenizers_audio.load(folders[name], num_codebooks=2)
    wav = frames_of_speech(two, 4)
    assert two.num_codebooks == 2 and two.identity != codec.identity
    codes = two.encode(wav)
    assert torch.equal(codes, codec.encode(wav)[:, :2])
    rest = torch.zeros_like(codes[:, :1]).repeat(1, codec.num_codebooks - 2, 1)
    audio, other = two.decode(codes), codec.decode(torch.cat([codes, rest], 1))
    assert audio.shape == other.shape and not torch.equal(audio, other)


@pytest.mark.parametrize(
    ("wav", "message"),
    [
        (torch.zeros(3, 0), "no samples"),
        (torch.tensor([0.0, math.nan]), "1 of 2 samples are NaN or infinite"),
        (torch.tensor([0.0, 1.25]), r"reach 1.25, beyond \[-1, 1\]"),
        (torch.zeros(10, dtype=torch.int16), "int16"),
        (torch.zeros(1, 2, 10), r"\[1, 2, 10\]"),
    ],
)
@pytest.mark.parametrize("family", ["mimi", "unified"])
def test_audio_that_cannot_be_encoded(folders: dict[str, Path], family: str, wav: Tensor, message: str) -> None:
    codec = load(folders[family], family)
    with pytest.raises(ValueError, match=message):
        codec.encode(wav)
    if wav.numel():
        with pytest.raises(ValueError, match=message):
            codec.streaming().encode(wav)


@pytest.mark.parametrize("family", ["mimi", "unified"])
def test_codes_that_cannot_be_decoded(folders: dict[str, Path], family: str) -> None:
    codec = load(folders[family], family)
    codes = torch.zeros(1, codec.num_codebooks, 4, dtype=torch.int64)
    wrong = [
        (codes[0], r"\[B, Q, F\]"),
        (codes.float(), "integers"),
        (codes[:, 1:], f"Q = {codec.num_codebooks}"),
        (codes - 1, "from -1 to -1"),
        (codes + codec.codebook_size, f"from 0 to {codec.codebook_size - 1}"),
    ]
    for value, message in wrong:
        with pytest.raises(ValueError, match=message):
            codec.decode(value)
    with pytest.raises(ValueError, match=f"from 0 to {codec.codebook_size - 1}"):
        codec.streaming().decode(codes[0] + codec.codebook_size)
    with pytest.raises(ValueError, match=r"\[Q, F\]"):
        codec.streaming().decode(codes)


@pytest.mark.parametrize(
    ("family", "heard", "said"),
    [
        ("mimi", 0, 0),
        ("encodec", 0, 0),
        ("encodec-32k", 4, 4),
        ("dac", 8, 10),
        ("higgs", None, 10),
        ("xcodec", None, 10),
    ],
)
def test_how_many_frames_late_a_stream_is(folders: dict[str, Path], family: str, heard: int | None, said: int) -> None:
    """As docs/codecs.md says, of codes and of audio. `load` of the encoders that hear blocks says it itself."""
    codec = tokenizers_audio.load(folders[family])
    stream = codec.streaming()
    wav = frames_of_speech(codec, 14)
    if heard is not None:
        assert stream.encode(wav).shape[1] == 14 - heard
    samples = len(stream.decode(torch.zeros(codec.num_codebooks, 14, dtype=torch.int64)))
    assert math.ceil(14 - samples / hop(codec)) == said


def test_latents_are_what_is_quantised_and_decoded(codec: Any) -> None:
    wav = frames_of_speech(codec, 6)[None]
    if isinstance(codec, Codec):
        quantise, dequantise = codec.backend.quantise, codec.backend.dequantise
    else:
        quantise, dequantise = (lambda x: codec.quantizer.encode(x, codec.levels)), codec.quantizer.decode
    latents, codes = codec.latents(wav), codec.encode(wav)
    assert latents.shape[::2] == (1, 6) and torch.equal(quantise(latents), codes)
    vectors = dequantise(codes)
    assert torch.equal(codec.decode_latents(vectors), codec.decode(codes))
    if vectors.shape[1] == latents.shape[1]:
        assert codec.decode_latents(latents).shape == (1, 6 * hop(codec))
    else:
        with pytest.raises(ValueError, match="its decoder reads"):
            codec.decode_latents(latents)
