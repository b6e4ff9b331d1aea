"""Speech interpreted while it arrives: the same as the engine's greedy rollout of the whole stream."""

from __future__ import annotations

import time

import numpy as np
import pytest
import soxr
import torch

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, SamplingConfig
from audiorl.data.corpus import Utterance
from audiorl.models import AudioPolicy
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.tasks.simul.live import Interpreter
from audiorl.tasks.simul.streams import ChunkConfig, Stream, interpretation_sample
from audiorl.types import Rollout
from tests.conftest import make_omni
from tests.support.streams import build_stream, ending_turns

RATE = 16_000
CHUNKS = ChunkConfig()
GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=3)


@pytest.fixture(scope="module")
def stream(speech: list[Utterance]) -> Stream:
    prompts = [(u.clip.load(RATE), u, u) for u in speech[40:43]]
    return build_stream("live", prompts, (0.2, 0.5), np.random.default_rng(0))


@pytest.fixture(scope="module")
def policy() -> AudioPolicy:
    """Ends some of its turns at once, some later, and has others cut off."""
    return ending_turns(2.5)


def at(rate: int, stream: Stream) -> np.ndarray:
    """The stream's samples at another rate."""
    wav = stream.audio.load(RATE)
    return wav if rate == RATE else soxr.resample(wav, RATE, rate)


def heard(
    policy: AudioPolicy, wav: np.ndarray, rate: int, chunks: ChunkConfig = CHUNKS, longest: float = 0.3
) -> tuple[Rollout, str]:
    """What is written when the samples come in pieces of random length, 0 to `longest` seconds."""
    live = Interpreter(policy, "en", "es", chunks, GREEDY, rate=rate)
    rng, start, text = np.random.default_rng(round(100 * longest)), 0, ""
    while start < len(wav):
        end = start + int(rng.integers(0, round(longest * rate)))
        text += live.observe(wav[start:end])
        start = end
    text += live.finish()
    return live.rollout, text


@pytest.mark.parametrize(
    ("chunks", "longest"),
    [(ChunkConfig(), 0.9), (ChunkConfig(0.48, 1.04), 0.05), (ChunkConfig(0.64, 0.0), 4.0)],
)
@pytest.mark.parametrize("rate", [RATE, 44_100])
def test_pieces_of_any_length(
    policy: AudioPolicy, stream: Stream, rate: int, chunks: ChunkConfig, longest: float
) -> None:
    wav = at(rate, stream)
    same = Stream("live", AudioClip(array=wav, sample_rate=rate), len(wav) / rate, (), "en", "es")
    (whole,) = HFEngine(policy, GREEDY).generate([Request(interpretation_sample(same, chunks))])
    live, text = heard(policy, wav, rate, chunks, longest)
    assert text == whole.text == live.text and text
    for one, two in zip(live.segments, whole.segments, strict=True):
        assert one.ids.tolist() == two.ids.tolist() and one.prompt_ids.tolist() == two.prompt_ids.tolist()
        assert one.source_time == pytest.approx(two.source_time, abs=1e-9) and one.stop_reason == two.stop_reason
        assert torch.equal(one.logprobs, two.logprobs)
        mine, theirs = (s.audio[-1].with_context().load(rate) for s in (one, two))
        assert np.array_equal(mine, theirs)
    assert {s.stop_reason for s in live.segments} == {"eos", "length"}
    times = [s.emit_time for s in live.segments]
    assert times == sorted(times) and all(s.emit_time > s.source_time for s in live.segments)  # type: ignore[type-var,operator]


@pytest.mark.parametrize(
    ("seconds", "turns"), [(2 * 0.96, 2), (2 * 0.96 + 0.05, 2), (2 * 0.96 + 0.1, 3), (0.5, 1), (0.05, 0)]
)
def test_the_rest(policy: AudioPolicy, stream: Stream, seconds: float, turns: int) -> None:
    """What is left at the end is a shorter chunk, or, below 0.1 s, not heard."""
    live, _ = heard(policy, at(RATE, stream)[: round(seconds * RATE)], RATE)
    assert len(live.segments) == turns
    if turns:
        assert live.segments[-1].source_time == (seconds if (seconds / 0.96) % 1 > 0.06 else pytest.approx(1.92))


def test_hearing_is_part_of_computing(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emit times hold the audio tower's time too, alive and in the engine, where it hears before it writes."""
    policy = make_omni()
    encode_audio = type(policy.backbone).encode_audio

    def slow(*args: object) -> object:
        time.sleep(0.05)
        return encode_audio(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(type(policy.backbone), "encode_audio", slow)
    live, _ = heard(policy, at(RATE, stream), RATE)
    (whole,) = HFEngine(make_omni(), GREEDY).generate([Request(interpretation_sample(stream))])
    for rollout in (live, whole):
        for count, segment in enumerate(rollout.segments, 1):
            assert segment.emit_time is not None and segment.source_time is not None
            assert segment.emit_time - segment.source_time > 0.05 * count


def test_a_policy_that_is_being_trained(stream: Stream) -> None:
    """Gradient checkpointing, which is on in training mode, would switch the cache off."""
    trained, frozen = make_omni(ModelConfig(gradient_checkpointing=True)), make_omni()
    assert trained.model.training
    texts = [heard(policy, at(RATE, stream), RATE)[1] for policy in (trained, frozen)]
    assert texts[0] == texts[1] and trained.model.training


def test_wrong_input(policy: AudioPolicy) -> None:
    live = Interpreter(policy, "en", "es")
    assert live.observe(np.zeros(0, np.float32)) == ""
    with pytest.raises(ValueError, match=r"mono samples \[T\] of floats in \[-1, 1\] at 16000 Hz, got int16 \[3\]"):
        live.observe(np.zeros(3, np.int16))
    with pytest.raises(ValueError, match=r"got float64 \[3, 2\]"):
        live.observe(np.zeros((3, 2)))
    with pytest.raises(ValueError, match="NaN or infinite"):
        live.observe(np.full(RATE, np.nan, np.float32))
    live = Interpreter(policy, "en", "es")
    assert live.finish() == ""
    with pytest.raises(ValueError, match="has ended"):
        live.observe(np.zeros(3, np.float32))
