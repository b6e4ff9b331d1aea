"""Rows with pictures and without. That models see them as transformers does is in `test_model_families`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from audiorl.audio import AudioClip
from audiorl.cli import main
from audiorl.data.manifest import read_samples
from audiorl.pictures import Picture
from audiorl.types import Message, Sample
from tests.conftest import make_omni, make_qwen2_audio
from tests.support.pictures import noisy_pictures


@pytest.fixture
def pictures(tmp_path: Path) -> list[Picture]:
    return noisy_pictures(tmp_path)


@pytest.fixture
def looking(samples: list[Sample], pictures: list[Picture]) -> list[Sample]:
    """With a picture before the recording, without one, with one before and one behind."""
    first, second = pictures
    clips = [s.audio[0] for s in samples]
    contents = [(first, clips[0], "What?"), (clips[1], "Who?"), ("See", second, clips[2], "and", first, "Why?")]
    return [replace(s, messages=(Message("user", c),)) for s, c in zip(samples, contents, strict=True)]


def test_rows_name_pictures_as_ms_swift_and_trl_do(
    looking: list[Sample], pictures: list[Picture], tmp_path: Path
) -> None:
    clip, (first, second) = looking[0].audio[0].path, (p.path for p in pictures)
    ask, next_ones = {"role": "user"}, [{"type": "image"}, {"type": "audio"}, "What?"]
    rows = [
        {"messages": [ask | {"content": "<image><audio>What? <image>"}], "images": [first, second], "audios": [clip]},
        {"messages": [ask | {"content": next_ones}], "image": first, "audio": clip},
        {"messages": [ask | {"content": [{"type": "image", "image": second}, {"type": "audio", "audio": clip}]}]},
        {"messages": [ask | {"content": "What?"}], "images": [{"path": first}], "audios": [clip]},
        {"messages": [ask | {"content": "Write <image> in capitals: <audio>"}], "audios": [clip]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row | {"answer": "a cat"}) + "\n" for row in rows))
    found = [s.messages[0].content for s in read_samples(file, think=False).samples]
    seen = [[type(c).__name__ for c in content][:3] for content in found]
    assert seen[0] == ["Picture", "AudioClip", "str"] and found[0][0] == Picture(first)
    assert [c for c in found[0] if isinstance(c, Picture)] == [Picture(first), Picture(second)]
    assert seen[1] == ["Picture", "AudioClip", "str"] and found[2][0] == Picture(second)
    assert sorted(seen[3][:2]) == ["AudioClip", "Picture"] and "<image>" in found[4][0]


def test_native_rows_have_pictures_or_none(
    looking: list[Sample], pictures: list[Picture], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clip, (one, other) = str(looking[0].audio[0].path), pictures
    ask = {"audio": clip, "question": "What?", "choices": ["a cat", "a dog"], "answer": "a cat"}
    speech = {"audio": clip, "text": "a cat", "image": one.path}
    rows = [ask, ask | {"image": one.path}, ask | {"images": [one.path, other.path]}, speech | {"id": "said"}]
    rows = [row | {"id": str(i)} for i, row in enumerate(rows)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.table({"audio": [clip], "image": [{"bytes": Path(one.path).read_bytes(), "path": "x.png"}],
                             "question": ["What?"], "answer": ["a cat"]}), tmp_path / "rows.parquet")  # fmt: skip
    assert main(["data", "show", str(file)]) == 0
    assert f"   picture: {other.path}, 140 × 57, 10 tokens\n" in (out := capsys.readouterr().out)
    assert "│<|IMAGE|> × 10│<|vision_eos|>│" in out
    samples = read_samples(file, check_audio=True).samples
    assert [s.images for s in samples] == [(), (one,), (one, other), (one,)]
    assert [len(s.audio) for s in samples] == [1] * 4 and not samples[2].metadata.keys() & {"image", "images"}
    assert [type(c) for c in samples[2].messages[0].content] == [Picture, Picture, AudioClip, str]
    (stored,) = read_samples(tmp_path / "rows.parquet").samples
    assert torch.equal(pixels(stored.images[0]), pixels(one))


def pixels(picture: Picture) -> torch.Tensor:
    return torch.from_numpy(np.array(picture.load()))


def test_a_picture_that_cannot_be_used_is_named_with_its_row(
    looking: list[Sample], pictures: list[Picture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip, policy, file = str(looking[0].audio[0].path), make_omni(), tmp_path / "rows.jsonl"
    (tmp_path / "text.png").write_text("no picture")
    Image.new("RGB", (4, 900)).save(tmp_path / "long.png")
    Image.new("RGB", (3000, 3000)).save(tmp_path / "large.png")
    Image.new("1", (5000, 5000)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 12_000_000)
    for given, said in (
        ({"image": "nowhere.png"}, r"field 'image': .*nowhere.png: missing; check the path"),
        ({"image": "text.png"}, r"field 'image': .*text.png: no picture that Pillow reads; give a PNG"),
        ({"images": ["0.png", "long.png"]}, r"field 'images': .*long.png: absolute aspect ratio must be smaller"),
        (
            {"image": ["large.png"] * 4},
            r"field 'image': its prompt has \d+ tokens.*give fewer pictures or smaller ones",
        ),
        ({"image": "bomb.png"}, r"field 'image': .*bomb.png: too large .*give a smaller one"),
        ({"image": 3}, r"field 'image': no picture; give a path"),
        ({"videos": ["a.mp4"]}, r"field 'videos': videos are not read; give frames as images"),
    ):
        file.write_text(json.dumps({"audio": clip, "question": "What?", "answer": "a cat"} | given) + "\n")
        with pytest.raises(ValueError, match=f"rows.jsonl: row 1, {said}"):
            read_samples(file).checked(policy.prompts.check, "raise")


def test_a_family_without_eyes_says_so(looking: list[Sample]) -> None:
    with pytest.raises(ValueError, match="qwen2_audio reads no pictures"):
        make_qwen2_audio().prompt(looking[0])
