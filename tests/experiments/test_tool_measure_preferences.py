"""The pairs of the preference experiment have the length bias that its page states, and nothing else decides it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from audiorl.types import Sample
from tests.support.tools import ROOT, run_tool


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "experiments"))
        yield


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return import_module("preferences.pairs")


def answers(tool: ModuleType, count: int) -> list[tuple[Sample, list[object]]]:
    """Right answers of 3 and 9 tokens, wrong ones of 5 and 7, and longer ones that are cut off."""
    out = []
    for k in range(count):
        given = [tool.Answer(f"r{n}", n, True, True) for n in (3, 9)]
        given += [tool.Answer(f"w{n}", n, False, True) for n in (5, 7)]
        given += [tool.Answer("cut r20", 20, True, False), tool.Answer("cut w30", 30, False, False)]
        out.append((Sample(str(k), ()), given))
    return out


def test_as_many_chosen_answers_are_longer_as_the_bias_says(tool: ModuleType) -> None:
    one_sided = [(Sample("one", ()), [tool.Answer("r", 4, True, True), tool.Answer("w", 3, False, True)])]
    pairs = tool.pairs_of_answers([*answers(tool, 50), *one_sided], 0.8, 1000, random.Random(0))
    assert len(pairs) == 50 and all(p.sample.id != "one" for p, _ in pairs)
    # by as many tokens as the answers allow: 9 against 5, 3 against 7
    assert sorted(gap for _, gap in pairs) == [-4] * 10 + [4] * 40
    assert {(p.chosen, p.rejected) for p, _ in pairs} == {("r9", "w5"), ("r3", "w7")}


def test_which_questions_are_biased_is_drawn(tool: ModuleType) -> None:
    drawn = [
        {p.sample.id for p, gap in tool.pairs_of_answers(answers(tool, 50), 0.5, 40, random.Random(seed)) if gap > 0}
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == len(drawn[2]) == 20


def test_words_that_a_thought_repeats() -> None:
    tool = import_module("preferences.tables")
    assert tool.repeated("<think>one two one two</think><answer>English</answer>") == pytest.approx(0.5)
    assert tool.repeated("<think>one two</think><answer>English</answer>") == 0
    sample = Sample("a", (), metadata={"text": "Call forward on."})
    assert tool.all_said(sample, "<think>forward call</think><answer>English</answer>") == 1
    assert tool.all_said(sample, "<think>call back</think><answer>English</answer>") == 0
    assert tool.all_said(sample, "<answer>English</answer>") == 0


@pytest.mark.slow
def test_a_quick_run_ends_with_its_tables_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    run = partial(run_tool, "measure_preferences", "--quick", "--out", str(tmp_path))
    run("--only", "losses", "--losses", "DPO", "KTO")
    printed = run("--only", "losses", "reward", "--losses", "DPO")
    assert "losses/dpo/0" not in printed and "reward/debiased/0: " in printed
    sections = dict(part.split("\n\n", 1) for part in (tmp_path / "table.md").read_text().split("## ")[1:])
    rows = {
        title: [row.split("|")[1].strip() for row in text.splitlines()[2:] if row] for title, text in sections.items()
    }
    assert rows["Preference losses"] == ["start", "DPO", "KTO"] and rows["Reward models"] == ["plain", "debiased"]
    assert not rows["OPA-DPO"]
