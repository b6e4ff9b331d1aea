"""audiorl: reinforcement learning for speech language models."""

from pathlib import Path

__version__ = "0.1.0"

_ROOT = Path(__file__).parents[1]
if (_ROOT / "pyproject.toml").is_file():  # in a checkout audiorl.recipes and audiorl.eval lie next to this package
    __path__.append(str(_ROOT))
