"""The gap between text and audio after SFT, GRPO, distillation, and GRPO with distillation, from one start.

    python experiments/measure_distillation.py --out runs/distillation     # an hour on one thread; continues where
    it stopped
    python experiments/measure_distillation.py --out runs/try --quick      # a minute: every part once

The start is the quickstart's model and question, without thoughts: SFT on the *transcripts* of the training phrases, no
audio. From it each arm trains on the recordings of those phrases:

  sft       SFT on the labels
  grpo      GRPO, rewarded for a right answer and for the format
  distill   reverse KL to the start, frozen, which reads the transcripts; neither label nor reward
  both      GRPO with that KL as a second loss

Every arm takes about the same CPU time: `Settings` has its steps. Greedy answers by audio and by transcript are
measured on new phrases of the training's speakers and on five speakers that no phase heard, and what the right audio
adds to the labels (`audiorl.eval._listening`). OUT/table.md has means over seeds with 95 % bootstrap intervals
over questions. `--only` names arms, `--seeds` seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from arms import check_listening, cpu_seconds, hits, listening_table, markdown, percent, seeds_with, spaced, timed

from audiorl.config import DistillConfig, ModelConfig, OptimConfig, RLConfig, SamplingConfig, SFTConfig
from audiorl.data.bundled import LANGUAGE_QUESTION, bundled_languages, language_phrases, language_question
from audiorl.data.corpus import unseen_speakers
from audiorl.data.views import views_of
from audiorl.errors import Interrupted
from audiorl.eval._phases import Evaluation
from audiorl.eval.metrics.corpus import UNSEEN
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.examples import Example
from audiorl.models.families.qwen_omni import tiny
from audiorl.recipes._common import answer_reward
from audiorl.run.folder import Run
from audiorl.train.rl.train import train_rl
from audiorl.train.sft import sft
from audiorl.types import Sample

MODEL = ModelConfig(audio="projector", gradient_checkpointing=False)
MAX_SECONDS = 4.0
"""Longest recording."""
VIEW = "transcript"
HELD_OUT = ""
"""The set of the training's speakers, as `Evaluation` names it."""
ARMS = ("sft", "grpo", "distill", "both")
ANSWER_TOKENS = 12


@dataclass(frozen=True)
class Settings:
    """The size of the experiment. The arms' steps take about as much CPU time each: 150 s on one core."""

    start_steps: int = 150
    sft_steps: int = 240
    grpo_steps: int = 140
    distill_steps: int = 200
    both_steps: int = 137
    samples: int | None = None
    """Most samples of each set; None: all."""
    lr: float = 3e-4
    """Learning rate of SFT and distillation."""
    grpo_lr: float = 1e-4
    """Learning rate of GRPO, alone and with distillation."""


QUICK = Settings(start_steps=2, sft_steps=2, grpo_steps=2, distill_steps=2, both_steps=2, samples=8)


@dataclass(frozen=True)
class Data:
    """Questions which language is spoken, by audio."""

    train: list[Sample]
    held_out: list[Sample]
    """New phrases by speakers of `train`."""
    unseen: list[Sample]
    """Speakers who are not in `train`."""

    @classmethod
    def load(cls, most: int | None) -> Data:
        unseen = [language_question(u.clip, u, u.speaker) for u in unseen_speakers() if u.duration <= MAX_SECONDS]
        sets = (bundled_languages("train", MAX_SECONDS), bundled_languages("test", MAX_SECONDS), unseen)
        return cls(*(spaced(s, most) for s in sets))


def labelled(samples: list[Sample]) -> list[Example]:
    return [Example(s, f"<answer>{s.references[0]}</answer>") for s in samples]


def new_model(seed: int) -> AudioPolicy:
    texts = [u.text for u in language_phrases(MAX_SECONDS)]
    return tiny([*texts, *[LANGUAGE_QUESTION] * 100], seed=seed, config=MODEL)


def train_seed(folder: Path, seed: int, data: Data, size: Settings, arms: list[str]) -> None:
    """All phases of one seed in one run folder; what is finished is not done again."""
    run = Run.open(folder) if folder.exists() else Run.create(folder, "measure_distillation", [], size)
    sets = {"view": views_of(data.held_out, VIEW), UNSEEN: data.unseen, f"{UNSEEN}_view": views_of(data.unseen, VIEW)}
    evaluation = Evaluation(answer_reward(False), data.held_out, ANSWER_TOKENS, sets)
    policy = new_model(seed)
    supervised = SFTConfig(steps=size.start_steps, batch_size=32, micro_batch_tokens=2000, save_every=50)
    optim = OptimConfig(lr=1e-3, warmup_steps=20, schedule="cosine")
    sft(policy, labelled(views_of(data.train, VIEW)), run, config=supervised, optim=optim, seed=seed, phase="text")
    evaluation.measure(run, "before", policy)
    check_listening(run, "before", policy, labelled(data.held_out[::4]))
    start = run.checkpoint("text")
    for arm in arms:
        policy = load_policy(str(start), MODEL)
        timed(run, arm, partial(TRAIN[arm], policy, run, data, size, seed))
        evaluation.measure(run, f"after_{arm}", policy)
        check_listening(run, f"after_{arm}", policy, labelled(data.held_out[::4]))


