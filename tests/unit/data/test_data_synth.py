"""Synthetic speech: reproducible in every order, thread and process, and it answers to its parameters."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

from audiorl.data.synth import Speech, synthesize, synthesize_many, voices

TEXT = "The conference is now locked."


def pitch_hz(wav: np.ndarray, rate: int = 16_000) -> float:
    """Median over voiced 40 ms frames of the strongest autocorrelation lag between 60 and 400 Hz."""
    found = []
    for frame in wav[: len(wav) // 640 * 640].reshape(-1, 640):
        if np.sqrt(np.mean(frame**2)) < 0.05:
            continue
        spectrum = np.fft.rfft(frame - frame.mean(), 2048)
        lags = np.fft.irfft(np.abs(spectrum) ** 2)[: rate // 60]
        lag = rate // 400 + int(np.argmax(lags[rate // 400 :]))
        if lags[lag] > 0.4 * lags[0]:
            found.append(rate / lag)
    return float(np.median(found))


def test_speaks_at_the_asked_rate_with_a_sane_level() -> None:
    wav = synthesize(TEXT, "en")
    assert wav.dtype == np.float32 and wav.ndim == 1
    assert 1 < len(wav) / 16_000 < 3
    assert 0.1 < np.abs(wav).max() <= 1.01
    assert len(synthesize(TEXT, "en", sample_rate=8000)) == pytest.approx(len(wav) / 2, abs=2)


def test_the_same_request_gives_the_same_samples_whatever_came_before() -> None:
    names = ["en", "en-us+f3", "en+whisper", "en+klatt4"]
    first = {name: synthesize(TEXT, "en", voice=name) for name in names}
    synthesize("algo muy distinto", "es", speed=300, pitch=90)
    for name in reversed(names):
        np.testing.assert_array_equal(synthesize(TEXT, "en", voice=name), first[name])
    assert len({wav.tobytes() for wav in first.values()}) == len(names)


def test_threads_and_processes_give_the_same_samples() -> None:
    requests = [Speech(f"number {i}", "en", voice=f"en+f{1 + i % 4}") for i in range(8)]
    expected = synthesize_many(requests)
    results: dict[int, np.ndarray] = {}

    def speak(i: int) -> None:
        results[i] = synthesize(requests[i].text, "en", voice=requests[i].voice)

    threads = [threading.Thread(target=speak, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, wav in enumerate(synthesize_many(requests, workers=2)):
        np.testing.assert_array_equal(wav, expected[i])
        np.testing.assert_array_equal(results[i], expected[i])


def test_speed_shortens_and_pitch_raises() -> None:
    slow, fast = synthesize(TEXT, "en", speed=120), synthesize(TEXT, "en", speed=240)
    assert len(slow) > 1.5 * len(fast)
    assert pitch_hz(synthesize(TEXT, "en", pitch=80)) > 1.2 * pitch_hz(synthesize(TEXT, "en", pitch=20))


def test_languages_read_their_own_scripts() -> None:
    for language, text in [("es", "siete"), ("fr", "sept"), ("it", "sette"), ("ru", "семь"), ("zh", "七")]:
        assert len(synthesize(text, language)) > 0.2 * 16_000, language
    assert len(synthesize("今天天气很好", "zh")) > 2 * len(synthesize("好", "zh"))


def test_voices_are_accents_with_and_without_variants() -> None:
    english = voices("en")
    assert english[0] == "en" and {"en-us", "en-us+f3", "en-gb-scotland+m1"} <= set(english)
    assert len(english) > 300
    assert voices("zh")[0] == "cmn"
    for voice in english[::90]:
        assert len(synthesize("yes", "en", voice=voice)) > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"language": "tlh"}, "no language 'tlh'"),
        ({"voice": "en+nobody"}, r"no voice 'en\+nobody' for language 'en'; voices\('en'\)"),
        ({"voice": "fr+f1"}, r"no voice 'fr\+f1'"),
        ({"speed": 10}, "speed must be in 80..450"),
        ({"pitch": 100}, "pitch must be in 0..99"),
        ({"text": ""}, "nothing to say"),
        ({"text": "a\0b"}, "NUL"),
    ],
)
def test_bad_requests(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        synthesize(**{"text": TEXT, "language": "en", **arguments})


def test_an_interrupt_during_synthesis_is_not_lost() -> None:
    program = """
import os, signal, threading
from audiorl.data.synth import synthesize
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
synthesize("a long text to speak " * 3000, "en")
print("the interrupt was lost")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "KeyboardInterrupt" in done.stderr and done.stdout == "", done.stdout + done.stderr
    assert "ignored" not in done.stderr
