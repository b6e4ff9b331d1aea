"""Every recipe through the command line: what it writes can be read, loaded, scored again and evaluated."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from audiorl.cli import main
from audiorl.data.bundled import bundled_set
from audiorl.data.corpus import bundled_speech
from audiorl.models import AudioPolicy, load_policy
from audiorl.report.summary import evaluation_rows, metric_name
from audiorl.rewards import CharAccuracy, Hallucination, Repetition, WeightedSum
from audiorl.rewards.replay import replay
from audiorl.rollout.hf import HFEngine
from audiorl.run.metrics_log import read_metrics
from audiorl.train.fit import Learner
from tests.conftest import RECOGNISERS, make_omni, make_qwen2_audio
from tests.support.data_sources import SOURCES
from tests.support.full_size import save_full_size
from tests.support.recipe_runs import last_checkpoint, read_json, rows_of, train

REWARD = "def reward(rollout):\n    return len(rollout.text) / 100\n"


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("quickstart", tmp_path_factory.mktemp("runs") / "think")


@pytest.mark.smoke
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
    wanted |= {"grad_norm", "lr", "policy/logprob_gap"}
    assert wanted <= set(metrics[0]), wanted - set(metrics[0])
    assert all(m["policy/logprob_gap"] < 1e-4 for m in metrics)
    assert metrics[0]["policy/ratio"] == pytest.approx(1, abs=1e-6)
    page = (quickstart / "report.html").read_text()
    assert "<audio" in page and "accuracy" in page
    saved = read_json(quickstart / "config.json")
    assert saved["config"]["rl"]["steps"] == 2 and set(saved["versions"]) >= {"audiorl", "torch", "transformers"}


def test_quickstart_holds_out_phrases(quickstart: Path) -> None:
    """No phrase that is measured was heard from a human voice in training, in any language."""
    held_out = {a["id"].rsplit("/", 1)[0] for a in rows_of(quickstart / "eval" / "after.jsonl")}
    key = {u.id: u.key for u in bundled_speech(("en", "es", "fr"))}
    trained = {r["sample"]["id"].rsplit("/", 1)[0] for f in (quickstart / "rollouts").iterdir() for r in rows_of(f)}
    assert held_out and trained and not {key[i] for i in held_out} & {key[i] for i in trained}


@pytest.mark.smoke
def test_checkpoints_are_models(quickstart: Path) -> None:
    policy = load_policy(last_checkpoint(quickstart))
    started = load_policy(last_checkpoint(quickstart, "control_sft"))
    same = [n for n, p in policy.trainable().items() if torch.equal(p, started.trainable()[n])]
    assert not any(".q_proj.weight" in name and "audio_tower" not in name for name in same)
    frozen = policy.backbone.audio_encoder(policy.model).state_dict()
    projector = {id(p) for m in policy.backbone.projector(policy.model) for p in m.parameters()}
    other = started.backbone.audio_encoder(started.model).state_dict(keep_vars=True)
    assert all(torch.equal(frozen[n], p) for n, p in other.items() if id(p) not in projector and "proj" not in n)


def test_quickstart_without_thinking(tmp_path: Path) -> None:
    run = train("quickstart", tmp_path / "run", "--think", "False", "--control", "False")
    assert set(read_json(run / "eval.json")) == {"before", "after"}


def test_thoughts_of_a_new_model_that_hears(tmp_path: Path) -> None:
    run = train("thought-grpo", tmp_path / "run", "--path", "new", "--hear", "True", "--model.audio", "projector")
    assert set(read_json(run / "eval.json")) == {"before", "after"}
    asked = rows_of(next((run / "rollouts").iterdir()))[0]["sample"]["messages"][0]["content"]
    assert isinstance(asked[0], dict) and "The sound is the one that you hear." in asked[1]
    policy = load_policy(last_checkpoint(run))
    assert len(policy.tokenizer.encode("temporal: bell 0.50-1.20 s")) < 20, "its tokenizer knows thoughts"


def test_quickstart_measures_strangers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"id": f"x/{u.id}", "key": u.key, "language": u.language, "text": u.text, "audio": str(u.clip.path)}
        | {"duration": u.duration, "speaker": "Somebody" if i < 3 else u.speaker, "licence": u.licence}
        for i, u in enumerate(bundled_speech(("es",), max_seconds=1.5)[:6])
    ]
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = train("quickstart", tmp_path / "run", "--unseen", str(tmp_path), "--control", "False")
    evals = read_json(run / "eval.json")
    assert evals["unseen_after"]["n"] == 3, "the known speaker is left out"
    assert set(evals["unseen_after"]["changes"]) >= {"accuracy", "said", "vocabulary"}
    assert set(evals["after"]["outside"]) == {"said", "vocabulary"}
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[3:]))
    assert main(["train", "quickstart", "--tiny", "--unseen", str(tmp_path), "--out", str(tmp_path / "b")]) == 2
    assert "no English, Spanish or French by another speaker" in capsys.readouterr().err
    assert not (tmp_path / "b" / "checkpoints").exists(), "said before anything is trained"


def test_recorded_rollouts_score_the_same_again(
    quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "same.py"
    file.write_text(
        "from audiorl.rewards import AnswerAccuracy, ThinkFormat, ThinkTranscript, WeightedSum\n"
        "terms = {'accuracy': (AnswerAccuracy(), 2.0), 'format': ThinkFormat(), 'thought': ThinkTranscript(2)}\n"
        "reward = WeightedSum.of(**terms)\n"
    )
    recorded = sorted((quickstart / "rollouts").iterdir())[0]
    found = replay(file, recorded)
    assert len(found.rollouts) == 4
    assert [s.total for s in found.scores] == [s.total for s in found.recorded if s]
    assert found.means() == found.means(recorded=True)
    assert all(r.audio[0].load().size == r.sample.audio[0].load().size for r in found.rollouts)
    assert all(s.ids.any() and len(s.logprobs) == len(s.ids) for r in found.rollouts for s in r.segments)
    file.write_text(REWARD)
    capsys.readouterr()
    assert main(["rewards", "score", str(file), str(recorded)]) == 0
    shown = capsys.readouterr().out
    assert "recorded" in shown and "correlation" in shown
    longest = max(found.rollouts, key=lambda r: len(r.text))
    assert replay(file, recorded).scores[found.rollouts.index(longest)].total == len(longest.text) / 100


@pytest.mark.smoke
def test_report_again(quickstart: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(quickstart, copy)
    (copy / "report.html").unlink()
    assert main(["report", str(copy)]) == 0
    assert (copy / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("think", ["True", "False"])
def test_mmau_grpo_with_a_reward_of_ones_own(tmp_path: Path, think: str) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    run = train(
        "mmau_grpo", tmp_path / "run", "--think", think, "--control", "--reward-file", str(tmp_path / "mine.py")
    )
    rows = [r for f in sorted((run / "rollouts").iterdir()) for r in rows_of(f)]
    assert len(rows) == 8
    for row in rows:
        parts = row["score"]["parts"]
        assert set(parts) == {"accuracy", "format", "user"}
        assert parts["user"] == pytest.approx(len(row["text"]) / 100)
        assert row["score"]["total"] == pytest.approx(2 * parts["accuracy"] + parts["format"] + parts["user"])
        assert ("<think>" in row["sample"]["prompt"]) == (think == "True")
    assert any(row["advantage"] for row in rows)
    assert set(read_json(run / "eval.json")) == {"before", "after", "control"}


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
    rows: list[dict[str, Any]] = [
        {"id": u.id, "audio": u.clip.path, "question": "Which phrase is spoken?", "answer": u.text}
        | {"choices": [u.text, "something else"]}
        for u in bundled_speech(("en",), max_seconds=2)[:count]
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *extra]))
    return path


def test_the_model_card_of_a_run(tmp_path: Path) -> None:
    """Its results are those of eval.json, its options the run's, its licences the rows'."""
    data = bundled_manifest(tmp_path / "train.jsonl", 6)
    data.write_text("".join(json.dumps(row | {"licence": "CC-BY-4.0"}) + "\n" for row in rows_of(data)))
    strangers = bundled_manifest(tmp_path / "strangers.jsonl", 12)
    strangers.write_text("".join(json.dumps(row) + "\n" for row in rows_of(strangers)[8:]))
    run = train(
        "mmau_grpo", tmp_path / "run", "--data", str(data), "--held-out-count", "2", "--unseen", str(strangers),
        "--rl.kl-beta", "0.125",
    )  # fmt: skip
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    results = read_json(run / "eval.json")
    assert {"before", "after", "unseen_before", "unseen_after"} <= set(results)
    for name in ("before", "after", "unseen_before", "unseen_after"):
        r = results[name]
        row = f"| {name} | accuracy | {r['accuracy']:.4g} | ({r['low']:.4g} to {r['high']:.4g}) | "
        if name.endswith("after"):
            change, low, high = r["changes"]["accuracy"]
            row += f"{change:+.4g} ({low:.4g} to {high:.4g})"
        assert f"{row} | {r['n']} |\n" in card
    assert "| train.jsonl | training | CC-BY-4.0 (rows: 6) |\n" in card
    assert "| strangers.jsonl | unseen speakers | not stated |\n" in card
    assert '"kl_beta": 0.125,' in card
    assert "there is no `control`" in card and "Unseen speakers:" not in card and str(tmp_path) not in card


def test_asr_grpo_and_its_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train("asr_grpo", tmp_path / "run", "--unit", "char")
    sets = ("", "retention_", "no_speech_")
    assert set(read_json(run / "eval.json")) == {f"{s}{when}" for s in sets for when in ("before", "after")}
    assert set(read_json(run / "eval.json")["after"]["outside"]) == {"as_written"}
    accuracy = CharAccuracy(normalizer=read_json(run / "config.json")["config"]["normalizer"])
    guards = {"hallucination": (Hallucination("char"), 0.5), "repetition": (Repetition(beyond_reference=True), 0.2)}
    reward = WeightedSum.of(accuracy=accuracy, **guards)
    result = replay(reward, str(run / "rollouts" / "*.jsonl"))  # from the recorded transcripts
    assert result.scores == result.recorded and len({s.total for s in result.scores if s}) > 1
    capsys.readouterr()
    options = ["--tiny", "--retention-margin", "-1", "--out", str(tmp_path / "strict")]
    assert main(["train", "asr-grpo", *options]) == 2
    assert "retention: WER rose from" in capsys.readouterr().err
    assert (tmp_path / "strict" / "report.html").is_file() and last_checkpoint(tmp_path / "strict").is_dir()


def test_asr_grpo_with_strangers_and_a_control(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speech = bundled_speech(("en", "es", "fr"), max_seconds=2)
    rows = [
        {"id": u.id, "audio": u.clip.path, "text": u.text, "speaker": u.speaker, "language": u.language}
        for u in (*speech[:12], *speech[-3:])
    ]
    for name, part in (("train", rows[:12]), ("strangers", rows[-3:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (tmp_path / "length.py").write_text("def reward(rollout):\n    return len(rollout.text) / 100\n")
    options = ["--data", str(tmp_path / "train.jsonl"), "--retention-margin", "1"]
    options += ["--unseen", str(tmp_path / "strangers.jsonl"), "--outside-file", str(tmp_path / "length.py")]
    (tmp_path / "text.txt").write_text("What is said here?\n\nWho speaks, and in which language?\n")
    text = ["--retention-text", str(tmp_path / "text.txt")]
    run = train("asr_grpo", tmp_path / "run", *options, *text, "--control")
    entries = read_json(run / "eval.json")
    sets = ("", "retention_", "no_speech_", "unseen_", "text_")
    assert set(entries) == {f"{s}{when}" for s in sets for when in ("before", "after", "control")}
    change = entries["text_after"]["changes"]["nats_per_token"][0]
    assert change == pytest.approx(entries["text_after"]["nats_per_token"] - entries["text_before"]["nats_per_token"])
    assert entries["unseen_after"]["n"] == 3
    assert set(entries["unseen_control"]["changes"]) >= {"wer", "as_written", "length"}
    assert entries["after"]["wer"] >= 0 and "silent" in entries["no_speech_after"]
    assert not any("accuracy" in entry for entry in entries.values())
    assert last_checkpoint(run, "control_sft").is_dir()
    labels = {row.label for row in evaluation_rows(run)}
    assert {"WER, unseen", "length, unseen (not optimised)", "perplexity, text"} <= labels
    capsys.readouterr()
    (tmp_path / "strangers.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert main(["train", "asr-grpo", "--tiny", *options, "--out", str(tmp_path / "same")]) == 2
    assert "too; give speakers that nothing is trained on" in capsys.readouterr().err


@pytest.mark.parametrize("kind", RECOGNISERS)
def test_asr_grpo_and_eval_asr_with_an_encoder_decoder(tmp_path: Path, kind: str) -> None:
    if kind in ("canary", "cohere-asr"):
        pytest.importorskip("librosa", reason="their extractors need it")
    model = str(tmp_path / kind)
    RECOGNISERS[kind]().save(model)
    options = ["--path", model, "--retention-margin", "1"]
    if kind != "whisper":
        run = train("asr_grpo", tmp_path / "run", *options)
        assert any(row["grad_norm"] > 0 for row in read_metrics(run / "metrics.jsonl") if row["phase"] == "grpo")
        said = bundled_speech(("en",), max_seconds=2)[:4]
        rows = [{"id": u.id, "audio": u.clip.path, "text": u.text, "language": "en"} for u in said]
        (tmp_path / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        evaluated = ["--data", str(tmp_path / "said.jsonl"), "--out", str(tmp_path / "eval"), "--max-new-tokens", "8"]
        assert main(["eval", "asr", "--model", str(last_checkpoint(run)), *evaluated]) == 0
        assert read_json(tmp_path / "eval" / "scores.json")["wer"] > 0
        return
    options.append("--control")
    (tmp_path / "words.txt").write_text("agent\nconference\nasterisk\nextension\n")
    options += ["--hotwords", str(tmp_path / "words.txt"), "--distractors", "2"]
    run = train("asr_grpo", tmp_path / "run", *options, "--rl.listening.every", "1")
    assert all("audio/gain_silence" in row for row in read_metrics(run / "metrics.jsonl") if row["phase"] == "grpo")
    entries = read_json(run / "eval.json")
    assert {f"{s}{when}" for s in ("", "no_speech_") for when in ("before", "after", "control")} <= set(entries)
    assert {"wer", "b_wer", "u_wer"} <= entries["after"]["changes"].keys() and "b_wer" not in entries["no_speech_after"]
    trained = load_policy(last_checkpoint(run)).parameters_by_name()
    start = load_policy(model).parameters_by_name()
    changed = {name for name in start if not torch.equal(start[name], trained[name])}
    assert changed and all(name.startswith("model.decoder.") for name in changed)


def assert_whole(run: Path, phase: str, *more: str, metric: str = "accuracy") -> None:
    """before, after and `more` are measured; the last checkpoint is there; the report shows the run."""
    evals = read_json(run / "eval.json")
    assert set(evals) == {"before", "after", *more}
    assert all(0 <= e["low"] <= e[metric] <= e["high"] and e["n"] >= 4 for e in evals.values())
    steps = [m for m in read_metrics(run / "metrics.jsonl") if m["phase"] == phase]
    assert steps and all(m["grad_norm"] > 0 for m in steps)
    assert last_checkpoint(run, phase).name == f"step_{steps[-1]['step']:06d}"
    assert metric_name(metric) in (run / "report.html").read_text()


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_dpo_audio_qa(tmp_path: Path, loss: str) -> None:
    run = train("dpo_audio_qa", tmp_path / "run", "--dpo.loss", loss)
    assert_whole(run, loss)
    policy = load_policy(last_checkpoint(run, loss))
    before = read_metrics(run / "metrics.jsonl")[0]
    assert before["preference/loss"] == pytest.approx({"dpo": 0.693147, "kto": 0.5}[loss], abs=1e-4)
    assert policy.trainable()


def test_kto_learns_from_single_answers_and_from_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in bundled_manifest(tmp_path / "rows.jsonl", 12).read_text().splitlines()]
    pairs = [row | {"chosen": row["answer"], "rejected": "something else"} for row in rows[:4]]
    good = [
        {"id": r["id"], "audio": r["audio"], "question": "What?", "completion": "a", "label": True} for r in rows[4:8]
    ]
    bad = [{**r, "id": f"{r['id']}-", "label": False, "audio": a["audio"]} for r, a in zip(good, rows[8:], strict=True)]
    (tmp_path / "judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (*pairs, *good, *bad)))
    run = train(
        "dpo_audio_qa", tmp_path / "run", "--data", str(tmp_path / "judged.jsonl"),
        "--held-out-count", "6", "--dpo.loss", "kto",
    )  # fmt: skip
    asked = {row["id"] for row in rows_of(run / "eval" / "after.jsonl")}
    assert asked and asked <= {row["id"] for row in (*pairs, *good)}
    assert f"held out: {len(asked)} questions of 6 rows" in capsys.readouterr().out
    steps = [m for m in read_metrics(run / "metrics.jsonl") if m["phase"] == "kto"]
    assert all(m["grad_norm"] > 0 for m in steps)
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bad))
    words = ["train", "dpo-audio-qa", "--tiny", "--data", str(tmp_path / "bad.jsonl"), "--out", str(tmp_path / "no")]
    assert main([*words, "--held-out-count", "2", "--dpo.loss", "kto"]) == 2
    assert "no held-out row has a right answer; give questions by --held-out" in capsys.readouterr().err


def test_dpo_audio_qa_from_a_file_with_its_own_questions(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in bundled_manifest(tmp_path / "held_out.jsonl", 4).read_text().splitlines()]
    pairs = [row | {"chosen": row["answer"], "rejected": "something else"} for row in rows]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))
    run = train(
        "dpo_audio_qa", tmp_path / "run", "--data", str(tmp_path / "pairs.jsonl"),
        "--held-out", str(tmp_path / "held_out.jsonl"), "--dpo.loss", "simpo",
    )  # fmt: skip
    assert_whole(run, "simpo")
    assert {r["id"] for r in rows_of(run / "eval" / "after.jsonl")} == {r["id"] for r in rows}


@pytest.mark.parametrize("task", ["questions", "transcripts"])
def test_sft_audio(tmp_path: Path, task: str) -> None:
    run = train("sft_audio", tmp_path / "run", "--task", task)
    assert_whole(run, "sft", metric="accuracy" if task == "questions" else "wer")
    load_policy(last_checkpoint(run, "sft"))


def test_distill_speech(tmp_path: Path) -> None:
    run = train("distill_speech", tmp_path / "run", "--control", "--rl.distill.off-policy", "0.5")
    wanted = {"before", "after", "control", "view_before", "view_after", "view_control"}
    assert set(read_json(run / "eval.json")) == wanted
    steps = [m for m in read_metrics(run / "metrics.jsonl") if m["phase"] == "distill"]
    assert [m["step"] for m in steps] == [1, 2] and all(m["policy/loss"] == 0 for m in steps)
    assert all(m["distill/divergence"] > 0 and m["distill/divergence_off_policy"] > 0 for m in steps)
    load_policy(last_checkpoint(run, "distill"))


def test_distill_speech_on_transcripts_with_grpo(tmp_path: Path) -> None:
    """The teacher is another model, by its folder; its log-ratio is added to GRPO's advantages."""
    first = train("distill_speech", tmp_path / "first", "--task", "transcripts")
    options = ("--task", "transcripts", "--path", str(last_checkpoint(first, "distill")), "--rl.advantage", "grpo")
    teacher = ("--rl.distill.teacher", str(last_checkpoint(first, "distill")), "--rl.kl-beta", "0.01")
    run = train("distill_speech", tmp_path / "run", *options, *teacher, "--rl.distill.divergence", "sampled")
    steps = [m for m in read_metrics(run / "metrics.jsonl") if m["phase"] == "distill"]
    assert len(steps) == 2 and all("kl" in m and m["distill/divergence"] != 0 for m in steps)


