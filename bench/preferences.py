"""The preference family at equal data and equal steps, on pairs with a length bias that is known by construction.

    python bench/preferences.py --out runs/preferences             # hours on one thread; continues where it stopped
    python bench/preferences.py --out runs/try --quick             # minutes: every part once, too small to mean much
    python bench/preferences.py --out runs/smol --path FOLDER --data questions.jsonl --held-out test.jsonl

The policy is the supervised start of the quickstart, made here if it is not given: asked which language is spoken, it
thinks, then answers. It answers every training question at temperature 1. A pair is a right and a wrong answer to one
question, both in the right format; in 80 % of the pairs the right one is longer, in 20 % the wrong one, by as many
tokens as the answers allow. Only questions with both kinds of pairs take part and chance decides which kind is taken,
so the length of an answer says nothing about the question. Every loss gets the same pairs, batches, steps and learning
rate, and starts from the same weights.

Parts, by `--only`:

  losses    each loss of the family: held-out accuracy, answer length, KL to the start, repetition
  audio     OPA-DPO, and what each of its parts gives
  reward    reward models with and without length debiasing: length correlation and accuracy on pairs
  process   GRPO and PPO from a process reward model: one total for an answer against credit for each step
  weights   LongAlign's loss weighting: what long and what short answers gain

The result of every run is a file of its own under OUT/results, so an interrupted command continues with the run that is
missing. OUT/table.md holds the tables. The speed of packing is in `bench/longalign.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from audiorl.config import (
    ModelConfig,
    OptimConfig,
    PreferenceConfig,
    SamplingConfig,
)
from audiorl.data.bundled import bundled_set
from audiorl.data.manifest import read_samples
from audiorl.data.preferences import Pair, pairs_to_judged
from audiorl.evaluation.generate import complete_rows
from audiorl.metrics.interval import bootstrap_interval
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.reference import Reference
from audiorl.rewards import AnswerAccuracy, ThinkFormat
from audiorl.rewards.repetition import Repetition
from audiorl.rewards.tags import extract_think
from audiorl.rollout.hf import HFEngine
from audiorl.run.folder import Run
from audiorl.train.batches import fill
from audiorl.train.preference import prefer
from audiorl.types import Experience, Request, Rollout, Sample

Row = dict[str, Any]
PARTS = ("losses", "audio", "reward", "process", "weights")
BUDGET = 2000
"""Tokens of a training pass."""


@dataclass(frozen=True)
class Settings:
    """The size of the experiment."""

    questions: int | None = None
    """Training questions that are answered; None: all."""
    answers: int = 16
    """Answers per question at temperature 1."""
    bias: float = 0.8
    """Share of pairs whose chosen answer is the longer one."""
    pairs: int = 800
    """Most pairs."""
    batch: int = 32
    """Pairs per update."""
    steps: int = 60
    """Updates of every loss."""
    lr: float = 3e-5
    """Learning rate of every loss."""
    tokens: int = 48
    """Most tokens of an answer."""
    held_out: int | None = None
    """Held-out questions of each set; None: all."""


QUICK = Settings(questions=48, answers=8, pairs=16, batch=4, steps=2, held_out=8)


@dataclass(frozen=True)
class Loss:
    """A row of the table: a preference loss with its options."""

    name: str
    config: PreferenceConfig
    balanced: bool = False
    """Pairs without the length bias."""


LOSSES = (
    Loss("DPO", PreferenceConfig(loss="dpo")),
    Loss("DPO, pairs without the bias", PreferenceConfig(loss="dpo"), balanced=True),
    Loss("DPO + NLL", PreferenceConfig(loss="dpo", sft_coef=1.0)),
    Loss("R-DPO, α 0.05", PreferenceConfig(loss="r-dpo", alpha=0.05)),
    Loss("R-DPO, α 0.2", PreferenceConfig(loss="r-dpo", alpha=0.2)),
    Loss("SamPO", PreferenceConfig(loss="sampo")),
    Loss("LD-DPO, α 0.5", PreferenceConfig(loss="ld-dpo", alpha=0.5)),
    Loss("LD-DPO, α 0", PreferenceConfig(loss="ld-dpo", alpha=0.0)),
    Loss("SimPO", PreferenceConfig(loss="simpo")),
    Loss("IPO", PreferenceConfig(loss="ipo")),
    Loss("IPO, per token", PreferenceConfig(loss="ipo", length_normalized=True)),
    Loss("ORPO", PreferenceConfig(loss="orpo")),
    Loss("KTO", PreferenceConfig(loss="kto")),
)


# -- data --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One sampled answer."""

    text: str
    tokens: int
    right: bool
    well_formed: bool


