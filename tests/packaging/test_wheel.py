"""What is shipped: the wheel's contents, and what importing it loads."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel built from a copy of the tree."""
    tree = tmp_path_factory.mktemp("tree")
    skip = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=skip, dirs_exist_ok=True)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tree / "dist"), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (file,) = (tree / "dist").glob("*.whl")
    return zipfile.ZipFile(file).namelist()


def test_the_wheel_holds_the_libraries_and_nothing_else(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel if ".dist-info/" not in name}
    assert tops == {"audiorl", "tokenizers_audio"}


def test_the_wheel_holds_every_module_recipe_and_evaluation(wheel: list[str]) -> None:
    installed = {"recipes": "audiorl/recipes", "eval": "audiorl/eval"}
    for top in ("audiorl", "tokenizers_audio", "recipes", "eval"):
        files = [file.relative_to(ROOT) for file in (ROOT / top).rglob("*.py")]
        assert files
        for file in files:
            assert f"{installed.get(top, top)}/{file.relative_to(top)}" in wheel


def test_the_wheel_holds_speech_encoder_and_licences(wheel: list[str]) -> None:
    assert sum(name.startswith("audiorl/assets/speech/") and name.endswith(".opus") for name in wheel) == 1526
    for name in ("speech/ATTRIBUTION.md", "whisper_tiny_en/encoder.safetensors", "whisper_tiny_en/LICENSE-MIT.txt"):
        assert f"audiorl/assets/{name}" in wheel
    assert "audiorl/py.typed" in wheel and "tokenizers_audio/py.typed" in wheel
    licences = [name for name in wheel if ".dist-info/licenses/" in name]
    assert any(name.endswith("/LICENSE") for name in licences) and any("ATTRIBUTION" in name for name in licences)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("audiorl", ("torch", "transformers", "httpx", "fastapi", "uvicorn")),
        ("audiorl.cli", ("torch", "transformers", "httpx", "fastapi", "uvicorn")),
        ("audiorl.rewards", ("transformers", "peft", "datasets", "espeakng_loader", "httpx", "fastapi", "uvicorn")),
        ("audiorl.metrics", ("torch", "transformers")),
        ("audiorl.algos", ("transformers",)),
        ("audiorl.rl.train", ("vllm", "ray", "deepspeed", "wandb", "tensorboard", "matplotlib")),
    ],
)
def test_importing_loads_only_what_is_needed(module: str, heavy: tuple[str, ...]) -> None:
    always = ("vllm", "ray", "deepspeed")
    code = f"import sys, {module}; print([m for m in {(*heavy, *always)!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
