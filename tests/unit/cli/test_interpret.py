"""audiorl interpret with tiny checkpoints: a file and the microphone, text with times, speech as a track and a pipe."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from audiorl.cli import interpret as command
from audiorl.cli import main
from audiorl.config import SamplingConfig
from audiorl.models import dualize, load_policy
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.tasks.simul.live import Interpreter
from audiorl.tasks.simul.logs import playback_track
from tests.conftest import make_omni
from tests.support.unified_codec import tiny as tiny_codec
from tokenizers_audio import load

RATE = 16_000
LANGUAGES = ("--source-language", "es", "--target-language", "en")
SHORT = ("--sampling.max-new-tokens", "6", "--sampling.max-frames", "5", "--sampling.audio-temperature", "0")
SAMPLING = SamplingConfig(temperature=0.0, max_new_tokens=6, max_frames=5, audio_temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text model, a model that speaks with its codec, and 3.5 s of audio."""
    folder = tmp_path_factory.mktemp("interpret")
    make_omni().save(folder / "text")
    codec = tiny_codec()
    codec.save(folder / "codec")
    policy = make_omni()
    dualize(policy, codec.num_codebooks, codec.codebook_size, 0)
    assert policy.speech is not None
    noise = 0.1 * np.random.default_rng(0).standard_normal(7 * RATE // 2)
    soundfile.write(folder / "talk.wav", noise, RATE)
    second = interpreted(folder, "text").segments[0].ids[1]
    with torch.no_grad():
        head = policy.model.lm_head.weight
        head[policy.speech.begin_id] = 2 * head[second]  # opens speech after the first token
    policy.save(folder / "speaks")
    return folder


def interpreted(folder: Path, model: str) -> Interpreter:
    policy = load_policy(folder / model)
    if policy.speech is not None:
        policy.set_codec(load(folder / "codec"))
    interpreter = Interpreter(policy, "es", "en", sampling=SAMPLING)
    interpreter.observe(soundfile.read(folder / "talk.wav", dtype="float32")[0])
    interpreter.finish()
    return interpreter


def lines(interpreter: Interpreter) -> list[str]:
    return [f"{s.source_time:7.2f} s  {s.text.strip()}" for s in interpreter.segments if s.text.strip()]


def test_each_turn_is_a_line_with_its_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("audiorl.audio.MAX_SECONDS", 3.0)  # of a clip, such as a chunk: the recording may be longer
    assert main(["interpret", str(folder / "text"), str(folder / "talk.wav"), *LANGUAGES, *SHORT]) == 0
    expected = lines(interpreted(folder, "text"))
    assert expected and capsys.readouterr().out.splitlines() == expected


def test_the_track_has_each_turn_at_its_time_and_the_pipe_the_same_samples(
    folder: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    ask = ["interpret", str(folder / "speaks"), str(folder / "talk.wav"), *LANGUAGES, *SHORT]
    assert main([*ask, "--out", str(tmp_path / "a.wav")]) == 0
    interpreter = interpreted(folder, "speaks")
    decoder = CodecSpeechDecoder.of(interpreter._live._policy)
    track, intervals = playback_track(interpreter.rollout, decoder)
    wav, rate = soundfile.read(tmp_path / "a.wav", dtype="int16")
    assert rate == decoder.sample_rate and len(wav) == len(track) and intervals
    assert np.abs(wav - track.clip(-1, 1) * 32767).max() <= 1
    capfdbinary.readouterr()
    assert main([*ask, "--raw"]) == 0
    raw, stderr = capfdbinary.readouterr()
    spoken = decoder.waveform(interpreter.rollout)
    assert spoken is not None
    assert np.abs(np.frombuffer(raw, "<i2") - spoken.clip(-1, 1) * 32767).max() <= 1
    assert all(line.encode() in stderr for line in lines(interpreter))


def test_the_microphone_until_it_is_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks of any length give what the file gives; Ctrl-C ends with what is left."""
    wav = soundfile.read(folder / "talk.wav", dtype="float32")[0]

    def blocks() -> Iterator[np.ndarray]:
        yield from np.split(wav, [100, 20_000, 21_000, 50_000])
        signal.raise_signal(signal.SIGINT)
        yield np.zeros(0, np.float32)
        raise AssertionError("went on after Ctrl-C")

    monkeypatch.setattr("audiorl.cli._sound.listen", blocks)
    assert main(["interpret", str(folder / "text"), "--mic", *LANGUAGES, *SHORT]) == 0
    assert capsys.readouterr().out.splitlines() == lines(interpreted(folder, "text"))


def test_ctrl_c_while_a_turn_is_written_lets_it_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    observe = Interpreter.observe

    def interrupted(self: Interpreter, samples: np.ndarray) -> str:
        if len(self.segments) == 1:
            signal.raise_signal(signal.SIGINT)
        return observe(self, samples)

    monkeypatch.setattr(Interpreter, "observe", interrupted)
    assert main(["interpret", str(folder / "text"), str(folder / "talk.wav"), *LANGUAGES, *SHORT]) == 130
    monkeypatch.undo()
    whole = interpreted(folder, "text")
    assert capsys.readouterr().out.splitlines() == [x for x in lines(whole) if float(x.split()[0]) <= 2 * 0.96]


def test_in_real_time_a_chunk_is_read_when_it_has_been_spoken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(command.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(command.time, "sleep", slept.append)
    args = ["interpret", str(folder / "text"), str(folder / "talk.wav"), *LANGUAGES, *SHORT, "--real-time"]
    assert main(args) == 0
    assert slept == pytest.approx([0.96, 1.92, 2.88, 3.5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give a recording, or --mic"),
        (("talk.wav", "--mic", *LANGUAGES), "give a recording, or --mic"),
        (("talk.wav", "--source-language", "es"), "give --source-language and --target-language"),
        (("--mic", "--real-time", *LANGUAGES), "--real-time: belongs to a recording"),
        (("talk.wav", *LANGUAGES, "--out", "a.mp3"), "a.mp3 is no .wav file"),
        (("talk.wav", *LANGUAGES, "--out", "a.wav"), "writes text only; leave --raw and --out out"),
        (("missing.wav", *LANGUAGES), "missing.wav"),
        (("talk.wav", *LANGUAGES, "--history", "1"), "holds less than two chunks"),
    ],
)
def test_what_does_not_go_together(
    folder: Path,
    options: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("AUDIORL_TRACEBACK", raising=False)
    assert main(["interpret", "text", *options]) == 2
    assert re.search(re.escape(message), capsys.readouterr().err)
