"""The recipes of speech output through the command line."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2_5OmniForConditionalGeneration

from audiorl.audio import AudioClip, write_wav
from audiorl.cli import main
from audiorl.data.corpus import bundled_speech
from audiorl.eval.metrics.prosody import MEASURES
from audiorl.models import load_policy
from audiorl.models.families.talker import TalkerPolicy
from audiorl.models.weights import tensors_of
from audiorl.recipes._speech import write_tiny_part
from audiorl.rewards import WeightedSum
from audiorl.run.metrics_log import read_metrics
from audiorl.train.fit import Learner
from audiorl.types import Score
from tests.conftest import make_text
from tests.support.recipe_runs import last_checkpoint, rows_of, train
from tokenizers_audio import CodeShards, load


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of tts_sft that was stopped after its first step and continued."""
    out = tmp_path_factory.mktemp("runs") / "sft"
    original, calls = Learner.train, 0

    def stopped(self: Learner, examples: Any) -> dict[str, float]:
        nonlocal calls
        calls += 1
        if calls == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, examples)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "train", stopped)
        assert main(["train", "tts-sft", "--tiny", "--out", str(out)]) == 130
        codes = {f: f.stat().st_mtime_ns for f in (out / "codes").iterdir()}
        assert main(["resume", str(out)]) == 0
    assert {f: f.stat().st_mtime_ns for f in (out / "codes").iterdir()} == codes  # nothing was encoded again
    return out


def test_supervised_speech_from_a_path(taught: Path) -> None:
    losses = [m["sft/loss"] for m in read_metrics(taught / "metrics.jsonl") if m["phase"] == "sft"]
    assert len(losses) == 2 and losses[1] < losses[0]
    codec = load(taught / "tiny" / "codec")
    policy, start = (
        load_policy(path, codec=codec) for path in (last_checkpoint(taught, "sft"), taught / "tiny" / "model")
    )
    assert not torch.equal(policy.code_head.weight, start.code_head.weight)
    evals = json.loads((taught / "eval.json").read_text())
    assert set(evals) == {"before", "after"} and evals["after"]["n"] == 2 and "similarity" in evals["after"]
    held_out = {row["text"] for row in rows_of(taught / "eval" / "after.jsonl")}
    kept = CodeShards(taught / "codes", codec)
    english = {u.clip.key: u.text for u in bundled_speech(("en",), max_seconds=0.8)}
    assert kept and not held_out & {english[key] for key in kept}
    page = (taught / "report.html").read_text()
    assert "Spoken texts" in page and "<audio" in page


def test_conversations_are_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speech = [u for u in bundled_speech(("en",)) if 0.5 < u.duration < 0.8][:6] + bundled_speech(("en",), 1.5)[:1]
    for u in speech:
        write_wav(tmp_path / f"{u.text}.wav", u.clip.load(16_000), 16_000)
    named = [{"text": u.text, "audio": f"{u.text}.wav"} for u in speech]
    turns = [{"speaker": "AB"[i % 2]} | row for i, row in enumerate(named[2:])]
    row = {"id": "d", "voices": {"A": named[0], "B": named[1]}, "turns": turns}
    (tmp_path / "talk.jsonl").write_text(json.dumps(row))
    (tmp_path / "held_out.jsonl").write_text(json.dumps(named[2] | {"id": "h"}))
    options = ("--conversations", str(tmp_path / "talk.jsonl"), "--held-out", str(tmp_path / "held_out.jsonl"))
    options += ("--clone", "False", "--judge", "None")
    run = train("tts_sft", tmp_path / "run", *options)
    told = "conversations: 5 turns, of which 1 are longer than 0.8 s and 1 say a held-out text; these are left out"
    assert told in capsys.readouterr().out
    codes = CodeShards(run / "codes", load(run / "tiny" / "codec"))
    learned = {AudioClip(path=str(tmp_path / row["audio"])).key for row in [*named[:2], *named[3:6]]}
    assert learned <= set(codes), "the voices' codes and the turns' are kept"

    row["voices"]["A"]["duration"] = 0.2
    for changed, message in (
        (row, "talk.jsonl: row 1, field 'voices.A.audio': "),
        (row | {"turns": [{"speaker": "C", "text": "x"}]}, "none of the voices"),
        (row | {"turns": [{"speaker": "A", "text": "x"}]}, "missing, neither here nor of the conversation"),
    ):
        (tmp_path / "talk.jsonl").write_text(json.dumps(changed))
        out = tmp_path / "refused"
        assert main(["train", "tts-sft", "--tiny", *options, "--out", str(out)]) == 2
        assert message in capsys.readouterr().err and not out.exists()


