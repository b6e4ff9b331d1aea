"""Judges by the name or folder that a user gives."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from audiorl.speech_models.protocol import QualityModel, Recogniser, SpeakerEncoder, SpeechDetector
from audiorl.user_files import load_function

POCKETSPHINX = "pocketsphinx"
DNSMOS = "dnsmos"
SILERO = "silero"
PYTHON_FILE = "python file"
"""The kind of a path that has the form FILE.py:FOLDER."""
CHARACTER_CTC = "audiorl_character_ctc"
GE2E = "ge2e"
"""The model_type of folders that `tools/fetch_judges.py` writes for Resemblyzer's encoder."""
CUSTOM = (PYTHON_FILE, CHARACTER_CTC, GE2E)
"""The kinds that `load_custom` loads."""


def load_recogniser(
    path: str | Path,
    language: str | None = None,
    device: str = "auto",
    batch_size: int = 8,
    task: Literal["transcribe", "translate"] = "transcribe",
    numerals: bool = True,
) -> Recogniser:
    """The speech recogniser at `path`; its weights are read at the first call.

    A transformers folder (or a hub id that is cached) of Whisper or of any model with a CTC head; a CTranslate2 folder
    of Whisper, which needs faster-whisper; "pocketsphinx" for the recogniser of that package; a folder that
    `audiorl/recipes/tts_quickstart.py` trained; or FILE.py:FOLDER, see `load_custom`. `language`: a code such as
    "en" for
    multilingual Whisper, which otherwise detects it for each clip. `task`: multilingual Whisper can also
    "translate" into English; other recognisers raise ValueError for that. `numerals` False: Whisper of transformers
    writes numbers as words; it changes nothing for other recognisers.
    """
    if (Path(path) / "model.bin").is_file():
        from audiorl.speech_models.faster_whisper import FasterWhisper

        return FasterWhisper(str(path), language, device, task=task)
    kind = "" if str(path) == POCKETSPHINX else model_type(path)
    if kind == "whisper":
        from audiorl.speech_models.whisper import Whisper

        return Whisper(str(path), language, device, batch_size, task=task, numerals=numerals)
    if task == "translate":
        raise ValueError(f"{path}: only multilingual Whisper translates; leave this recogniser out")
    if str(path) == POCKETSPHINX:
        from audiorl.speech_models.sphinx import PocketSphinx

        return PocketSphinx()
    if kind in CUSTOM:
        return load_custom(path, kind, device, "transcribe")
    from audiorl.speech_models.ctc import CTC

    return CTC(str(path), device, batch_size)


def load_speaker_encoder(path: str | Path, device: str = "auto") -> SpeakerEncoder:
    """The speaker encoder at `path`: transformers' X-vectors (WavLM, Wav2Vec2 …), one of `tools/fetch_judges.py`, or
    FILE.py:FOLDER, see `load_custom`.
    """
    kind = model_type(path)
    if kind in CUSTOM:
        return load_custom(path, kind, device, "embed")
    from audiorl.speech_models.xvector import XVector

    return XVector(str(path), device)


def load_custom(path: str | Path, kind: str, device: str, method: str) -> Any:
    """Load the model of a Python file (FILE.py:FOLDER), or of a folder of one of our own; it must have `method`.

    The file's function `load(folder, device)` returns the judge; FILE.py without a folder calls `load(device=device)`.
    Raises ValueError for a file without such a function and for a judge of another protocol.
    """
    file, folder = _file_and_folder(path) or (None, str(path))
    # A fixed choice: the configuration of a folder of weights never decides which code runs.
    load: Callable[..., Any]
    if file:
        load = load_function(file, "load", "judge file")
    elif kind == CHARACTER_CTC:
        from audiorl.speech_models import character_ctc

        load = character_ctc.load
    else:
        from audiorl.speech_models import ge2e

        load = ge2e.load
    arguments = {"folder": folder, "device": device} if folder else {"device": device}
    try:
        inspect.signature(load).bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"judge file {file!r}: load: {error}; it is called as load(folder, device) for FILE.py:FOLDER, "
            "as load(device=device) without a folder"
        ) from None
    judge = load(**arguments)
    missing = [name for name in (method, "name") if not hasattr(judge, name)]
    if missing:
        raise ValueError(f"judge {str(path)!r}: load returned a {type(judge).__name__} without {', '.join(missing)}")
    return judge


def load_quality_model(name: str) -> QualityModel:
    """The quality model called `name`: "dnsmos"."""
    if name != DNSMOS:
        raise ValueError(f"no quality model is called {name!r}; there is {DNSMOS!r}")
    from audiorl.speech_models.dnsmos import DNSMOS as Model

    return Model()


def load_speech_detector(name: str = SILERO) -> SpeechDetector:
    """The voice activity detector called `name`: "silero"."""
    if name != SILERO:
        raise ValueError(f"no voice activity detector is called {name!r}; there is {SILERO!r}")
    from audiorl.speech_models.silero import Silero

    return Silero()


def _file_and_folder(path: str | Path) -> tuple[str, str] | None:
    """FILE.py and FOLDER, which may be "", of FILE.py:FOLDER; None for other paths."""
    match = re.fullmatch(r"(.+?\.py)(?::(.*))?", str(path))
    return (match[1], match[2] or "") if match else None


def model_type(path: str | Path) -> str:
    """The model_type of a folder's config.json, or of a cached hub id's; "python file" for FILE.py:FOLDER.

    Raises ValueError where there is none.
    """
    if _file_and_folder(path):
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
