"""The doctor reports what is there and what is not, and its exit code can be trusted."""

import io
import math
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from rich.console import Console

from audiorl.cli.doctor import (
    Check,
    Package,
    check_assets,
    check_attention,
    check_cpu_bf16,
    check_optional,
    check_required,
    check_self_test,
    run_doctor,
)

ROOT = Path(__file__).parents[3]
doctor = import_module("audiorl.cli.doctor")  # audiorl.cli.doctor is also the command's function


def printed(**kwargs):
    console = Console(width=120, file=io.StringIO())
    code = run_doctor(console=console, **kwargs)
    return code, console.file.getvalue()


@pytest.fixture
def healthy(monkeypatch):
    monkeypatch.setattr(doctor, "collect", lambda folder: [Check("packages", "torch", "ok", "1.0")])


def test_optional_packages_are_never_imported(monkeypatch, tmp_path):
    for package in doctor.OPTIONAL:
        (tmp_path / f"{package.module}.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    checks = [check_optional(p) for p in doctor.OPTIONAL]
    assert all(c.state == "ok" for c in checks)


def test_a_missing_optional_part_says_what_it_adds_and_how_to_get_it():
    check = check_optional(Package("nosuch", "no_such_module_here", "speed", 'pip install "audiorl[gpu]"'))
    assert (check.state, check.detail, check.advice) == ("missing", "adds speed", 'pip install "audiorl[gpu]"')


def test_a_missing_required_part_is_a_problem():
    assert check_required(Package("nosuch", "no_such_module_here")).state == "problem"
    assert check_required(Package("numpy", "numpy")).state == "ok"


def test_the_real_table_names_every_group():
    code, text = printed()
    for word in ("audiorl", "torch", "accelerator", "bf16", "attention", "vllm", "memory", "disk", "assets"):
        assert word in text
    for word in ("pystoi", "pocketsphinx", "faster-whisper", "speechmos", "librosa", "pesq"):
        assert word in text
    assert code in (0, 1)


def test_every_extra_that_is_advised_exists():
    """`pip install "audiorl[NAME]"` names an extra of pyproject.toml that brings the package."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package in doctor.OPTIONAL:
        for extra in re.findall(r"audiorl\[(\w+)\]", package.install):
            assert any(re.match(rf"{package.name}\b", line) for line in extras[extra]), package


def test_square_brackets_of_extras_are_printed(monkeypatch):
    check = Check("optional", "vllm", "missing", "adds fast rollouts", 'pip install "audiorl[gpu]"')
    monkeypatch.setattr(doctor, "collect", lambda folder: [check])
    code, text = printed()
    assert 'pip install "audiorl[gpu]"' in text
    assert code == 0, "a missing optional part is no problem"


def test_the_package_has_its_assets():
    assert [c.state for c in check_assets()] == ["ok", "ok"]


def test_only_what_runs_is_reported():
    """Without a GPU nothing uses FlashAttention or FlexAttention; nothing at all uses Liger kernels."""
    _, text = printed()
    assert not re.search("flash|flex|liger", text)
    assert "sdpa in float32" in text


@pytest.mark.slow
def test_bf16_of_a_cpu_is_advised_only_where_it_is_fast():
    fast = check_cpu_bf16({"amx_bf16": True, "avx512_bf16": True})
    assert "--model.autocast is faster" in fast.advice and re.search(r"takes \d+\.\d\d× the time", fast.detail)
    assert check_cpu_bf16({"avx512_bf16": True}).advice == ""
    emulated = check_cpu_bf16({"avx2": True})
    assert re.search(r"emulated: .* takes \d+× the time", emulated.detail) and "leave" in emulated.advice


def test_the_attention_of_a_gpu_is_named_with_what_keeps_faster_kernels_off(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", math)  # which a build of torch for GPUs brings
    gpu = torch.device("cuda", 0)
    best = check_attention(gpu, torch.bfloat16)
    assert (best.state, best.detail, best.advice) == ("ok", "torch varlen in bfloat16 at a head width of 128", "")
    flex = check_attention(gpu, torch.float32)
    assert flex.detail.startswith("flex in float32") and "computes in bfloat16 or float16" in flex.advice
    slow = check_attention(gpu, torch.float32, head_width=8)
    assert slow.state == "missing" and slow.detail.startswith("sdpa") and "at least 16, not 8" in slow.advice


def test_assets(tmp_path):
    assert [c.state for c in check_assets(tmp_path)] == ["problem", "problem"]
    manifest = tmp_path / "assets/speech/manifest.jsonl"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    assert check_assets(tmp_path)[0].state == "problem", "an empty manifest is not an asset"
    manifest.write_text("{}\n")
    assert check_assets(tmp_path)[0].state == "ok"


def test_self_test_passes_with_its_numbers(healthy):
    code, text = printed(self_test=lambda: {"loss": 1.25})
    assert code == 0 and "loss 1.25" in text and "Ready to train" in text


def test_self_test_failure_names_error_and_place(healthy):
    def broken():
        raise RuntimeError("no [gpu] kernel")

    check = check_self_test(broken)
    assert check.state == "problem" and check.detail == "RuntimeError: no [gpu] kernel"
    assert "test_doctor.py" in check.advice and "broken" in check.advice
    code, text = printed(self_test=broken)
    assert code == 1 and "no [gpu] kernel" in text and "1 to fix: one step" in text


def test_self_test_with_nan_is_a_problem():
    check = check_self_test(lambda: {"loss": float("nan"), "kl": 0.0})
    assert check.state == "problem" and check.detail == "not finite: loss"


def test_free_memory_reads_what_the_system_says(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   42 kB\n")
    assert doctor.free_memory(tmp_path / "meminfo") == 42 * 1024


def test_low_room_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "free_memory", lambda: 10**9)
    memory, disk = doctor.check_room(str(tmp_path))
    assert memory.state == "missing" and "1.0 GB free" in memory.detail and "packing budget" in memory.advice
    assert disk.name == "disk"


def test_cuda_devices_are_listed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Big GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setitem(sys.modules, "triton", math)
    checks = {c.name: c for c in doctor.check_accelerator()}
    assert checks["cuda:1"].detail == "Big GPU, 10.0 GB of 80.0 GB free"
    assert checks["bf16"].state == "missing"
    assert checks["TF32"].detail.startswith("off")
    assert checks["attention"].detail.startswith("flex in float32")
    assert "compute capability 8.0, Big GPU has less" in checks["attention"].advice