def test_opa_dpo(tmp_path: Path) -> None:
    """From a checkpoint, so that the adapters have a base to be loaded on."""
    make_omni().save(tmp_path / "model")
    run = train("opa_dpo", tmp_path / "run", "--path", str(tmp_path / "model"), "--dpo.eval-every", "1")
    assert_whole(run, "dpo", "after_sft")
    first, second = (load_policy(last_checkpoint(run, phase)) for phase in ("sft", "dpo"))
    assert any(not torch.equal(p, first.trainable()[n]) for n, p in second.trainable().items())
    (dpo, *_) = [m for m in read_metrics(run / "metrics.jsonl") if m["phase"] == "dpo"]
    assert dpo["preference/margin"] == pytest.approx(0, abs=1e-4)  # the reference is the fine-tuned policy
    assert "eval/accuracy" in dpo
    assert rows_of(run / "answers" / "own.jsonl")


@pytest.fixture(scope="module")
def outcome_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("reward_model", tmp_path_factory.mktemp("runs") / "outcome")


def test_reward_model(outcome_model: Path) -> None:
    from audiorl.models.value import load_value_model

    assert_whole(outcome_model, "reward_model")
    load_value_model(last_checkpoint(outcome_model, "reward_model"))


def test_process_reward_model(tmp_path: Path) -> None:
    from audiorl.rewards import ProcessModelReward
    from audiorl.types import Rollout, Segment

    run = train("reward_model", tmp_path / "run", "--kind", "process")
    assert_whole(run, "process_reward")
    reward = ProcessModelReward(str(last_checkpoint(run, "process_reward")))
    nothing = torch.zeros(0, dtype=torch.long)
    sample = bundled_set("bundled")[0]
    (score,) = reward([Rollout(sample, (Segment(nothing, nothing, torch.zeros(0), "one\ntwo"),), "g")])
    assert 0 < score.total <= score.parts["mean"] < 1


