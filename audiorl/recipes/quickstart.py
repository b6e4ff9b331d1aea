"""Reinforcement learning teaches a small speech model to understand people.

The model is a Qwen2.5-Omni thinker of 11 M parameters whose audio tower is Whisper tiny. It is asked which language is
spoken; it thinks (writes the words that it recognises), then answers. Three phases:

  sft      a supervised start on synthetic speech only: many robot voices, correct thoughts and answers
  grpo     GRPO on human recordings, rewarded for a right answer and for the format
  control  instead of grpo: further sft on synthetic speech for as many CPU seconds

Each is measured on human recordings of phrases of which training had no human recording.

    audiorl train quickstart --out runs/quickstart
    audiorl train quickstart --seed 1 --think False --out runs/no-think
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, OptimConfig, RLConfig, SamplingConfig, SFTConfig
from audiorl.data.augment import augment
from audiorl.data.bundled import LANGUAGE_QUESTION, SPOKEN, bundled_languages, language_phrases, language_question
from audiorl.data.corpus import Utterance, bundled_speech, corpus, normalised
from audiorl.data.synth import Speech, synthesize_many, voices
from audiorl.eval._phases import Evaluation
from audiorl.eval.metrics.corpus import UNSEEN
from audiorl.models.examples import Example
from audiorl.protocols import Reward
from audiorl.recipes._common import grpo_and_control, passes_on_cpu, random_policy
from audiorl.report import write_report
from audiorl.rewards import (
    AnswerAccuracy,
    AnswerFormat,
    FunctionReward,
    Term,
    ThinkFormat,
    ThinkTranscript,
    ThoughtConsistency,
    ThoughtGrounding,
    WeightedSum,
    extract_think,
)
from audiorl.run.folder import Run
from audiorl.train.sft import sft
from audiorl.types import Rollout, Sample


@dataclass(frozen=True)
class QuickstartConfig:
    seed: int = 0
    """Seed of sampling, of the order of the data, and of new weights."""
    think: bool = True
    """Think before answering; without, the answer alone."""
    thought_words: int = 2
    """Words of the phrase that a thought repeats, in the supervised start and for the reward."""
    thought_reward: Literal["transcript", "grounding", "consistency"] = "transcript"
    """Reward of a thought: that it repeats what is said, that it is more probable with the audio than with
    that of another phrase in the same language, or that the answer follows from it. The last two ask the model of the
    supervised start."""
    thought_weight: float = 1.0
    """Weight of that reward; 0: none."""
    control: bool = True
    """Also train the control: further SFT for as many CPU seconds as GRPO took (wall-clock seconds on a GPU)."""
    max_phrases: int | None = None
    """Use about so many phrases, evenly spaced; None: all."""
    max_seconds: float = 4.0
    """Longest human recording used."""
    held_out: float = 0.27
    """Share of the human recordings that is measured and not trained on."""
    unseen: tuple[str, ...] = ()
    """Folders of recordings as `audiorl data build` writes them: questions about speakers who are not in the package's
    own recordings are measured too."""
    voices: int = 3
    """Synthetic voices per phrase."""
    threads: int = 2
    """CPU threads of torch."""
    model: ModelConfig = ModelConfig(audio="projector")
    """How the model is held, and what of it is trained."""
    sft: SFTConfig = SFTConfig(steps=280, batch_size=24, save_every=50)
    """The supervised start; the control takes its batches."""
    sft_optim: OptimConfig = OptimConfig(lr=1e-3, warmup_steps=20, schedule="cosine")
    """The optimizer of the supervised start."""
    rl: RLConfig = RLConfig(steps=80, prompts_per_step=16, group_size=8, eval_every=20, save_every=20)
    """GRPO on human recordings."""
    rl_optim: OptimConfig = OptimConfig(lr=1e-4, warmup_steps=5)
    """The optimizer of GRPO."""
    control_optim: OptimConfig = OptimConfig(lr=3e-4, warmup_steps=5)
    """The optimizer of the control."""
    sampling: SamplingConfig = SamplingConfig(max_new_tokens=20, max_batch_tokens=32_768)
    """How answers are sampled; held-out ones are greedy and as long at most."""


def tiny() -> QuickstartConfig:
    return QuickstartConfig(
        max_phrases=24,
        voices=1,
        max_seconds=1.5,
        sft=SFTConfig(steps=2, batch_size=4, save_every=1),
        rl=RLConfig(steps=2, prompts_per_step=2, group_size=2, eval_every=1, save_every=1),
        sampling=SamplingConfig(max_new_tokens=8),
    )


def main(config: QuickstartConfig, run: Run) -> None:
    torch.set_num_threads(config.threads)
    human = language_phrases(config.max_seconds, config.max_phrases)
    limits = config.max_seconds, config.held_out, config.max_phrases
    trained, measured = bundled_languages("train", *limits), bundled_languages("test", *limits)
    policy = random_policy(config.model, [u.text for u in human] + [LANGUAGE_QUESTION] * 100, seed=config.seed)
    config = passes_on_cpu(config, policy.device, sft=800, rl=800)
    sets = {UNSEEN: unseen_questions(config)} if config.unseen else {}
    supervised = ["sft", "control_sft"] if config.control else ["sft"]
    learned = all(run.finished(phase) for phase in supervised) and not config.rl.ptx.coef
    examples = [] if learned else synthetic(human, config)
    sft(policy, examples, run, config=config.sft, optim=config.sft_optim, seed=config.seed)
    reward = reward_of(config, run)
    outside = None
    if config.think:
        vocabulary = frozenset(word for u in human for word in normalised(u.text).split())
        of_vocabulary = FunctionReward(lambda rollout: in_vocabulary(rollout, vocabulary), "vocabulary")
        outside = WeightedSum.of(said=FunctionReward(said, "said"), vocabulary=of_vocabulary)
    evaluation = Evaluation(reward, measured, config.sampling.max_new_tokens, sets, outside)
    grpo_and_control(config, run, policy, trained, evaluation, examples)
    print(write_report(run.dir))


def reward_of(config: QuickstartConfig, run: Run) -> WeightedSum:
    """Return accuracy and format, 2 to 1, and the reward of thoughts, whose judge is the supervised start."""
    terms = [Term("accuracy", AnswerAccuracy(), 2.0), Term("format", ThinkFormat() if config.think else AnswerFormat())]
    if config.think and config.thought_weight:
        start, device = str(run.checkpoint("sft")), config.model.device
        thought: Reward = ThinkTranscript(config.thought_words)
        if config.thought_reward == "grounding":
            thought = ThoughtGrounding(start, device=device)
        elif config.thought_reward == "consistency":
            thought = ThoughtConsistency(start, device=device, view="silence")
        terms.append(Term("thought", thought, config.thought_weight))
    return WeightedSum(tuple(terms))


def unseen_questions(config: QuickstartConfig) -> list[Sample]:
    """Return questions about recordings of the folders `unseen` by speakers who are not in the package's own."""
    trained = {u.speaker for u in bundled_speech()}
    samples = []
    for folder in config.unseen:
        speech = [u for u in corpus(folder, max_seconds=config.max_seconds) if u.language in SPOKEN]
        unseen = [u for u in speech if u.speaker not in trained]
        if not unseen:
            known = f"by another speaker than {sorted(trained)}"
            raise ValueError(f"--unseen {folder}: no English, Spanish or French {known}")
        samples += [language_question(u.clip, u, "human") for u in unseen]
    return samples


