"""vLLM beside the model that it serves: the same prompts, the same log-probs, after every update of the weights.

Tests that ask for the `family` run with each of them, the others with Qwen2.5-Omni.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.audio import AudioClip
from audiorl.config import LoraConfig, ModelConfig, SamplingConfig
from audiorl.data.corpus import Utterance
from audiorl.errors import install
from audiorl.models import AudioPolicy, dualize, load_policy
from audiorl.models.families import qwen_omni, text
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.samplers import filtered_logprobs
from audiorl.rollout.vllm import VLLMConfig, VLLMEngine
from audiorl.rollout.vllm_weights import check_together, served_weights
from audiorl.rollout.weight_transfer import SyncError, WeightSender
from audiorl.types import Message, Sample
from tests.conftest import TEXTS
from tests.support.rollouts import forced, ids, logprobs, requests
from tests.support.vllm_engines import FAMILIES, TOLERANCE, lively, save_family, shake, stream


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "folder" in metafunc.fixturenames:
        served = FAMILIES if "family" in metafunc.fixturenames else FAMILIES[:1]
        metafunc.parametrize("folder", served, indirect=True, scope="module")


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model, tiny."""
    return save_family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def family(folder: Path) -> None:
    """Asked for by tests that are run with each."""


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VLLMEngine]:
    """One start of vLLM serves all tests of a family; `fresh` gives it its first weights back."""
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    engine = VLLMEngine(folder, SamplingConfig(max_new_tokens=12))
    # A trainer's random numbers are not its engine's business.
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), states[2])
    yield engine
    engine.close()


@pytest.fixture
def policy(folder: Path) -> AudioPolicy:
    return load_policy(folder, ModelConfig(audio="full"))


@pytest.fixture
def fresh(engine: VLLMEngine, policy: AudioPolicy) -> VLLMEngine:
    engine.sampling = SamplingConfig(max_new_tokens=12)
    engine.update_weights(served_weights(policy), 0)
    return engine


def test_log_probs_are_the_trainers_after_each_of_five_updates(
    family: None, folder: Path, fresh: VLLMEngine, policy: AudioPolicy, samples: list[Sample]
) -> None:
    """The decoder, its head and the audio tower, all trained with real optimizer steps; without the last one's weights
    the log-probs are others."""
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=1e-2)
    rollouts = fresh.generate(requests(samples))
    for version in range(1, 6):
        batch = pack_experiences([Experience.from_rollout(r) for r in rollouts])
        optimizer.zero_grad()
        policy.forward(batch).logprobs.mean().backward()
        optimizer.step()
        policy.weights_changed()
        stale = fresh.generate(requests(samples))
        assert (forced(policy, stale) - logprobs(stale)).abs().max() > 100 * TOLERANCE
        fresh.update_weights(served_weights(policy), version)
        rollouts = fresh.generate(requests(samples, seed=version))
        torch.testing.assert_close(logprobs(rollouts), forced(policy, rollouts), atol=TOLERANCE, rtol=0)
        assert {s.policy_version for r in rollouts for s in r.segments} == {version} == {fresh.policy_version}
    before = load_policy(folder).model.named_parameters()
    unmoved = {n for n, p in before if torch.equal(p, policy.model.get_parameter(n))}
    assert not [n for n in unmoved if not n.startswith(("visual.", "audio_tower.audio_bos_eos_token."))]


def test_workers_receive_weights_themselves(fresh: VLLMEngine, policy: AudioPolicy, samples: list[Sample]) -> None:
    """Over a connection of each worker with the sender, as with tensor parallelism; here of the one worker."""
    shake(policy, 5)
    sender = WeightSender(1, timeout=30.0)
    options = {"timeout": 30.0, "backend": "gloo"}
    assert fresh.receive(7) == "a worker of vLLM has no connection for weights"
    assert fresh.connect(sender.address, 0, 1, options) is None
    with pytest.raises(RuntimeError, match="weights of two versions"):
        fresh.generate(requests(samples))
    for version in (7, 8):
        with ThreadPoolExecutor(1) as thread:
            sending = thread.submit(sender.send, dict(served_weights(policy)))
            assert fresh.receive(version) is None
            sending.result()
        rollouts = fresh.generate(requests(samples))
        torch.testing.assert_close(logprobs(rollouts), forced(policy, rollouts), atol=TOLERANCE, rtol=0)
        assert {s.policy_version for r in rollouts for s in r.segments} == {version}
        shake(policy, version)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(sender.send, {"of.another.model": torch.zeros(2)})
        with pytest.raises(Exception, match=r"'of\.another\.model' is not in this model"):
            fresh.receive(9)
        with pytest.raises(SyncError, match=r"receiver 0: ValueError: .* 'of\.another\.model' is not in this model"):
            sending.result()
    fresh.disconnect("the test ends")
    assert "no sender of weights at 127.0.0.1:1 within 1 s" in str(fresh.connect("127.0.0.1:1", 0, 1, {"timeout": 1.0}))


