"""On-policy distillation: the policy hears speech and answers, a teacher that reads the transcript corrects each token.

    audiorl train distill-speech --out runs/distill --path Qwen/Qwen2.5-Omni-3B --model.dtype bfloat16 --lora \\
        --data spoken_questions.jsonl --held-out spoken_questions_test.jsonl

Every row needs its transcript in `text`: questions in `question` and `answer`, or with `--task transcripts` speech
alone. The teacher is the policy as training begins, with the transcript instead of the audio; `--rl.distill.teacher
policy` takes the policy as it is now, and a folder another model with the same tokenizer, such as the text model that
the policy was made of. `--rl.distill.view` changes what the teacher reads.

Rewards are only measured; `--rl.advantage grpo --rl.kl-beta 0.01` adds GRPO. Before and after training, held-out
rows are measured by audio (`before`, `after`) and by the teacher's view (`view_before`, `view_after`): their difference
is the gap that distillation is to close. `--control` also trains on the reference answers from the same start, for as
many seconds. `--path tiny --data bundled` tries the recipe without any download.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from audiorl.config import DistillConfig, ModelConfig, OptimConfig, RLConfig, SamplingConfig, SFTConfig
from audiorl.config.recipe import ControlOptions, HeldOutOptions, PtxOptions, RecipeConfig, RewardOptions
from audiorl.data.bundled import bundled_transcripts
from audiorl.data.manifest import read_samples
from audiorl.data.views import views_of
from audiorl.eval._phases import ErrorRate
from audiorl.models.examples import Example
from audiorl.recipes._common import (
    answer_reward,
    evaluation_of,
    read_questions,
    read_split,
    rl_check,
    supervised_turn,
    train_with_reward,
    with_user_reward,
)
from audiorl.rewards import WeightedSum, WordAccuracy
from audiorl.run.folder import Run
from audiorl.train.rl.distill import SWAP, UNCHANGED, check_teacher_prompts
from audiorl.types import Sample


@dataclass(frozen=True)
class DistillSpeechConfig(ControlOptions, HeldOutOptions, PtxOptions, RewardOptions, RecipeConfig):
    task: Literal["questions", "transcripts"] = "questions"
    """Questions about speech, answered in <answer> tags, or transcription."""
    think: bool = False
    """Ask for thoughts before the answer to a question."""
    eval_tokens: int = 256
    """Most tokens of a greedy answer to a held-out row."""
    rl: RLConfig = RLConfig(
        advantage="none",
        group_size=4,
        prompts_per_step=16,
        kl_beta=0.0,
        eval_every=100,
        save_every=50,
        distill=DistillConfig(coef=1.0),
    )
    """Distillation, and with another `advantage` an estimator next to it. Its steps follow from `epochs` and
    `max_steps`."""
    optim: OptimConfig = OptimConfig(lr=1e-5, warmup_steps=10)
    """The policy's optimizer."""
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, max_new_tokens=128)
    """How answers are sampled in training."""


def tiny() -> DistillSpeechConfig:
    defaults = DistillSpeechConfig()
    return replace(
        defaults,
        path="tiny",
        data=("bundled",),
        held_out_count=4,
        max_steps=2,
        eval_tokens=8,
        model=ModelConfig(),
        control_sft=SFTConfig(batch_size=2),
        rl=replace(defaults.rl, group_size=2, prompts_per_step=2, save_every=1),
        sampling=SamplingConfig(max_new_tokens=8),
    )


def main(config: DistillSpeechConfig, run: Run) -> None:
    if config.control and config.rl.distill.coef == 0:
        raise ValueError("--control: is compared with distillation, which --rl.distill.coef 0 turns off")
    source: dict[str, Any] = {"think": config.think}
    if config.task == "questions":
        reward = answer_reward(config.think)
    else:
        source["bundled"] = lambda _: bundled_transcripts(think=config.think)
        reward = WeightedSum.of(accuracy=WordAccuracy(normalizer="basic"))
    reward, tags, view = with_user_reward(config, reward), config.task == "questions", config.rl.distill.view

    def uses(sample: Sample) -> list[Sample | Example]:
        if config.rl.distill.coef:
            check_teacher_prompts([sample], config.rl.distill)
        viewed = [] if view in (UNCHANGED, SWAP) else views_of([sample], view)
        return [sample, *viewed, *([Example(sample, supervised_turn(sample, tags))] if sample.references else [])]

    check = replace(rl_check(config, reward, config.eval_tokens), trained=uses, measured=uses)
    if config.task == "questions":
        samples, held_out = read_questions(config, check=check, **source)
    else:
        samples, held_out = read_split(config, read=read_samples, check=check, **source)
    policy = check.policy()
    evaluation = evaluation_of(
        config,
        samples,
        held_out,
        reward,
        config.eval_tokens,
        check=check,
        errors=None if tags else ErrorRate(),
        sets={} if view == UNCHANGED else {"view": views_of(held_out, view)},
        **source,
    )
    answers = [Example(s, supervised_turn(s, tags)) for s in samples if s.references]
    train_with_reward(config, run, policy, samples, evaluation, phase="distill", answers=answers, tags=tags)
    if view != UNCHANGED:
        for when in ("before", "after"):
            by_view, by_audio = (next(iter(run.result(name).values())) for name in (f"view_{when}", when))
            gap = f"{by_view - by_audio:+.3f} ({by_view:.3f} by {view}, {by_audio:.3f} by audio)"
            print(f"gap {when}, {'accuracy' if tags else 'WER'}: {gap}", flush=True)