@pytest.mark.parametrize("shared", ["False", "True"])
def test_ppo_audio_qa_with_a_trained_reward_model(tmp_path: Path, outcome_model: Path, shared: str) -> None:
    model = last_checkpoint(outcome_model, "reward_model")
    run = train(
        "ppo_audio_qa", tmp_path / "run", "--rl.critic.shared", shared, "--reward-model", str(model),
        "--max-steps", "3",
    )  # fmt: skip
    assert set(read_json(run / "eval.json")) == {"before", "after"}
    load_policy(last_checkpoint(run, "ppo"))
    assert (run / "report.html").is_file()
    scores = [r["score"] for f in sorted((run / "rollouts").iterdir()) for r in rows_of(f)]
    assert {frozenset(s["parts"]) for s in scores} == {frozenset({"accuracy", "format", "model"})}
    assert len({s["parts"]["model"] for s in scores}) > 1
    for s in scores:
        assert s["total"] == pytest.approx(2 * s["parts"]["accuracy"] + s["parts"]["format"] + s["parts"]["model"])


ONLINE = (
    "dpo_online", "--max-steps", "3", "--prompts-per-round", "8", "--optim.lr", "1e-3", "--dpo.save-every", "2",
    "--dpo.eval-every", "2",
)  # fmt: skip


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe, *options = ONLINE
    return train(recipe, tmp_path_factory.mktemp("runs") / "online", *options)


