"""Judges by the name or folder that a user gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from audiorl.judges.protocol import QualityModel, Recogniser, SpeakerEncoder

POCKETSPHINX = "pocketsphinx"
DNSMOS = "dnsmos"
CHARACTER_CTC = "audiorl_character_ctc"


def load_recogniser(
    path: str | Path, language: str | None = None, device: str = "auto", batch_size: int = 8
) -> Recogniser:
    """The speech recogniser at `path`; its weights are read at the first call.

    A transformers folder (or a hub id that is cached) of Whisper or of any model with a CTC head; a CTranslate2 folder
    of Whisper, which needs faster-whisper; a folder of `audiorl.judges.character_ctc`; "pocketsphinx" for the
    recogniser of that package. `language`: a code such as "en" for multilingual Whisper, which otherwise
    detects it for each clip.
    """
    if str(path) == POCKETSPHINX:
        from audiorl.judges.sphinx import PocketSphinx

        return PocketSphinx()
    if (Path(path) / "model.bin").is_file():
        from audiorl.judges.faster_whisper import FasterWhisper

        return FasterWhisper(str(path), language, device)
    kind = model_type(path)
    if kind == CHARACTER_CTC:
        from audiorl.judges.character_ctc import load

        return load(path)
    if kind == "whisper":
        from audiorl.judges.whisper import Whisper

        return Whisper(str(path), language, device, batch_size)
    from audiorl.judges.ctc import CTC

    return CTC(str(path), device, batch_size)


def load_speaker_encoder(path: str | Path, device: str = "auto") -> SpeakerEncoder:
    """The speaker encoder at `path`: transformers' X-vectors (WavLM, Wav2Vec2 …), or one of `tools/fetch_judges.py`."""
    if model_type(path) == "ge2e":
        from audiorl.judges.ge2e import GE2E

        return GE2E(str(path), device)
    from audiorl.judges.xvector import XVector

    return XVector(str(path), device)


def load_quality_model(name: str) -> QualityModel:
    """The quality model called `name`: "dnsmos"."""
    if name != DNSMOS:
        raise ValueError(f"no quality model is called {name!r}; there is {DNSMOS!r}")
    from audiorl.judges.dnsmos import DNSMOS as Model

    return Model()


def model_type(path: str | Path) -> str:
    """The model_type of a folder's config.json, or of a cached hub id's. ValueError where there is none."""
    folder = Path(path)
    if not folder.is_dir():
        from transformers import AutoConfig

        try:
            return str(AutoConfig.from_pretrained(str(path)).model_type)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: neither a local folder nor a model id that can be loaded ({error})") from error
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{file}: missing; name a folder that save_pretrained or tools/fetch_judges.py wrote")
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}); copy the folder again") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str):
        raise ValueError(f"{file}: no model_type; it is no model's configuration")
    return kind
