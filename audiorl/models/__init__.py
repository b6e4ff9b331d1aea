"""Policies, one file per backbone family."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from audiorl.config import ModelConfig
from audiorl.models.loading import naming_damage
from audiorl.models.policy import AudioPolicy, Backbone, Reference

__all__ = ["AudioPolicy", "Backbone", "Reference", "load_policy"]


def load_policy(path: str | Path, config: ModelConfig | None = None) -> AudioPolicy:
    """The policy in a Hugging Face folder or hub id: a model, or a LoRA adapter that names its base model.

    The family is read from the folder's `model_type`. Raises ValueError for a folder of another architecture.
    """
    config = config or ModelConfig()
    folder = Path(path)
    if folder.is_dir() and (folder / "adapter_config.json").exists():
        return _load_adapter(folder, config)
    kind = _model_type(path)
    if kind in ("qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3_omni_moe", "qwen3_omni_moe_thinker"):
        from audiorl.models import qwen_omni

        return qwen_omni.load(path, config, "qwen3" if kind.startswith("qwen3") else "qwen2.5")
    if kind == "qwen2_audio":
        from audiorl.models import qwen2_audio

        return qwen2_audio.load(path, config)
    raise ValueError(
        f"{path}: model_type {kind!r} is not one of the speech models audiorl trains "
        "(qwen2_5_omni, qwen3_omni_moe, qwen2_audio)"
    )


def _model_type(path: str | Path) -> str:
    folder = Path(path)
    if folder.exists():
        config = folder / "config.json"
        if not config.is_file():
            raise ValueError(f"{path}: no config.json there; a Hugging Face model folder is expected")
        try:
            content = json.loads(config.read_text())
        except ValueError as error:
            raise ValueError(f"{config}: not valid JSON ({error})") from error
        if not isinstance(content, dict):
            raise ValueError(f"{config}: not a JSON object")
        return str(content.get("model_type"))
    from transformers import PreTrainedConfig

    try:
        return str(PreTrainedConfig.get_config_dict(str(path))[0].get("model_type"))
    except OSError as error:
        raise ValueError(f"{path}: neither a local folder nor a model that the hub gives ({error})") from error


def _load_adapter(folder: Path, config: ModelConfig) -> AudioPolicy:
    from peft import PeftConfig
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    from audiorl.config import LoraConfig

    saved = PeftConfig.from_pretrained(str(folder))
    if not saved.base_model_name_or_path:
        raise ValueError(f"{folder}/adapter_config.json: base_model_name_or_path is missing")
    targets = tuple(sorted({t.rsplit(".", 1)[-1] for t in saved.target_modules}))  # type: ignore[attr-defined]
    lora = LoraConfig(rank=saved.r, alpha=saved.lora_alpha, target_modules=targets)  # type: ignore[attr-defined]
    policy = load_policy(saved.base_model_name_or_path, dataclasses.replace(config, lora=lora))
    with naming_damage(folder):
        weights = load_peft_weights(str(folder), device=config.device)
    set_peft_model_state_dict(policy.adapter, weights)
    return policy
