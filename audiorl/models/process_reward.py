"""Process reward: the decoder says at the marker that ends each step of an answer whether the step was good.

Shapes: K step markers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from audiorl.algos.experience import Experience
from audiorl.algos.packing import micro_batches, pack_experiences
from audiorl.models.policy import AudioPolicy
from audiorl.models.prompts import wants_speech
from audiorl.types import Sample


@dataclass(frozen=True, eq=False)
class MarkedAnswer:
    """An answer as tokens, and the positions [K] of its step markers' last tokens."""

    experience: Experience
    markers: Tensor


class ProcessRewardModel:
    """Reads at each step's marker how probable the good token is against the bad one."""

    def __init__(self, policy: AudioPolicy, marker: str, good: str, bad: str):
        def ids(text: str) -> list[int]:
            tokens = list(policy.tokenizer.encode(text, add_special_tokens=False))
            if not tokens:
                raise ValueError(f"the text {text!r} has no token")
            return tokens

        self.policy = policy
        self.marker = ids(marker)
        self.label_ids = (ids(good)[0], ids(bad)[0])
        if self.label_ids[0] == self.label_ids[1]:
            raise ValueError(f"{good!r} and {bad!r} begin with the same token; choose two that differ")

    def mark(self, sample: Sample, steps: Sequence[str], *, sampled: bool = False) -> MarkedAnswer:
        """Return the prompt, then each step with the marker. Raises ValueError for streams and prompts of speech, and
        for reserved tokens in steps, unless a policy `sampled` them."""
        if sample.turns or wants_speech(sample):
            what = "a stream" if sample.turns else "a prompt that opens speech"
            raise ValueError(f"sample {sample.id!r}: {what} is not answered in steps of text; leave it out")
        prompt = self.policy.prompt(sample)
        written: list[int] = []
        ends = []
        for step in steps:
            if not sampled:
                self.policy.prompts.check_learned(step)
            written += [*self.policy.tokenizer.encode(step, add_special_tokens=False), *self.marker]
            ends.append(len(prompt) + len(written) - 1)
        whole = prompt.followed_by(torch.tensor(written, dtype=torch.long), ())
        own = torch.arange(len(whole)) >= len(prompt)
        code_mask = None if whole.codes is None else nn.functional.pad(own[:, None], (0, whole.codes.shape[1] - 1))
        experience = Experience(
            whole.ids,
            own,
            len(prompt),
            whole.audio,
            group_id=sample.id,
            codes=whole.codes,
            code_mask=code_mask,
            name=repr(sample.id),
            images=whole.images,
        )
        return MarkedAnswer(experience, torch.tensor(ends, dtype=torch.long))

    def logits(self, answers: Sequence[MarkedAnswer], share_prompts: bool = False) -> Tensor:
        """Return [K, V] at all markers of a pack, answer by answer; neighbours of one sample may share its prompt."""
        packed = pack_experiences([a.experience for a in answers], share_prompts)
        with self.policy.autocast():
            hidden = self.policy.hidden(packed)
            places = torch.cat([source[a.markers] for source, a in zip(packed.source, answers, strict=True)])
            return self.policy.logits(hidden[places.to(hidden.device)])

    @torch.no_grad()
    def score_steps(self, items: Sequence[tuple[Sample, Sequence[str]]], budget: int = 8192) -> list[list[float]]:
        """Score each step: the probability that it is good. Neighbours with the same sample share their prompt."""
        answers = [self.mark(sample, steps, sampled=True) for sample, steps in items]
        out: list[list[float]] = [[] for _ in answers]
        for indices in micro_batches([a.experience for a in answers], budget):
            part = [answers[i] for i in indices]
            good = self.logits(part, share_prompts=True)[:, list(self.label_ids)].float().softmax(-1)[:, 0]
            for i, values in zip(indices, good.split([len(a.markers) for a in part]), strict=True):
                out[i] = values.tolist()
        return out
