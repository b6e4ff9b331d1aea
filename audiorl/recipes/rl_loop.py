"""GRPO on questions about audio, from the prompt to the optimizer step in one file. Read this one first.

    python -m audiorl.recipes.rl_loop                                     # a tiny random model, bundled questions
    python -m audiorl.recipes.rl_loop --path Qwen/Qwen2.5-Omni-3B --steps 20

This is plain on-policy GRPO (arXiv 2402.03300): one update for each batch of rollouts, so that the ratio is 1 and
needs no old log-probs; no KL to a reference; one process. What the trainer adds to these lines, with the same numbers:
several updates, clipping, KL, a critic, several processes, checkpoints (`audiorl.train.rl`). Recipes with data,
evaluation and a report are `audio_qa.py` and its neighbours.

Shapes: G rollouts of a step, N sampled tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from audiorl.algos.advantages import group_relative
from audiorl.algos.experience import Experience
from audiorl.algos.losses import LossInputs, ppo_clip_loss, token_weights
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.config import ModelConfig, OptimConfig, SamplingConfig, torch_device
from audiorl.data.bundled import bundled_set
from audiorl.data.schedule import batch_of_step
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.families.qwen_omni import tiny as tiny_qwen_omni
from audiorl.protocols import Request
from audiorl.rewards import AnswerAccuracy
from audiorl.rewards.combine import scored_rollouts
from audiorl.rollout.hf import HFEngine
from audiorl.train.optim.adamw import Optimizer
from audiorl.types import Rollout, Score


@dataclass(frozen=True)
class Config:
    """Options of the loop."""

    path: str = "tiny"
    """Folder or hub id of the model; `tiny`: a small random one."""
    steps: int = 2
    """Batches of rollouts, each with one update."""
    prompts_per_step: int = 2
    """Questions of a step."""
    group_size: int = 4
    """Answers to each question."""
    micro_batch_tokens: int = 8192
    """Tokens of one forward pass."""
    lr: float = 1e-4
    """Learning rate."""
    max_new_tokens: int = 16
    """Most tokens of an answer."""
    seed: int = 0
    """Seed of the data's order and of sampling."""
    device: str = "auto"
    """Where the model is."""


def main(config: Config) -> AudioPolicy:
    """Train a policy, printing reward and loss of every step. Returns it."""
    torch.manual_seed(config.seed)
    policy = load(config)
    questions = bundled_set("bundled", think=False, seed=config.seed)
    engine = HFEngine(policy, SamplingConfig(temperature=1.0, max_new_tokens=config.max_new_tokens))
    optimizer = Optimizer(policy.trainable(), OptimConfig(lr=config.lr), config.steps)

    for step in range(config.steps):
        # Sample a group of answers to each question. The engine shares the policy's weights, so nothing is synced.
        samples = batch_of_step(questions, step, config.prompts_per_step, config.seed)
        requests = [
            Request(sample, n=config.group_size, seed=config.seed + step, group_id=f"{step}/{i}")
            for i, sample in enumerate(samples)
        ]
        rollouts = scored_rollouts(reward, engine.generate(requests))

        # Lay each rollout out as one stream of tokens, and give its advantage to every token that was sampled.
        experiences = with_advantages(rollouts)

        # Forward, loss, backward; then one step.
        optimizer.zero_grad()
        loss = backward(policy, experiences, config.micro_batch_tokens)
        metrics = optimizer.step()
        policy.weights_changed()  # what was computed from the old weights, such as encoded audio, is forgotten

        scores_G = [r.score.total for r in rollouts if r.score]
        mean = sum(scores_G) / len(scores_G)
        print(f"step {step + 1}  reward {mean:.3f}  loss {loss:+.4f}  grad_norm {metrics['grad_norm']:.3f}")
    return policy


def reward(rollouts: Sequence[Rollout]) -> list[Score]:
    """Score 1 for the right answer, and up to 0.1 for writing words: a random model's only way to learn something."""
    scores = []
    for rollout, right in zip(rollouts, AnswerAccuracy()(rollouts), strict=True):
        letters = sum(c.isalpha() or c.isspace() for c in rollout.text) / max(len(rollout.text), 1)
        scores.append(Score(right.total + 0.1 * letters, {"accuracy": right.total, "letters": letters}))
    return scores


def load(config: Config) -> AudioPolicy:
    """Return the model that `config.path` names."""
    model = ModelConfig(device=config.device)
    if config.path != "tiny":
        return load_policy(config.path, model)
    policy = tiny_qwen_omni(whisper=False, config=model)
    policy.model.to(torch_device(config.device))
    return policy


def with_advantages(rollouts: list[Rollout]) -> list[Experience]:
    """Return experiences with GRPO's advantage, (r - mean) / (std + eps) of the group, on every sampled token."""
    experiences = [Experience.from_rollout(r) for r in rollouts]
    scores_G = torch.tensor([e.score for e in experiences], dtype=torch.float32)
    advantages_G = group_relative(scores_G, [e.group_id for e in experiences])
    return [e.replace(advantages=a * e.loss_mask) for e, a in zip(experiences, advantages_G, strict=True)]


def backward(policy: AudioPolicy, experiences: list[Experience], budget: int) -> float:
    """Add the gradients of the policy loss, in packs of at most `budget` tokens. Returns the loss.

    Token weights are made once from the lengths of all rollouts, so that the sum over packs is the loss of the step:
    here the mean over rollouts of the mean over their tokens.
    """
    weights = token_weights([e.num_sampled for e in experiences], "sequence-mean-token-mean")
    total = 0.0
    for indices in micro_batches(experiences, budget):
        members = [experiences[i] for i in indices]
        # One row of tokens for all of them; answers to one question share a copy of its tokens and audio.
        batch = pack_experiences(members)
        logprobs_N = policy.forward(batch).logprobs
        lengths = torch.tensor([e.num_sampled for e in members])
        weights_N = torch.tensor([weights[i] for i in indices]).repeat_interleave(lengths).to(logprobs_N.device)
        advantages_N = sampled(members).to(logprobs_N.device)
        # On policy the old log-probs are the new ones: the ratio is 1, its gradient that of the log-prob.
        # The loss is then about 0, as a group's advantages sum up to 0. Only its gradient says something.
        loss, _ = ppo_clip_loss(LossInputs(logprobs_N, logprobs_N.detach(), advantages_N, weights_N))
        loss.backward()
        total += float(loss.detach())
    return total


def sampled(experiences: list[Experience]) -> Tensor:
    """Return the advantages [N] of the sampled tokens, in the order of the log-probs of `AudioPolicy.forward`."""
    return torch.cat([e.advantages[e.loss_mask] for e in experiences if e.advantages is not None])


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config))
