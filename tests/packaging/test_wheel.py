"""What is shipped: the wheel's contents, and what importing it loads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree."""
    tree = tmp_path_factory.mktemp("tree")
    skip = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=skip, dirs_exist_ok=True)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tree / "dist"), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (file,) = (tree / "dist").glob("*.whl")
    return file


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> list[str]:
    """The names in the wheel."""
    return zipfile.ZipFile(wheel_file).namelist()


@pytest.fixture(scope="module")
def installed(wheel_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder bin/ of an environment with the wheel, whose other packages are those of this environment."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*command, "--no-deps", "--no-index", str(wheel_file)], check=True)
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def run(command: list[str | Path], folder: Path) -> str:
    """What the command prints in an empty folder; without this checkout on its path."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_from_an_empty_folder_recipes_and_evaluations_have_names(installed: Path, tmp_path: Path) -> None:
    where = run([installed / "python", "-c", "import audiorl; print(audiorl.__file__)"], tmp_path)
    assert Path(where).is_relative_to(installed.parent)
    assert "mmau-grpo" in run([installed / "audiorl", "train", "--help"], tmp_path)
    assert "usage: audiorl eval mmau" in run([installed / "audiorl", "eval", "mmau", "--help"], tmp_path)
    assert "--score" in run([installed / "python", "-m", "audiorl.eval.mmau", "--help"], tmp_path)
    assert "data build OUT" in run([installed / "audiorl", "data", "--help"], tmp_path), "an entry point of corpora"


@pytest.mark.slow
def test_from_an_empty_folder_the_quickstart_runs(installed: Path, tmp_path: Path) -> None:
    assert "finished: x" in run([installed / "audiorl", "train", "quickstart", "--tiny", "--out", "x"], tmp_path)
    assert "Ready to train" in run([installed / "audiorl", "doctor"], tmp_path)


@pytest.mark.slow
def test_from_a_plain_checkout_it_trains(tmp_path: Path) -> None:
    """The packages on PYTHONPATH, without the metadata of an installed one."""
    site = tmp_path / "site"
    site.mkdir()
    others = [e for e in Path(sysconfig.get_path("purelib")).iterdir() if "audiorl" not in e.name]
    for entry in (ROOT / "audiorl", ROOT / "tokenizers_audio", *others):
        (site / entry.name).symlink_to(entry)
    command = [sys.executable, "-S", "-m", "audiorl", "train", "sft-audio", "--tiny", "--out", "x"]
    environment = dict(os.environ, PYTHONPATH=str(site), OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_mypy_finds_the_types_of_the_installed_package(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from audiorl.eval.metrics.corpus import bootstrap_interval\n"
        "reveal_type(bootstrap_interval([0.0, 1.0]))\n"
        "bootstrap_interval(3)\n"
    )
    (tmp_path / "mypy.ini").write_text(  # types of large libraries take minutes
        "[mypy]\nignore_missing_imports = True\n[mypy-torch.*,transformers.*,scipy.*]\nfollow_imports = skip\n"
    )
    command = [sys.executable, "-m", "mypy", "--python-executable", installed / "python", "mine.py"]
    done = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True)
    assert 'Revealed type is "tuple[' in done.stdout and "mine.py:3: error: Argument 1" in done.stdout, done.stdout
    assert "missing library stubs or py.typed marker" not in done.stdout


def test_the_wheel_holds_the_libraries_and_nothing_else(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel if ".dist-info/" not in name}
    assert tops == {"audiorl", "corpora", "tokenizers_audio"}
    for top in tops:
        assert {str(file.relative_to(ROOT)) for file in (ROOT / top).rglob("*.py")} <= set(wheel)


def test_the_wheel_holds_the_assets_of_pages(wheel: list[str]) -> None:
    assets = list((ROOT / "audiorl" / "report" / "assets").iterdir())
    assert assets and all(f"audiorl/report/assets/{asset.name}" in wheel for asset in assets)


def test_the_wheel_holds_speech_encoder_and_licences(wheel: list[str]) -> None:
    assert sum(name.startswith("audiorl/assets/speech/") and name.endswith(".opus") for name in wheel) == 1526
    for name in ("speech/ATTRIBUTION.md", "whisper_tiny_en/encoder.safetensors", "whisper_tiny_en/LICENSE-MIT.txt"):
        assert f"audiorl/assets/{name}" in wheel
    assert not any("unseen_speakers/" in name for name in wheel), "recordings under the GPL"
    assert "audiorl/py.typed" in wheel and "tokenizers_audio/py.typed" in wheel
    licences = [name for name in wheel if ".dist-info/licenses/" in name]
    assert any(name.endswith("/LICENSE") for name in licences) and any("ATTRIBUTION" in name for name in licences)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("audiorl", ("torch", "transformers", "httpx", "fastapi", "uvicorn")),
        ("audiorl.cli", ("torch", "transformers", "httpx", "fastapi", "uvicorn")),
        ("audiorl.rewards", ("transformers", "peft", "datasets", "espeakng_loader", "httpx", "fastapi", "uvicorn")),
        ("audiorl.eval.metrics", ("torch", "transformers")),
        ("audiorl.algos", ("transformers",)),
        ("audiorl.train.rl.train", ("vllm", "ray", "deepspeed", "wandb", "tensorboard", "matplotlib")),
    ],
)
def test_importing_loads_only_what_is_needed(module: str, heavy: tuple[str, ...]) -> None:
    always = ("vllm", "ray", "deepspeed")
    code = f"import sys, {module}; print([m for m in {(*heavy, *always)!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
