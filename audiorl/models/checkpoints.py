"""Policies from model and adapter folders. The family is read from config.json."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from audiorl.config import LoraConfig, ModelConfig
from audiorl.models.families import load_family
from audiorl.models.lora import NON_LORA_WEIGHTS, adapter_config, is_adapter, other_weights, read_adapter
from audiorl.models.policy import AudioPolicy
from audiorl.models.saving import BASE_KEY, ModelSource, read_processor_files
from audiorl.models.speech import LAYOUT_KEY, FrameLayout
from tokenizers_audio.protocol import AudioTokenizer

_log = logging.getLogger(__name__)


def load_policy(
    path: str | Path, config: ModelConfig | None = None, codec: AudioTokenizer | None = None
) -> AudioPolicy:
    """Load the policy in a Hugging Face folder or hub id: a model, or a LoRA adapter that names its base model.

    The family is read from the folder's `model_type`; a model that was dualized comes back as one that speaks. `codec`
    is for a model that speaks. Raises ValueError for a folder of another architecture and for a codec that is not the
    model's.

    >>> import tempfile
    >>> from audiorl import load_policy
    >>> from audiorl.models.families.qwen_omni import tiny
    >>> folder = tempfile.mkdtemp()
    >>> tiny(["good morning"], whisper=False).save(folder)
    >>> load_policy(folder).device.type
    'cpu'
    """
    config = config or ModelConfig()
    if is_adapter(path):
        policy = _load_adapter(Path(path), config)
    else:
        model_config = read_config(path)
        policy = load_family(path, str(model_config.get("model_type")), config, _layout(path, model_config))
        files = read_processor_files(path)
        policy.source = ModelSource(_with_base(path, model_config), files, policy.source.copied)
    if codec is not None:
        policy.set_codec(codec)
    return policy


def _load_adapter(folder: Path, config: ModelConfig) -> AudioPolicy:
    saved = adapter_config(folder)
    targets = tuple(sorted({t.rsplit(".", 1)[-1] for t in saved.target_modules}))
    lora = LoraConfig(rank=saved.r, alpha=saved.lora_alpha, target_modules=targets)
    policy = load_policy(saved.base_model_name_or_path, dataclasses.replace(config, lora=lora))
    if config.device != "meta":
        load_weights(folder, policy)
    return policy


def _layout(path: str | Path, model_config: dict[str, Any]) -> FrameLayout | None:
    if LAYOUT_KEY not in model_config:
        return None
    try:
        return FrameLayout(**model_config[LAYOUT_KEY])
    except (TypeError, ValueError) as error:
        raise ValueError(f'{path}/config.json: "{LAYOUT_KEY}" does not say how the model speaks: {error}') from error


def _with_base(path: str | Path, model_config: dict[str, Any]) -> dict[str, Any]:
    """Add to the config of a whole Omni model the place where its talker is."""
    if "thinker_config" not in model_config or not model_config.get("enable_audio_output", True):
        return model_config
    base = str(Path(path).resolve() if Path(path).exists() else path)
    _log.warning(
        "%s: the thinker is trained; checkpoints hold no talker, `audiorl export` puts it back from here", base
    )
    return {**model_config, BASE_KEY: base}


def load_weights(folder: str | Path, policy: AudioPolicy) -> None:
    """Copy the weights of a model or adapter folder into `policy`.

    Raises ValueError when the folder is incomplete or of another architecture.
    """
    folder = Path(folder)
    adapter = is_adapter(folder)
    if adapter != (policy.adapter is not None):
        kinds = ("a whole model", "a low-rank adapter")
        raise ValueError(f"{folder}: holds {kinds[adapter]}, this run trains {kinds[not adapter]}")
    if adapter:
        read_adapter(folder, policy.model, policy.adapter, policy.backbone.weight_name)
        policy.load_weights(other_weights(folder), str(folder / NON_LORA_WEIGHTS))
        return
    saved = load_policy(folder, policy.config)
    if type(saved.model) is not type(policy.model):
        raise ValueError(
            f"{folder}: holds a {type(saved.model).__name__}, this run trains a {type(policy.model).__name__}"
        )
    if saved.speech != policy.speech:
        raise ValueError(f"{folder}: holds a model that speaks as {saved.speech}, this run trains {policy.speech}")
    policy.load_weights(dict(saved.parameters_by_name()), str(folder))


def read_config(path: str | Path) -> dict[str, Any]:
    """Read the config.json of a model folder or a hub id. Raises ValueError where there is none or it is damaged."""
    folder = Path(path)
    if not folder.exists():
        from transformers import PreTrainedConfig

        try:
            return PreTrainedConfig.get_config_dict(str(path))[0]
        except OSError as error:
            raise ValueError(f"{path}: neither a local folder nor a model that the hub gives ({error})") from error
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"{path}: no config.json there; a Hugging Face model folder is expected")
    try:
        content = json.loads(config.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{config}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{config}: not a JSON object")
    return content
