"""Tiny real models that vLLM serves, and what a trainer says about its answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3OmniMoeConfig

from audiorl.audio import AudioClip
from audiorl.data.corpus import Utterance
from audiorl.models import AudioPolicy
from audiorl.models.families import qwen2_audio, qwen_omni
from audiorl.types import Message, Sample, Turn
from tests.conftest import TEXTS, make_qwen3_omni
from tests.support.forks import free_port

TOLERANCE = 1e-4
"""Largest difference of a log-prob between engine and trainer."""
FAMILIES = ("qwen2.5-omni", "qwen2-audio", "qwen3-omni")


def save_family(family: str, path: Path) -> Path:
    """A model of the family in the folder `path`. vLLM's attention on CPUs needs heads of at least 32."""
    if family == "qwen2.5-omni":
        lively(qwen_omni.tiny(TEXTS, hidden=128, layers=2, vocab_size=400, whisper=False)).save(path)
    elif family == "qwen2-audio":
        lively(qwen2_audio.tiny(TEXTS, hidden=128, layers=2, vocab_size=400)).save(path)
    else:
        save_whole(lively(make_qwen3_omni(hidden=128, head_dim=32)), path)
    return path


def lively(policy: AudioPolicy, scale: float = 0.08) -> AudioPolicy:
    """Weights so large that every token matters."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=g) * scale)
    policy.audio.cache.clear()
    return policy


def shake(policy: AudioPolicy, seed: int, scale: float = 0.03) -> None:
    """Other trained weights, about as far away as from no weights at all."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(torch.randn(p.shape, generator=g) * scale)
    policy.weights_changed()


def save_whole(policy: AudioPolicy, folder: Path) -> None:
    """A Qwen3-Omni thinker in a checkpoint with a weight of a talker."""
    policy.save(folder)
    weights = load_file(folder / "model.safetensors") | {"talker.codec_head.weight": torch.zeros(3, 3)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    Qwen3OmniMoeConfig(thinker_config=policy.model.config.to_dict()).save_pretrained(folder)


def stream(speech: list[Utterance], name: str = "stream", context: float = 0.0, turns: int = 3) -> Sample:
    """A recording in chunks of 0.4 s, with what came before each."""
    clip = AudioClip(array=speech[7].clip.load(), sample_rate=16_000)
    chunks = [
        Turn(replace(clip, start=0.4 * k, duration=0.4, context=context if k else 0.0), 0.4 * (k + 1))
        for k in range(turns)
    ]
    return Sample(id=name, messages=(Message("user", ("Interpret.",)),), turns=tuple(chunks))


@contextmanager
def vllm_server(command: Sequence[str], folder: Path) -> Iterator[str]:
    """The address of vLLM's OpenAI-compatible server that `command`, beginning with python3, starts in `folder`."""
    port = free_port()
    words = [sys.executable, *command[1:], "--host", "127.0.0.1", "--port", str(port)]
    environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def healthy(process: subprocess.Popen[bytes]) -> bool:
        end = time.monotonic() + 240
        while time.monotonic() < end:
            assert process.poll() is None, (folder / "vllm.log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                return True
            except OSError:
                time.sleep(1)
        return False

    def stop(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    for _ in range(2):  # on a busy machine vLLM's engine may wait for its worker without an end
        with open(folder / "vllm.log", "w") as log:
            process = subprocess.Popen(
                words, env=os.environ | environment, stdout=log, stderr=log, cwd=folder, start_new_session=True
            )
        try:
            if healthy(process):
                yield f"http://127.0.0.1:{port}"
                return
        finally:
            stop(process)
    raise TimeoutError((folder / "vllm.log").read_text()[-3000:])
