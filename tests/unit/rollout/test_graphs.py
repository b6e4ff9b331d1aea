"""Decoding steps that are captured: the same tokens in every schedule, and steps that a CUDA graph can hold.

There is no GPU here. `Replayed` takes the place of CUDA graphs: it runs a step again, and compares its operators with
those that were captured: the same ones, of the same shapes, on the same memory, and none that waits for the device or
copies from the host. The kernels run by torch's operators; Triton's own are interpreted, and compiled for a GPU.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from audiorl.config import LoraConfig, ModelConfig, SamplingConfig
from audiorl.models import AudioPolicy
from audiorl.models.families import text
from audiorl.protocols import Request
from audiorl.rollout import graphs, kernels, slots
from audiorl.rollout.hf import HFEngine
from audiorl.types import Message, Sample
from tests.conftest import (
    TEXTS,
    Make,
    make_dual_omni,
    make_omni,
    make_qwen2_audio,
    make_qwen3_omni,
    make_text,
    make_whisper,
)
from tests.support.decoders import FAMILIES, of_class
from tests.support.rollouts import ending, forced, ids, logprobs

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
        of_ours = kernels.LAUNCHES.get(func._schema.name.removeprefix("audiorl::"))
        self.launches += not (func.is_view or func is aten._unsafe_view.default) if of_ours is None else of_ours
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
    assert slots.takes_slots(policy)
    captured._in_slots, captured._recorder = True, recorder  # as on a GPU
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
    requests = [replace(question(i, *one), greedy=i == 1) for i, one in enumerate(asked)]
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


@pytest.mark.parametrize(
    "make",
    [
        make_qwen3_omni,
        partial(make_text, ModelConfig(lora=LoraConfig(rank=4))),
        partial(make_text, ModelConfig(autocast=True)),
    ],
    ids=["experts", "adapter", "autocast"],
)
def test_log_probs_are_the_trainers(make: Make) -> None:
    """Of steps that are not captured: on a CPU experts wait for what the router says."""
    policy = make()
    if policy.adapter is not None:
        torch.manual_seed(0)
        for name, weight in policy.trainable().items():
            torch.nn.init.normal_(weight, std=0.3 if ".lora_B." in name else 0.1)
    _, captured, _ = engines(policy, SamplingConfig(max_new_tokens=8))
    captured._recorder = None
    rollouts = captured.generate([question(i, 2 + i, 3) for i in range(2)])
    atol = 0.02 if policy.config.autocast else 1e-4
    torch.testing.assert_close(logprobs(rollouts), forced(policy, rollouts), atol=atol, rtol=0)


def test_a_step_is_started_before_the_one_before_is_read() -> None:
    policy = ending(make_text(), -1e9)
    _, captured, recorder = engines(policy, SamplingConfig(max_new_tokens=12))
    read: list[tuple[int, int]] = []
    captured.on_step = lambda buffers: read.append((len(buffers[0].ids), recorder.replays))
    captured.generate([question(0, 2, 3)])
    # Token 1 comes with the prompt, 2 is run as it is; when token k was read, token k + 1 had been started.
    assert read[2:10] == [(k, k - 1) for k in range(3, 11)]
    assert recorder.captures == 1


def test_one_graph_for_each_power_of_2_of_rows() -> None:
    """However often answers join and leave; the slots of those that are left are computed, and nobody's."""
    policy = ending(make_text(), 3.0)
    asked = [question(i, 1 + i % 5, 1 + i % 3) for i in range(30)]
    longest = max(len(policy.prompt(r.sample)) for r in asked)
    sampling = SamplingConfig(max_new_tokens=10, max_batch_tokens=9 * (longest + 10))
    plain, captured, recorder = engines(policy, sampling)
    joins: list[int] = []
    prefill = captured._prefill
    captured._prefill = lambda groups: joins.append(len(groups)) or prefill(groups)  # type: ignore[func-returns-value]
    assert ids(captured.generate(asked)) == ids(plain.generate(asked))
    assert len(joins) > 5 and 1 < recorder.captures <= 5 < recorder.replays, (joins, recorder.captures)


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


