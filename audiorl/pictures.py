"""Pictures of prompts by reference: files that Pillow reads. Frames of a video are pictures, too."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image

_TURNED = (5, 6, 7, 8)
"""Values of the orientation in EXIF data with which width and height change places."""
_ORIENTATION = 0x0112


class PictureError(ValueError):
    """A picture that cannot be used: missing, too large, or no picture."""


class Picture(NamedTuple):
    """A picture in a file, read only by `size` and `load`. In JSON it is [path]: clips are objects.

    >>> from audiorl.pictures import Picture
    >>> Picture("cat.png").key
    'cat.png'
    """

    path: str

    @property
    def key(self) -> str:
        """What caches call it."""
        return self.path

    def size(self) -> tuple[int, int]:
        """Return width and height as it is shown, from the header. Raises PictureError."""
        with _opened(self.path) as image:
            width, height = image.size
            return (height, width) if image.getexif().get(_ORIENTATION) in _TURNED else (width, height)

    def load(self) -> Image:
        """Return it in RGB and as it is shown: turned as its EXIF data say. Raises PictureError."""
        from PIL import ImageOps

        with _opened(self.path) as image:
            try:
                return ImageOps.exif_transpose(image).convert("RGB")
            except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for damage depends on the format
                raise PictureError(f"{self.path}: the picture is damaged ({error}); copy it again") from error

    def _repr_html_(self) -> str:
        """The picture, for notebooks."""
        data = base64.b64encode(Path(self.path).read_bytes()).decode()
        return f'<img alt="{html.escape(self.path)}" style="max-height: 20em" src="data:;base64,{data}">'


def _opened(path: str) -> Image:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(path)
    except UnidentifiedImageError as error:
        raise PictureError(f"{path}: no picture that Pillow reads; give a PNG, JPEG or WebP file") from error
    except FileNotFoundError as error:
        raise PictureError(f"{path}: missing; check the path") from error
    except Image.DecompressionBombError as error:
        raise PictureError(f"{path}: too large ({error}); give a smaller one") from error
    except OSError as error:
        raise PictureError(f"{path}: cannot be read ({error})") from error
