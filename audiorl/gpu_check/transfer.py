"""Checks of weights on their way to an engine: to another process on the same GPU, to another GPU, and to sleep."""

from __future__ import annotations

import importlib.util
import multiprocessing
import queue
import time
from collections.abc import Mapping, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from audiorl.config import ModelConfig, SamplingConfig
from audiorl.gpu_check.setup import Check, Outcome, Setup, full_width_policy, question
from audiorl.protocols import Request, RolloutEngine
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.weight_transfer import Backend, SyncError, WeightReceiver, WeightSender

BYTES_OF_3B = 3.1e9 * 2
"""Of the weights of Qwen2.5-3B in bfloat16."""
SYNC_SECONDS = 1.0
"""Within which weights of 3B on one GPU must arrive."""
START_SECONDS = 120.0
"""For the other process to start."""
ROUNDS = 4
"""Transfers, of which the first, with its connection, is not timed."""


def sent_weights(backend: Backend, setup: Setup) -> Outcome:
    """Send weights of the scale's width to another process, which compares checksums; the time is scaled to 3B."""
    if backend == "nccl" and (not setup.is_gpu or torch.cuda.device_count() < 2):
        return Outcome("skipped", "needs two GPUs")
    weights = dict(full_width_policy(setup, ModelConfig(dtype="bfloat16")).weights())
    index = (setup.device.index or 0) + (backend == "nccl") if setup.is_gpu else None
    spawned = multiprocessing.get_context("spawn")
    sums: Any = spawned.Queue()
    sender = WeightSender(1, backend=backend, timeout=START_SECONDS)
    process = spawned.Process(target=receive_weights, args=(sender.address, backend, index, sums), daemon=True)
    process.start()
    try:
        sums.get(timeout=START_SECONDS)
        seconds = []
        for _ in range(ROUNDS):
            setup.wait()
            began = time.perf_counter()
            sender.send(weights)
            seconds.append(time.perf_counter() - began)
        received = sums.get(timeout=START_SECONDS)
    except (SyncError, queue.Empty) as error:
        return Outcome("fail", f"the other process did not get the weights: {str(error) or 'it did not start'}")
    finally:
        process.join(10)
        process.kill()
        sender.close()
    if received != checksums(weights):
        return Outcome("fail", "other weights arrived than were sent")
    size = sum(t.nbytes for t in weights.values())
    best = min(seconds[1:])
    scaled = best * BYTES_OF_3B / size
    detail = f"{size / 1e9:.2f} GB in {best:.3f} s, {size / best / 1e9:.1f} GB/s: {scaled:.2f} s for 3B"
    numbers = {"bytes": float(size), "seconds": best, "seconds_3b": scaled}
    if not setup.is_gpu:
        return Outcome("measured", detail, numbers)
    return Outcome("pass" if scaled < SYNC_SECONDS else "fail", f"{detail}, less than {SYNC_SECONDS:g} s", numbers)


def receive_weights(address: str, backend: Backend, gpu: int | None, sums: Any) -> None:
    """Run the other process: load the weights into tensors of its own, `ROUNDS` times."""
    if gpu is not None:
        torch.cuda.set_device(gpu)
    receiver = WeightReceiver(address, 0, 1, backend=backend, timeout=START_SECONDS)
    mine: dict[str, Tensor] = {}
    sums.put(None)

    def load(weights: Any, version: int) -> None:
        for name, tensor in weights:
            mine.setdefault(name, torch.empty_like(tensor)).copy_(tensor)

    for version in range(ROUNDS):
        receiver.update(load, version)
    sums.put(checksums(mine))


def checksums(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Return by name the sum of the bytes."""
    flat = {name: t.detach().contiguous().view(-1).view(torch.uint8) for name, t in weights.items()}
    return {name: int(x.sum(dtype=torch.int64)) for name, x in flat.items()}


def sleep_and_wake(setup: Setup) -> Outcome:
    """Check that vLLM gives its memory back while it sleeps, and then writes the same greedy answer as before."""
    if importlib.util.find_spec("vllm") is None:
        return Outcome("skipped", "vllm is not installed")
    if not setup.is_gpu:
        return Outcome("skipped", "only on a GPU vLLM sleeps")
    from audiorl.rollout.vllm import VLLMConfig, VLLMEngine
    from audiorl.rollout.vllm_weights import served_weights

    policy = full_width_policy(setup, ModelConfig(dtype="bfloat16"))
    request = Request(question(), greedy=True)
    options = VLLMConfig(max_model_len=1024, kv_cache_mb=512, sleep=True)

    def used() -> int:
        free, total = torch.cuda.mem_get_info(setup.device)
        return total - free

    with TemporaryDirectory() as folder:
        policy.save(folder)
        engine = VLLMEngine(folder, SamplingConfig(max_new_tokens=setup.scale.response), options)
        try:
            before, awake = engine.generate([request])[0].segments[0].ids.tolist(), used()
            began = time.perf_counter()
            engine.sleep()
            asleep, slept = used(), time.perf_counter()
            engine.wake()
            woke = time.perf_counter()
            after = engine.generate([request])[0].segments[0].ids.tolist()
            many = [Request(question(), n=setup.scale.decoded, seed=k) for k in range(2)]
            rates = [_rate(e, many, setup) for e in (engine, HFEngine(policy, engine.sampling))]
            sent = setup.seconds(lambda: engine.update_weights(served_weights(policy, "merged"), 1), repeats=1)
        finally:
            engine.close()
    freed = (awake - asleep) / 1e9
    numbers = {"freed_gb": freed, "sleep_seconds": slept - began, "wake_seconds": woke - slept, "sync_seconds": sent}
    numbers |= {"tokens_per_second": rates[0], "hf_tokens_per_second": rates[1]}
    detail = (
        f"{freed:.2f} GB free while it slept; sleep {slept - began:.2f} s, wake {woke - slept:.2f} s, "
        f"sync {sent:.2f} s; {rates[0]:,.0f} tokens/s, the engine hf {rates[1]:,.0f}"
    )
    if before != after:
        return Outcome("fail", f"another answer after waking; {detail}", numbers)
    return Outcome("pass" if freed > 0.5 else "fail", detail, numbers)


def _rate(engine: RolloutEngine, requests: Sequence[Request], setup: Setup) -> float:
    """Return the tokens per second of a second call."""
    tokens: list[int] = []
    seconds = setup.seconds(lambda: tokens.append(sum(r.num_sampled for r in engine.generate(requests))), repeats=1)
    return tokens[-1] / seconds


CHECKS: dict[str, Check] = {
    "weights to the same GPU": partial(sent_weights, "ipc"),
    "weights to another GPU": partial(sent_weights, "nccl"),
    "vLLM sleeps and wakes": sleep_and_wake,
}
