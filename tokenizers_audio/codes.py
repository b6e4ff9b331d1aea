"""Codes on disk: safetensors that know which codec made them.

One recording is one file (`save_codes`, `load_codes`); a corpus is a folder of shards (`write_shards`, `CodeShards`)
of some hundred recordings each, from which any one is read without the others. Codes are kept in the smallest integers
that hold them. Reading with another codec than the one that wrote is an error, since codes mean nothing to it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tokenizers_audio.checks import check_codes
from tokenizers_audio.protocol import AudioTokenizer

FORMAT = "audiorl_codes"
PER_SHARD = 500


def save_codes(path: str | Path, codes: Tensor, tokenizer: AudioTokenizer) -> None:
    """Codes [Q, F] of one recording, or [B, Q, F] of some of equal length. Raises ValueError for another codec's."""
    _save(Path(path), {"codes": _compact(codes, tokenizer, path)}, tokenizer, {})


def load_codes(path: str | Path, tokenizer: AudioTokenizer) -> Tensor:
    """Return what `save_codes` wrote, as int64 on the CPU. Raises ValueError, also for codes that the codec cannot
    decode."""
    with _open(Path(path)) as file:
        _check_tokenizer(Path(path), file.metadata(), tokenizer.identity)
        if "codes" not in file.keys():  # noqa: SIM118 - not a mapping
            raise ValueError(f"{path}: a shard of many recordings; read its folder with CodeShards")
        codes = file.get_tensor("codes")
    _check(codes, tokenizer, "[Q, F]" if codes.ndim == 2 else "[B, Q, F]", path)
    return codes.long()


def write_shards(
    folder: str | Path,
    ids: Iterable[str],
    codes_of: Callable[[str], Tensor],
    tokenizer: AudioTokenizer,
    per_shard: int = PER_SHARD,
) -> int:
    """Write the codes [Q, F] that `codes_of` makes of each id, as folder/00000.safetensors and so on.

    It holds one shard in memory. What the folder holds already is not encoded again; an interrupted call loses at most
    one shard. Returns how many were encoded. Raises ValueError before it encodes any for an id that comes twice and for
    shards of another codec.
    """
    folder, ids = Path(folder), [*ids]
    if twice := [name for name, count in Counter(ids).items() if count > 1]:
        raise ValueError(f"{folder}: recording {twice[0]!r} comes twice; ids must be unique")
    folder.mkdir(parents=True, exist_ok=True)
    files = [*folder.glob("*.safetensors")]
    there = {*CodeShards(folder, tokenizer)} if files else set()
    missing = [name for name in ids if name not in there]
    number = max((int(file.stem) for file in files if file.stem.isdecimal()), default=-1)
    starts = range(0, len(missing), per_shard)
    for start in track(starts, "encoding", console=Console(stderr=True), disable=not starts):
        shard: dict[str, Tensor] = {}
        for name in missing[start : start + per_shard]:
            codes = codes_of(name)
            if codes.ndim != 2:
                raise ValueError(f"{folder}: recording {name!r} has codes {list(codes.shape)}; give [Q, F]")
            shard[name] = _compact(codes, tokenizer, f"{folder}: recording {name!r}")
        # The file sorts its tensors; the list keeps the order in which they came.
        tensors = {str(i): codes for i, codes in enumerate(shard.values())}
        number += 1
        _save(folder / f"{number:05d}.safetensors", tensors, tokenizer, {"ids": json.dumps([*shard])})
    return len(missing)


class CodeShards(Mapping[str, Tensor]):
    """The recordings in a folder of shards: id -> codes [Q, F] int64, in the order in which they were written.

    Only ids are read at first, and of a recording nothing but its own bytes. Raises ValueError for shards of another
    codec, broken ones, and a folder without any; reading a recording raises it for codes that the codec cannot decode.
    """

    def __init__(self, folder: str | Path, tokenizer: AudioTokenizer) -> None:
        self._tokenizer = tokenizer
        self._at: dict[str, tuple[Path, str]] = {}
        identity = tokenizer.identity  # a hash of all its weights
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ValueError(f"{folder}: holds no shards of codes; write them with write_shards")
        for path in files:
            with _open(path) as file:
                metadata, tensors = file.metadata(), {*file.keys()}
            _check_tokenizer(path, metadata, identity)
            if "ids" not in metadata:
                raise ValueError(f"{path}: the codes of one recording, no shard; read it with load_codes")
            for i, name in enumerate(_ids(path, metadata["ids"], tensors)):
                if name in self._at:
                    raise ValueError(f"{path}: recording {name!r} is also in {self._at[name][0]}")
                self._at[name] = (path, str(i))

    def __getitem__(self, name: str) -> Tensor:
        path, key = self._at[name]
        with _open(path) as file:
            codes = file.get_tensor(key)
        _check(codes, self._tokenizer, "[Q, F]", f"{path}: recording {name!r}")
        return codes.long()

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)


def _ids(path: Path, text: str, tensors: set[str]) -> list[str]:
    """Return the recordings of a shard, one a tensor."""
    try:
        ids = json.loads(text)
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not all(isinstance(id, str) for id in ids):
        raise ValueError(f"{path}: its metadata has no list of ids; write the codes again")
    if tensors != {str(i) for i in range(len(ids))}:
        raise ValueError(f"{path}: {len(tensors)} tensors for {len(ids)} ids; write the codes again")
    return ids


def _check(codes: Tensor, tokenizer: AudioTokenizer, shape: str, what: object) -> None:
    try:
        check_codes(codes, tokenizer.num_codebooks, tokenizer.codebook_size, shape)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def _compact(codes: Tensor, tokenizer: AudioTokenizer, what: object) -> Tensor:
    size = tokenizer.codebook_size
    _check(codes, tokenizer, "[Q, F]" if codes.ndim == 2 else "[B, Q, F]", what)
    dtype = torch.uint8 if size <= 2**8 else torch.int16 if size <= 2**15 else torch.int32
    return codes.to("cpu", dtype).contiguous()


def _save(path: Path, tensors: dict[str, Tensor], tokenizer: AudioTokenizer, more: dict[str, str]) -> None:
    """Write under another name and rename: a file of this name is always complete."""
    partial = path.with_name(f".{path.name}.partial")
    save_file(tensors, partial, {"format": FORMAT, "tokenizer": tokenizer.identity, **more})
    os.replace(partial, path)


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; name a file that save_codes wrote")
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged or no safetensors file ({error}); write the codes again") from error


def _check_tokenizer(path: Path, metadata: dict[str, str] | None, identity: str) -> None:
    if not metadata or metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: holds no codes; name a file that save_codes or write_shards wrote")
    if metadata.get("tokenizer") != identity:
        raise ValueError(
            f"{path}: codes of the codec [{metadata.get('tokenizer')}], not of [{identity}]; "
            "load the codec that made them, or encode the audio again"
        )
