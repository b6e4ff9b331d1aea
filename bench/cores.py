"""Time and peak memory of the cores in `audiorl.algos` against plain PyTorch, and TRL and verl where installed.

    OMP_WAIT_POLICY=passive python bench/cores.py [--quick] [--only gae,group,loss,pack,logprobs,memory]

Every reference is written out below, and each run checks that both sides agree. The sides take turns in one process;
times are medians, ratios medians over the rounds. CPU seconds are those of all threads, which other programs on the
machine disturb less than wall seconds; threads that wait by spinning (GNU OpenMP's default) would count as busy, hence
the variable. Peak memory is the growth of a fresh process's high-water mark (VmHWM, Linux only) from just before the
call, when inputs exist and small calls have loaded every library.
"""

from __future__ import annotations

import argparse
import bisect
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from audiorl.algos.advantages import gae, group_relative
from audiorl.algos.logprobs import fused_logprobs
from audiorl.algos.losses import LossInputs, ppo_clip_loss
from audiorl.algos.packing import pack

VOCABULARY = 151_936
SIZES = [(896, 512), (256, 512), (896, 1024)]  # H, N
BUDGET = 8192
Call = Callable[[], Any]


# -- references ----------------------------------------------------------------------------------------------------


def gae_by_steps(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    advantages = torch.zeros_like(rewards)
    following = carried = torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        here = mask[:, t]
        advantage = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * carried
        carried, following = torch.where(here, advantage, carried), torch.where(here, values[:, t], following)
        advantages[:, t] = torch.where(here, advantage, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def group_by_group(rewards: Tensor, ids: list[str]) -> Tensor:
    out = torch.empty_like(rewards)
    members: dict[str, list[int]] = {}
    for i, name in enumerate(ids):
        members.setdefault(name, []).append(i)
    for rows in members.values():
        r = rewards[rows]
        out[rows] = (r - r.mean()) / (r.std() + 1e-4)
    return out


def clipped_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ratio = (logprobs - old).exp()
    one, two = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
    with torch.no_grad():
        clipped = ((two > one) * weights).sum()
        kl = ((ratio - 1 - (logprobs - old)) * weights).sum()
    return (torch.maximum(one, two) * weights).sum(), clipped, kl


def best_fit(lengths: list[int], budget: int) -> list[list[int]]:
    """Best fit decreasing with one sorted list of (room, bin)."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(rooms, (lengths[i], -1))
        if at < len(rooms):
            room, where = rooms.pop(at)
        else:
            room, where = max(budget, lengths[i]), len(bins)
            bins.append([])
        bins[where].append(i)
        bisect.insort(rooms, (room - lengths[i], where))
    return bins


def plain_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logs = (hidden @ weight.T).log_softmax(-1)
    return logs.gather(-1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def recomputing(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return fused_logprobs(hidden, weight, targets, keep=0)


def bare_products(hidden: Tensor, weight: Tensor, frozen: bool) -> None:
    """The matrix products that forward and backward cannot do without, and nothing else."""
    with torch.no_grad():
        logits = hidden @ weight.T
        logits @ weight
        if not frozen:
            logits.T @ hidden


# -- other libraries -----------------------------------------------------------------------------------------------


def trl_functions() -> dict[str, Any]:
    try:
        from trl.data_utils import _pack_bfd
        from trl.trainer.utils import selective_log_softmax_and_entropy
    except ImportError as e:
        print(f"without TRL: {e}")
        return {}

    def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        lp, entropy = selective_log_softmax_and_entropy((hidden @ weight.T)[None], targets[None])
        return lp[0], entropy[0]

    return {"pack": _pack_bfd, "logprobs": logprobs}


def verl_functions() -> dict[str, Any]:
    try:
        from verl.trainer.ppo import core_algos
        from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits
    except ImportError as e:
        print(f"without verl: {e}")
        return {}

    def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden @ weight.T
        return logprobs_from_logits(logits, targets), entropy_from_logits(logits)

    return {
        "gae": core_algos.compute_gae_advantage_return,
        "group": core_algos.compute_grpo_outcome_advantage,
        "loss": core_algos.compute_policy_loss,
        "logprobs": logprobs,
    }


# -- measuring -----------------------------------------------------------------------------------------------------


class Results:
    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def compare(self, what: str, ours: Call, others: dict[str, Call], repeats: int, warm: int = 1) -> None:
        """Our first call is timed too, on its own; `others` take turns with the later ones."""
        began = time.perf_counter()
        ours()
        first = time.perf_counter() - began
        sides = {"audiorl": ours, **others}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for turn in range(-warm, repeats):
            for name, call in sides.items():
                wall, cpu = time.perf_counter(), time.process_time()
                call()
                times = time.perf_counter() - wall, time.process_time() - cpu
                if turn >= 0:
                    seconds[name].append(times)
        for name, times in seconds.items():
            wall, cpu = (statistics.median(t[k] for t in times) for k in (0, 1))
            ratios = [
                statistics.median(a[k] / max(b[k], 1e-9) for a, b in zip(seconds["audiorl"], times, strict=True))
                for k in (0, 1)
            ]
            note = f"first call {_ms(first)}" if name == "audiorl" else f"{ratios[0]:.3f} | {ratios[1]:.3f}"
            self.rows.append([what if name == "audiorl" else "", name, _ms(wall), _ms(cpu), note])

    def show(self, title: str) -> None:
        table = Table("case", "side", "wall", "CPU", "audiorl's share of it, wall | CPU", title=title)
        for row in self.rows:
            table.add_row(*row)
        Console(width=120).print(table)
        self.rows = []


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def agree(ours: Any, theirs: Any, rtol: float = 1e-3, atol: float = 1e-4) -> None:
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


# -- cases ---------------------------------------------------------------------------------------------------------


def bench_gae(results: Results, libraries: dict[str, dict[str, Any]], quick: bool) -> None:
    rewards, values = torch.randn(64, 4096), torch.randn(64, 4096)
    masks = {"80% sampled": torch.rand(64, 4096) < 0.8, "all sampled": torch.ones(64, 4096, dtype=torch.bool)}
    for name, mask in masks.items():
        case = rewards * mask, values, mask, 1.0, 0.95
        others: dict[str, Call] = {"loop over time": partial(gae_by_steps, *case)}
        if verl := libraries["verl"]:
            others["verl"] = partial(verl["gae"], *case[:2], mask.float(), *case[3:])
        results.compare(f"GAE, 64 x 4096, {name}", partial(gae, *case), others, 3 if quick else 9, warm=0)
        agree(gae(*case), gae_by_steps(*case))
    results.show("GAE")


def bench_group(results: Results, libraries: dict[str, dict[str, Any]], quick: bool) -> None:
    rewards = torch.rand(4096)
    ids = [f"prompt {i % 512}" for i in range(4096)]
    agree(group_relative(rewards, ids), group_by_group(rewards, ids))
    others: dict[str, Call] = {"loop over groups": lambda: group_by_group(rewards, ids)}
    if verl := libraries["verl"]:
        others["verl"] = lambda: verl["group"](rewards[:, None], torch.ones(4096, 1), ids)
    results.compare("group advantage, 512 x 8", lambda: group_relative(rewards, ids), others, 3 if quick else 15)
    results.show("group advantage")


def _backward(loss: Call) -> None:
    loss()[0].backward()


def bench_loss(results: Results, libraries: dict[str, dict[str, Any]], quick: bool) -> None:
    n = 1 << 18
    logprobs = torch.randn(n).requires_grad_()
    old = logprobs.detach() + 0.2 * torch.randn(n)
    advantages, weights = torch.randn(n), torch.full((n,), 1 / n)
    ones = torch.ones(1, n)
    inputs = LossInputs(logprobs, old, advantages, weights)
    agree(ppo_clip_loss(inputs)[0], clipped_loss(logprobs, old, advantages, weights)[0])
    sides: dict[str, Call] = {
        "audiorl": lambda: ppo_clip_loss(inputs),
        "plain": lambda: clipped_loss(logprobs, old, advantages, weights),
    }
    if verl := libraries["verl"]:
        sides["verl"] = lambda: verl["loss"](old[None], logprobs[None], advantages[None], ones, cliprange=0.2)
    steps: dict[str, Call] = {name: partial(_backward, call) for name, call in sides.items()}
    results.compare("policy loss, 262144 tokens, with gradient", steps.pop("audiorl"), steps, 5 if quick else 31)
    results.show("policy loss")


def bench_pack(results: Results, libraries: dict[str, dict[str, Any]], quick: bool) -> None:
    rng = random.Random(0)
    lengths = [max(1, int(rng.lognormvariate(6, 1))) for _ in range(100_000)]
    tokens = sum(min(n, BUDGET) for n in lengths)
    others: dict[str, Call] = {"sorted list": lambda: best_fit(lengths, BUDGET)}
    counts = {"audiorl": len(pack(lengths, BUDGET)), "sorted list": len(best_fit(lengths, BUDGET))}
    if trl := libraries["trl"]:
        import numpy as np
        import pyarrow as pa

        offsets = np.cumsum([0, *lengths])
        rows = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], dtype=np.int8)))
        table = pa.table({"input_ids": rows})  # TRL also gathers the tokens, here of one byte each
        counts["TRL, with its gather"] = len(trl["pack"](table, BUDGET))
        others["TRL, with its gather"] = lambda: trl["pack"](table, BUDGET)
    results.compare("packing, 100,000 lengths", lambda: pack(lengths, BUDGET), others, 3 if quick else 9)
    print("packing efficiency", {name: round(tokens / (n * BUDGET), 5) for name, n in counts.items()})
    results.show("packing")


def logprob_inputs(n: int, h: int, v: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(n, h), torch.randn(v, h).mul_(h**-0.5), torch.randint(0, v, (n,))


def logprob_step(function: Any, inputs: tuple[Tensor, Tensor, Tensor], mode: str) -> list[Tensor | None]:
    hidden, weight, targets = inputs
    if mode == "score":
        with torch.no_grad():
            return list(function(hidden, weight, targets))
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_(mode != "frozen")
    lp, entropy = function(hidden, weight, targets)
    (lp.sum() - (0.1 * entropy.sum() if mode == "both" else 0)).backward()
    return [lp.detach(), entropy.detach(), hidden.grad, weight.grad]


MODES = {
    "score": "no gradient",
    "logprob": "gradient of log-probs",
    "both": "gradient of both",
    "frozen": "gradient of log-probs, frozen head",
}


def bench_logprobs(results: Results, libraries: dict[str, dict[str, Any]], quick: bool) -> None:
    small = logprob_inputs(16, 32, 1000)
    sizes = SIZES[:1] if quick else SIZES
    functions = {"plain": plain_logprobs, **{k: f["logprobs"] for k, f in libraries.items() if f}}
    for function in functions.values():
        for mode in MODES:
            agree(logprob_step(fused_logprobs, small, mode), logprob_step(function, small, mode))
    for h, n in sizes:
        inputs = logprob_inputs(n, h, VOCABULARY)
        for mode in MODES:
            several = functions if (h, n, mode) == (896, 512, "logprob") else {"plain": plain_logprobs}
            others: dict[str, Call] = {name: partial(logprob_step, f, inputs, mode) for name, f in several.items()}
            if mode != "score":
                others["products alone"] = partial(bare_products, *inputs[:2], mode == "frozen")
            if mode == "logprob":
                others["keep=0"] = partial(logprob_step, recomputing, inputs, mode)
            ours = partial(logprob_step, fused_logprobs, inputs, mode)
            results.compare(MODES[mode], ours, others, 2 if quick else 4, warm=0)
        results.show(f"log-probs, H {h}, N {n}, V {VOCABULARY}")


def peak_growth(side: str, n: int, h: int, mode: str) -> float:
    """MiB, in this process, which must be fresh."""
    own = {"audiorl": fused_logprobs, "keep=0": recomputing, "plain": plain_logprobs}
    library = {"trl": trl_functions, "verl": verl_functions}
    function = own[side] if side in own else library[side]()["logprobs"]
    for m in MODES:
        logprob_step(function, logprob_inputs(16, 32, 1000), m)
    inputs = logprob_inputs(n, h, VOCABULARY)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from what is held now
    before = _status("VmRSS")
    logprob_step(function, inputs, mode)
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    """KiB, of this process."""
    return int(re.findall(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def show_memory(libraries: dict[str, dict[str, Any]], quick: bool) -> None:
    table = Table("case", "side", "peak MiB", "audiorl / this", title="Memory of log-probs")
    sizes = SIZES[:1] if quick else SIZES
    for h, n in sizes:
        for mode in MODES:
            several = (h, n, mode) == (896, 512, "logprob")
            peaks = {}
            libs = [name for name, f in libraries.items() if f and several]
            for side in ["audiorl", *(["keep=0"] if mode != "score" else []), "plain", *libs]:
                request = json.dumps([side, n, h, mode])
                done = subprocess.run([sys.executable, __file__, "--memory", request], capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(done.stderr)
                peaks[side] = float(done.stdout.splitlines()[-1])
            for side, peak in peaks.items():
                case = f"H {h}, N {n}, {MODES[mode]}" if side == "audiorl" else ""
                table.add_row(case, side, f"{peak:.0f}", "" if side == "audiorl" else f"{peaks['audiorl'] / peak:.2f}")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument("--only", default="", help="comma-separated: gae, group, loss, pack, logprobs, memory")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory:
        print(peak_growth(*json.loads(args.memory)))
        return
    torch.manual_seed(0)
    only = set(filter(None, args.only.split(",")))
    libraries = {"trl": trl_functions(), "verl": verl_functions()}
    results = Results()
    cases = {"gae": bench_gae, "group": bench_group, "loss": bench_loss, "pack": bench_pack, "logprobs": bench_logprobs}
    for name, bench in cases.items():
        if not only or name in only:
            bench(results, libraries, args.quick)
    if not only or "memory" in only:
        show_memory(libraries, args.quick)


if __name__ == "__main__":
    main()