def test_reinforced_speech_from_that_checkpoint(taught: Path, tmp_path: Path) -> None:
    """A low-rank adapter, on texts of a file in one voice, rewarded by judges of its own."""
    (tmp_path / "lines.txt").write_text("".join(f"Say {word} now.\n" for word in ("one", "two", "three", "four")))
    (tmp_path / "strangers.txt").write_text("Hello there.\nGood bye.\n")
    voice = next(u for u in bundled_speech(("en",), max_seconds=0.8))
    write_wav(tmp_path / "voice.wav", voice.clip.load(16_000), 16_000)
    run = train(
        "tts_grpo",
        tmp_path / "run",
        *("--path", str(last_checkpoint(taught, "sft")), "--codec", str(taught / "tiny" / "codec"), "--lora", "True"),
        *("--data", str(tmp_path / "lines.txt"), "--held-out-count", "1", "--clone", "False", "--epochs", "2"),
        *("--voice", str(tmp_path / "voice.wav"), "--voice-text", voice.text),
        *("--unseen", str(tmp_path / "strangers.txt")),
    )
    evals = json.loads((run / "eval.json").read_text())
    assert set(evals) == {"before", "after", "unseen_before", "unseen_after"} and evals["unseen_after"]["n"] == 2
    outside, changes = (set(evals["unseen_after"][name]) for name in ("outside", "changes"))
    assert outside >= {"accuracy", "wer"} and changes == outside | set(MEASURES)  # a reward may ask for prosody
    metrics = [m for m in read_metrics(run / "metrics.jsonl") if m["phase"] == "grpo"]
    wanted = ("understood", "similarity", "duration", "finished", "silence", "clipping")
    assert [m["step"] for m in metrics] == [1, 2] and {f"reward/{name}" for name in wanted} <= set(metrics[0])
    assert metrics[0]["policy/logprob_gap"] < 1e-4 and metrics[0]["grad_norm"] > 0
    assert "eval/accuracy" in metrics[0] and metrics[1]["kl/beta"] != metrics[0]["kl/beta"]
    adapted = load_policy(last_checkpoint(run, "grpo"), codec=load(taught / "tiny" / "codec"))
    assert adapted.adapter is not None and not adapted.has_fresh_adapter()
    (row, *_) = rows_of(sorted((run / "rollouts").glob("*.jsonl"))[0])
    assert row["sample"]["prompt"].startswith(f"{voice.text}\n[audio]\nSay ")


def test_every_estimator_takes_speech(tmp_path: Path) -> None:
    options = ("--rl.advantage", "gae", "--rl.kl.place", "reward", "--rl.kl.kind", "k1", "--max-steps", "1")
    weights = ("--rewards.understood", "0", "--rewards.similarity", "0", "--judge", "None")
    run = train("tts_grpo", tmp_path / "run", *options, *weights)
    (metrics,) = [m for m in read_metrics(run / "metrics.jsonl") if m["phase"] == "grpo"]
    assert metrics["critic/loss"] > 0 and "reward/understood" not in metrics and not (run / "eval.json").exists()
    assert not (run / "tiny" / "judge").exists()


