"""Segmented rollouts: nothing is read ahead or computed twice, the trainer sees what the engine saw; live streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.audio import AudioClip
from audiorl.config import SamplingConfig
from audiorl.data.corpus import Utterance
from audiorl.models import AudioPolicy, dualize
from audiorl.models.examples import Example, experience
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.streams import LiveStream
from audiorl.tasks.simul.live import Interpreter
from audiorl.tasks.simul.schedules import Offline
from audiorl.tasks.simul.streams import ChunkConfig, Stream, instruction_sample, interpretation_sample
from audiorl.types import Rollout, Sample, Turn
from tests.conftest import make_omni
from tests.support.rollouts import ending as ending_by
from tests.support.rollouts import forced, ids, logprobs
from tests.support.streams import RATE, ending_turns, stream


@pytest.fixture(scope="module")
def streams(speech: list[Utterance]) -> list[Stream]:
    """Of different length."""
    return [stream(speech, 0, 2), stream(speech, 40, 4), stream(speech, 90, 3)]


@pytest.fixture(scope="module")
def samples(streams: list[Stream]) -> list[Sample]:
    return [interpretation_sample(s) for s in streams]


def run(policy: AudioPolicy, samples: list[Sample], n: int = 1, **sampling: Any) -> list[Rollout]:
    engine = HFEngine(policy, SamplingConfig(**({"max_new_tokens": 5} | sampling)))
    return engine.generate([Request(s, n, seed=3) for s in samples])


@pytest.fixture
def talkative(policy: AudioPolicy) -> AudioPolicy:
    """Ends about one turn in three at each token, so that turns of all kinds occur."""
    return ending_by(policy, 4.5)


def test_trainer_logprobs_are_the_engines(policy: AudioPolicy, samples: list[Sample]) -> None:
    rollouts = run(policy, samples, n=2)
    for shared in (True, False):
        torch.testing.assert_close(forced(policy, rollouts, share=shared), logprobs(rollouts), atol=1e-5, rtol=0)


def test_streams_of_a_batch_do_not_touch_each_other(talkative: AudioPolicy, samples: list[Sample]) -> None:
    together = run(talkative, samples, n=3)
    alone = [r for s in samples for r in run(talkative, [s], n=3)]
    assert ids(together) == ids(alone)
    lengths = {len(s.ids) for r in together for s in r.segments}
    assert lengths >= {1, 2, 3} and len({str(ids([r])) for r in together}) == len(together)
    small = run(talkative, samples, n=3, max_batch_tokens=1)
    assert ids(small) == ids(alone)


def test_nothing_is_read_ahead(talkative: AudioPolicy, streams: list[Stream]) -> None:
    """Other audio after chunk t leaves ids and log-probs up to t bit-identical, and changes what comes after."""
    stream = streams[1]
    wav = stream.audio.load(RATE)
    chunks = ChunkConfig()
    before = run(talkative, [interpretation_sample(stream, chunks)], n=2)
    for t in (1, 4):
        other = wav.copy()
        cut = round((t + 1) * chunks.seconds * RATE)
        other[cut:] = other[cut:][::-1]
        changed = replace(stream, audio=AudioClip(array=other, sample_rate=RATE))
        for one, two in zip(before, run(talkative, [interpretation_sample(changed, chunks)], n=2), strict=True):
            for a, b in list(zip(one.segments, two.segments, strict=True))[: t + 1]:
                assert a.ids.tolist() == b.ids.tolist() and torch.equal(a.logprobs, b.logprobs)
            later = zip(one.segments[t + 1 :], two.segments[t + 1 :], strict=True)
            assert any(len(a.ids) != len(b.ids) or not torch.equal(a.logprobs, b.logprobs) for a, b in later)


def test_a_chunk_is_heard_with_what_came_before_it_and_nothing_else(policy: AudioPolicy, streams: list[Stream]) -> None:
    """Chunk by chunk = the same windows cut from the whole recording, whichever way the audio is held."""
    wav = streams[0].audio.load(RATE)
    turns = interpretation_sample(streams[0]).turns
    for turn, heard in zip(turns, policy.encode_audio([t.audio for t in turns]), strict=True):
        end = round(turn.end * RATE)
        own = round((turn.audio.duration or 0) * RATE)
        window = wav[max(end - own - round(turn.audio.context * RATE), 0) : end]
        (whole,) = policy.encode_audio([AudioClip(array=window, sample_rate=RATE)])
        torch.testing.assert_close(heard, whole[-len(heard) :], atol=1e-6, rtol=0)
        assert len(heard) == own // (RATE // 25)
    (bare,) = policy.encode_audio([replace(turns[2].audio, context=0.0)])
    (with_context,) = policy.encode_audio([turns[2].audio])
    assert bare.shape == with_context.shape and not torch.allclose(bare, with_context)


def test_nothing_is_computed_twice(policy: AudioPolicy, samples: list[Sample]) -> None:
    """The decoder sees every token of a stream once, but for the last one sampled, which nothing follows."""
    seen = 0

    def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal seen
        seen += kwargs["inputs_embeds"].shape[1]

    hook = policy.backbone.decoder(policy.model).register_forward_pre_hook(count, with_kwargs=True)
    try:
        (rollout,) = run(policy, samples[1:2])
    finally:
        hook.remove()
    assert seen == len(Experience.from_rollout(rollout)) - 1


def test_turns_that_do_not_end_are_ended(policy: AudioPolicy, samples: list[Sample]) -> None:
    (rollout,) = run(policy, samples[:1], max_new_tokens=2)
    cut = [s.stop_reason == "length" for s in rollout.segments]
    assert sum(cut) >= 3
    for before, segment in zip(cut, rollout.segments[1:], strict=False):
        assert (int(segment.prompt_ids[0]) == policy.end_id) == before
    assert Experience.from_rollout(rollout).loss_mask.sum() == sum(len(s.ids) for s in rollout.segments)


@dataclass(frozen=True)
class Fixed:
    """A schedule by hand."""

    plan: tuple[int | None, ...]
    review: None = None

    def words(self, turn: int, turns: int, written: int) -> int | None:
        return self.plan[turn] if turn < len(self.plan) else 0

    def count(self, text: str) -> int:
        return len(text.split())


def test_schedules_decide_when_to_write(talkative: AudioPolicy, samples: list[Sample]) -> None:
    engine = HFEngine(talkative, SamplingConfig(max_new_tokens=40))
    plan = (0, 2, 0, 1)
    (rollout,) = engine.generate([Request(samples[1], schedule=Fixed(plan))])
    for segment, words in zip(rollout.segments, plan, strict=False):
        assert len(segment.text.split()) <= words and segment.stop_reason in ("stop", "length")
        assert bool(len(segment.ids)) == bool(words)
    assert len(rollout.segments[1].text.split()) == 2
    assert not any(len(s.ids) for s in rollout.segments[4:])
    # What was not sampled is observed: the stream can still be trained on, under the same log-probs.
    e = Experience.from_rollout(rollout)
    out = talkative.backbone.head(talkative.model)(talkative.hidden(pack_experiences([e])))
    lp = out.log_softmax(-1)[:-1].gather(-1, e.ids[1:, None])[:, 0][e.loss_mask[1:]]
    torch.testing.assert_close(lp, torch.cat([s.logprobs for s in rollout.segments]), atol=1e-5, rtol=0)

    (late,) = engine.generate([Request(samples[1], schedule=Offline())])
    assert not any(len(s.ids) for s in late.segments[:-1]) and len(late.segments[-1].ids)


def test_a_supervised_stream_has_the_tokens_of_a_rollout(policy: AudioPolicy, streams: list[Stream]) -> None:
    sample = interpretation_sample(streams[0])
    e = experience(policy, Example(sample))
    targets = policy.decode(e.ids[e.loss_mask])
    assert targets == "".join(t.reference for t in sample.turns) == streams[0].reference
    ends = [i for i in range(len(e)) if e.loss_mask[i] and int(e.ids[i]) == policy.end_id]
    assert len(ends) == len(sample.turns)
    assert len(e.audio) == len(sample.turns)
    # the loss hears the chunk: other audio in one chunk changes it
    out = policy.forward(pack_experiences([e])).logprobs.detach()
    wav = streams[0].audio.load(RATE)
    other = replace(streams[0], audio=AudioClip(array=wav[::-1].copy(), sample_rate=RATE))
    changed = experience(policy, Example(interpretation_sample(other)))
    assert torch.equal(changed.ids, e.ids)
    assert not torch.allclose(policy.forward(pack_experiences([changed])).logprobs.detach(), out)


# -- live streams: a history of so many turns is what a stream that began there would have -----------------------------

SAMPLE = instruction_sample("live", "en", "es")
SAMPLING = SamplingConfig(temperature=1.0, max_new_tokens=4)


@pytest.fixture(scope="module")
def ending() -> AudioPolicy:
    """Ends some turns with the first token, some later, and has others cut off."""
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
def test_the_past_is_that_of_a_stream_that_began_there(ending: AudioPolicy, history: int) -> None:
    live = LiveStream(ending, SAMPLING, SAMPLE, seed=1, history=history)
    carried, reasons = [], set()
    for number, turn in enumerate(turns(20), 1):
        segment = live.observe(turn)
        reasons.add(segment.stop_reason)
        carried.append(len(live.rollout.segments))
        assert len(live.segments) == number and live.segments[-1] is segment
        if len(segment.ids):
            assert float(segment.logprobs[0]) == pytest.approx(first_logprob(ending, live), abs=2e-5)
    assert max(carried) == history and min(carried[history:]) == history // 2 + 1
    assert reasons == {"eos", "length"}
    past = live.segments[: -len(live.rollout.segments)]
    assert past and all(not s.audio for s in past) and all(s.audio for s in live.rollout.segments)


def test_histories_that_cannot_be(ending: AudioPolicy) -> None:
    with pytest.raises(ValueError, match="history is 1 turns; give at least 2"):
        LiveStream(ending, SAMPLING, SAMPLE, history=1)
    with pytest.raises(
        ValueError, match=r"a history of 1.5 s holds less than two chunks of 0.96 s; give at least 1.92"
    ):
        Interpreter(ending, "en", "es", history=1.5)
    with pytest.raises(ValueError, match="a policy that speaks carries its whole stream"):
        LiveStream(dualize(make_omni(), 2, 16), SAMPLING, SAMPLE, history=4)
