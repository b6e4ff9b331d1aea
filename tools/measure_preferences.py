"""The preference family at equal data and equal steps, on pairs with a length bias that is known by construction.

    python tools/measure_preferences.py --out runs/preferences     # hours on one thread; continues where it stopped
    python tools/measure_preferences.py --out runs/try --quick     # minutes: every part once, too small to mean much
    python tools/measure_preferences.py --out runs/smol --path FOLDER --data questions.jsonl --held-out test.jsonl

The policy is the supervised start of the quickstart, made here if it is not given: asked which language is spoken, it
thinks, then answers. It answers every training question at temperature 1. A pair is a right and a wrong answer to one
question, both in the right format; in 80 % of the pairs the right one is longer, in 20 % the wrong one, by as many
tokens as the answers allow. Only questions with both kinds of pairs take part and chance decides which kind is taken,
so the length of an answer says nothing about the question. Every loss gets the same pairs, batches, steps and learning
rate, and starts from the same weights.

Parts, by `--only`:

  losses    each loss of the family on these pairs
  audio     OPA-DPO, with and without its parts, on the policy's answers and their corrections
  reward    reward models with and without length debiasing: correlation of score and length, accuracy on pairs
  process   GRPO and PPO from a process reward model: one total for an answer against credit for each step
  weights   LongAlign's loss weighting: the loss on short and on long answers

Policies are measured by greedy answers to held-out questions (right answers with 95 % intervals, tokens, repeated
words, thoughts whose words are all said) and by their KL to the start.

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
    CriticConfig,
    ModelConfig,
    OptimConfig,
    PreferenceConfig,
    ProcessRewardConfig,
    RewardModelConfig,
    RLConfig,
    SamplingConfig,
    SFTConfig,
)
from audiorl.data.bundled import bundled_set, bundled_transcripts, language_question
from audiorl.data.corpus import unseen_speakers
from audiorl.data.manifest import read_samples
from audiorl.data.preferences import Pair, Steps, pairs_to_judged
from audiorl.errors import Interrupted
from audiorl.evaluation.generate import complete_rows
from audiorl.metrics.interval import bootstrap_interval
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.examples import Example, experience
from audiorl.models.reference import Reference
from audiorl.models.step_judge import StepJudge
from audiorl.models.value import ValueModel, score_answers
from audiorl.recipe.loader import load_recipe
from audiorl.rewards import AnswerAccuracy, ProcessModelReward, ThinkFormat, ThinkTranscript, WeightedSum
from audiorl.rewards.repetition import Repetition
from audiorl.rewards.tags import extract_think
from audiorl.rl.train import train_rl
from audiorl.rollout.hf import HFEngine
from audiorl.run.folder import Run
from audiorl.train.batches import fill
from audiorl.train.preference import prefer
from audiorl.train.process_reward import train_process_reward
from audiorl.train.reward_model import train_reward_model
from audiorl.train.sft import sft
from audiorl.types import Experience, Request, Reward, Rollout, Sample, Score, Segment

Row = dict[str, Any]
PARTS = ("losses", "audio", "reward", "process", "weights")
UNSEEN = "unseen_speakers"
"""The test set of speakers that the bundled recordings lack, by its name for `--held-out`."""
MAX_SECONDS = 4.0
"""Longest recording of the bundled sets and of the unseen speakers."""
BUDGET = 800
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
    """Updates of every preference loss, reward model and supervised run."""
    rl_steps: int = 40
    """Steps of GRPO and of PPO."""
    lr: float = 3e-5
    """Learning rate of every preference loss."""
    tokens: int = 48
    """Most tokens of an answer."""
    held_out: int | None = None
    """Held-out questions of each set; None: all."""


QUICK = Settings(questions=48, answers=8, pairs=16, batch=4, steps=2, rl_steps=2, held_out=8)


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
    Loss("R-DPO, α 0.2", PreferenceConfig(loss="r-dpo", alpha=0.2)),
    Loss("SamPO", PreferenceConfig(loss="sampo")),
    Loss("LD-DPO, α 0.5", PreferenceConfig(loss="ld-dpo", alpha=0.5)),
    Loss("SimPO", PreferenceConfig(loss="simpo")),
    Loss("IPO", PreferenceConfig(loss="ipo")),
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

    def load(self, name: str = "start") -> AudioPolicy:
        """The policy with the weights of the run NAME."""
        self.policy.load_weights(self.start if name == "start" else load_file(self.weights_of(name)))
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

    def trained(self, name: str, train: Callable[[AudioPolicy, Run], Row], start: str = "start") -> None:
        """Train the run `start` once as the run NAME: weights in OUT/weights, what `train` returns in its result."""

        def compute() -> Row:
            with self.run(name) as run:
                row = train(self.load(start), run)
                self.weights_of(name).parent.mkdir(parents=True, exist_ok=True)
                save_file({n: w.contiguous() for n, w in self.policy.weights().items()}, self.weights_of(name))
                shutil.rmtree(run.dir)
            return row

        self.result(f"{name}/train", compute)

    def weights_of(self, name: str) -> Path:
        return self.out / "weights" / f"{slug(name)}.safetensors"

    def measure(self, name: str) -> None:
        """Greedy answers of the run NAME to every held-out question, and its KL to the start."""

        def greedy(samples: Sequence[Sample]) -> Row:
            self.load(name)
            sampling = SamplingConfig(temperature=0.0, max_new_tokens=self.size.tokens, max_batch_tokens=16_384)
            rollouts = HFEngine(self.policy, sampling).generate([Request(s) for s in samples])
            return {"answers": [{"id": r.sample.id, **self._answer(r)} for r in rollouts]}

        def kl(samples: Sequence[Sample]) -> Row:
            self.load(name)
            return {"kl": self.kl(samples)}

        for label, samples in self.measured.items():
            self.result(f"{name}/{slug(label)}", lambda: greedy(samples))  # noqa: B023
        self.result(f"{name}/kl", lambda: kl(next(iter(self.measured.values()))))

    @torch.no_grad()
    def nll(self, examples: Sequence[Example]) -> list[float]:
        """Negative log-likelihood of each target in nats per token, under the policy as it is."""
        experiences = [experience(self.policy, e) for e in examples]
        scored = fill(experiences, "old_logprobs", lambda b: self.policy.forward(b).logprobs, BUDGET, False)
        return [-float(e.old_logprobs.sum()) / e.num_sampled for e in scored if e.old_logprobs is not None]

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
    """A bundled set by its name, the question of the bundled sets about five unseen speakers, or the rows of a file."""
    if name == UNSEEN:
        return [language_question(u.clip, u, u.speaker) for u in unseen_speakers() if u.duration <= MAX_SECONDS]
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


def audio(bench: Bench, seeds: Sequence[int]) -> None:
    """OPA-DPO against its parts: as many updates in all, on the same answers and corrections."""
    size, correct = bench.size, load_recipe("opa_dpo").correct

    def data(seed: int) -> tuple[list[Example], list[Pair]]:
        """Corrected answers to learn, and pairs that prefer them to the answers as they were."""
        examples, pairs = [], []
        for sample, given in bench.answers("train", bench.questions):
            text = random.Random(f"own {seed} {sample.id}").choice(given).text
            corrected = correct(sample, text)
            examples.append(Example(sample, corrected))
            if text.strip() and text.strip() != corrected.strip():
                pairs.append(Pair(sample, corrected, text))
        return examples, pairs

    def supervised(steps: int, seed: int, policy: AudioPolicy, run: Run) -> Row:
        examples, _ = data(seed)
        config = SFTConfig(steps=steps, batch_size=size.batch, micro_batch_tokens=BUDGET, save_every=steps)
        sft(policy, examples, run, config=config, optim=OptimConfig(lr=1e-4, warmup_steps=5), seed=seed)
        return {"examples": len(examples), **last_metrics(run)}

    def preferred(steps: int, options: Row, seed: int, policy: AudioPolicy, run: Run) -> Row:
        _, pairs = data(seed)
        config = PreferenceConfig(
            steps=steps, batch_size=size.batch, micro_batch_tokens=BUDGET, save_every=steps, **options
        )
        prefer(policy, pairs, run, config=config, optim=OptimConfig(lr=size.lr, warmup_steps=5), seed=seed)
        return {"pairs": len(pairs), **last_metrics(run)}

    half = size.steps // 2
    for seed in seeds:
        bench.trained(f"audio/sft-half/{seed}", partial(supervised, half, seed))
        for name, (aligned, options) in AUDIO.items():
            run = f"audio/{slug(name)}/{seed}"
            if options is None:
                bench.trained(run, partial(supervised, half, seed), f"audio/sft-half/{seed}")
            elif aligned:
                bench.trained(run, partial(preferred, half, options, seed), f"audio/sft-half/{seed}")
            else:
                bench.trained(run, partial(preferred, size.steps, options, seed))
            bench.measure(run)


AUDIO: dict[str, tuple[bool, Row | None]] = {
    "DPO on corrections": (False, {}),
    "SFT on corrections": (True, None),
    "SFT, then DPO": (True, {}),
    "SFT, then DPO + anchor": (True, {"anchor_coef": 1.0}),
    "SFT, then DPO + anchor + audio (OPA-DPO)": (True, {"anchor_coef": 1.0, "audio_coef": 0.2}),
}
"""By name: whether SFT on the corrections comes first, and the options of DPO; None: more SFT."""


def reward(bench: Bench, seeds: Sequence[int]) -> None:
    """Reward models from the biased pairs, with and without length debiasing."""
    size = bench.size

    def train(debias: bool, seed: int) -> Row:
        name = f"reward/{debias}/{seed}"
        run = bench.run(name)
        torch.manual_seed(seed)
        model = ValueModel(bench.load(), spread=1.0)
        config = RewardModelConfig(
            steps=size.steps,
            batch_size=size.batch,
            length_debias=debias,
            micro_batch_tokens=BUDGET,
            save_every=size.steps,
        )
        optim = OptimConfig(lr=1e-4, warmup_steps=5)
        train_reward_model(model, bench.training_pairs(seed), run, config=config, optim=optim, seed=seed)
        held_out_questions = next(iter(bench.measured.values()))
        answers = [
            (s, list({a.text: a for a in given}.values())) for s, given in bench.answers("test", held_out_questions)
        ]
        answers = [(s, [a for a in given if a.well_formed]) for s, given in answers]
        scores = iter(score_answers(model, [Example(s, a.text) for s, given in answers for a in given], BUDGET))
        rows = [[(next(scores), a.tokens, a.right) for a in given] for _, given in answers]
        run.close()
        shutil.rmtree(run.dir)
        return {"answers": rows}

    for seed in seeds:
        for debias in (False, True):
            bench.result(f"reward/{'debiased' if debias else 'plain'}/{seed}", partial(train, debias, seed))


def reward_table(bench: Bench) -> str:
    """Correlations over answers, and the share of right-wrong pairs that are in order, by which answer is longer."""
    header = ["", "seeds", "correlation of score and tokens", "the same, within a question"]
    header += ["right = wrong in length", "right longer", "right shorter", "80 % longer, as in training"]
    lines = []
    for name in ("plain", "debiased"):
        seed_results = [read(p)["answers"] for p in sorted((bench.out / "results" / "reward" / name).glob("*.json"))]
        if not seed_results:
            continue
        cells = [name, str(len(seed_results))]
        rows = [given for answers in seed_results for given in answers]
        within = [(s - mean([x for x, _, _ in g]), t - mean([x for _, x, _ in g])) for g in rows for s, t, _ in g]
        overall = [(s, t) for g in rows for s, t, _ in g]
        cells += [f"{np.corrcoef(np.array(pairs).T)[0, 1]:+.2f}" for pairs in (overall, within)]
        shares: dict[int, list[float]] = {}
        for sign in (0, 1, -1):  # one value a question: the share of its pairs of this kind that are in order
            for g in rows:
                good, bad = ([x for x in g if bool(x[2]) is right] for right in (True, False))
                order = [float(r[0] > w[0]) for r in good for w in bad if np.sign(r[1] - w[1]) == sign]
                if order:
                    shares.setdefault(sign, []).append(mean(order))
        cells += [interval(shares.get(sign, [])) for sign in (0, 1, -1)]
        cells.append(f"{100 * (0.8 * mean(shares.get(1, [])) + 0.2 * mean(shares.get(-1, []))):.1f}")
        lines.append(cells)
    return markdown(header, lines)


@dataclass(frozen=True)
class OneTotal:
    """A reward without its credit per token: the same total on the last token."""

    reward: Reward

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score | None]:
        return [None if s is None else replace(s, per_token=None) for s in self.reward(rollouts)]


def process(bench: Bench, seeds: Sequence[int]) -> None:
    """A process reward model of thoughts and answers, then GRPO and PPO from it."""
    size = bench.size

    def labelled(name: str, samples: Sequence[Sample], seed: int) -> list[Steps]:
        """Up to two right and two wrong answers a question: is the thought what is said, is the answer right?"""
        steps = []
        for sample, given in bench.answers(name, samples):
            rng = random.Random(f"steps {seed} {sample.id}")
            for right in (True, False):
                kind = [a for a in {a.text: a for a in given}.values() if a.well_formed and a.right is right]
                for a in rng.sample(kind, min(2, len(kind))):
                    both = ProcessModelReward("").steps(a.text)
                    labels = (transcribed(sample, a.text, words=2).total, float(right))
                    steps.append(Steps(sample, both, labels))
        return steps

    def judge(seed: int, policy: AudioPolicy, run: Run) -> Row:
        items = labelled("train", bench.questions, seed)
        config = ProcessRewardConfig(
            steps=size.steps, batch_size=size.batch, soft=True, micro_batch_tokens=BUDGET, save_every=size.steps
        )
        optim = OptimConfig(lr=1e-4, warmup_steps=5)
        train_process_reward(policy, items, run, config=config, optim=optim, seed=seed)
        policy.save(bench.out / "judges" / str(seed))
        held_out = labelled("test", next(iter(bench.measured.values())), seed)
        judgements = StepJudge(policy, config.marker, config.good, config.bad).judge(
            [(i.sample, i.steps) for i in held_out]
        )
        row: Row = {"items": len(items), **last_metrics(run)}
        for step, kind in enumerate(("thought", "answer")):
            row[kind] = [(values[step], item.labels[step]) for values, item in zip(judgements, held_out, strict=True)]
        return row

    def reinforced(options: Row, per_step: bool, seed: int, policy: AudioPolicy, run: Run) -> Row:
        judged: Reward = ProcessModelReward(str(bench.out / "judges" / str(seed)), credit="steps")
        total = WeightedSum.of(process=(judged if per_step else OneTotal(judged), 2.0), format=(ThinkFormat(), 1.0))
        config = RLConfig(steps=size.rl_steps, micro_batch_tokens=800, save_every=size.rl_steps, **options)
        sampling = SamplingConfig(max_new_tokens=size.tokens // 2, max_batch_tokens=32_768)
        optim = OptimConfig(lr=1e-4, warmup_steps=5)
        train_rl(policy, bench.questions, total, run, config=config, optim=optim, sampling=sampling, seed=seed)
        return last_metrics(run)

    for seed in seeds:
        bench.trained(f"process/judge/{seed}", partial(judge, seed))
        for name, (options, per_step) in PROCESS.items():
            run = f"process/{slug(name)}/{seed}"
            bench.trained(run, partial(reinforced, options, per_step, seed))
            bench.measure(run)


GRPO: Row = {"prompts_per_step": 16, "group_size": 8}
PPO: Row = {
    "prompts_per_step": 64,
    "group_size": 2,
    "mini_batches": 2,
    "advantage": "gae",
    "kl_in": "reward",
    "kl_kind": "k1",
    "kl_beta": 0.02,
    "critic": CriticConfig(warmup_steps=5, optim=OptimConfig(lr=1e-4)),
}
PROCESS: dict[str, tuple[Row, bool]] = {
    "GRPO, one total": (GRPO, False),
    "GRPO, credit per step": (GRPO | {"advantage": "process"}, True),
    "GRPO, credit per step, compared step by step": (GRPO | {"advantage": "step-index"}, True),
    "PPO, one total": (PPO, False),
    "PPO, credit per step": (PPO, True),
}
"""By name: the options of RLConfig, and whether each step's reward stands at its end."""


