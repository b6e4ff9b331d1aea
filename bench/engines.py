"""One RL step on many generation engines, simulated: balancing, the tail of long answers, overlap with training.

    python bench/engines.py                                            # a 7 B decoder, up to 64 engines of one GPU
    python bench/engines.py --rollouts runs/NAME/rollouts/*.jsonl      # lengths as they were sampled
    python bench/engines.py --rates 4:210,8:377,16:644,32:975,48:1190  # tokens a second by batch size, as measured

Nothing runs here: an engine is a rule for how long a decoding step takes. An engine decodes a batch side by side, one
token of each request a step; a request that ends makes room for the next. A group's prompt is read once on each engine
that one of its requests goes to, and holds the engine's batch up meanwhile.

How long a step takes is either interpolated from `--rates`, or a roofline (Williams et al. 2009): weights and
key-value cache are read once a step at a share of the memory's bandwidth, and 2 operations a weight and request are
done at a share of the peak; the slower of both decides. The defaults are the decoder of Qwen2.5-Omni-7B in bfloat16
(`audiorl doctor --plan qwen2.5-omni-7b` counts both sizes) on an H100 SXM (data sheet: 3.35 TB/s, 989 TFLOP/s in dense
bf16), with 0.77 of the bandwidth, which a public sweep of vLLM 0.23 with Llama-3.1-8B on an A100 reached at batch 1
(johnmusgrave.com/p/vllm-throughput-latency-sweep-on), and half of the peak, an assumption. The same rule gives
Llama-3.1-8B 6.2 ms a token at batch 1 on an H100, where 6.5 were measured with vLLM 0.21 (yobitelcomm.github.io/bench).

Who gets a request: `round-robin` deals them out before anything is written. `least` hands each to the engine with the
fewest outstanding tokens (prompts, and what has been written to them) among those that have a free place, when one has.
`oracle` does the same with the longest answers first (Graham 1969), which nobody can know.

A synchronous step generates, trains and sends the weights. One step off-policy, the next batch is generated while this
one is trained on, so that a step takes the longer of both, and the sending.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table

Policy = Literal["round-robin", "least", "oracle"]
POLICIES: tuple[Policy, ...] = ("round-robin", "least", "oracle")


@dataclass(frozen=True)
class Request:
    """One answer: its group, the length of its prompt and its own, in tokens."""

    group: int
    prompt: int
    answer: int


class Speed(Protocol):
    """How fast an engine is."""

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Seconds of `steps` decoding steps of `batch` requests that begin with `context` tokens in the cache."""
        ...

    def read(self, tokens: int) -> float:
        """Seconds that a prompt takes."""
        ...


@dataclass(frozen=True)
class Roofline:
    """Of one GPU; see the head of this file."""

    weights: float = 7.07e9
    """Of the decoder and its head, read for every token."""
    number: int = 2
    """Bytes of a weight."""
    cache: float = 57_344
    """Bytes of a token in the key-value cache."""
    bandwidth: float = 3.35e12
    peak: float = 989e12
    reached: float = 0.77
    """Share of the bandwidth."""
    used: float = 0.5
    """Share of the peak."""

    def decode(self, batch: int, context: int, steps: int) -> float:
        contexts = steps * context + batch * steps * (steps - 1) / 2  # the cache grows by a token each a step
        bytes_ = steps * self.weights * self.number + contexts * self.cache
        return max(bytes_ / (self.bandwidth * self.reached), steps * batch * 2 * self.weights / (self.peak * self.used))

    def read(self, tokens: int) -> float:
        return tokens * 2 * self.weights / (self.peak * self.used)


@dataclass(frozen=True)
class Rates:
    """Measured tokens a second at some batch sizes; between them the time of a step is interpolated.

    Below the smallest batch a step takes as long as there, above the largest it grows as between the last two.
    """

    batches: tuple[int, ...]
    tokens_per_second: tuple[float, ...]
    prompt_tokens_per_second: float = float("inf")

    def __post_init__(self) -> None:
        if list(self.batches) != sorted(set(self.batches)) or not self.batches or self.batches[0] < 1:
            raise ValueError(f"--rates: batch sizes {list(self.batches)} must rise from at least 1")
        if min(self.tokens_per_second) <= 0 or self.prompt_tokens_per_second <= 0:
            raise ValueError("--rates: tokens a second must be above 0")

    def decode(self, batch: int, context: int, steps: int) -> float:
        times = [b / r for b, r in zip(self.batches, self.tokens_per_second, strict=True)]
        if batch > self.batches[-1] and len(times) > 1:
            slope = (times[-1] - times[-2]) / (self.batches[-1] - self.batches[-2])
            return steps * (times[-1] + max(slope, 0.0) * (batch - self.batches[-1]))
        return steps * float(np.interp(batch, self.batches, times))

    def read(self, tokens: int) -> float:
        return tokens / self.prompt_tokens_per_second


