"""Pictures for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from audiorl.pictures import Picture


def noisy_pictures(folder: Path) -> list[Picture]:
    """Two pictures of different shape, one of them turned by its EXIF data."""
    made = []
    for i, size in enumerate([(90, 60), (57, 140)]):
        noise = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(i)).byte()
        exif = Image.Exif()
        exif[0x0112] = 6 if i else 1
        Image.fromarray(noise.numpy()).save(folder / f"{i}.png", exif=exif)
        made.append(Picture(str(folder / f"{i}.png")))
    return made
