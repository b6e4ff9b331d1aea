"""Fused functions against transformers' modules, what a compiler makes of them, and what runs where it fails."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen2 import modeling_qwen2

from audiorl.algos import fused
from audiorl.algos.fused import Fused, rms_norm, rotate, swiglu
from audiorl.algos.logprobs import fused_logprobs

Inputs = list[Tensor]


def numbers(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cases(dtype: torch.dtype, tokens: int = 7) -> dict[str, tuple[Any, Any, Inputs]]:
    """Ours, transformers' (the same numbers), and the inputs."""
    norm = modeling_qwen2.Qwen2RMSNorm(8, eps=1e-6)
    cos, sin = (numbers(1, tokens, 4, seed=s, dtype=dtype).repeat(1, 1, 2)[:, None] for s in (1, 2))

    def theirs(x: Tensor, weight: Tensor) -> Any:
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    def apply(q: Tensor, k: Tensor) -> Any:
        # the original, whatever a policy of another test has put in its place
        both = [(x * cos) + (torch.cat([-x[..., 4:], x[..., :4]], -1) * sin) for x in (q, k)]
        return tuple(both)

    x = numbers(1, tokens, 8, seed=3, dtype=dtype)
    heads = [numbers(1, h, tokens, 8, seed=h, dtype=dtype) for h in (4, 2)]
    return {
        "norm": (lambda x, w: rms_norm(x, w, 1e-6), theirs, [x, numbers(8, seed=4, dtype=dtype)]),
        "swiglu": (swiglu, lambda gate, up: nn.SiLU()(gate) * up, [x, numbers(1, tokens, 8, seed=5, dtype=dtype)]),
        "rotation": (lambda q, k: rotate(q, k, cos, sin, dtype), apply, heads),
    }


def run(function: Any, inputs: Inputs) -> tuple[Inputs, Inputs]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out = list(out) if isinstance(out, tuple) else [out]
    sum((x.float() * torch.linspace(-1, 1, x.shape[-1])).sum() for x in out).backward()  # type: ignore[union-attr]
    return [x.detach() for x in out], [x.grad for x in leaves]  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", cases(torch.float32))
def test_values_are_transformers_own_and_gradients_follow(name: str, dtype: torch.dtype) -> None:
    ours, theirs, inputs = cases(dtype)[name]
    (values, gradients), (expected, slopes) = run(ours, inputs), run(theirs, inputs)
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
    tight = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    torch.testing.assert_close(gradients, slopes, **tight)


def test_a_failing_compiler_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Failed to find C compiler\nPlease specify one")

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(Fused, "devices", ("cpu",))
    monkeypatch.setattr(Fused, "works", True)
    monkeypatch.setattr(fused, "SMALLEST", 1)
    for ours, theirs, inputs in cases(torch.float32).values():
        torch.testing.assert_close(run(ours, inputs), run(theirs, inputs))
    assert caplog.text.count("torch.compile failed with RuntimeError: Failed to find C compiler") == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_each_is_one_kernel_for_all_lengths(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The compiler for CPUs: another back end than a GPU's behind the same graphs and the same fusion."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(Fused, "devices", ("cpu",))
    monkeypatch.setattr(Fused, "works", True)
    monkeypatch.setattr(fused, "SMALLEST", 1)
    every = [f for f in vars(fused).values() if isinstance(f, Fused)]
    assert len(every) == 6
    torch._dynamo.reset()
    counters.clear()
    for tokens in (64, 96, 160):
        for dtype in (torch.float32, torch.bfloat16):
            for name, (ours, theirs, inputs) in cases(dtype, tokens).items():
                rough = {"atol": 0.06, "rtol": 0.03} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-4}
                torch.testing.assert_close(run(ours, inputs), run(theirs, inputs), **rough, msg=name)
        hidden, weight = numbers(tokens, 16, seed=6, dtype=torch.float32), numbers(40, 16, seed=7, dtype=torch.float32)
        targets = torch.arange(tokens) % 40
        compiled = run(lambda h, w, t=targets: fused_logprobs(h, w, t, 0.7, 64 * 8), [hidden, weight])
        with monkeypatch.context() as plain:
            plain.setattr(Fused, "devices", ())
            expected = run(lambda h, w, t=targets: fused_logprobs(h, w, t, 0.7, 64 * 8), [hidden, weight])
        torch.testing.assert_close(compiled, expected, atol=1e-5, rtol=1e-4)
    fallen_back = [record for record in caplog.records if record.name.startswith("audiorl")]
    assert Fused.works and not fallen_back
    assert counters["stats"]["unique_graphs"] <= 2 * 6 + 2 + 6, "two types of six, two of logits; few sizes of one"
