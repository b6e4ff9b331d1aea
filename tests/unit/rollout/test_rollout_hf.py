"""The transformers engine: what it samples, and under which log-probs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, SamplingConfig
from audiorl.models import AudioPolicy
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.samplers import choose, filtered_logprobs
from audiorl.types import Message, Sample
from tests.conftest import make_text
from tests.support.decoders import of_class
from tests.support.packing import with_audio
from tests.support.rollouts import ending, forced, ids, logprobs, requests


def decoder_calls(policy: AudioPolicy) -> list[tuple[int, int]]:
    """(rows, tokens of a row) of every forward pass of the decoder from now on."""
    calls: list[tuple[int, int]] = []
    policy.backbone.decoder(policy.model).register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(tuple(kwargs["inputs_embeds"].shape[:2])), with_kwargs=True
    )
    return calls


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollout_logprobs_are_the_trainers(policy: AudioPolicy, samples: list[Sample], temperature: float) -> None:
    rollouts = HFEngine(policy, SamplingConfig(temperature=temperature, max_new_tokens=12)).generate(
        requests(samples, 3)
    )
    torch.testing.assert_close(forced(policy, rollouts, temperature), logprobs(rollouts), atol=1e-4, rtol=0)
    assert [r.index for r in rollouts] == [0, 1, 2] * 3


def test_a_rollout_depends_on_its_seed_and_not_on_its_batch(policy: AudioPolicy, samples: list[Sample]) -> None:
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=10))
    together = ids(engine.generate(requests(samples, 3)))
    assert together == [x for r in requests(samples, 3) for x in ids(engine.generate([r]))]
    small = HFEngine(policy, SamplingConfig(max_new_tokens=10, max_batch_tokens=64))
    assert ids(small.generate(requests(samples, 3))) == together
    assert ids(engine.generate(requests(samples, 3, seed=1))) != together
    assert len({tuple(x) for x in together[:3]}) == 3  # the samples of one prompt differ


def test_a_greedy_request_is_temperature_zero_decoding(policy: AudioPolicy, samples: list[Sample]) -> None:
    """Also beside sampled rows, which stay what they would be without it."""
    hot = HFEngine(policy, SamplingConfig(temperature=1.3, top_p=0.9, max_new_tokens=8))
    cold = HFEngine(policy, SamplingConfig(temperature=0, max_new_tokens=8))

    expected = ids(cold.generate([Request(s) for s in samples]))
    assert ids(hot.generate([Request(s, greedy=True, seed=7) for s in samples])) == expected
    sampled = ids(hot.generate([Request(s, 2, seed=1) for s in samples]))
    mixed = hot.generate([x for s in samples for x in (Request(s, 2, seed=1), Request(s, greedy=True))])
    assert ids(mixed[2::3]) == expected
    assert [x for i, x in enumerate(ids(mixed)) if i % 3 < 2] == sampled
    assert sampled[0] != expected[0]


def test_sampling_hears_the_right_audio(policy: AudioPolicy, samples: list[Sample]) -> None:
    """In one batch, another waveform changes the log-probs of its own prompt and of no other; so does a swap."""
    clips = [AudioClip(array=s.audio[0].load()[:14_400], sample_rate=16_000) for s in samples]
    engine = HFEngine(policy, SamplingConfig(temperature=0, max_new_tokens=1))

    def run(sounds: list[AudioClip]) -> list[float]:
        asked = [with_audio(s, c) for s, c in zip(samples, sounds, strict=True)]
        return [float(r.segments[0].logprobs[0]) for r in engine.generate([Request(s) for s in asked])]

    before = run(clips)
    noise = np.random.default_rng(0).normal(0, 0.1, 14_400).astype(np.float32)
    louder = AudioClip(array=clips[0].array + noise, sample_rate=16_000)
    one = run([louder, clips[1], clips[2]])
    assert abs(one[0] - before[0]) > 1e-5 and one[1:] == pytest.approx(before[1:], abs=1e-6)
    swapped = run([clips[1], clips[0], clips[2]])
    assert abs(swapped[0] - before[0]) > 1e-5 and abs(swapped[1] - before[1]) > 1e-5
    assert swapped[2] == pytest.approx(before[2], abs=1e-6)


def test_rows_that_end_make_room_for_the_next_prompts() -> None:
    """One loop, though the budget holds a few requests at a time: shorter than the loops one after the other."""
    policy = ending(make_text(), 2.5)
    asked = [Request(Sample(f"{i}", (Message("user", ("Who? " * (1 + i % 4),)),)), 3, seed=2) for i in range(12)]
    calls = decoder_calls(policy)
    everything = HFEngine(policy, SamplingConfig(max_new_tokens=48)).generate(asked)
    assert sum(length > 1 for _, length in calls) == 1
    room = max(len(policy.prompt(r.sample)) for r in asked) + 3 * 48  # a prompt and its rows
    calls.clear()
    in_turns = HFEngine(policy, SamplingConfig(max_new_tokens=48, max_batch_tokens=4 * room)).generate(asked)
    assert ids(in_turns) == ids(everything)
    torch.testing.assert_close(logprobs(in_turns), logprobs(everything), atol=1e-5, rtol=0)
    steps = [rows for rows, length in calls if length == 1]
    assert max(steps) <= 15 and sum(length > 1 for _, length in calls) > 2
    alone = [max(r.num_sampled for r in in_turns[i : i + 12]) for i in range(0, 36, 12)]
    assert len(steps) < 0.85 * sum(alone)


SPARSE = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32, shared_expert_intermediate_size=32)
LINEAR = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, **SPARSE
)


@pytest.mark.parametrize(
    ("model_class", "config_class", "options"),
    [
        (Qwen2ForCausalLM, Qwen2Config, dict(use_sliding_window=True, sliding_window=8, max_window_layers=2)),
        (Qwen3NextForCausalLM, Qwen3NextConfig, LINEAR),
    ],
    ids=["sliding windows", "linear attention"],
)
def test_layers_that_keep_something_else(model_class: Any, config_class: Any, options: dict[str, Any]) -> None:
    """Their rows begin together, and an answer does not depend on its batch either."""

    def config(**common: Any) -> Any:
        return config_class(**common | options | {"num_hidden_layers": 4})

    policy = of_class(model_class, config, tied=False)  # type: ignore[arg-type]
    asked = [Request(Sample(f"{i}", (Message("user", ("Who? " * (1 + i % 3),)),)), 2, seed=2) for i in range(5)]
    together = HFEngine(policy, SamplingConfig(max_new_tokens=20)).generate(asked)
    room = max(len(policy.prompt(r.sample)) for r in asked) + 20
    for budget in (1, 5 * room):
        engine = HFEngine(policy, SamplingConfig(max_new_tokens=20, max_batch_tokens=budget))
        assert ids(engine.generate(asked)) == ids(together)


def test_stop_strings_and_length(policy: AudioPolicy, samples: list[Sample]) -> None:
    free = HFEngine(policy, SamplingConfig(max_new_tokens=30)).generate(requests(samples[:1], n=4))
    assert any(r.segments[0].stop_reason == "length" and r.num_sampled == 30 for r in free)
    printable = next(t for r in free for t in r.text if t.isascii() and t.isalnum())
    stopped = HFEngine(policy, SamplingConfig(max_new_tokens=30, stop=(printable,))).generate(
        requests(samples[:1], n=4)
    )
    for a, b in zip(free, stopped, strict=True):
        if printable in a.text:
            assert b.segments[0].stop_reason == "stop" and b.text.count(printable) >= 1
            assert b.segments[0].ids.tolist() == a.segments[0].ids[: b.num_sampled].tolist()
            assert printable not in policy.decode(b.segments[0].ids[:-1])


def test_filters_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    top2 = filtered_logprobs(logits, SamplingConfig(top_k=2)).exp()
    torch.testing.assert_close(top2, torch.tensor([[0.625, 0.375, 0.0, 0.0]]))
    nucleus = filtered_logprobs(logits, SamplingConfig(top_p=0.6)).exp()  # 0.5 < 0.6: the second token crosses it
    torch.testing.assert_close(nucleus, torch.tensor([[0.625, 0.375, 0.0, 0.0]]))
    cold = filtered_logprobs(logits, SamplingConfig(temperature=0.5)).exp()
    torch.testing.assert_close(cold, torch.tensor([[0.25, 0.09, 0.0225, 0.0025]]) / 0.365)


def test_choose_inverts_the_distribution() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.2, 0.0]])
    picks = [
        int(choose(probs.log(), torch.tensor([u]), torch.tensor([False])))
        for u in (0.0, 0.49, 0.51, 0.79, 0.81, 0.999999)
    ]
    assert picks == [1, 1, 3, 3, 4, 4]
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = choose(probs.log().expand(1000, -1), grid, torch.zeros(1000, dtype=torch.bool))
    assert torch.bincount(drawn, minlength=6).tolist() == [0, 500, 0, 300, 200, 0]


def test_rollouts_work_while_training_with_gradient_checkpointing(make_policy, samples: list[Sample]) -> None:
    plain = HFEngine(make_policy(), SamplingConfig(max_new_tokens=6)).generate(requests(samples[:1]))
    policy = make_policy(ModelConfig(gradient_checkpointing=True))
    assert ids(HFEngine(policy, SamplingConfig(max_new_tokens=6)).generate(requests(samples[:1]))) == ids(plain)
    assert policy.model.training


def test_sampling_options() -> None:
    for name, value in {
        "temperature": -1,
        "top_p": 0,
        "top_k": -2,
        "max_new_tokens": 0,
        "max_frames": 0,
        "audio_temperature": -1,
        "audio_top_p": 2,
        "audio_top_k": -1,
        "ras_window": -1,
    }.items():
        with pytest.raises(ValueError, match=f"sampling.{name}"):
            SamplingConfig(**{name: value})  # type: ignore[arg-type]
    codes = SamplingConfig(temperature=0.7, top_k=3, audio_top_k=50, audio_top_p=0.95).of_codes()
    assert (codes.temperature, codes.top_k, codes.top_p) == (0.7, 50, 0.95)
    assert SamplingConfig(temperature=0.7, audio_temperature=0.0).of_codes().temperature == 0.0
