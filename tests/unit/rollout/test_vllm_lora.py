"""LoRA adapters in vLLM: sent as they are, run next to the weights, replaced at every update.

Each test makes its engines: vLLM forgets its process groups when one of several engines of a process is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from audiorl.config import LoraConfig, ModelConfig, SamplingConfig
from audiorl.data.corpus import Utterance
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.families import text
from audiorl.rollout.vllm import VLLMConfig, VLLMEngine
from audiorl.rollout.vllm_weights import Lora, adapter_obstacle, served_weights
from audiorl.rollout.weight_transfer import WeightSender
from audiorl.types import Sample
from tests.conftest import TEXTS
from tests.support.rollouts import forced, ids, logprobs, requests
from tests.support.vllm_engines import FAMILIES, TOLERANCE, save_family, shake, stream


@pytest.fixture
def family(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", FAMILIES[0]))


@pytest.fixture
def adapted(family: str, tmp_path: Path) -> AudioPolicy:
    """A policy with an adapter and a projector that change it, in the folder `tmp_path`/adapter."""
    save_family(family, tmp_path / "base")
    policy = load_policy(tmp_path / "base", ModelConfig(lora=LoraConfig(rank=4), audio="projector"))
    shake(policy, 5)
    policy.save(tmp_path / "adapter")
    return policy


Start = Callable[[Lora], VLLMEngine]


@pytest.fixture
def start(adapted: AudioPolicy, tmp_path: Path) -> Iterator[Start]:
    """Makes engines with the policy's first weights; they are closed at the end."""
    engines = []

    def start(lora: Lora) -> VLLMEngine:
        engines.append(VLLMEngine(tmp_path / "adapter", SamplingConfig(max_new_tokens=12), VLLMConfig(lora=lora)))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("family", ["qwen2.5-omni", "qwen2-audio"], indirect=True)
def test_an_adapter_is_run_next_to_the_weights_and_replaced(
    start: Start, adapted: AudioPolicy, samples: list[Sample], speech: list[Utterance]
) -> None:
    """After two updates in a row, tokens and log-probs are those of the merged weights, of streams too."""
    engine, with_merged = start("adapter"), start("merged")
    asked = [*samples, stream(speech)]
    for version in range(3):
        if version:
            stale = engine.generate(requests(samples))
            shake(adapted, version)
            assert (forced(adapted, stale) - logprobs(stale)).abs().max() > 100 * TOLERANCE
            engine.update_weights(served_weights(adapted, "adapter"), version)
            with_merged.update_weights(served_weights(adapted), version)
        rollouts = engine.generate(requests(asked, seed=version))
        torch.testing.assert_close(logprobs(rollouts), forced(adapted, rollouts), atol=TOLERANCE, rtol=0)
        merged = with_merged.generate(requests(asked, seed=version))
        assert ids(rollouts) == ids(merged)
        torch.testing.assert_close(logprobs(rollouts), logprobs(merged), atol=TOLERANCE, rtol=0)
    sent = dict(served_weights(adapted, "adapter"))
    assert {n for n in sent if ".lora_" not in n} == {n for n in adapted.trainable() if ".lora_" not in n}
    before = {n: w.clone() for n, w in sent.items()}
    half = {n: w for n, w in sent.items() if ".lora_B." not in n}
    with pytest.raises(ValueError, match=r"lora_B\.default\.weight' is missing"):
        engine.update_weights(half, 9)
    with pytest.raises(RuntimeError, match="an update to version 9 was broken off"):
        engine.generate(requests(samples))
    with pytest.raises(ValueError, match="is not in this model"):
        engine.update_weights(served_weights(adapted), 9)
    engine.update_weights(sent, 10)
    again = engine.generate(requests(asked, seed=2))
    assert ids(again) == ids(merged) and torch.equal(logprobs(again), logprobs(rollouts))
    assert all(torch.equal(w, before[n]) for n, w in sent.items()), "the trainer's own matrices"


@pytest.mark.parametrize("family", ["qwen3-omni"], indirect=True)
def test_an_adapter_that_vllm_cannot_run_is_refused(start: Start) -> None:
    with pytest.raises(ValueError, match=r"vLLM cannot run this adapter: on a CPU .* experts; take vllm\.lora merged"):
        start("adapter")


def test_workers_receive_an_adapter_themselves(start: Start, adapted: AudioPolicy, samples: list[Sample]) -> None:
    """By both transfers that run on a CPU."""
    engine = start("adapter")
    for version, backend in enumerate(("gloo", "ipc", "gloo"), 1):
        sender = WeightSender(1, timeout=30.0, backend=backend)  # type: ignore[arg-type]
        assert engine.connect(sender.address, 0, 1, {"timeout": 30.0, "backend": backend}) is None
        shake(adapted, version)
        with ThreadPoolExecutor(1) as thread:
            sending = thread.submit(sender.send, dict(served_weights(adapted, "adapter")))
            assert engine.receive(version) is None
            sending.result()
        rollouts = engine.generate(requests(samples))
        torch.testing.assert_close(logprobs(rollouts), forced(adapted, rollouts), atol=TOLERANCE, rtol=0)
        assert {s.policy_version for r in rollouts for s in r.segments} == {version}
        engine.disconnect("another one follows")


def test_matrices_that_are_not_trained_are_sent_too() -> None:
    """An adapter is replaced as a whole."""
    lora = LoraConfig(rank=2)
    policy = text.tiny(TEXTS, config=ModelConfig(device="cpu", lora=lora, only=(r"layers\.1\..*lora_B",)))
    sent = dict(served_weights(policy, "adapter"))
    assert set(policy.trainable()) < set(sent) == {n for n in policy.parameters_by_name() if ".lora_" in n}


@pytest.mark.parametrize(
    ("lora", "dtype", "gpu", "reason"),
    [
        (LoraConfig(rank=4), "float32", False, None),
        (LoraConfig(rank=4), "bfloat16", True, None),
        (LoraConfig(rank=600), "bfloat16", False, "rank 600 is above its largest, 512"),
        (LoraConfig(rank=4), "float32", True, "on GPUs its kernels for adapters compute in 16 bit"),
    ],
)
def test_why_vllm_cannot_run_an_adapter(
    lora: LoraConfig, dtype: str, gpu: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    policy = text.tiny(TEXTS, config=ModelConfig(device="cpu", lora=lora))
    obstacle = adapter_obstacle(policy, dtype)
    assert obstacle is None if reason is None else str(obstacle).startswith(reason)
