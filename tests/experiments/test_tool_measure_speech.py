"""The comparison of reinforcement learning with the best sampling of its start runs to its table, and only once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from audiorl.audio import AudioClip
from audiorl.config import OptimConfig, SamplingConfig
from audiorl.run.folder import Run
from audiorl.train.preference import prefer
from corpora.recipes import tts_quickstart
from tests.support.tools import load_tool, run_tool
from tests.support.voices import write_two_voices


def trained_start(folder: Path, config: tts_quickstart.TTSQuickstartConfig) -> Path:
    run = Run.create(folder, "tts_quickstart", [], config)
    tts_quickstart.main(config, run)
    run.close()
    return folder


def measure_speech(start: Path, out: Path, *options: str) -> str:
    given = [str(start), "--judge", str(start / "recogniser"), "--out", str(out), "--validation", "1", "--test", "2"]
    return run_tool("measure_speech", *given, "--steps", "1", "--prompts", "2", "--group", "2", *options)


def test_seeds_are_pooled_and_arms_compared_at_equally_many_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = load_tool("measure_speech", monkeypatch)
    for seed, gain in (("0", 2.0), ("1", 4.0)):
        (tmp_path / seed).mkdir()
        arms = {"start": 50.0, "best4": 60.0, "alike": 51.0, "alike2": 50.0 + gain, "alike2_best4": 60.0 + 2 * gain}
        measured = {arm: {text: {"understood %": score} for text in "ab"} for arm, score in arms.items()}
        if seed == "1":
            del measured["alike"]
        (tmp_path / seed / tool.MEASURED).write_text(json.dumps(measured))
        (tmp_path / seed / "cpu.json").write_text(json.dumps({"alike": 10.0 * gain, "alike2": 100.0}))
    columns, seconds = tool.pooled([tmp_path / "0", tmp_path / "1"])
    assert list(columns) == ["start", "best4", "alike2", "alike2_best4"] and len(columns["alike2"]) == 4
    assert seconds == {"alike2": 130.0}  # of both rounds
    against_start, against_best = (
        {cells[1].strip(): [cell.split(" ")[1] for cell in cells[3:5] if cell.strip()] for cells in lines}
        for table in tool.tables(columns, seconds).split("\n\n")
        if (lines := [line.split("|") for line in table.splitlines()[2:] if line])
    )
    assert against_start["alike2"] == ["53.0", "+3.0"] and against_start["start"] == ["50.0"]
    assert against_best == {"best4": ["60.0"], "alike2_best4": ["66.0", "+6.0"]}


@pytest.mark.slow
def test_the_best_and_the_worst_of_the_samples_are_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the codes that were sampled, not those of their speech encoded again."""
    corpus = write_two_voices(tmp_path / "corpus")
    folder = trained_start(tmp_path / "start", replace(tts_quickstart.tiny(), corpus=str(corpus), clone=True))
    tool = load_tool("speech_start", monkeypatch)
    start = tool.Start(folder, 1, 2)
    policy, prompts = start.policy(), start.reward_prompts(4, 1)
    of_text = {"understood": torch.tensor([0.5, 0.0, 0.9]), "alike": torch.tensor([0.0, 0.2, 0.0])}
    stored = {f"{s.id}/{name}": scores.clone() for s in prompts for name, scores in of_text.items()}
    stored |= {f"{s.id}/{k}": torch.randint(0, 16, (2, 3 + k)) for s in prompts for k in range(3)}
    stored[f"{prompts[1].id}/understood"] = torch.tensor([0.2, 0.0, 0.23])  # with alike the margin is 0.03
    stored[f"{prompts[2].id}/2"] = torch.zeros(2, 0, dtype=torch.long)  # the best has no speech
    with Run.create(tmp_path / "out", "measure_speech", [], {}) as run:
        save_file(stored, run.dir / "samples_start.safetensors")
        samples = tool.StoredSamples(run, "start", start, policy, SamplingConfig(), 0, 3)
        pairs = samples.pairs(prompts)
        assert [p.sample for p in pairs] == [prompts[0], prompts[3]]
        for pair in pairs:
            assert pair.margin == pytest.approx(0.7)
            for answer, k in ((pair.chosen, 2), (pair.rejected, 1)):
                assert isinstance(answer, AudioClip)
                assert torch.equal(policy.codes(answer), stored[f"{pair.sample.id}/{k}"])
        config = replace(load_tool("measure_speech", monkeypatch).DPO, steps=2)
        prefer(policy, pairs, run, config=config, optim=OptimConfig(lr=1e-3))
        rows = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    margins = [row["preference/margin"] for row in rows]
    assert margins[0] == pytest.approx(0, abs=1e-4) and margins[1] > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("talker", [False, True])
def test_arms_are_trained_once_and_compared_with_the_start(talker: bool, tmp_path: Path) -> None:
    config = replace(tts_quickstart.tiny(), talker=talker, practice_texts=6)
    start, out = trained_start(tmp_path / "start", config), tmp_path / "out"
    trained = ["text", "first", "raft", "dpo", "sft"]
    if not talker:
        trained = ["text", "word", "first", "cer", "nll", "guarded", "raft", "balanced", "raft2", "raft3"]
        trained += ["dpo", "dpo2", "dpo3", "sft"]

    def measure() -> str:
        given = ("--arms", *trained) if talker else ()
        return measure_speech(start, out, "--best-of", "3", "--best-of-arms", "2", *given)

    first, table = measure(), (out / "table.md").read_text()
    arms = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert arms == ["start", "best3", *(name for arm in trained for name in (arm, f"{arm}_best2"))]
    page = (out / "listen.html").read_text()
    assert page.count("<audio") >= 2 * len(arms) and all(f"<th>{arm}</th>" in page for arm in ("recording", *arms))
    assert "first 1/1" in first
    assert "1/1" not in measure() and (out / "table.md").read_text() == table
