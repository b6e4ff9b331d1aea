"""The experiment on flows runs to its table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from audiorl.cli import main
from audiorl.run.records import read_record
from audiorl.speech_models.taggers import SoundTagger, TaggerNetwork
from audiorl.tasks.sound.rows import read_sounds
from audiorl.tasks.sound.scenes import events_of
from tests.support.scenes import scenes, write_sounds
from tests.support.tools import run_tool


@pytest.mark.slow
def test_a_seed_runs_to_the_table(tmp_path: Path) -> None:
    built = scenes(tmp_path / "scenes", write_sounds(tmp_path / "tree"), counts=(9, 2, 2), edits=0)
    every = [
        s for name in ("train", "new_files", "new_combinations") for s in read_sounds(built / f"{name}.jsonl").samples
    ]
    labels = tuple(sorted({e.name for s in every for e in events_of(s)}))
    for seed, name in enumerate(("tagger", "judge")):
        torch.manual_seed(seed)
        SoundTagger(TaggerNetwork(len(labels), 8).eval(), labels).save(tmp_path / name)
    start, out = tmp_path / "start", tmp_path / "out"
    command = ["train", "sound-sft", "--tiny", "--network.channels", "2", "--data", str(built / "train.jsonl")]
    assert main([*command, "--out", str(start)]) == 0
    places = ["--scenes", str(built), "--tagger", str(tmp_path / "tagger"), "--judge", str(tmp_path / "judge")]
    few = ["--seeds", "0", "--steps", "1", "--best-of", "2", "--only", "Fast-GRPO", "NFT", "SFT"]
    few += ["--options=--rl.prompts-per-step 1 --rl.group-size 2"]
    table = run_tool("measure_sounds", str(start), *places, *few, "--out", str(out))
    assert (out / "table.md").read_text().strip() in table
    systems = ["recordings", "start, unguided", "start, caption alone", "start", "best of 2", "Fast-GRPO", "NFT", "SFT"]
    systems.append("Fast-GRPO, best of 2")
    for part in (out / "table.md").read_text().split("## ")[1:]:
        assert [line.split(" | ")[0].removeprefix("| ") for line in part.strip().splitlines()[4:]] == systems
    assert list(read_record(out / "start.json", dict[str, float])) == ["1.0", "1.5", "2.0", "3.0"]
