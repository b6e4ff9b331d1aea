"""Reading a judge's transformers folder: all of its weights, or an error that names what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TRAINING_ONLY = ("masked_spec_embed",)
"""Weights that only training uses; released checkpoints may lack them."""


def load_judge(model_class: Any, path: str | Path, device: str) -> Any:
    """The model of a folder or cached hub id in eval mode: float32 on the CPU, float16 on a GPU.

    Raises ValueError when weights are damaged, missing, or of another shape than config.json says.
    """
    from audiorl.models.weights import naming_damage, silent_transformers

    try:
        with silent_transformers(), naming_damage(path):  # the errors below replace transformers' table of weights
            model, info = model_class.from_pretrained(
                str(path),
                dtype=torch.float32 if device == "cpu" else torch.float16,
                trust_remote_code=False,  # else transformers may ask whether to run it
                ignore_mismatched_sizes=True,  # so that they are listed; none is accepted
                output_loading_info=True,
            )
    except OSError as error:
        raise ValueError(f"{path}: neither a local model folder nor a model id that can be loaded ({error})") from error
    for kind, keys in (("missing from", info["missing_keys"]), ("of another shape in", info["mismatched_keys"])):
        names = sorted(key if isinstance(key, str) else key[0] for key in keys)
        names = [name for name in names if not name.endswith(TRAINING_ONLY)]
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(
                f"{path}: weight {names[0]!r}{others} is {kind} the checkpoint; is it a {model_class.__name__}?"
            )
    return model.to(device).eval().requires_grad_(False)


def load_processor(loader: Any, path: str | Path, what: str) -> Any:
    """The tokenizer or feature extractor in a model's folder. ValueError when it is missing or damaged."""
    try:
        return loader.from_pretrained(str(path))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: the {what} cannot be read: {error}") from error
