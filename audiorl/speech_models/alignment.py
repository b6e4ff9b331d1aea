"""Where the words of a text are said, by the label probabilities of a recogniser that was trained by CTC.

Shapes: T frames of a clip, V labels with the blank, S labels of a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from audiorl.speech_models.protocol import AlignedWord


def ctc_path(logprobs: Tensor, labels: Sequence[int], blank: int) -> list[tuple[int, int]] | None:
    """The first frame of each of the S `labels` on the most probable CTC path, and the frame after its last one.

    logprobs: [T, V]. None where no path exists: T is less than S, plus 1 for each pair of equal neighbours. Source: the
    states of Graves et al. 2006, section 4.1, with the maximum in place of the sum.
    """
    repeats = sum(a == b for a, b in pairwise(labels))
    if not labels or len(labels) + repeats > len(logprobs):
        return None
    states = torch.full((2 * len(labels) + 1,), blank)
    states[1::2] = torch.tensor(labels)
    skips = torch.zeros(len(states), dtype=torch.bool)  # from the label before, over the blank
    skips[3::2] = states[3::2] != states[1:-2:2]
    emitted_TS = logprobs.float().cpu()[:, states]
    best_S = torch.full((len(states),), -torch.inf)
    best_S[:2] = emitted_TS[0, :2]
    steps = torch.zeros(len(logprobs), len(states), dtype=torch.long)
    for t in range(1, len(logprobs)):
        one = torch.nn.functional.pad(best_S[:-1], (1, 0), value=-torch.inf)
        two = torch.nn.functional.pad(best_S[:-2], (2, 0), value=-torch.inf).masked_fill(~skips, -torch.inf)
        best_S, steps[t] = torch.stack([best_S, one, two]).max(0)
        best_S = best_S + emitted_TS[t]
    state = len(states) - 1 if best_S[-1] >= best_S[-2] else len(states) - 2
    spans = [(0, 0)] * len(labels)
    for t in range(len(logprobs) - 1, -1, -1):
        if state % 2:
            spans[state // 2] = (t, max(t + 1, spans[state // 2][1]))
        state -= int(steps[t, state])
    return spans


def ctc_log_probability(logprobs: Tensor, labels: Sequence[int], blank: int) -> float:
    """ln p(labels) of a clip, summed over all CTC paths (Graves et al. 2006, equation 8); -inf where there is none.

    logprobs: [T, V].
    """
    if not len(logprobs):
        return -math.inf
    loss = torch.nn.functional.ctc_loss(
        logprobs.float().cpu()[:, None],
        torch.tensor([labels]),
        torch.tensor([len(logprobs)]),
        torch.tensor([len(labels)]),
        blank=blank,
        reduction="sum",
    )
    return -float(loss)


def align_words(
    logprobs: Tensor,
    words: Sequence[str],
    labels: Sequence[Sequence[int]],
    between: int | None,
    blank: int,
    seconds: float,
    read: Callable[[Tensor], str],
) -> list[AlignedWord]:
    """The `words` in a clip of `seconds`, whose frames are `logprobs` [T, V].

    labels: of each word; between: the label between two words, None for none. `read` gives the transcript of some of
    the frames. A text that is too long for the clip has no path: its words share the clip equally.
    """
    if not words:
        return []
    text: list[int] = []
    places = []
    for word in labels:
        text += [between] if text and between is not None else []
        places.append((len(text), len(text) + len(word)))
        text += word
    path = ctc_path(logprobs, text, blank) if all(labels) else None
    if path is None:
        edges = [round(i * len(logprobs) / len(words)) for i in range(len(words) + 1)]
    else:
        inner = [(path[b - 1][1] + path[c][0]) // 2 for (_, b), (c, _) in pairwise(places)]
        edges = [0, *inner, len(logprobs)]
    scale = seconds / max(len(logprobs), 1)
    return [
        AlignedWord(word, read(logprobs[a:b]) if b > a else "", a * scale, b * scale)
        for word, (a, b) in zip(words, pairwise(edges), strict=True)
    ]
