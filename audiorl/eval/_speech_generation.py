"""Say a list of texts with a checkpoint, into a folder of recordings, from which a later call goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from audiorl.audio import AudioClip, write_wav
from audiorl.data.rows import write_json_lines
from audiorl.eval._generate import check_settings, evaluation_config, finished_rows, generate_all
from audiorl.models import AudioPolicy, load_policy
from audiorl.protocols import RolloutEngine, SpeechDecoder
from audiorl.types import Rollout, Sample
from tokenizers_audio import load as load_codec

ROWS = "generated.jsonl"
SETTINGS = "generation.json"
SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3")
"""Of recordings that a system generated, by preference."""


def load_speaking(model: str | Path, codec: str | Path | None = None, device: str = "auto") -> AudioPolicy:
    """A checkpoint that writes codes, with its codec, for evaluation.

    Without a `codec` it is the folder codec/ in or above the checkpoint's, as `tts_quickstart` leaves it. Raises
    ValueError for a model that writes text only and where no codec is found, or not the model's.
    """
    policy = load_with_codec(model, codec, device)
    if policy.speech is None:
        raise ValueError(f"{model}: writes text only; give a model that speaks (see audiorl/recipes/tts_sft.py)")
    return policy


def load_with_codec(model: str | Path, codec: str | Path | None = None, device: str = "auto") -> AudioPolicy:
    """A checkpoint for evaluation, and its codec where it speaks (see `load_speaking`)."""
    policy = load_policy(model, evaluation_config(device))
    if policy.speech is not None:
        give_codec(policy, model, codec)
    return policy


def give_codec(policy: AudioPolicy, model: str | Path, codec: str | Path | None = None) -> None:
    """Load the codec of a speaking policy that came from `model`, as `load_speaking` looks for it."""
    loaded = load_codec(codec or _codec_above(Path(model)))
    policy.set_codec(loaded)


def _codec_above(model: Path) -> Path:
    folders = [model, *model.resolve().parents[:3]] if model.is_dir() else []
    codec = next((f / "codec" for f in folders if (f / "codec" / "config.json").is_file()), None)
    if codec is None:
        raise ValueError(f"{model}: no folder codec/ in it or above it; name its audio tokenizer with --codec")
    return codec


def recording_of(folder: Path, name: str) -> AudioClip | None:
    """The recording of a text, NAME.wav or with another of SUFFIXES; None where there is no file."""
    return next((AudioClip(path=str(p)) for s in SUFFIXES if (p := folder / f"{name}{s}").is_file()), None)


def generate_speech(
    engine: RolloutEngine,
    speech_decoder: SpeechDecoder,
    samples: Sequence[Sample],
    folder: str | Path,
    settings: Mapping[str, Any],
    *,
    batch_size: int = 8,
    seed: int = 0,
    describe: Callable[[Rollout], Mapping[str, float]] = lambda rollout: {},
) -> list[dict[str, Any]]:
    """Say every sample once: FOLDER/ID.wav, and a row {id, seconds, stop_reason, tokens, …} in FOLDER/generated.jsonl.

    `describe` adds columns to the rows of samples that said something.

    A sample that said nothing has 0 seconds and no file. A later call with the same `settings` says what is missing, so
    that a kill loses no recording that was written. Raises ValueError for ids that are no names of files, for a
    folder that holds anything else, and for one that was generated with other settings.
    """
    folder = Path(folder)
    for sample in samples:
        if Path(sample.id).is_absolute() or ".." in Path(sample.id).parts:
            raise ValueError(f"{sample.id!r} is no name of a file below {folder}; give the text another id")
    if not (folder / SETTINGS).exists() and folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder}: holds files that were not generated here; choose an empty folder")
    check_settings(folder / SETTINGS, {**settings, "seed": seed})
    _forget_lost(folder)

    def write(rollout: Rollout) -> dict[str, float]:
        wav = speech_decoder.waveform(rollout)
        if wav is None or not len(wav):
            return {"seconds": 0.0}
        path = folder / f"{rollout.sample.id}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial.wav")  # a file with this name is a whole one
        write_wav(partial, wav, speech_decoder.sample_rate)
        os.replace(partial, path)
        return {"seconds": len(wav) / speech_decoder.sample_rate, **describe(rollout)}

    return generate_all(engine, samples, folder / ROWS, batch_size, seed, write)


def _forget_lost(folder: Path) -> None:
    """Take the rows whose recordings are gone out of the file."""
    rows = finished_rows(folder / ROWS)
    present = {id: row for id, row in rows.items() if not row["seconds"] or (folder / f"{id}.wav").is_file()}
    if len(present) < len(rows):
        write_json_lines(folder / ROWS, present.values())