def train_sft(policy: AudioPolicy, run: Run, data: Data, size: Settings, seed: int) -> None:
    config = SFTConfig(steps=size.sft_steps, batch_size=24, micro_batch_tokens=1000, save_every=50)
    optim = OptimConfig(lr=size.lr, warmup_steps=10)
    sft(policy, labelled(data.train), run, config=config, optim=optim, seed=seed, phase="sft")


def train_policy(config: RLConfig, lr: float, phase: str, policy: AudioPolicy, run: Run, data: Data, seed: int) -> None:
    train_rl(
        policy,
        data.train,
        answer_reward(False),
        run,
        config=replace(config, micro_batch_tokens=1000, eval_every=0, save_every=20, prompts_per_step=12),
        optim=OptimConfig(lr=lr, warmup_steps=10),
        sampling=SamplingConfig(max_new_tokens=ANSWER_TOKENS),
        seed=seed,
        phase=phase,
    )


def train_grpo(policy: AudioPolicy, run: Run, data: Data, size: Settings, seed: int) -> None:
    train_policy(RLConfig(steps=size.grpo_steps, group_size=8), size.grpo_lr, "grpo", policy, run, data, seed)


def train_distill(policy: AudioPolicy, run: Run, data: Data, size: Settings, seed: int) -> None:
    distill = DistillConfig(coef=1.0, view=VIEW)
    config = RLConfig(steps=size.distill_steps, group_size=2, advantage="none", kl_beta=0.0, distill=distill)
    train_policy(config, size.lr, "distill", policy, run, data, seed)


def train_both(policy: AudioPolicy, run: Run, data: Data, size: Settings, seed: int) -> None:
    distill = DistillConfig(coef=1.0, view=VIEW)
    config = RLConfig(steps=size.both_steps, group_size=8, kl_beta=0.0, distill=distill)
    train_policy(config, size.grpo_lr, "both", policy, run, data, seed)


TRAIN: dict[str, Callable[[AudioPolicy, Run, Data, Settings, int], None]] = {
    "sft": train_sft,
    "grpo": train_grpo,
    "distill": train_distill,
    "both": train_both,
}


def table(out: Path, title: str, prefix: str) -> str:
    """One set's table, each arm over the seeds that have it."""
    header = ("", "CPU s", "by audio", "each seed", "change", "by transcript", "gap", "gap closed")
    rows = []
    for arm in ("before", *ARMS):
        when = "before" if arm == "before" else f"after_{arm}"
        if not (folders := seeds_with(out, when)):
            continue
        audio, text = hits(folders, f"{prefix}{when}"), hits(folders, f"{prefix}view_{when}")
        seeds = ", ".join(f"{100 * hits([folder], f'{prefix}{when}').mean():.1f}" for folder in folders)
        seconds = change = closed = ""
        if arm != "before":
            start, start_text = hits(folders, f"{prefix}before"), hits(folders, f"{prefix}view_before")
            seconds = f"{fmean(cpu_seconds(folder)[arm] for folder in folders):.0f}"
            change = percent(audio - start, "+")
            closed = f"{100 * (audio - start).mean() / (start_text - start).mean():.0f} %"
        rows.append((arm, seconds, percent(audio), seeds, change, percent(text), percent(text - audio, "+"), closed))
    return f"## {title}\n\n{markdown(header, rows)}"


def listening(out: Path) -> str:
    return listening_table({when: seeds_with(out, when) for when in ("before", *(f"after_{arm}" for arm in ARMS))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the runs, one for each seed, and of table.md"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the model and of training")
    parser.add_argument("--only", nargs="+", choices=ARMS, default=ARMS, help="arms to train")
    parser.add_argument("--grpo-lr", type=float, default=Settings.grpo_lr, help="learning rate of grpo and both")
    parser.add_argument("--quick", action="store_true", help="a few questions and steps: does the command work?")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = QUICK if args.quick else replace(Settings(), grpo_lr=args.grpo_lr)
    data = Data.load(size.samples)
    try:
        for seed in args.seeds[:1] if args.quick else args.seeds:
            train_seed(args.out / f"seed_{seed}", seed, data, size, list(args.only))
    except Interrupted:
        sys.exit("stopped; the same command continues")
    tables = "\n".join(
        (
            table(args.out, "Known speakers, new phrases", HELD_OUT),
            table(args.out, "Unseen speakers", f"{UNSEEN}_"),
            listening(args.out),
        )
    )
    (args.out / "table.md").write_text(tables)
    print(tables)


if __name__ == "__main__":
    main()
