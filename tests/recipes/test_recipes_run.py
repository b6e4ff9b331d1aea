"""Every recipe through the command line: what it writes can be read, loaded, scored again and evaluated."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from audiorl.cli import main
from audiorl.data.corpus import bundled_speech
from audiorl.models import load_policy
from audiorl.train.logging import read_metrics
from tests.conftest import make_omni, make_qwen2_audio
from tests.recipes.full_size import save_full_size

REWARD = "def reward(rollout):\n    return len(rollout.text) / 100\n"


def train(recipe: str, out: Path, *options: str) -> Path:
    assert main(["train", f"recipes/{recipe}.py", "--tiny", *options, "--out", str(out)]) == 0
    return out


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def last_checkpoint(run: Path, phase: str = "grpo") -> Path:
    return sorted((run / "checkpoints" / phase).glob("step_*"))[-1]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("quickstart", tmp_path_factory.mktemp("runs") / "think")


def test_quickstart_writes_a_whole_run(quickstart: Path) -> None:
    evals = read_json(quickstart / "eval.json")
    assert set(evals) == {"before", "after", "control"}
    for name, result in evals.items():
        assert 0 <= result["low"] <= result["accuracy"] <= result["high"] <= 1 and result["n"] >= 1
        answers = rows_of(quickstart / "eval" / f"{name}.jsonl")
        assert len(answers) == result["n"]
        assert sum(a["correct"] for a in answers) == pytest.approx(result["accuracy"] * result["n"])
    metrics = [m for m in read_metrics(quickstart / "metrics.jsonl") if m["phase"] == "grpo"]
    assert [m["step"] for m in metrics] == [1, 2]
    wanted = {"reward/mean", "reward/std", "kl", "policy/loss", "policy/ratio", "policy/entropy", "policy/clip_frac"}
    wanted |= {"grad_norm", "lr", "policy/engine_gap"}
    assert wanted <= set(metrics[0]), wanted - set(metrics[0])
    assert all(m["policy/engine_gap"] < 1e-4 for m in metrics)
    assert metrics[0]["policy/ratio"] == pytest.approx(1, abs=1e-6)
    page = (quickstart / "report.html").read_text()
    assert "<audio" in page and "accuracy" in page
    saved = read_json(quickstart / "config.json")
    assert saved["config"]["grpo"]["steps"] == 2 and set(saved["versions"]) >= {"audiorl", "torch", "transformers"}


def test_quickstart_holds_out_phrases(quickstart: Path) -> None:
    """No phrase that is measured was heard from a human voice in training, in any language."""
    held_out = {a["id"].rsplit("/", 1)[0] for a in rows_of(quickstart / "eval" / "after.jsonl")}
    key = {u.id: u.key for u in bundled_speech(("en", "es", "fr"))}
    trained = {r["sample"]["id"].rsplit("/", 1)[0] for f in (quickstart / "rollouts").iterdir() for r in rows_of(f)}
    assert held_out and trained and not {key[i] for i in held_out} & {key[i] for i in trained}


def test_checkpoints_are_models(quickstart: Path) -> None:
    policy = load_policy(last_checkpoint(quickstart))
    started = load_policy(last_checkpoint(quickstart, "control_sft"))
    same = [n for n, p in policy.trainable().items() if torch.equal(p, started.trainable()[n])]
    assert not any(".q_proj.weight" in name and "audio_tower" not in name for name in same)
    frozen = policy.backbone.tower(policy.model).state_dict()
    projector = {id(p) for m in policy.backbone.projector(policy.model) for p in m.parameters()}
    other = started.backbone.tower(started.model).state_dict(keep_vars=True)
    assert all(torch.equal(frozen[n], p) for n, p in other.items() if id(p) not in projector and "proj" not in n)


def test_quickstart_without_thinking(tmp_path: Path) -> None:
    run = train("quickstart", tmp_path / "run", "--think", "False", "--control", "False")
    assert set(read_json(run / "eval.json")) == {"before", "after"}


def test_recorded_rollouts_score_the_same_again(
    quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from audiorl.rewards.replay import replay

    file = tmp_path / "same.py"
    file.write_text(
        "from audiorl.rewards import AnswerAccuracy, ThinkFormat, WeightedSum\n"
        "reward = WeightedSum.of(accuracy=(AnswerAccuracy(), 2.0), format=(ThinkFormat(), 1.0))\n"
    )
    recorded = sorted((quickstart / "rollouts").iterdir())[0]
    found = replay(file, recorded)
    assert len(found.rollouts) == 4
    assert [s.total for s in found.scores] == [s.total for s in found.recorded if s]
    assert found.means() == found.means(recorded=True) and not found.differences(5)
    assert all(r.audio == () and r.sample.audio[0].load().size for r in found.rollouts)
    file.write_text(REWARD)
    capsys.readouterr()
    assert main(["rewards", str(file), str(recorded)]) == 0
    shown = capsys.readouterr().out
    assert "recorded" in shown and "correlation" in shown
    longest = max(found.rollouts, key=lambda r: len(r.text))
    assert replay(file, recorded).scores[found.rollouts.index(longest)].total == len(longest.text) / 100


def test_replay_names_what_is_damaged(quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, rollouts = tmp_path / "reward.py", tmp_path / "rollouts.jsonl"
    file.write_text(REWARD)
    good = sorted((quickstart / "rollouts").iterdir())[0].read_text().splitlines()
    for damaged, message in (
        (good[0] + "\n{oops\n", "row 2"),
        (good[0] + "\n" + json.dumps({"text": "x"}) + "\n", "row 2: no field 'sample'"),
        (good[0].replace('"num_tokens": ', '"num_tokens": "x", "was": '), "row 1: not a rollout"),
        ("", "empty"),
    ):
        rollouts.write_text(damaged)
        capsys.readouterr()
        assert main(["rewards", str(file), str(rollouts)]) == 2
        error = capsys.readouterr().err
        assert message in error and str(rollouts) in error and error.count("\n") == 1
    assert main(["rewards", str(file), str(tmp_path / "none.jsonl")]) == 2


def test_report_again(quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(quickstart, copy)
    (copy / "report.html").unlink()
    assert main(["report", str(copy)]) == 0
    assert (copy / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("think", ["True", "False"])
def test_mmau_grpo_with_a_reward_of_ones_own(tmp_path: Path, think: str) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    run = train("mmau_grpo", tmp_path / "run", "--think", think, "--reward-file", str(tmp_path / "mine.py"))
    rows = [r for f in sorted((run / "rollouts").iterdir()) for r in rows_of(f)]
    assert len(rows) == 8
    for row in rows:
        parts = row["score"]["parts"]
        assert set(parts) == {"accuracy", "format", "user"}
        assert parts["user"] == pytest.approx(len(row["text"]) / 100)
        assert row["score"]["total"] == pytest.approx(2 * parts["accuracy"] + parts["format"] + parts["user"])
        assert ("<think>" in row["sample"]["prompt"]) == (think == "True")
    assert any(row["advantage"] for row in rows)


@pytest.mark.parametrize("family", [make_omni, make_qwen2_audio], ids=["qwen2.5-omni", "qwen2-audio"])
def test_mmau_grpo_with_lora_from_a_checkpoint(tmp_path: Path, family: Any) -> None:
    family().save(tmp_path / "model")
    manifest = bundled_manifest(tmp_path / "train.jsonl", 6)
    run = train(
        "mmau_grpo", tmp_path / "run", "--path", str(tmp_path / "model"), "--lora", "True",
        "--data", str(manifest), "--held-out-count", "2", "--model.gradient-checkpointing", "True",
    )  # fmt: skip
    assert (last_checkpoint(run) / "adapter_config.json").is_file()
    adapted = load_policy(last_checkpoint(run))
    assert adapted.adapter is not None
    assert any(".lora_B." in n and bool(p.any()) for n, p in adapted.model.named_parameters()) or all(
        m["grad_norm"] == 0 for m in read_metrics(run / "metrics.jsonl")
    )


def bundled_manifest(path: Path, count: int, *extra: dict[str, Any]) -> Path:
    """A native manifest of `count` questions about bundled recordings, then the rows of `extra`."""
    speech = bundled_speech(("en",), max_seconds=2)[:count]
    rows: list[dict[str, Any]] = [
        {
            "id": u.id,
            "audio": u.clip.path,
            "question": "Which phrase is spoken?",
            "choices": [u.text, "something else"],
            "answer": u.text,
        }
        for u in speech
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *extra]))
    return path


def test_asr_grpo_and_its_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train("asr_grpo", tmp_path / "run", "--unit", "char")
    assert set(read_json(run / "eval.json")) == {"before", "after", "retention_before", "retention_after"}
    capsys.readouterr()
    options = ["--tiny", "--retention-margin", "-1", "--out", str(tmp_path / "strict")]
    assert main(["train", "recipes/asr_grpo.py", *options]) == 2
    assert "retention: accuracy fell from" in capsys.readouterr().err
    assert (tmp_path / "strict" / "report.html").is_file() and last_checkpoint(tmp_path / "strict").is_dir()


@pytest.fixture
def eval_script(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(name: str, *options: str) -> None:
        monkeypatch.setattr(sys, "argv", list(sys.argv))
        assert main(["eval", name, *options]) == 0

    return run


def test_evaluating_a_checkpoint_on_questions(
    quickstart: Path, tmp_path: Path, eval_script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "id": u.id,
            "audio_id": u.clip.path,
            "question": "Which phrase is spoken?",
            "choices": [u.text, "something else"],
            "answer": u.text,
            "task": "speech",
            "difficulty": "easy",
        }
        for u in bundled_speech(("en",), max_seconds=2)[:3]
    ]
    (tmp_path / "broken.wav").write_bytes(b"RIFF")
    rows.append(rows[0] | {"id": "broken", "audio_id": "broken.wav"})
    data = tmp_path / "mmau.json"
    data.write_text(json.dumps(rows))
    options = ["--data", str(data), "--model", str(last_checkpoint(quickstart)), "--max-new-tokens", "8"]
    eval_script("mmau", *options, "--out", str(tmp_path / "out"))
    scores = read_json(tmp_path / "out" / "scores.json")
    assert scores["total"]["n"] == 4 and scores["total"]["missing"] == 1
    assert "broken.wav" in capsys.readouterr().err
    predictions = read_json(tmp_path / "out" / "predictions.json")
    assert [("model_output" in p) for p in predictions] == [True, True, True, False]


def test_evaluating_a_checkpoint_on_transcripts(quickstart: Path, tmp_path: Path, eval_script: Any) -> None:
    data = tmp_path / "asr.jsonl"
    speech = bundled_speech(("en",), max_seconds=2)[:3]
    rows = [{"id": u.id, "audio": u.clip.path, "text": u.text, "language": "en"} for u in speech]
    (tmp_path / "empty.wav").write_bytes(b"")
    rows.insert(1, rows[0] | {"id": "empty", "audio": "empty.wav"})
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--data", str(data), "--model", str(last_checkpoint(quickstart)), "--max-new-tokens", "8"]
    eval_script("asr", *options, "--out", str(tmp_path / "out"))
    scores = read_json(tmp_path / "out" / "scores.json")
    assert scores["files"] == 3 and scores["skipped"] == 1 and scores["wer"] > 0
    assert scores["reference_length"] == sum(len(u.text.split()) for u in speech)
    assert (tmp_path / "out" / "worst.html").read_text().count("<audio") == 3


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    for recipe in ("quickstart", "mmau_grpo", "asr_grpo"):
        with pytest.raises(SystemExit) as stop:
            main(["train", f"recipes/{recipe}.py", "--help"])
        assert stop.value.code == 0
        assert "--grpo.kl-beta" in capsys.readouterr().out


def test_self_test_trains_a_step() -> None:
    from audiorl.selftest import self_test

    metrics = self_test()
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-6) and metrics["policy/engine_gap"] < 1e-4
    assert metrics["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["True", "False"])
def test_mmau_grpo_at_full_width(tmp_path: Path, lora: str) -> None:
    """The released 3B model's widths, two layers deep, as a checkpoint of the whole model in bfloat16."""
    assert save_full_size(tmp_path / "model") > 750_000_000
    manifest = bundled_manifest(tmp_path / "train.jsonl", 6)
    # random weights write tokens that the small tokenizer has no text for: reward something about the tokens
    reward = "def reward(rollout):\n    return float(rollout.segments[0].ids.float().mean()) / 1e5\n"
    (tmp_path / "mine.py").write_text(reward)
    run = train(
        "mmau_grpo", tmp_path / "run", "--path", str(tmp_path / "model"), "--lora", lora, "--data", str(manifest),
        "--held-out-count", "2", "--model.dtype", "float32", "--grpo.save-every", "2",
        "--model.gradient-checkpointing", "True", 
        "--reward-file", str(tmp_path / "mine.py"),
    )  # fmt: skip
    metrics = read_metrics(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2]
    assert all(m["grad_norm"] > 0 for m in metrics) and metrics[0]["policy/ratio"] == pytest.approx(1, abs=1e-3)
    load_policy(last_checkpoint(run))
