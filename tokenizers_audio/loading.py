"""Read a codec's files from a folder or hub id; one clear error for what is missing, damaged or of another model."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.utils import cached_file, logging


def find(path: str | Path, name: str) -> Path:
    """Return file `name` of a local folder or a hub repository. Raises ValueError."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / name).is_file():
            raise ValueError(f"{path}: holds no {name}; name the folder of a codec as it was saved")
        return folder / name
    if folder.exists():
        raise ValueError(f"{path}: a file; name the codec's folder")
    try:
        return Path(cached_file(str(path), name))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: neither a folder nor a codec that the hub gives ({_first_line(error)})") from error


def read_config(path: str | Path) -> dict[str, Any]:
    """Return config.json of a codec. Raises ValueError when it is missing, broken or does not say what it is."""
    file = find(path, "config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({error}); copy it again") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{file}: says no model_type; is this the config.json of a codec?")
    return config


def load_model(model_class: Any, path: str | Path) -> Any:
    """Return the transformers model in float32. Raises ValueError when config and weights are damaged or do not fit."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its table of missing weights is what the error below says
    try:
        model, info = model_class.from_pretrained(
            str(path), dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
        )
    except SafetensorError as error:
        raise ValueError(f"{path}: the weights are damaged or cut off ({error}); copy them again") from error
    except Exception as error:  # a broken config fails in as many ways as it can be broken
        raise ValueError(f"{path}: config or weights cannot be read ({_first_line(error)})") from error
    finally:
        logging.set_verbosity(verbosity)
    check_loaded(model, path, info["missing_keys"], info["mismatched_keys"])
    return model


def check_loaded(
    model: nn.Module,
    path: str | Path,
    missing: Iterable[str],
    mismatched: Iterable[Any],
    unexpected: Iterable[str] = (),
) -> None:
    """Raise ValueError naming a weight that transformers' loading info lists so, or that is not finite.

    Buffers may be infinite, as the bounds of Gemma 4's clipped linear layers are, but not NaN.
    """
    kinds = {"missing from": missing, "of another shape in": mismatched, "not in the model but in": unexpected}
    for kind, keys in kinds.items():
        if names := sorted(key if isinstance(key, str) else key[0] for key in keys):
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(
                f"{path}: weight {names[0]!r}{others} is {kind} the checkpoint; "
                "do config.json and the weights belong together?"
            )
    check_finite_weights(model.named_parameters(), path)
    check_finite_weights(
        ((name, buffer.masked_fill(buffer.isinf(), 0)) for name, buffer in model.named_buffers()), path
    )


def check_finite_weights(weights: Iterable[tuple[str, Tensor]], path: str | Path) -> None:
    """Raise ValueError naming the first weight of a file or folder that has a NaN or an infinity."""
    for name, weight in weights:
        if not weight.is_floating_point() or not weight.numel() or weight.device.type == "meta":
            continue
        if not all(map(math.isfinite, map(float, torch.aminmax(weight.detach())))):
            raise ValueError(f"{path}: weight {name!r} holds values that are not finite; copy it again")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def identity(
    family: str, sample_rate: int, frame_rate: float, num_codebooks: int, codebook_size: int, model: nn.Module
) -> str:
    """Say in one line which codec made some codes: another one would decode them to noise.

    Family, geometry and a hash of all weights, e.g. `mimi 24000 Hz 12.5 frames/s 8x2048 3f2a9c04d1b7e658`.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    geometry = f"{sample_rate} Hz {frame_rate:.6g} frames/s {num_codebooks}x{codebook_size}"
    return f"{family} {geometry} {digest.hexdigest()[:16]}"
