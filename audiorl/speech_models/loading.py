"""Speech models by the name or folder that a user gives."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from audiorl.languages import whisper_code
from audiorl.speech_models.protocol import (
    CHARACTER_CTC,
    SOUND_TAGGER,
    YAMNET,
    QualityModel,
    Recogniser,
    SpeakerEncoder,
    SpeechDetector,
    Tagger,
)
from audiorl.user_files import load_function

POCKETSPHINX = "pocketsphinx"
DNSMOS = "dnsmos"
PYTHON_FILE = "python file"
"""The kind of a path that has the form FILE.py:FOLDER."""
_FILE = re.compile(r"(.+?\.py)(?::(.*))?")
GE2E = "ge2e"
"""The model_type of folders that `tools/fetch_judges.py` writes for Resemblyzer's encoder."""


def load_recogniser(
    path: str | Path,
    language: str | None = None,
    device: str = "auto",
    batch_size: int = 8,
    task: Literal["transcribe", "translate"] = "transcribe",
    numerals: bool = True,
) -> Recogniser:
    """Return the speech recogniser at `path`; its weights are read at the first call.

    path: a transformers folder (or a cached hub id) of Whisper or of any model with a CTC head; a CTranslate2 folder of
    Whisper, which needs faster-whisper; "pocketsphinx" for the recogniser of that package; a folder that
    `tts-quickstart` trained; or FILE.py:FOLDER, whose function `load(folder, device)` returns the recogniser.
    language: for multilingual Whisper, which otherwise detects it for each clip. task: multilingual Whisper can
    also "translate" into English; others raise ValueError. numerals: False makes Whisper of transformers write numbers
    as words.
    """
    from audiorl.speech_models import recognisers

    language = whisper_code(language) if language else None
    if (Path(path) / "model.bin").is_file():
        return recognisers.FasterWhisper(str(path), language, device, task=task)
    kind = "" if str(path) == POCKETSPHINX else model_type(path)
    if kind == "whisper":
        return recognisers.WhisperRecogniser(str(path), language, device, batch_size, task=task, numerals=numerals)
    if task == "translate":
        raise ValueError(f"{path}: only multilingual Whisper translates; leave this recogniser out")
    if str(path) == POCKETSPHINX:
        return recognisers.PocketSphinx()
    if kind == PYTHON_FILE:
        recogniser: Recogniser = _load_file(path, device, "transcribe")
        return recogniser
    if kind == CHARACTER_CTC:
        from audiorl.speech_models.character_ctc import load

        return load(path, device)
    if kind == GE2E:
        raise ValueError(f"{path}: a speaker encoder, which transcribes nothing; give a recogniser")
    from audiorl.speech_models.ctc import CTC

    return CTC(str(path), device, batch_size)


def load_speaker_encoder(path: str | Path, device: str = "auto") -> SpeakerEncoder:
    """Return the speaker encoder at `path`; its weights are read at the first call.

    path: a transformers folder of X-vectors (WavLM, Wav2Vec2 …), a GE2E folder of `tools/fetch_judges.py`, or
    FILE.py:FOLDER, whose function `load(folder, device)` returns the encoder.
    """
    from audiorl.speech_models import speakers

    kind = model_type(path)
    if kind == PYTHON_FILE:
        encoder: SpeakerEncoder = _load_file(path, device, "embed")
        return encoder
    if kind == CHARACTER_CTC:
        raise ValueError(f"{path}: a recogniser, which embeds no voices; give a speaker encoder")
    return speakers.GE2E(str(path), device) if kind == GE2E else speakers.XVector(str(path), device)


def load_quality_model(name: str) -> QualityModel:
    """Return the quality model called `name`: "dnsmos"."""
    if name != DNSMOS:
        raise ValueError(f"no quality model is called {name!r}; there is {DNSMOS!r}")
    from audiorl.speech_models import quality

    return quality.DNSMOS()


def load_speech_detector() -> SpeechDetector:
    """Return Silero's voice activity detector."""
    from audiorl.speech_models.quality import Silero

    return Silero()


def load_tagger(path: str | Path, classes: Mapping[str, Sequence[str]] | None = None, device: str = "auto") -> Tagger:
    """Return the tagger of sounds at `path`; its weights are read at the first call.

    path: a folder that `audiorl data train-tagger` wrote, YAMNet's of `tools/fetch_judges.py`, a transformers folder of
    CLAP, or FILE.py:FOLDER, whose function `load(folder, device)` returns the tagger. classes: which labels of the
    tagger stand for each class, as `classes.json` of a corpus of scenes has them for YAMNet; of CLAP, texts.

    PaSST, OpenL3, Synchformer and Audiobox are in no package that is installed here: wrap them as FILE.py:FOLDER.
    """
    from audiorl.speech_models import taggers

    kind = model_type(path)
    if kind == "clap":
        return taggers.CLAP(str(path), dict(classes or {}), device)
    tagger: Tagger
    if kind == PYTHON_FILE:
        tagger = _load_file(path, device, "tag")
    elif kind == SOUND_TAGGER:
        tagger = taggers.SoundTagger.load(path, device)
    elif kind == YAMNET:
        tagger = taggers.YAMNet(str(path))
    else:
        others = (
            "PaSST, OpenL3, Synchformer and Audiobox need a file of yours, FILE.py:FOLDER with load(folder, device)"
        )
        raise ValueError(
            f"{path}: {kind} tags no sounds; give a folder of `data train-tagger`, YAMNet or CLAP ({others})"
        )
    return taggers.Renamed.of(tagger, classes) if classes and kind != SOUND_TAGGER else tagger


def _load_file(path: str | Path, device: str, method: str) -> Any:
    """Return the model of FILE.py:FOLDER by `load(folder, device)`, of FILE.py by `load(device=device)`."""
    match = _FILE.fullmatch(str(path))
    assert match is not None
    file, folder = match[1], match[2]
    load = load_function(file, "load", "speech model file")
    arguments = {"folder": folder, "device": device} if folder else {"device": device}
    try:
        inspect.signature(load).bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"speech model file {file!r}: load: {error}; it is called as load(folder, device) for FILE.py:FOLDER, "
            "as load(device=device) without a folder"
        ) from None
    model = load(**arguments)
    missing = [name for name in (method, "name") if not hasattr(model, name)]
    if missing:
        raise ValueError(f"{path}: load returned a {type(model).__name__} without {', '.join(missing)}")
    return model


def model_type(path: str | Path) -> str:
    """Return the model_type of a folder's config.json, or of a cached hub id; "python file" for FILE.py:FOLDER.

    Raises ValueError where there is none.
    """
    if _FILE.fullmatch(str(path)):
        return PYTHON_FILE
    folder = Path(path)
    if not folder.is_dir():
        from transformers import AutoConfig

        try:
            return str(AutoConfig.from_pretrained(str(path), trust_remote_code=False).model_type)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: neither a local folder nor a model id that can be loaded ({error})") from error
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{file}: missing; name a folder that save_pretrained or tools/fetch_judges.py wrote")
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({error}); copy the folder again") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str):
        raise ValueError(f"{file}: no model_type; it is no model's configuration")
    return kind
