"""simul-quickstart through the command line: streams, speakers, two stages, speech."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

import tokenizers_audio
from audiorl.cli import main
from audiorl.data.corpus import bundled_speech, corpus
from audiorl.data.rollout_rows import read_rollouts
from audiorl.models import load_policy
from audiorl.recipes._speech import tiny_part
from audiorl.rewards.replay import replay
from audiorl.run.metrics_log import read_metrics
from audiorl.tasks.simul.formats import read_streams
from audiorl.tasks.simul.logs import read_log
from audiorl.tasks.simul.rewards import multi_turn
from audiorl.tasks.simul.streams import SPEAKER_MARK
from corpora.recipes import simul_quickstart as quickstart_recipe
from corpora.recipes._streams import Prompts, StreamOptions
from tests.support.recipe_runs import last_checkpoint, rows_of, train
from tests.support.unified_codec import tiny as tiny_codec

STAGES = ("stage1", "stage2")
FROM_SPANISH = ("--source", "es", "--target", "en", "--unseen", "unseen_speakers")


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train("simul_quickstart", tmp_path_factory.mktemp("runs") / "simul", *FROM_SPANISH)


def test_quickstart_writes_a_whole_run(quickstart: Path) -> None:
    evals = json.loads((quickstart / "eval.json").read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    trained = {"before", "after stage1", "after"}
    assert set(evals) == {*trained, "wait-2", "offline", *(f"unseen_{name}" for name in trained)}
    for name, result in evals.items():
        assert result["n"] == 2 and result["low"] <= result["high"] and 0 <= result["chrf"] <= 100
        logged = read_log(quickstart / "eval" / name)
        rows = rows_of(quickstart / "eval" / f"{name}.jsonl")
        assert [i.prediction for i in logged] == [" ".join(r["text"].split()) for r in rows]
        assert all(len(r["segments"]) == len(r["sample"]["turns"]) for r in rows)
        low, high = result["outside"]["bleu"]  # word F1 is rewarded, BLEU is not
        assert low <= high and "chrf" in result["outside"] and "word_f1" not in result["outside"]
        baseline = "unseen_before" if name.startswith("unseen_") else "before"
        if name != baseline:
            for metric in ("bleu", "word_f1"):
                change = result[metric] - evals[baseline][metric]
                assert result["changes"][metric][0] == pytest.approx(change, abs=1e-6)
    metrics = {s: [m for m in read_metrics(quickstart / "metrics.jsonl") if m["phase"] == s] for s in STAGES}
    wanted = {"kl", "kl/beta", "reward/detection", "reward/initiative", "reward/quality", "reward/format"}
    wanted |= {"reward/length", "reward/repetition"}
    for stage, parts in (("stage1", set()), ("stage2", {"reward/latency", "reward/stream_quality"})):
        assert [m["step"] for m in metrics[stage]] == [1, 2]
        first, second = metrics[stage]
        assert wanted | parts <= set(first)
        assert "policy/ratio" not in first and second["policy/ratio"] == pytest.approx(1, abs=1e-5)  # the critic first
        assert first["kl/beta"] == second["kl/beta"]  # a waiting policy does not move β
        assert second["policy/logprob_gap"] < 1e-4 and second["grad_norm"] > 0
    assert "reward/latency" not in metrics["stage1"][0]
    finished = json.loads((quickstart / "state.json").read_text())["finished"]
    assert metrics["stage2"][0]["kl/beta"] == pytest.approx(finished["stage1"]["kl_beta"])  # β goes on
    assert finished["stage1"]["kl_beta"] != metrics["stage1"][0]["kl/beta"]
    assert metrics["stage1"][0]["kl"] == pytest.approx(0, abs=1e-6)
    page = (quickstart / "report.html").read_text()
    assert "class='timeline" in page or "<svg" in page


def test_no_prompt_is_in_both_splits(quickstart: Path) -> None:
    splits = ("train", "test", "unseen")
    streams = {s: read_streams(quickstart / "streams" / s / "streams.jsonl").samples for s in splits}
    texts = {s: {u.source for stream in streams[s] for u in stream.units} for s in splits}
    assert all(texts.values()) and not texts["train"] & (texts["test"] | texts["unseen"])
    assert {s.id.split("/")[2] for s in streams["unseen"]} == {"July E. Jiménez"}
    assert {(s.source_language, s.target_language) for s in streams["unseen"]} == {("es", "en")}


def test_an_unseen_speaker_with_few_held_out_prompts_says_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Armelle Desjardins says four held-out prompts, of some 5 s; a stream lasts up to 12 s."""
    options = StreamOptions(source="fr", target="en", unseen=("unseen_speakers",), test_streams=3)
    streams = Prompts(options).unseen()
    assert [s.id for s in streams] == [f"fr-en/all/Armelle Desjardins/0/000{k}" for k in range(3)]
    printed = capsys.readouterr().out
    assert re.search(r"Armelle Desjardins: 1\d prompts, 1\d of them said by a person in training", printed)
    assert "Tux Paint fr: left out, says none of the prompts" in printed
    short = replace(options, seconds=(2.0, 4.0))
    assert all(s.id.startswith("fr-en/test/") for s in Prompts(short).unseen())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*FROM_SPANISH[:4], "--unseen", "audiorl/assets/speech"), "nobody but Allison Smith says anything in 'es'"),
        (("--unseen", "unseen_speakers"), "--unseen: Tux Paint en say none of the prompts of at most"),
        (("--source", "it"), "no recordings in 'it', only en, es, fr"),
        (("--target", "ru"), "no recordings in 'ru', only en, es, fr"),
        (("--texts", "announcements", "--source", "fr"), "announcements are composed in en and es, not in 'fr'"),
        (("--speakers", "unseen_speakers"), "--speakers unseen_speakers: needs --texts announcements"),
        (("--speaker-marks",), "--speaker-marks: needs --texts announcements"),
        (("--texts", "announcements", "--speakers-per-stream", "2"), "2 speakers a stream, but 1 voices; give 1 to 1"),
    ],
)
def test_quickstart_without_recordings_to_measure(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    assert main(["train", "simul-quickstart", "--tiny", *options, "--out", out]) != 0
    assert message in capsys.readouterr().err


def test_recorded_streams_carry_the_rewards_of_each_chunk(quickstart: Path) -> None:
    files = sorted((quickstart / "rollouts").glob("*.jsonl"))
    assert [f.stem for f in files] == [f"step_{n:06d}" for n in (1, 2, 3, 4)]  # both stages, two steps each
    for row in (r for f in files for r in rows_of(f)):
        turns = len(row["sample"]["turns"])
        assert len(row["score"]["per_segment"]) == turns
        assert {len(v) for v in row["score"]["segment_parts"].values()} == {turns}
        (clip,) = row["sample"]["audio"]  # the chunks of one recording as one
        assert clip["duration"] == pytest.approx(row["sample"]["turns"][-1]["end"])
    rollouts = read_rollouts(files[0])
    assert len(rollouts) == 4 and all(r.score and len(r.sample.turns) == len(r.segments) for r in rollouts)


def test_recorded_streams_score_the_same_again(quickstart: Path) -> None:
    config = json.loads((quickstart / "config.json").read_text())["config"]
    options = config["rewards"]
    reward = multi_turn(options["quality"], weights=options["weights"], waits=options["waits"], guards=True)
    result = replay(reward, [quickstart / "rollouts" / f"step_{n:06d}.jsonl" for n in (3, 4)])  # of the second stage
    assert len(result.rollouts) == 8 and None not in result.scores
    for old, new in zip(result.recorded, result.scores, strict=True):
        assert old and new and (new.total, new.parts, new.per_segment) == (old.total, old.parts, old.per_segment)
    assert all(t.audio.load().size for r in result.rollouts for t in r.sample.turns)


@pytest.mark.slow
def test_an_interpreter_with_a_codec_speaks_its_translations(tmp_path: Path) -> None:
    tiny_codec().save(tmp_path / "codec")
    few = ("--robot-streams", "2", "--human-streams", "2", "--test-streams", "1", "--lag", "0")
    short = ("--seconds", "1", "2", "--chunks.seconds", "1.92")  # one chunk, after which it is said
    sft = ("--sft.steps", "12", "--sft-optim.lr", "5e-3", "--sft-optim.warmup-steps", "2")  # until it opens speech
    rest = ("--ks", "--stages", "stage1", "--sampling.max-new-tokens", "16", "--threads", "1")
    run = train("simul_quickstart", tmp_path / "run", "--codec", str(tmp_path / "codec"), *few, *short, *sft, *rest)
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert {"kl_audio", "policy/entropy_audio", "reward/time"} <= set(last)
    assert last["policy/logprob_gap"] < 1e-4 and last["grad_norm"] > 0
    policy, codec = load_policy(last_checkpoint(run, "stage1")), tokenizers_audio.load(tmp_path / "codec")
    policy.set_codec(codec)
    start = load_policy(last_checkpoint(run, "sft"))
    assert not torch.equal(policy.code_head.weight, start.code_head.weight)  # codes were learned from, too
    tracks = 0
    for name in ("before", "after stage1"):
        folder = run / "eval" / name / "speech"
        (instance,) = read_log(folder)
        wav, rate = soundfile.read(folder / "wavs" / "0_pred.wav")
        assert rate == codec.sample_rate and len(wav) / rate == pytest.approx(instance.prediction_length)
        for start_ms, length in instance.intervals or ():
            assert start_ms >= instance.delays[0] > 1000 and np.abs(wav[round(start_ms / 1000 * rate) :]).max() > 0
            assert len(wav) / rate == pytest.approx((start_ms + length) / 1000, abs=1e-3)
            tracks += 1
    recorded = [row for f in (run / "rollouts").glob("*.jsonl") for row in rows_of(f)]
    said = [row["spoken_audio"]["path"] for row in recorded if row.get("spoken_audio")]
    assert said and all(soundfile.info(run / path).frames for path in said) and tracks

    judge, encoder = (tiny_part(tmp_path, name, "tiny") for name in ("judge", "speaker"))
    options = ["--model", str(run), "--streams", str(run / "streams" / "test"), "--out", str(tmp_path / "eval")]
    options += ["--codec", str(tmp_path / "codec"), "--asr", judge, "--speaker", encoder, "--audio-temperature", "0"]
    options += ["--max-frames", "8", "--max-new-tokens", "16", "--chunk-seconds", "1.92"]
    assert main(["eval", "simul", *options]) == 0
    heard = json.loads((tmp_path / "eval" / "speech" / "scores.json").read_text())
    assert {"ASR-BLEU", "ASR-TER", "SourceSimilarity", "DurationRatio", "StartOffset"} <= heard.keys()
    assert len((tmp_path / "eval" / "speech" / "asr_transcripts.txt").read_text().splitlines()) == 1
    folders = (tmp_path / "eval", run / "eval" / "after stage1")
    greedy, in_run = (soundfile.read(folder / "speech" / "wavs" / "0_pred.wav")[0] for folder in folders)
    np.testing.assert_allclose(greedy, in_run, atol=1e-3)


@pytest.mark.slow
def test_nobody_says_the_measured_announcements_in_training(tmp_path: Path) -> None:
    late = ("--late-steps", "1", "--late-by", "phrase", "--texts", "announcements", "--stages", "stage1", "--ks")
    run = train("simul_quickstart", tmp_path / "run", *FROM_SPANISH, *late)
    texts = {
        split: {u.source for s in read_streams(run / "streams" / split).samples for u in s.units}
        for split in ("robots", "train", "test", "unseen")
    }
    dates = {split: {text for text in of_split if " de " in text} for split, of_split in texts.items()}
    assert not (dates["robots"] | dates["train"]) & (dates["test"] | dates["unseen"])
    evals = json.loads((run / "eval.json").read_text())
    assert {"on time", "before", "after stage1", "unseen_before", "unseen_after stage1"} <= set(evals)


def test_two_speakers_take_turns_in_a_stream(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    with open(folder / "manifest.jsonl", "w") as manifest:
        for u in (*bundled_speech(("es",)), *corpus("unseen_speakers", ("es",))):
            columns = ("id", "key", "language", "text", "duration", "speaker", "licence")
            row = {name: getattr(u, name) for name in columns} | {"audio": os.path.relpath(u.clip.path, folder)}
            manifest.write(json.dumps(row) + "\n")
    options = ("--texts", "announcements", "--speakers", str(folder), "--speakers-per-stream", "2")
    none = ("--speaker-marks", "--seconds", "8", "14", "--robot-streams", "0", "--stages", "--ks")
    run = train("simul_quickstart", tmp_path / "run", "--source", "es", "--target", "en", *options, *none)
    for stream in read_streams(run / "streams" / "train").samples:
        assert {u.speaker for u in stream.units} == {"Allison Smith", "July E. Jiménez"}
        assert f" {SPEAKER_MARK} " in stream.reference and not stream.reference.startswith(SPEAKER_MARK)


@pytest.mark.parametrize(
    "wrong",
    [{"late_lag": -1}, {"late_steps": -1}, {"late_share": 1.5}, {"late_share": -0.1}, {"lag": 1, "least_lag": 2}],
)
def test_lags_of_less_than_nothing_are_refused_before_training(wrong: dict[str, int]) -> None:
    with pytest.raises(
        ValueError, match=r"need 0 (or more, got --late-lag|<= late_share <= 1, got|<= least_lag <= lag)"
    ):
        quickstart_recipe.SimulQuickstartConfig(**wrong)