def pairs_of_answers(
    answers: Sequence[tuple[Sample, Sequence[Answer]]], bias: float, most: int, rng: random.Random
) -> list[tuple[Pair, int]]:
    """One pair a question with how many tokens longer its chosen answer is; in a share `bias` of them it is longer.

    Questions take part that have pairs of both kinds, so that which kind a question gives is left to chance.
    """
    usable = []
    for sample, given in answers:
        right, wrong = ([a for a in given if a.well_formed and a.right is right] for right in (True, False))
        longer, shorter = (
            [(r, w) for r in right for w in wrong if sign * (r.tokens - w.tokens) > 0] for sign in (1, -1)
        )
        if longer and shorter:
            usable.append((sample, longer, shorter))
    rng.shuffle(usable)
    usable = usable[:most]
    pairs = []
    for k, (sample, longer, shorter) in enumerate(usable):
        candidates = longer if k < round(bias * len(usable)) else shorter
        most_tokens = max(abs(r.tokens - w.tokens) for r, w in candidates)
        right, wrong = rng.choice([(r, w) for r, w in candidates if abs(r.tokens - w.tokens) == most_tokens])
        pairs.append((Pair(sample, right.text, wrong.text), right.tokens - wrong.tokens))
    rng.shuffle(pairs)
    return pairs


# -- the bench ---------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """One policy with its start weights, its data, and the folder of its results."""

    out: Path
    path: Path
    size: Settings
    data: Sequence[str]
    held_out: Sequence[str]

    def __post_init__(self) -> None:
        self.policy: AudioPolicy = load_policy(self.path, ModelConfig(audio="projector"))
        self.start = {name: tensor.clone() for name, tensor in self.policy.weights().items()}
        self.reference: Reference = self.policy.reference()
        self.accuracy, self.format = AnswerAccuracy(), ThinkFormat()

    @cached_property
    def questions(self) -> list[Sample]:
        """Training questions; a part of them, evenly spaced, in a quick run."""
        questions = [s for name in self.data for s in samples_of(name)]
        return spaced(questions, self.size.questions)

    @cached_property
    def measured(self) -> dict[str, list[Sample]]:
        """Held-out questions by the name of their set; a part of them, evenly spaced, in a quick run."""
        return {name: spaced(samples_of(name), self.size.held_out) for name in self.held_out}

    def reset(self) -> AudioPolicy:
        """The policy with the weights of the start."""
        self.policy.load_weights(self.start)
        self.policy.weights_changed()
        return self.policy

    def result(self, name: str, compute: Callable[[], Row]) -> Row:
        """The result NAME from its file, else from `compute`."""
        path = self.out / "results" / f"{name}.json"
        if path.exists():
            return read(path)
        began = time.monotonic()
        print(f"{name} …", flush=True)
        row = compute() | {"seconds": time.monotonic() - began}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(row, ensure_ascii=False))
        partial.replace(path)
        print(f"{name}: {row['seconds']:.0f} s", flush=True)
        return row

    def run(self, name: str) -> Run:
        """The run folder NAME, continued where it is there."""
        folder = self.out / "runs" / name
        return Run.open(folder) if folder.exists() else Run.create(folder, __file__, sys.argv, self.size)

    # -- answers ---------------------------------------------------------------------------------------------------

    def answers(self, name: str, samples: Sequence[Sample]) -> list[tuple[Sample, list[Answer]]]:
        """The start's answers to `samples` at temperature 1, kept in OUT/answers/NAME.jsonl."""
        sampling = SamplingConfig(max_new_tokens=self.size.tokens, max_batch_tokens=32_768)

        def answer(batch: Sequence[Sample]) -> list[Row]:
            engine = HFEngine(self.reference.policy, sampling)
            rollouts = engine.generate([Request(s, self.size.answers, seed=0) for s in batch])
            by_id: dict[str, list[Row]] = {s.id: [] for s in batch}
            for r in rollouts:
                by_id[r.sample.id].append(self._answer(r))
            return [{"id": id, "answers": given} for id, given in by_id.items()]

        path = self.out / "answers" / f"{name}.jsonl"
        rows = complete_rows(path, {s.id: s for s in samples}, answer, batch_size=32)
        return [(s, [Answer(**a) for a in rows[s.id]["answers"]]) for s in samples]

    def _answer(self, r: Rollout) -> Row:
        complete = r.segments[-1].stop_reason == "eos"
        return {
            "text": r.text,
            "tokens": r.num_sampled,
            "right": self.accuracy.correct(r.text, r.sample),
            "well_formed": complete and self.format.matches(r.text),
        }

    def training_pairs(self, seed: int, bias: float | None = None) -> list[Pair]:
        answers = self.answers("train", self.questions)
        share = self.size.bias if bias is None else bias
        return [p for p, _ in pairs_of_answers(answers, share, self.size.pairs, random.Random(f"pairs {seed}"))]

    # -- training and measurement ----------------------------------------------------------------------------------

    def trained(self, name: str, train: Callable[[AudioPolicy, Run], Row]) -> None:
        """Train the start once as the run NAME; its weights stay in OUT/weights, what `train` returns in its result."""

        def compute() -> Row:
            run = self.run(name)
            row = train(self.reset(), run)
            self.weights_of(name).parent.mkdir(parents=True, exist_ok=True)
            save_file({n: w.contiguous() for n, w in self.policy.weights().items()}, self.weights_of(name))
            run.close()
            shutil.rmtree(run.dir)
            return row

        self.result(f"{name}/train", compute)

    def weights_of(self, name: str) -> Path:
        return self.out / "weights" / f"{slug(name)}.safetensors"

    def measure(self, name: str) -> None:
        """Greedy answers of the run NAME to every held-out question, and its KL to the start."""

        def load() -> None:
            self.reset()
            if name != "start":
                self.policy.load_weights(load_file(self.weights_of(name)))
                self.policy.weights_changed()

        def greedy(samples: Sequence[Sample]) -> Row:
            load()
            sampling = SamplingConfig(temperature=0.0, max_new_tokens=self.size.tokens, max_batch_tokens=16_384)
            rollouts = HFEngine(self.policy, sampling).generate([Request(s) for s in samples])
            return {"answers": [{"id": r.sample.id, **self._answer(r)} for r in rollouts]}

        def kl(samples: Sequence[Sample]) -> Row:
            load()
            return {"kl": self.kl(samples)}

        for label, samples in self.measured.items():
            self.result(f"{name}/{slug(label)}", lambda: greedy(samples))  # noqa: B023
        self.result(f"{name}/kl", lambda: kl(next(iter(self.measured.values()))))

    def kl(self, samples: Sequence[Sample]) -> list[float]:
        """Per question log π(y) - log π_start(y) of an answer y that the policy samples: its mean is the KL in nats."""
        sampling = SamplingConfig(max_new_tokens=self.size.tokens, max_batch_tokens=16_384)
        rollouts = HFEngine(self.policy, sampling).generate([Request(s, seed=1) for s in samples])
        experiences = [Experience.from_rollout(r) for r in rollouts]
        scored = fill(experiences, "ref_logprobs", lambda b: self.reference.forward(b).logprobs, BUDGET, False)
        gaps = []
        for e in scored:
            assert e.engine_logprobs is not None and e.ref_logprobs is not None
            gaps.append(float((e.engine_logprobs - e.ref_logprobs).sum()))
        return gaps


