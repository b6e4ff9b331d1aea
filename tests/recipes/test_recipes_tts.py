"""The recipes of speech output through the command line."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from audiorl.audio import AudioClip, write_wav
from audiorl.cli import main
from audiorl.data.corpus import bundled_speech
from audiorl.eval.metrics.prosody import MEASURES
from audiorl.models import load_policy
from audiorl.recipes._speech import write_tiny_part
from audiorl.rewards import WeightedSum
from audiorl.rewards.llm_judge import RecordedSpeech
from audiorl.rewards.replay import replay
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.run.metrics_log import read_metrics
from audiorl.speech_models.character_ctc import load as load_model
from audiorl.tasks.tts.listening import SpeechModels
from audiorl.tasks.tts.rewards import Duration, Finished, WordIntelligibility
from audiorl.train.fit import Learner
from corpora.recipes import tts_quickstart
from tests.conftest import make_text
from tests.support.voices import write_two_voices
from tokenizers_audio import CodeShards, load


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "tts"
    assert main(["train", "tts-quickstart", "--tiny", "--threads", "1", "--out", str(out)]) == 0
    return out


def test_quickstart_writes_a_whole_run(quickstart: Path) -> None:
    evals = json.loads((quickstart / "eval.json").read_text())
    assert {"before", "after"} <= set(evals)
    for name in ("before", "after"):
        assert evals[name]["n"] == 2 and 0 <= evals[name]["low"] <= evals[name]["accuracy"] <= evals[name]["high"] <= 1
        for row in rows_of(quickstart / "eval" / f"{name}.jsonl"):
            wav, rate = soundfile.read(quickstart / row["spoken_audio"]["path"])
            assert rate == 24_000 and len(wav) / rate == pytest.approx(row["seconds"])
    metrics = [m for m in read_metrics(quickstart / "metrics.jsonl") if m["phase"] == "grpo"]
    assert [m["step"] for m in metrics] == [1, 2]
    for wanted in ("reward/understood", "reward/length", "reward/finished", "kl_audio", "policy/entropy_audio"):
        assert wanted in metrics[0]
    assert (
        metrics[0]["policy/ratio"] == pytest.approx(1, abs=1e-4)
        and metrics[0]["policy/logprob_gap"] < 1e-4
        and metrics[0]["grad_norm"] > 0
    )


def test_its_parts_can_be_loaded(quickstart: Path) -> None:
    codec = load(quickstart / "codec")
    policy = load_policy(sorted((quickstart / "checkpoints" / "grpo").glob("step_*"))[-1])
    assert policy.speech is not None
    policy.set_codec(codec)
    assert load_model(quickstart / "recogniser").name == "recogniser"


def test_what_was_said_is_in_the_report(quickstart: Path) -> None:
    rows = rows_of(sorted((quickstart / "rollouts").glob("step_*.jsonl"))[-1])
    said = [row for row in rows if "spoken_audio" in row]
    assert said and all((quickstart / row["spoken_audio"]["path"]).is_file() for row in said)
    page = (quickstart / "report.html").read_text()
    assert "Spoken texts" in page and page.count("<audio") >= 4


def test_recorded_speech_scores_the_same_again(quickstart: Path) -> None:
    policy = load_policy(sorted((quickstart / "checkpoints" / "grpo").glob("step_*"))[-1])
    policy.set_codec(load(quickstart / "codec"))
    judges = SpeechModels(CodecSpeechDecoder.of(policy), recogniser=load_model(quickstart / "recogniser"))
    reward = WeightedSum.of(
        understood=WordIntelligibility(judges), length=(Duration(judges), 0.2), finished=(Finished(judges), 0.1)
    )
    result = replay(reward, str(quickstart / "rollouts" / "*.jsonl"))
    assert result.scores == result.recorded and len({s.total for s in result.scores if s}) > 1
    from_recordings = replay(Duration(SpeechModels(RecordedSpeech())), [*dict.fromkeys(result.files)])
    for old, new in zip(result.scores, from_recordings.scores, strict=True):
        assert old and new and new.parts["seconds"] == pytest.approx(old.parts["length/seconds"], abs=1e-4)


def test_a_finished_quickstart_goes_on_to_nothing(quickstart: Path) -> None:
    before = (quickstart / "metrics.jsonl").read_bytes()
    assert main(["resume", str(quickstart)]) == 0
    assert (quickstart / "metrics.jsonl").read_bytes() == before


@pytest.fixture
def two_ways(tmp_path: Path) -> Path:
    return write_two_voices(tmp_path)


def test_each_text_is_given_to_a_speaker(two_ways: Path) -> None:
    config = replace(tts_quickstart.tiny(), corpus=str(two_ways))
    voices = tts_quickstart.recordings(config)
    train, practice, test = tts_quickstart.splits(config)
    loud = [float(np.abs(tts_quickstart.said(words, voices)).max()) for words in (*train, *practice, *test)]
    alone = {name: tts_quickstart.said(train[0], {name: voices[name]}) for name in voices}
    assert set(alone) == {"quiet", "usual"} and len(set(loud)) > 2
    given = tts_quickstart.said(train[0], voices)
    assert sum(np.array_equal(given, wav) for wav in alone.values()) == 1
    assert tts_quickstart.prompt(train[0], voices).metadata["reference_seconds"] == len(given) / 16_000


def test_a_voice_to_imitate_says_other_words(two_ways: Path) -> None:
    """The prompt's voice is the speaker's whose recording is learned, and says no word of the text."""
    config = replace(tts_quickstart.tiny(), corpus=str(two_ways), clone=True, unseen_speakers=("quiet",))
    voices, test_voices = tts_quickstart.voices_of(config)
    assert list(voices) == ["usual"] and list(test_voices) == ["quiet"]
    train, _, test = tts_quickstart.splits(config)
    for texts, speakers in ((train, voices), (test, test_voices)):
        (recorded,) = speakers.values()
        for words, example in zip(texts, tts_quickstart.supervised(texts, speakers, clone=True), strict=True):
            (text,), (clip,) = (message.content for message in example.sample.messages[:2])
            assert isinstance(text, str) and isinstance(clip, AudioClip) and not {*text.split()} & {*words}
            assert np.array_equal(clip.load(16_000), tts_quickstart.joined(tuple(text.split()), recorded))
            assert np.array_equal(example.speech[0].load(16_000), tts_quickstart.joined(words, recorded))


def test_a_text_can_be_said_in_several_voices(two_ways: Path) -> None:
    config = replace(tts_quickstart.tiny(), corpus=str(two_ways), clone=True)
    voices, _ = tts_quickstart.voices_of(config)
    train, _, _ = tts_quickstart.splits(config)
    once, twice = (tts_quickstart.supervised(train, voices, clone=True, voices_per_text=n) for n in (1, 2))
    assert len(twice) == 2 * len(once)
    for words, own, first, second in zip(train, once, twice[::2], twice[1::2], strict=True):
        said = [example.speech[0].load(16_000) for example in (first, second)]
        assert np.array_equal(own.speech[0].load(16_000), said[0])
        assert np.abs(said[0]).max() != np.abs(said[1]).max()
        speakers = tts_quickstart.speakers_of(words, voices, 2)
        assert [e.sample.id for e in (first, second)] == [f"{own.sample.id} / {name}" for name in speakers]
        for name in speakers:
            assert any(np.array_equal(tts_quickstart.joined(words, voices[name]), wav) for wav in said)


def test_a_corpus_that_the_quickstart_cannot_use(two_ways: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["train", "tts-quickstart", "--tiny", "--corpus", str(two_ways)]
    refused = two_ways / "refused"
    assert main([*options, "--recogniser-speakers", "nobody", "--out", str(refused)]) == 2
    assert "--recogniser-speakers: no speaker 'nobody', only quiet, usual" in capsys.readouterr().err
    for wrong, complaint in (
        (["--unseen-speakers", "usual"], "--unseen-speakers: without --clone"),
        (["--clone", "--words", "5"], "--clone: 5 words are too few"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*options, *wrong, "--out", str(refused)])
        assert complaint in " ".join(capsys.readouterr().err.split())
    for names, complaint in ((["nobody"], "no speaker 'nobody'"), (["quiet", "usual"], "names every speaker")):
        assert main([*options, "--clone", "--unseen-speakers", *names, "--out", str(refused)]) == 2
        assert f"--unseen-speakers: {complaint}" in capsys.readouterr().err
    assert main([*options, "--voices-per-text", "3", "--out", str(refused)]) == 2
    assert "--voices-per-text: 3, but there are 2 speakers" in capsys.readouterr().err
    manifest = two_ways / "manifest.jsonl"
    manifest.write_text("\n".join(manifest.read_text().splitlines()[:-1]))
    assert main([*options, "--out", str(refused)]) == 2
    assert ": usual does not say " in capsys.readouterr().err and not refused.exists()


# -- from a path: supervised speech, then reinforcement ----------------------------------------------------------------


def train(recipe: str, out: Path, *options: str) -> Path:
    assert main(["train", recipe, "--tiny", *options, "--out", str(out)]) == 0
    return out


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


def checkpoint(run: Path, phase: str) -> Path:
    return sorted((run / "checkpoints" / phase).glob("step_*"))[-1]


def test_supervised_speech_from_a_path(taught: Path) -> None:
    losses = [m["sft/loss"] for m in read_metrics(taught / "metrics.jsonl") if m["phase"] == "sft"]
    assert len(losses) == 2 and losses[1] < losses[0]
    codec = load(taught / "tiny" / "codec")
    policy, start = (load_policy(path, codec=codec) for path in (checkpoint(taught, "sft"), taught / "tiny" / "model"))
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
        (row, "voice 'A': "),
        (row | {"turns": [{"speaker": "C", "text": "x"}]}, "none of the voices"),
        (row | {"turns": [{"speaker": "A", "text": "x"}]}, "no audio, neither here nor of the conversation"),
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
        *("--path", str(checkpoint(taught, "sft")), "--codec", str(taught / "tiny" / "codec"), "--lora", "True"),
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
    adapted = load_policy(checkpoint(run, "grpo"), codec=load(taught / "tiny" / "codec"))
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


def test_a_text_decoder_is_taught_and_not_reinforced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_text().save(tmp_path / "text")
    path = ("--path", str(tmp_path / "text"))
    assert main(["train", "tts-grpo", "--tiny", *path, "--out", str(tmp_path / "grpo")]) == 2
    assert "text: writes text only; teach it to speak first" in capsys.readouterr().err
    assert not (tmp_path / "grpo").exists()
    run = train("tts_sft", tmp_path / "sft", *path, "--judge", "None", "--max-steps", "1")
    assert load_policy(checkpoint(run, "sft")).speech is not None


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
        ("tts_sft", ("--data", "nowhere.jsonl"), "nowhere.jsonl: missing"),
    ):
        out = tmp_path / "run"
        assert main(["train", recipe, "--tiny", *options, "--out", str(out)]) == 2
        assert message in capsys.readouterr().err, options
        assert not out.exists()