class Graph:
    """Walks through what `GraphRecorder` asks of torch.cuda; a capture that is broken cannot be ended."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def capture_begin(self, **kwargs: Any) -> None:
        self.calls.append("begin")

    def capture_end(self) -> None:
        self.calls.append("end")
        if self.broken:
            raise RuntimeError("the capture is not valid")

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        self.calls.append("replay")

    broken = False


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError("of a kernel")])
def test_what_happens_during_a_capture_is_what_is_raised(monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    """Ctrl-C ends the call: it is not taken for a step that cannot be captured."""
    made: list[Graph] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(Graph()) or made[-1])  # type: ignore[func-returns-value]
    waits = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: waits)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: waits)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    recorder = graphs.GraphRecorder(torch.device("cpu"))
    recorder.capture(lambda: None)()
    assert made[0].calls == ["begin", "end", "replay"]
    monkeypatch.setattr(Graph, "broken", True)

    def run() -> None:
        raise error

    with pytest.raises(error if error is KeyboardInterrupt else ValueError):
        recorder.capture(run)
    assert made[1].calls == ["begin", "end"]
    if error is KeyboardInterrupt:
        policy = make_text()
        _, captured, _ = engines(policy, SamplingConfig(max_new_tokens=6))
        captured._recorder = SimpleNamespace(failed=False, capture=lambda _: recorder.capture(run))  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            captured.generate([question(0, 2, 3)])


def test_a_cache_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """keys and values of 2 layers, 2 heads of 16 float32 numbers: 512 bytes a token."""
    _, captured, _ = engines(make_text(), SamplingConfig(max_new_tokens=100))
    monkeypatch.setattr(slots, "free_bytes", lambda device: 100_000)
    with pytest.raises(ValueError, match=r"sampling.max_batch_tokens: a cache of \d+ tokens .* at most 195 tokens fit"):
        captured.generate([question(0, 2, 3)])


@pytest.mark.parametrize(
    "make", [make_whisper, make_dual_omni, make_windows], ids=["cross-attention", "speech", "windows"]
)
def test_other_decoders_have_no_slots(make: Make) -> None:
    assert not slots.takes_slots(make())


def test_weights_that_change_between_calls() -> None:
    policy = ending(text.tiny(TEXTS, hidden=32, layers=1, vocab_size=400), 2.0)
    plain, captured, _ = engines(policy, SamplingConfig(max_new_tokens=20))
    asked = [question(i, 1 + i, 3) for i in range(4)]
    before = captured.generate(asked)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.mul_(1.5)
    assert ids(captured.generate(asked)) == ids(plain.generate(asked)) != ids(before)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_budget_of_launches(autocast: bool) -> None:
    """Kernels for a token of all rows, counted as operators that are no views: of a layer, and of what is around."""
    launches = []
    for layers in (1, 2):
        policy = ending(text.tiny(TEXTS, hidden=32, layers=layers, config=ModelConfig(autocast=autocast)), -1e9)
        _, captured, recorder = engines(policy, SamplingConfig(max_new_tokens=8))
        captured.generate([question(i, 2, 4) for i in range(2)])
        launches.append(recorder.launches[-1])
    of_layer = launches[1] - launches[0]
    assert of_layer == 11, launches
    assert launches[0] - of_layer <= 27 + 2 * autocast, launches  # it casts what goes in and what comes out


# -- Triton ------------------------------------------------------------------------------------------------------------


def test_kernels_that_do_not_run(caplog: pytest.LogCaptureFixture) -> None:
    """Here is no GPU, for which Triton would compile."""
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            kernels.check(torch.device("cpu"), torch.float32, 2, 16)
    (said,) = [r.message for r in caplog.records]
    assert said.startswith("decoding goes on with torch's operators, more slowly: ")
    assert kernels._on_gpu == kernels.BY_TORCH


INTERPRETED = """
import torch
from types import SimpleNamespace
from audiorl.rollout import kernels
from tests.unit.rollout import test_graphs as t

for dtype, heads, width in ((torch.float32, 3, 80), (torch.float32, 8, 16), (torch.float16, 2, 64)):
    far = kernels.differences(torch.device("cpu"), dtype, heads, width)
    assert max(far.values()) < (1e-5 if dtype == torch.float32 else 2e-3), (dtype, far)
ours, torch.ops.audiorl = torch.ops.audiorl, SimpleNamespace(**kernels.BY_TRITON)
plain, captured, _ = t.engines(t.ending(t.FAMILIES["qwen3-tied"](), 2.0), t.SamplingConfig(max_new_tokens=6))
captured._recorder = None
asked = [t.question(i, 3 + i, n) for i, n in enumerate((3, 1))]
assert t.ids(captured.generate(asked)) == t.ids(plain.generate(asked))
torch.ops.audiorl = ours
"""


@pytest.mark.slow
def test_kernels_interpreted() -> None:
    """Triton's interpreter runs a kernel in numpy. It does not multiply bfloat16, so float16 stands for it."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, env=environment, timeout=300)


@pytest.mark.slow
def test_kernels_compile_for_a_gpu(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """To machine code of an H100, at the sizes of Qwen2.5-Omni-3B; no more shared memory than a small GPU has."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    p, heads = "*bf16", dict(key_heads=2, heads=8, width=128, block_n=64, block_d=128, split_size=256)
    partial = dict(partial="*fp32", partial_lse="*fp32", scale="fp32", columns="i32", splits="i32", group="i32")
    cache = dict(query=p, query_row="i32", keys=p, values=p, lengths="*i64")
    rotated = dict(query=p, key=p, value=p, query_row="i32", key_row="i32", value_row="i32", turns=p)
    rotated |= dict(query_norm=p, key_norm=p, eps="fp32", keys=p, values=p, written="*i64", columns="i32")
    norm = dict(width=2048, block=2048, adds=True, kind=kernels.tl.bfloat16)
    for kernel, types, constants in (
        (kernels._prompts_kernel, {**cache, "slots": "*i64", **partial}, {**heads, "block_m": 64}),
        (
            kernels._rows_kernel,
            {**cache, "places": "*i64", "written": "*i64", "out_pointer": p, **partial},
            {**heads, "block_m": 16},
        ),
        (
            kernels._rotary_write_kernel,
            rotated,
            dict(query_heads=16, key_heads=2, width=128, half_block=64, norms=True),
        ),
        (kernels._add_norm_kernel, dict(x=p, delta=p, weight=p, out=p, eps="fp32"), norm),
        (kernels._swiglu_kernel, dict(gate=p, up=p, out=p, count="i32"), dict(block=1024)),
    ):
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types[name] for name in names}
        source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_stages": 2})
        assert compiled.asm["cubin"] and compiled.metadata.shared <= 99 * 2**10, kernel
