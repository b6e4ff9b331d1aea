"""What vLLM is sent at each step of a policy with LoRA: the adapter alone, against the merged weights of the decoder.

    OMP_NUM_THREADS=1 python bench/lora_transfer.py [--rounds 3] [--layers 2] [--rank 16]

Bytes are those of `served_weights` for released models in bfloat16, on the device meta, with adapters in float32.

Seconds: a text decoder of Qwen2.5-Omni-3B's widths with few layers and 8,192 tokens, in float32 on the CPU. An update
goes from a `WeightSender` over gloo to vLLM's worker in the same process. Then both engines answer the same questions;
their answers must be the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from audiorl.config import LoraConfig, ModelConfig, SamplingConfig
from audiorl.gpu_check.setup import GPU_SCALE, Setup, full_width_policy
from audiorl.models import AudioPolicy, load_policy
from audiorl.plan import models as planned
from audiorl.protocols import Request
from audiorl.rollout.vllm import VLLMConfig, VLLMEngine
from audiorl.rollout.vllm_weights import Lora, served_weights
from audiorl.rollout.weight_transfer import WeightSender
from audiorl.types import Message, Rollout, Sample

RELEASED = ("qwen2.5-omni-3b", "qwen2.5-omni-7b", "qwen2-audio-7b", "qwen3-omni-30b-a3b")
MODES: tuple[Lora, ...] = ("merged", "adapter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    lora = LoraConfig(rank=args.rank)
    table = Table("model", "merged, MB", "adapter, MB", "ratio")
    for model in RELEASED:
        policy = planned.skeleton(planned.RELEASED[model], ModelConfig(dtype="bfloat16", lora=lora))
        policy.model.to(torch.bfloat16)
        for name, p in policy.model.named_parameters():
            if ".lora_" in name:
                p.data = p.data.float()
        merged, adapter = (sum(t.nbytes for _, t in served_weights(policy, mode)) for mode in MODES)
        table.add_row(model, f"{merged / 1e6:,.0f}", f"{adapter / 1e6:,.1f}", f"{merged / adapter:.0f}×")
    Console().print(table)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        scale = replace(GPU_SCALE, layers=args.layers, vocabulary=8192)
        full_width_policy(Setup(torch.device("cpu"), scale), ModelConfig()).save(base)
        policy = load_policy(base, ModelConfig(lora=lora))
        policy.save(Path(folder) / "adapter")
        measure(policy, Path(folder) / "adapter", args.rounds)


def measure(policy: AudioPolicy, folder: Path, rounds: int) -> None:
    sampling = SamplingConfig(max_new_tokens=32)
    config = {mode: VLLMConfig(lora=mode, max_model_len=256, kv_cache_mb=64) for mode in MODES}
    engines = {mode: VLLMEngine(folder, sampling, config[mode]) for mode in MODES}
    senders = {mode: WeightSender(1) for mode in MODES}
    for mode in MODES:
        assert engines[mode].connect(senders[mode].address, 0, 1, {}) is None
    updates: dict[Lora, list[float]] = {mode: [] for mode in MODES}
    speeds: dict[Lora, list[float]] = {mode: [] for mode in MODES}
    request = Request(Sample("question", (Message("user", ("What is said?",)),)), 8)
    for version in range(rounds + 1):  # the first one opens the connections
        with torch.no_grad():
            for p in policy.trainable().values():
                p.add_(torch.randn_like(p) * 0.01)
        answers: dict[Lora, list[Rollout]] = {}
        for mode in MODES:
            began = time.perf_counter()
            with ThreadPoolExecutor(1) as thread:
                sending = thread.submit(senders[mode].send, served_weights(policy, mode))
                assert engines[mode].receive(version) is None
                sending.result()
            updates[mode].append(time.perf_counter() - began)
            began = time.perf_counter()
            answers[mode] = engines[mode].generate([request])
            tokens = sum(r.num_sampled for r in answers[mode])
            speeds[mode].append(tokens / (time.perf_counter() - began))
        one, other = ([r.segments[0] for r in answers[mode]] for mode in MODES)
        assert [s.ids.tolist() for s in one] == [s.ids.tolist() for s in other]
        gap = max(float((a.logprobs - b.logprobs).abs().max()) for a, b in zip(one, other, strict=True))
        print(f"update {version}: equal tokens, log-probs differ by at most {gap:.1e}")
    table = Table("engine", "MB", "update, s", "tokens/s")
    for mode in MODES:
        sent = sum(t.nbytes for _, t in served_weights(policy, mode)) / 1e6
        seconds, speed = statistics.median(updates[mode][1:]), statistics.median(speeds[mode][1:])
        table.add_row(mode, f"{sent:,.1f}", f"{seconds:.3f}", f"{speed:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