def parse_rates(text: str, prompt_tokens_per_second: float = float("inf")) -> Rates:
    """`4:210,8:377`. Raises ValueError for anything else."""
    try:
        pairs = [(int(b), float(r)) for b, r in (pair.split(":") for pair in text.split(","))]
    except ValueError as error:
        raise ValueError(f"--rates {text!r}: expected BATCH:TOKENS_PER_SECOND,… such as 4:210,8:377") from error
    return Rates(tuple(b for b, _ in pairs), tuple(r for _, r in pairs), prompt_tokens_per_second)


@dataclass
class Engine:
    """One engine at a time `now`. A request that came when each had written `steps` tokens ends at steps + answer."""

    speed: Speed
    slots: int
    now: float = 0.0
    busy: float = 0.0
    steps: int = 0
    context: int = 0
    running: list[tuple[int, int, Request]] = field(default_factory=list)
    prefilled: set[int] = field(default_factory=set)
    """Groups whose prompt has been read."""
    admitted: int = 0

    @property
    def free(self) -> bool:
        return len(self.running) < self.slots

    def admit(self, request: Request) -> None:
        if request.group not in self.prefilled:
            self.prefilled.add(request.group)
            self._spend(self.speed.read(request.prompt))
        self.admitted += 1
        self.context += request.prompt
        heappush(self.running, (self.steps + request.answer, self.admitted, request))

    def ends(self) -> float:
        """When the next request ends."""
        return self.now + self._until(self.running[0][0])

    def advance(self) -> None:
        """Go on until the next request ends, and let go of all that end then."""
        last = self.running[0][0]
        self._spend(self._until(last))
        self.context += len(self.running) * (last - self.steps)
        self.steps = last
        while self.running and self.running[0][0] == last:
            request = heappop(self.running)[2]
            self.context -= request.prompt + request.answer

    def _until(self, step: int) -> float:
        return self.speed.decode(len(self.running), self.context, step - self.steps)

    def _spend(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds


@dataclass(frozen=True)
class Generated:
    """`seconds` until the last request has ended, the share of them in which engines worked on average, and tokens."""

    seconds: float
    busy: float
    tokens: int


def generate(requests: Sequence[Request], engines: int, speed: Speed, slots: int, policy: Policy) -> Generated:
    """Answer all requests, which are there from the beginning. Raises ValueError for less than one engine or place."""
    if engines < 1 or slots < 1:
        raise ValueError(f"{engines} engines of {slots} places: at least one of each is needed")
    fleet = [Engine(speed, slots) for _ in range(engines)]
    if policy == "round-robin":
        queues = [list(reversed(requests[i::engines])) for i in range(engines)]
    else:
        waiting = sorted(requests, key=lambda r: -r.answer) if policy == "oracle" else list(requests)
        queues = [waiting[::-1]] * engines  # one queue for all
        places = [(0, i) for i in range(engines)]
        while queues[0] and places:  # nothing has been written yet: outstanding tokens are prompts
            outstanding, i = heappop(places)
            request = queues[0].pop()
            fleet[i].admit(request)
            if fleet[i].free:
                answer = request.answer if policy == "oracle" else 0
                heappush(places, (outstanding + request.prompt + answer, i))
    for engine, queue in zip(fleet, queues, strict=True):
        while policy == "round-robin" and queue and engine.free:
            engine.admit(queue.pop())
    # An engine with a free place and a queue that is not empty do not exist together from here on, so that a request
    # goes to the engine on which one has just ended.
    events = [(engine.ends(), i) for i, engine in enumerate(fleet) if engine.running]
    heapify(events)
    while events:
        _, i = heappop(events)
        fleet[i].advance()
        while queues[i] and fleet[i].free:
            fleet[i].admit(queues[i].pop())
        if fleet[i].running:
            heappush(events, (fleet[i].ends(), i))
    seconds = max(engine.now for engine in fleet)
    busy = sum(engine.busy for engine in fleet) / (engines * seconds) if seconds else 0.0
    return Generated(seconds, busy, sum(r.answer for r in requests))


@dataclass(frozen=True)
class Step:
    """Means over steps: generating, and a whole step both ways; `busy` is the engines' share of the generating."""

    generating: float
    busy: float
    synchronous: float
    overlapped: float
    tokens: float


def step_times(batches: Sequence[Generated], training: float, sync: float) -> Step:
    """Of steps in a long run. One step off-policy, the weights are sent when both halves have ended."""
    seconds = np.array([b.seconds for b in batches])
    return Step(
        generating=float(seconds.mean()), busy=float(np.mean([b.busy for b in batches])),
        synchronous=float(seconds.mean()) + training + sync,
        overlapped=float(np.maximum(seconds, training).mean()) + sync,
        tokens=float(np.mean([b.tokens for b in batches])),
    )  # fmt: skip


# -- lengths -------------------------------------------------------------------------------------------------------


def lognormal(count: int, mean: float, spread: float, most: int, rng: np.random.Generator) -> np.ndarray:
    """`count` lengths whose logarithm has standard deviation `spread`; cut off at `most`, `mean` before that."""
    lengths = rng.lognormal(np.log(mean) - spread**2 / 2, spread, count)
    return np.clip(np.rint(lengths), 1, most).astype(int)


def lengths_of(files: Sequence[str]) -> np.ndarray:
    """Sampled tokens of every recorded rollout. Raises ValueError naming the file and line that has none."""
    counts = []
    for file in files:
        for number, line in enumerate(Path(file).read_text().splitlines(), 1):
            try:
                counts.append(sum(int(s["num_tokens"]) for s in json.loads(line)["segments"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file}:{number}: no rollout with segments and their num_tokens") from error
    lengths = np.array([n for n in counts if n > 0], dtype=int)
    if not len(lengths):
        raise ValueError(f"{', '.join(files)}: no rollout with a sampled token")
    return lengths


def draw(args: argparse.Namespace, recorded: np.ndarray | None, rng: np.random.Generator) -> list[Request]:
    """The requests of one step: groups in random order of length."""
    count = args.prompts * args.group
    if recorded is None:
        answers = lognormal(count, args.mean, args.spread, args.most, rng)
    else:
        answers = rng.choice(recorded, count)
    return [Request(i // args.group, args.prompt_tokens, int(n)) for i, n in enumerate(answers)]


# -- the table -----------------------------------------------------------------------------------------------------


def show(args: argparse.Namespace, speed: Speed, recorded: np.ndarray | None) -> Table:
    rng = np.random.default_rng(args.seed)
    steps = [draw(args, recorded, rng) for _ in range(args.steps)]
    answers = np.array([r.answer for requests in steps for r in requests])
    table = Table(
        title=f"SIMULATED: {args.prompts} x {args.group} answers a step, prompts of {args.prompt_tokens} tokens, "
        f"answers {answers.mean():.0f} on average, {np.median(answers):.0f} median, {answers.max()} at most; training "
        f"{args.train_seconds:g} s, sync {args.sync_seconds:g} s; {args.slots} places an engine; {args.steps} steps"
    )
    columns = (
        "engines",
        "policy",
        "generate s",
        "busy",
        "tokens/s",
        "speed-up",
        "step s",
        "one step off s",
        "off / on",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "policy" else "right")
    fewest: dict[Policy, float] = {}
    for engines in args.engines:
        for policy in POLICIES:
            batches = [generate(requests, engines, speed, args.slots, policy) for requests in steps]
            step = step_times(batches, args.train_seconds, args.sync_seconds)
            fewest.setdefault(policy, step.generating)
            table.add_row(
                str(engines) if policy == POLICIES[0] else "", policy, f"{step.generating:.1f}", f"{step.busy:.0%}",
                f"{step.tokens / step.generating:,.0f}", f"{fewest[policy] / step.generating:.1f}",
                f"{step.synchronous:.1f}", f"{step.overlapped:.1f}", f"{step.overlapped / step.synchronous:.2f}",
            )  # fmt: skip
    return table


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=lambda s: [int(x) for x in s.split(",")], default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--slots", type=int, default=128, help="requests that an engine decodes side by side")
    parser.add_argument("--prompts", type=int, default=512, help="prompts a step")
    parser.add_argument("--group", type=int, default=8, help="answers a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=600)
    parser.add_argument("--mean", type=float, default=400, help="mean length of a log-normal answer")
    parser.add_argument("--spread", type=float, default=0.8, help="standard deviation of its logarithm")
    parser.add_argument("--most", type=int, default=4096, help="longest answer")
    parser.add_argument("--rollouts", nargs="+", default=None, help="recorded rollouts whose lengths are drawn from")
    parser.add_argument("--train-seconds", type=float, default=30.0)
    parser.add_argument("--sync-seconds", type=float, default=2.0)
    parser.add_argument("--rates", default=None, help="tokens a second by batch size: 4:210,8:377")
    parser.add_argument("--prompt-rate", type=float, default=float("inf"), help="prompt tokens a second, with --rates")
    roofline = Roofline()
    for name in ("weights", "cache", "bandwidth", "peak", "reached", "used"):
        parser.add_argument(f"--{name}", type=float, default=getattr(roofline, name), help="of the roofline")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        recorded = lengths_of(args.rollouts) if args.rollouts else None
        speed: Speed = (
            parse_rates(args.rates, args.prompt_rate)
            if args.rates
            else Roofline(args.weights, 2, args.cache, args.bandwidth, args.peak, args.reached, args.used)
        )
        table = show(args, speed, recorded)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
