"""The model families of the conformance suite. `tools/docs_models.py` writes the page of models from it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import Phi4MultimodalImageProcessor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig
from audiorl.data.prompts import asr_prompt
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.cross_attention import CrossAttentionDecoder
from audiorl.models.families import generic
from audiorl.pictures import Picture
from audiorl.types import Message, Sample
from tests.conftest import RECOGNISERS, TEXTS, make_omni, make_qwen2_audio, make_qwen3_omni
from tests.support import tiny_families as more

Inputs = Callable[[AudioPolicy, np.ndarray], Mapping[str, Any]]


def of_processor(policy: AudioPolicy, wav: np.ndarray) -> dict[str, Any]:
    """The family's own processor."""
    processor = policy.backbone.processor  # type: ignore[attr-defined]
    rate = policy.extractor.sampling_rate
    out = processor(
        text=[policy.backbone.audio_token], audio=[wav], return_tensors="pt", audio_kwargs={"sampling_rate": rate}
    )
    return {k: v for k, v in out.items() if k not in ("input_ids", "attention_mask")}


def of_extractor(mask: str | None, **options: Any) -> Inputs:
    """The feature extractor as the family's processor calls it, which needs more than is installed here."""

    def inputs(policy: AudioPolicy, wav: np.ndarray) -> dict[str, Any]:
        given = {"padding": "max_length", "return_attention_mask": True, "return_tensors": "pt", **options}
        out = policy.extractor(wav, sampling_rate=policy.extractor.sampling_rate, **given)
        return {"input_features": out["input_features"]} | ({mask: out["attention_mask"]} if mask else {})

    return inputs


def of_voxtral(policy: AudioPolicy, wav: np.ndarray) -> dict[str, Any]:
    extractor = policy.extractor
    padded = np.pad(wav, (0, -len(wav) % extractor.n_samples))
    x = extractor(padded, sampling_rate=16_000, truncation=False, return_tensors="pt")["input_features"]
    return {"input_features": x.reshape(x.shape[1], -1, extractor.nb_max_frames).transpose(0, 1)}


@dataclass(frozen=True)
class Case:
    """A family as the suite tries it."""

    make: Callable[..., AudioPolicy]
    """Makes a tiny random model of the real class, from a `config`."""
    title: str
    inputs: Inputs = of_processor
    """Waveform -> what transformers' forward takes beside input_ids."""
    request: str = "What is said?"
    """The text beside a clip; "" for a family whose template has no place for one."""
    tokens: Callable[[AudioPolicy, int], int] | None = None
    """Samples -> audio tokens by the family's documents; None: as many placeholders as the processor writes."""
    vllm: str = ""
    """The class of vLLM that reads exported folders."""
    without: Mapping[str, str] = field(default_factory=dict)
    """By the name of a check, why it is not made."""
    compared: Literal["projector", "full"] = "full"
    """What is trained where gradients are compared: transformers may run an encoder without."""
    written: Callable[[AudioPolicy, Sequence[Message]], list[int]] | None = None
    """Writes a conversation where no processor does; one without a system message."""
    eyes: tuple[type[Any], dict[str, Any]] | None = None
    """transformers' image processor, and what the checkpoint's preprocessor_config.json says of it."""
    eyes_need: str = ""
    """The package that its pictures need and that not every machine of the suite has."""

    def why_not(self, check: str) -> str | None:
        """Return why a check is not made."""
        if check == "pictures":
            return None if self.eyes else "it reads no pictures"
        return self.without.get(check)


def of_recogniser(policy: AudioPolicy, wav: np.ndarray) -> dict[str, Any]:
    """An encoder-decoder's feature extractor."""
    out = policy.extractor(wav, sampling_rate=policy.extractor.sampling_rate, return_tensors="pt")
    return {name: x for name, x in out.items() if isinstance(x, torch.Tensor)}


def _recogniser(kind: str, title: str, tokens: Callable[[AudioPolicy, int], int], vllm: str = "") -> Case:
    def make(config: ModelConfig | None = None) -> AudioPolicy:
        if kind in ("canary", "cohere-asr"):
            pytest.importorskip("librosa", reason="its feature extractor needs it")
        return more.alive(RECOGNISERS[kind](config))

    request = str(asr_prompt(AudioClip(array=np.zeros(1, np.float32), sample_rate=16_000), "es")[0].content[1])
    return Case(make, title, of_recogniser, request, tokens, vllm, {"template": OWN_REQUEST})


