"""Synthetic speech from text with espeak-ng, from the `espeakng-loader` wheel: many "speakers", dozens of languages.

    wav = synthesize("The conference is now locked.", "en", voice="en-us+f3", speed=170, pitch=60)   # [T] at 16 kHz
    phonemes(["Kerberos"], "en")                                                                     # ['kɜːbɛɹəʊz']

It is formant synthesis: intelligible, robotic, a few hundred times faster than real time on one core. The same request
gives the same samples, whatever was spoken before and in whichever thread or process. The library has one global state,
so a lock lets one thread speak at a time; `synthesize_many` uses processes. API: espeak-ng's `speak_lib.h`.
"""

from __future__ import annotations

import _ctypes
import ctypes
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import espeakng_loader
import numpy as np
import soxr

from audiorl.languages import language_code

SPEEDS = (80, 450)  # words a minute
PITCHES = (0, 99)

_SYNCHRONOUS = 2  # espeak_AUDIO_OUTPUT: Synth returns when the callback has received everything
_DONT_EXIT = 0x8000  # on errors return a code instead of ending the process
_CHARS_UTF8 = 1
_IPA = 2  # of phonemes, as UTF-8
_RATE, _PITCH = 1, 3  # espeak_PARAMETER
_NAMES = {"zh": "cmn", "no": "nb"}  # ISO 639-1 codes that espeak-ng calls otherwise
_UNSTEADY = {"Reed", "caleb"}  # variants whose samples differ from call to call

_SynthCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True)
class Speech:
    """One text to be spoken: the arguments of `synthesize`."""

    text: str
    language: str
    voice: str = ""
    speed: int = 160
    pitch: int = 50
    sample_rate: int = 16_000


def synthesize(
    text: str, language: str, *, voice: str = "", speed: int = 160, pitch: int = 50, sample_rate: int = 16_000
) -> np.ndarray:
    """Float32 mono [T] at `sample_rate` Hz.

    language: ISO code such as "en" or "zh"; voice: an entry of `voices(language)`, or "" for the plain one; speed in
    words a minute, 80 to 450; pitch 0 to 99. Raises ValueError for anything else, and for text without a sound.
    """
    for name, value, (low, high) in (("speed", speed, SPEEDS), ("pitch", pitch, PITCHES)):
        if not low <= value <= high:
            raise ValueError(f"{name} must be in {low}..{high}, got {value}")
    if "\0" in text:
        raise ValueError(f"text holds a NUL character: {text!r}")
    accent, _, variant = voice.partition("+")
    if voice and (accent not in accents(language) or (variant and variant not in variants())):
        raise ValueError(f"no voice {voice!r} for language {language!r}; voices({language!r}) lists them")
    wav, rate = _samples(text, voice or accents(language)[0], speed, pitch)
    if not wav.any():
        raise ValueError(f"nothing to say in {text!r}; give text with words that {language!r} can read")
    return wav if rate == sample_rate else soxr.resample(wav, rate, sample_rate)


