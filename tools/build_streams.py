"""Write streams to interpret, laid out from the bundled recordings or a folder of `audiorl data build`.

    python tools/build_streams.py OUT                                       # English to Spanish, 100 held-out streams
    python tools/build_streams.py OUT --split train --target fr --count 500 --seconds 10 60
    python tools/build_streams.py OUT --corpus corpus_it_ru --target it     # built with --languages en it ru

The result is a folder with streams.jsonl and audio/*.flac (`audiorl.tasks.simul.formats.read_streams` reads it).
No prompt
or text of `--split test` occurs in `--split train`, whatever the seed. The recordings keep their licence: the
attribution is written to the same folder.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from importlib import resources
from itertools import islice
from pathlib import Path

from audiorl.tasks.simul.bundled import draw_streams
from audiorl.tasks.simul.formats import write_streams

JOINED = (
    "The audio in this folder joins these recordings: silence around them was cut off, pauses and faint noise were\n"
    "added."
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to create; must be empty or absent")
    parser.add_argument("--corpus", type=Path, metavar="FOLDER", help="a built corpus; default: the bundled one")
    parser.add_argument("--source", default="en", help="language of the source speech (default: %(default)s)")
    parser.add_argument("--target", default="es", help="language of the references (default: %(default)s)")
    parser.add_argument("--split", choices=("train", "test"), default="test", help="(default: %(default)s)")
    parser.add_argument("--count", type=int, default=100, help="number of streams (default: %(default)s)")
    parser.add_argument("--seconds", type=float, nargs=2, default=(10.0, 30.0), metavar=("LEAST", "GREATEST"))
    parser.add_argument("--max-prompt-seconds", type=float, default=8.0, help="(default: %(default)s)")
    parser.add_argument("--held-out", type=float, default=0.27, help="fraction held out (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--wav", action="store_true", help="write wav in place of flac")
    return parser.parse_args()


def copy_attribution(corpus: Path, out: Path, changes: str = JOINED) -> None:
    """The licences and the attribution of a corpus, with a sentence that says what was changed."""
    out.mkdir(exist_ok=True)
    for source in [corpus / "ATTRIBUTION.md", *sorted(corpus.glob("LICENSE-*.txt"))]:
        if source.exists():
            shutil.copy(source, out / source.name)
    with open(out / "ATTRIBUTION.md", "a", encoding="utf-8") as file:
        file.write(f"\n{changes} It is under the same licences.\n")


def main() -> None:
    args = parse_arguments()
    if args.out.exists() and any(args.out.iterdir()):
        raise ValueError(f"{args.out}: not empty; name a new folder or empty this one first")
    if args.count < 1:
        raise ValueError(f"--count must be at least 1, got {args.count}")
    streams_of_split = draw_streams(
        args.split, args.target, args.source, seconds=tuple(args.seconds), seed=args.seed,
        max_prompt_seconds=args.max_prompt_seconds, held_out=args.held_out, folder=args.corpus,
    )  # fmt: skip
    streams = write_streams(args.out, islice(streams_of_split, args.count), ".wav" if args.wav else ".flac")
    copy_attribution(args.corpus or Path(str(resources.files("audiorl"))) / "assets" / "speech", args.out)
    minutes = sum(s.seconds for s in streams) / 60
    prompts = {key for s in streams for key in s.metadata["prompts"].split()}
    units = sum(len(s.units) for s in streams)
    print(f"{args.out}: {len(streams)} streams, {minutes:.1f} minutes, {units} units of {len(prompts)} prompts")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"build_streams: {error}")
