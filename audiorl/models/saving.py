"""Folders that `load_policy`, transformers' `AutoProcessor` and `vllm.LLM` read, and what is carried over to them.

No policy runs the vision tower of an Omni model, and none is part of a policy's model or loaded from files: saving
copies its tensors from the files that the policy was loaded from, or from memory where the model was made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase, WhisperFeatureExtractor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from audiorl.models.weights import naming_damage, optional_file

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
IN_CHECKPOINT = re.compile(r"^(?:thinker\.)?(?:model\.)?(visual\..*)")
"""The names of a vision tower's tensors in a checkpoint, of a whole model or of the thinker alone."""
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True)
class CopiedTensor:
    """A tensor that checkpoints hold and the policy's model lacks: `key` of `file`, or `values` where it has no file.

    `bytes`: its size; `numel`: its numbers.
    """

    file: Path | None
    key: str
    numel: int
    bytes: int
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
    paths = {name: optional_file(path, name) for name in PROCESSOR_FILES}
    return {name: file.read_bytes() for name, file in paths.items() if file is not None}


def save_processor(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    extractor: WhisperFeatureExtractor | None,
    files: Mapping[str, bytes],
    template: str | None,
    class_names: Mapping[str, Mapping[str, str]],
) -> None:
    """Write tokenizer, chat template and processor: the `files` that a policy was loaded with, then what they lack.

    template: a chat template for a folder without one. class_names: by file, the entries that name the processor's
    classes.
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


# -- vision towers -----------------------------------------------------------------------------------------------------


def vision_tensors(path: str | Path) -> dict[str, CopiedTensor]:
    """Find the tensors of the vision tower in a model folder or hub id, by their name in the thinker.

    Reads headers only. Empty for a model without one, and for weights that are not in safetensors files.
    """
    tensors = {}
    for file in _files_with_vision(path):
        with naming_damage(path), safe_open(file, "pt") as stream:
            for key in stream.keys():  # noqa: SIM118
                if match := IN_CHECKPOINT.match(key):
                    entry = stream.get_slice(key)
                    numel = prod(entry.get_shape())
                    tensors[match[1]] = CopiedTensor(file, key, numel, numel * _WIDTHS.get(entry.get_dtype(), 4))
    return tensors


def _files_with_vision(path: str | Path) -> list[Path]:
    single = optional_file(path, SAFE_WEIGHTS_NAME)
    if single is not None:
        return [single]
    index = optional_file(path, SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        return []
    try:
        names: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
        files = sorted({file for name, file in names.items() if IN_CHECKPOINT.match(name)})
    except (ValueError, LookupError, TypeError, AttributeError):
        return []  # `from_pretrained` reads it next, and says what is wrong
    return [file for name in files if (file := optional_file(path, name)) is not None]


def remove_vision(model: Any) -> dict[str, CopiedTensor]:
    """Take the vision tower out of a thinker. Returns its tensors by name; empty for a model without one."""
    owner: Any = model if hasattr(model, "visual") else getattr(model, "model", None)
    tower = getattr(owner, "visual", None)
    if tower is None:
        return {}
    owner.visual = None
    return {
        f"visual.{name}": CopiedTensor(None, "", tensor.numel(), tensor.nbytes, tensor)
        for name, tensor in tower.state_dict().items()
    }


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