@pytest.mark.slow
def test_thinker_and_talker_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both learn, the talker by the thinker as it is by then, and after an interruption the same bits; transformers
    reads the whole checkpoint with both."""
    (tmp_path / "reward.py").write_text("def reward(rollout):\n    return sum(map(ord, rollout.text)) % 7 / 7\n")
    options = ("--reward-file", str(tmp_path / "reward.py"), "--rl.kl-beta", "0.1", "--talker-rl.group-size", "4")
    options += ("--optim.lr", "1e-3", "--talker-optim.lr", "1e-3")
    # A random talker is never understood: let it be rewarded for the number of its frames.
    frames = WeightedSum.of(frames=lambda rollouts: [Score(float(r.num_sampled)) for r in rollouts])
    monkeypatch.setattr("audiorl.tasks.tts.rewards.speech_reward", lambda *_: frames)
    run = train("omni_grpo", tmp_path / "run", *options)
    assert {"before", "after", "spoken_before", "spoken_after"} == set(json.loads((run / "eval.json").read_text()))
    phases = [m["phase"] for m in read_metrics(run / "metrics.jsonl") if m["grad_norm"] > 0]
    assert phases == ["thinker_1", "talker_1", "thinker_2", "talker_2"]
    assert sorted(p.name for p in run.glob("thinker_*")) == ["thinker_2"]

    start, trained = (tensors_of(run / place, "") for place in ("tiny/omni", "omni"))
    heard = {name: tensor for name, tensor in trained.items() if not torch.equal(tensor, start[name])}
    assert {name.split(".")[0] for name in heard} == {"thinker", "talker"} and set(start) == set(trained)
    whole = Qwen2_5OmniForConditionalGeneration.from_pretrained(run / "omni")
    thinker = load_policy(last_checkpoint(run, "thinker_2")).model.lm_head.weight
    assert torch.equal(whole.thinker.lm_head.weight, thinker)
    talker = load_policy(last_checkpoint(run, "talker_2"), talker=True)
    assert isinstance(talker, TalkerPolicy) and talker.base == str(run / "thinker_2")
    assert torch.equal(whole.talker.codec_head.weight, talker.code_head.weight)

    def stopped(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("audiorl.models.export.export", stopped)
        assert main(["train", "omni-grpo", "--tiny", *options, "--out", str(tmp_path / "again")]) == 130
    assert main(["resume", str(tmp_path / "again"), "--trust", str(tmp_path / "reward.py")]) == 0
    again = tensors_of(tmp_path / "again" / "omni", "")
    assert all(torch.equal(tensor, again[name]) for name, tensor in trained.items())


def test_a_text_decoder_is_taught_and_not_reinforced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_text().save(tmp_path / "text")
    path = ("--path", str(tmp_path / "text"))
    assert main(["train", "tts-grpo", "--tiny", *path, "--out", str(tmp_path / "grpo")]) == 2
    assert "text: writes text only; teach it to speak first" in capsys.readouterr().err
    assert not (tmp_path / "grpo").exists()
    run = train("tts_sft", tmp_path / "sft", *path, "--judge", "None", "--max-steps", "1")
    assert load_policy(last_checkpoint(run, "sft")).speech is not None


def test_speech_recipes_refuse_what_cannot_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lines.txt").write_text("One.\nTwo.\n")
    lines = ("--data", str(tmp_path / "lines.txt"), "--held-out-count", "1", "--clone", "False")
    write_tiny_part("asr", tmp_path / "judge")
    judge = str(tmp_path / "judge")
    for recipe, options, message in (
        ("tts_sft", lines, "has no recording to train on"),
        ("tts_grpo", lines, ": no metadata['reference_audio']"),
        ("tts_grpo", ("--judge", judge, "--rewards.asr", judge), "the reward asks it, too"),
        ("tts_grpo", ("--judge", str(tmp_path)), "config.json: missing"),
        ("tts_sft", ("--codec", str(tmp_path)), "config.json"),
        ("tts_sft", ("--data", "nowhere.jsonl"), "nowhere.jsonl: no such file or folder"),
    ):
        out = tmp_path / "run"
        assert main(["train", recipe, "--tiny", *options, "--out", str(out)]) == 2
        assert message in capsys.readouterr().err, options
        assert not out.exists()
