"""How codebooks learn: k-means start, exponential moving averages, new life for codes that nobody uses.

Shapes: Q codebooks, K codes of D' coordinates each, N vectors that a codebook had to name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenizers_audio.unified.distributed import add_over_ranks, gather_rows, take_from_first
from tokenizers_audio.unified.quantizer import GroupedQuantizer, ResidualQuantizer, nearest


class CodebookTrainer:
    """Moving averages of how often each code was used and of what it stood for (van den Oord et al. 2017, A.1).

        n_k ← γ n_k + (1 - γ) · uses of k        m_k ← γ m_k + (1 - γ) · sum of what k named        e_k = m_k / n_k

    A code whose n_k falls under `revive_below` of an even share moves onto a vector drawn from the batch and begins
    again with an even share (Dhariwal et al. 2020). All ranks count together and hold the same codebooks.
    """

    def __init__(
        self, quantizer: ResidualQuantizer | GroupedQuantizer, decay: float = 0.99, revive_below: float = 0.03
    ):
        self.quantizer, self.decay, self.revive_below = quantizer, decay, revive_below
        books = quantizer.codebooks
        self.counts = torch.ones(books.shape[:2], device=books.device)  # [Q, K]
        self.sums = books.clone()  # [Q, K, D']

    @torch.no_grad()
    def start(self, latents: Tensor, generator: torch.Generator, iterations: int = 10) -> None:
        """Set the codebooks by k-means on `latents` [N, D], equal on all ranks, each on what those before it leave."""
        books = self.quantizer.codebooks
        residual = isinstance(self.quantizer, ResidualQuantizer)
        left = latents if residual else None
        for q in range(len(books)):
            vectors = left if left is not None else latents.chunk(len(books), 1)[q]
            books[q] = kmeans(vectors, books.shape[1], generator, iterations)
            if left is not None:
                left = left - books[q][nearest(left, books[q])]
        take_from_first(books)
        self.counts.fill_(1.0)
        self.sums.copy_(books)

    @torch.no_grad()
    def update(self, inputs: Sequence[Tensor], codes: Tensor, generator: torch.Generator) -> dict[str, float]:
        """One step of the averages from what each codebook named: inputs Q x [N, D'], codes [B, Q, F].

        Returns codebook/perplexity, exp of the entropy of use, averaged over the codebooks, and codebook/revived.
        """
        books = self.quantizer.codebooks
        flat = codes.transpose(1, 2).flatten(0, 1).T  # [Q, N]
        uses = torch.zeros_like(self.counts)
        named = torch.zeros_like(self.sums)
        for q, vectors in enumerate(inputs):
            uses[q] = torch.bincount(flat[q], minlength=books.shape[1]).to(uses)
            named[q].index_add_(0, flat[q], vectors.to(named))
        add_over_ranks(uses, named)
        self.counts.lerp_(uses, 1 - self.decay)
        self.sums.lerp_(named, 1 - self.decay)
        books.copy_(self.sums / self.counts.clamp_min(1e-12)[..., None])
        revived = sum(self._revive(q, vectors, generator) for q, vectors in enumerate(inputs))
        shares = self.counts / self.counts.sum(1, keepdim=True)
        entropy = torch.special.entr(shares).sum(1)
        return {"codebook/perplexity": float(entropy.exp().mean()), "codebook/revived": float(revived)}

    def _revive(self, q: int, vectors: Tensor, generator: torch.Generator) -> int:
        even = self.counts[q].mean()
        dead = (self.counts[q] < self.revive_below * even).nonzero()[:, 0]
        if not len(dead):
            return 0
        candidates = gather_rows(vectors)
        order = torch.randperm(len(candidates), generator=generator)[: len(dead)].to(dead.device)
        dead = dead[: len(order)]  # a small batch revives a few now, others next time
        fresh = candidates[order].to(self.sums)
        take_from_first(fresh)
        self.quantizer.codebooks[q, dead] = fresh
        self.counts[q, dead] = even
        self.sums[q, dead] = fresh * even
        return len(dead)

    def state(self) -> dict[str, Tensor]:
        return {"counts": self.counts, "sums": self.sums}

    def load(self, state: dict[str, Tensor]) -> None:
        self.counts.copy_(state["counts"])
        self.sums.copy_(state["sums"])


def kmeans(vectors: Tensor, count: int, generator: torch.Generator, iterations: int = 10) -> Tensor:
    """[count, D] centres of `vectors` [N, D] by Lloyd's algorithm, from vectors drawn without replacement.

    With fewer vectors than centres some are drawn again. A centre that loses all of its vectors moves onto one of them.
    """
    rounds = -(-count // len(vectors))
    order = torch.cat([torch.randperm(len(vectors), generator=generator) for _ in range(rounds)])[:count]
    centres = vectors[order.to(vectors.device)].clone()
    for _ in range(iterations):
        names = nearest(vectors, centres)
        uses = torch.bincount(names, minlength=count)
        sums = torch.zeros_like(centres).index_add_(0, names, vectors)
        centres = sums / uses.clamp_min(1)[:, None]
        empty = (uses == 0).nonzero()[:, 0]
        if len(empty):
            replacements = torch.randint(len(vectors), (len(empty),), generator=generator)
            centres[empty] = vectors[replacements.to(vectors.device)]
    return centres
