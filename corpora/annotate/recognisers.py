"""The recognisers that options name, and speech models of audiorl in their place."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from audiorl.audio import AudioClip, AudioError
from audiorl.data.prompts import asr_prompt, open_question
from audiorl.data.schema import FieldError
from audiorl.errors import install
from audiorl.languages import language_code
from audiorl.models.lora import is_adapter
from audiorl.protocols import Request, RolloutEngine
from audiorl.rewards.answers import extract_answer, final_text, strip_tags
from audiorl.speech_models import load_recogniser
from audiorl.speech_models.loading import POCKETSPHINX, model_type
from audiorl.speech_models.protocol import Waveform
from audiorl.types import Message, Sample

MAX_NEW_TOKENS = 256
BATCH = 8
"""Segments that a model gets at once."""


@dataclass(frozen=True)
class NamedRecogniser:
    """A recogniser by its path. The model is loaded at the first use."""

    path: str
    languages: tuple[str, ...] | None
    """Codes of the languages that it transcribes; None: all that there are."""
    device: str = "auto"

    @property
    def mark(self) -> dict[str, Any]:
        """What its transcripts depend on."""
        return {"path": self.path, "files": files_mark(self.path)}

    @property
    def is_policy(self) -> bool:
        """Tell whether audiorl trains it, so that a prompt asks for the transcript. Whisper has its own recogniser."""
        if self.path == POCKETSPHINX or (Path(self.path) / "model.bin").is_file():
            return False
        return is_adapter(self.path) or _is_trained(model_type(self.path))

    @cached_property
    def model(self) -> Any:
        if self.is_policy:
            return PolicyRecogniser(self.path, self.device)
        return load_recogniser(self.path, device=self.device)

    @property
    def multilingual(self) -> bool:
        """Whether it identifies languages: it is a multilingual Whisper."""
        return hasattr(self.model, "identify") and bool(self.model.multilingual)

    @property
    def takes_languages(self) -> bool:
        """Whether its `transcribe` takes the languages of the waveforms."""
        return self.multilingual or isinstance(self.model, PolicyRecogniser)

    def covers(self, language: str | None) -> bool:
        return (
            language is None or self.languages is None or language_code(language) in map(language_code, self.languages)
        )

    def transcribe(self, waves: Sequence[Waveform], rate: int, languages: Sequence[str] | None) -> list[str | None]:
        if languages is not None and self.takes_languages:
            return list(self.model.transcribe(waves, rate, languages=languages))
        return list(self.model.transcribe(waves, rate))


@dataclass(frozen=True)
class PolicyRecogniser:
    """A speech model that audiorl trains, asked for a transcript as in training, greedily."""

    path: str
    device: str = "auto"

    @property
    def name(self) -> str:
        return Path(self.path).name

    @cached_property
    def engine(self) -> RolloutEngine:
        return greedy(self.path, self.device)

    def transcribe(
        self, waveforms: Sequence[Waveform], sample_rate: int, languages: Sequence[str] | None = None
    ) -> list[str | None]:
        """Return the transcripts, None in a language that the model does not transcribe."""
        codes = languages or [""] * len(waveforms)
        prompts = [
            asr_prompt(clip_of(wav, sample_rate), code) for wav, code in zip(waveforms, codes, strict=True) if len(wav)
        ]
        texts = iter(self._written(prompts))
        return [next(texts) if len(wav) else "" for wav in waveforms]

    def _written(self, prompts: Sequence[tuple[Message, ...]]) -> list[str | None]:
        try:
            return [final_text(text) for text in answers(self.engine, prompts)]
        except FieldError:
            return [None] if len(prompts) == 1 else [self._written([prompt])[0] for prompt in prompts]


@dataclass(frozen=True)
class Captioner:
    """A speech model that audiorl trains, asked to describe audio, greedily."""

    path: str
    prompt: str
    device: str = "auto"

    @cached_property
    def engine(self) -> RolloutEngine:
        return greedy(self.path, self.device)

    def describe(self, waveforms: Sequence[Waveform], sample_rate: int) -> list[str]:
        prompts = [open_question(clip_of(wav, sample_rate), self.prompt, think=False) for wav in waveforms]
        texts = answers(self.engine, prompts)
        return [(extract_answer(text) or strip_tags(text)).strip() for text in texts]


def _is_trained(kind: str) -> bool:
    from audiorl.models.families import RECOGNISER_TYPES, audio_llm, generic

    if kind in RECOGNISER_TYPES:
        return kind != "whisper"
    try:
        return bool(generic.model_class(kind, audio_llm(kind)))
    except ValueError:
        return False


def clip_of(wav: Waveform, rate: int) -> AudioClip:
    return AudioClip(array=wav, sample_rate=rate)


def greedy(path: str, device: str) -> RolloutEngine:
    from audiorl.eval._common import greedy_engine

    return greedy_engine(path, MAX_NEW_TOKENS, device)


def answers(engine: RolloutEngine, prompts: Sequence[tuple[Message, ...]]) -> list[str]:
    """Return the text of one rollout for each prompt. Raises AudioError for a prompt that the model cannot read,
    FieldError for its language."""
    try:
        return [r.text for r in engine.generate([Request(Sample(str(i), p)) for i, p in enumerate(prompts)])]
    except ValueError as error:
        if isinstance(error, FieldError) and error.field == "language":
            raise
        raise AudioError(str(error)) from error


def recognisers(asr: Sequence[str], language: str | None, device: str) -> list[NamedRecogniser]:
    """Return those of the option `asr`. Raises ValueError for one that cannot be loaded here, or that has not the
    language."""
    result = []
    language = language_code(language) if language else None
    for entry in asr:
        path, equals, codes = entry.rpartition("=") if "=" in entry else (entry, "", "")
        languages = tuple(code.strip() for code in codes.split(",") if code.strip()) or None
        if equals and languages is None:
            raise ValueError(f"annotate: --asr {entry}: no language after the equals sign; write PATH=en,es")
        check_installed(path)
        named = NamedRecogniser(path, languages, device)
        if languages is None and (
            path == POCKETSPHINX or (hasattr(named.model, "identify") and not named.model.multilingual)
        ):
            named = NamedRecogniser(path, ("en",), device)
        result.append(named)
    if language and not any(named.covers(language) for named in result):
        raise ValueError(f"annotate: --language {language}: no recogniser of --asr transcribes it; add one that does")
    return result


def check_installed(path: str) -> None:
    """Raise ValueError naming the extra that a recogniser needs."""
    package = (
        "pocketsphinx" if path == POCKETSPHINX else "faster_whisper" if (Path(path) / "model.bin").is_file() else ""
    )
    if package and find_spec(package) is None:
        raise ValueError(f"annotate: --asr {path} needs {package.replace('_', '-')}: {install('corpora')}")


def files_mark(path: str) -> str:
    """Return a hash of the names, sizes and times of the files of a model; "" for a name that is no path."""
    marks = []
    for part in path.split(".py:"):
        place = Path(part if os.path.exists(part) else f"{part}.py")
        files = sorted(place.iterdir()) if place.is_dir() else [place] if place.is_file() else []
        for file in files:
            if file.is_file():
                status = file.stat()
                marks.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(marks).encode()).hexdigest()[:16] if marks else ""
