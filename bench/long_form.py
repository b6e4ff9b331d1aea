"""Half an hour of speech as one stream: what a chunk costs at the beginning and at the end, and the memory it takes.

    python bench/long_form.py [--minutes 30] [--history 30] [--threads 1]

A person's recordings one after the other, in chunks of 960 ms, for the tiny Qwen2.5-Omni (11 M parameters) with
Whisper tiny as its audio tower; it is random and writes its 8 tokens after every chunk. One stream carries `history`
seconds of the past, one all of it; both come in one run, minute by minute in turn. CPU milliseconds of a chunk are
means over a sixth of the stream. Memory is what the process has taken more than before the stream, by the system's
count of resident pages; the streams run in processes of their own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from audiorl.config import ModelConfig, SamplingConfig
from audiorl.data.corpus import bundled_speech
from audiorl.models.qwen_omni import tiny
from audiorl.simulst.live import RATE, Interpreter
from audiorl.simulst.streams import ChunkConfig

PARTS = 6
CHUNK = round(ChunkConfig().seconds * RATE)


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def interpret(pipe: Connection, history: float | None, threads: int) -> None:
    """Answer each minute of speech with (CPU seconds of its chunks, MB taken since the beginning)."""
    torch.set_num_threads(threads)
    policy = tiny(["a random model says anything"], config=ModelConfig(audio_cache_mb=0))  # no chunk comes twice
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=8)
    Interpreter(policy, "en", "es", sampling=sampling).observe(np.zeros(2 * CHUNK, np.float32))
    live = Interpreter(policy, "en", "es", sampling=sampling, history=history)
    before = resident_mb()
    while (wav := pipe.recv()) is not None:
        seconds = []
        for start in range(0, len(wav) - CHUNK + 1, CHUNK):
            began = time.process_time()
            live.observe(wav[start : start + CHUNK])
            seconds.append(time.process_time() - began)
        pipe.send((seconds, resident_mb() - before))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--history", type=float, default=30.0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    speech = np.concatenate([u.clip.load(RATE) for u in bundled_speech(("en",))])
    minute = 60 * RATE // CHUNK * CHUNK
    context = multiprocessing.get_context("spawn")
    names = {f"{args.history:g} s": args.history, "all": None}
    pipes, costs, memory = {}, {name: [] for name in names}, {name: [] for name in names}
    for name, history in names.items():
        pipes[name], other = context.Pipe()
        context.Process(target=interpret, args=(other, history, args.threads), daemon=True).start()
    for number in range(args.minutes):
        wav = np.take(speech, range(number * minute, (number + 1) * minute), mode="wrap")
        for name, pipe in pipes.items():
            pipe.send(wav)
            seconds, mb = pipe.recv()
            costs[name] += seconds
            memory[name].append(mb)
        print(f"minute {number + 1}/{args.minutes}", flush=True)
    for pipe in pipes.values():
        pipe.send(None)
    table = Table("carried", "minutes", "CPU ms a chunk", "MB at the end", title=f"{args.minutes} minutes")
    for name in names:
        size = max(args.minutes // PARTS, 1)
        for first in range(0, args.minutes, size):
            chunks = costs[name][first * minute // CHUNK : (first + size) * minute // CHUNK]
            last = min(first + size, args.minutes)
            table.add_row(name, f"{first}-{last}", f"{1000 * fmean(chunks):.1f}", f"{memory[name][last - 1]:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
