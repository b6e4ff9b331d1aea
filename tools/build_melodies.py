"""Write English recordings of the package in several melodies: with a flatter and a livelier pitch than they have.

    pip install pyworld 'setuptools<81'                                     # needs a C compiler
    python tools/build_melodies.py melodies --ranges 0.1 1 1.6
    audiorl train tts-quickstart --corpus melodies --recogniser-speakers "Allison Smith x0.1" --out runs/start

The intervals between the pitch (F0) of each moment and the median of its recording are multiplied by each of
`--ranges`, and the speech is made again by WORLD (Morise et al. 2016), also for the factor 1. A model that learns from
all of them can say a text in more than one way. The folder has the form of `audiorl data build`, a speaker for each
factor.
"""

from __future__ import annotations

import argparse
import sys
from importlib import resources
from pathlib import Path

import numpy as np
from build_streams import copy_attribution

from audiorl.audio import write_wav
from audiorl.data.corpus import bundled_speech
from audiorl.data.rows import write_json_lines

RATE = 16_000


def with_range(wav: np.ndarray, factor: float) -> np.ndarray:
    """`wav` [T] at RATE Hz with `factor` times its intervals around the median F0."""
    try:
        import pyworld
    except ImportError as error:
        raise ValueError("pyworld is not installed; pip install pyworld 'setuptools<81'") from error
    x = wav.astype(np.float64)
    f0, times = pyworld.harvest(x, RATE)
    voiced = f0 > 0
    spectrum, noise = pyworld.cheaptrick(x, f0, times, RATE), pyworld.d4c(x, f0, times, RATE)
    if voiced.any():
        middle = np.median(f0[voiced])
        f0[voiced] = np.clip(middle * (f0[voiced] / middle) ** factor, 60, 600)
    return pyworld.synthesize(f0, spectrum, noise, RATE)[: len(wav)].astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to create; must be empty or absent")
    parser.add_argument("--ranges", type=float, nargs="+", default=(0.1, 1.0, 1.6), help="factors of the F0 range")
    parser.add_argument("--max-seconds", type=float, default=2.0, help="of a recording (default: %(default)s)")
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        raise ValueError(f"{args.out}: not empty; name a new folder or empty this one first")
    rows = []
    for u in bundled_speech(("en",), max_seconds=args.max_seconds):
        wav = u.clip.load(RATE)
        for factor in args.ranges:
            changed = np.clip(with_range(wav, factor), -1, 1)
            path = Path("audio") / f"{u.key.replace('/', '-')}-{factor:g}.wav"
            (args.out / path).parent.mkdir(parents=True, exist_ok=True)
            write_wav(args.out / path, changed, RATE)
            row = {"id": f"{u.id}x{factor:g}", "key": u.key, "language": u.language, "text": u.text, "audio": str(path)}
            rows.append(row | {"duration": u.duration, "speaker": f"{u.speaker} x{factor:g}", "licence": u.licence})
    write_json_lines(args.out / "manifest.jsonl", rows)
    copy_attribution(Path(str(resources.files("audiorl"))) / "assets" / "speech", args.out)
    print(f"{args.out}: {len(rows)} recordings")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"build_melodies: {error}")
