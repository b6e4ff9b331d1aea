"""Schedules that review what the model wrote: cuts are those of a plain loop over eager transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest
import torch
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.config import SamplingConfig
from audiorl.data.corpus import Utterance
from audiorl.eval._streams import instance_of
from audiorl.models import AudioPolicy
from audiorl.protocols import Hypothesis, Request, Schedule
from audiorl.rollout.hf import HFEngine
from audiorl.tasks.simul.schedules import AlignAtt, EDAtt, LocalAgreement, Offline, Reviewed
from audiorl.tasks.simul.streams import ChunkConfig, Stream, interpretation_sample
from audiorl.types import Rollout, Sample
from tests.conftest import make_dual_omni, make_omni, make_qwen2_audio, make_qwen3_omni
from tests.support.rollouts import ending
from tests.support.streams import stream

CHUNKS = ChunkConfig(0.96)
MOST = 8
REVIEWS = [LocalAgreement(2), AlignAtt(8), AlignAtt(24, (0,)), AlignAtt(24, (1,)), EDAtt(0.1, 6), EDAtt(0.1, 4, (0,))]
FAMILIES = {"qwen2.5-omni": make_omni, "qwen2-audio": make_qwen2_audio, "qwen3-omni": make_qwen3_omni}


@pytest.fixture(scope="module")
def streams(speech: list[Utterance]) -> list[Stream]:
    return [stream(speech, 0, 2), stream(speech, 40, 3)]


@pytest.fixture(scope="module")
def samples(streams: list[Stream]) -> list[Sample]:
    return [interpretation_sample(s, CHUNKS) for s in streams]


def talkative(policy: AudioPolicy) -> AudioPolicy:
    """Turns end here and there; attention is sharper than that of new weights, so that it peaks somewhere."""
    ending(policy, 0.25)
    with torch.no_grad():
        for layer in policy.backbone.decoder(policy.model).layers:
            layer.self_attn.q_proj.weight *= 8
            layer.self_attn.k_proj.weight *= 8
    return policy


def run(policy: AudioPolicy, samples: Sequence[Sample], schedule: Schedule | None, n: int = 1) -> list[Rollout]:
    # A schedule that reviews is greedy whatever the temperature.
    reviews = schedule is not None and schedule.review is not None
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=MOST, temperature=1.0 if reviews else 0.0))
    return engine.generate([Request(s, n, seed=3, schedule=schedule) for s in samples])


def reviewed(review: Any) -> Reviewed:
    return Reviewed(review, "es")


def written(rollout: Rollout) -> list[tuple[list[int], str]]:
    return [(s.ids.tolist(), s.stop_reason) for s in rollout.segments]


# -- the same by eager transformers, without a cache -------------------------------------------------------------------


@contextmanager
def eager(policy: AudioPolicy) -> Iterator[None]:
    config = policy.backbone.decoder(policy.model).config
    before, config._attn_implementation = config._attn_implementation, "eager"
    yield
    config._attn_implementation = before


def plain(policy: AudioPolicy, sample: Sample, review: Any) -> list[list[int]]:
    """What is written in each turn: every step reads the whole conversation again."""
    decoder, head = policy.backbone.decoder(policy.model), policy.backbone.head(policy.model)
    observed: list[int] = policy.prompt(sample).ids.tolist()
    sampled = [False] * len(observed)
    clips: list[Any] = []
    said: list[int] = []
    hypotheses: list[list[int]] = []
    out: list[list[int]] = []

    def forward() -> tuple[Tensor, list[Tensor]]:
        embeds = policy.embed(torch.tensor(observed), clips, torch.tensor(sampled))
        result = decoder(inputs_embeds=embeds[None], output_attentions=True, use_cache=False)
        return head(result.last_hidden_state[0]), [a[0].mean(0) for a in result.attentions]

    def kept(words: list[int], start: int) -> int:
        if isinstance(review, LocalAgreement):
            last = hypotheses[-review.n :]
            same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*last, strict=False))
            keep = sum(1 for _ in same) - len(said) if len(last) == review.n else 0
        else:
            own = zip(observed, sampled, strict=True)
            audio = [i for i, (id, mine) in enumerate(own) if id == policy.audio_token_id and not mine]
            mean = torch.stack([a for i, a in enumerate(forward()[1]) if not review.layers or i in review.layers]).mean(
                0
            )
            for keep in range(len(words) + 1):
                if keep == len(words):
                    break
                weights = mean[start + keep - 1, audio]
                if isinstance(review, AlignAtt):
                    if int(weights.argmax()) >= len(audio) - review.frames:
                        break
                elif float(weights[-review.frames :].sum() / weights.sum()) >= review.alpha:
                    break
        # Whole characters: their bytes may be several tokens.
        whole = policy.decode(words)
        while 0 < keep < len(words) and policy.decode(words[:keep]) + policy.decode(words[keep:]) != whole:
            keep -= 1
        return keep

    for number, turn in enumerate(sample.turns):
        chunk = policy.chunk_ids(turn.audio).tolist()
        observed, sampled, clips = observed + chunk, sampled + [False] * len(chunk), [*clips, turn.audio]
        start = len(observed)
        while len(observed) - start < MOST:
            token = int(forward()[0][-1].argmax())
            observed, sampled = [*observed, token], [*sampled, True]
            if token in policy.stop_ids:
                break
        turn_ids = observed[start:]
        words = turn_ids[:-1] if turn_ids[-1] in policy.stop_ids else turn_ids
        hypotheses.append([*said, *words])
        keep = kept(words, start) if number < len(sample.turns) - 1 and words else len(words)
        if keep < len(words):
            observed, sampled, turn_ids = observed[: start + keep], sampled[: start + keep], words[:keep]
        if observed[-1] not in policy.stop_ids or len(observed) == start:
            observed, sampled = [*observed, policy.end_id], [*sampled, False]
        said += words[:keep]
        out.append(turn_ids)
    return out


@pytest.mark.parametrize("family", list(FAMILIES))
def test_cuts_are_those_of_eager_attention(family: str, samples: list[Sample], streams: list[Stream]) -> None:
    policy = talkative(FAMILIES[family]())
    sample, differing, cut = samples[1], set(), []
    if family == "qwen3-omni":  # its encoder makes no multiple of tokens of a chunk with its context
        sample = interpretation_sample(streams[1], ChunkConfig(0.96, 0.0))
    for review in REVIEWS:
        (rollout,) = run(policy, [sample], Reviewed(review, "zh"))
        with eager(policy), torch.no_grad():
            expected = plain(policy, sample, review)
        assert [ids for ids, _ in written(rollout)] == expected, review
        differing.add(str(expected))
        cut.append([len(s.ids) for s in rollout.segments[:-1] if s.stop_reason == "stop"])
    assert len(differing) > 2 and any(map(any, cut))  # some within a turn


def test_attention_is_that_of_eager_transformers(samples: list[Sample]) -> None:
    """Numbers, not only cuts: recorded while a schedule keeps everything, and once from the whole conversation."""

    class Recorder(AlignAtt):
        def keep(self, hypothesis: Hypothesis) -> int:
            assert hypothesis.attention is not None
            seen.append(hypothesis.attention)
            return len(hypothesis.ids)

    seen: list[Tensor] = []
    policy = talkative(make_omni())
    (rollout,) = run(policy, samples[:1], reviewed(Recorder(0, (1,))))
    e = Experience.from_rollout(rollout)
    decoder = policy.backbone.decoder(policy.model)
    with eager(policy), torch.no_grad():
        embeds = policy.embed(e.ids, e.audio, e.loss_mask)
        attention = decoder(inputs_embeds=embeds[None], output_attentions=True).attentions[1][0].mean(0)
    audio = (e.ids == policy.audio_token_id) & ~e.loss_mask
    assert e.segment is not None and len(seen) > 2
    turns = [t for t, s in enumerate(rollout.segments[:-1]) if s.text or len(s.ids) > 1]
    for t, recorded in zip(turns, seen, strict=True):
        rows = (e.loss_mask & (e.segment == t)).nonzero()[:, 0][: len(recorded)] - 1
        columns = (audio & (e.segment <= t)).nonzero()[:, 0]
        direct = attention[rows][:, columns]
        torch.testing.assert_close(recorded, direct / direct.sum(-1, keepdim=True), atol=1e-5, rtol=1e-4)


def test_what_never_cuts_is_the_policy_and_what_always_cuts_is_offline(samples: list[Sample]) -> None:
    policy = talkative(make_omni())
    for mine, its in zip(run(policy, samples, reviewed(AlignAtt(0))), run(policy, samples, None), strict=True):
        assert written(mine) == written(its)
        for a, b in zip(mine.segments, its.segments, strict=True):
            torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-5, rtol=0)
    late = run(policy, samples, Offline("es"))
    for review in (AlignAtt(10**6), EDAtt(1e-9, 10**6), LocalAgreement(100)):
        for mine, its in zip(run(policy, samples, reviewed(review)), late, strict=True):
            # The end of a turn in which it would have written nothing is its own.
            assert [s.text for s in mine.segments] == [s.text for s in its.segments] and its.text
            assert torch.equal(Experience.from_rollout(mine).ids, Experience.from_rollout(its).ids)


def test_passes_and_times_count_what_was_cut(samples: list[Sample]) -> None:
    policy = talkative(make_omni())
    calls = 0

    def count(*args: Any) -> None:
        nonlocal calls
        calls += 1

    policy.backbone.decoder(policy.model).register_forward_pre_hook(count)
    for schedule in (None, Offline("es"), *map(reviewed, REVIEWS)):
        calls = 0
        (rollout,) = run(policy, samples[:1], schedule)
        # The last token of a turn that reached its limit goes through the decoder with what follows.
        assert sum(s.decoder_passes or 0 for s in rollout.segments) == calls, schedule
        times = [(s.emit_time or 0) - (s.source_time or 0) for s in rollout.segments]
        assert times == sorted(times) and times[0] > 0
    silent = run(policy, samples[:1], Offline("es"))[0].segments[0]
    agreeing = run(policy, samples[:1], reviewed(LocalAgreement(2)))[0].segments[0]
    assert len(agreeing.ids) == 0 and (silent.decoder_passes, agreeing.decoder_passes) == (1, MOST)


# -- hypotheses by hand ------------------------------------------------------------------------------------------------


def scripted(policy: AudioPolicy, hypotheses: Sequence[str | None]) -> AudioPolicy:
    """A tiny decoder that writes the given text in each turn and ends it; None goes on until the limit."""
    tokens: list[int] = []
    for text in hypotheses:
        ids = policy.tokenizer.encode(" no" * MOST if text is None else text, add_special_tokens=False)
        tokens += ids[:MOST] if text is None else [*ids, policy.end_id]
    script = iter(tokens)

    def write(module: Any, args: Any, out: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor([next(script)]), out.shape[-1]) * 50.0

    policy.backbone.head(policy.model).register_forward_hook(write)
    return policy


def test_local_agreement_by_hand(speech: list[Utterance]) -> None:
    sample = interpretation_sample(stream(speech, 40, 4), CHUNKS)
    sample = replace(sample, turns=sample.turns[:6])
    hypotheses = ["yes no why", "yes no English", " English", " English Spanish", "", " French why"]
    (rollout,) = run(scripted(make_omni(), hypotheses), [sample], reviewed(LocalAgreement(2)))
    # The third hypothesis is what the second has left; it is kept with its end. An empty one agrees with all others.
    assert [s.text for s in rollout.segments] == ["", "yes no", " English", "", "", " French why"]
    assert [s.stop_reason for s in rollout.segments] == ["stop", "stop", "eos", "stop", "eos", "eos"]
    instance = instance_of(rollout, 0)
    assert instance.prediction == "yes no English French why"
    assert [round(d / 960, 6) for d in instance.delays] == [2, 2, 3, 6, 6]

    hypotheses = ["yes no", "yes no why", "yes no English", " why", " Spanish", " Spanish"]
    (rollout,) = run(scripted(make_omni(), hypotheses), [sample], reviewed(LocalAgreement(3)))
    assert [s.text for s in rollout.segments] == ["", "", "yes no", "", "", " Spanish"]


def test_words_are_cut_as_a_whole(speech: list[Utterance]) -> None:
    policy = make_omni()
    together, alone = (policy.tokenizer.encode(t, add_special_tokens=False) for t in ("yes nobody", "yes nothing"))
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(together, alone, strict=False)))
    assert policy.decode(together[:shared]) != "yes"  # the tokens of half a word agree
    sample = interpretation_sample(stream(speech, 40, 4), CHUNKS)
    sample = replace(sample, turns=sample.turns[:3])
    (rollout,) = run(scripted(policy, ["yes nobody", "yes nothing", " why"]), [sample], reviewed(LocalAgreement(2)))
    assert [s.text for s in rollout.segments] == ["", "yes", " why"]
    chinese = Reviewed(LocalAgreement(2), "zh")
    (rollout,) = run(scripted(make_omni(), ["你好", "你我", "们"]), [sample], chinese)
    assert [s.text for s in rollout.segments] == ["", "你", "们"]


def test_a_turn_at_its_limit_is_reviewed_too(speech: list[Utterance]) -> None:
    sample = interpretation_sample(stream(speech, 40, 4), CHUNKS)
    sample = replace(sample, turns=sample.turns[:3])
    (rollout,) = run(scripted(make_omni(), [None, None, "why"]), [sample], reviewed(LocalAgreement(2)))
    assert [len(s.ids) for s in rollout.segments[:2]] == [0, MOST]
    assert [s.stop_reason for s in rollout.segments] == ["stop", "length", "eos"]


def hypothesis(rows: Sequence[Sequence[float]]) -> Hypothesis:
    return Hypothesis(tuple(range(len(rows))), attention=torch.tensor(rows))


def test_reviews_by_hand() -> None:
    rows = [[0.7, 0.1, 0.1, 0.1], [0.1, 0.5, 0.2, 0.2], [0.0, 0.2, 0.5, 0.3], [0.9, 0.0, 0.1, 0.0]]
    assert [AlignAtt(frames).keep(hypothesis(rows)) for frames in range(6)] == [4, 4, 2, 1, 0, 0]
    assert [EDAtt(a, 2).keep(hypothesis(rows)) for a in (0.15, 0.2, 0.4, 0.8, 0.81)] == [0, 0, 1, 2, 4]
    assert [EDAtt(0.3, frames).keep(hypothesis(rows)) for frames in (1, 2, 3, 4)] == [2, 1, 0, 0]
    agree: Callable[..., int] = lambda n, *earlier: LocalAgreement(n).keep(Hypothesis((1, 2, 3), earlier))  # noqa: E731
    assert [agree(2), agree(2, (1, 2, 4)), agree(2, (1, 2, 3, 4)), agree(2, ()), agree(2, (2,))] == [0, 2, 3, 0, 0]
    assert [agree(3, (1, 2)), agree(3, (1, 2), (1, 3)), agree(3, (9,), (1, 2), (1, 2, 3))] == [0, 1, 2]


def test_bad_schedules(samples: list[Sample]) -> None:
    with pytest.raises(ValueError, match="attention of layer 2: the decoder has layers 0 to 1"):
        run(talkative(make_omni()), samples[:1], reviewed(AlignAtt(4, (2,))))
    with pytest.raises(ValueError, match=rf"sample '{samples[0].id}': its schedule reviews .* this model also speaks"):
        run(make_dual_omni(), samples[:1], reviewed(LocalAgreement(2)))
    with pytest.raises(ValueError, match="frames must be at least 0"):
        AlignAtt(-1)


def test_the_trainer_sees_what_was_kept(samples: list[Sample]) -> None:
    policy = talkative(make_omni())
    head = policy.backbone.head(policy.model)
    for review in REVIEWS:
        rollouts = run(policy, samples, reviewed(review))
        for rollout in rollouts:
            e = Experience.from_rollout(rollout)
            logits = head(policy.hidden(pack_experiences([e])))
            direct = logits.log_softmax(-1)[:-1].gather(-1, e.ids[1:, None])[:, 0][e.loss_mask[1:]]
            torch.testing.assert_close(direct, torch.cat([s.logprobs for s in rollout.segments]), atol=1e-4, rtol=0)
