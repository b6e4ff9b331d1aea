"""Between experiences and packed rows: gather the sampled tokens of a field, fill a field from a forward pass.

Shapes: L tokens of an experience, N sampled tokens of a pack, Q codebooks where frames are among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from audiorl.algos.experience import Experience, PackedBatch, PolicyOutput
from audiorl.algos.packing import micro_batches, pack, pack_experiences, shared_groups
from audiorl.models import AudioPolicy
from audiorl.train.checks import check_finite


def counts(experiences: Sequence[Experience]) -> list[int]:
    """Sampled tokens of each."""
    return [e.num_sampled for e in experiences]


def repeat_each(values: Sequence[float], lengths: Sequence[int]) -> Tensor:
    """Return each value repeated as often as its length says, [N]: float32, or int64 for whole numbers."""
    # A rank may have no experience of a mini-batch: without a dtype an empty list would become floats.
    return torch.repeat_interleave(torch.tensor(values), torch.tensor(lengths, dtype=torch.long))


def gather(experiences: Sequence[Experience], name: str) -> Tensor | None:
    """Return the sampled tokens' entries [N] of a field, in the order of the packed row; None where it is not filled
    in.

    [N, Q] where one of them has entries for every codebook; a text token's stands in column 0.
    """
    streams = [getattr(e, name) for e in experiences]
    if any(s is None for s in streams):
        return None
    return torch.cat(widened([s[e.loss_mask] for s, e in zip(streams, experiences, strict=True)]))


def widened(streams: Sequence[Tensor]) -> list[Tensor]:
    """Streams [L] packed with streams [L, Q]: all [L, Q], with zeros behind column 0."""
    width = max((s.shape[1] for s in streams if s.dim() == 2), default=0)
    return [s if s.dim() == 2 or not width else nn.functional.pad(s[:, None], (0, width - 1)) for s in streams]


def sum_codebooks(values: Tensor) -> Tensor:
    """Log-probs [N] of tokens and frames from those of their codes [N, Q], which are independent given the past."""
    return values if values.dim() == 1 else values.sum(-1)


def logprobs_by_code(out: PolicyOutput) -> Tensor:
    """Log-probs [N, Q] by code where the batch has frames, else [N]."""
    return out.logprobs if out.code_logprobs is None else out.code_logprobs


def idle_batch(policy: AudioPolicy) -> PackedBatch:
    """Return a pass through `policy` that says nothing: one token after another, no audio."""
    end = policy.end_id
    return pack_experiences([Experience(torch.tensor([end, end]), torch.tensor([False, True]), prompt_length=1)])


def fill(
    experiences: Sequence[Experience],
    name: str,
    forward: Callable[[PackedBatch], Tensor],
    budget: int,
    share_prompts: bool,
) -> list[Experience]:
    """`fill_fields` of one field."""
    return fill_fields(experiences, lambda batch: {name: forward(batch)}, budget, share_prompts)


@torch.no_grad()
def fill_fields(
    experiences: Sequence[Experience],
    forward: Callable[[PackedBatch], Mapping[str, Tensor]],
    budget: int,
    share_prompts: bool,
) -> list[Experience]:
    """Return the experiences with the fields that `forward` gives, by name, for their sampled tokens; 0 elsewhere.

    [L] for experiences of text, [L, Q] for those with frames where `forward` gives [N, Q]. Raises FloatingPointError
    naming the rollout where a value is not finite.
    """
    filled = list(experiences)
    for indices in micro_batches(experiences, budget, share_prompts):
        part = [experiences[i] for i in indices]
        for name, given in forward(pack_experiences(part, share_prompts)).items():
            flat = given.float().cpu()
            check_finite(part, flat, name)
            for i, values in zip(indices, flat.split(counts(part)), strict=True):
                if experiences[i].codes is None and values.dim() == 2:
                    values = values[:, 0]  # a text packed with frames: its log-probs are [L] in any other pack
                stream = torch.zeros(len(experiences[i]), *values.shape[1:])
                stream[experiences[i].loss_mask] = values
                filled[i] = filled[i].replace(**{name: stream})
    return filled


def group_packs(groups: Sequence[Sequence[Experience]], budget: int) -> list[list[int]]:
    """Indices of groups in packs of at most `budget` row tokens; groups stay whole, a shared prompt counts once."""
    return pack([sum(map(_row_tokens, shared_groups(group))) for group in groups], budget)


def _row_tokens(sharing: Sequence[Experience]) -> int:
    return sharing[0].prompt_length + sum(len(e) - e.prompt_length for e in sharing)
