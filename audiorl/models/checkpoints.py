"""Policies from model and adapter folders. The family is read from config.json."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from audiorl.config import LoraConfig, ModelConfig
from audiorl.models.lora import adapter_config, is_adapter, read_adapter
from audiorl.models.policy import AudioPolicy
from audiorl.models.saving import BASE_KEY, Source
from audiorl.models.speech import CONFIG_KEY, FrameLayout
from tokenizers_audio.protocol import AudioTokenizer

_log = logging.getLogger(__name__)
TEXT_MODEL_TYPES = ("llama", "qwen2", "qwen3")


def load_policy(
    path: str | Path, config: ModelConfig | None = None, codec: AudioTokenizer | None = None
) -> AudioPolicy:
    """The policy in a Hugging Face folder or hub id: a model, or a LoRA adapter that names its base model.

    The family is read from the folder's `model_type`; a model that was dualized comes back as one that speaks. `codec`
    is for a model that speaks. Raises ValueError for a folder of another architecture and for a codec that is not the
    model's.
    """
    config = config or ModelConfig()
    if is_adapter(path):
        policy = _load_adapter(Path(path), config)
    else:
        model_config = read_config(path)
        policy = _load_model(path, model_config, config)
        source = Source.read(path, _with_base(path, model_config))
        policy.source = dataclasses.replace(source, copied=policy.source.copied)
    if codec is not None:
        policy.set_codec(codec)
    return policy


def _with_base(path: str | Path, model_config: dict[str, Any]) -> dict[str, Any]:
    """The config of a whole Omni model with the place where its talker is."""
    if "thinker_config" not in model_config or not model_config.get("enable_audio_output", True):
        return model_config
    base = str(Path(path).resolve() if Path(path).exists() else path)
    _log.warning(
        "%s: the thinker is trained; checkpoints hold no talker, `audiorl export` puts it back from here", base
    )
    return {**model_config, BASE_KEY: base}


def _load_model(path: str | Path, model_config: dict[str, Any], config: ModelConfig) -> AudioPolicy:
    kind = str(model_config.get("model_type"))
    speech = None if CONFIG_KEY not in model_config else _layout(path, model_config[CONFIG_KEY])
    if kind in ("qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3_omni_moe", "qwen3_omni_moe_thinker"):
        from audiorl.models.families import qwen_omni

        return qwen_omni.load(path, config, "qwen3" if kind.startswith("qwen3") else "qwen2.5", speech)
    if kind == "qwen2_audio":
        from audiorl.models.families import qwen2_audio

        return qwen2_audio.load(path, config, speech)
    if kind == "whisper":
        from audiorl.models.families import whisper

        return whisper.load(path, config)
    if kind == "higgs_audio_v2":
        from audiorl.models.families import higgs

        return higgs.load(path, config)
    if kind in TEXT_MODEL_TYPES:
        from audiorl.models.families import text

        return text.load(path, config, kind, speech)
    raise ValueError(
        f"{path}: model_type {kind!r} is not one of the speech models audiorl trains "
        "(qwen2_5_omni, qwen3_omni_moe, qwen2_audio, whisper, higgs_audio_v2) nor a text decoder it reads "
        f"({', '.join(TEXT_MODEL_TYPES)})"
    )


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
        read_adapter(folder, policy)
        return
    saved = load_policy(folder, policy.config)
    if type(saved.model) is not type(policy.model):
        raise ValueError(
            f"{folder}: holds a {type(saved.model).__name__}, this run trains a {type(policy.model).__name__}"
        )
    if saved.speech != policy.speech:
        raise ValueError(f"{folder}: holds a model that speaks as {saved.speech}, this run trains {policy.speech}")
    policy.load_weights(dict(saved.parameters_by_name()), str(folder))


def _layout(path: str | Path, saved: Any) -> FrameLayout:
    try:
        return FrameLayout(**saved)
    except (TypeError, ValueError) as error:
        raise ValueError(f'{path}/config.json: "{CONFIG_KEY}" does not say how the model speaks: {error}') from error


def read_config(path: str | Path) -> dict[str, Any]:
    """The config.json of a model folder or a hub id. Raises ValueError where there is none or it is damaged."""
    folder = Path(path)
    if folder.exists():
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
    from transformers import PreTrainedConfig

    try:
        return PreTrainedConfig.get_config_dict(str(path))[0]
    except OSError as error:
        raise ValueError(f"{path}: neither a local folder nor a model that the hub gives ({error})") from error


def _load_adapter(folder: Path, config: ModelConfig) -> AudioPolicy:
    saved = adapter_config(folder)
    targets = tuple(sorted({t.rsplit(".", 1)[-1] for t in saved.target_modules}))
    lora = LoraConfig(rank=saved.r, alpha=saved.lora_alpha, target_modules=targets)
    policy = load_policy(saved.base_model_name_or_path, dataclasses.replace(config, lora=lora))
    if config.device != "meta":
        read_adapter(folder, policy)
    return policy
