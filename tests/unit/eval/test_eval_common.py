"""What every evaluation does: which checkpoint a run folder stands for, and results that a killed call continues."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from audiorl.audio import AudioClip
from audiorl.eval._common import (
    check_settings,
    distinct_rows,
    generate_all,
    prompt_digest,
    read_rows,
    run_evaluation,
    summarize,
)
from audiorl.run.folder import Run, newest_checkpoint
from audiorl.types import Message, Sample, Turn
from tests.conftest import make_text
from tests.support.checkpoints import save_run

SAMPLES = [Sample(id=f"s{i}", messages=()) for i in range(5)]
TEXTS = {s.id: f"text {s.id} ä" for s in SAMPLES}
seen: list[str | None] = []


@dataclass(frozen=True)
class Options:
    newest: ClassVar[bool] = True
    model: str | None = None


def main(options: Options) -> None:
    seen.append(options.model)


def test_a_run_folder_stands_for_its_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def given(model: object, newest: bool = True) -> str | None:
        monkeypatch.setattr(Options, "newest", newest)
        run_evaluation(sys.modules[__name__], ["--model", str(model)])
        return seen.pop()

    run = Run.create(tmp_path / "run", "recipe.py", [], {})
    with pytest.raises(SystemExit):
        given(run.dir)
    assert "the run has no checkpoint yet" in capsys.readouterr().err
    for step in (1, 2):
        run.log("sft", step, {"loss": 1.0})
        save_run(run, "sft", step, make_text(), {})
    newest = run.dir / "checkpoints" / "sft" / "step_000002"
    assert given(run.dir) == given(newest) == str(newest)
    assert capsys.readouterr().err == f"{run.dir}: checkpoints/sft/step_000002\n"
    assert given(run.dir, newest=False) == str(run.dir)
    assert given("Qwen/Qwen2.5-Omni-3B") == "Qwen/Qwen2.5-Omni-3B"


def test_a_run_folder_stands_for_what_it_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not for the control, which is newer."""
    run = Run.create(tmp_path / "run", "recipe.py", [], {})
    with pytest.raises(ValueError, match="run: the run has no checkpoint yet"):
        newest_checkpoint(run.dir)
    model = make_text()
    for step, phase in enumerate(("control_first", "sft", "grpo", "grpo", "control_sft"), 1):
        run.log(phase, step, {"loss": 1.0})
        save_run(run, phase, step, model, {})
        if phase == "control_first":
            with pytest.raises(ValueError, match="only controls have checkpoints; choose by --phase: control_first"):
                newest_checkpoint(run.dir)
    capsys.readouterr()
    for phase, expected in ((None, "grpo/step_000004"), ("sft", "sft/step_000002"), ("control_sft",) * 2):
        assert newest_checkpoint(run.dir, phase).startswith(f"{run.dir}/checkpoints/{expected}")
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.endswith("run: checkpoints/grpo/step_000004 (phases: control_first, sft, grpo, control_sft)")
    with pytest.raises(ValueError, match=r"no checkpoint of a phase 'ppo'; choose by --phase: .*, sft, grpo, control_"):
        newest_checkpoint(run.dir, "ppo")
    with pytest.raises(ValueError, match="--phase grpo: me/model is no run folder; leave --phase out"):
        newest_checkpoint("me/model", "grpo")


def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path, scripted) -> None:
    out = tmp_path / "a" / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        generate_all(scripted(TEXTS, fail_after=2), SAMPLES, out, 2, describe=lambda r: {"up": r.text.upper()})
    again = scripted(TEXTS)
    rows = generate_all(again, SAMPLES, out, batch_size=2)
    assert again.asked == ["s2", "s3", "s4"]
    assert [(r["id"], r["text"]) for r in rows] == list(TEXTS.items())
    assert rows[0].pop("prompt_digest") == prompt_digest(SAMPLES[0])
    assert rows[0] == {"id": "s0", "text": "text s0 ä", "tokens": 10, "stop_reason": "eos", "up": "TEXT S0 Ä"}
    idle = scripted(TEXTS)
    rows = generate_all(idle, SAMPLES, out)
    assert rows == read_rows(out) and idle.asked == []
    assert generate_all(idle, SAMPLES[3:], out) == rows[3:] and read_rows(out) == rows  # others stay in the file


