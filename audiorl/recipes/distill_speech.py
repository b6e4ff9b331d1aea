"""On-policy distillation: the policy hears speech and answers, a teacher that reads the transcript corrects each token.

    audiorl train distill-speech --out runs/distill --path Qwen/Qwen2.5-Omni-3B --model.dtype bfloat16 --lora \\
        --data spoken_questions.jsonl --held-out spoken_questions_test.jsonl

Every row needs its transcript in `text`: questions in `question` and `answer`, or with `--task transcripts` speech
alone. The teacher is the policy as training begins, with the transcript in place of the audio; `--grpo.distill.teacher
policy` takes the policy as it is now, and a folder another model with the same tokenizer, such as the text model that
the policy was made of. `--grpo.distill.view` changes what the teacher reads.

Rewards are only measured; `--grpo.advantage grpo --grpo.kl-beta 0.01` adds GRPO. Before and after training, held-out
rows are measured by audio (`before`, `after`) and by the teacher's view (`view_before`, `view_after`): their difference
is the gap that distillation is to close. `--control` also trains on the reference answers from the same start, for as
many seconds. `--path tiny --data bundled` tries the recipe without any download.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from audiorl.config import DistillConfig, ModelConfig, OptimConfig, RLConfig, SamplingConfig, SFTConfig
from audiorl.data.bundled import bundled_transcripts
from audiorl.data.manifest import read_samples
from audiorl.data.views import views_of
from audiorl.models.examples import Example
from audiorl.recipes._common import (
    ControlOptions,
    OutsideOptions,
    PtxOptions,
    RecipeConfig,
    RewardOptions,
    answer_reward,
    evaluation_of,
    measured,
    policy_from,
    ptx_examples,
    read_questions,
    read_split,
    supervised_turn,
    train_control,
)
from audiorl.rewards import WeightedSum, WordAccuracy
from audiorl.run.folder import Run
from audiorl.train.rl.distill import UNCHANGED, check_teacher_prompts
from audiorl.train.rl.train import train_rl


@dataclass(frozen=True)
class Config(ControlOptions, OutsideOptions, PtxOptions, RewardOptions, RecipeConfig):
    task: Literal["questions", "transcripts"] = "questions"
    """Questions about speech, answered in <answer> tags, or transcription."""
    think: bool = False
    """Ask for thoughts before the answer to a question."""
    eval_tokens: int = 256
    """Most tokens of a greedy answer to a held-out row."""
    grpo: RLConfig = RLConfig(
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


def tiny() -> Config:
    defaults = Config()
    return replace(
        defaults,
        path="tiny",
        data=("bundled",),
        held_out_count=4,
        max_steps=2,
        eval_tokens=8,
        model=ModelConfig(),
        control_sft=SFTConfig(batch_size=2),
        grpo=replace(defaults.grpo, group_size=2, prompts_per_step=2, save_every=1),
        sampling=SamplingConfig(max_new_tokens=8),
    )


def main(config: Config, run: Run) -> None:
    if config.control and config.grpo.distill.coef == 0:
        raise ValueError("--control: is compared with distillation, which --grpo.distill.coef 0 turns off")
    source: dict[str, Any] = {"think": config.think}
    if config.task == "questions":
        samples, held_out = read_questions(config, **source)
        reward = answer_reward(config.think)
    else:
        source["bundled"] = lambda _: bundled_transcripts(think=config.think)
        samples, held_out = read_split(config, read=read_samples, **source)
        reward = WeightedSum.of(accuracy=WordAccuracy(normalizer="basic"))
    view = config.grpo.distill.view
    if config.grpo.distill.coef:
        check_teacher_prompts([*samples, *held_out], config.grpo.distill)
    policy = policy_from(config)
    evaluation = evaluation_of(
        config,
        samples,
        held_out,
        config.rewarded(reward),
        config.eval_tokens,
        sets={} if view == UNCHANGED else {"view": views_of(held_out, view)},
        **source,
    )
    answers = [Example(s, supervised_turn(s, config.task == "questions")) for s in samples if s.references]
    grpo = config.scheduled(config.grpo, len(samples))
    with measured(run, policy, evaluation) as evaluate:
        train_rl(
            policy,
            samples,
            evaluation.reward,
            run,
            config=grpo,
            optim=config.optim,
            sampling=config.sampling,
            seed=config.seed,
            phase="distill",
            evaluate=evaluate,
            supervised=ptx_examples(config, config.ptx_data, config.grpo),
            answers=answers,
        )
        train_control(config, run, "distill", grpo, samples, evaluation, tags=config.task == "questions")
    if view != UNCHANGED:
        for when in ("before", "after"):
            by_view, by_audio = (run.result(name)["accuracy"] for name in (f"view_{when}", when))
            print(
                f"gap {when}: {by_view - by_audio:+.3f} ({by_view:.3f} by {view}, {by_audio:.3f} by audio)", flush=True
            )


if __name__ == "__main__":
    from audiorl.cli import run_recipe

    run_recipe(__file__)
