"""One policy with its start weights, its data, its sampled answers, and the files of its results."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from arms import spaced
from safetensors.torch import load_file, save_file

from audiorl.algos.experience import Experience
from audiorl.config import ModelConfig, SamplingConfig
from audiorl.data.bundled import bundled_set, language_question
from audiorl.data.corpus import unseen_speakers
from audiorl.data.manifest import read_samples
from audiorl.data.preferences import Pair
from audiorl.eval._common import complete_rows
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.examples import Example, experience
from audiorl.models.policy import Reference
from audiorl.protocols import Request
from audiorl.rewards import AnswerAccuracy, ThinkFormat
from audiorl.rollout.hf import HFEngine
from audiorl.run.folder import Run
from audiorl.train.batches import fill
from audiorl.types import Rollout, Sample
from preferences.pairs import Answer, pairs_of_answers

Row = dict[str, Any]
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
            engine = HFEngine(self.reference.runs_on, sampling)
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
            "well_formed": complete and self.format([r])[0].total == 1,
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
        scored = fill(experiences, lambda b: {"old_logprobs": self.policy.forward(b).logprobs}, BUDGET, False)
        return [-float(e.old_logprobs.sum()) / e.num_sampled for e in scored if e.old_logprobs is not None]

    def kl(self, samples: Sequence[Sample]) -> list[float]:
        """Per question log π(y) - log π_start(y) of an answer y that the policy samples: its mean is the KL in nats."""
        sampling = SamplingConfig(max_new_tokens=self.size.tokens, max_batch_tokens=16_384)
        rollouts = HFEngine(self.policy, sampling).generate([Request(s, seed=1) for s in samples])
        experiences = [Experience.from_rollout(r) for r in rollouts]
        scored = fill(experiences, lambda b: {"ref_logprobs": self.reference.forward(b).logprobs}, BUDGET, False)
        gaps = []
        for e in scored:
            assert e.rollout_logprobs is not None and e.ref_logprobs is not None
            gaps.append(float((e.rollout_logprobs - e.ref_logprobs).sum()))
        return gaps


def samples_of(name: str) -> list[Sample]:
    """A bundled set by its name, the question of the bundled sets about five unseen speakers, or the rows of a file."""
    if name == UNSEEN:
        return [language_question(u.clip, u, u.speaker) for u in unseen_speakers() if u.duration <= MAX_SECONDS]
    return bundled_set(name) if name.startswith("bundled") else list(read_samples(name).samples)


def last_metrics(run: Run) -> dict[str, float]:
    """The last line of the run's metrics log."""
    line = (run.dir / "metrics.jsonl").read_text().splitlines()[-1]
    return {name: value for name, value in json.loads(line).items() if "/" in name}


def slug(name: str) -> str:
    letters = (c if c.isalnum() else "-" for c in name.lower().replace("α", "alpha"))
    return "-".join(filter(None, "".join(letters).split("-")))


def read(path: Path) -> Row:
    return dict(json.loads(path.read_text()))
