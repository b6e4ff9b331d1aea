"""F0 ranges by YIN, as rewards and evaluations measure them, against librosa's pYIN: agreement and CPU time.

    OMP_NUM_THREADS=1 python bench/prosody.py [--clips 12]

Recordings of 0.8 to 3 s of each speaker and language, the bundled ones and those of unseen speakers. The two take
turns, with the same rules for silence and outliers. Each is also compared with itself after white noise was added,
20 dB below the recording.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from audiorl.data.corpus import Utterance, bundled_speech, unseen_speakers
from audiorl.eval.metrics.prosody import Prosody, prosody, pyin, yin

RATE = 16_000


def recordings(clips: int) -> dict[str, list[Utterance]]:
    """By speaker and language, at most so many of each."""
    groups: dict[str, list[Utterance]] = defaultdict(list)
    for u in [*bundled_speech(), *unseen_speakers()]:
        if 0.8 <= u.duration <= 3.0:
            groups[f"{u.speaker} {u.language}"].append(u)
    rng = random.Random(0)
    return {name: rng.sample(group, min(clips, len(group))) for name, group in sorted(groups.items())}


def timed(wav: np.ndarray, f0: Callable[..., Any]) -> tuple[Prosody | None, float]:
    began = time.process_time()
    return prosody(wav, RATE, f0), time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", type=int, default=12, help="recordings of each speaker and language")
    args = parser.parse_args()
    tone = np.sin(np.arange(RATE) / 20)
    timed(tone, pyin), timed(tone, yin)  # imports, and what numba compiles
    pairs: list[tuple[float, float]] = []
    changes: tuple[list[float], list[float]] = ([], [])
    noise = np.random.default_rng(0)
    seconds, used, left_out = 0.0, np.zeros(2), 0
    for name, group in recordings(args.clips).items():
        ranges = []
        for u in group:
            wav = u.clip.load(RATE)
            seconds += len(wav) / RATE
            (fast, fast_time), (slow, slow_time) = timed(wav, yin), timed(wav, pyin)
            used += (fast_time, slow_time)
            if fast is None or slow is None:
                left_out += 1
            else:
                ranges.append((fast.f0_range, slow.f0_range))
                noisy = wav + 0.1 * np.sqrt(np.mean(wav**2)) * noise.standard_normal(len(wav))
                for clean, f0, change in ((fast, yin, changes[0]), (slow, pyin, changes[1])):
                    measured = timed(noisy, f0)[0]
                    change.append(np.inf if measured is None else abs(measured.f0_range - clean.f0_range))
        pairs += ranges
        (fast_mean, slow_mean), (fast_std, slow_std) = np.mean(ranges, axis=0), np.std(ranges, axis=0)
        print(f"{name:24} F0 range YIN {fast_mean:5.1f} ± {fast_std:4.1f}, pYIN {slow_mean:5.1f} ± {slow_std:4.1f}")
    fast_ranges, slow_ranges = np.array(pairs).T
    quartiles = np.percentile(np.abs(fast_ranges - slow_ranges), (50, 75, 90))
    print(f"{len(pairs)} recordings, {left_out} without voice by one of both")
    print("difference in semitones: median {:.2f}, 75 % {:.2f}, 90 % {:.2f}".format(*quartiles))
    print(f"rank correlation {spearmanr(fast_ranges, slow_ranges)[0]:.2f}")
    for name, change in zip(("YIN", "pYIN"), changes, strict=True):
        print("{}, change by noise: median {:.2f}, 90 % {:.2f}".format(name, *np.percentile(change, (50, 90))))
    print("CPU milliseconds of a second of speech: YIN {:.1f}, pYIN {:.0f}".format(*(1e3 * used / seconds)))


if __name__ == "__main__":
    main()
