"""Files of Debian packages: downloaded with apt-get, taken from a folder of .deb files, or installed already.

    with package_files(["sound-theme-freedesktop"]) as root:
        sounds = sorted((root / "usr/share/sounds/freedesktop/stereo").glob("*.oga"))

The packages need not be installed, and nothing of them is run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def download_folder() -> Path:
    """Return where downloaded packages stay for the next build: $XDG_CACHE_HOME/audiorl/packages, or below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "audiorl" / "packages"


@contextmanager
def package_files(names: Sequence[str], packages: Path | None = None, tree: Path | None = None) -> Iterator[Path]:
    """Return the root folder below which the files of these packages lie, as "/" would after installing them.

    tree: the packages are installed or unpacked below this folder already; it is returned as it is. packages: a folder
    that holds their .deb files; nothing is downloaded. With neither, packages that are not in `download_folder()` yet
    are downloaded into it. Packages are unpacked into a temporary folder.

    Raises ValueError for a package that is not there and for a missing apt-get or dpkg-deb.
    """
    if tree is not None:
        if packages is not None:
            raise ValueError("give a folder of packages or a tree of unpacked ones, not both")
        yield tree
        return
    if packages is None:
        packages = download_folder()
        download(names, packages)
    with tempfile.TemporaryDirectory(prefix="audiorl-") as root:
        unpack(names, packages, Path(root))
        yield Path(root)


def download(names: Sequence[str], folder: Path) -> None:
    """Download those packages that `folder` does not hold, one at a time; an interrupted download is not left there.

    Prints name and size of each. Raises ValueError where apt-get is missing or fails.
    """
    missing = [name for name in names if not archives(name, folder)]
    if not missing:
        return
    _require("apt-get", f"copy {', '.join(f'{name}_*.deb' for name in missing)} to a folder and give it as --packages")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for number, name in enumerate(missing, start=1):
            print(f"downloading {name} ({number} of {len(missing)}, {_size(name)})", flush=True)
            _apt_get("download", name, cwd=temporary, show=True)
            for file in Path(temporary).glob("*.deb"):
                file.rename(folder / file.name)


def unpack(names: Sequence[str], folder: Path, root: Path) -> None:
    """Unpack the newest .deb of each package in `folder` into `root`."""
    _require("dpkg-deb", "unpack the packages elsewhere and give that folder as --tree")
    for name in names:
        debs = archives(name, folder)
        if not debs:
            raise ValueError(f"{folder}: no {name}_*.deb; get it with `apt-get download {name}`")
        done = subprocess.run(["dpkg-deb", "-x", str(debs[-1]), str(root)], capture_output=True, text=True)
        if done.returncode != 0:
            raise ValueError(f"{debs[-1]}: cannot be unpacked ({done.stderr.strip()}); download it again")


def archives(name: str, folder: Path) -> list[Path]:
    """Return the .deb files of a package in `folder`, sorted by name."""
    return sorted(folder.glob(f"{name}_*.deb"))


def licence_paragraph(copyright_file: Path, licence: str) -> str:
    """Return the stand-alone paragraph `License: NAME` of a Debian copyright file, unindented."""
    if not copyright_file.is_file():
        raise ValueError(f"{copyright_file}: missing; is the package installed or unpacked here?")
    paragraphs = re.split(r"\n(?=\S)", copyright_file.read_text(encoding="utf-8"))
    bodies = [p.partition("\n")[2] for p in paragraphs if p.partition("\n")[0].strip() == f"License: {licence}"]
    body = max(bodies, key=len, default="")
    if len(body) < 1000:
        raise ValueError(f"{copyright_file}: holds no text of {licence}")
    return textwrap.dedent(re.sub(r"^ \.[ \t]*$", "", body, flags=re.M)).strip() + "\n"


def gpl_2_text(root: Path) -> str:
    """Return the GNU General Public License, version 2, from the package base-files. Raises ValueError without it."""
    path = root / "usr/share/common-licenses/GPL-2"
    if not path.is_file():
        raise ValueError(f"{path}: missing; is the package base-files installed or unpacked here?")
    return path.read_text(encoding="utf-8")


def _require(program: str, advice: str) -> None:
    if shutil.which(program) is None:
        raise ValueError(f"{program}: not installed; {advice}")


def _apt_get(*arguments: str, cwd: str | None = None, show: bool = False) -> str:
    """Return what apt-get prints; with `show` that goes to the terminal, where it is the progress of a download."""
    command = ["apt-get", *arguments]
    if os.geteuid() == 0:  # apt's own user may not write to the folder
        command += ["-o", "APT::Sandbox::User=root"]
    output = None if show else subprocess.PIPE
    done = subprocess.run(command, cwd=cwd, text=True, stdout=output, stderr=subprocess.PIPE)
    if done.returncode != 0:
        reason = " ".join(done.stderr.split())
        raise ValueError(f"apt-get {' '.join(arguments)} failed ({reason}); run `apt-get update` and try again")
    return done.stdout or ""


def _size(name: str) -> str:
    """Return the size of a package's download, as apt-get knows it."""
    match = re.search(r"\.deb (\d+)", _apt_get("download", "--print-uris", name))
    return f"{int(match[1]) / 1e6:.1f} MB" if match else "size unknown"
