"""audiorl data: corpora of recordings that Debian packages.

audiorl data build corpus --sources asterisk --languages en es     # downloads the packages with apt-get
audiorl data build corpus --packages FOLDER                        # from .deb files that are there already
audiorl data build corpus --tree /                                 # the packages are installed
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

SourceName = Literal["asterisk"]


@dataclass(frozen=True)
class Build:
    """Write recordings of many speakers with their transcripts as one corpus, which audiorl.data.corpus reads.

    Run it again after an interruption, or with more sources or languages: voices that are complete stay as they are.
    """

    out: Positional[Path]
    """Folder of the corpus: new, empty, or built before."""
    sources: tuple[SourceName, ...] = ("asterisk",)
    """Where the recordings come from. asterisk: telephone prompts in en, es, fr, it and ru, the same in each."""
    languages: tuple[str, ...] | None = None
    """Codes of languages, such as en es; by default all that the sources have."""
    packages: Path | None = None
    """Folder with the .deb files of the packages. By default they are downloaded with apt-get and kept in
    ~/.cache/audiorl/packages."""
    tree: Path | None = None
    """Folder below which the packages are installed or unpacked, such as /."""
    bitrate: int = 24_000
    """Bits per second of the Opus files, 6000 to 256000."""
    max_seconds: float = 30.0
    """Clips that last longer, in seconds, are left out."""


def run_data(options: Build) -> None:
    """Run the command. Raises ValueError for bad input."""
    from audiorl.data.sources.build import Encoding, build, select_voices

    voices = select_voices(options.sources, options.languages)
    build(options.out, voices, options.packages, options.tree, Encoding(options.bitrate, options.max_seconds))
