"""What a policy answers is kept: an interrupted pass goes on where it was and gives the same pairs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from audiorl.config import SamplingConfig, SFTConfig
from audiorl.data.preferences import Pair
from audiorl.protocols import Request
from audiorl.recipes import dpo_online
from audiorl.recipes.dpo_online import sampled_pairs
from audiorl.rollout.hf import HFEngine
from audiorl.run.folder import Run
from audiorl.types import Rollout, Sample, Score
from tests.conftest import ask, make_text, readable


@pytest.fixture(autouse=True)
def chunks_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dpo_online, "CHUNK", 2)


class CountingEngine(HFEngine):
    """Remembers which prompts it was asked."""

    def __init__(self) -> None:
        super().__init__(make_text(), SamplingConfig(max_new_tokens=5))
        self.asked: list[str] = []

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        self.asked += [r.sample.id for r in requests]
        return super().generate(requests)


def even(rollouts: Sequence[Rollout]) -> list[Score]:
    return [Score(float((r.segments[0].ids % 2 == 0).float().mean())) for r in rollouts]


def questions(samples: list[Sample], count: int = 7) -> list[Sample]:
    clip = samples[0].audio[0]
    return readable(make_text(), [ask(clip, f"What is said {'yes ' * k}?", f"q{k}") for k in range(count)])


def new_run(folder: Path) -> Run:
    return Run.create(folder, "r.py", [], SFTConfig())


def pairs_in(run: Run, engine: CountingEngine, samples: list[Sample]) -> list[Pair]:
    with run:
        return sampled_pairs(run, "round_2", engine, samples, even, answers=4, seed=3)


def test_pairs_are_best_and_worst_answers(samples: list[Sample], tmp_path: Path) -> None:
    asked, engine, run = questions(samples), CountingEngine(), new_run(tmp_path / "run")
    pairs = pairs_in(run, engine, asked)
    assert engine.asked == [s.id for s in asked]
    rollouts = HFEngine(make_text(), SamplingConfig(max_new_tokens=5)).generate([Request(s, 4, seed=3) for s in asked])
    scores = even(rollouts)
    for pair in pairs:
        own = {r.text: s.total for r, s in zip(rollouts, scores, strict=True) if r.sample.id == pair.sample.id}
        assert own[pair.chosen] == max(own.values()) and own[pair.rejected] == min(own.values())
        assert pair.margin == pytest.approx(max(own.values()) - min(own.values()))
    rows = [json.loads(line) for line in (run.dir / "answers" / "round_2.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [s.id for s in asked]
    totals = [s.total for r, s in zip(rollouts, scores, strict=True) if r.sample.id == "q0"]
    assert rows[0]["score"] == pytest.approx(sum(totals) / 4)
    assert len(pairs) >= 5


def test_a_torn_file_is_finished(samples: list[Sample], tmp_path: Path) -> None:
    asked = questions(samples)
    whole = pairs_in(new_run(tmp_path / "a"), CountingEngine(), asked)
    run, engine = new_run(tmp_path / "b"), CountingEngine()
    pairs_in(run, engine, asked)
    path = run.dir / "answers" / "round_2.jsonl"
    intact = path.read_bytes()
    lines = intact.splitlines(keepends=True)
    for kept, torn in ((3, lines[3][:-9]), (0, lines[0][:1]), (6, b""), (7, b"")):
        path.write_bytes(b"".join(lines[:kept]) + torn)
        engine.asked.clear()
        assert pairs_in(Run.open(run.dir), engine, asked) == whole
        assert engine.asked == [s.id for s in asked[kept:]]
        assert path.read_bytes() == intact


def test_equal_rewards_leave_nothing_to_prefer(samples: list[Sample], tmp_path: Path) -> None:
    def same(rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score((0.3, 0.1 + 0.2)[r.index % 2]) for r in rollouts]  # they differ by one rounding

    with pytest.raises(ValueError, match=r"round_1: the answers to each of 7 prompts were all rewarded the same"):
        sampled_pairs(new_run(tmp_path / "run"), "round_1", CountingEngine(), questions(samples), same, 3, 0)
