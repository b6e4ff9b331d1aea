"""Pictures for a model: the vision tower's output, and positions on three axes.

The tower is never trained. An Omni model's is loaded with the first picture, from the files that the policy was loaded
from, and is no part of the policy's model: without pictures it takes no memory, and checkpoints copy it as it is.

Shapes: T tokens, H decoder width.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from audiorl.distributed.local import gpu_work
from audiorl.models.audio_encoder import ClipCache
from audiorl.models.backbone import Backbone
from audiorl.models.weights import PREPROCESSOR, ModelSource, read_copied
from audiorl.pictures import Picture, PictureError


class PictureEncoder:
    """Encode pictures one at a time, each once: `max_bytes` of the tower's output are kept."""

    def __init__(self, backbone: Backbone, config: Any, max_bytes: int):
        self._backbone, self._config = backbone, config
        self._cache = ClipCache[Tensor](max_bytes)
        self._grids: dict[str, tuple[int, int]] = {}
        self._tower: nn.Module | None = None
        self._processor: Any = None

    def grid(self, picture: Picture, source: ModelSource) -> tuple[int, int]:
        """Return rows and columns of the picture's tokens, from its header. Raises PictureError."""
        if picture.key not in self._grids:
            width, height = picture.size()
            try:
                self._grids[picture.key] = self._backbone.picture_grid(self._prepared(source), width, height)
            except ValueError as error:  # one that is 200 times as long as wide
                raise PictureError(f"{picture.path}: {error}") from error
        return self._grids[picture.key]

    def tokens(self, picture: Picture, source: ModelSource) -> int:
        """Return how many tokens the picture becomes."""
        rows, columns = self.grid(picture, source)
        return rows * columns

    @torch.no_grad()
    def encode(self, pictures: Sequence[Picture], model: nn.Module, source: ModelSource, like: Tensor) -> list[Tensor]:
        """Return one [1 + layers, tokens, H] per picture, with the device and type of `like`.

        The first is what the decoder reads at the picture's tokens, the others what its first layers add there.
        """
        outputs = []
        for picture in pictures:
            known = self._cache.get(picture.key)
            if known is None:
                processed = self._prepared(source)(images=[picture.load()], return_tensors="pt")
                tower = self._loaded(model, source, like)
                inputs = {k: x.to(like if x.is_floating_point() else like.device) for k, x in processed.items()}
                with torch.autocast(like.device.type, enabled=False), gpu_work():
                    known = torch.stack(list(self._backbone.encode_picture(tower, inputs)))
                self._cache.put(picture.key, known.cpu())
            outputs.append(known.to(like))
        return outputs

    def _prepared(self, source: ModelSource) -> Any:
        if self._processor is None:
            kind, arguments = self._backbone.picture_processor(self._config)
            whole, own = (json.loads(source.files.get(name, b"{}")) for name in ("processor_config.json", PREPROCESSOR))
            given = own | whole.get("image_processor", {})  # beside the feature extractor's entries
            said = {k: v for k, v in given.items() if k in kind.valid_kwargs.__annotations__ and v is not None}
            self._processor = kind(**{**arguments, **said})
        return self._processor

    def _loaded(self, model: nn.Module, source: ModelSource, like: Tensor) -> nn.Module:
        if self._tower is None:
            self._tower = self._backbone.vision_tower(self._config)
            if self._tower is None:
                return model
            weights = read_copied(source.copied)
            self._tower.load_state_dict({name.removeprefix("visual."): x for name, x in weights.items()})
            self._tower.requires_grad_(False).eval().to(like)
        return self._tower


def mrope_positions(is_picture: Tensor, grids: Sequence[tuple[int, int]], first: int = 0) -> Tensor:
    """Return positions [3, T] of time, row and column for tokens of which `is_picture` [T] belong to pictures.

    Text counts on all axes from `first`. A picture's tokens share its time and count its rows and columns from there;
    what follows goes on behind the largest (M-RoPE: Qwen2-VL, arXiv 2409.12191, section 2.1).
    """
    positions = torch.arange(first, first + len(is_picture)).repeat(3, 1)
    places, used = is_picture.nonzero()[:, 0].tolist(), 0
    for rows, columns in grids:
        start, end = places[used], places[used] + rows * columns
        at, used = int(positions[0, start]), used + rows * columns
        positions[0, start:end] = at
        positions[1, start:end] = at + torch.arange(rows).repeat_interleave(columns)
        positions[2, start:end] = at + torch.arange(columns).repeat(rows)
        positions[:, end:] += at + max(rows, columns) - positions[:, end : end + 1]
    assert used == len(places), "tokens of pictures without their pictures"
    return positions
