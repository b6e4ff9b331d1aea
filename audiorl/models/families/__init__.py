"""Model families, one short file each, and policies from model and adapter folders.

A family is a `Backbone` with the family's hooks, and `load`. To add one, write its file and give it a case in
`load_family`; parts that are where `Backbone` expects them need no hook.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from audiorl.config import LoraConfig, ModelConfig
from audiorl.models.lora import NON_LORA_WEIGHTS, adapter_config, is_adapter, other_weights, read_adapter
from audiorl.models.policy import AudioPolicy
from audiorl.models.speech import LAYOUT_KEY, FrameLayout
from audiorl.models.weights import BASE_KEY, ModelSource, check_sizes, read_processor_files
from tokenizers_audio.protocol import AudioTokenizer

TEXT_MODEL_TYPES = ("llama", "qwen2", "qwen3")
SPEECH_MODEL_TYPES = ("qwen2_5_omni", "qwen3_omni_moe", "qwen2_audio", "whisper", "higgs_audio_v2")
_log = logging.getLogger(__name__)


def load_family(path: str | Path, kind: str, config: ModelConfig, speech: FrameLayout | None) -> AudioPolicy:
    """Load a model of `model_type` `kind` from a local folder or a hub id. speech: the layout of a dualized model.

    Raises ValueError for another `model_type`. Each family's modeling code is imported when it is needed.
    """
    match kind:
        case "qwen2_5_omni" | "qwen2_5_omni_thinker" | "qwen3_omni_moe" | "qwen3_omni_moe_thinker":
            from audiorl.models.families import qwen_omni

            return qwen_omni.load(path, config, "qwen3" if kind.startswith("qwen3") else "qwen2.5", speech)
        case "qwen2_audio":
            from audiorl.models.families import qwen2_audio

            return qwen2_audio.load(path, config, speech)
        case "whisper":
            from audiorl.models.families import whisper

            return whisper.load(path, config)
        case "higgs_audio_v2":
            from audiorl.models.families import higgs

            return higgs.load(path, config)
        case "llama" | "qwen2" | "qwen3":
            from audiorl.models.families import text

            return text.load(path, config, kind, speech)
    raise ValueError(
        f"{path}: model_type {kind!r} is not one of the speech models audiorl trains "
        f"({', '.join(SPEECH_MODEL_TYPES)}) nor a text decoder it reads ({', '.join(TEXT_MODEL_TYPES)})"
    )


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
        saved = adapter_config(Path(path))
        targets = tuple(sorted({t.rsplit(".", 1)[-1] for t in saved.target_modules}))
        lora = LoraConfig(rank=saved.r, alpha=saved.lora_alpha, target_modules=targets)
        policy = load_policy(saved.base_model_name_or_path, dataclasses.replace(config, lora=lora))
        if config.device != "meta":
            load_weights(path, policy)
    else:
        content = read_config(path)
        layout = None
        if LAYOUT_KEY in content:
            try:
                layout = FrameLayout(**content[LAYOUT_KEY])
            except (TypeError, ValueError) as error:
                what = f'"{LAYOUT_KEY}" does not say how the model speaks'
                raise ValueError(f"{path}/config.json: {what}: {error}") from error
        policy = load_family(path, str(content.get("model_type")), config, layout)
        if "thinker_config" in content and content.get("enable_audio_output", True):
            base = str(Path(path).resolve() if Path(path).exists() else path)
            content = {**content, BASE_KEY: base}
            _log.warning(
                "%s: the thinker is trained; checkpoints hold no talker, `audiorl export` puts it back from here", base
            )
        policy.source = ModelSource(content, read_processor_files(path), policy.source.copied)
    if codec is not None:
        policy.set_codec(codec)
    return policy


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
        kinds = (type(saved.model).__name__, type(policy.model).__name__)
        raise ValueError(f"{folder}: holds a {kinds[0]}, this run trains a {kinds[1]}")
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
    check_sizes(folder, content)
    return content
