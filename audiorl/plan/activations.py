"""What a forward pass leaves in memory for its backward pass, in bytes.

After Korthikanti et al. (arXiv 2205.05198), who count a GPT layer; here the terms are those of the layers that audiorl
trains: RMS norms in float32, rotary positions, grouped keys and values, a gated feed-forward block. Tests hold them
against what `torch.autograd.graph.saved_tensors_hooks` sees.

Symbols: T tokens of a packed row, H decoder width, I feed-forward width, A = heads x head width, K the same of keys, c
bytes of a number in the compute dtype. A layer whose weights are trained keeps, per token:

    norms       x in float32, the normed x, and its product with the weight, twice     2 (4 + 2c) H
    attention   queries, keys, values, the output                                      2c (A + K)
    softmax     its logarithmic sum, float32                                           4 x heads
    gated FFN   gate, its activation, up, their product                                4c I

Under autocast every linear keeps its own cast of its input. With adapters a frozen weight does not keep its input, but
an adapter does, cast to the adapter's dtype where that is another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from audiorl.plan.sizes import Shape, Tower

Attention = Literal["mask", "span", "varlen"]


@dataclass(frozen=True)
class Precision:
    """Bytes of a number: `weights` as held, `compute` in matrix products, `adapter` of low-rank weights."""

    weights: int
    compute: int
    adapter: int

    @property
    def autocast(self) -> bool:
        return self.compute != self.weights

    @property
    def residual(self) -> int:
        """Of what flows from layer to layer."""
        return max(self.weights, self.compute)


@dataclass(frozen=True)
class Pack:
    """One packed row: its tokens, those that are predicted, and what its responses see of their prompts.

    `copied`: the rows that a response sees, summed over responses. `pairs`: (its rows) x (those that it sees), summed.
    """

    tokens: int
    predicted: int
    copied: int = 0
    pairs: int = 0


def pack_of(budget: int, prompt: int, response: int, group: int, share_prompts: bool = True) -> Pack:
    """A row of at most `budget` tokens, filled with responses whose groups share a prompt (or repeat it)."""
    if not share_prompts:
        sequences = budget // (prompt + response)
        return Pack(sequences * (prompt + response), sequences * response)
    whole, rest = divmod(budget, prompt + group * response)
    more = max(rest - prompt, 0) // response
    sizes = [group] * whole + [more] * (more > 0)
    shared = sum(n for n in sizes if n > 1)  # a single response lies behind its prompt, in one span with it
    return Pack(
        tokens=len(sizes) * prompt + sum(sizes) * response,
        predicted=sum(sizes) * response,
        copied=shared * (prompt + response),
        pairs=shared * response * (prompt + response),
    )


def layer_bytes(shape: Shape, pack: Pack, precision: Precision, attention: Attention) -> float:
    """What one decoder layer keeps of a packed row."""
    t, c = pack.tokens, precision.compute
    a, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Under a mask keys are repeated for every query head. Otherwise a response has its own copy of the keys that it
    # sees, and span by span the pieces of the output are stored in addition to the whole.
    keys = 2 * t * a if attention == "mask" else 2 * (t + pack.copied) * k
    masks = {"mask": t * t, "span": pack.pairs, "varlen": 0}[attention]
    attended = c * ((3 if attention == "span" else 2) * t * a + keys + masks) + 4 * shape.heads * t
    return t * (_norms(shape, precision) + _inputs(shape, precision) + _feed_forward(shape, c)) + attended


def _norms(shape: Shape, precision: Precision) -> float:
    """Per token: the norms' inputs, and for trained weights what these are multiplied with."""
    width = 2 * shape.hidden
    if shape.qk_norm:
        width += (shape.heads + shape.kv_heads) * shape.head_dim
    return width * (4 if shape.rank else 4 + precision.residual)


