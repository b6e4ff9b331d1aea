"""Weights by name, and the files of model folders: read and checked, copied in place, written back.

`load_policy`, transformers' `AutoProcessor` and `vllm.LLM` read the folders. The vision tower of an Omni model is no
part of a policy's model and loaded for pictures only (`vision.py`): saving copies its tensors from the files that the
policy was loaded from, or from memory where the model was made. Damaged files and files of another model raise one
ValueError that names the file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
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
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, logging

from audiorl.config import ModelConfig, torch_device
from tokenizers_audio.loading import check_finite_weights, check_loaded

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Named tensors: all together, or one after the other as they arrive."""
SPEECH_OUTPUT = ("talker.", "token2wav.", "code2wav.")
"""Prefixes of the weights that checkpoints of a whole Omni model hold in addition to the thinker."""
SPEAKERS = "spk_dict.pt"
"""The file of Qwen2.5-Omni's voices."""
BASE_KEY = "audiorl_base"
"""The key of a thinker's config.json that names the released Omni model it was trained from."""
PREPROCESSOR = "preprocessor_config.json"
PROCESSOR_FILES = (
    PREPROCESSOR,
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
MOST_NUMBERS, MOST_LAYERS = 2**30, 1024
"""The most that a config.json may ask for: numbers of a matrix, and layers. Parts not loaded have sizes too."""
WIDTHS = ("hidden_size", "d_model")
LAYERS = ("layers", "depth")
SIZES = (
    "_size", "_dim", "d_model", "heads", "source_positions", "target_positions", "mel_bins", "experts", "codebooks",
)  # fmt: skip
"""Ends of the names of a configuration's sizes."""
IN_CHECKPOINT = re.compile(r"^(?:thinker\.)?(?:model\.)?(visual\..*)")
"""The names of a vision tower's tensors in a checkpoint, of a whole model or of the thinker alone."""
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


# -- from files --------------------------------------------------------------------------------------------------------


def check_sizes(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ValueError for sizes in a config.json that the weights of the folder cannot have, before memory is taken.

    A matrix larger than all weights together is none of theirs, nor are more layers than there are tensors.
    """
    counts = [0]
    for file in folder.glob("*.safetensors"):
        with naming_damage(file), safe_open(file, "pt") as stream:
            counts += [math.prod(stream.get_slice(key).get_shape()) for key in stream.keys()]  # noqa: SIM118
    most, most_layers = max(sum(counts), MOST_NUMBERS), max(len(counts), MOST_LAYERS)

    def check(part: Mapping[str, Any], place: str) -> None:
        width = max((v for k, v in part.items() if k in WIDTHS and type(v) is int), default=1)
        for name, value in part.items():
            if isinstance(value, Mapping):
                check(value, f"{place}{name}.")
            elif type(value) is int and name.endswith(LAYERS) and value > most_layers:
                raise ValueError(f"{folder}/config.json: {place}{name} is {value}, more than the weights have layers")
            elif type(value) is int and name.endswith(SIZES) and max(value, value * width) > most:
                raise ValueError(f"{folder}/config.json: {place}{name} is {value}, more than the weights can have")

    check(config, "")


def load_model(
    model_class: Any,
    path: str | Path,
    config: ModelConfig,
    build: Callable[[Any], None] | None = None,
    fill: Callable[[Any, str], bool] | None = None,
    ignored: re.Pattern[str] | None = None,
) -> PreTrainedModel:
    """Load the model of a local folder or a hub id, on the configured device; on "meta" its structure alone.

    build(model) changes its structure before the weights are read. fill(model, name) may give a weight that the
    checkpoint lacks its value and return True. `ignored`: weights of the checkpoint that the model shall not have.
    Raises ValueError when weights are damaged, missing, too many or of another shape than config.json says.
    """
    if build is not None:
        base, change = model_class, build

        class Built(base):  # type: ignore[misc, valid-type]
            def __init__(self, config: Any, *args: Any, **kwargs: Any):
                super().__init__(config, *args, **kwargs)
                change(self)
                self.__class__ = base  # nothing else differs, and transformers looks up renamed weights by class

        model_class = Built
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
            # Where it is not given, transformers chooses "sdpa" for each part that has it.
            attn_implementation="eager" if config.attention == "eager" else None,
            ignore_mismatched_sizes=True,  # for them to be listed; none is accepted
            output_loading_info=True,
        )
    unexpected = [  # buffers that some releases keep and others compute do no harm
        key
        for key in info["unexpected_keys"]
        if key.endswith((".weight", ".bias"))
        and not key.startswith(SPEECH_OUTPUT)
        and not (ignored and ignored.match(key))
    ]
    missing = [key for key in info["missing_keys"] if fill is None or not fill(model, key)]
    check_loaded(model, path, missing, info["mismatched_keys"], unexpected)
    return model.to(torch_device(config.device))


def load_frontend(path: str | Path) -> tuple[PreTrainedTokenizerBase, WhisperFeatureExtractor]:
    """Load tokenizer and feature extractor of a model's folder. Raises ValueError when one is missing or damaged."""
    return load_tokenizer(path), load_processor(path, "feature extractor", WhisperFeatureExtractor)


def load_tokenizer(path: str | Path, **options: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's folder. Raises ValueError when it is missing or damaged."""
    tokenizer: PreTrainedTokenizerBase = load_processor(path, "tokenizer", AutoTokenizer, **options)
    if tokenizer.vocab_size < 256:  # without files some classes give an empty one, and every byte has a token
        raise ValueError(f"{path}: the tokenizer cannot be read: its files hold no vocabulary")
    return tokenizer


def load_processor(path: str | Path, what: str, loader: Any, **options: Any) -> Any:
    """Load a processor or a part of one. Raises ValueError when it is missing or damaged."""
    try:
        return loader.from_pretrained(str(path), trust_remote_code=False, **options)
    except Exception as error:  # the libraries raise any kind for a damaged file, also from Rust
        raise ValueError(f"{path}: the {what} cannot be read: {' '.join(str(error).split())}") from error


def model_file(path: str | Path, name: str) -> Path | None:
    """Return a file of a model folder or hub id; None where there is none or the hub does not answer."""
    raising = ("gated_repo", "missing_entries", "connection_errors")
    file = cached_file(str(path), name, **{f"_raise_exceptions_for_{kind}": False for kind in raising})
    return None if file is None else Path(file)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file. Raises ValueError naming one that is damaged or not finite."""
    with naming_damage(path):
        tensors = load_file(path)
    check_finite_weights(tensors.items(), path)
    return tensors


def weight_files(path: str | Path, wanted: Callable[[str], object]) -> list[Path]:
    """Return the safetensors files of a model folder or hub id that may hold a tensor whose name is `wanted`."""
    files = [SAFE_WEIGHTS_NAME]
    if model_file(path, SAFE_WEIGHTS_NAME) is None and (index := model_file(path, SAFE_WEIGHTS_INDEX_NAME)):
        with suppress(ValueError, LookupError, TypeError, AttributeError):  # `from_pretrained` says what is wrong
            names: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
            files = sorted({file for name, file in names.items() if wanted(name)})
    return [file for name in files if (file := model_file(path, name)) is not None]


def tensors_of(path: str | Path, prefix: str) -> dict[str, Tensor]:
    """Read the tensors of a model folder or hub id whose names begin with `prefix`, by the rest of the name."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(path, lambda name: name.startswith(prefix)):
        with naming_damage(file), safe_open(file, "pt") as stream:
            keys = [key for key in stream.keys() if key.startswith(prefix)]  # noqa: SIM118
            tensors |= {key.removeprefix(prefix): stream.get_tensor(key) for key in keys}
    return tensors


def whole_folder(base: str) -> Path:
    """Return the folder of an Omni checkpoint, from the hub where it is not local; it is missing where that fails."""
    folder = Path(base)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        with suppress(HFValidationError, HfHubHTTPError, LocalEntryNotFoundError):
            folder = Path(
                snapshot_download(base, allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.txt", SPEAKERS])
            )
    return folder


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
    """Turn a library's exception about damaged weights, which names no file, into a ValueError that does."""
    try:
        yield
    except SafetensorError as error:
        damaged = Path(path)
        for file in sorted(damaged.glob("*.safetensors")):
            try:
                with safe_open(file, "pt"):
                    pass
            except SafetensorError:
                damaged = file
                break
        raise ValueError(f"{damaged}: damaged or cut off ({error}); copy it again") from error
    except (*_CONFIG_ERRORS, MemoryError, RuntimeError) as error:  # torch raises RuntimeError where memory is short
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(f"{path}: the model cannot be read: {' '.join(str(error).split())}; copy it again") from error


# -- to files ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CopiedTensor:
    """A tensor of `numel` numbers that checkpoints hold and the policy's model lacks: `key` of `file`, or `values`."""

    numel: int
    file: Path | None = None
    key: str = ""
    values: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedTensor:
        return self  # copies of a policy share it: nothing writes to it


@dataclass(frozen=True)
class ModelSource:
    """Contents of a policy's folder that the policy does not use: `load_policy` fills it, saving writes it back.

    config: config.json. files: the content of its `PROCESSOR_FILES` by name. copied: the tensors that were not loaded,
    by their name in the model.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    copied: Mapping[str, CopiedTensor] = field(default_factory=dict)


def read_processor_files(path: str | Path) -> dict[str, bytes]:
    """Read the `PROCESSOR_FILES` of a model folder or hub id by name."""
    paths = {name: model_file(path, name) for name in PROCESSOR_FILES}
    return {name: file.read_bytes() for name, file in paths.items() if file is not None}


def save_processor(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    extractor: Any,
    files: Mapping[str, bytes],
    template: str | None,
    class_names: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write tokenizer, chat template and processor: the `files` that a policy was loaded with, then what they lack.

    template: a chat template. class_names: by file, the entries that name the processor's classes.
    """
    tokenizer.save_pretrained(str(folder))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if template is not None and not any((folder / f"chat_template.{kind}").exists() for kind in ("jinja", "json")):
        (folder / "chat_template.jinja").write_text(template)
    if extractor is None:
        return
    extractor.save_pretrained(str(folder))
    for name, classes in class_names.items():
        entries = {**classes, **json.loads(files.get(name, b"{}"))}
        if name == PREPROCESSOR:
            entries |= json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")


def vision_tensors(path: str | Path) -> dict[str, CopiedTensor]:
    """Find the tensors of the vision tower in a model folder or hub id, by their name in the thinker.

    Reads headers only. Empty for a model without one, and for weights that are not in safetensors files.
    """
    tensors = {}
    for file in weight_files(path, IN_CHECKPOINT.match):
        with naming_damage(path), safe_open(file, "pt") as stream:
            for key in stream.keys():  # noqa: SIM118
                if match := IN_CHECKPOINT.match(key):
                    tensors[match[1]] = CopiedTensor(math.prod(stream.get_slice(key).get_shape()), file, key)
    return tensors


def remove_vision(model: Any) -> dict[str, CopiedTensor]:
    """Take the vision tower out of a thinker. Returns its tensors by name; empty for a model without one."""
    owner: Any = model if hasattr(model, "visual") else getattr(model, "model", None)
    tower = getattr(owner, "visual", None)
    if tower is None:
        return {}
    owner.visual = None
    return {f"visual.{name}": CopiedTensor(t.numel(), values=t) for name, t in tower.state_dict().items()}


def read_copied(copied: Mapping[str, CopiedTensor]) -> dict[str, Tensor]:
    """Return the tensors by name, mapped from their files: memory is used only while they are read.

    Raises OSError when a file is gone since the policy was loaded.
    """
    tensors = {name: t.values for name, t in copied.items() if t.values is not None}
    for file in sorted({t.file for t in copied.values() if t.file is not None}):
        if not file.is_file():
            raise OSError(
                f"{file}: gone since the policy was loaded from it; checkpoints take the vision tower from there, so "
                "put it back and resume"
            )
        with naming_damage(file), safe_open(file, "pt") as stream:
            tensors |= {name: stream.get_tensor(t.key) for name, t in copied.items() if t.file == file}
    return tensors