def judge_table(bench: Bench) -> str:
    """How the process reward model judges held-out steps."""
    header = ["step", "mean label", "correlation of judgement and label", "on the right side of 0.5 %"]
    seed_results = [read(p) for p in sorted((bench.out / "results" / "process" / "judge").glob("*/train.json"))]
    lines = []
    for kind in ("thought", "answer"):
        pairs = [pair for row in seed_results for pair in row[kind]]
        if pairs:
            correlation = np.corrcoef(np.array(pairs).T)[0, 1]
            hits = [float((p > 0.5) == (label > 0.5)) for p, label in pairs]
            lines.append([kind, f"{mean([label for _, label in pairs]):.2f}", f"{correlation:+.2f}", interval(hits)])
    return markdown(header, lines)


def weights(bench: Bench, seeds: Sequence[int]) -> None:
    """SFT on short answers (which language?) and long ones (what is said?), by token and by sequence."""
    size = bench.size
    test = {s.audio[0].key for s in next(iter(bench.measured.values()))}

    def short(samples: Sequence[Sample]) -> list[Example]:
        return [Example(s, f"<answer>{s.references[0]}</answer>") for s in samples]

    def long(held_out: bool) -> list[Example]:
        samples = [s for s in bundled_transcripts(max_seconds=MAX_SECONDS) if (s.audio[0].key in test) is held_out]
        return [Example(s, s.references[0]) for s in samples]

    def train(weighting: str, seed: int, policy: AudioPolicy, run: Run) -> Row:
        examples = [*short(bench.questions), *long(held_out=False)[: len(bench.questions)]]
        config = SFTConfig(
            steps=size.steps,
            batch_size=size.batch,
            weighting=weighting,  # type: ignore[arg-type]
            micro_batch_tokens=BUDGET,
            save_every=size.steps,
        )
        sft(policy, examples, run, config=config, optim=OptimConfig(lr=3e-4, warmup_steps=5), seed=seed)
        held_out_questions = next(iter(bench.measured.values()))
        targets = [len(policy.tokenizer.encode(e.target)) + 1 for e in examples]
        row: Row = {
            "short tokens": mean(targets[: len(targets) // 2]),
            "long tokens": mean(targets[len(targets) // 2 :]),
        }
        return row | {
            "short": bench.nll(short(held_out_questions)),
            "long": bench.nll(long(held_out=True)[: len(held_out_questions)]),
        }

    for seed in seeds:
        for weighting in ("token", "sequence"):
            bench.trained(f"weights/{weighting}/{seed}", partial(train, weighting, seed))


def weights_table(bench: Bench) -> str:
    header = ["a loss of", "seeds", "short answers, nats per token", "long answers, nats per token"]
    lines = []
    for weighting in ("token", "sequence"):
        seed_results = [read(p) for p in sorted((bench.out / "results" / "weights" / weighting).glob("*/train.json"))]
        if seed_results:
            columns = [np.mean([row[kind] for row in seed_results], axis=0) for kind in ("short", "long")]
            cells = [interval(list(c), 1.0, 3) for c in columns]
            tokens = " and ".join(f"{seed_results[0][f'{kind} tokens']:.1f}" for kind in ("short", "long"))
            lines.append([f"every {weighting} alike ({tokens} tokens)", str(len(seed_results)), *cells])
    return markdown(header, lines)


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
    header += ["tokens", "well-formed %", "KL to the start", "repeated words %", "thoughts said %"]
    transcripts = {s.id: s for s in bench.measured[labels[0]]}
    lines = []
    for title, pattern in runs:
        folders = sorted((bench.out / "results").glob(pattern))
        files = ["kl.json", *(f"{slug(label)}.json" for label in labels)]
        folders = [f for f in folders if all((f / file).exists() for file in files)]
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
        cells.append(f"{100 * np.mean([all_said(transcripts[a['id']], a['text']) for a in first]):.1f}")
        lines.append(cells)
    return markdown(header, lines)


def read(path: Path) -> Row:
    return dict(json.loads(path.read_text()))


def all_said(sample: Sample, text: str) -> float:
    """1 where the thought has words and each of them is a word of the transcript."""
    return transcribed(sample, text).parts["said"]


def transcribed(sample: Sample, text: str, words: int | None = None) -> Score:
    """How far the thought is what is said, compared with so many words of the transcript."""
    nothing = torch.zeros(0, dtype=torch.long)
    (score,) = ThinkTranscript(words)([Rollout(sample, (Segment(nothing, nothing, torch.zeros(0), text),), sample.id)])
    return score


def repeated(text: str) -> float:
    """The share of a thought's words that it has had before."""
    return -Repetition(n=1, unit="words").value(extract_think(text) or text)


def share_with_interval(columns: Sequence[Sequence[float]]) -> str:
    """Percent of the mean over seeds, with the 95 % bootstrap interval over questions of their means over seeds."""
    return interval(list(np.mean(np.array(columns), axis=0)))


def interval(values: Sequence[float], scale: float = 100.0, digits: int = 1) -> str:
    """The mean with its 95 % bootstrap interval, empty without values."""
    if not values:
        return ""
    low, high = bootstrap_interval(values)
    return f"{scale * mean(values):.{digits}f} ({scale * low:.{digits}f}–{scale * high:.{digits}f})"


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


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
        "--held-out", nargs="+", default=["bundled:languages/test", UNSEEN], help="sets of questions to measure on"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the pairs and of their order")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    names = [loss.name for loss in LOSSES]
    parser.add_argument("--losses", nargs="+", choices=names, default=names, help="rows of the part losses")
    parser.add_argument("--lr", type=float, default=Settings.lr, help="learning rate of every loss")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="updates of supervised and preference runs")
    parser.add_argument("--rl-steps", type=int, default=Settings.rl_steps, help="steps of GRPO and of PPO")
    parser.add_argument("--quick", action="store_true", help="a few questions and steps: does the command work?")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size = QUICK if args.quick else replace(Settings(), lr=args.lr, steps=args.steps, rl_steps=args.rl_steps)
    path = args.path or supervised_start(args.out, args.quick)
    bench = Bench(args.out, path, size, args.data, args.held_out)
    seeds = args.seeds[:1] if args.quick else args.seeds
    try:
        if "losses" in args.only:
            losses(bench, seeds, args.losses)
        for name, part in (("audio", audio), ("reward", reward), ("process", process), ("weights", weights)):
            if name in args.only:
                part(bench, seeds)
    except Interrupted:
        sys.exit("stopped; the same command continues")
    write_tables(bench)


def write_tables(bench: Bench) -> None:
    """OUT/table.md from the results that are there."""
    tables = {
        "Preference losses": loss_table(bench),
        "OPA-DPO": policy_table(bench, [(name, f"audio/{slug(name)}/*") for name in AUDIO]),
        "Reward models": reward_table(bench),
        "Process reward model": judge_table(bench),
        "RL from the process reward model": policy_table(bench, [(n, f"process/{slug(n)}/*") for n in PROCESS]),
        "Loss weighting": weights_table(bench),
    }
    text = "\n".join(f"## {title}\n\n{table}" for title, table in tables.items())
    (bench.out / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