def said(rollout: Rollout) -> float:
    """Return 1 where the thought has words and each of them was said, else 0; nothing optimises this."""
    (score,) = ThinkTranscript()([rollout])
    return score.parts["said"]


def in_vocabulary(rollout: Rollout, vocabulary: frozenset[str]) -> float:
    """Return 1 where the thought has words, all of the vocabulary, said or not, else 0: a cue is mostly no word."""
    words = normalised(extract_think(rollout.text) or "").split()
    return float(bool(words) and vocabulary.issuperset(words))


def synthetic(utterances: Sequence[Utterance], config: QuickstartConfig) -> list[Example]:
    """Return every phrase in several robot voices, each with its thought and answer."""
    rng, noise = random.Random(config.seed), np.random.default_rng(config.seed)
    spoken = [u for u in utterances for _ in range(config.voices)]
    requests = [
        Speech(u.text, u.language, rng.choice(voices(u.language)), rng.randint(120, 200), rng.randint(20, 80))
        for u in spoken
    ]
    examples = []
    for k, (u, wav) in enumerate(zip(spoken, synthesize_many(requests, workers=config.threads), strict=True)):
        clip = AudioClip(array=augment(wav, noise), sample_rate=16_000)
        thought = " ".join(normalised(u.text).split()[: config.thought_words])
        target = f"<think>{thought}</think>" if config.think else ""
        examples.append(Example(language_question(clip, u, str(k)), f"{target}<answer>{SPOKEN[u.language]}</answer>"))
    return examples
