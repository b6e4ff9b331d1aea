"""Model families, one short file each: a `Backbone` with the family's hooks, and `load`.

`load_family` chooses by `model_type`. To add a family, write its file and give it a case here; parts that are where
`Backbone` expects them need no hook.
"""

from __future__ import annotations

from pathlib import Path

from audiorl.config import ModelConfig
from audiorl.models.policy import AudioPolicy
from audiorl.models.speech import FrameLayout

TEXT_MODEL_TYPES = ("llama", "qwen2", "qwen3")
SPEECH_MODEL_TYPES = ("qwen2_5_omni", "qwen3_omni_moe", "qwen2_audio", "whisper", "higgs_audio_v2")


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
