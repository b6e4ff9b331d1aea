"""Exceptions that several layers share, and how to install what is missing."""

import json
import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


class Interrupted(Exception):
    """The run was asked to stop and has saved its state."""


class RewardError(RuntimeError):
    """A user's reward raised anything but a ValueError; the message names file, function, sample, line and error."""


class RankError(RuntimeError):
    """Another rank failed."""


def says_what_to_do(error: Exception) -> bool:
    """Return whether the message of an error is all that a user needs: not where AUDIORL_TRACEBACK is set, nor of an
    import that failed. That is a fault of ours, and has the name of its module; an error that says which package to
    install has none."""
    return not os.environ.get("AUDIORL_TRACEBACK") and not (isinstance(error, ImportError) and error.name)


def install(extra: str = "") -> str:
    """Return the command that installs audiorl, with an extra, the way it is installed: from a folder, a repository or
    an index.

    >>> install("serve").startswith("pip install ")
    True
    """
    root, extra = Path(__file__).resolve().parents[1], f"[{extra}]" if extra else ""
    try:
        origin = json.loads(distribution("audiorl").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        origin = {}
    url = str(origin.get("url", ""))
    if (root / "pyproject.toml").is_file():
        return f"pip install -e '{root}{extra}'"
    if "vcs_info" in origin:
        return f"pip install 'audiorl{extra} @ {origin['vcs_info']['vcs']}+{url}'"
    return f"pip install '{url.removeprefix('file://') if url.startswith('file://') else 'audiorl'}{extra}'"