def test_greedy_answers_and_streams_are_those_of_the_other_engine(
    fresh: VLLMEngine, policy: AudioPolicy, samples: list[Sample], speech: list[Utterance]
) -> None:
    asked = [Request(s, greedy=True, group_id="a group") for s in [*samples, stream(speech)]]
    ours, theirs = fresh.generate(asked), HFEngine(policy, fresh.sampling).generate(asked)
    assert ids(ours) == ids(theirs)
    torch.testing.assert_close(logprobs(ours), logprobs(theirs), atol=TOLERANCE, rtol=0)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.sample, a.group_id, a.index) == (b.sample, b.group_id, b.index)
        for s, t in zip(a.segments, b.segments, strict=True):
            assert s.prompt_ids.tolist() == t.prompt_ids.tolist()
            assert (s.text, s.audio, s.stop_reason, s.source_time) == (t.text, t.audio, t.stop_reason, t.source_time)
            assert (s.ids.dtype, s.logprobs.dtype, s.codes) == (t.ids.dtype, t.logprobs.dtype, None)


def test_paused_answers_go_on_with_other_weights(fresh: VLLMEngine, policy: AudioPolicy, samples: list[Sample]) -> None:
    """With the same weights a greedy answer is the ordinary one; with others each part has its own log-probs."""
    whole = fresh.generate([Request(s, greedy=True) for s in samples])
    asked = [Request(s, greedy=True, token_limit=5) for s in samples]
    first = fresh.generate(asked)
    assert {(len(r.segments[0].ids), r.segments[0].stop_reason) for r in first} == {(5, "paused")}
    again = [replace(r, token_limit=None, paused=(p,)) for r, p in zip(asked, first, strict=True)]
    assert ids(fresh.generate(again)) == ids(whole)
    sampled = fresh.generate([replace(r, greedy=False, n=2) for r in asked])
    before = forced(policy, sampled)
    shake(policy, 3)
    fresh.update_weights(served_weights(policy), 1)
    pairs = [tuple(sampled[2 * i : 2 * i + 2]) for i in range(len(samples))]
    ended = fresh.generate([Request(s, 2, paused=pair) for s, pair in zip(samples, pairs, strict=True)])
    now = forced(policy, ended).split([len(r.segments[0].ids) for r in ended])
    for k, (r, old) in enumerate(zip(ended, before.split(5), strict=True)):
        segment = r.segments[0]
        assert (r.index, segment.ids[:5].tolist()) == (k % 2, sampled[k].segments[0].ids.tolist())
        assert segment.policy_versions is not None
        assert segment.policy_versions.tolist() == [0] * 5 + [1] * (len(segment.ids) - 5)
        torch.testing.assert_close(segment.logprobs[:5], old, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(segment.logprobs[5:], now[k][5:], atol=TOLERANCE, rtol=0)
    assert len({tuple(x) for x in ids(ended)}) == len(ended)


def test_a_stop_string_across_the_pause_ends_the_answer(fresh: VLLMEngine, samples: list[Sample]) -> None:
    whole = fresh.generate([Request(samples[0], greedy=True)])[0].segments[0]
    texts = [fresh._policy.decode(whole.ids[:k]) for k in range(len(whole.ids) + 1)]
    end = next(k for k in range(3, len(texts)) if len(texts[k]) > len(texts[k - 2]) > len(texts[k - 3]))
    fresh.sampling = replace(fresh.sampling, stop=(texts[end][len(texts[end - 3]) :],))
    first = fresh.generate([Request(samples[0], greedy=True, token_limit=end - 1)])
    (ended,) = fresh.generate([Request(samples[0], greedy=True, paused=tuple(first))])
    assert (ended.segments[0].stop_reason, ended.segments[0].ids.tolist()) == ("stop", whole.ids[:end].tolist())


def test_an_unknown_log_prob_after_the_pause_stays_unknown(
    fresh: VLLMEngine, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = fresh.generate([Request(samples[0], greedy=True)])
    first = fresh.generate([Request(samples[0], greedy=True, token_limit=5)])
    step = fresh._llm.step

    def without_the_first() -> Any:
        outputs = step()
        for answer in (out.outputs[0] for out in outputs if out.finished):
            answer.logprobs[0][answer.token_ids[0]].logprob = None
        return outputs

    monkeypatch.setattr(fresh._llm, "step", without_the_first)
    (ended,) = fresh.generate([Request(samples[0], greedy=True, paused=tuple(first))])
    assert ids([ended]) == ids([whole])
    assert ended.segments[0].logprobs.isnan().nonzero().flatten().tolist() == [5]


def test_a_rollout_depends_on_its_seed_and_not_on_its_batch(fresh: VLLMEngine, samples: list[Sample]) -> None:
    together = ids(fresh.generate(requests(samples, n=3)))
    assert [x for r in requests(samples, n=3) for x in ids(fresh.generate([r]))] == together
    assert ids(fresh.generate(requests(samples, n=3, seed=1))) != together
    assert len({tuple(x) for x in together[:3]}) == 3
    fresh._llm.reset_prefix_cache()
    assert ids(fresh.generate(requests(samples, n=3))) == together


@pytest.mark.parametrize("filters", [{"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.5}])
def test_log_probs_are_those_of_the_sampled_distribution(
    fresh: VLLMEngine, policy: AudioPolicy, samples: list[Sample], filters: dict[str, Any]
) -> None:
    fresh.sampling = SamplingConfig(max_new_tokens=1, **filters)
    rollouts = fresh.generate(requests(samples[:1], n=40))
    batch = pack_experiences([Experience.from_rollout(rollouts[0])])
    with torch.no_grad():
        logits = policy.backbone.head(policy.model)(policy.predicting_hidden(batch))
    wanted = filtered_logprobs(logits, fresh.sampling)[0, torch.tensor(ids(rollouts))[:, 0]]
    assert len(set(wanted.tolist())) > 1
    torch.testing.assert_close(logprobs(rollouts), wanted, atol=TOLERANCE, rtol=0)
    plain = logits.log_softmax(-1)[0, torch.tensor(ids(rollouts))[:, 0]]
    assert (plain - wanted).abs().max() > 100 * TOLERANCE


def test_stop_strings_stay_and_length_ends(fresh: VLLMEngine, policy: AudioPolicy, samples: list[Sample]) -> None:
    fresh.sampling = SamplingConfig(max_new_tokens=30)
    free = fresh.generate(requests(samples[:1], n=6))
    assert any(r.segments[0].stop_reason == "length" and r.num_sampled == 30 for r in free)
    printable = next(t for r in free for t in r.text if t.isascii() and t.isalnum())
    fresh.sampling = SamplingConfig(max_new_tokens=30, stop=(printable,))
    stopped = fresh.generate(requests(samples[:1], n=6))
    assert any(r.segments[0].stop_reason == "stop" for r in stopped)
    for a, b in zip(free, stopped, strict=True):
        if printable in a.text:
            assert b.segments[0].stop_reason == "stop" and printable in b.text
            assert b.segments[0].ids.tolist() == a.segments[0].ids[: b.num_sampled].tolist()
            assert printable not in policy.decode(b.segments[0].ids[:-1])
        else:
            assert ids([a]) == ids([b])


@pytest.mark.parametrize("context", [0.0, 0.4])
def test_streams_turn_by_turn(
    family: None, fresh: VLLMEngine, policy: AudioPolicy, speech: list[Utterance], context: float
) -> None:
    """Chunks of audio between what was written; with a context the tower hears more than it gives tokens for."""
    fresh.sampling = SamplingConfig(max_new_tokens=5)
    both = [stream(speech, "short", context, turns=2), stream(speech, "long", context, turns=4)]
    rollouts = fresh.generate(requests(both, n=2))
    assert [len(r.segments) for r in rollouts] == [2, 2, 4, 4]
    torch.testing.assert_close(logprobs(rollouts), forced(policy, rollouts), atol=TOLERANCE, rtol=0)
    assert ids(fresh.generate(requests(both[1:], n=2))) == ids(rollouts[2:])
    longer = fresh.generate(requests([stream(speech, "long", context, turns=3)], n=2))
    assert ids(longer) == [x for r in rollouts[2:] for x in ids([r])[:3]]  # nothing is heard before its time
    times = [(s.source_time or 0.0, s.emit_time or 0.0) for s in rollouts[2].segments]
    assert times == sorted(times) and all(heard < emitted for heard, emitted in times)


def test_placeholders_that_the_policy_wrote_itself_are_tokens(
    fresh: VLLMEngine, policy: AudioPolicy, speech: list[Utterance]
) -> None:
    with torch.no_grad():
        head = policy.model.lm_head.weight
        head[policy.audio_token_id] = head.abs().mean() * 30 * torch.sign(head[policy.audio_token_id])
    fresh.update_weights(served_weights(policy), 1)
    fresh.sampling = SamplingConfig(max_new_tokens=6)
    rollouts = fresh.generate(requests([stream(speech)], n=6))
    assert any(policy.audio_token_id in x for r in rollouts for x in ids([r])[:-1])
    torch.testing.assert_close(logprobs(rollouts), forced(policy, rollouts), atol=TOLERANCE, rtol=0)


def test_a_low_rank_adapter_is_merged(family: None, folder: Path, fresh: VLLMEngine, samples: list[Sample]) -> None:
    policy = load_policy(folder, ModelConfig(lora=LoraConfig(rank=4, target_modules=("q_proj", "down_proj"))))
    shake(policy, 5)
    fresh.update_weights(served_weights(policy), 1)
    rollouts = fresh.generate(requests(samples))
    torch.testing.assert_close(logprobs(rollouts), forced(policy, rollouts), atol=TOLERANCE, rtol=0)
    with policy.adapter.disable_adapter():
        assert (forced(policy, rollouts) - logprobs(rollouts)).abs().max() > 100 * TOLERANCE


def test_weights_that_are_not_sent_stay(
    family: None, fresh: VLLMEngine, policy: AudioPolicy, samples: list[Sample]
) -> None:
    shake(policy, 3)
    rest = {n: p.clone() for n, p in policy.weights().items()}
    fresh.update_weights(served_weights(policy), 1)
    shake(policy, 4)
    sent = {n: p for n, p in policy.weights().items() if "self_attn" in n or "tower" in n}
    policy.load_weights({n: p for n, p in rest.items() if n not in sent})
    fresh.update_weights(sent, 2)
    rollouts = fresh.generate(requests(samples))
    torch.testing.assert_close(logprobs(rollouts), forced(policy, rollouts), atol=TOLERANCE, rtol=0)


def test_weights_that_do_not_fit_are_refused_and_named(
    fresh: VLLMEngine, policy: AudioPolicy, samples: list[Sample]
) -> None:
    weights = dict(served_weights(policy))
    name = "model.layers.1.self_attn.k_proj.weight"
    for wrong, message in (
        (
            {**weights, "model.layers.9.mlp.up_proj.weight": weights[name]},
            r"'model.layers.9.mlp.up_proj.weight' is not in",
        ),
        ({**weights, name: weights[name][:, :-1]}, rf"'{name}' has another shape"),
        ({n: w for n, w in weights.items() if n != name}, rf"'{name}' is missing"),
        (_broken_off(weights), "the line is cut"),
    ):
        with pytest.raises(ValueError, match=message):
            fresh.update_weights(wrong, 7)
        with pytest.raises(RuntimeError, match="an update to version 7 was broken off"):
            fresh.generate(requests(samples))
        assert fresh.policy_version == 0
    fresh.update_weights(weights, 8)
    rollouts = fresh.generate(requests(samples))
    torch.testing.assert_close(logprobs(rollouts), forced(policy, rollouts), atol=TOLERANCE, rtol=0)


def _broken_off(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from list(weights.items())[:9]
    raise ValueError("the line is cut")


def test_what_vllm_fuses_comes_together() -> None:
    names = ["l.q_proj.weight", "l.k_proj.weight", "l.v_proj.weight", "l.o_proj.weight", "norm.weight"]
    check_together(names[:3], names)
    check_together(["l.o_proj.weight"], names)
    with pytest.raises(ValueError, match=r"'l.v_proj.weight' is missing"):
        check_together(names[:2], names)
    experts = ["l.mlp.gate.weight", "l.mlp.experts.gate_up_proj", "l.mlp.experts.down_proj"]
    check_together(experts[:1], experts)
    with pytest.raises(ValueError, match=r"'l.mlp.experts.down_proj' is missing"):
        check_together(experts[:2], experts)


def test_what_it_does_not_serve_is_refused(
    folder: Path, fresh: VLLMEngine, speech: list[Utterance], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dualize(qwen_omni.tiny(TEXTS, hidden=64, layers=1, whisper=False), 2, 16).save(tmp_path / "speaks")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "voxtral"}')
    with pytest.raises(ValueError, match="no model that writes speech; take the engine hf"):
        VLLMEngine(tmp_path / "speaks")
    with pytest.raises(ValueError, match=r"does not serve model_type 'voxtral' here .*; take the engine hf"):
        VLLMEngine(tmp_path / "other")
    with pytest.raises(ValueError, match="follows no schedule"):
        fresh.generate([Request(stream(speech), schedule=object())])  # type: ignore[arg-type]
    monkeypatch.setattr("audiorl.rollout.vllm.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=re.escape(f"{install('gpu')}; without a GPU {install('rollout-cpu')}")):
        VLLMEngine(folder)


def question(text: str) -> Sample:
    return Sample(text[:5], (Message("user", (text,)),))


def test_a_text_decoder(tmp_path: Path) -> None:
    """After numba, whose library vLLM's search for kernels stumbles over. Then with too little room for its answers."""
    pytest.importorskip("llvmlite.binding")
    policy = lively(text.tiny(TEXTS, hidden=128, layers=2, vocab_size=400))
    policy.save(tmp_path)
    engine = VLLMEngine(tmp_path, SamplingConfig(max_new_tokens=8), VLLMConfig(max_model_len=256, kv_cache_mb=16))
    try:
        for version in (1, 2):
            rollouts = engine.generate(requests([question("Why?")], n=3))
            torch.testing.assert_close(logprobs(rollouts), forced(policy, rollouts), atol=TOLERANCE, rtol=0)
            shake(policy, version)
            engine.update_weights(policy.weights(), version)
        long = next(q for q in (question("Why?" * k) for k in range(256)) if len(policy.prompt(q)) > 250)
        room = 256 - len(policy.prompt(long))
        (whole,) = engine.generate([Request(long, greedy=True)])
        assert (whole.num_sampled, whole.segments[0].stop_reason) == (room, "length")
        for limit, reason in ((1, "paused"), (room - 1, "paused"), (room, "length"), (8, "length")):
            first = engine.generate([Request(long, greedy=True, token_limit=limit)])
            assert (first[0].num_sampled, first[0].segments[0].stop_reason) == (min(limit, room), reason)
            if reason == "paused":
                (ended,) = engine.generate([Request(long, greedy=True, paused=tuple(first))])
                assert (ids([ended]), ended.segments[0].stop_reason) == (ids([whole]), "length")
        with pytest.raises(ValueError, match=r"^sample 'Whole': .* longer than the maximum model length of 256"):
            engine.generate(requests([question("Why?"), question("Whole pages. " * 40)]))
        assert not engine._llm.has_unfinished_requests(), "those before it are not left in the engine"
    finally:
        engine.close()


def test_another_clip_gives_other_log_probs_to_its_own_prompt(
    family: None, fresh: VLLMEngine, samples: list[Sample]
) -> None:
    fresh.sampling = SamplingConfig(max_new_tokens=1, temperature=0)
    clips = [AudioClip(array=s.audio[0].load()[:14_400], sample_rate=16_000) for s in samples]

    def run(sounds: Sequence[AudioClip]) -> list[float]:
        asked = [
            replace(s, messages=(Message("user", (clip, "What is said?")),))
            for s, clip in zip(samples, sounds, strict=True)
        ]
        return [float(r.segments[0].logprobs[0]) for r in fresh.generate([Request(s) for s in asked])]

    before = run(clips)
    swapped = run([clips[1], clips[0], clips[2]])
    assert swapped == pytest.approx([before[1], before[0], before[2]], abs=1e-5)
    assert abs(before[0] - before[1]) > 1e-4