def test_another_prompt_with_the_same_id_is_asked(tmp_path: Path, scripted) -> None:
    """Other words, another recording, another chunk of a stream; but a row that an earlier version wrote stays."""

    def about(text: str, *paths: str) -> Sample:
        return Sample("s0", (Message("user", (AudioClip(path=paths[0]), text)),), turns=streamed(*paths[1:]))

    def streamed(*paths: str) -> tuple[Turn, ...]:
        return tuple(Turn(AudioClip(path=path), 1.0) for path in paths)

    out = tmp_path / "out.jsonl"
    for sample in (about("a", "x/1.wav"), about("b", "x/1.wav"), about("b", "y/1.wav"), about("b", "y/1.wav", "2.wav")):
        for asked in (["s0"], []):
            engine = scripted(TEXTS)
            generate_all(engine, [sample], out)
            assert engine.asked == asked and len(distinct_rows(out, ["text"])) == 1
    out.write_text('{"id": "s0", "text": "old"}\n')
    assert generate_all(engine, [sample], out)[0]["text"] == "old" and engine.asked == []


def test_every_place_a_file_can_be_torn(tmp_path: Path, scripted) -> None:
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    rows = generate_all(scripted(TEXTS), SAMPLES[:2], whole)
    content = whole.read_bytes()
    for cut in range(len(content) + 1):
        torn.write_bytes(content[:cut])
        assert generate_all(scripted(TEXTS), SAMPLES[:2], torn) == rows
        assert torn.read_bytes() == content


def test_bad_results(tmp_path: Path, scripted) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match="repeated: s0"):
        generate_all(scripted(TEXTS), [SAMPLES[0], SAMPLES[0]], out)
    with pytest.raises(ValueError, match="batch_size"):
        generate_all(scripted(TEXTS), SAMPLES, out, batch_size=0)
    for text, message in (
        ('{"id": "s0"}\n{"id": \n{"id": "s1"}\n', "line 2: not JSON"),
        ("[1]\n", "line 1: not a result row"),
    ):
        out.write_text(text)
        with pytest.raises(ValueError, match=message):
            generate_all(scripted(TEXTS), SAMPLES, out)


def test_equal_values_of_clusters_are_as_many_as_the_clusters() -> None:
    """All right at six questions about three recordings: 3 / (3 + 1.96²); no difference at any of them: none."""
    clusters = ["a", "a", "b", "b", "c", "c"]
    right = summarize([1.0] * 6, clusters=clusters, share=True)
    assert (right["low"], right["high"], right["clusters"]) == (pytest.approx(0.4385, abs=1e-4), 1, 3)
    same = summarize([0.0] * 6, clusters=clusters)
    assert (same["low"], same["high"]) == (0, 0)


def test_settings_must_not_change_between_runs(tmp_path: Path) -> None:
    path = tmp_path / "run" / "settings.json"
    check_settings(path, {"model": "a", "tokens": (1, 2)})
    check_settings(path, {"model": "a", "tokens": [1, 2]})
    assert json.loads(path.read_text()) == {"model": "a", "tokens": [1, 2]}
    with pytest.raises(ValueError, match=r"model: 'a' -> 'b', new: None -> 1"):
        check_settings(path, {"model": "b", "tokens": [1, 2], "new": 1})
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"")
    for _ in range(2):
        check_settings(tmp_path / "of_a_folder.json", {"model": str(weights.parent)})
    os.utime(weights, (0, 1_000_000_000))
    with pytest.raises(ValueError, match=r"other settings \(weights: '20.* -> '2001-09-09"):
        check_settings(tmp_path / "of_a_folder.json", {"model": str(weights.parent)})
    weights.unlink()  # what was answered is still there to be scored
    check_settings(tmp_path / "of_a_folder.json", {"model": str(weights.parent)})
