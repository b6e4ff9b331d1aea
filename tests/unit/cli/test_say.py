"""audiorl say with a tiny checkpoint: the same samples in a file and in a pipe, stopped, and with nobody listening."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from audiorl.cli import main, say
from audiorl.cli._sound import wav_file
from audiorl.config import SamplingConfig
from audiorl.models import load_policy
from audiorl.models.families import higgs
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.tasks.tts.prompts import speech_sample
from tests.conftest import TEXTS, make_text
from tests.support.codecs import save_mimi
from tokenizers_audio import load

RATE = 24_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("say")
    save_mimi(folder / "codec")
    torch.manual_seed(0)
    policy = higgs.tiny(TEXTS, codebooks=4, codebook_size=64)
    with torch.no_grad():
        policy.code_head.weight.mul_(20)  # what it says depends on the prompt, not on the seed alone
    policy.save(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def endless(model: Path) -> Path:
    """A model that says code 0 for ever, greedily."""
    policy = load_policy(model)
    with torch.no_grad():
        policy.code_head.weight.zero_()  # type: ignore[attr-defined,operator]
    policy.save(model.parent / "endless")
    return model.parent / "endless"


ENDLESS = ("--sampling.max-frames", "100000", "--sampling.audio-temperature", "0")


def said(model: Path, text: str, seed: int) -> np.ndarray:
    """What the model says, decoded at once, as samples of 16 bits."""
    policy = load_policy(model, codec=load(model.parent / "codec"))
    sampling = SamplingConfig(max_new_tokens=8, max_frames=30)
    sample = speech_sample("said", text)
    (rollout,) = HFEngine(policy, sampling).generate([Request(sample, seed=seed)])
    wav = CodecSpeechDecoder.of(policy).waveform(rollout)
    assert wav is not None
    return wav.clip(-1, 1) * 32767


def test_a_file_has_what_the_model_says(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "a.wav"
    options = ["--out", str(out), "--sampling.max-frames", "30", "--seed", "1"]
    assert main(["say", str(model), "--text", "Good morning.", *options]) == 0
    wav, rate = soundfile.read(out, dtype="int16")
    expected = said(model, "Good morning.", 1)
    assert rate == RATE and soundfile.info(out).subtype == "PCM_16" and len(wav) == len(expected) > 0
    assert np.abs(wav - expected).max() <= 1
    stdout, stderr = capfd.readouterr()
    assert f"{len(wav) / RATE:.2f} s of speech in" in stderr and stdout == ""
    assert re.search(r"first audio after \d+\.\d\d s; .* real-time factor \d+\.\d\d; .*a\.wav", stderr)
    # The same text from stdin replaces the file; another text says something else.
    before = out.read_bytes()
    monkeypatch.setattr(sys, "stdin", io.StringIO("Good morning.\n"))
    assert main(["say", str(model), "--text", "-", *options]) == 0 and out.read_bytes() == before
    assert main(["say", str(model), "--text", "Who speaks?", *options]) == 0 and out.read_bytes() != before


def test_raw_samples_are_those_of_the_file(
    model: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    voice = tmp_path / "voice.wav"
    soundfile.write(voice, 0.1 * np.sin(np.arange(RATE) / 9), RATE)
    ask = ["say", str(model), "--text", "why", "--voice", str(voice), "--voice-text", "a tone"]
    ask += ["--sampling.max-frames", "30", "--seed", "1"]
    assert main([*ask, "--out", str(tmp_path / "a.wav")]) == 0
    assert main(ask[:4] + ask[8:] + ["--out", str(tmp_path / "b.wav")]) == 0
    capfdbinary.readouterr()
    assert main([*ask, "--raw", "--block-frames", "1"]) == 0
    raw, stderr = capfdbinary.readouterr()
    wav, _ = soundfile.read(tmp_path / "a.wav", dtype="int16")
    assert np.abs(np.frombuffer(raw, "<i2").astype(int) - wav).max() <= 1
    assert b"16 bits, little-endian, mono, 24000 Hz" in stderr and b"real-time factor" in stderr
    assert (tmp_path / "b.wav").read_bytes() != (tmp_path / "a.wav").read_bytes()  # without the voice
    print("stdout is as before")
    assert b"stdout is as before" in capfdbinary.readouterr()[0]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_leaves_a_valid_file(endless: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.wav"

    def stop() -> None:
        for _ in range(2000):
            if out.is_file() and out.stat().st_size > 20_000:
                break
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    assert main(["say", str(endless), "--text", "why", "--out", str(out), *ENDLESS]) == 130
    thread.join()
    wav, rate = soundfile.read(out)
    assert rate == RATE and len(wav) >= 9000 and 44 + 2 * len(wav) == out.stat().st_size
    assert f"stopped after {len(wav) / RATE:.2f} s of speech; {out}" in capfd.readouterr().err
    assert not [t for t in threading.enumerate() if t.name == "speech_blocks"]


def test_ctrl_c_between_a_block_and_its_count(endless: Path, tmp_path: Path, capfd, monkeypatch) -> None:
    @contextmanager
    def interrupted(path: Path, rate: int) -> Iterator[Any]:
        with wav_file(path, rate) as write:

            def once(block: np.ndarray) -> None:
                write(block)
                raise KeyboardInterrupt

            yield once

    monkeypatch.setattr(say, "wav_file", interrupted)
    out = tmp_path / "a.wav"
    assert main(["say", str(endless), "--text", "why", "--out", str(out), *ENDLESS]) == 130
    length = soundfile.info(out).duration
    assert length > 0 and f"stopped after {length:.2f} s of speech; {out}" in capfd.readouterr().err


def test_a_player_that_ends_first(endless: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    stdout = os.dup(1)
    os.dup2(writer, 1)
    os.close(writer)
    thread = threading.Thread(target=lambda: (os.read(reader, 5000), os.close(reader)))
    thread.start()
    try:
        code = main(["say", str(endless), "--text", "why", "--raw", *ENDLESS])
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    thread.join()
    assert code == 141
    assert not [line for line in capfd.readouterr().err.splitlines() if "roken" in line or "rror" in line]
    assert not [t for t in threading.enumerate() if t.name == "speech_blocks"]


def test_a_model_that_says_nothing_and_one_that_is_cut(model: Path, endless: Path, tmp_path: Path, capfd) -> None:
    out = tmp_path / "a.wav"
    ask = ["--text", "why", "--out", str(out), "--sampling.audio-temperature", "0", "--sampling.max-frames", "8"]
    assert main(["say", str(endless), *ask]) == 0
    assert "(cut off; --sampling.max-frames sets the length)" in capfd.readouterr().err
    assert 0 < soundfile.info(out).frames <= 8 * 1920
    policy = load_policy(model)
    requests = [Request(speech_sample("said", "why"), seed=seed) for seed in range(20)]
    rollouts = HFEngine(policy, SamplingConfig(max_new_tokens=8, max_frames=8)).generate(requests)
    codec = load(model.parent / "codec")
    policy.set_codec(codec)  # type: ignore[attr-defined]
    waves = [CodecSpeechDecoder.of(policy).waveform(rollout) for rollout in rollouts]
    mute = next(seed for seed, wav in enumerate(waves) if wav is None or not len(wav))
    assert main(["say", str(model), *ask[:4], "--sampling.max-frames", "8", "--seed", str(mute)]) == 1
    assert "nothing was said" in capfd.readouterr().err
    assert soundfile.info(out).frames == 0


def test_bad_input(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    def error(*args: str, model: Path = model) -> str:
        assert main(["say", str(model), *args]) == 2
        return str(capfd.readouterr().err)

    out = ("--out", str(tmp_path / "a.wav"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    make_text().save(tmp_path / "text")
    soundfile.write(tmp_path / "short.wav", np.zeros(3200), 16_000)
    short = ("--voice", str(tmp_path / "short.wav"), "--voice-text", "a")
    for args, message in (
        (out, "name the text"),
        (("--text", "-", *out), "stdin holds no text"),
        (("--text", "why"), "give --out FILE.wav, or --raw"),
        (("--text", "why", "--raw", *out), "give --out FILE.wav, or --raw"),
        (("--text", "why", "--out", "a.mp3"), "--out: a.mp3 is no .wav file"),
        (("--text", "why", *out, *short[:2]), "--voice-text: give what is said in"),
        (("--text", "why", *out, *short[2:]), "--voice-text: belongs to --voice"),
        (("--text", "why", *out, *short), "short.wav is 0.20 s long; give at least 0.5 s"),
        (("--text", "why", *out, "--voice", "gone.wav", "--voice-text", "a"), "gone.wav"),
        (("--text", "why", *out, "--block-frames", "0"), "--block-frames: 0"),
    ):
        assert message in error(*args)
    assert "writes text only" in error("--text", "why", *out, model=tmp_path / "text")
    shutil.copytree(model, tmp_path / "alone")
    assert "name its audio tokenizer with --codec" in error("--text", "why", *out, model=tmp_path / "alone")
    assert not (tmp_path / "a.wav").exists()
    assert main(["say", "--text", "why"]) == 2 and "name a model first" in capfd.readouterr().err
