"""Streams of any length: a history of so many turns is what a stream that began there would have, at a flat cost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from audiorl.audio import AudioClip
from audiorl.config import SamplingConfig
from audiorl.models import AudioPolicy, dualize
from audiorl.rollout.streams import LiveStream
from audiorl.tasks.simul.live import Interpreter
from audiorl.tasks.simul.streams import instruction_sample
from audiorl.types import Turn
from tests.conftest import make_omni
from tests.support.streams import ending_turns

SAMPLE = instruction_sample("live", "en", "es")
SAMPLING = SamplingConfig(temperature=1.0, max_new_tokens=4)


@pytest.fixture(scope="module")
def policy() -> AudioPolicy:
    """Ends some turns at once, some later, and has others cut off."""
    return ending_turns(6.0)


def turns(count: int) -> Iterator[Turn]:
    rng = np.random.default_rng(0)
    for number in range(count):
        wav = rng.normal(0, 0.1, 4800).astype(np.float32)
        yield Turn(AudioClip(array=wav, sample_rate=16_000), 0.3 * (number + 1))


@torch.no_grad()
def first_logprob(policy: AudioPolicy, live: LiveStream) -> float:
    """Of the last segment's first token, when the instruction and the carried turns are read at once."""
    rollout = live.rollout
    parts = [policy.prompt(SAMPLE).ids]
    for number, (turn, segment) in enumerate(zip(rollout.sample.turns, rollout.segments, strict=True)):
        parts.append(policy.chunk_ids(turn.audio))
        if number < len(rollout.segments) - 1:
            parts += [segment.ids, *([] if segment.stop_reason == "eos" else [torch.tensor([policy.end_id])])]
    ids = torch.cat(parts)
    decoder = policy.backbone.decoder(policy.model)
    embeds = policy.embed(ids, [turn.audio for turn in rollout.sample.turns])
    hidden = decoder(inputs_embeds=embeds[None]).last_hidden_state[0, -1]
    logits = policy.backbone.head(policy.model)(hidden)
    return float(logits.log_softmax(-1)[rollout.segments[-1].ids[0]])


@pytest.mark.parametrize("history", [2, 3, 6])
def test_the_past_is_that_of_a_stream_that_began_there(policy: AudioPolicy, history: int) -> None:
    live = LiveStream(policy, SAMPLING, SAMPLE, seed=1, history=history)
    carried, reasons = [], set()
    for number, turn in enumerate(turns(20), 1):
        segment = live.observe(turn)
        reasons.add(segment.stop_reason)
        carried.append(len(live.rollout.segments))
        assert len(live.segments) == number and live.segments[-1] is segment
        if len(segment.ids):
            assert float(segment.logprobs[0]) == pytest.approx(first_logprob(policy, live), abs=2e-5)
    assert max(carried) == history and min(carried[history:]) == history // 2 + 1
    assert reasons == {"eos", "length"}
    past = live.segments[: -len(live.rollout.segments)]
    assert past and all(not s.audio for s in past) and all(s.audio for s in live.rollout.segments)


def test_a_history_that_is_never_full_changes_nothing(policy: AudioPolicy) -> None:
    streams = [LiveStream(policy, SAMPLING, SAMPLE, seed=1, history=h) for h in (None, 8)]
    for turn in turns(8):
        one, two = (live.observe(turn) for live in streams)
        assert torch.equal(one.ids, two.ids) and torch.equal(one.logprobs, two.logprobs)


def test_turns_do_not_repeat_the_random_numbers_of_forgotten_ones(policy: AudioPolicy) -> None:
    live = LiveStream(policy, SAMPLING, SAMPLE, seed=1, history=2)
    keys = set()
    for turn in turns(12):
        live.observe(turn)
        keys.add(live._stream.key().name)
    assert len(keys) == 12


def test_histories_that_cannot_be(policy: AudioPolicy) -> None:
    with pytest.raises(ValueError, match="history is 1 turns; give at least 2"):
        LiveStream(policy, SAMPLING, SAMPLE, history=1)
    with pytest.raises(
        ValueError, match=r"a history of 1.5 s holds less than two chunks of 0.96 s; give at least 1.92"
    ):
        Interpreter(policy, "en", "es", history=1.5)
    with pytest.raises(ValueError, match="a policy that speaks carries its whole stream"):
        LiveStream(dualize(make_omni(), 2, 16), SAMPLING, SAMPLE, history=4)
