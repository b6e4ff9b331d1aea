"""`vllm.LLM(checkpoint)`, without a line of audiorl, answers as the trainer's own engine."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from audiorl.audio import AudioClip
from audiorl.config import SamplingConfig
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.export import export
from audiorl.models.families import qwen2_audio, qwen_omni, text
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.types import Message, Sample
from corpora.models.graft import graft
from tests.conftest import TEXTS, ask
from tests.support.grafts import save_llm, save_whisper
from tests.support.vllm_engines import lively

SCRIPT = Path(__file__).parents[2] / "support" / "plain_vllm.py"
needs_torchvision = pytest.mark.skipif(find_spec("torchvision") is None, reason="Omni's processor needs torchvision")
MAKE = {
    "qwen2": lambda: text.tiny(TEXTS, hidden=128),
    "qwen2-audio": lambda: qwen2_audio.tiny(TEXTS, hidden=128, window=30),
    "qwen2.5-omni": lambda: qwen_omni.tiny(TEXTS, hidden=128, layers=2, vocab_size=400, whisper=False),
}


def grafted(family: Any, kind: str, **sizes: int) -> AudioPolicy:
    """A tiny Whisper model joined with a tiny text model of another class than the family's."""
    with TemporaryDirectory() as folder:
        return graft(save_llm(Path(folder) / "llm", kind, **sizes), save_whisper(Path(folder) / "whisper"), family)


MAKE |= {
    "qwen2.5-omni from llama": lambda: grafted("qwen2.5-omni", "llama"),
    "qwen2-audio from qwen3": lambda: grafted("qwen2-audio", "qwen3", head_dim=32),
}


@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        pytest.param("qwen2-audio", marks=pytest.mark.slow),
        pytest.param("qwen2.5-omni", marks=[pytest.mark.slow, needs_torchvision]),
        pytest.param("qwen2-audio from qwen3", marks=pytest.mark.slow),
        pytest.param("qwen2.5-omni from llama", marks=[pytest.mark.slow, needs_torchvision]),
    ],
)
def test_plain_vllm_answers_as_the_trainers_engine(family: str, samples: list[Sample], tmp_path: Path) -> None:
    lively(MAKE[family]()).save(tmp_path / "step")
    folder = export(tmp_path / "step", tmp_path / "exported")
    policy = load_policy(folder)
    # Silence at the end: Qwen2-Audio's own code lets the half window behind a clip's end reach its last audio token.
    wav = np.pad(samples[0].audio[0].load(16_000), (0, 400))
    audio = policy.backbone.audio_token is not None
    clip = AudioClip(array=wav, sample_rate=16_000)
    sample = ask(clip) if audio else Sample("q", (Message("user", ("What is said?",)),))
    (rollout,) = HFEngine(policy, SamplingConfig(temperature=0, max_new_tokens=12)).generate([Request(sample)])
    (segment,) = rollout.segments

    np.save(tmp_path / "clip.npy", wav)
    answer_file = tmp_path / "answer.json"
    command = [sys.executable, str(SCRIPT), str(folder), str(tmp_path / "clip.npy") if audio else "-"]
    subprocess.run([*command, str(answer_file)], check=True, cwd=tmp_path)
    answer = json.loads(answer_file.read_text())
    assert answer["prompt_ids"] == segment.prompt_ids.tolist()
    assert answer["ids"] == segment.ids.tolist()
    torch.testing.assert_close(torch.tensor(answer["logprobs"]), segment.logprobs, atol=1e-4, rtol=0)