def spaced(samples: list[Sample], most: int | None) -> list[Sample]:
    """At most so many of the samples, evenly spaced; None: all."""
    return samples if most is None else samples[:: max(len(samples) // most, 1)][:most]


def samples_of(name: str) -> list[Sample]:
    """A bundled set by its name, or the rows of a file."""
    return bundled_set(name) if name.startswith("bundled") else list(read_samples(name).samples)


# -- parts -------------------------------------------------------------------------------------------------------------


def losses(bench: Bench, seeds: Sequence[int], names: Sequence[str]) -> None:
    """Train with every loss and measure it."""
    bench.measure("start")
    for seed in seeds:
        for loss in (x for x in LOSSES if x.name in names):
            name = f"losses/{slug(loss.name)}/{seed}"
            bench.trained(name, partial(prefer_pairs, bench, loss, seed))
            bench.measure(name)


def prefer_pairs(bench: Bench, loss: Loss, seed: int, policy: AudioPolicy, run: Run) -> Row:
    """One run of a preference loss on the pairs of `seed`."""
    pairs = bench.training_pairs(seed, bias=0.5 if loss.balanced else None)
    kto = loss.config.loss == "kto"
    size = bench.size
    config = replace(
        loss.config,
        steps=size.steps,
        batch_size=2 * size.batch if kto else size.batch,
        micro_batch_tokens=BUDGET,
        save_every=size.steps,
    )
    optim = OptimConfig(lr=size.lr, warmup_steps=5)
    prefer(policy, pairs_to_judged(pairs) if kto else pairs, run, config=config, optim=optim, seed=seed)
    return {"pairs": len(pairs), **last_metrics(run)}


def last_metrics(run: Run) -> dict[str, float]:
    """The last line of the run's metrics log."""
    line = (run.dir / "metrics.jsonl").read_text().splitlines()[-1]
    return {name: value for name, value in json.loads(line).items() if "/" in name}


def slug(name: str) -> str:
    letters = (c if c.isalnum() else "-" for c in name.lower().replace("α", "alpha"))
    return "-".join(filter(None, "".join(letters).split("-")))


# -- tables ------------------------------------------------------------------------------------------------------------


def loss_table(bench: Bench) -> str:
    return policy_table(bench, [("start", "start")] + [(x.name, f"losses/{slug(x.name)}/*") for x in LOSSES])


def policy_table(bench: Bench, runs: Sequence[tuple[str, str]]) -> str:
    """One line for each (title, pattern of run names): means over the seeds, with intervals over the questions."""
    labels = list(bench.measured)
    header = ["", "seeds", *(f"accuracy on {label}" for label in labels)]
    header += ["tokens", "well-formed %", "KL to the start", "repeated words %"]
    lines = []
    for title, pattern in runs:
        folders = sorted((bench.out / "results").glob(pattern))
        folders = [f for f in folders if (f / "kl.json").exists()]
        if not folders:
            continue
        answers = {label: [read(f / f"{slug(label)}.json")["answers"] for f in folders] for label in labels}
        first = [a for rows in answers[labels[0]] for a in rows]
        cells = [title, str(len(folders))]
        cells += [share_with_interval([[float(a["right"]) for a in rows] for rows in answers[s]]) for s in labels]
        cells.append(f"{np.mean([a['tokens'] for a in first]):.1f}")
        cells.append(f"{100 * np.mean([a['well_formed'] for a in first]):.0f}")
        cells.append(f"{np.mean([gap for f in folders for gap in read(f / 'kl.json')['kl']]):.2f}")
        cells.append(f"{100 * np.mean([repeated(a['text']) for a in first]):.1f}")
        lines.append(cells)
    return markdown(header, lines)


def read(path: Path) -> Row:
    return dict(json.loads(path.read_text()))


def repeated(text: str) -> float:
    """The share of a thought's words that it has had before."""
    return -Repetition(n=1, unit="words").value(extract_think(text) or text)


def share_with_interval(columns: Sequence[Sequence[float]]) -> str:
    """Percent of the mean over seeds, with the 95 % bootstrap interval over questions of their means over seeds."""
    means = np.mean(np.array(columns), axis=0)
    low, high = bootstrap_interval(list(means))
    return f"{100 * means.mean():.1f} ({100 * low:.1f}–{100 * high:.1f})"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines) + "\n"


# -- the command -------------------------------------------------------------------------------------------------------


def supervised_start(out: Path, quick: bool) -> Path:
    """The quickstart's model after its supervised phase, made if it is not there."""
    folder = out / "start"
    command = ["train", "quickstart", "--control", "False", "--grpo.steps", "1", "--threads", "1", "--out", str(folder)]
    if quick:
        command += ["--tiny"]
    if (folder / "state.json").exists():
        command = ["resume", str(folder)]
    if not (folder / "eval.json").exists():
        subprocess.run([sys.executable, "-m", "audiorl.cli", *command], check=True)
    return max((folder / "checkpoints" / "sft").glob("step_*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of answers, results and tables")
    parser.add_argument("--path", type=Path, help="a policy's folder; the quickstart's supervised start by default")
    parser.add_argument("--data", nargs="+", default=["bundled:languages/train"], help="questions to train on")
    parser.add_argument(
        "--held-out", nargs="+", default=["bundled:languages/test"], help="sets of questions to measure on"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the pairs and of their order")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    names = [loss.name for loss in LOSSES]
    parser.add_argument("--losses", nargs="+", choices=names, default=names, help="rows of the part losses")
    parser.add_argument("--lr", type=float, default=Settings.lr, help="learning rate of every loss")
    parser.add_argument("--quick", action="store_true", help="a few questions and steps: does the command work?")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size = QUICK if args.quick else replace(Settings(), lr=args.lr)
    path = args.path or supervised_start(args.out, args.quick)
    bench = Bench(args.out, path, size, args.data, args.held_out)
    seeds = args.seeds[:1] if args.quick else args.seeds
    if "losses" in args.only:
        losses(bench, seeds, args.losses)
    tables = loss_table(bench)
    (args.out / "table.md").write_text(tables)
    print(tables)


if __name__ == "__main__":
    main()
