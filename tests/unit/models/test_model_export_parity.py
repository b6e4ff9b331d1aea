"""What is exported answers alike in audiorl, in plain transformers and in plain PEFT; for vLLM see test_vllm_plain."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from audiorl.audio import AudioClip
from audiorl.config import LoraConfig, ModelConfig, SamplingConfig
from audiorl.data.corpus import Utterance
from audiorl.data.prompts import asr_prompt
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.export import export
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.types import Message, Sample
from tests.conftest import make_omni, make_qwen2_audio, make_qwen3_omni, make_text, make_whisper
from tests.support.vllm_engines import lively, shake

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "support" / "plain_transformers.py"
FAMILIES = {
    "qwen2": make_text,
    "qwen2-audio": make_qwen2_audio,
    "qwen2.5-omni": make_omni,
    "qwen3-omni": make_qwen3_omni,
    "whisper": make_whisper,
}


def as_released(policy: AudioPolicy) -> AudioPolicy:
    """Weights so large that every token and the audio matter, and the entries that released configurations have."""
    vocabulary, settings = policy.tokenizer.get_added_vocab(), policy.model.generation_config
    lively(policy, 0.6 if "<|transcribe|>" in vocabulary else 0.15)
    if "<|transcribe|>" in vocabulary:
        settings.lang_to_id = {"<|es|>": vocabulary["<|es|>"]}
        settings.task_to_id = {"transcribe": vocabulary["<|transcribe|>"]}
        settings.no_timestamps_token_id = vocabulary["<|notimestamps|>"]
    else:
        policy.model.config.vision_start_token_id = vocabulary["<|im_start|>"]
    policy.weights_changed()
    return policy


def recordings(speech: list[Utterance]) -> list[AudioClip]:
    """Two of people. Silence at the end: Qwen2-Audio's own code lets what is behind a clip reach its last token."""
    waves = (np.pad(u.clip.load(16_000), (0, 400)) for u in speech[:80:40])
    return [AudioClip(array=wave, sample_rate=16_000) for wave in waves]


def ours(folder: Path, clip: AudioClip) -> list[int]:
    policy = load_policy(folder)
    if policy.extractor is None:
        messages = (Message("user", ("What is said?",)),)
    elif "<|transcribe|>" in policy.tokenizer.get_added_vocab():
        messages = asr_prompt(clip, "es")
    else:
        messages = (Message("user", (clip, "What is said?")),)
    engine = HFEngine(policy, SamplingConfig(temperature=0, max_new_tokens=12))
    (rollout,) = engine.generate([Request(Sample("q", messages))])
    return rollout.segments[0].ids.tolist()


Theirs = Callable[..., list[int]]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theirs]:
    """What transformers, or PEFT with an adapter, answers in one process for all, which has not imported audiorl."""
    scratch = tmp_path_factory.mktemp("plain")
    with subprocess.Popen(
        [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=scratch
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def ask(folder: Path, clip: AudioClip, adapter: Path | str = "") -> list[int]:
            np.save(scratch / "clip.npy", clip.load(16_000))
            reads_audio = (folder / "preprocessor_config.json").exists()
            words = [str(folder), str(scratch / "clip.npy") if reads_audio else "-", str(adapter)]
            print(json.dumps(words), file=process.stdin, flush=True)
            return list(json.loads(process.stdout.readline()))

        yield ask
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_answers_as_the_engine(
    family: str, theirs: Theirs, speech: list[Utterance], tmp_path: Path
) -> None:
    as_released(FAMILIES[family]()).save(tmp_path / "step")
    out = export(tmp_path / "step", tmp_path / "out")
    answers = [ours(out, clip) for clip in recordings(speech)]
    assert answers == [ours(tmp_path / "step", clip) for clip in recordings(speech)]
    assert family == "qwen2" or answers[0] != answers[1], "the audio does not matter"
    assert theirs(out, recordings(speech)[0]) == answers[0] and len(set(answers[0])) > 2


def adapted(family: str, folder: Path, audio: str) -> Path:
    """A checkpoint with a low-rank adapter on the model folder/base."""
    as_released(FAMILIES[family]()).save(folder / "base")
    policy = load_policy(folder / "base", ModelConfig(lora=LoraConfig(rank=4), audio=audio))  # type: ignore[arg-type]
    shake(policy, 0, 0.1)
    policy.save(folder / "step")
    return folder / "step"


@pytest.mark.parametrize("family", ["qwen2", "qwen2-audio", "qwen2.5-omni"])
def test_peft_answers_as_the_engine(family: str, theirs: Theirs, speech: list[Utterance], tmp_path: Path) -> None:
    step = adapted(family, tmp_path, "frozen")
    clip = recordings(speech)[0]
    answer = ours(export(step, tmp_path / "adapter"), clip)
    assert answer != ours(tmp_path / "base", clip)
    assert theirs(tmp_path / "base", clip, tmp_path / "adapter") == answer
    assert theirs(export(step, tmp_path / "merged", merge=True), clip) == answer


def test_what_peft_does_not_load_is_said(
    theirs: Theirs, speech: list[Utterance], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = adapted("qwen2-audio", tmp_path, "projector")
    clip = recordings(speech)[0]
    answer = ours(export(step, tmp_path / "adapter"), clip)
    assert "PEFT and vLLM do not read trained.safetensors; use --merge" in caplog.text
    assert "`trained.safetensors` holds weights" in (tmp_path / "adapter" / "README.md").read_text()
    assert theirs(tmp_path / "base", clip, tmp_path / "adapter") != answer
    assert theirs(export(step, tmp_path / "merged", merge=True), clip) == answer
