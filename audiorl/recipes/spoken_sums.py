"""A thought that pays: a small speech model hears numbers, works out their sum step by step, and answers.

The model is the quickstart's, a Qwen2.5-Omni thinker of 11 M parameters with the encoder of Whisper tiny. It hears
"three, eight, two" and writes `<think>3+8=11+2=13</think><answer>13</answer>`. Four phases:

  text     sums of written number words: arithmetic without audio
  sft      the same spoken by synthetic voices, with exact thoughts
  grpo     GRPO on sequences of human recordings, rewarded for the answer and the format alone
  control  instead of grpo: further sft for as many CPU seconds

    audiorl train spoken-sums --out runs/sums
    audiorl train spoken-sums --words fsdd/recordings --unseen-speakers lucas yweweler --out runs/voices
    audiorl train spoken-sums --think False --out runs/no-think

`fsdd` is a clone of the Free Spoken Digit Dataset. With `--unseen-speakers` the report also shows speakers whom no
phase heard. Nothing rewards the thought, so that its numbers and its arithmetic are measured by what nothing optimises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig, SFTConfig
from audiorl.config.checks import require, require_counts
from audiorl.data.augment import augment
from audiorl.data.prompts import how_to_answer
from audiorl.data.sums import QUESTIONS, NumberWord, number_words, split_speakers, spoken_numbers
from audiorl.eval._phases import Evaluation
from audiorl.eval.metrics.corpus import UNSEEN
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example
from audiorl.recipes._common import answer_reward, grpo_and_control, passes_on_cpu, random_policy
from audiorl.report import write_report
from audiorl.rewards import FunctionReward, SpokenNumbers, Term, WeightedSum
from audiorl.run.folder import Run
from audiorl.train.sft import sft
from audiorl.types import Sample


@dataclass(frozen=True)
class SpokenSumsConfig:
    seed: int = 0
    """Seed of sampling, of the order of the data, and of new weights."""
    think: bool = True
    """Work the answer out before giving it; without, the answer alone."""
    operation: Literal["sum", "difference", "largest", "count", "twice"] = "sum"
    """What is asked about the numbers."""
    lengths: tuple[int, int] = (2, 3)
    """The shortest and the longest sequence that is trained on."""
    longer: tuple[int, int] | None = None
    """Lengths of sequences that are measured, too, and not trained on."""
    largest: int = 9
    """The numbers are 1 to this."""
    languages: tuple[str, ...] = ("en",)
    """Codes of the languages in which the numbers are said."""
    words: tuple[str, ...] = ("bundled",)
    """Recordings of people saying numbers: `bundled`, folders of `audiorl data build`, or of the Free Spoken Digit
    Dataset."""
    unseen_speakers: tuple[str, ...] = ()
    """Speakers among them who are measured and in no phase of training."""
    voices: int = 10
    """Synthetic voices of the supervised start."""
    synthetic: int = 900
    """Synthetic sequences."""
    human: int = 600
    """Sequences of human recordings that GRPO trains on."""
    measured: int = 200
    """Sequences that are measured, of the training speakers and of the unseen ones."""
    thought_weight: float = 0.0
    """Weight of a reward for numbers heard and arithmetic in the thought; 0: both are only measured."""
    control: bool = True
    """Also train the control: further SFT for as many CPU seconds as GRPO took (wall-clock seconds on a GPU)."""
    threads: int = 2
    """CPU threads of torch."""
    model: ModelConfig = ModelConfig(audio="projector")
    """How the model is held, and what of it is trained."""
    text: SFTConfig = SFTConfig(steps=300, batch_size=24, save_every=100)
    """Sums of written words."""
    sft: SFTConfig = SFTConfig(steps=300, batch_size=24, save_every=50)
    """The supervised start; the control takes its batches."""
    sft_optim: OptimConfig = OptimConfig(lr=1e-3, warmup_steps=20, schedule="cosine")
    """The optimizer of the supervised phases."""
    rl: RLConfig = RLConfig(steps=80, prompts_per_step=16, group_size=8, kl_beta=0.0, eval_every=20, save_every=20)
    """GRPO on human recordings."""
    rl_optim: OptimConfig = OptimConfig(lr=1e-4, warmup_steps=5)
    """The optimizer of GRPO."""
    control_optim: OptimConfig = OptimConfig(lr=3e-4, warmup_steps=5)
    """The optimizer of the control."""
    sampling: SamplingConfig = SamplingConfig(max_new_tokens=48, max_batch_tokens=32_768)
    """How answers are sampled; measured ones are greedy and as long at most."""

    def __post_init__(self) -> None:
        require_counts(self, ("largest", "voices", "synthetic", "human", "measured", "threads"))
        require(bool(self.languages and self.words), "words", self.words, "at least one source and one language")


def tiny() -> SpokenSumsConfig:
    return SpokenSumsConfig(
        voices=2,
        synthetic=8,
        human=8,
        measured=4,
        text=SFTConfig(steps=2, batch_size=4, save_every=1),
        sft=SFTConfig(steps=2, batch_size=4, save_every=1),
        rl=RLConfig(steps=2, prompts_per_step=2, group_size=2, eval_every=1, save_every=1),
        sampling=SamplingConfig(max_new_tokens=8),
    )


def main(config: SpokenSumsConfig, run: Run) -> None:
    torch.set_num_threads(config.threads)
    trained, unseen = human_words(config)
    policy, config = start(config, run)
    supervised = ["sft", "control_sft"] if config.control else ["sft"]
    learned = all(run.finished(phase) for phase in supervised) and not config.rl.ptx.coef
    spoken = [] if learned else sequences(config, synthetic_words(config), config.synthetic, 1, noisy=True)
    examples = answers(spoken, config)
    reward, outside = rewards_of(config)
    sets = {UNSEEN: sequences(config, unseen, config.measured, 4)} if unseen else {}
    if config.longer:
        longer = replace(config, lengths=config.longer)
        sets["longer"] = sequences(longer, unseen or trained, config.measured, 5)
    evaluation = Evaluation(
        reward, sequences(config, trained, config.measured, 3), config.sampling.max_new_tokens, sets, outside
    )
    for sample in (s for held in (evaluation.held_out, *sets.values()) for s in held):
        policy.prompts.check(sample)  # a sequence longer than the model reads ends the run here
    sft(policy, examples, run, config=config.sft, optim=config.sft_optim, seed=config.seed)
    grpo_and_control(config, run, policy, sequences(config, trained, config.human, 2), evaluation, examples)
    print(write_report(run.dir))


def start(config: SpokenSumsConfig, run: Run) -> tuple[AudioPolicy, SpokenSumsConfig]:
    """Return a new model that has learned the written form of the questions, and the config with its passes."""
    words = synthetic_words(replace(config, voices=1))
    asked = f"{QUESTIONS[config.operation]}\n{how_to_answer(config.think)}"
    texts = [asked, *(word.text for word in words)] * 100
    policy = random_policy(config.model, texts, seed=config.seed)
    config = passes_on_cpu(config, policy.device, text=1600, sft=800, rl=800)
    examples = (
        []
        if run.finished("text")
        else answers(sequences(config, words, 20 * config.synthetic, 0, written=True), config)
    )
    sft(policy, examples, run, config=config.text, optim=config.sft_optim, seed=config.seed, phase="text")
    return policy, config


def human_words(config: SpokenSumsConfig) -> tuple[list[NumberWord], list[NumberWord]]:
    """Return the recordings of the training speakers and of the unseen ones."""
    sources = [(source, language) for source in config.words for language in config.languages]
    words = [word for source, language in sources for word in number_words(source, language, config.largest)]
    return split_speakers(words, config.unseen_speakers)


def synthetic_words(config: SpokenSumsConfig) -> list[NumberWord]:
    source = f"synthetic:{config.voices}"
    return [w for c in config.languages for w in number_words(source, c, config.largest, seed=config.seed)]


def sequences(
    config: SpokenSumsConfig,
    words: Sequence[NumberWord],
    count: int,
    part: int,
    noisy: bool = False,
    written: bool = False,
) -> list[Sample]:
    """Return `count` questions; parts draw anew, those that are measured the same for every seed.

    Short sequences come in several parts: what is new to the model is an unseen speaker, or the longer sequences.
    """
    seed = part if part > 2 else 10 * (config.seed + 1) + part
    change = augment if noisy else None
    return spoken_numbers(words, count, config.lengths, config.operation, seed, change, written, config.think)


def answers(samples: Sequence[Sample], config: SpokenSumsConfig) -> list[Example]:
    """Return the samples with their exact thoughts and answers to be learned."""
    thoughts = [f"<think>{s.metadata['thought']}</think>" if config.think else "" for s in samples]
    return [Example(s, f"{t}<answer>{s.references[0]}</answer>") for s, t in zip(samples, thoughts, strict=True)]


def rewards_of(config: SpokenSumsConfig) -> tuple[WeightedSum, WeightedSum | None]:
    """Return accuracy and format, 2 to 1, with the thought if it is weighed; else what the thought is measured by."""
    reward, numbers = answer_reward(config.think), SpokenNumbers()
    if not config.think:
        return reward, None
    if config.thought_weight:
        return WeightedSum((*reward.terms, Term("thought", numbers, config.thought_weight))), None

    def part(name: str) -> FunctionReward:
        return FunctionReward(lambda rollout: numbers([rollout])[0].parts[name], name)

    return reward, WeightedSum.of(**{name: part(name) for name in ("heard", "exact", "follows", "luck")})
