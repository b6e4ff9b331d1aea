"""tts-quickstart through the command line: a whole run, its parts, its texts and voices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from audiorl.audio import AudioClip
from audiorl.cli import main
from audiorl.models import load_policy
from audiorl.rewards import WeightedSum
from audiorl.rewards.llm_judge import RecordedSpeech
from audiorl.rewards.replay import replay
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.run.metrics_log import read_metrics
from audiorl.speech_models.character_ctc import load as load_model
from audiorl.tasks.tts.listening import SpeechModels
from audiorl.tasks.tts.rewards import Duration, Finished, WordIntelligibility
from corpora.recipes import tts_quickstart
from tests.support.recipe_runs import last_checkpoint, rows_of
from tests.support.voices import write_two_voices
from tokenizers_audio import load


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
    policy = load_policy(last_checkpoint(quickstart))
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
    policy = load_policy(last_checkpoint(quickstart))
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
    assert main([*options, "--words", "4", "--train-texts", "11", "--out", str(refused)]) == 2
    assert "--words 4, --most-words 2: make 16 texts, 17 are wanted; raise them" in capsys.readouterr().err
    manifest = two_ways / "manifest.jsonl"
    manifest.write_text("\n".join(manifest.read_text().splitlines()[:-1]))
    assert main([*options, "--out", str(refused)]) == 2
    assert ": usual does not say " in capsys.readouterr().err and not refused.exists()
