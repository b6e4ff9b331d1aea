"""A cache of a corpus's codes on disk, so that a restarted run does not encode its recordings again."""

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
    """Write the codes of `clips` to shards in `folder`, which `policy` reads from then on.

    Clips that are in the folder already are not encoded again; an interrupted call loses at most one shard. Returns how
    many were encoded. Raises ValueError for a policy without a codec, shards of another codec, and unusable audio.
    """
    if policy.codec is None:
        raise ValueError("the policy has no codec to encode with; give it one with set_codec")
    folder = Path(folder)
    encoded = set(CodeShards(folder, policy.codec)) if any(folder.glob("*.safetensors")) else set()
    missing = [clip for key, clip in {c.key: c for c in clips}.items() if key not in encoded]
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
