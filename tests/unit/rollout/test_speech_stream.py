"""Speech decoded while it is generated: the same samples, early, for every family of codecs, batched or not."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from audiorl.config import SamplingConfig
from audiorl.models import dualize
from audiorl.models.families import higgs
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.speech import CodecSpeechDecoder, SpeechStream, StreamingEngine, speech_blocks
from audiorl.tasks.simul.streams import interpretation_sample
from audiorl.tasks.tts.prompts import speech_sample
from audiorl.types import Message, Sample
from tests.conftest import TEXTS, make_text
from tests.support.codecs import FAMILIES
from tests.support.speaking_models import CODES, codec
from tests.support.streams import stream
from tokenizers_audio import load

__all__ = ["codec"]

SAMPLING = SamplingConfig(max_new_tokens=4, max_frames=30)
STEP = 1 / 2**15
"""The step of 16 bits: random codes are louder than speech, so float32 rounds more than in the codecs' own tests."""
STREAMED = ("higgs", "mimi", "dac-16k", "unified-spectra", "unified-peaks")
NAMES = ("Good morning.", "Who speaks?", "why")


def speaker(codec: Any) -> Any:
    policy = higgs.tiny(TEXTS, codebooks=codec.num_codebooks, codebook_size=codec.codebook_size)
    policy.set_codec(codec)
    return policy


def whole(policy: Any, sample: Sample, seed: int = 0) -> np.ndarray:
    (rollout,) = HFEngine(policy, SAMPLING).generate([Request(sample, seed=seed)])
    wav = CodecSpeechDecoder.of(policy).waveform(rollout)
    return np.zeros(0, np.float32) if wav is None else wav


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in STREAMED], ids=lambda family: family.name)
@pytest.mark.parametrize("block_frames", [1, 4])
def test_the_blocks_are_the_whole(family: Any, block_frames: int, tmp_path: Path) -> None:
    family.save(tmp_path)
    policy = speaker(load(tmp_path))
    spoken = 0
    for seed in range(5):
        sample = speech_sample("a", "Good morning.")
        expected = whole(policy, sample, seed)
        blocks = list(speech_blocks(policy, sample, SAMPLING, seed=seed, block_frames=block_frames))
        assert all(b.dtype == np.float32 and len(b) for b in blocks)
        tolerance = max(STEP, family.rounding)  # 1e-3 where phases add up from frame to frame
        np.testing.assert_allclose(np.concatenate([*blocks, expected[:0]]), expected, rtol=0, atol=tolerance)
        spoken += bool(blocks)
    assert spoken >= 3


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("cut", [0, 2])
def test_a_frame_is_decoded_in_the_row_that_completes_it(codec: Any, codes: torch.Tensor, cut: int) -> None:
    """Mimi's decoder has no delay: frame f is sound after row f + Q. `cut`: an EOS of a later codebook ends sooner."""
    layout = speaker(codec).speech
    rows = layout.tokens(codes).codes[:-1]  # without end_id
    frames = codes.shape[1] - cut
    if frames < 1:
        return
    if cut:  # codebook 3 draws EOS in row frames + 4
        rows = layout.tokens(codes[:, :frames]).codes[:-1].clone()
        rows[frames + 1 : frames + 4, 0] = codes[0, 0]  # codes of frames that never become complete
        rows[frames + 2 : frames + 4, 1] = codes[0, 0]
        rows[frames + 3, 2] = codes[0, 0]
    speech, hop, delivered = SpeechStream(codec, layout, 1), 1920, 0
    for t, row in enumerate(rows.tolist()):
        delivered += len(speech.push(row))
        assert delivered == hop * min(max(t + 1 - layout.codebooks, 0), frames)
    rest = speech.push(None)
    assert delivered + len(rest) == frames * hop
    assert len(speech.push(None)) == 0  # text goes on


def test_an_engine_that_decodes_as_it_speaks(codec: Any) -> None:
    """Side by side, in batches that change, what each says is what it says alone."""
    policy = speaker(codec)
    asked = [speech_sample(text, text) for text in NAMES]
    asked.insert(1, Sample("text", (Message("user", ("Why?",)),), metadata={"respond": "text"}))
    sampling = SamplingConfig(max_new_tokens=4, max_frames=30, max_batch_tokens=160)
    engine = StreamingEngine(policy, sampling)
    rollouts = engine.generate([Request(s, seed=3) for s in asked])
    assert [r.sample.id for r in rollouts] == [s.id for s in asked]
    for rollout in rollouts:
        expected = whole(policy, rollout.sample, seed=3)
        wav, speech = engine.waveform(rollout), engine.speech(rollout)
        assert (wav is None) == (not len(expected)) == (speech.first_audio is None)
        if wav is not None:
            np.testing.assert_allclose(wav, expected, rtol=0, atol=STEP)
            assert all(a <= b for a, b in pairwise(speech.ready)) and len(speech.ready) == len(speech.blocks)
            assert 0 < speech.ready[0] <= speech.ready[-1] <= speech.seconds


def test_the_first_block_needs_no_second_one(codec: Any) -> None:
    """It comes while the rest is still to be generated, and a reader who stops ends the generation."""
    policy, steps = speaker(codec), 0
    head = policy.code_head
    hook = head.register_forward_hook(lambda *args: _count())

    def _count() -> None:
        nonlocal steps
        steps += 1
        if steps > 8:
            gate.wait(10)

    gate = threading.Event()
    long = SamplingConfig(max_new_tokens=4, max_frames=2000, audio_temperature=0.0)
    with torch.no_grad():
        head.weight.zero_()  # greedy: code 0 for ever
    blocks = speech_blocks(policy, speech_sample("a", "Good."), long, block_frames=1)
    assert len(next(blocks)) == 1920
    assert steps <= 9
    gate.set()
    blocks.close()  # type: ignore[attr-defined]
    hook.remove()
    assert steps < 200 and not [t for t in threading.enumerate() if t.name == "speech_blocks"]
    assert torch.is_grad_enabled()


def test_bad_input(codec: Any, speech: Any) -> None:
    with pytest.raises(ValueError, match="no speech decoder"):
        next(speech_blocks(dualize(make_text(), 4, 64), speech_sample("a", "x")))
    policy = speaker(codec)
    with pytest.raises(ValueError, match="has turns; this engine speaks answers"):
        StreamingEngine(policy).generate([Request(interpretation_sample(stream(speech, 0, 2)))])
    broken = Sample("b", (Message("user", ()),), metadata={"respond": "speech"})
    policy.prompt = lambda sample: 1 / 0
    with pytest.raises(ZeroDivisionError):  # what fails in the thread fails here
        next(speech_blocks(policy, broken))
