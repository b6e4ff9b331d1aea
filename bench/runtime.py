"""What the runtime adds to a step of reinforcement learning, and how long weights take from a trainer to an engine.

    OMP_WAIT_POLICY=passive python bench/runtime.py [--rounds 3] [--steps 6] [--megabytes 200] [--threads 1]


Steps: GRPO of the tiny Qwen2.5-Omni on human speech, in one process, in a trainer of Ray, and in a trainer with a
separate engine. The three take turns, each round is a run of its own, and the first step of each is not counted.
Runs must end with equal weights. Seconds are those of the loop from asking for rollouts to the end of the update.

Weights: as the run's engines take them, by broadcast (`rollout.weight_transfer`), and through Ray's object
store, from one process into another that keeps a copy; first the tiny model's, then --megabytes of them in tensors of
4 MB. What arrives must be what was sent. Everything is on one machine: this is the cost of processes, not of a network.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from audiorl.config import OptimConfig, RLConfig, SamplingConfig
from audiorl.config.distributed import RuntimeConfig, set_current
from audiorl.data.corpus import bundled_speech
from audiorl.distributed.local import changes_worker, replaces_worker
from audiorl.distributed.ray_cluster import connected
from audiorl.distributed.ray_group import RayGroup
from audiorl.models.families.qwen_omni import tiny
from audiorl.models.weights import Weights, named
from audiorl.rollout.weight_transfer import WeightReceiver, WeightSender
from audiorl.run.folder import Run
from audiorl.run.metrics_log import read_metrics
from audiorl.train.rl.train import train_rl
from audiorl.types import Message, Rollout, Sample, Score

RUNTIMES = {
    "one process": RuntimeConfig(),
    "a trainer of Ray": RuntimeConfig(kind="ray"),
    "a trainer and a separate engine": RuntimeConfig(kind="ray", engines=1),
}
TENSOR = 2**20
"""Numbers in each of the larger set's tensors."""
TEXTS = ["a random model says anything"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    largest = RUNTIMES["a trainer and a separate engine"]
    with connected(largest):
        steps = step_times(args.rounds, args.steps)
        set_current(largest)
        model = dict(named(tiny_weights()))
        transfers = {f"tiny model, {megabytes(model):.0f} MB": transfer_times(tiny_weights, args.rounds)}
        larger = partial(some_weights, args.megabytes)
        transfers[f"{args.megabytes} MB in tensors of 4 MB"] = transfer_times(larger, args.rounds)
    console = Console()
    console.print(step_table(steps))
    console.print(transfer_table(transfers))


# -- steps -------------------------------------------------------------------------------------------------------------


def step_times(rounds: int, steps: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in RUNTIMES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            weights: dict[str, dict[str, Tensor]] = {}
            for name, runtime in RUNTIMES.items():
                set_current(runtime)
                out = Path(folder) / f"{number} {name}"
                times[name] += run_of(out, steps, seed=number)[1:]
                weights[name] = load_file(out / "checkpoints" / "rl" / f"step_{steps:06d}" / "model.safetensors")
            first = weights["one process"]
            for other in weights.values():
                for name, tensor in first.items():
                    torch.testing.assert_close(other[name], tensor, atol=1e-5, rtol=0, msg=name)
    return times


def run_of(out: Path, steps: int, seed: int) -> list[float]:
    """Seconds of each step."""
    samples = [
        Sample(u.id, (Message("user", (u.clip, "What is said?")),), references=(u.text,), task="qa")
        for u in bundled_speech(min_seconds=2.0, max_seconds=3.0)[:20]
    ]
    config = RLConfig(steps=steps, prompts_per_step=2, group_size=4, save_every=steps)
    torch.manual_seed(seed)
    run = Run.create(out, "bench", [], config)
    sampling = SamplingConfig(max_new_tokens=16)
    train_rl(tiny(TEXTS), samples, vowels, run, config=config, optim=OptimConfig(lr=1e-3), sampling=sampling, seed=seed)
    return [row["time/rollout"] + row["time/train"] for row in read_metrics(out / "metrics.jsonl")]


def vowels(rollouts: Sequence[Rollout]) -> list[Score]:
    return [Score(sum(r.text.lower().count(v) for v in "aeiou") / (1 + len(r.text))) for r in rollouts]


# -- weights -----------------------------------------------------------------------------------------------------------


def tiny_weights() -> Weights:
    return {name: tensor.detach() for name, tensor in named(tiny(TEXTS).weights())}


def some_weights(total: int) -> Weights:
    return {f"weight {i}": torch.full((TENSOR,), float(i)) for i in range(total * 10**6 // (4 * TENSOR))}


class Peer:
    """Has weights, and gives or takes them."""

    policy_version = 0

    def __init__(self, make: Callable[[], Weights]):
        self.held = {name: tensor.clone() for name, tensor in named(make())}
        self.change(0.0)

    @changes_worker
    def change(self, by: float) -> None:
        for tensor in self.held.values():
            if tensor.is_floating_point():
                tensor += by

    def weights(self) -> dict[str, Tensor]:
        return self.held

    def total(self) -> float:
        return sum(float(tensor.double().sum()) for tensor in self.held.values())

    @replaces_worker
    def update_weights(self, weights: Weights, version: int) -> None:
        for name, tensor in named(weights):
            self.held[name].copy_(tensor)
        self.policy_version = version

    def open(self) -> str:
        self.sender = WeightSender(1)
        return self.sender.address

    def follow(self, address: str) -> None:
        self.receiver = WeightReceiver(address, 0, 1)

    def send(self) -> None:
        self.sender.send(self.held)

    def receive(self, version: int) -> None:
        self.receiver.update(self.update_weights, version)


def transfer_times(make: Callable[[], Weights], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, in turns; the first of each, which connects, is not counted."""
    trainer, engine = RayGroup("trainer", Peer, make), RayGroup("engine", Peer, make)
    engine.all(Peer.follow, trainer.first(Peer.open))
    times: dict[str, list[float]] = {"broadcast": [], "object store": []}
    with ThreadPoolExecutor(1) as pool:
        for version in range(3 * rounds + 1):
            for way in times:
                trainer.all(Peer.change, 1.0)
                began = time.perf_counter()
                if way == "broadcast":
                    received = pool.submit(engine.all, Peer.receive, version)
                    trainer.all(Peer.send)
                    received.result()
                else:
                    references = trainer._call("weights", [()] * trainer.size, receive=lambda reference: reference)
                    engine.all(Peer.update_weights, references[0], version)
                times[way].append(time.perf_counter() - began)
                assert trainer.first(Peer.total) == engine.first(Peer.total)
    return {way: seconds[1:] for way, seconds in times.items()}


def megabytes(weights: dict[str, Tensor]) -> float:
    return sum(tensor.nbytes for tensor in weights.values()) / 1e6


# -- results ---------------------------------------------------------------------------------------------------------


def step_table(times: dict[str, list[float]]) -> Table:
    out = Table(title="a step of reinforcement learning", caption=f"{torch.get_num_threads()} thread(s) a process")
    columns(out, "", "median s", "of one process", "difference, ms")
    one = statistics.median(times["one process"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        out.add_row(name, f"{median:.3f}", f"{median / one:.2f}", f"{1000 * (median - one):.0f}")
    return out


def transfer_table(times: dict[str, dict[str, list[float]]]) -> Table:
    out = Table(title="weights from one process to another")
    columns(out, "", "broadcast, ms", "object store, ms", "broadcast / object store")
    for name, seconds in times.items():
        broadcast, store = (1000 * statistics.median(seconds[way]) for way in ("broadcast", "object store"))
        out.add_row(name, f"{broadcast:.0f}", f"{store:.0f}", f"{broadcast / store:.2f}")
    return out


def columns(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="right" if name else "left")


if __name__ == "__main__":
    main()
