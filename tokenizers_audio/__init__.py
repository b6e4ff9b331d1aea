"""Neural audio codecs: speech to codes and back, whole or as a stream. This package never imports audiorl."""

from tokenizers_audio import delay
from tokenizers_audio.audio import prepare
from tokenizers_audio.codes import CodeShards, load_codes, save_codes, write_shards
from tokenizers_audio.loading import load
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
