"""Model families, one short file each, and policies from model and adapter folders.

Audio LLMs of transformers' common shape are in `generic`, most without code of their own. Another family is a
`Backbone` with its hooks, and `load`, and has a case in `load_family`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from audiorl.config import LoraConfig, ModelConfig
from audiorl.models.lora import (
    NON_LORA_WEIGHTS,
    adapted_modules,
    adapter_config,
    is_adapter,
    other_weights,
    read_adapter,
)
from audiorl.models.policy import AudioPolicy
from audiorl.models.speech import LAYOUT_KEY, FrameLayout
from audiorl.models.weights import BASE_KEY, ModelSource, check_sizes, read_processor_files
from tokenizers_audio.protocol import AudioTokenizer

if TYPE_CHECKING:
    from audiorl.models.families.encoder_decoder import EncoderDecoder
    from audiorl.models.families.generic import AudioLLM

TEXT_MODEL_TYPES = ("llama", "qwen2", "qwen3")
RECOGNISER_TYPES = ("canary", "cohere_asr", "moonshine", "whisper")
_log = logging.getLogger(__name__)


def load_family(path: str | Path, kind: str, config: ModelConfig, speech: FrameLayout | None) -> AudioPolicy:
    """Load a model of `model_type` `kind` from a local folder or a hub id. speech: the layout of a dualized model.

    Another `model_type` is read as an `AudioLLM`; ValueError says what of it could not be found. Each family's modeling
    code is imported when it is needed.
    """
    if config.family != "auto":
        from audiorl.models.families import generic

        return generic.load(path, config, kind, generic.user_family(config.family), speech)
    match kind:
        case "qwen2_5_omni" | "qwen2_5_omni_thinker" | "qwen3_omni_moe" | "qwen3_omni_moe_thinker":
            from audiorl.models.families import qwen_omni

            return qwen_omni.load(path, config, kind, speech)
        case _ if kind in RECOGNISER_TYPES:
            from audiorl.models.families import encoder_decoder

            return encoder_decoder.load(path, config, recogniser(kind))
        case "higgs_audio_v2":
            from audiorl.models.families import higgs

            return higgs.load(path, config)
        case "llama" | "qwen2" | "qwen3":
            from audiorl.models.families import text

            return text.load(path, config, kind, speech)
        case _:
            from audiorl.models.families import generic

            return generic.load(path, config, kind, audio_llm(kind), speech)


def recogniser(kind: str) -> type[EncoderDecoder]:
    """Return the class of an encoder-decoder's `model_type`."""
    from audiorl.models.families import fast_conformer, moonshine, whisper

    return {
        "canary": fast_conformer.Canary,
        "cohere_asr": fast_conformer.CohereAsr,
        "moonshine": moonshine.Moonshine,
        "whisper": whisper.WhisperBackbone,
    }[kind]


def audio_llm(kind: str) -> type[AudioLLM]:
    """Return the class of a `model_type` that is read as an `AudioLLM`."""
    from audiorl.models.families import fun_asr, gemma, generic, granite, phi4, qwen2_audio, vibevoice

    own: dict[str, type[generic.AudioLLM]] = {
        "fun_asr_nano": fun_asr.FunASR,
        "gemma3n": gemma.Gemma3n,
        "gemma4": gemma.Gemma4,
        "granite_speech": granite.Granite,
        "granite_speech_plus": granite.Granite,
        "phi4_multimodal": phi4.Phi4,
        "qwen2_audio": qwen2_audio.Qwen2Audio,
        "qwen3_asr": generic.Qwen3ASR,
        "vibevoice_asr": vibevoice.VibeVoiceASR,
        "voxtral": generic.Voxtral,
    }
    return own.get(kind, generic.AudioLLM)


def load_policy(
    path: str | Path,
    config: ModelConfig | None = None,
    codec: AudioTokenizer | None = None,
    talker: bool = False,
) -> AudioPolicy:
    """Load the policy in a Hugging Face folder or hub id: a model, or a LoRA adapter that names its base model.

    The family is read from the folder's `model_type`; a model that was dualized comes back as one that speaks. `codec`
    is for a model that speaks. `talker`: of a whole Omni checkpoint not the thinker, but the talker; a talker that was
    trained comes back as one in any case. Raises ValueError for a folder of another architecture and for a codec that
    is not the model's.

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
        if isinstance(saved.target_modules, str):  # a regular expression, or "all-linear"
            targets = adapted_modules(Path(path))
        else:
            targets = tuple(sorted({t.rsplit(".", 1)[-1] for t in saved.target_modules}))
        lora = LoraConfig(rank=saved.r, alpha=saved.lora_alpha, target_modules=targets)
        talker = "Talker" in str((saved.auto_mapping or {}).get("base_model_class"))
        policy = load_policy(saved.base_model_name_or_path, dataclasses.replace(config, lora=lora), talker=talker)
        if config.device != "meta":
            load_weights(path, policy)
    else:
        content = read_config(path)
        if talker or "Talker" in str(content.get("architectures")):
            from audiorl.models.families import talker as talkers

            policy = talkers.load(path, content, config)
            if codec is not None:
                policy.set_codec(codec)
            return policy
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
        others = other_weights(folder)
        policy.load_weights(others, str(folder / NON_LORA_WEIGHTS))
        policy.beside_adapter |= others.keys()
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
