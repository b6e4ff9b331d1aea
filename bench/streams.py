"""What a chunk of a stream costs, by the length of the stream, and what it would cost to hear everything again.

    python bench/streams.py [--rounds 3] [--threads 1]

Human speech in chunks of 960 ms for the tiny Qwen2.5-Omni (11 M parameters) with Whisper tiny as its audio tower; it is
random and writes its 8 tokens after every chunk. The time of a chunk is that between two emit times: hearing, reading
and writing, as a computation-aware latency counts it; of eight streams side by side it is that of all eight.
`recomputing` is a policy without memory: at each chunk it hears all audio so far once (without the context of each
chunk) and reads all tokens so far before it writes; every fourth chunk is timed. Lengths take turns within a round,
every round has other streams, medians are over the turns of all rounds; `last` over the last ten turns of each stream.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from audiorl.config import ModelConfig, SamplingConfig
from audiorl.models import AudioPolicy
from audiorl.models.families.qwen_omni import tiny
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.tasks.simul.bundled import bundled_streams
from audiorl.tasks.simul.streams import Stream, interpretation_sample
from audiorl.types import Rollout

LENGTHS = (15, 30, 60)
WRITTEN = 8
BATCH = 8
LAST = 10


@dataclass
class Cost:
    """Of the chunks of streams of one length: tokens that went through the decoder, and milliseconds."""

    tokens: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)

    def add(self, ms: Sequence[float], tokens: Sequence[float] = ()) -> None:
        self.ms += ms
        self.last += ms[-LAST:]
        self.tokens += tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = ["a random model says anything"]
    policy = tiny(texts)
    forgetful = tiny(texts, config=ModelConfig(audio_cache_mb=0))
    costs = {kind: {s: Cost() for s in LENGTHS} for kind in ("one", "eight", "recomputing")}
    interpret(policy, streams_of(15, 1, seed=10_000))  # the first call of all
    for number in range(args.rounds):
        for seconds in LENGTHS:
            streams = streams_of(seconds, BATCH + 1, seed=100 * number + seconds)
            with counted(policy) as passes:
                (rollout,) = interpret(policy, streams[:1])
            costs["one"][seconds].add(chunk_times(rollout), tokens_by_turn(passes))
            costs["eight"][seconds].add(chunk_times(interpret(policy, streams[1:])[0]))
            costs["recomputing"][seconds].add(*recomputed(forgetful, rollout))
    Console().print(table(costs))


def streams_of(seconds: float, count: int, seed: int) -> list[Stream]:
    return bundled_streams("train", "es", count=count, seconds=(seconds, seconds), seed=seed)


def interpret(policy: AudioPolicy, streams: Sequence[Stream]) -> list[Rollout]:
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=WRITTEN, max_batch_tokens=10**9)
    return HFEngine(policy, sampling).generate([Request(interpretation_sample(s)) for s in streams])


def chunk_times(rollout: Rollout) -> list[float]:
    """Milliseconds of each chunk, without the last one, which is shorter."""
    computed = [(s.emit_time or 0.0) - (s.source_time or 0.0) for s in rollout.segments[:-1]]
    return [1000 * (b - a) for a, b in pairwise(computed)]  # not the first one, which reads the prompt too


@contextmanager
def counted(policy: AudioPolicy) -> Iterator[list[int]]:
    """The number of tokens in each forward pass of the decoder."""
    passes: list[int] = []

    def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        passes.append(kwargs["inputs_embeds"].shape[1])

    hook = policy.backbone.decoder(policy.model).register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield passes
    finally:
        hook.remove()


def tokens_by_turn(passes: Sequence[int]) -> list[float]:
    """A turn begins where more than one token is read at once. As `chunk_times`, without first and last."""
    turns: list[float] = []
    for count in passes:
        if count > 1:
            turns.append(0)
        turns[-1] += count
    return turns[1:-1]


@torch.no_grad()
def recomputed(policy: AudioPolicy, rollout: Rollout) -> tuple[list[float], list[float]]:
    """Milliseconds and tokens of every fourth chunk of the rollout, when all that came before is computed again."""
    decoder, head = policy.backbone.decoder(policy.model), policy.backbone.head(policy.model)
    times, tokens = [], []
    for turn in range(1, len(rollout.segments) - 1):
        if turn % 4:
            continue
        before, now = rollout.segments[:turn], rollout.segments[turn]
        ids = torch.cat([*(x for s in before for x in (s.prompt_ids, s.ids)), now.prompt_ids])
        clips = [replace(c, context=0.0) for s in (*before, now) for c in s.audio]
        began = time.perf_counter()
        cache = DynamicCache(config=decoder.config)
        sampled = ids.new_zeros(len(ids), dtype=torch.bool)
        out = decoder(inputs_embeds=policy.embed(ids, clips, sampled)[None], past_key_values=cache, use_cache=True)
        for step in range(WRITTEN):
            token = head(out.last_hidden_state[:, -1]).argmax(-1)
            if step < WRITTEN - 1:
                embeds = decoder.get_input_embeddings()(token)[None]
                out = decoder(inputs_embeds=embeds, past_key_values=cache, use_cache=True)
        times.append(1000 * (time.perf_counter() - began))
        tokens.append(float(len(ids) + WRITTEN - 1))
    return times, tokens


def table(costs: dict[str, dict[int, Cost]]) -> Table:
    out = Table(title="medians per chunk of 960 ms", caption=f"{torch.get_num_threads()} thread(s)")
    for name in ("", *(f"{s} s" for s in LENGTHS), f"{LENGTHS[-1]} s / {LENGTHS[0]} s"):
        out.add_column(name, justify="right" if name else "left")
    names = {"one": "one stream", "eight": f"{BATCH} streams", "recomputing": "recomputing"}
    for kind, name in names.items():
        for what, unit in (("tokens", "tokens"), ("ms", "ms"), ("last", "ms, last")):
            values = [getattr(costs[kind][s], what) for s in LENGTHS]
            if all(values) and not (kind == "recomputing" and what == "last"):
                medians = [statistics.median(v) for v in values]
                row = [f"{m:.0f}" if what == "tokens" else f"{m:.1f}" for m in medians]
                out.add_row(f"{name}, {unit}", *row, f"{medians[-1] / medians[0]:.2f}")
    return out


if __name__ == "__main__":
    main()
