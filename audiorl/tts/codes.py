"""The codes of a corpus, made once and kept: a run that is started again does not encode its recordings again."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from audiorl.audio import AudioClip
from audiorl.models import AudioPolicy
from tokenizers_audio import CodeShards, write_shards


def encode_corpus(policy: AudioPolicy, clips: Sequence[AudioClip], folder: str | Path, per_shard: int = 500) -> int:
    """Put the codes of `clips` into shards in `folder`, from which `policy` takes them from now on.

    Clips that the folder knows already are left alone; a call that was cut off loses at most one shard. Returns how
    many were encoded. Raises ValueError for a policy without a codec, shards of another codec, and unusable audio.
    """
    if policy.codec is None:
        raise ValueError("the policy has no codec to encode with; give it one with set_codec")
    folder = Path(folder)
    kept = set(CodeShards(folder, policy.codec)) if any(folder.glob("*.safetensors")) else set()
    missing = [clip for key, clip in {c.key: c for c in clips}.items() if key not in kept]
    starts = range(0, len(missing), per_shard)
    for start in track(starts, "encoding", console=Console(stderr=True), disable=not starts):
        partial = folder / ".partial"
        shutil.rmtree(partial, ignore_errors=True)
        part = missing[start : start + per_shard]
        write_shards(partial, ((c.key, policy.codes(c)) for c in part), policy.codec, per_shard)
        (partial / "00000.safetensors").rename(folder / f"{len(list(folder.glob('*.safetensors'))):05d}.safetensors")
        partial.rmdir()
    if any(folder.glob("*.safetensors")):
        policy.keep_codes(CodeShards(folder, policy.codec))
    return len(missing)
