"""Weights by name: read from model folders, checked against a model, and copied into it in place.

Damaged files and files of another model raise one ValueError that names the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    WhisperFeatureExtractor,
)
from transformers.utils import cached_file, logging

from audiorl.config import ModelConfig, torch_device

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Named tensors: all together, or one after the other as they arrive."""
SPEECH_OUTPUT = ("talker.", "token2wav.", "code2wav.")
"""Prefixes of the weights that checkpoints of a whole Omni model hold in addition to the thinker."""
_CONFIG_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    StrictDataclassError,
)
"""Errors that libraries raise for a configuration with values that it cannot have."""


# -- in memory ---------------------------------------------------------------------------------------------------------


def named(weights: Weights) -> Iterable[tuple[str, Tensor]]:
    return weights.items() if isinstance(weights, Mapping) else weights


def check_weight(name: str, tensor: Tensor, parameters: Mapping[str, Tensor], where: str) -> None:
    """Raise ValueError unless `parameters`, those of a model, have one of this name and shape."""
    if name not in parameters:
        raise ValueError(f"{where}: weight {name!r} is not in this model; was it saved by another one?")
    if parameters[name].shape != tensor.shape:
        shapes = f"{tuple(tensor.shape)} there, {tuple(parameters[name].shape)} here"
        raise ValueError(f"{where}: weight {name!r} has another shape ({shapes}): another architecture")


@torch.no_grad()
def copy_weights(parameters: Mapping[str, Tensor], weights: Weights, where: str) -> None:
    """Copy `weights` into the `parameters` of the same name. Raises ValueError for one that does not fit.

    A mapping is checked as a whole before anything is copied.
    """
    if isinstance(weights, Mapping):
        for name, tensor in weights.items():
            check_weight(name, tensor, parameters, where)
    for name, tensor in named(weights):
        check_weight(name, tensor, parameters, where)
        if parameters[name].data_ptr() != tensor.data_ptr():
            parameters[name].copy_(tensor)


def check_finite_weights(weights: Iterable[tuple[str, Tensor]], path: str | Path) -> None:
    """Raise ValueError naming the first weight of a file or folder that has a NaN or an infinity."""
    for name, weight in weights:
        if not weight.is_floating_point() or not weight.numel() or weight.device.type == "meta":
            continue
        if not all(map(math.isfinite, map(float, torch.aminmax(weight.detach())))):
            raise ValueError(f"{path}: weight {name!r} holds values that are not finite; copy it again")


# -- from files --------------------------------------------------------------------------------------------------------


def load_model(
    model_class: Any,
    path: str | Path,
    config: ModelConfig,
    build: Callable[[Any], None] | None = None,
    fill: Callable[[Any, str], bool] | None = None,
    ignored: re.Pattern[str] | None = None,
) -> PreTrainedModel:
    """Load the model of a local folder or a hub id, on the configured device.

    build(model) changes its structure before the weights are read. fill(model, name) may give a weight that the
    checkpoint lacks its value and return True. `ignored`: weights of the checkpoint that the model shall not have.

    On the device "meta" it is the structure alone: no weights are read.

    Raises ValueError when weights are damaged, missing, too many or of another shape than config.json says.
    """
    if build is not None:
        model_class = _with_build(model_class, build)
    if config.device == "meta":
        with torch.device("meta"):
            model: PreTrainedModel = model_class(model_class.config_class.from_pretrained(str(path)))
        with suppress(OSError):  # not every model folder has one
            model.generation_config = GenerationConfig.from_pretrained(str(path))
        return model
    with silent_transformers(), naming_damage(path):  # the errors below say more than its table of missing weights
        model, info = model_class.from_pretrained(
            str(path),
            dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype),
            attn_implementation="eager" if config.attention == "eager" else "sdpa",
            ignore_mismatched_sizes=True,  # for them to be listed; none is accepted
            output_loading_info=True,
        )
    missing = [key for key in info["missing_keys"] if fill is None or not fill(model, key)]
    unexpected = [  # buffers that some releases keep and others compute do no harm
        key
        for key in info["unexpected_keys"]
        if key.endswith((".weight", ".bias"))
        and not key.startswith(SPEECH_OUTPUT)
        and not (ignored and ignored.match(key))
    ]
    for kind, keys in (
        ("missing from", missing),
        ("of another shape in", info["mismatched_keys"]),
        ("not in the model but in", unexpected),
    ):
        names = sorted(key if isinstance(key, str) else key[0] for key in keys)
        if names:
            others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(
                f"{path}: weight {names[0]!r}{others} is {kind} the checkpoint; "
                "do config.json and the weights belong together?"
            )
    check_finite_weights(model.named_parameters(), path)
    return model.to(torch_device(config.device))


def _with_build(base: Any, build: Callable[[Any], None]) -> Any:
    """Return `base` with `build(model)` at the end of its constructor."""

    class Built(base):
        def __init__(self, config: Any, *args: Any, **kwargs: Any):
            super().__init__(config, *args, **kwargs)
            build(self)
            self.__class__ = base  # nothing else differs, and transformers looks up renamed weights by class

    return Built


def load_frontend(path: str | Path) -> tuple[PreTrainedTokenizerBase, WhisperFeatureExtractor]:
    """Load tokenizer and feature extractor of a model's folder. Raises ValueError when one is missing or damaged."""
    return load_tokenizer(path), _load_processor(path, "feature extractor", WhisperFeatureExtractor)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's folder. Raises ValueError when it is missing or damaged."""
    tokenizer: PreTrainedTokenizerBase = _load_processor(path, "tokenizer", AutoTokenizer, trust_remote_code=False)
    if tokenizer.vocab_size < 256:  # without files some classes give an empty one, and every byte has a token
        raise ValueError(f"{path}: the tokenizer cannot be read: its files hold no vocabulary")
    return tokenizer


def _load_processor(path: str | Path, what: str, loader: Any, **options: Any) -> Any:
    try:
        return loader.from_pretrained(str(path), **options)
    except Exception as error:  # the libraries raise any kind for a damaged file, also from Rust
        raise ValueError(f"{path}: the {what} cannot be read: {' '.join(str(error).split())}") from error


def optional_file(path: str | Path, name: str) -> Path | None:
    """Return a file of a model folder or hub id; None where there is none or the hub does not answer."""
    file = cached_file(
        str(path),
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if file is None else Path(file)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file. Raises ValueError naming a damaged one."""
    with naming_damage(path):
        return load_file(path)


@contextmanager
def silent_transformers() -> Iterator[None]:
    """Silence transformers' warnings."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def naming_damage(path: str | Path) -> Iterator[None]:
    """Turn the library's exception about damaged weights, which names no file, into a ValueError that does."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{_damaged_file(Path(path))}: damaged or cut off ({error}); copy it again") from error
    except _CONFIG_ERRORS as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(f"{path}: the model cannot be read: {' '.join(str(error).split())}; copy it again") from error


def _damaged_file(path: Path) -> Path:
    """Return the first unreadable safetensors file of a folder, or the path itself."""
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else []:
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return file
    return path