def test_dpo_online(online: Path) -> None:
    assert_whole(online, "round_2", "after_1")
    for k in (1, 2):
        first, second, _ = [m for m in read_metrics(online / "metrics.jsonl") if m["phase"] == f"round_{k}"]
        assert "eval/accuracy" in second
        assert first["preference/margin"] == pytest.approx(0, abs=1e-4)  # the reference is the policy that answered
        assert len(rows_of(online / "answers" / f"round_{k}.jsonl")) == 8
    first, second = (load_policy(last_checkpoint(online, f"round_{k}")) for k in (1, 2))
    assert any(not torch.equal(p, first.trainable()[n]) for n, p in second.trainable().items())


@pytest.mark.parametrize("moment", ["answers", "reference", "training"])
def test_dpo_online_interrupted_in_its_second_round(
    online: Path, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owner, method, count = {
        "answers": (HFEngine, "generate", 5),  # before, round 1, during round 1, after it, round 2
        "reference": (AudioPolicy, "forward", None),
        "training": (Learner, "train", 4),
    }[moment]
    original, calls = getattr(owner, method), 0

    def interrupted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        answered = (tmp_path / "run" / "answers" / "round_2.jsonl").exists()
        if calls == count or (count is None and answered and not torch.is_grad_enabled()):
            os.kill(os.getpid(), signal.SIGINT)
            monkeypatch.setattr(owner, method, original)
        return original(*args, **options)

    monkeypatch.setattr(owner, method, interrupted)
    recipe, *options = ONLINE
    assert main(["train", recipe, "--tiny", *options, "--out", str(tmp_path / "run")]) == 130
    error = capsys.readouterr().err
    where = {"answers": "at once", "reference": "after round_2 step 1", "training": "after round_2 step"}
    assert f"audiorl: stopped {where[moment]}" in error
    assert main(["resume", str(tmp_path / "run"), "--trust", "recipes/rewards/variety.py"]) == 0
    run = tmp_path / "run"
    for phase in ("round_1", "round_2"):
        for name in ("model.safetensors", "trainer.safetensors"):
            found, expected = (last_checkpoint(r, phase) / name for r in (run, online))
            assert found.read_bytes() == expected.read_bytes(), (phase, name)
        assert (run / "answers" / f"{phase}.jsonl").read_bytes() == (online / "answers" / f"{phase}.jsonl").read_bytes()
    assert read_json(run / "eval.json") == read_json(online / "eval.json")
    clocks = ("time", "seconds")
    lines = [
        [{k: v for k, v in m.items() if not k.startswith(clocks)} for m in rows_of(r / "metrics.jsonl")]
        for r in (run, online)
    ]
    assert lines[0] == lines[1]


@pytest.mark.smoke
def test_self_test_trains_a_step() -> None:
    from audiorl.cli.doctor import self_test

    metrics = self_test()
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-6) and metrics["policy/logprob_gap"] < 1e-4
    assert metrics["grad_norm"] > 0


