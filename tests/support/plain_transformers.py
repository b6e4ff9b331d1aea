"""Greedy answers of transformers, and of PEFT with an adapter, without a line of audiorl.

Reads lines `["MODEL", "AUDIO.npy" or "-", "ADAPTER" or ""]` of JSON, and writes the token ids of each answer as a line.
Of Omni models the tokenizer and the feature extractor are used: the whole processor needs torchvision for videos.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, WhisperFeatureExtractor

QUESTION = "What is said?"
CLASSES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}


def answer(folder: str, audio: str, adapter: str) -> list[int]:
    kind = AutoConfig.from_pretrained(folder).model_type
    model: Any = getattr(transformers, CLASSES[kind]).from_pretrained(folder, dtype=torch.float32)
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    inputs = inputs_of(kind, adapter or folder, None if audio == "-" else np.load(audio))
    ids = model.eval().generate(**inputs, do_sample=False, max_new_tokens=12)
    before = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0  # Whisper's prompt is not repeated
    return list(ids[0, before:].tolist())


def inputs_of(kind: str, folder: str, wav: np.ndarray | None) -> dict[str, Any]:
    if kind == "whisper":
        processor = AutoProcessor.from_pretrained(folder)
        return dict(processor(wav, sampling_rate=16_000, return_tensors="pt")) | {
            "language": "es",
            "task": "transcribe",
        }
    tokenizer = AutoTokenizer.from_pretrained(folder)
    content = [{"type": "audio"}, {"type": "text", "text": QUESTION}] if wav is not None else QUESTION
    chat = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    if wav is None:
        return dict(tokenizer(text, return_tensors="pt"))
    if kind == "qwen2_audio":
        processor = AutoProcessor.from_pretrained(folder)
        return dict(processor(text=text, audio=[wav], sampling_rate=16_000, return_tensors="pt"))
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    # Padding to the whole window, as the processor does: without it the last frame mirrors the clip's end.
    features = extractor([wav], sampling_rate=16_000, return_attention_mask=True, return_tensors="pt")
    frames = features["attention_mask"].sum(-1)
    if kind == "qwen2_5_omni":
        tokens, placeholder = ((frames - 1) // 2 + 1 - 2) // 2 + 1, "<|AUDIO|>"
    else:
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

        tokens, placeholder = _get_feat_extract_output_lengths(frames), "<|audio_pad|>"
    text = text.replace(placeholder, placeholder * int(tokens))
    return {
        **tokenizer(text, return_tensors="pt"),
        "input_features": features["input_features"],
        "feature_attention_mask": features["attention_mask"],
    }


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(*json.loads(line))), flush=True)
        assert not any(name.split(".")[0] == "audiorl" for name in sys.modules)
