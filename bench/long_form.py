"""Half an hour of speech as one stream: what a chunk costs at the beginning and at the end, and the memory it takes.

    python bench/long_form.py [--minutes 30] [--history 30] [--threads 1]

A person's recordings one after the other, in chunks of 960 ms, for the tiny Qwen2.5-Omni (11 M parameters) with
Whisper tiny as its audio tower; it is random and writes its 8 tokens after every chunk. One stream carries `history`
seconds of the past, one all of it, and one `history` seconds while its audio arrives late: nothing for up to 8 s, then
all of that at once, in pieces of any length. All come in one run, minute by minute in turn. CPU milliseconds of a chunk
are means over a sixth of the stream. Memory is what the process has taken more than before the stream, by the system's
count of resident pages; the streams run in processes of their own. Whether audio is late must not change a word.
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
from audiorl.models.families.qwen_omni import tiny
from audiorl.tasks.simul.live import RATE, Interpreter
from audiorl.tasks.simul.streams import ChunkConfig

PARTS = 6
CHUNK = round(ChunkConfig().seconds * RATE)


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def pieces(wav: np.ndarray, late: bool, rng: np.random.Generator) -> list[np.ndarray]:
    """The audio as it arrives: chunk by chunk, or late, in pieces of 1 ms to 8 s."""
    if not late:
        return np.split(wav, range(CHUNK, len(wav), CHUNK))
    cuts = np.cumsum(rng.integers(RATE // 1000, 8 * RATE, size=len(wav) // (4 * RATE)))
    return np.split(wav, cuts[cuts < len(wav)])


def interpret(pipe: Connection, history: float | None, late: bool, threads: int) -> None:
    """Answer each minute of speech with (its CPU seconds, MB taken since the beginning, all text so far)."""
    torch.set_num_threads(threads)
    policy = tiny(["a random model says anything"], config=ModelConfig(audio_cache_mb=0))  # no chunk comes twice
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=8)
    Interpreter(policy, "en", "es", sampling=sampling).observe(np.zeros(2 * CHUNK, np.float32))
    live = Interpreter(policy, "en", "es", sampling=sampling, history=history)
    rng = np.random.default_rng(0)
    before = resident_mb()
    while (wav := pipe.recv()) is not None:
        began = time.process_time()
        for piece in pieces(wav, late, rng):
            live.observe(piece)
        pipe.send((time.process_time() - began, resident_mb() - before, live.text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--history", type=float, default=30.0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    speech = np.concatenate([u.clip.load(RATE) for u in bundled_speech(("en",))])
    minute = 60 * RATE // CHUNK * CHUNK
    context = multiprocessing.get_context("spawn")
    past = f"{args.history:g} s"
    streams = {past: (args.history, False), f"{past}, arriving late": (args.history, True), "all": (None, False)}
    pipes: dict[str, Connection] = {}
    costs: dict[str, list[float]] = {name: [] for name in streams}
    memory: dict[str, list[float]] = {name: [] for name in streams}
    texts: dict[str, str] = {}
    for name, (history, late) in streams.items():
        pipes[name], other = context.Pipe()
        context.Process(target=interpret, args=(other, history, late, args.threads), daemon=True).start()
    for number in range(args.minutes):
        wav = np.take(speech, range(number * minute, (number + 1) * minute), mode="wrap")
        for name, pipe in pipes.items():
            pipe.send(wav)
            seconds, mb, texts[name] = pipe.recv()
            costs[name].append(seconds * CHUNK / minute)
            memory[name].append(mb)
        print(f"minute {number + 1}/{args.minutes}", flush=True)
    for pipe in pipes.values():
        pipe.send(None)
    table = Table("carried", "minutes", "CPU ms a chunk", "MB at the end", title=f"{args.minutes} minutes")
    for name in streams:
        size = max(args.minutes // PARTS, 1)
        for first in range(0, args.minutes, size):
            last = min(first + size, args.minutes)
            per_chunk = 1000 * fmean(costs[name][first:last])
            table.add_row(name, f"{first}-{last}", f"{per_chunk:.1f}", f"{memory[name][last - 1]:.0f}")
    Console().print(table)
    on_time, late_text = (text for name, text in texts.items() if name != "all")
    same = "the same text" if on_time == late_text else "OTHER TEXT"
    print(f"arriving late: {same}, {len(late_text)} characters")


if __name__ == "__main__":
    main()