@pytest.mark.large
def test_mmau_grpo_at_full_width(tmp_path: Path) -> None:
    """The released 3B model's widths, two layers deep, as a checkpoint of the whole model in bfloat16."""
    gc.collect()  # a run before this one may still hold its model
    assert save_full_size(tmp_path / "model") > 750_000_000
    manifest = bundled_manifest(tmp_path / "train.jsonl", 6)
    # random weights write tokens that the small tokenizer has no text for: reward something about the tokens
    reward = "def reward(rollout):\n    return float(rollout.segments[0].ids.float().mean()) / 1e5\n"
    (tmp_path / "mine.py").write_text(reward)
    run = train(
        "mmau_grpo", tmp_path / "run", "--path", str(tmp_path / "model"), "--lora", "True", "--data", str(manifest),
        "--held-out-count", "2", "--model.dtype", "float32", "--rl.save-every", "2",
        "--model.gradient-checkpointing", "True", 
        "--reward-file", str(tmp_path / "mine.py"),
    )  # fmt: skip
    metrics = read_metrics(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2]
    assert all(m["grad_norm"] > 0 for m in metrics) and metrics[0]["policy/ratio"] == pytest.approx(1, abs=1e-3)
    load_policy(last_checkpoint(run))


def test_a_dataset_of_the_hub_with_columns_of_its_own_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDIORL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    (tmp_path / "corpus").mkdir()
    data = ("--data", str(SOURCES["hub"](tmp_path / "corpus")), "--columns", "text=sentence", "language=lang")
    (u, *_) = bundled_speech(("en",), max_seconds=2)
    four = tmp_path / "four.jsonl"
    rows = [{"id": str(i), "audio": u.clip.path, "sentence": u.text, "lang": "en"} for i in range(4)]
    four.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = ("--held-out", str(four), "--retention", str(four), "--no-speech", "0", "--max-steps", "1")
    run = train("asr_grpo", tmp_path / "run", *data, *held_out)
    (first, *_) = rows_of(run / "rollouts" / "step_000001.jsonl")
    assert first["sample"]["metadata"]["speaker"] in ("jane", "joe")
