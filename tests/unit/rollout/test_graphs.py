"""Decoding steps that are captured: the same tokens in every schedule, and steps that a CUDA graph can hold.

There is no GPU here. `Replayed` takes the place of CUDA graphs: it runs a step again, and compares its operators with
those that were captured: the same ones, of the same shapes, on the same memory, and none that waits for the device or
copies from the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from audiorl.algos.prompt_attention import PromptAttention
from audiorl.config import SamplingConfig
from audiorl.models import AudioPolicy
from audiorl.models.families import text
from audiorl.protocols import Request
from audiorl.rollout import graphs
from audiorl.rollout.hf import HFEngine
from audiorl.types import Message, Sample
from tests.conftest import TEXTS, Make, make_dual_omni, make_omni, make_qwen2_audio, make_text, make_whisper
from tests.support.decoders import FAMILIES, of_class
from tests.support.rollouts import ending, ids, logprobs

aten = torch.ops.aten
FROM_HOST = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.unique_dim.default}


class Operators(TorchDispatchMode):
    """Lists what a step does: (operator, shapes and places of its tensors, other arguments)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.launches = 0
        self._made: dict[int, Tensor] = {}  # by storage; held, so that no address occurs twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in WAITS | FROM_HOST, f"{func} cannot be captured"
        leaves = tree_leaves((args, kwargs or {}))
        bools = [x for x in leaves if isinstance(x, Tensor) and x.dtype == torch.bool]
        assert func not in (aten.index.Tensor, aten.index_put_.default) or not bools, "a mask as an index waits"
        self.seen.append((str(func), [self._described(x) for x in leaves]))
        out = func(*args, **(kwargs or {}))
        self.launches += not (func.is_view or func is aten._unsafe_view.default)
        given = {x.untyped_storage()._cdata for x in leaves if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                self._made[x.untyped_storage()._cdata] = x
        return out

    def _described(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        place = "made here" if x.untyped_storage()._cdata in self._made else x.data_ptr()
        return tuple(x.shape), x.stride(), str(x.dtype), place


class Replayed(graphs.GraphRecorder):
    """Runs a step again, and compares its operators with the first time."""

    def __init__(self) -> None:
        self.failed, self.captures, self.replays = False, 0, 0
        self.launches: list[int] = []

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        first: list[Any] = []
        self.captures += 1

        def replay() -> None:
            with Operators() as operators:
                run()
            first.append(operators.seen)
            self.launches.append(operators.launches)
            self.replays += 1
            assert operators.seen == first[0], "a replay would do something else"

        return replay


def engines(policy: AudioPolicy, sampling: SamplingConfig) -> tuple[HFEngine, HFEngine, Replayed]:
    """An engine that runs steps as they are, and one that captures them."""
    captured, recorder = HFEngine(policy, sampling), Replayed()
    captured._in_slots, captured._recorder = True, recorder
    return HFEngine(policy, sampling), captured, recorder


def question(i: int, words: int, n: int, limit: int | None = None) -> Request:
    return Request(Sample(f"{i}", (Message("user", ("Who? " * words,)),)), n, seed=2, token_limit=limit)


def make_windows() -> AudioPolicy:
    size = dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    return of_class(Qwen2ForCausalLM, partial(Qwen2Config, **size), tied=True)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4), st.sampled_from([None, None, 3])), min_size=1, max_size=8),
    st.sampled_from([2.0, 2.5, 4.0]),
    st.integers(2, 12),
    st.sampled_from(sorted(FAMILIES)),
    st.sampled_from([0, 5]),
)
def test_the_same_tokens_in_every_schedule(
    asked: Sequence[tuple[int, int, int | None]], ends: float, room: int, family: str, top_k: int
) -> None:
    """Prompts join as others end, rows leave, answers are paused and go on, groups are shared or not."""
    policy = ending(FAMILIES[family](), ends)
    requests = [question(i, *one) for i, one in enumerate(asked)]
    longest = max(len(policy.prompt(r.sample)) for r in requests)
    sampling = SamplingConfig(max_new_tokens=14, top_k=top_k, max_batch_tokens=room * (longest + 14))
    plain, captured, _ = engines(policy, sampling)
    expected, found = plain.generate(requests), captured.generate(requests)
    assert ids(found) == ids(expected)
    torch.testing.assert_close(logprobs(found), logprobs(expected), atol=1e-5, rtol=0)
    assert [r.segments[-1].stop_reason for r in found] == [r.segments[-1].stop_reason for r in expected]
    paused = [r for r in expected if r.segments[0].stop_reason == "paused"]
    again = [Request(r.sample, 1, seed=2, paused=(r,)) for r in paused]
    assert ids(captured.generate(again)) == ids(plain.generate(again))


