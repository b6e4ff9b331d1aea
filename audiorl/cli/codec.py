"""Audio files to codes and back, codec encode | decode.

audiorl codec encode recordings/ more.opus --codec kyutai/mimi --out codes/       # one file: --out speech.safetensors
audiorl codec decode codes/ --codec kyutai/mimi --out wavs/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from audiorl.options import parse, subcommands

if TYPE_CHECKING:
    from torch import Tensor

    from tokenizers_audio.protocol import AudioTokenizer


@dataclass(frozen=True)
class EncodeOptions:
    """Audio to codes: one file to a .safetensors, several or a folder to a folder of shards. Recordings whose ids a
    shard has already are left out, so that the same command continues."""

    files: Positional[tuple[str, ...]]
    """Audio files (wav, flac, opus …) and folders of them."""
    codec: str
    """Folder or hub id of a codec."""
    out: Path
    """A file NAME.safetensors for one recording, otherwise a folder."""
    num_codebooks: int | None = None
    """Number of codebooks to use, from the first; by default all."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""


@dataclass(frozen=True)
class DecodeOptions:
    """Codes to 16-bit wav files."""

    codes: Positional[str]
    """A file or a folder that encode wrote."""
    codec: str
    """Folder or hub id of the codec that encoded them."""
    out: Path
    """Folder for the wav files."""
    num_codebooks: int | None = None
    """Number of codebooks, as they were encoded; by default all."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""


OPTIONS = subcommands({"encode": EncodeOptions, "decode": DecodeOptions})


def main(args: list[str]) -> int:
    """Run the command; return the exit code."""
    if args[:1] == ["train"]:
        raise ValueError("codec train: give audiorl train codec, which trains a tokenizer")
    options = parse(OPTIONS, args or ["--help"], prog="audiorl codec", description=__doc__)
    if isinstance(options, EncodeOptions):
        encode(options)
    else:
        decode(options)
    return 0


def encode(options: EncodeOptions) -> None:
    """Write the codes of all files. Raises ValueError naming the first that cannot be read."""
    import tokenizers_audio
    from audiorl.audio import AudioClip, load_clip

    files = list(_files(options.files))
    single = options.out.suffix == ".safetensors"
    if single and len(files) > 1:
        raise ValueError(f"--out {options.out}: one file of codes holds one recording, not {len(files)}; give a folder")
    tokenizer = _load(options)

    def codes_of(file: Path) -> Tensor:
        wav = load_clip(AudioClip(path=str(file)), tokenizer.sample_rate, max_seconds=float("inf"))
        try:
            return tokenizer.encode(tokenizers_audio.prepare(wav, tokenizer.sample_rate, tokenizer))[0].cpu()
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    if single:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        codes = codes_of(files[0][1])
        tokenizers_audio.save_codes(options.out, codes, tokenizer)
        print(f"{options.out}: {codes.shape[1]} frames of {codes.shape[0]} codes")
    else:
        names, by_name = [name for name, _ in files], dict(files)
        count = tokenizers_audio.write_shards(options.out, names, lambda name: codes_of(by_name[name]), tokenizer)
        print(f"{options.out}: codes of {len(files)} recordings, {count} of them new")


def decode(options: DecodeOptions) -> None:
    """Write a wav file for every recording. Raises ValueError for codes of another codec, and before it writes any for
    an id that leads out of the folder."""
    import tokenizers_audio
    from audiorl.audio import write_wav
    from audiorl.data.rows import file_below

    tokenizer, path = _load(options), Path(options.codes)
    if path.is_dir():
        recordings: Mapping[str, Tensor] = tokenizers_audio.CodeShards(path, tokenizer)
    else:
        codes = tokenizers_audio.load_codes(path, tokenizer)
        rows = codes if codes.ndim == 3 else codes[None]
        recordings = {path.stem if len(rows) == 1 else f"{path.stem}_{i}": row for i, row in enumerate(rows)}
    files = {name: file_below(options.out, f"{name}.wav") for name in recordings}
    for name, file in files.items():
        write_wav(file, tokenizer.decode(recordings[name][None])[0].cpu().numpy(), tokenizer.sample_rate)
    print(f"{options.out}: {len(files)} recordings")


def _load(options: EncodeOptions | DecodeOptions) -> AudioTokenizer:
    import tokenizers_audio
    from audiorl.config import torch_device

    choice = {} if options.num_codebooks is None else {"num_codebooks": options.num_codebooks}
    tokenizer: Any = tokenizers_audio.load(options.codec, **choice)
    return tokenizer.to(torch_device(options.device))


def _files(paths: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """(id, file): the name without its ending, for a folder's files the path below it."""
    from audiorl.audio import AUDIO_SUFFIXES
    from audiorl.data.rows import files_below

    if not paths:
        raise ValueError("encode: name audio files or folders of them")
    for path in map(Path, paths):
        if not path.is_dir():
            yield path.stem, path
            continue
        recordings = files_below(path, *AUDIO_SUFFIXES)
        if not recordings:
            raise ValueError(f"{path}: no audio files below it ({', '.join(AUDIO_SUFFIXES)})")
        yield from ((str(file.relative_to(path).with_suffix("")), file) for file in recordings)
