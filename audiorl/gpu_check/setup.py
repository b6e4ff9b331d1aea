"""What a check is and what it says, and the random models and packs that the checks run on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from audiorl.algos.experience import Experience
from audiorl.config import ModelConfig
from audiorl.models import AudioPolicy
from audiorl.models.families.text import TextDecoder
from audiorl.models.tiny import tiny_tokenizer
from audiorl.types import Message, Sample

State = Literal["pass", "fail", "skipped", "measured"]


@dataclass(frozen=True)
class Outcome:
    """Result of one check. "measured" has no bound that it could miss."""

    state: State
    detail: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scale:
    """Sizes of the models and packs that are checked.

    A pack has `groups` of `group_size` responses of `response` tokens to a prompt of `prompt`. `decoded` rollouts are
    decoded together; of `repeats` timed runs the median counts.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    layers: int
    groups: int
    group_size: int
    prompt: int
    response: int
    decoded: int
    repeats: int

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        """Tokens of a pack with shared prompts."""
        return self.groups * (self.prompt + self.group_size * self.response)


GPU_SCALE = Scale(2048, 11_008, 16, 2, 151_936, 2, 3, 8, 600, 256, 32, 5)
"""Two layers of Qwen2.5-3B's width; a pack of 7,944 tokens."""
PRETEND_SCALE = Scale(128, 256, 4, 2, 400, 2, 2, 3, 40, 12, 4, 2)
"""Small enough for the CPU in seconds."""


@dataclass(frozen=True)
class Setup:
    """Where and how large the checks run."""

    device: torch.device
    scale: Scale

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The type in which training computes."""
        return torch.bfloat16 if self.is_gpu else torch.float32

    def wait(self) -> None:
        """Wait until the device has done what it was given."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], repeats: int | None = None) -> float:
        """Return the median time of a run, after one that is not timed."""
        run()
        times = []
        for _ in range(repeats or self.scale.repeats):
            self.wait()
            began = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times)


Check = Callable[[Setup], Outcome]


def within(error: float, bound: float, what: str, **numbers: float) -> Outcome:
    """Pass up to `bound`; NaN fails."""
    state: State = "pass" if error <= bound else "fail"
    return Outcome(state, f"{what} {error:.2g}, at most {bound:g}", {"error": error, "bound": bound, **numbers})


def at_least(value: float, target: float, detail: str, setup: Setup, **numbers: float) -> Outcome:
    """Pass from `target` on a GPU; elsewhere it is a measurement without meaning for one."""
    if not setup.is_gpu:
        return Outcome("measured", detail, numbers)
    return Outcome("pass" if value >= target else "fail", f"{detail}; target {target:g}", {**numbers, "target": target})


# -- models and packs --------------------------------------------------------------------------------------------------

TEXTS = ["What is said, and by whom? yes no why English Spanish French"] * 20
"""From which the tokenizer learns its few words."""


def full_width_policy(setup: Setup, config: ModelConfig) -> AudioPolicy:
    """Build a text decoder of the scale's width in the config's dtype, the same weights every time."""
    scale, tokenizer = setup.scale, tiny_tokenizer(TEXTS, 400)
    size = Qwen2Config(
        hidden_size=scale.hidden,
        intermediate_size=scale.intermediate,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        num_key_value_heads=scale.kv_heads,
        tie_word_embeddings=False,
        vocab_size=max(scale.vocabulary, len(tokenizer)),
        max_position_embeddings=32_768,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[setup.device] if setup.is_gpu else []), setup.device:
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(size)
        for weight in model.parameters():
            if weight.dim() == 2:  # transformers' are so small that every token is as likely as another
                torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        model.to(getattr(torch, config.dtype))
    return AudioPolicy(model, tokenizer, None, TextDecoder(tokenizer), config)


def experiences(scale: Scale) -> list[Experience]:
    """Return groups of random answers of equal length, with random advantages."""
    generator = torch.Generator().manual_seed(0)
    out: list[Experience] = []
    for group in range(scale.groups):
        prompt = torch.randint(0, 300, (scale.prompt,), generator=generator)
        for _ in range(scale.group_size):
            ids = torch.cat([prompt, torch.randint(0, 300, (scale.response,), generator=generator)])
            mask = torch.arange(len(ids)) >= len(prompt)
            advantages = torch.where(mask, float(torch.randn((), generator=generator)), 0.0)
            e = Experience(ids, mask, len(prompt), group_id=str(group), name=f"rollout {len(out)}")
            zeros = torch.zeros(len(ids))
            out.append(e.replace(advantages=advantages, rewards=zeros, rollout_logprobs=torch.where(mask, -5.0, zeros)))
    return out


def spans(scale: Scale) -> list[tuple[int, int, int, int]]:
    """Return the spans of a pack of `experiences`."""
    out: list[tuple[int, int, int, int]] = []
    at = 0
    for _ in range(scale.groups):
        parent = (at, at + scale.prompt)
        out.append((*parent, 0, 0))
        for start in range(parent[1], parent[1] + scale.group_size * scale.response, scale.response):
            out.append((start, start + scale.response, *parent))
        at = out[-1][1]
    return out


def largest(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, relative to the largest value of `b`."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))


def question() -> Sample:
    return Sample("question", (Message("user", ("What is said, and by whom?",)),), ("yes",))