def _moonshine_tokens(policy: AudioPolicy, samples: int) -> int:
    return ((((samples - 127) // 64 + 1) - 7) // 3 + 1 - 3) // 2 + 1


def _fast_conformer_tokens(policy: AudioPolicy, samples: int) -> int:
    return -(-(samples // 160) // 8)


def _omni_tokens(policy: AudioPolicy, samples: int) -> int:
    frames = -(-samples // 160)
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def _qwen3_omni_tokens(policy: AudioPolicy, samples: int) -> int:
    whole, rest = divmod(-(-samples // 160), 100)
    for _ in range(3):
        rest = (rest + 1) // 2
    return 13 * whole + rest


def _generic(kind: str) -> Callable[..., AudioPolicy]:
    return partial(generic.tiny, kind, TEXTS)


NO_PROCESSOR = "its processor needs torchvision"
NO_TORCHAUDIO = "its processor needs torchaudio"
CHECKS = ("forward", "audio", "engine", "tokens", "template", "training", "adapter", "files", "pictures")
WHOLE = "its folder is that of the whole Omni model, which has tests of its own"
OWN_REQUEST = "its processor has no chat template; the tokens of a request have tests of their own"
FAMILIES: dict[str, Case] = {
    "audioflamingo3": Case(
        _generic("audioflamingo3"), "Audio Flamingo 3", vllm="AudioFlamingo3ForConditionalGeneration"
    ),
    "fun_asr_nano": Case(
        more.make_fun_asr,
        "Fun-ASR-Nano",
        more.own_features,
        tokens=lambda policy, samples: -(-((samples - 400) // 160 + 1) // 6),
        without={"template": NO_TORCHAUDIO},
    ),
    "gemma3n": Case(
        more.make_gemma3n,
        "Gemma 3n",
        more.of_gemma,
        tokens=lambda policy, samples: 188,
        vllm="Gemma3nForConditionalGeneration",
        eyes=(SiglipImageProcessorPil, {"size": {"height": 224, "width": 224}, "do_normalize": False}),
        eyes_need="timm",
        without=dict.fromkeys(CHECKS, "its vision tower needs timm") | {"template": NO_PROCESSOR},
    ),
    "gemma4": Case(
        more.make_gemma4,
        "Gemma 4",
        more.of_gemma,
        tokens=more.gemma4_tokens,
        vllm="Gemma4ForConditionalGeneration",
        eyes=(Gemma4ImageProcessorPil, {"max_soft_tokens": 70}),
        without={"template": NO_PROCESSOR},
    ),
    "granite_speech": Case(
        more.make_granite,
        "Granite Speech",
        more.own_features,
        tokens=more.granite_tokens,
        vllm="GraniteSpeechForConditionalGeneration",
        without={"template": NO_TORCHAUDIO},
    ),
    "granite_speech_plus": Case(
        partial(more.make_granite, plus=True),
        "Granite Speech Plus",
        more.own_features,
        tokens=more.granite_tokens,
        vllm="GraniteSpeechPlusForConditionalGeneration",
        without={"template": NO_TORCHAUDIO},
    ),
    "phi4_multimodal": Case(
        more.make_phi4,
        "Phi-4-multimodal",
        more.of_phi4,
        tokens=lambda policy, samples: -(-((samples - 400) // 160 + 1) // 8),
        eyes=(Phi4MultimodalImageProcessor, {}),
        eyes_need="torchvision",
        without={"template": NO_PROCESSOR},
    ),
    "vibevoice_asr": Case(
        more.make_vibevoice, "VibeVoice-ASR", vllm="VibeVoiceAsrForConditionalGeneration", compared="projector"
    ),
    "glmasr": Case(_generic("glmasr"), "GLM-ASR", vllm="GlmAsrForConditionalGeneration"),
    "musicflamingo": Case(_generic("musicflamingo"), "Music Flamingo"),
    "qwen2_audio": Case(
        make_qwen2_audio,
        "Qwen2-Audio",
        of_extractor("feature_attention_mask"),
        tokens=_omni_tokens,
        vllm="Qwen2AudioForConditionalGeneration",
    ),
    "qwen2_5_omni": Case(
        make_omni,
        "Qwen2.5-Omni",
        of_extractor("feature_attention_mask"),
        tokens=_omni_tokens,
        vllm="Qwen2_5OmniModel",
        eyes=(Qwen2VLImageProcessorPil, {"patch_size": 14}),
        without={"template": NO_PROCESSOR, "files": WHOLE},
    ),
    "qwen3_omni_moe": Case(
        make_qwen3_omni,
        "Qwen3-Omni",
        of_extractor("feature_attention_mask"),
        tokens=_qwen3_omni_tokens,
        vllm="Qwen3OmniMoeForConditionalGeneration",
        eyes=(Qwen2VLImageProcessorPil, {"patch_size": 16}),
        without={"template": NO_PROCESSOR, "files": WHOLE},
    ),
    "qwen3_asr": Case(_generic("qwen3_asr"), "Qwen3-ASR", request="", vllm="Qwen3ASRForConditionalGeneration"),
    "canary": _recogniser("canary", "Canary", _fast_conformer_tokens),
    "cohere_asr": _recogniser("cohere-asr", "Cohere ASR", _fast_conformer_tokens, "CohereAsrForConditionalGeneration"),
    "moonshine": _recogniser("moonshine", "Moonshine", _moonshine_tokens),
    "whisper": _recogniser("whisper", "Whisper", lambda policy, samples: 500, "WhisperForConditionalGeneration"),
    "voxtral": Case(
        _generic("voxtral"),
        "Voxtral",
        of_voxtral,
        tokens=lambda policy, samples: 25 * -(-samples // 32_000),
        written=more.written_by_mistral,
    ),
}


@cache
def policy_of(family: str) -> AudioPolicy:
    """The family's tiny model, saved and loaded as a checkpoint."""
    folder = folder_of(family)
    return load_policy(folder)


@cache
def folder_of(family: str) -> Path:
    folder = Path(tempfile.mkdtemp())
    torch.manual_seed(0)
    policy = FAMILIES[family].make()
    with torch.no_grad():  # random enough that a mistake shows, and one-dimensional weights are none of 0 or 1
        for p in policy.model.parameters():
            p.mul_(3.0) if p.dim() > 1 else p.add_(0.1 * torch.randn(p.shape))
    policy.save(folder)
    if eyes := FAMILIES[family].eyes:
        file = folder / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | eyes[1]))
    return folder


def clip_of(wav: np.ndarray, policy: AudioPolicy) -> AudioClip:
    return AudioClip(array=wav, sample_rate=policy.extractor.sampling_rate)


def noise(policy: AudioPolicy, seconds: float, seed: int = 0) -> np.ndarray:
    samples = int(seconds * policy.extractor.sampling_rate)
    return np.random.default_rng(seed).normal(0, 0.1, samples).astype(np.float32)


def asked(family: str, policy: AudioPolicy, wav: np.ndarray, name: str = "a") -> Sample:
    """A question about a recording."""
    content = (clip_of(wav, policy), *([FAMILIES[family].request] if FAMILIES[family].request else []))
    return Sample(name, (Message("user", content),))


@contextmanager
def as_released(policy: AudioPolicy) -> Iterator[Any]:
    """Yield the model with transformers' own decoder, where the policy's is one for packed batches."""
    decoder = policy.backbone.decoder(policy.model)
    packed = type(decoder)
    if isinstance(decoder, CrossAttentionDecoder):
        decoder.__class__ = packed.__bases__[-1]
    try:
        yield policy.model
    finally:
        decoder.__class__ = packed


def arguments(
    family: str,
    policy: AudioPolicy,
    ids: torch.Tensor,
    clip: AudioClip,
    sampled: torch.Tensor | None = None,
    pictures: Sequence[Picture] = (),
) -> dict[str, Any]:
    """What transformers' model takes of ids [T], the clip and the pictures in them."""
    inputs = dict(FAMILIES[family].inputs(policy, clip.load(policy.extractor.sampling_rate)))
    if pictures:
        kind, options = FAMILIES[family].eyes or pytest.fail("it reads no pictures")
        seen = kind(**options)(images=[picture.load() for picture in pictures], return_tensors="pt")
        inputs |= {name: x for name, x in seen.items() if not name.startswith("num_")}
    if isinstance(policy.backbone.decoder(policy.model), CrossAttentionDecoder):
        return {"decoder_input_ids": ids[~policy.is_audio(ids, sampled)][None], **inputs}
    return {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None], **inputs}