@pytest.mark.parametrize("make", [make_omni, make_qwen2_audio], ids=lambda m: m.__name__[5:])
@pytest.mark.parametrize("n", [1, 3], ids=["rows", "groups"])
def test_answers_to_audio(make: Make, n: int, samples: list[Sample]) -> None:
    asked = [Request(s, n, seed=1) for s in samples]
    plain, captured, recorder = engines(make(), SamplingConfig(max_new_tokens=10))
    assert ids(captured.generate(asked)) == ids(plain.generate(asked))
    assert recorder.captures and recorder.replays > 2 * recorder.captures


def test_a_step_is_started_before_the_one_before_is_read() -> None:
    policy = ending(make_text(), -1e9)
    _, captured, recorder = engines(policy, SamplingConfig(max_new_tokens=12))
    read: list[tuple[int, int]] = []
    captured.on_step = lambda buffers: read.append((len(buffers[0].ids), recorder.replays))
    captured.generate([question(0, 2, 3)])
    # Token 1 comes with the prompt, 2 is run as it is; when token k was read, token k + 1 had been started.
    assert read[2:10] == [(k, k - 1) for k in range(3, 11)]
    assert recorder.captures == 3, "of 4, 8 and 12 columns"


def test_what_cannot_be_captured_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(Replayed):
        def capture(self, run: Callable[[], None]) -> Callable[[], None]:
            self.captures += 1
            raise RuntimeError("operation not permitted when stream is capturing\nlong trace")

    policy = ending(make_text(), 2.5)
    plain, captured, _ = engines(policy, SamplingConfig(max_new_tokens=12))
    captured._recorder = recorder = Refusing()
    asked = [question(i, 2, 3) for i in range(4)]
    with caplog.at_level(logging.WARNING):
        assert ids(captured.generate(asked)) == ids(captured.generate(asked)) == ids(plain.generate(asked))
    assert recorder.captures == 1
    (said,) = [r.message for r in caplog.records if "CUDA graphs" in r.message]
    assert said.endswith("several times as slowly: operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    "make", [make_whisper, make_dual_omni, make_windows], ids=["cross-attention", "speech", "windows"]
)
def test_other_batches_are_not_captured(make: Make, samples: list[Sample]) -> None:
    policy = make()
    asked = [Request(s, 2, seed=1) for s in samples] if policy.extractor else [question(0, 3, 2)]
    plain, captured, recorder = engines(policy, SamplingConfig(max_new_tokens=6, max_frames=4))
    assert ids(captured.generate(asked)) == ids(plain.generate(asked))
    assert not recorder.captures


def test_weights_that_change_between_calls() -> None:
    policy = ending(text.tiny(TEXTS, hidden=32, layers=1, vocab_size=400), 2.0)
    plain, captured, _ = engines(policy, SamplingConfig(max_new_tokens=20))
    asked = [question(i, 1 + i, 3) for i in range(4)]
    before = captured.generate(asked)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.5)
    assert ids(captured.generate(asked)) == ids(plain.generate(asked)) != ids(before)


def test_the_budget_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a layer for a token of all rows, counted as operators that are no views."""
    monkeypatch.setattr(PromptAttention, "_two_parts", PromptAttention._one_softmax)  # as on a GPU
    launches = []
    for layers in (1, 2):
        policy = ending(text.tiny(TEXTS, hidden=32, layers=layers), -1e9)
        _, captured, recorder = engines(policy, SamplingConfig(max_new_tokens=8))
        captured.generate([question(i, 2, 4) for i in range(2)])
        launches.append(recorder.launches[-1])
    assert launches[1] - launches[0] <= 50, launches
