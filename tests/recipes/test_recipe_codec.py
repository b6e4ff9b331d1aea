"""The codec recipe and command line: train, stop and go on, encode and decode, from real recordings."""

from __future__ import annotations

import json
import os
import signal
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

import tokenizers_audio
from audiorl.audio import AudioClip, write_wav
from audiorl.cli import main
from audiorl.data.corpus import bundled_speech, split_by_key
from audiorl.recipes._loader import load_recipe
from audiorl.run.metrics_log import read_metrics
from audiorl.train.codec import CodecWorker, measures
from tests.support.forks import forked
from tests.support.recipe_runs import read_json
from tests.support.unified_codec import tiny_hubert
from tokenizers_audio.unified import UnifiedTokenizer


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of seven human recordings at several rates, one of them in stereo."""
    folder = tmp_path_factory.mktemp("recordings")
    for k, u in enumerate(bundled_speech(("en",), min_seconds=0.8, max_seconds=1.6)[:6]):
        rate = (16_000, 24_000, 48_000)[k % 3]
        write_wav(folder / f"{u.key.replace('/', '_')}.wav", u.clip.load(rate), rate)
    wav, rate = soundfile.read(folder / sorted(os.listdir(folder))[0])
    soundfile.write(folder / "stereo.flac", np.stack([wav, wav], 1), rate)
    return folder


def train(out: Path, *options: str) -> int:
    return main(["train", "codec", "--tiny", "--threads", "1", *options, "--out", str(out)])


@pytest.fixture(scope="module")
def run(recordings: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "codec"
    assert train(out, "--data", str(recordings)) == 0
    return out


def test_it_writes_a_whole_run(run: Path) -> None:
    evals = read_json(run / "eval.json")
    assert list(evals) == ["before", "after"]
    for name, result in evals.items():
        assert result["low"] <= result["mel_distance"] <= result["high"] and result["n"] == 2
        rows = [json.loads(line) for line in (run / "eval" / f"{name}.jsonl").read_text().splitlines()]
        assert np.mean([row["mel_distance"] for row in rows]) == pytest.approx(result["mel_distance"])
        sounds = [soundfile.info(run / row[part]["path"]) for row in rows for part in ("original", "decoded")]
        assert all(info.samplerate == 24_000 for info in sounds) and sounds[0].frames == sounds[1].frames
    metrics = read_metrics(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    wanted = {"loss", "loss/mel", "loss/stft", "loss/semantic", "grad_norm", "lr"}
    assert wanted <= set(metrics[0]) and "discriminator/loss" in metrics[-1] and "loss/commitment" in metrics[-1]
    page = (run / "report.html").read_text()
    assert "Through the codec" in page and page.count("<audio") == 6
    codec = tokenizers_audio.load(run / "codec")
    last = tokenizers_audio.load(sorted((run / "checkpoints" / "codec").iterdir())[-1])
    assert codec.identity == last.identity
    assert (codec.sample_rate, codec.frame_rate, codec.num_codebooks) == (24_000, 25.0, 8)


def test_what_is_held_out(recordings: Path) -> None:
    recipe = load_recipe("codec")

    def read(**options: Any) -> tuple[list[str], list[str], list[str]]:
        found, held_out, texts = recipe.read(recipe.CodecRecipeConfig(**options))
        assert len(found.clips) == len(found.lengths)
        return [clip.path for clip in found.clips], [clip.path for clip in held_out], list(texts)

    train_set, test_set = split_by_key(bundled_speech(), 0.1, seed=0)
    bundled, held_out, texts = read()
    assert bundled == [u.clip.path for u in train_set]
    heard = {u.clip.path: u.text for u in test_set}
    assert len(held_out) == 40 and [heard[path] for path in held_out] == texts
    both = read(data=("bundled", str(recordings)))
    mine = {str(recordings / name) for name in os.listdir(recordings)}
    assert set(both[0]) > set(bundled) and len(both[1]) == 40 and [heard.get(path, "") for path in both[1]] == both[2]
    assert {*both[0]} | {*both[1]} > mine and {*both[1]} & mine and not {*both[0]} & {*both[1]}
    own = read(data=(str(recordings),), held_out_count=2)
    assert len(own[0]) == 5 and own[2] == ["", ""] and not {*own[0]} & {*own[1]}
    one = str(sorted(recordings.glob("*.wav"))[0])
    mixed = read(held_out=("bundled", one), held_out_count=1000)
    assert mixed[0] == bundled and {*mixed[1]} > {*held_out, one} and not {*mixed[0]} & {*mixed[1]}
    apart = read(data=("bundled",), held_out=(str(recordings),), held_out_count=3)
    assert apart[0] == bundled and len(apart[1]) == 3


def test_ten_seconds_of_a_long_recording_are_measured() -> None:
    noise = (0.05 * np.random.default_rng(0).standard_normal(601 * 8000)).astype(np.float32)
    tokenizer = UnifiedTokenizer(load_recipe("codec").tiny().tokenizer)
    _, (long, start) = measures(tokenizer, [AudioClip(array=x, sample_rate=8000) for x in (noise, noise[:80_000])])
    assert long.original.shape == (240_000,) and np.array_equal(long.original, start.original)


def test_the_ablation_has_the_same_bitrate(recordings: Path, run: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "plain", "--data", str(recordings), "--plain", "True") == 0
    plain, ours = read_json(tmp_path / "plain" / "eval.json"), read_json(run / "eval.json")
    assert plain["after"]["bitrate"] == ours["after"]["bitrate"] == 1000
    assert read_json(tmp_path / "plain" / "codec" / "config.json")["quantizer"] == "grouped"


def test_an_interrupted_run_goes_on_with_the_same_bits(
    recordings: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = CodecWorker.train

    @wraps(original)
    def interrupted(self: CodecWorker, items: Any) -> dict[str, float]:
        if self.trainer.steps_done == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, items)

    monkeypatch.setattr(CodecWorker, "train", interrupted)
    again = tmp_path / "again"
    assert train(again, "--data", str(recordings)) == 130
    assert "stopped after codec step 3" in capsys.readouterr().err
    monkeypatch.setattr(CodecWorker, "train", original)
    assert main(["resume", str(again)]) == 0
    for name in ("codec/model.safetensors", "checkpoints/codec/step_000004/trainer.safetensors"):
        assert (again / name).read_bytes() == (run / name).read_bytes(), name
    assert read_json(again / "eval.json") == read_json(run / "eval.json")


def test_a_trained_tokenizer_is_trained_further(recordings: Path, run: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "more", "--data", str(recordings), "--path", str(run / "codec")) == 0
    assert read_metrics(tmp_path / "more" / "metrics.jsonl")[0]["quantizing"] == 1  # its codebooks are kept
    evals = [read_json(folder / "eval.json") for folder in (tmp_path / "more", run)]
    assert evals[0]["before"] == evals[1]["after"]


def test_a_semantic_branch_on_hubert(recordings: Path, tmp_path: Path) -> None:
    tiny_hubert().save_pretrained(tmp_path / "hubert")
    options = ("--speech-model", str(tmp_path / "hubert"), "--tokenizer.semantic-block", "5")
    assert train(tmp_path / "run", "--data", str(recordings), *options) == 0
    codec = tokenizers_audio.load(tmp_path / "run" / "codec")
    assert isinstance(codec, UnifiedTokenizer) and codec.blocks[0] == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "nowhere"), "--data nowhere: no such file or folder"),
        (("--data", "{recordings}", "--held-out-count", "7"), "7 recordings, of which 7 are to be held out"),
        (("--data", "{recordings}", "--path", "{recordings}"), "config.json"),
        (
            ("--data", "{recordings}", "--held-out", "bundled", "{recordings}", "--held-out-count", "900"),
            "is in --data",
        ),
        (("--path", "a", "--plain", "True"), "--path: leaves --plain nothing to decide"),
        (("--path", "a", "--speech-model", "b"), "--path: leaves --speech-model nothing to decide"),
        (("--plain", "True", "--speech-model", "b"), "--plain: leaves --speech-model nothing to decide"),
        (("--codec.batch-size", "0"), "batch_size is 0"),
        (("--tokenizer.channels", "8", "8"), "channels has 2 entries"),
    ],
)
def test_bad_options(
    recordings: Path, tmp_path: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert train(tmp_path / "run", *(option.format(recordings=recordings) for option in options)) == 2
    except SystemExit as stop:  # the command line's own parser refuses values
        assert stop.code == 2
    assert message in " ".join("".join(capsys.readouterr()).replace("│", " ").split())
    assert not (tmp_path / "run").exists()


def test_encode_and_decode(recordings: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codec = tokenizers_audio.load(run / "codec")
    one = sorted(recordings.glob("*.wav"))[0]
    common = ("--codec", str(run / "codec"), "--out")
    assert main(["codec", "encode", str(one), *common, str(tmp_path / "one.safetensors")]) == 0
    codes = tokenizers_audio.load_codes(tmp_path / "one.safetensors", codec)
    wav, rate = soundfile.read(one, dtype="float32")
    assert torch.equal(codes, codec.encode(tokenizers_audio.prepare(wav, rate, codec))[0])
    assert main(["codec", "decode", str(tmp_path / "one.safetensors"), *common, str(tmp_path / "wavs")]) == 0
    decoded, rate = soundfile.read(tmp_path / "wavs" / "one.wav", dtype="float32")
    assert rate == 24_000 and len(decoded) == codes.shape[1] * 960
    np.testing.assert_allclose(decoded, codec.decode(codes[None])[0].numpy(), atol=1e-4)

    assert main(["codec", "encode", str(recordings), *common, str(tmp_path / "codes")]) == 0
    assert "codes of 7 recordings" in capsys.readouterr().out
    assert main(["codec", "decode", str(tmp_path / "codes"), *common, str(tmp_path / "all")]) == 0
    assert {f.stem for f in (tmp_path / "all").iterdir()} == {f.stem for f in recordings.iterdir()}
    again, _ = soundfile.read(tmp_path / "all" / f"{one.stem}.wav", dtype="float32")
    assert np.array_equal(again, decoded)

    assert main(["codec", "encode", str(recordings), *common, str(tmp_path / "codes")]) == 0
    assert "codes of 7 recordings, 0 of them new" in capsys.readouterr().out
    tokenizers_audio.write_shards(tmp_path / "up", ["ok", "../up"], lambda name: codes, codec)

    codec_of, out = ("--codec", str(run / "codec")), ("--out", str(tmp_path / "x.safetensors"))
    empty, other = tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    (tmp_path / "text.wav").write_text("hello")
    tokenizers_audio.load(run / "codec", num_codebooks=2).save(other)  # type: ignore[attr-defined]
    damaged = other / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x3f")
    for args, message in (
        (["encode", str(recordings), *codec_of, *out], "one file of codes holds one recording, not 7; give a folder"),
        (["encode", str(empty), *codec_of, *out], "empty: no audio files below it"),
        (["encode", str(tmp_path / "none.wav"), *codec_of, *out], "none.wav: missing"),
        (["encode", str(tmp_path / "text.wav"), *codec_of, *out], "text.wav: not readable as audio"),
        (["encode", str(one), "--codec", str(empty), *out], "holds no config.json"),
        (["decode", str(tmp_path / "one.safetensors"), "--codec", str(other), *out], "codes of the codec"),
        (["decode", str(tmp_path / "y.safetensors"), *codec_of, *out], "y.safetensors: no such file"),
        (["decode", str(tmp_path / "up"), *codec_of, *out], "'../up.wav' is no name of a file below"),
        (["encode", str(one), str(one), *codec_of, "--out", str(tmp_path / "two")], f"'{one.stem}' comes twice"),
        (["train", *out], "codec train: give audiorl train codec"),
    ):
        assert main(["codec", *args]) == 2
        assert message in capsys.readouterr().err, args
    with pytest.raises(SystemExit, match="2"):
        main(["codec", "sing"])
    assert "Unrecognized options: sing" in capsys.readouterr().err


@pytest.mark.slow
def test_torchrun_trains_in_two_processes(recordings: Path, tmp_path: Path) -> None:
    torchrun = partial(forked, "-m", "audiorl.cli", ranks=2)
    common = ("--tiny", "--threads", "1", "--data", str(recordings))
    torchrun("train", "codec", *common, "--out", str(tmp_path / "run"))
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    # What was lost after the checkpoint of step 2 is trained again, by both processes, to the same end.
    trained = (tmp_path / "run" / "codec" / "model.safetensors").read_bytes()
    state = read_json(tmp_path / "run" / "state.json")
    state |= {"finished": {"before": state["finished"]["before"]}, "seq": 2}
    state["checkpoints"]["codec"] = "checkpoints/codec/step_000002"
    (tmp_path / "run" / "state.json").write_text(json.dumps(state))
    torchrun("resume", str(tmp_path / "run"))
    assert (tmp_path / "run" / "codec" / "model.safetensors").read_bytes() == trained
