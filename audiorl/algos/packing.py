"""Laying experiences end to end in one row, with one copy of the prompt for each group.

A row consists of *spans*. Without sharing, a span is a whole experience. With sharing, a group's prompt is one
span and each response another whose parent is the prompt: a response attends to its parent and to itself, and its
positions continue from the prompt's end (Prefix Grouper, arXiv 2506.05433)::

    row        p p p p  a a a  b b        group of two responses a, b to the prompt p
    position   0 1 2 3  4 5 6  4 5
    span_ids   0 0 0 0  1 1 1  2 2        span_parents = [-1, 0, 0]
    predecessor of the first b: the last p
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import groupby

import torch
from torch import Tensor

from audiorl.algos.experience import Experience, PackedBatch
from audiorl.audio import AudioClip
from audiorl.pictures import Picture


def pack_experiences(experiences: Sequence[Experience], share_prompts: bool = True) -> PackedBatch:
    """Make one row of several experiences. Those of one group must lie side by side to share their prompt."""
    parts: list[tuple[Experience, slice]] = []  # of each span
    columns: dict[str, list[Tensor]] = {"position_ids": [], "span_ids": [], "predecessor": []}
    span_parents: list[int] = []
    audio: list[AudioClip] = []
    images: list[Picture] = []
    beside_picture: list[bool] = []
    source: list[Tensor] = []
    at = 0

    def add(e: Experience, part: slice, first_position: int, span_parent: int, predecessor: int) -> Tensor:
        nonlocal at
        length = len(e.ids[part])
        rows = torch.arange(at, at + length)
        parts.append((e, part))
        columns["position_ids"].append(torch.arange(first_position, first_position + length))
        columns["span_ids"].append(torch.full((length,), len(span_parents)))
        columns["predecessor"].append(torch.cat([torch.tensor([predecessor]), rows[:-1]]) if length else rows)
        span_parents.append(span_parent)
        at += length
        return rows

    for group in shared_groups(experiences) if share_prompts else ([e] for e in experiences):
        first = group[0]
        audio.extend(first.audio)
        images.extend(first.images)
        beside_picture += [bool(first.images)] * len(first.audio)
        if len(group) == 1:
            source.append(add(first, slice(None), 0, -1, -1))
            continue
        p, prompt_span = first.prompt_length, len(span_parents)
        prompt_rows = add(first, slice(p), 0, -1, -1)
        for e in group:
            rows = add(e, slice(p, None), p, prompt_span, int(prompt_rows[-1]))
            source.append(torch.cat([prompt_rows, rows]))
    widths = {e.codes.shape[1] for e in experiences if e.codes is not None}
    assert len(widths) < 2, f"frames of {sorted(widths)} codebooks in one batch"
    for e, part in parts if widths else ():
        codes, code_mask = e.codes, e.code_mask
        if codes is None or code_mask is None:  # without frames among others with them
            codes = torch.full((len(e), *widths), -1)
            code_mask = torch.nn.functional.pad(e.loss_mask[:, None], (0, max(widths) - 1))
        columns.setdefault("codes", []).append(codes[part])
        columns.setdefault("code_mask", []).append(code_mask[part])
    return PackedBatch(
        ids=torch.cat([e.ids[part] for e, part in parts]),
        loss_mask=torch.cat([e.loss_mask[part] for e, part in parts]),
        span_parents=torch.tensor(span_parents),
        audio=tuple(audio),
        images=tuple(images),
        source=tuple(source),
        flows=tuple(e.flow for e in experiences if e.flow is not None),
        beside_picture=tuple(beside_picture),
        **{name: torch.cat(tensors) for name, tensors in columns.items()},
    )


def shared_groups(experiences: Iterable[Experience]) -> list[list[Experience]]:
    """Neighbours that may share a prompt: equal group, equal prompt tokens, all their audio inside the prompt."""
    groups: list[list[Experience]] = []
    for _, neighbours in groupby(experiences, key=lambda e: e.group_id):
        for e in neighbours:
            last = groups[-1] if groups else None
            if last and e.group_id and last[0].group_id == e.group_id and _same_prompt(last[0], e):
                last.append(e)
            else:
                groups.append([e])
    return groups


def _same_prompt(a: Experience, b: Experience) -> bool:
    p = a.prompt_length
    return (
        p == b.prompt_length
        and p > 0
        and _one_turn(a)
        and _one_turn(b)
        and torch.equal(a.ids[:p], b.ids[:p])
        and [c.key for c in a.audio] == [c.key for c in b.audio]
        and a.images == b.images
        and (a.codes is None) == (b.codes is None)
        and (a.codes is None or b.codes is None or torch.equal(a.codes[:p], b.codes[:p]))
    )


def _one_turn(e: Experience) -> bool:
    """Nothing is observed after the prompt. Codes that the delay pattern forces count as part of the response."""
    if e.codes is None:
        return bool(e.loss_mask[e.prompt_length :].all())
    return e.segment is not None and bool((e.segment == 0).all())


def attention_mask(span_ids: Tensor, span_parents: Tensor) -> Tensor:
    """[T, T] bool: row i sees row j when j <= i and j's span is i's span or its parent."""
    own = span_ids[:, None] == span_ids[None, :]
    shared = span_parents[span_ids][:, None] == span_ids[None, :]
    causal = torch.ones(len(span_ids), len(span_ids), dtype=torch.bool, device=span_ids.device).tril()
    return (own | shared) & causal


def micro_batches(experiences: Sequence[Experience], budget: int, share_prompts: bool = True) -> list[list[int]]:
    """Indices of experiences in packs of at most `budget` row tokens, shared prompts counted once.

    Neighbours that share a prompt stay together as far as the budget allows; beyond it the prompt is repeated. The
    rest is best fit. A single experience longer than the budget gets a pack of its own.
    """
    units: list[list[int]] = []
    costs: list[int] = []
    for i, e in enumerate(experiences):
        last = experiences[units[-1][-1]] if units and share_prompts else None
        joins = last is not None and e.group_id != "" and e.group_id == last.group_id and _same_prompt(last, e)
        if joins and costs[-1] + e.rows - e.prompt_length <= budget:
            units[-1].append(i)
            costs[-1] += e.rows - e.prompt_length
        else:
            units.append([i])
            costs.append(e.rows)
    return [[i for unit in members for i in units[unit]] for members in pack(costs, budget)]


def balance(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of `costs` split over ranks so that the largest sum is small: longest first, to the emptiest rank.

    At most 4/3 - 1/(3·ranks) times the best possible (Graham 1969). Indices of a rank ascend.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = heappop(heap)
        shares[rank].append(i)
        heappush(heap, (load + costs[i], rank))
    return [sorted(share) for share in shares]


def sorted_batches(lengths: Sequence[int], size: int, rng: random.Random) -> list[list[int]]:
    """Batches of `size` indices of similar length, in random order: sort, cut, shuffle (LongAlign, arXiv 2401.18058).

    Equal lengths are in random order. The last batch may be smaller.
    """
    order = sorted(rng.sample(range(len(lengths)), len(lengths)), key=lambda i: lengths[i])
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    rng.shuffle(batches)
    return batches


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `budget` tokens: best fit, longest first, in near-linear time.

    Every sequence goes to the fullest bin that still has room for it. Equal lengths are placed together, and bins with
    equal room are one stack, found through a bit set of the rooms there are. Indices inside a bin ascend; the bins do
    not depend on the order of equal lengths. A sequence longer than the budget gets a bin of its own.
    Raises ValueError for a budget below 1 or a length below 0.
    """
    if budget < 1:
        raise ValueError(f"pack: the budget must be at least 1 token, got {budget}")
    by_length: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        by_length.setdefault(length, []).append(i)
    if by_length and min(by_length) < 0:
        raise ValueError(f"pack: a length is {min(by_length)}")
    bins: list[list[int]] = []
    rooms: dict[int, list[list[int]]] = {}
    present = 0  # bit r is set when some bin has room for exactly r more tokens

    for length in sorted(by_length, reverse=True):
        left = by_length[length][::-1]
        if length > budget:
            bins += [[i] for i in left[::-1]]
            continue
        while left:
            fitting = present >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                stack = rooms[room]
                chosen = stack.pop()
                if not stack:
                    present ^= 1 << room
            else:
                room, chosen = budget, []
                bins.append(chosen)
            count = min(room // length, len(left)) if length else len(left)
            chosen += left[: -count - 1 : -1]
            del left[-count:]
            room -= count * length
            if room or 0 in by_length:
                rooms.setdefault(room, []).append(chosen)
                present |= 1 << room
    return [sorted(members) for members in bins]
