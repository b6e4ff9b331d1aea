"""`audiorl doctor --gpu`: it runs to the end on the CPU, finds a wrong kernel, and survives a check that raises."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from audiorl.algos.packing import pack_experiences
from audiorl.algos.varlen import SDPA, Segments, sdpa
from audiorl.cli import main as audiorl
from audiorl.config import ModelConfig
from audiorl.gpu_check import numerics, run, setup, speed
from audiorl.gpu_check.setup import GPU_SCALE, PRETEND_SCALE, Outcome, Setup, at_least, within
from audiorl.models.attention import spans_of
from bench import against_trl

CPU = Setup(torch.device("cpu"), PRETEND_SCALE)


@pytest.mark.slow
def test_all_checks_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    assert audiorl(["doctor", "--gpu", "--pretend", "--only", "^(?!vLLM|clips)", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    states = {name: check["state"] for name, check in report["checks"].items()}
    assert states["packed = shared = single"] == states["kernel sdpa, fp32"] == states["gradients in bf16"] == "pass"
    assert states["decoding, captured"] == "skipped"
    assert states["kernel torch varlen, bf16"] == states["memory against the plan"] == "skipped"
    assert report["checks"]["packed update"]["numbers"]["tokens_per_second"] > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in states) and "no check failed" in printed


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--only", "packed"]) == 2
    assert "sees no GPU; --pretend" in capsys.readouterr().err
    assert run.main(["--pretend", "--only", "nothing of this name"]) == 2
    assert "packed update" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("L4", 121), ("L40", 181), ("L40S", 362), ("A100-SXM4-80GB", 312), ("H100 80GB HBM3", 989), ("GH200 480GB", 989)],
)
def test_a_gpu_is_known_by_its_whole_name(name: str, tflops: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA {name}")
    assert speed.peak_flops(Setup(torch.device("cuda"), PRETEND_SCALE))[0] == tflops * 1e12


def uncausal(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None = None) -> Tensor:
    return sdpa(query, key, value, replace(segments, causal=False), scale)


def top_left(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None = None) -> Tensor:
    """The last queries see the last keys only where the mask is aligned at the bottom right."""
    first = segments.visible[0]
    lengths = segments.query_offsets.diff().long()
    place = torch.arange(len(first)) - segments.query_offsets[:-1].long().repeat_interleave(lengths)
    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in segments.gather(key, value))
    columns = torch.arange(len(keys))
    mask = (columns >= first[:, None]) & (columns <= (first + place)[:, None])
    out = scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (query, keys, values)), attn_mask=mask)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("wrong", [uncausal, top_left])
def test_a_wrong_kernel_fails(wrong: Callable[..., Tensor]) -> None:
    assert numerics.kernel_equals_reference(SDPA, torch.float32, CPU).state == "pass"
    assert numerics.kernel_equals_reference(replace(SDPA, run=wrong), torch.float32, CPU).state == "fail"


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / 2


def test_a_wrong_gradient_fails() -> None:
    def half(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None = None) -> Tensor:
        return sdpa(query, HalfGradient.apply(key), value, segments, scale)

    outcome = numerics.kernel_equals_reference(replace(SDPA, run=half), torch.float32, CPU)
    assert outcome.state == "fail" and outcome.numbers["output"] == 0 and outcome.numbers["key_gradient"] > 0.1


def test_a_check_that_raises_is_a_failure_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: Setup) -> Outcome:
        raise RuntimeError("CUDA error:\nan illegal memory access")

    outcomes = run.run({"broken": broken, "fine": lambda _: within(0.5, 1.0, "error")}, CPU)
    assert [o["state"] for o in outcomes.values()] == ["fail", "pass"]
    assert outcomes["broken"]["detail"] == "RuntimeError: CUDA error: an illegal memory access"
    assert "FAIL broken" in capsys.readouterr().out


def test_the_report_is_there_whatever_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that hangs ends at its limit; when the time is over the others are skipped."""
    monkeypatch.setattr(run, "LIMIT", 0.2)
    written: list[dict[str, str]] = []

    def hangs(_: Setup) -> Outcome:
        while True:
            time.sleep(0.01)

    checks = {"hangs": hangs, "late": lambda _: within(0.5, 1.0, "error")}
    run.run(checks, CPU, 0.1, lambda found: written.append({name: o["state"] for name, o in found.items()}))
    assert written == [{"hangs": "fail"}, {"hangs": "fail", "late": "skipped"}]
    assert [name for name in run.all_checks() if name.startswith(run.SLOW)] == list(run.all_checks())[-6:]


def test_a_wrong_gradient_of_one_weight_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = numerics._gradients

    def turned(setup: Setup, attention: Any, autocast: bool) -> dict[str, Tensor]:
        found = gradients(setup, attention, autocast)
        name = "model.layers.1.self_attn.k_proj.bias"
        return found | {name: found[name].flip(0) if autocast else found[name]}

    assert numerics.update_in_bf16(CPU).state == "pass"
    monkeypatch.setattr(numerics, "_gradients", turned)
    outcome = numerics.update_in_bf16(CPU)
    assert outcome.state == "fail" and "k_proj.bias" in outcome.detail and -1 <= outcome.numbers["cosine"] <= 1


def test_without_trl_the_comparison_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert against_trl.step_against_trl(CPU) == Outcome("skipped", "TRL is not installed")


def test_bounds() -> None:
    assert within(float("nan"), 1.0, "error").state == within(1.5, 1.0, "error").state == "fail"
    gpu = Setup(torch.device("cuda", 0), GPU_SCALE)
    assert [at_least(x, 3.0, "ratio", gpu).state for x in (3.0, 2.9)] == ["pass", "fail"]
    assert at_least(0.1, 3.0, "ratio", CPU).state == "measured"


def test_flops_by_hand() -> None:
    """Two groups of three answers of 12 tokens to prompts of 40: 152 rows, of which 72 are predicted."""
    policy = setup.full_width_policy(CPU, ModelConfig())
    matrices = 2 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 256)
    pairs = 2 * (40 * 41 // 2 + 3 * (12 * 40 + 12 * 13 // 2))
    head = 72 * 128 * policy.model.config.vocab_size
    assert speed.update_flops(policy, CPU) == 6 * matrices * 152 + 12 * pairs * 128 * 2 + 6 * head


def test_spans_are_those_of_the_pack() -> None:
    batch = pack_experiences(setup.experiences(PRETEND_SCALE))
    assert setup.spans(PRETEND_SCALE) == spans_of(batch.span_ids, batch.span_parents)
    assert len(batch.ids) == PRETEND_SCALE.tokens and GPU_SCALE.tokens == 7944


BLOCK = """
import sys

class Missing:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {"jiwer", "matplotlib", "tyro"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from audiorl.gpu_check.run import all_checks
print(len(all_checks()))
"""


@pytest.mark.slow
def test_a_plain_checkout_is_enough() -> None:
    """Packages that a GPU image lacks, and that transformers does not look for itself, are not imported."""
    done = subprocess.run([sys.executable, "-c", BLOCK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 15
