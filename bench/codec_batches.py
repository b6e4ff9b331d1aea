"""Many short recordings through our codec: those of equal length together, against one by one. Seconds by part.

    python bench/codec_batches.py [--count 512] [--device cuda]

The codec has the geometry of tts-quickstart and random weights; lengths are drawn from `LENGTHS` frames. Both ways take
turns, after a first pass of each that is not timed: on a GPU every new shape costs time once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from audiorl.config import torch_device
from corpora.recipes.tts_quickstart import TTSQuickstartConfig
from tokenizers_audio.batches import decode_all, encode_all
from tokenizers_audio.unified import UnifiedTokenizer

LENGTHS = range(16, 48)
"""Frames: 0.6 to 1.9 s."""


def seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()  # ends with a copy to the host
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=512, help="recordings")
    parser.add_argument("--rounds", type=int, default=2, help="timed passes of each way")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default)")
    args = parser.parse_args()
    torch.manual_seed(0)
    codec = UnifiedTokenizer(TTSQuickstartConfig().tokenizer).to(torch_device(args.device))
    hop = round(codec.sample_rate / codec.frame_rate)
    frames = [LENGTHS[int(i)] for i in torch.randint(len(LENGTHS), (args.count,))]
    waves = [0.1 * torch.randn(count * hop) for count in frames]
    codes = encode_all(codec, waves)
    ways: dict[str, dict[str, Callable[[], Any]]] = {
        "encode": {
            "one by one": lambda: [codec.encode(wav)[0].cpu() for wav in waves],
            "together": lambda: encode_all(codec, waves),
        },
        "decode": {
            "one by one": lambda: [codec.decode(c[None])[0].cpu() for c in codes],
            "together": lambda: decode_all(codec, codes),
        },
    }
    print(f"{args.count} recordings, {sum(frames) / codec.frame_rate:.0f} s, on {torch_device(args.device)}")
    for part, both in ways.items():
        first = {name: seconds(run) for name, run in both.items()}
        passes = dict.fromkeys(both, 0.0)
        for _ in range(args.rounds):
            for name, run in both.items():
                passes[name] += seconds(run) / args.rounds
        rows = ", ".join(f"{name} {passes[name]:.2f} s (first pass {first[name]:.2f})" for name in both)
        print(f"{part}: {rows}; ratio {passes['one by one'] / passes['together']:.1f}", flush=True)


if __name__ == "__main__":
    main()
