"""Attention of packed batches by spans, and of decoding to shared prompts: kernels, segments, choices."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from audiorl.algos import varlen
from audiorl.algos.prompt_attention import PromptAttention
from audiorl.algos.varlen import BLOCK, TORCH_VARLEN, SegmentAttention, Segments, choose_kernel, padded, sdpa


def test_torch_varlen_runs_on_shapes_alone() -> None:
    """Backward pass included, without a GPU."""
    segments = Segments.of_spans([(0, 3, 0, 0), (3, 5, 0, 3), (5, 6, 0, 3)], torch.device("meta"))
    query, key, value = (torch.randn(1, heads, 6, 16, device="meta", requires_grad=True) for heads in (4, 2, 2))
    out = SegmentAttention(TORCH_VARLEN, segments)(query, key, value, 0.5)
    assert out.shape == (1, 6, 4, 16)
    out.sum().backward()
    assert key.grad is not None and key.grad.shape == key.shape


def test_segments_by_hand() -> None:
    """p p p | a a | b, both answers to p."""
    segments = Segments.of_spans([(0, 3, 0, 0), (3, 5, 0, 3), (5, 6, 0, 3)], torch.device("cpu"))
    assert segments.query_offsets.tolist() == [0, 3, 5, 6] and segments.key_offsets.tolist() == [0, 3, 8, 12]
    assert segments.key_rows is not None and segments.key_rows.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5]
    first, end = segments.visible
    assert first.tolist() == [0, 0, 0, 3, 3, 8] and end.tolist() == [1, 2, 3, 7, 8, 12]
    unshared = Segments.of_spans([(0, 3, 0, 0), (3, 5, 0, 0)], torch.device("cpu"))
    assert unshared.key_rows is None and unshared.visible[1].tolist() == [1, 2, 3, 4, 5]


@given(
    groups=st.lists(st.tuples(st.integers(1, 200), st.lists(st.integers(1, 90), max_size=3)), min_size=1, max_size=4)
)
def test_blocks_of_keys_cover_what_is_visible(groups: list[tuple[int, list[int]]]) -> None:
    spans: list[tuple[int, int, int, int]] = []
    at = 0
    for prompt, lengths in groups:
        parent = (at, at + prompt)
        for length in (prompt, *lengths):
            spans.append((at, at + length, *(parent if at >= parent[1] else (0, 0))))
            at += length
    segments = Segments.of_spans(spans, torch.device("cpu"))
    first, end = segments.visible
    keys = torch.arange(int(segments.key_offsets[-1]))
    visible = (keys >= first[:, None]) & (keys < end[:, None])
    padded = torch.nn.functional.pad(visible, (0, -len(keys) % BLOCK, 0, -at % BLOCK))
    needed = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).any(3).any(1)
    assert torch.equal(segments.block_mask.to_dense()[0, 0].bool(), needed)


@pytest.mark.parametrize(
    "segments",
    [
        Segments.of_spans([(0, 3, 0, 0), (3, 5, 0, 3), (5, 6, 0, 3), (6, 10, 0, 0)], torch.device("cpu")),
        Segments.of_spans([(0, 4, 0, 0), (4, 10, 0, 0)], torch.device("cpu")),
        Segments.of_lengths([4, 1, 5], [3, 0, 7], False, torch.device("cpu")),
    ],
    ids=["shared prompt", "causal", "chunks, one without keys"],
)
def test_a_padded_call_equals_one_a_segment(segments: Segments) -> None:
    """Outputs, and all gradients, with grouped queries."""
    torch.manual_seed(0)
    inputs = [torch.randn(10, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    weights = torch.randn(10, 4, 8, dtype=torch.float64)
    results = []
    for kernel in (sdpa, padded):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = kernel(*leaves, segments, 0.3)  # type: ignore[arg-type]
        (out * weights).sum().backward()
        results.append([out, *(x.grad for x in leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_a_padded_call_waits_for_nothing() -> None:
    """On meta a tensor has no values that anything could wait for."""
    segments = Segments.of_spans([(0, 3, 0, 0), (3, 5, 0, 3), (5, 6, 0, 3)], torch.device("meta"))
    query, key, value = (torch.randn(6, heads, 16, device="meta", requires_grad=True) for heads in (4, 2, 2))
    out = padded(query, key, value, replace(segments, lengths_on_host=None))
    assert out.shape == (6, 4, 16) and segments.padded_pairs == 3 * 3 * 5
    out.sum().backward()


GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU of compute capability 9.0, as far as `choose_kernel` asks."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setitem(sys.modules, "triton", torch)  # which a build of torch for GPUs brings
    return monkeypatch


def test_auto_takes_the_first_kernel_that_can_run(gpu: pytest.MonkeyPatch) -> None:
    assert choose_kernel("auto", GPU, torch.bfloat16, 128).name == "torch varlen"
    assert choose_kernel("auto", GPU, torch.float32, 128).name == "flex"
    assert choose_kernel("auto", GPU, torch.bfloat16, 20).name == "flex"
    assert choose_kernel("auto", GPU, torch.float32, 8).name == "sdpa"
    assert choose_kernel("auto", torch.device("cpu"), torch.bfloat16, 128).name == "sdpa"
    gpu.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert choose_kernel("auto", GPU, torch.float16, 128).name == "flex"


@pytest.mark.parametrize(
    ("attention", "dtype", "width", "message"),
    [
        ("varlen", torch.float32, 128, "bfloat16 or float16, not float32: set model.autocast"),
        ("varlen", torch.bfloat16, 20, "multiple of 8 up to 256, not 20"),
        ("varlen", torch.bfloat16, 512, "multiple of 8 up to 256, not 512"),
        ("flex", torch.bfloat16, 8, "head width of at least 16, not 8"),
    ],
)
def test_what_a_kernel_does_not_support_is_named(
    gpu: pytest.MonkeyPatch, attention: Any, dtype: torch.dtype, width: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose_kernel(attention, GPU, dtype, width)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 1), (2, 2)])
def test_short_segments_in_16_bits_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, causal: bool, heads: int, groups: int
) -> None:
    """By whole matrices they are as exact as torch's kernel, forward and backward, and really take the other way."""
    spans = [(0, 40, 0, 0), (40, 47, 0, 40), (47, 48, 0, 40), (48, 48 + varlen.SHORT + 1, 0, 0)]
    segments = replace(Segments.of_spans(spans, torch.device("cpu")), causal=causal)
    generator = torch.Generator().manual_seed(0)
    shapes = ((spans[-1][1], heads, 16), (spans[-1][1], groups, 16), (spans[-1][1], groups, 16))
    inputs = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    given_gradient = torch.randn(shapes[0], generator=generator)

    def run(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = sdpa(*leaves, segments)
        out.backward(given_gradient.to(dtype))
        return [x.double() for x in (out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None))]

    exact = run(torch.float64)
    calls: list[int] = []
    by_products = varlen._by_products
    monkeypatch.setattr(varlen, "_by_products", lambda *args: calls.append(args[1].shape[2]) or by_products(*args))
    short = run(torch.bfloat16)
    assert calls == [40, 47, 41]
    monkeypatch.setattr(varlen, "SHORT", 0)
    kernel = run(torch.bfloat16)
    for ours, torchs, true in zip(short, kernel, exact, strict=True):
        assert (ours - true).norm() <= 1.3 * (torchs - true).norm()
        assert (ours - true).norm() <= 0.01 * true.norm()