def synthesize_many(requests: Sequence[Speech], workers: int = 1) -> list[np.ndarray]:
    """One array [T] a request, in order; `workers` > 1: in that many processes."""
    if workers <= 1 or len(requests) <= 1:
        return [_speak(request) for request in requests]
    chunk = max(1, len(requests) // (workers * 4))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_speak, requests, chunksize=chunk))


def voices(language: str) -> list[str]:
    """Return every accent of the language, plain and with each variant: "en-us", "en-us+f3", …"""
    return [voice for accent in accents(language) for voice in (accent, *(f"{accent}+{v}" for v in variants()))]


def phonemes(texts: Sequence[str], language: str) -> list[str]:
    """Return how each text sounds, in IPA without stress. Raises ValueError for a language that espeak-ng lacks."""
    sounds = []
    with _espeak(accents(language)[0]) as (library, _):
        library.espeak_TextToPhonemes.restype = ctypes.c_char_p
        for text in texts:
            left, spoken = ctypes.c_char_p(text.encode()), list[str]()
            while left.value:  # it reads a clause and moves the pointer behind it
                spoken.append(library.espeak_TextToPhonemes(ctypes.byref(left), _CHARS_UTF8, _IPA).decode())
            sounds.append(re.sub(r"\([a-z-]+\)|[ˈˌ]", "", " ".join(spoken)))  # "(en)" where it reads a foreign word
    return sounds


@cache
def accents(language: str) -> tuple[str, ...]:
    """Voices of a language without variant, the plain one first: ("en", "en-029", "en-gb-scotland", "en-us", …)."""
    named = _NAMES.get(language, language).lower()  # also "en-us"
    if not any(f"{name}-".startswith(f"{named}-") for name in _voice_files()):
        named = _NAMES.get(language_code(language), language_code(language))
    voices = [name for name in _voice_files() if f"{name}-".startswith(f"{named}-")]
    if not voices:
        raise ValueError(f"espeak-ng has no language {language!r}; it has {', '.join(_voice_files())}")
    return tuple(sorted(voices))


@cache
def variants() -> tuple[str, ...]:
    """Timbres that combine with every accent: numbered male (m1 …) and female (f1 …) ones and some with names."""
    folder = Path(espeakng_loader.get_data_path()) / "voices" / "!v"
    return tuple(sorted(file.name for file in folder.iterdir() if file.name not in _UNSTEADY))


@cache
def _voice_files() -> tuple[str, ...]:
    folder = Path(espeakng_loader.get_data_path()) / "lang"
    return tuple(sorted(file.name.lower() for file in folder.rglob("*") if file.is_file()))


def _speak(request: Speech) -> np.ndarray:
    return synthesize(**vars(request))


_lock = threading.Lock()
_unload = getattr(_ctypes, "dlclose" if os.name == "posix" else "FreeLibrary")


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """SIGINT is handled after the block: ctypes would drop a KeyboardInterrupt that is raised in a callback."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if interrupts:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _espeak(voice: str) -> Iterator[tuple[ctypes.CDLL, int]]:
    """Yield a library loaded for this one use, which has the voice, and its rate in Hz.

    espeak-ng keeps the phase of its pitch flutter in a static variable that nothing resets, so a second call in the
    same library sounds slightly different. Loading it again costs about 4 ms and makes every call the first.
    """
    with _lock, _interrupts_wait():
        library = ctypes.CDLL(espeakng_loader.get_library_path())
        try:
            rate = library.espeak_Initialize(_SYNCHRONOUS, 0, espeakng_loader.get_data_path().encode(), _DONT_EXIT)
            if rate <= 0:
                raise RuntimeError("espeak-ng did not start; reinstall espeakng-loader")
            if library.espeak_SetVoiceByName(voice.encode()) != 0:
                raise ValueError(f"espeak-ng does not load the voice {voice!r}; choose another of voices()")
            yield library, rate
        finally:
            library.espeak_Terminate()
            _unload(library._handle)


def _samples(text: str, voice: str, speed: int, pitch: int) -> tuple[np.ndarray, int]:
    """float32 [T] and its rate in Hz."""
    pieces: list[np.ndarray] = []

    def receive(samples: ctypes._Pointer[ctypes.c_short], count: int, events: int | None) -> int:
        if samples and count:
            pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0  # go on

    callback = _SynthCallback(receive)
    with _espeak(voice) as (library, rate):
        library.espeak_SetSynthCallback(callback)
        library.espeak_ng_SetRandSeed(0)  # breath noise
        library.espeak_SetParameter(_RATE, speed, 0)
        library.espeak_SetParameter(_PITCH, pitch, 0)
        encoded = text.encode()
        code = library.espeak_Synth(encoded, len(encoded) + 1, 0, 0, 0, _CHARS_UTF8, None, None)
        if code != 0:
            raise RuntimeError(f"espeak-ng failed with code {code} for {text!r}")
    samples = np.concatenate(pieces) if pieces else np.zeros(0, np.int16)
    return samples.astype(np.float32) / 32768, rate
