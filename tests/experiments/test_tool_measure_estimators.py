"""The comparison of estimators runs to its tables; a second call trains nothing again."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from audiorl.rewards import load_reward
from audiorl.types import Rollout, Sample, Segment
from tests.support.tools import ROOT, run_tool


def answered(text: str) -> Rollout:
    return Rollout(Sample("s", ()), (Segment(torch.arange(2), torch.arange(2), torch.zeros(2), text=text),), "s")


@pytest.mark.parametrize(
    ("thought", "words"), [("por favor", 1), ("Please, enter", 1), ("por mena", 0), ("porfavor", 0), ("", 0)]
)
def test_a_thought_of_words_and_a_cue(thought: str, words: int) -> None:
    (score,) = load_reward(str(ROOT / "experiments" / "thought_words.py"))(
        [answered(f"<think>{thought}</think><answer>x</answer>")]
    )
    assert score is not None and score.total == words


def test_no_thought_is_not_made_of_words() -> None:
    (score,) = load_reward(str(ROOT / "experiments" / "thought_words.py"))([answered("por favor")])
    assert score is not None and score.total == 0


@pytest.mark.slow
def test_arms_are_trained_once_and_measured_on_unseen_speakers(tmp_path: Path) -> None:
    run = partial(run_tool, "measure_estimators", "--out", str(tmp_path), "--quick", "--only", "RLOO", "SFT")

    assert "grpo 2/2" in run()
    state = tmp_path / "RLOO" / "seed_0" / "state.json"
    stopped = json.loads(state.read_text())
    stopped["finished"] = {k: v for k, v in stopped["finished"].items() if "after" not in k}
    state.write_text(json.dumps(stopped))  # as if it had been interrupted in its last evaluation
    assert "grpo 2/2" not in run()
    known, unseen, listening = (tmp_path / "table.md").read_text().split("## ")[1:]
    for table in (known, unseen):
        assert [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")][2:] == [
            *("| start", "| RLOO", "| SFT")
        ]
    assert "| RLOO |" in listening and "| SFT |" in listening
