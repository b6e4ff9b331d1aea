"""Commands let OpenMP's threads sleep at barriers, which must be set before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import builtins, os, sys
load = builtins.__import__
def watched(name, *args, **kwargs):
    if name == "torch" and "torch" not in sys.modules:
        print(os.environ.get("OMP_WAIT_POLICY"), file=sys.stderr)
        os._exit(7)
    return load(name, *args, **kwargs)
builtins.__import__ = watched
from audiorl.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("command", "given", "policy"),
    [(["train", "quickstart", "--out", "never"], None, "passive"), (["eval", "mmau"], "active", "active")],
)
def test_the_wait_policy_is_set_when_torch_is_loaded(command: list[str], given: str | None, policy: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    done = subprocess.run([sys.executable, "-c", CODE, *command], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr.split()[-1:]) == (7, [policy]), done.stderr
