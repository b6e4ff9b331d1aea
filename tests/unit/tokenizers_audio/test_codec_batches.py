"""Many recordings through a codec at once."""

from __future__ import annotations

import pytest
import torch

from audiorl.audio import AudioClip
from audiorl.models.audio_encoder import ClipCodes
from tests.support.unified_codec import tiny
from tokenizers_audio.batches import decode_all, encode_all, equal_lengths


def test_lengths_share_batches_of_a_bounded_size() -> None:
    assert list(equal_lengths([3, 5, 3, 0, 3, 9], most=6)) == [[0, 2], [4], [1], [3], [5]]
    assert list(equal_lengths([], 6)) == []


def test_each_recording_has_the_codes_and_the_sound_that_it_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, calls = tiny(), list[int]()
    waves = [0.1 * torch.randn(length) for length in (4000, 5000, 4000, 4000)]
    alone = [codec.encode(wav)[0] for wav in waves]
    encode = codec.encode
    monkeypatch.setattr(codec, "encode", lambda wav: calls.append(len(wav)) or encode(wav))
    codes = encode_all(codec, waves)
    assert all(torch.equal(a, b) for a, b in zip(codes, alone, strict=True)) and calls == [3, 1]
    for wav, of_one in zip(decode_all(codec, codes), codes, strict=True):
        torch.testing.assert_close(wav, codec.decode(of_one[None])[0], rtol=0, atol=1e-3)
    assert encode_all(codec, []) == decode_all(codec, []) == []


def test_clips_that_were_encoded_together_are_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = tiny()
    clips = [AudioClip(array=(0.1 * torch.randn(n)).numpy(), sample_rate=codec.sample_rate) for n in (4000, 5000, 4000)]
    alone = [ClipCodes(codec, 2**20).codes(clip) for clip in clips]
    kept = ClipCodes(codec, 2**20)
    kept.encode_all([*clips, clips[0]])
    monkeypatch.setattr(codec, "encode", lambda wav: pytest.fail("encoded again"))
    kept.encode_all(clips)
    assert all(torch.equal(kept.codes(c), a) for c, a in zip(clips, alone, strict=True))
