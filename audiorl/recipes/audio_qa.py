"""Reinforcement learning on audio question answering: GRPO with Ke-Omni-R's settings, or PPO with a critic.

    audiorl train mmau-grpo --out runs/mmau --path Qwen/Qwen2.5-Omni-3B --model.dtype bfloat16 \\
        --data avqa/train_qa.json:5000 musicbench/MusicBench_train.json:5000 --held-out mmau-test-mini.json
    audiorl train ppo-audio-qa --out runs/ppo --path Qwen/Qwen2.5-Omni-3B --model.dtype bfloat16 \\
        --data avqa.jsonl --held-out mmau-test-mini.json

`mmau-grpo` and `ppo-audio-qa` are the presets `grpo` and `ppo` of this recipe; other estimators are other options of
`--rl`, such as `--rl.advantage rloo` for RLOO. `--data` and `--held-out` take AVQA and MusicBench as
published, MMAU, MMAR and native manifests. `FILE:x0.5` shows half of a set's rows an epoch, `FILE:x2` all of them
twice. `--think False` asks for the answer only. `--reward-file my.py` adds a reward of your own, `--reward-model
FOLDER` a trained one. `--control` also trains on the answers by SFT, without thoughts, for as much compute. `--path
tiny --data bundled` tries the recipe without any download.

GRPO as in Ke-Omni-R: 5,000 questions of AVQA without those that need the picture and 5,000 of MusicBench (key, tempo
mark, time signature), 2 epochs, 8 answers of at most 64 tokens to a prompt at temperature 1, accuracy and format
rewarded 2 to 1, advantages divided by their standard deviation + 1e-4, token mean of each answer, k3 in the loss with
β 0.01, learning rate 1e-6. Different: the prompt asks for the same in other words, one option a line; an answer that
names its option by the letter is right, too; keys that sound the same are one option. Prompts are not limited to 512
tokens, as a prompt that is cut lacks a part of its audio; these sets' clips of 10 s make 250 tokens. 8 prompts a step
are our choice.

PPO: the critic is a copy of the policy with one linear on top (`--rl.critic.shared True`: on the policy's own trunk);
in its first steps it learns alone. The KL to the start is a penalty on every token's reward, held near a target by a
controller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from audiorl.config import CriticConfig, KLConfig, ModelConfig, OptimConfig, RLConfig, SamplingConfig
from audiorl.config.recipe import ControlOptions, HeldOutOptions, PtxOptions, RecipeConfig, RewardOptions
from audiorl.models import AudioPolicy
from audiorl.recipes._common import (
    NOTHING,
    Given,
    answer_reward,
    evaluation_of,
    read_questions,
    rl_check,
    train_with_reward,
    with_user_reward,
)
from audiorl.rewards import AnswerAccuracy, ModelReward, Term, WeightedSum
from audiorl.run.folder import Run


@dataclass(frozen=True)
class AudioQAConfig(ControlOptions, HeldOutOptions, PtxOptions, RewardOptions, RecipeConfig):
    think: bool = True
    """Ask for thoughts before the answer, and reward their format."""
    reward_model: str | None = None
    """A reward model's folder, added to the reward as the part `model`; None adds none."""
    reward_model_weight: float = 1.0
    """Weight of `reward_model`."""
    epochs: float = 2.0
    """Passes over the training questions."""
    eval_tokens: int = 256
    """Most tokens of a greedy answer to a held-out question."""
    rl: RLConfig = RLConfig(group_size=8, prompts_per_step=8, kl_beta=0.01, eval_every=100, save_every=50)
    """The estimator and its critic. Its steps follow from `epochs` and `max_steps`."""
    optim: OptimConfig = OptimConfig(lr=1e-6)
    """The policy's optimizer; `--rl.critic.optim` is the critic's."""
    sampling: SamplingConfig = SamplingConfig(temperature=1.0, max_new_tokens=64)
    """How answers are sampled in training."""


def ppo() -> AudioQAConfig:
    """PPO with a critic that is a copy of the policy."""
    estimator = RLConfig(
        advantage="gae",
        prompts_per_step=64,
        group_size=1,
        mini_batches=4,
        aggregation="token-mean",
        kl=KLConfig(place="reward", kind="k1", control="log-space", target=0.02),
        kl_beta=0.02,
        critic=CriticConfig(warmup_steps=10, optim=OptimConfig(lr=5e-6)),
        eval_every=100,
        save_every=50,
    )
    return AudioQAConfig(epochs=1.0, rl=estimator)


PRESETS = {"grpo": AudioQAConfig, "ppo": ppo}


def tiny(preset: str = "grpo") -> AudioQAConfig:
    if preset == "ppo":
        critic = CriticConfig(warmup_steps=1)
        estimator = replace(ppo().rl, prompts_per_step=4, mini_batches=2, critic=critic, save_every=1)
    else:
        estimator = RLConfig(group_size=2, prompts_per_step=2, save_every=1)
    return replace(
        PRESETS[preset](),
        path="tiny",
        data=("bundled",),
        held_out_count=4,
        max_steps=2,
        eval_tokens=8,
        model=ModelConfig(),
        rl=estimator,
        sampling=SamplingConfig(max_new_tokens=8),
    )


def main(config: AudioQAConfig, run: Run, given: Given = NOTHING) -> AudioPolicy:
    """Train on the questions and return the policy. A reward of the caller's replaces accuracy and format."""
    reward, outside, metric = answer_reward(config.think), None, "accuracy"
    own = given.reward
    if own is not None:
        reward = own if isinstance(own, WeightedSum) else WeightedSum.of(reward=own)
        metric = reward.terms[0].name
    if config.reward_model is not None:
        model = ModelReward(config.reward_model, device=config.model.device)
        reward = WeightedSum((*reward.terms, Term("model", model, config.reward_model_weight)))
    reward = with_user_reward(config, reward)
    check = rl_check(config, reward, config.eval_tokens, policy=given.policy)
    samples, held_out = read_questions(
        config, think=config.think, given=given, check=check, **({} if own is None else {"need_answer": False})
    )
    if own is not None and all(t.reward != AnswerAccuracy() for t in reward.terms):
        # Accuracy is reported next to any other reward, where the rows have answers.
        outside = WeightedSum.of(accuracy=AnswerAccuracy()) if all(s.references for s in held_out) else None
    policy = check.policy()
    evaluation = evaluation_of(
        config,
        samples,
        held_out,
        reward,
        config.eval_tokens,
        check=check,
        think=config.think,
        outside=outside,
        metric=metric,
    )
    phase = "ppo" if config.rl.advantage == "gae" else "grpo"
    train_with_reward(config, run, policy, samples, evaluation, phase=phase)
    return policy
