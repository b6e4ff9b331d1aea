"""Neural audio codecs: speech to codes and back, whole or as a stream. This package never imports audiorl."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from tokenizers_audio import delay
from tokenizers_audio.audio import prepare
from tokenizers_audio.codes import CodeShards, load_codes, save_codes, write_shards
from tokenizers_audio.loading import read_config
from tokenizers_audio.protocol import AudioTokenizer, Streaming

__all__ = [
    "AudioTokenizer",
    "CodeShards",
    "Streaming",
    "delay",
    "load",
    "load_codes",
    "prepare",
    "save_codes",
    "write_shards",
]


def load(path: str | Path, **options: Any) -> AudioTokenizer:
    """Load the codec in `path`, on the CPU in float32; `.to(device)` moves it.

    Options: `num_codebooks` (the first so many) or `bandwidth` (kbit/s) of every family; `block_seconds` and
    `overlap_seconds` of xcodec and higgs_audio_v2_tokenizer (`blocks.py`). Raises ValueError for a folder that is
    missing, broken or no codec, and for options that do not fit.
    """
    family = read_config(path)["model_type"]
    loader = _loader(family, path)
    options_of_family = [name for name in signature(loader).parameters if name != "path"]
    if unknown := sorted(options.keys() - set(options_of_family)):
        raise ValueError(
            f"{path}: a codec of type {family} has no option {unknown[0]}; it has {', '.join(options_of_family)}"
        )
    try:
        return loader(path, **options)
    except ValueError as error:
        raise error if str(path) in str(error) else ValueError(f"{path}: {error}") from error


def _loader(family: str, path: str | Path) -> Callable[..., AudioTokenizer]:
    # Imported where it is needed: each family brings its own part of transformers.
    match family:
        case "audiorl_unified_tokenizer":
            from tokenizers_audio import unified

            return unified.load
        case "higgs_audio_v2_tokenizer":
            from tokenizers_audio import higgs

            return higgs.load
        case "mimi":
            from tokenizers_audio import mimi

            return mimi.load
        case "dac":
            from tokenizers_audio import dac

            return dac.load
        case "encodec":
            from tokenizers_audio import encodec

            return encodec.load
        case "xcodec":
            from tokenizers_audio import xcodec

            return xcodec.load
    raise ValueError(
        f"{path}: model_type {family!r} is no codec that this package reads; it reads audiorl_unified_tokenizer, dac, "
        "encodec, higgs_audio_v2_tokenizer, mimi and xcodec"
    )
