# ruff: noqa: E501 a fault is a row
"""Plant faults of the kind that RL code has, one at a time, and run the tests that should notice each.

    python tools/mutants.py                all of them, each in a copy of the tree: some minutes
    python tools/mutants.py --only gae     those whose name has this text

Prints a line for each and exits with 1 if a fault survives or a text to replace is no longer there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALGOS, RL, MODELS = "tests/unit/algos", "tests/unit/train/rl", "tests/unit/models"

# (name, file, text, its replacement, the tests that should fail)
MUTANTS: tuple[tuple[str, str, str, str, str], ...] = (
    ("grpo: no baseline", "algos/advantages.py", "return centred / torch.where(scale > 0, scale, 1.0)", "return rewards / torch.where(scale > 0, scale, 1.0)", ALGOS),
    ("grpo: equal rewards leave their rounding", "algos/advantages.py", "torch.where(differ(low, high)[index], rewards - mean[index], 0.0)", "rewards - mean[index]", f"{ALGOS} tests/cases"),
    ("steps: those that end on one token are one", "algos/experience.py", "ends.index_add_(0, at, torch.ones_like(at))", "ends.index_fill_(0, at, 1)", f"{ALGOS} tests/cases"),
    ("ppo: a clipped ratio overflows", "algos/losses.py", "torch.where(where, log_ratio.clamp(max=MAX_LOG_RATIO), log_ratio)", "log_ratio", f"{ALGOS} tests/cases"),
    ("tis: a log-prob of nan stays nan", "algos/losses.py", "return weights.masked_fill(rollout_logprobs.isnan(), 1.0)", "return weights", "tests/cases"),
    ("rloo: own reward in the baseline", "algos/advantages.py", "return centred * (count / (count - 1).clamp(min=1))[index]", "return centred", ALGOS),
    ("gae: discounts twice", "algos/advantages.py", "- v, gamma * lam)", "- v, gamma * gamma * lam)", ALGOS),
    ("gae: bootstraps from the token itself", "algos/advantages.py", "r + gamma * following - v", "r + gamma * v - v", ALGOS),
    ("steps: the last token of a step belongs to the next", "algos/advantages.py", "ends.cumsum(1) - ends.long()", "ends.cumsum(1)", ALGOS),
    ("whiten: no mean taken off", "algos/advantages.py", "centred = torch.where(mask, masked - mean, 0.0)", "centred = torch.where(mask, masked, 0.0)", ALGOS),
    ("ppo: the larger of both", "algos/losses.py", "gain = torch.minimum(unclipped, clipped)", "gain = torch.maximum(unclipped, clipped)", ALGOS),
    ("ppo: clips exchanged", "algos/losses.py", "ratio.clamp(1 - clip_low, 1 + clip_high)", "ratio.clamp(1 - clip_high, 1 + clip_low)", ALGOS),
    ("gspo: sums over a sequence, no mean", "algos/losses.py", "return (total / count.clamp(min=1))[sequence]", "return total[sequence]", ALGOS),
    ("cispo: gradient through the ratio", "algos/losses.py", "log_ratio = x.log_ratio.detach()", "log_ratio = x.log_ratio", ALGOS),
    ("dr.grpo: divides by the real length", "algos/losses.py", "return [1.0 / (sequences * constant_length)] * len(lengths)", "return [1.0 / (sequences * max(n, 1)) for n in lengths]", ALGOS),
    ("tis: ratio upside down", "algos/losses.py", "(old_logprobs - rollout_logprobs).detach().exp()", "(rollout_logprobs - old_logprobs).detach().exp()", ALGOS),
    ("kl: k3 of the wrong direction", "algos/losses.py", "return torch.expm1(-d) + d", "return torch.expm1(d) - d", ALGOS),
    ("kl: the coefficient follows the wrong way", "algos/losses.py", "self.beta * max(1 + change, 0.1)", "self.beta * max(1 - change, 0.1)", ALGOS),
    ("packing: responses see each other", "algos/packing.py", "return (own | shared) & causal", "return causal", ALGOS),
    ("packing: positions of a response begin at 0", "algos/packing.py", "rows = add(e, slice(p, None), p, prompt_span", "rows = add(e, slice(p, None), 0, prompt_span", MODELS + "/test_model_backbones.py"),
    ("packing: prompts with other audio are shared", "algos/packing.py", "and [c.key for c in a.audio] == [c.key for c in b.audio]", "", f"{ALGOS} {MODELS} {RL}"),
    ("logprobs: temperature forgotten", "algos/logprobs.py", "(chosen - peak) / temperature - log_total", "(chosen - peak) - log_total", ALGOS),
    ("audio: clips in the reverse order", "models/policy.py", "torch.cat(audio).to(embeds.dtype)", "torch.cat(audio[::-1]).to(embeds.dtype)", MODELS + "/test_model_backbones.py"),
    ("audio: silence in place of every clip", "models/policy.py", "torch.cat(audio).to(embeds.dtype)", "0 * torch.cat(audio).to(embeds.dtype)", MODELS + "/test_model_backbones.py"),
    ("sampling: one draw for a whole group", "rollout/samplers.py", '{seed}\\0{sample_id}\\0{index}', '{seed}\\0{sample_id}', "tests/unit/rollout"),
    ("schedule: the same order every epoch", "data/schedule.py", 'random.Random(f"{seed}/{epoch}").shuffle(order)', 'random.Random(f"{seed}").shuffle(order)', f"tests/unit/data {RL} tests/unit/train"),
    ("dpo: the reference is forgotten", "algos/preference.py", "return (good - sum_each(self.ref_chosen)) - (bad - sum_each(self.ref_rejected))", "return good - bad", ALGOS),
    ("dpo: chosen and rejected exchanged", "algos/preference.py", "return -logsigmoid(beta * pairs.margin())", "return -logsigmoid(-beta * pairs.margin())", ALGOS),
    ("answers: the first and not the last", "rewards/answers.py", "return answers[-1].strip() if answers else None", "return answers[0].strip() if answers else None", "tests/unit/rewards"),
    ("laal: longer outputs lower the lag", "eval/metrics/latency.py", "max(len(delays), target_length))", "target_length)", "tests/unit/eval/metrics"),
)  # fmt: skip


def survives(tree: Path, file: str, old: str, new: str, tests: str) -> bool | None:
    """Return whether the tests pass with the fault in the tree; None if the text is not there exactly once."""
    path = tree / "audiorl" / file
    source = path.read_text(encoding="utf-8")
    if source.count(old) < 1:
        return None
    path.write_text(source.replace(old, new), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()]
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        return done.returncode == 0
    finally:
        path.write_text(source, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only faults whose name has this text")
    options = parser.parse_args(argv)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
        for name, file, old, new, tests in MUTANTS:
            if options.only in name:
                outcome = survives(tree, file, old, new, tests)
                bad += outcome is not False
                words = {None: "NOT THERE", True: "SURVIVES", False: "caught"}
                print(f"{words[outcome]:9}  {name} ({file})", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
