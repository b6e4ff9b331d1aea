"""Small random parts of the real classes, saved as the folders that recipes take by path: a model, a codec, judges."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file

from audiorl.models.families import higgs
from audiorl.recipes._speech import SpeechConfig
from audiorl.speech_models.character_ctc import CharacterCTC, Head
from audiorl.speech_models.speakers import GE2ENetwork
from tokenizers_audio.unified import UnifiedConfig, UnifiedTokenizer

CODEBOOKS, SIZE = 2, 16
TINY = "tiny"
Config = TypeVar("Config", bound=SpeechConfig)
Value = TypeVar("Value", str, str | None)


def with_tiny_parts(config: Config, folder: Path) -> Config:
    """`config` with `tiny_part` in place of a model, a codec and judges that are called `tiny`."""
    return replace(
        config,
        path=tiny_part(folder, "model", config.path),
        codec=tiny_part(folder, "codec", config.codec),
        judge=tiny_part(folder, "judge", config.judge),
        judge_speaker=tiny_part(folder, "speaker", config.judge_speaker),
    )


def tiny_part(folder: Path, name: str, value: Value) -> Value:
    """`value`, a path; for `tiny` that of a random part, folder/NAME, which is written where it is missing."""
    if value != TINY:
        return value
    path = folder / name
    if not path.exists():
        partial = folder / f"{name}.partial"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _PARTS[name](partial)
        partial.rename(path)
    return str(path)


def save_model(folder: Path) -> None:
    """Higgs Audio V2, for the codec of `save_codec`."""
    higgs.tiny(codebooks=CODEBOOKS, codebook_size=SIZE).save(folder)


def save_codec(folder: Path) -> None:
    """A tokenizer of 25 frames a second."""
    config = UnifiedConfig(
        num_codebooks=CODEBOOKS,
        codebook_size=SIZE,
        codebook_dim=8,
        spectrum_hop=240,
        strides=(2, 2),
        channels=(16, 16, 16),
        dilations=(1,),
        acoustic_dim=16,
        semantic_dim=16,
    )
    UnifiedTokenizer(config).save(folder)


def save_recogniser(folder: Path) -> None:
    CharacterCTC(Head()).save(folder)


def save_speaker_encoder(folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file(GE2ENetwork().state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "ge2e"}) + "\n", encoding="utf-8")


_PARTS: dict[str, Callable[[Path], None]] = {
    "model": save_model,
    "codec": save_codec,
    "asr": save_recogniser,
    "judge": save_recogniser,
    "speaker": save_speaker_encoder,
}