@pytest.mark.parametrize("on_cpu", [True, False], ids=["two parts", "one softmax"])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_that_of_prompts_in_every_row(on_cpu: bool, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads, group, width = 2, 3, 8
    lengths, written = torch.tensor([5, 9, 7]), torch.tensor([4, 2, 3, 1, 4, 2])
    of_row = torch.tensor([p for p, size in enumerate(sizes) for _ in range(size)])
    keys, values = (torch.randn(3, heads, 9, width).to(dtype) for _ in range(2))
    own_keys, own_values = (torch.randn(6, heads, 4, width).to(dtype) for _ in range(2))
    query = torch.randn(6, heads * group, 1, width).to(dtype)
    padding, unwritten = torch.arange(9) < 9 - lengths[:, None], torch.arange(4) >= written[:, None]
    most = max(sizes)
    slots = places = None
    if min(sizes) < most:
        slots, places = torch.zeros(3 * most, dtype=torch.long), torch.zeros(6, dtype=torch.long)
        for b, p in enumerate(of_row.tolist()):
            places[b] = p * most + b - sum(sizes[:p])
            slots[places[b]] = b
    attention = PromptAttention(
        [keys],
        [values],
        torch.zeros(3, 1, 1, 9, dtype=dtype).masked_fill(padding[:, None, None], -torch.inf),
        torch.zeros(6, 1, 1, 4, dtype=dtype).masked_fill(unwritten[:, None, None], -torch.inf),
        slots,
        places,
    )
    if on_cpu:
        out = attention(0, query, own_keys, own_values, None)
    else:
        with patch.object(PromptAttention, "_two_parts", PromptAttention._one_softmax):
            out = attention(0, query, own_keys, own_values, None)
    expected = scaled_dot_product_attention(
        query.float(),
        torch.cat([keys[of_row], own_keys], 2).float(),
        torch.cat([values[of_row], own_values], 2).float(),
        attn_mask=~torch.cat([padding[of_row], unwritten], 1)[:, None, None],
        enable_gqa=True,
    )
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.float(), expected.transpose(1, 2), atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_on_a_gpu_has_shapes_that_fit(dtype: torch.dtype) -> None:
    """Without a GPU: the operators are run for their shapes and types only."""
    with FakeTensorMode(), torch.device("cuda"):
        keys, values = (torch.empty(3, 2, 9, 8, dtype=dtype) for _ in range(2))
        own_keys, own_values = (torch.empty(6, 2, 16, 8, dtype=dtype).narrow(2, 0, 4) for _ in range(2))
        masks = torch.empty(3, 1, 1, 9, dtype=dtype), torch.empty(6, 1, 1, 4, dtype=dtype)
        slots, places = torch.empty(9, dtype=torch.long), torch.empty(6, dtype=torch.long)
        attention = PromptAttention([keys], [values], *masks, slots, places)
        out = attention(0, torch.empty(6, 6, 1, 8), own_keys, own_values, None)
    assert out.shape == (6, 1, 6, 8) and out.dtype == dtype and out.is_cuda
