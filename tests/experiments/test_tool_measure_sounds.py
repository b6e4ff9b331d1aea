"""The experiments on flows that make sounds run to their tables."""

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


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with scenes, two taggers and the run `start` of a stereo flow."""
    folder = tmp_path_factory.mktemp("flow")
    built = scenes(folder / "scenes", write_sounds(folder / "tree"), counts=(9, 2, 2), edits=0)
    every = [
        s for name in ("train", "new_files", "new_combinations") for s in read_sounds(built / f"{name}.jsonl").samples
    ]
    labels = tuple(sorted({e.name for s in every for e in events_of(s)}))
    for seed, name in enumerate(("tagger", "judge")):
        torch.manual_seed(seed)
        SoundTagger(TaggerNetwork(len(labels), 8).eval(), labels).save(folder / name)
    command = ["train", "sound-sft", "--tiny", "--network.channels", "2", "--data", str(built / "train.jsonl")]
    assert main([*command, "--out", str(folder / "start")]) == 0
    return folder


def measured(flow: Path) -> list[str]:
    return ["--scenes", str(flow / "scenes"), "--tagger", str(flow / "tagger"), "--judge", str(flow / "judge")]


def systems_of(file: Path) -> list[list[str]]:
    """The first column of every table of means in a file, each of which a table of changes follows."""
    tables = [part.strip().splitlines() for part in file.read_text().split("\n\n") if part.startswith("|")]
    assert all("azimuth °" in table[0] for table in tables)
    assert all("change from" in table[0] and len(table) > 3 for table in tables[1::2])
    return [[line.split(" | ")[0].removeprefix("| ") for line in table[2:]] for table in tables[::2]]


@pytest.mark.slow
def test_a_seed_of_a_flow_runs_to_the_table(flow: Path, tmp_path: Path) -> None:
    few = ["--seeds", "0", "--steps", "1", "--best-of", "2", "--only", "Fast-GRPO", "NFT", "SFT"]
    few += ["--options=--rl.prompts-per-step 1 --rl.group-size 2"]
    table = run_tool("measure_sounds", str(flow / "start"), *measured(flow), *few, "--out", str(tmp_path))
    assert (tmp_path / "table.md").read_text().strip() in table
    systems = ["recordings", "start, unguided", "start, caption alone", "start", "best of 2", "Fast-GRPO", "NFT", "SFT"]
    assert systems_of(tmp_path / "table.md") == [[*systems, "Fast-GRPO, best of 2"]] * 2
    assert list(read_record(tmp_path / "start.json", dict[str, float])) == ["1.0", "1.5", "2.0", "3.0"]


@pytest.mark.slow
def test_a_seed_of_thoughts_runs_to_the_table(flow: Path, tmp_path: Path) -> None:
    start = [
        "--flow",
        str(flow / "start"),
        "--tagger",
        str(flow / "tagger"),
        "--data",
        str(flow / "scenes/train.jsonl"),
    ]
    start += ["--path", "new", "--hear", "True", "--model.audio", "projector", "--held-out-count", "2"]
    start += ["--sft.steps", "1", "--sft.batch-size", "2", "--max-steps", "1", "--sound.steps", "2"]
    few = ["--rl.prompts-per-step", "1", "--rl.group-size", "2", "--sampling.max-new-tokens", "8"]
    assert main(["train", "thought-grpo", *start, *few, "--out", str(tmp_path / "start")]) == 0
    out, options = tmp_path / "out", " ".join(few)
    places = [*measured(flow), "--flow", str(flow / "start"), "--out", str(out)]
    places += ["--data", str(flow / "scenes/train.jsonl")]
    run_tool(
        "measure_thoughts", str(tmp_path / "start"), *places, "--seeds", "0", "--steps", "1", f"--options={options}"
    )
    assert systems_of(out / "table.md") == [["recordings", "given", "start", "GRPO", "more SFT"]] * 2
