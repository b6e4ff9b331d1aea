"""The doctor reports what is there and what is not, and its exit code can be trusted."""

from __future__ import annotations

import math
import re
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from audiorl.cli import main
from audiorl.errors import install

ROOT = Path(__file__).parents[3]
doctor: Any = import_module("audiorl.cli.doctor")


def checks(found: list[Any]) -> dict[str, Any]:
    return {check.name: check for check in found}


def test_the_table_names_every_group(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "self_test", lambda: {"loss": 1.25})
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("audiorl", "torch", "accelerator", "bf16", "attention", "vllm", "memory", "disk", "assets", "pesq"):
        assert word in text
    assert "loss 1.25" in text and "Ready to train" in text and "sdpa in float32" in text
    # Without a GPU nothing uses FlashAttention or FlexAttention; nothing at all uses Liger kernels.
    assert not re.search("flash|flex|liger", text)


def test_optional_packages_are_looked_up_and_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = [name for packages in doctor.OPTIONAL.values() for name in packages]
    for name in names:
        (tmp_path / f"{name.replace('-', '_')}.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert [check.state for check in doctor.check_optional()] == ["ok"] * len(names)
    monkeypatch.setattr(doctor, "OPTIONAL", {"gpu": {"no-such-module": "speed"}})
    (check,) = doctor.check_optional()
    assert (check.state, check.detail, check.advice) == ("missing", "adds speed", install("gpu"))
    monkeypatch.setattr(doctor, "required", lambda: ["pyyaml", "no-such-module"])
    assert [(c.state, c.advice) for c in doctor.check_packages()][2:] == [("ok", ""), ("problem", install())]


def test_what_is_required_is_what_the_project_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the metadata of an installed package, without its extras; by pyproject.toml of a checkout on PYTHONPATH."""
    lines = ["torch>=2.13", "huggingface-hub (>=1)", "peft; extra == 'gpu'", 'ray[a]>=2; extra == "scale"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: lines)
    assert doctor.required() == ["torch", "huggingface-hub"]

    def absent(name: str) -> None:
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", absent)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [re.match("[a-z0-9-]+", line)[0] for line in project["dependencies"]] == doctor.required()  # type: ignore[index]


def test_every_extra_that_is_advised_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in doctor.OPTIONAL.items():
        assert all(any(re.match(rf"{name}\b", line) for line in extras[extra]) for name in packages), extra


@pytest.mark.slow
def test_bf16_of_a_cpu_is_advised_only_where_it_is_fast() -> None:
    fast = doctor.check_cpu_bf16({"amx_bf16": True, "avx512_bf16": True})
    assert "--model.autocast is faster" in fast.advice and re.search(r"takes \d+\.\d\d× the time", fast.detail)
    assert doctor.check_cpu_bf16({"avx512_bf16": True}).advice == ""
    emulated = doctor.check_cpu_bf16({"avx2": True})
    assert re.search(r"emulated: .* takes \d+× the time", emulated.detail) and "leave" in emulated.advice


def test_the_attention_of_a_gpu_is_named_with_what_keeps_faster_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", math)  # which a build of torch for GPUs brings
    gpu = torch.device("cuda", 0)
    best = doctor.check_attention(gpu, torch.bfloat16)
    assert (best.state, best.detail, best.advice) == ("ok", "torch varlen in bfloat16 at a head width of 128", "")
    flex = doctor.check_attention(gpu, torch.float32)
    assert flex.detail.startswith("flex in float32") and "computes in bfloat16 or float16" in flex.advice
    slow = doctor.check_attention(gpu, torch.float32, head_width=8)
    assert slow.state == "missing" and slow.detail.startswith("sdpa") and "at least 16, not 8" in slow.advice


def test_assets_and_room(tmp_path: Path) -> None:
    assert [c.state for c in doctor.check_assets()] == ["ok", "ok"]
    manifest = tmp_path / "assets/speech/manifest.jsonl"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    assert [c.state for c in doctor.check_assets(tmp_path)] == ["problem", "problem"], "an empty file is no asset"
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   1000000 kB\n")
    room = checks(doctor.check_room(str(tmp_path), tmp_path / "meminfo"))
    assert room["memory"].state == "missing" and "1.0 GB free" in room["memory"].detail
    assert checks(doctor.check_room(meminfo=tmp_path / "none"))["memory"].detail == "unknown on this system"


def broken() -> dict[str, float]:
    raise RuntimeError("no [gpu] kernel")


@pytest.mark.parametrize(
    ("test", "detail", "advice"),
    [
        (broken, "RuntimeError: no [gpu] kernel", "raised in test_doctor.py"),
        (lambda: {"loss": float("nan"), "kl": 0.0}, "not finite: loss", "numerics"),
    ],
)
def test_a_failed_self_test_is_a_problem(
    test: Callable[[], Any],
    detail: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "self_test", test)
    check = doctor.check_self_test()
    assert (check.state, check.detail) == ("problem", detail) and advice in check.advice
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert detail in out and "1 to fix: one step" in out


def test_cuda_devices_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Big GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setitem(sys.modules, "triton", math)
    found = checks(doctor.check_accelerator())
    assert found["cuda:1"].detail == "Big GPU, 10.0 GB of 80.0 GB free"
    assert found["bf16"].state == "missing" and found["TF32"].detail.startswith("off")
    assert found["attention"].detail.startswith("flex in float32")
    assert "compute capability 8.0, Big GPU has less" in found["attention"].advice
