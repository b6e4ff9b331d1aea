"""Supervised fine-tuning on assistant turns, with the packed forward pass of everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from audiorl.algos.losses import token_weights
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.config import OptimConfig, SFTConfig
from audiorl.models import AudioPolicy
from audiorl.train.optim import Optimizer
from audiorl.types import Experience, Sample


@dataclass(frozen=True)
class Example:
    """A prompt and the assistant's turn to learn."""

    sample: Sample
    target: str


def experience(policy: AudioPolicy, example: Example) -> Experience:
    """The tokens of an example, the loss on its target and on the token that ends the turn."""
    prompt = policy.prompt_ids(example.sample)
    target = policy.tokenizer.encode(example.target, add_special_tokens=False)
    end = policy.tokenizer.get_added_vocab().get("<|im_end|>", policy.tokenizer.eos_token_id)
    ids = torch.cat([prompt, torch.tensor([*target, end])])
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[len(prompt) :] = True
    return Experience(ids=ids, loss_mask=mask, prompt_length=len(prompt), audio=example.sample.audio)


class SFTWorker:
    """Cross-entropy on target tokens, divided once by the target tokens of the whole batch."""

    def __init__(self, policy: AudioPolicy, sft: SFTConfig, optim: OptimConfig):
        self.policy = policy
        self.sft = sft
        self.optimizer = Optimizer(policy.trainable(), optim, sft.steps)

    def train(self, examples: Sequence[Example]) -> dict[str, float]:
        experiences = sorted((experience(self.policy, e) for e in examples), key=len)
        weight = token_weights([int(e.loss_mask.sum()) for e in experiences], "token-mean")[0]
        self.optimizer.zero_grad()
        total, entropy = 0.0, 0.0
        for indices in micro_batches(experiences, self.sft.micro_batch_tokens, share_prompts=False):
            out = self.policy.forward(pack_experiences([experiences[i] for i in indices], share_prompts=False))
            loss = -weight * out.logprobs.sum()
            loss.backward()
            total += float(loss.detach())
            entropy += weight * float(out.entropy.detach().sum())
        metrics = {"sft/loss": total, "policy/entropy": entropy} | self.optimizer.step()
        self.policy.weights_changed()
        return metrics

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"optimizer": self.optimizer.state()}

    def load(self, state: dict[str, dict[str, torch.Tensor]], where: str) -> None:
        self.optimizer.load(state["optimizer"], where)
