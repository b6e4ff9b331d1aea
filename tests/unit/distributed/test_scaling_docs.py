"""docs/scaling.md prints what its commands print, and the files in docs/launch/ can be read."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from audiorl.cli import plan as plan_cli
from audiorl.plan.memory import GIB
from bench.engines import main as simulate

DOCS = Path(__file__).parents[3] / "docs"
SCALING = (DOCS / "scaling.md").read_text()
LAYOUTS = re.findall(r"^\| [^|]+ \| `(?!audiorl)([^`]+)` \| ([^|]+) \| ([^|]*) \| ([^|]*) \|$", SCALING, re.MULTILINE)


@pytest.mark.slow
def test_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(LAYOUTS) > 20
    for arguments, peaks, sequences, host in LAYOUTS:
        code = plan_cli.plan([*arguments.split(), "--json"])
        said = json.loads(capsys.readouterr().out)
        assert ("does not fit" in peaks) == (code == 1) == (not said["fits"])
        for gpu in said["gpus"]:
            phase = max(gpu["total"], key=gpu["total"].get)
            name = f"{gpu['name']} " if len(said["gpus"]) > 1 else ""
            assert f"{name}{gpu['peak'] / GIB:.1f} {phase}" in peaks, arguments
            if gpu["cache"]:
                assert sequences.strip() == f"{gpu['cache']['sequences']} / {gpu['cache']['shared']}"
        assert host.strip() == (f"{said['host_bytes'] / GIB:.0f}" if said["host_bytes"] else "")
        for change in re.findall(r"would with `([^`]+)`", peaks):
            assert plan_cli.plan([*arguments.split(), *change.split(), "--json"]) == 0
            capsys.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("command", re.findall(r"^    python bench/engines\.py(.*)$", SCALING, re.MULTILINE))
def test_simulated_tables(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    simulate(command.split())
    rows = [
        [c.strip() for c in line.strip("│").split("│")] for line in capsys.readouterr().out.splitlines() if "│" in line
    ]
    engines = ""
    for row in rows:
        engines = row[0] or engines
        if row[1] == "least":
            assert f"| {' | '.join([engines, *row[2:]])} |" in SCALING


@pytest.mark.parametrize("script", sorted((DOCS / "launch").glob("*.sbatch")), ids=lambda p: p.name)
def test_scripts_parse_and_refuse_no_command(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True).stderr == ""
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("usage: sbatch")
    head = script.read_text().split("\nset -euo pipefail")[0]
    assert all(line.startswith("#") for line in head.splitlines()), "SLURM reads its options up to the first command"
