"""audiorl data build-qa: a benchmark of four-choice questions about speech, sounds and music."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class BuildQuestions:
    """Write four-choice questions about speech, sounds and music in the format of MMAU: a training and a held-out set.

    Speech comes from a corpus that `audiorl data build` wrote with all sources; sounds and the instruments of the music
    from Debian packages. Needs the program fluidsynth.
    """

    out: Positional[Path]
    """Folder of the benchmark: new, empty, or built before."""
    speech: Path
    """Folder of the speech corpus."""
    train: int = 3000
    """About so many training questions."""
    held_out: int = 600
    """About so many held-out questions."""
    seed: int = 0
    """Seed of every draw: splits, questions, choices and pieces of music."""
    packages: Path | None = None
    """Folder with the .deb files of the packages. By default they are downloaded with apt-get and kept in
    ~/.cache/audiorl/packages."""
    tree: Path | None = None
    """Folder below which the packages are installed or unpacked, such as /."""
    bitrate: int = 24_000
    """Bits per second of the Opus files, 6000 to 256000."""


def run_questions(options: BuildQuestions) -> None:
    """Run the command. Raises ValueError for bad input."""
    from corpora.questions.build import Size, build_questions

    size = Size(options.train, options.held_out)
    build_questions(
        options.out,
        options.speech,
        size,
        options.seed,
        packages=options.packages,
        tree=options.tree,
        bitrate=options.bitrate,
    )
