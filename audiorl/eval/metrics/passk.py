"""pass@k: the chance that at least one of k attempts is right."""

from __future__ import annotations

from collections.abc import Sequence


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the unbiased estimate from n attempts of which c are right.

    It is the share of all k-subsets of the attempts that hold a right one. Computed as a product, which does not
    overflow: 1 - Π_{i=n-c+1..n} (1 - k/i). Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    Source: Chen et al. 2021, arXiv 2107.03374, eq. 1.
    """
    if not 0 <= c <= n:
        raise ValueError(f"pass@k: {c} right out of {n} attempts")
    if not 1 <= k <= n:
        raise ValueError(f"pass@k: k must lie in [1, {n}], the number of attempts, got {k}")
    if n - c < k:
        return 1.0
    miss = 1.0
    for i in range(n - c + 1, n + 1):
        miss *= 1.0 - k / i
    return 1.0 - miss


def pass_at_k_curve(correct: Sequence[Sequence[bool]], ks: Sequence[int]) -> dict[int, float]:
    """Mean pass@k over problems for each k. `correct[p]` tells of problem p which attempts were right.

    Compare a base model with its trained successor over k: training tends to raise small k, the base to cover more at
    large k. Raises ValueError without problems or where a problem has fewer than max(ks) attempts.
    """
    if not correct:
        raise ValueError("pass@k: no problems")
    counts = [(len(attempts), sum(map(bool, attempts))) for attempts in correct]
    return {k: sum(pass_at_k(n, c, k) for n, c in counts) / len(counts) for k in ks}


def crossings(a: Sequence[float], b: Sequence[float]) -> list[int]:
    """The k, counted from 1, at which the curve `a` changes from above `b` to below it, or back.

    `a[k - 1]` and `b[k - 1]` belong to k. Where they are equal neither is above.
    """
    last = 0.0
    ks = []
    for k, (x, y) in enumerate(zip(a, b, strict=True), 1):
        sign = float(x > y) - float(x < y)
        if sign and last and sign != last:
            ks.append(k)
        last = sign or last
    return ks
