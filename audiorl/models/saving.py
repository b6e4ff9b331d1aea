"""A policy as a folder that `load_policy`, transformers' `AutoProcessor` and `vllm.LLM` read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from audiorl.models.loading import optional_file
from audiorl.models.lora import save_adapter
from audiorl.models.vision import CopiedTensor

if TYPE_CHECKING:
    from audiorl.models.policy import AudioPolicy

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


@dataclass(frozen=True)
class Source:
    """What a policy's folder or hub id held and the policy does not use: `load_policy` fills it, saving writes it back.

    config: config.json. files: the content of its `PROCESSOR_FILES` by name. copied: the tensors that were not loaded,
    by their name in the model.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    copied: Mapping[str, CopiedTensor] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path, config: Mapping[str, Any]) -> Source:
        paths = {name: optional_file(path, name) for name in PROCESSOR_FILES}
        return cls(config, {name: file.read_bytes() for name, file in paths.items() if file is not None})


def save_policy(policy: AudioPolicy, folder: str | Path) -> None:
    """A Hugging Face model folder in safetensors; with LoRA, an adapter folder that names its base model.

    Of an Omni model the thinker is saved, in the layout of the whole model with `enable_audio_output` false; its talker
    is not. `audiorl.models.export` puts that back. Its vision tower, which is not loaded, is copied from the files that
    the policy was loaded from.
    """
    folder = Path(folder)
    if not torch.cuda.is_available():  # transformers imports DeepSpeed here if it can, which would warn of no GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if policy.adapter is None:
        policy.backbone.save_model(policy.model, str(folder), policy.source)
    else:
        save_adapter(policy, folder)
    save_processor(policy, folder)


def save_processor(policy: AudioPolicy, folder: Path) -> None:
    """Tokenizer, chat template and processor. What the policy was not loaded with is written for its family."""
    policy.tokenizer.save_pretrained(str(folder))
    for name, content in policy.source.files.items():
        (folder / name).write_bytes(content)
    template = policy.backbone.chat_template()
    if template is not None and not any((folder / f"chat_template.{kind}").exists() for kind in ("jinja", "json")):
        (folder / "chat_template.jinja").write_text(template)
    if policy.extractor is None:
        return
    policy.extractor.save_pretrained(str(folder))
    for name, classes in policy.backbone.processor_files.items():
        entries = {**classes, **json.loads(policy.source.files.get(name, b"{}"))}
        if name == PREPROCESSOR:
            entries |= json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")
