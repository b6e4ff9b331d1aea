"""`vllm.LLM(checkpoint)`, without a line of audiorl, answers as the trainer's own engine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from audiorl.audio import AudioClip
from audiorl.config import SamplingConfig
from audiorl.models import AudioPolicy, load_policy, qwen2_audio, qwen_omni, text
from audiorl.rollout.hf import HFEngine
from audiorl.types import Message, Request, Sample
from tests.conftest import TEXTS, ask

needs_torchvision = pytest.mark.skipif(find_spec("torchvision") is None, reason="Omni's processor needs torchvision")
MAKE = {
    "qwen2": lambda: text.tiny(TEXTS, hidden=128),
    "qwen2-audio": lambda: qwen2_audio.tiny(TEXTS, hidden=128, window=30),
    "qwen2.5-omni": lambda: qwen_omni.tiny(TEXTS, hidden=128, layers=2, vocab_size=400, whisper=False),
}


def start(folder: Path, audio: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    from vllm import LLM

    quick = dict(enforce_eager=True, kv_cache_memory_bytes=64 << 20, block_size=32, distributed_executor_backend="uni")
    clips = dict(limit_mm_per_prompt={"audio": 1, "image": 0, "video": 0}) if audio else {}
    options: dict[str, Any] = quick | clips
    return LLM(str(folder), dtype="float32", max_model_len=1024, logprobs_mode="processed_logprobs", **options)


def larger_weights(policy: AudioPolicy) -> AudioPolicy:
    """So that audio and every token matter."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=g) * 0.08)
    return policy


@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        pytest.param("qwen2-audio", marks=pytest.mark.slow),
        pytest.param("qwen2.5-omni", marks=[pytest.mark.slow, needs_torchvision]),
    ],
)
def test_plain_vllm_answers_as_the_trainers_engine(
    family: str, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    larger_weights(MAKE[family]()).save(tmp_path)
    policy = load_policy(tmp_path)
    # Silence at the end: Qwen2-Audio's own code lets the half window behind a clip's end reach its last audio token.
    wav = np.pad(samples[0].audio[0].load(16_000), (0, 400))
    audio = policy.backbone.audio_token is not None
    clip = AudioClip(array=wav, sample_rate=16_000)
    sample = ask(clip) if audio else Sample("q", (Message("user", ("What is said?",)),))
    (rollout,) = HFEngine(policy, SamplingConfig(temperature=0, max_new_tokens=12)).generate([Request(sample)])
    (segment,) = rollout.segments

    llm = start(tmp_path, audio, monkeypatch)
    try:
        turn = [{"type": "audio"}, {"type": "text", "text": "What is said?"}]
        chat = [{"role": "user", "content": turn if audio else "What is said?"}]
        prompt = llm.get_tokenizer().apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        request = {"prompt": prompt} | ({"multi_modal_data": {"audio": [(wav, 16_000)]}} if audio else {})
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
        (out,) = llm.generate([request], params, use_tqdm=False)
    finally:
        llm.llm_engine.engine_core.shutdown()
    answer = out.outputs[0]
    assert list(out.prompt_token_ids) == segment.prompt_ids.tolist()
    assert list(answer.token_ids) == segment.ids.tolist()
    logprobs = torch.tensor([step[id].logprob for id, step in zip(answer.token_ids, answer.logprobs, strict=True)])
    torch.testing.assert_close(logprobs, segment.logprobs, atol=1e-4, rtol=0)
