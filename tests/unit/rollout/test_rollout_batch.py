"""Prompts that are held once for all their samples give the rollouts of prompts in every row, in less memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from audiorl.config import ModelConfig, SamplingConfig
from audiorl.models import AudioPolicy
from audiorl.protocols import Request
from audiorl.rollout import hf
from audiorl.rollout.batch import GroupBatch, RowBatch
from audiorl.rollout.hf import HFEngine
from audiorl.types import Message, Rollout, Sample
from tests.conftest import (
    Make,
    make_dual_omni,
    make_omni,
    make_qwen2_audio,
    make_qwen3_omni,
    make_text,
    make_whisper,
)
from tests.support.decoders import FAMILIES
from tests.support.rollouts import ending, ids, logprobs


def same(one: Sequence[Rollout], other: Sequence[Rollout]) -> None:
    assert ids(one) == ids(other)
    torch.testing.assert_close(logprobs(one), logprobs(other), atol=1e-5, rtol=0)


def in_rows(generate: Callable[[], list[Rollout]]) -> list[Rollout]:
    """With every prompt held in each of its rows."""
    with patch.object(hf, "new_batch", lambda policy, *_: RowBatch(policy)):
        return generate()


def questions(lengths: Sequence[int], n: int = 3) -> list[Request]:
    return [Request(Sample(f"{i}", (Message("user", ("Who? " * k,)),)), n, seed=2) for i, k in enumerate(lengths)]


def cache_tokens(policy: AudioPolicy) -> list[int]:
    """The columns that the cache holds in every step from now on, of all prompts and rows together."""
    sizes: list[int] = []

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["inputs_embeds"].shape[1] == 1:
            held = [kwargs["past_key_values"].layers[0].buffers[0], *kwargs["prompts"].keys[:1]]
            sizes.append(sum(x.shape[0] * x.shape[2] for x in held))

    policy.backbone.decoder(policy.model).register_forward_pre_hook(hook, with_kwargs=True)
    return sizes


@pytest.mark.parametrize(
    "make", [make_omni, make_qwen2_audio, make_qwen3_omni, make_dual_omni], ids=lambda m: m.__name__[5:]
)
def test_answers_to_audio(make: Make, samples: list[Sample]) -> None:
    policy = make()
    asked = [Request(s, 3, seed=1) for s in samples]
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=10, max_frames=6))
    same(engine.generate(asked), in_rows(lambda: engine.generate(asked)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_text_decoders(family: str, autocast: bool) -> None:
    """Rows end and prompts of other lengths join: groups of different sizes, prompts that leave, columns that vary."""
    policy = ending(FAMILIES[family](), 2.5)
    asked = questions([1 + 2 * (i % 4) for i in range(10)])
    room = 10 * max(len(policy.prompt(r.sample)) for r in asked)
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=30, max_batch_tokens=room))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        rollouts = engine.generate(asked)
        rows = in_rows(lambda: engine.generate(asked))
    assert len({r.num_sampled for r in rollouts}) > 5
    if not autocast:
        same(rollouts, rows)
    else:  # rounding may change a token, and with it all that follow
        first = [[float(r.segments[0].logprobs[0]) for r in side] for side in (rollouts, rows)]
        assert first[0] == pytest.approx(first[1], abs=0.05)


def test_the_budget_counts_a_prompt_once_and_is_kept() -> None:
    """8 samples of 8 prompts that take all their tokens, in one loop, where prompts in every row need more."""
    policy = ending(make_text(), -1e9)
    asked = questions([30] * 8, n=8)
    prompt = len(policy.prompt(asked[0].sample))
    budget = 8 * prompt + 64 * 20
    assert budget < 64 * (prompt + 20) / 2
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=20, max_batch_tokens=budget))
    sizes = cache_tokens(policy)
    rollouts = engine.generate(asked)
    assert len(sizes) == 19 and max(sizes) == budget
    assert all(r.num_sampled == 20 for r in rollouts)
    sizes.clear()
    same(HFEngine(policy, SamplingConfig(max_new_tokens=20, max_batch_tokens=budget - 1)).generate(asked), rollouts)
    assert len(sizes) == 2 * 19 and max(sizes) < budget


def test_a_paused_answer_continues_next_to_new_groups() -> None:
    policy = ending(make_text(), -1e9)
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=16))
    whole = engine.generate(questions([3], n=1))
    paused = engine.generate([replace(questions([3], n=1)[0], token_limit=5)])
    assert [r.segments[0].stop_reason for r in paused] == ["paused"]
    asked = [replace(questions([3], n=1)[0], paused=tuple(paused)), *questions([2, 5], n=4)]
    with patch.object(GroupBatch, "forward", autospec=True, side_effect=GroupBatch.forward) as steps:
        rollouts = engine.generate(asked)
    assert steps.call_count == 15
    same(rollouts[:1], whole)
    same(rollouts, in_rows(lambda: engine.generate(asked)))


def test_prompts_are_shared_where_they_can_be() -> None:
    policy = make_text()
    for samples in ([2], [2, 2], [8, 1], [4, 4, 1, 1]):
        assert isinstance(hf.new_batch(policy, samples), GroupBatch)
    for samples in ([], [1], [1, 1], [8, 1, 1, 1]):
        assert isinstance(hf.new_batch(policy, samples), RowBatch)
    for other in (make_text(ModelConfig(attention="eager")), make_whisper()):
        assert isinstance(hf.new_batch(other, [2, 2]), RowBatch)