def _inputs(shape: Shape, precision: Precision) -> float:
    """Per token: what the linears behind the norms keep of their inputs; with adapters also the other linears."""
    c, h = precision.compute, shape.hidden
    if shape.rank:
        ranks = len(shape.adapted) * shape.rank
        if precision.autocast:
            return c * (sum(shape.adapted) + ranks)
        if precision.adapter != c:  # a copy for each adapter
            return precision.adapter * (sum(shape.adapted) + ranks)
        shared = min(sum(w == h for w in shape.adapted), 2) * h + (shape.intermediate in shape.adapted) * (
            shape.intermediate
        )
        return c * (shared + ranks)
    if precision.autocast:
        return c * h * (3 + (2 if shape.experts == 1 else 1))
    return c * 2 * h


def _feed_forward(shape: Shape, c: int) -> float:
    """Per token, of all experts that it goes through; with experts also what is gathered for them and weighed."""
    saved = (3 if shape.rank else 4) * shape.intermediate
    if shape.experts > 1:
        saved += (1 if shape.rank else 2) * shape.hidden
    if shape.codes:
        saved += 2 * shape.hidden  # rows sorted by kind and put back
    return c * shape.experts * saved


def decoder_bytes(shape: Shape, pack: Pack, precision: Precision, attention: Attention, checkpointing: bool) -> float:
    """What the decoder keeps of a row. With checkpointing (Chen et al., arXiv 1604.06174) the inputs of all layers, and
    everything of the one that is being computed again."""
    layer = layer_bytes(shape, pack, precision, attention)
    ends = pack.tokens * shape.hidden * (4 if shape.rank else 4 + precision.residual)  # the last norm
    if not checkpointing:
        return shape.layers * layer + ends
    return shape.layers * pack.tokens * shape.hidden * precision.residual + layer + ends


def working_bytes(shape: Shape, pack: Pack, precision: Precision) -> float:
    """What one layer needs on top of what is stored, in a pass without gradients or on the way back: an estimate."""
    wide = 3 * shape.experts * shape.intermediate + 2 * shape.hidden
    return pack.tokens * (precision.compute * wide + 8 * shape.hidden)


def logits_bytes(
    predicted: int, vocabulary: int, precision: Precision, fused: bool, gradient: bool, chunk: int, keep: int
) -> float:
    """Logits of the predicted tokens, as `audiorl.algos.logprobs` treats them: tiles of `chunk` in float32, and with a
    gradient up to `keep` bytes of logits that wait for it. Not `fused`: all logits, in float32 their copy, its
    log-softmax and the gradient of that."""
    c, all_logits = precision.compute, predicted * vocabulary
    if not fused:
        return all_logits * (c + (12 if gradient else 8))
    tile = min(all_logits, chunk) * (c + 8)
    hidden = 4 * predicted if gradient else 0
    return tile + hidden + (min(all_logits * c, keep) if gradient else 0)


def tower_bytes(
    tower: Tower, seconds: float, clips: int, precision: Precision, trained: bool, checkpointing: bool
) -> float:
    """An audio encoder's activations. Frozen, it hears one clip at a time and keeps nothing; trained, it keeps every
    clip of an update, because it is trained once at the end of it.

    A layer keeps per frame two norms' inputs and outputs, queries, keys, values, the attention's output (8 times its
    width) and the feed-forward block before and after its activation; the two convolutions their inputs and outputs.
    """
    c, w = precision.compute, tower.hidden
    frames = max(seconds, tower.window) * tower.frame_rate
    layer = frames * (8 * w + 2 * tower.intermediate)
    ends = frames * 6 * w
    if not trained:
        return c * (layer + ends)
    per_clip = (frames * w * tower.layers + ends) if checkpointing else tower.layers * layer + ends
    return c * (clips * per_clip + (layer if checkpointing else 0))


def kv_bytes_per_token(shape: Shape, number: int, tensor_parallel: int = 1) -> int:
    """Keys and values of one token in all layers: 2 x layers x heads of keys x head width x bytes of a number.

    Over `tensor_parallel` ranks each holds its share of the heads, at least one.
    """
    heads = -(-shape.kv_heads // tensor_parallel)
    return 2 * shape.layers * heads * shape.head_dim * number
