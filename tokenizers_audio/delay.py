"""The delay pattern of MusicGen (arXiv 2306.05284) and Higgs Audio V2: codebook k is written k rows late.

With Q codebooks and F frames, codebook k reads BOS, c_0 … c_{F-1}, EOS from row k on, with BOS before and EOS after it.
That makes F + Q + 1 rows: the first is all BOS, the last the only one that is all EOS. F = 3, Q = 3:

    row           0    1    2    3    4    5    6
    codebook 0    BOS  a0   a1   a2   EOS  eos  eos
    codebook 1    bos  BOS  b0   b1   b2   eos  eos
    codebook 2    bos  bos  BOS  c0   c1   c2   eos

What a sampler decides here is a0 … c2 and the EOS of codebook 0 in row 4, the positions where `sampled_codes_mask` is
True. All else follows. The rule in general, which `step` applies while rows are written:

- In rows t <= k codebook k is BOS.
- An EOS that codebook i draws in row t says that codebook 0 ends in row e = t - i, so that codebook k is EOS from row
  e + k on and F = e - 1 frames are complete. The smallest e of all EOS sampled so far holds.
- That also settles the row itself: below the highest codebook that samples EOS in a row all are EOS, whatever was
  sampled there. They carry no information, so their samples do not count.
- Elsewhere codebook k is sampled. The last row is e + Q - 1, where all codebooks are EOS.

An EOS of codebook 1 in row 4 above would mean e = 3: codebook 0 is EOS in row 4, codebook 2 still draws c1 there and is
EOS from row 5 on, and F = 2 frames remain (a2 was sampled, but never becomes a frame).
"""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = 2**62
"""The `end` of a stream in which no EOS was sampled yet."""


def interleave(codes: Tensor, bos: int, eos: int) -> Tensor:
    """Codes [Q, F] as rows [F + Q + 1, Q] of the delay pattern. Raises ValueError for codes that cannot be written."""
    _check(codes, "codes", "[Q, F]", len(codes) if codes.ndim else 0)
    if codes.numel() and (codes.min() < 0 or ((codes == bos) | (codes == eos)).any()):
        raise ValueError(f"codes must be >= 0 and neither BOS ({bos}) nor EOS ({eos}); are these rows already?")
    num_codebooks, frames = codes.shape
    rows = codes.new_full((frames + num_codebooks + 1, num_codebooks), eos)
    for k in range(num_codebooks):
        rows[: k + 1, k] = bos
        rows[k + 1 : k + 1 + frames, k] = codes[k]
    return rows


def deinterleave(rows: Tensor, bos: int, eos: int) -> Tensor:
    """Return the complete frames [Q, F] in rows [N, Q] that begin with the row of all BOS.

    Frame f lies in rows f + 1 … f + Q. Rows of a generation that was cut off hold N - Q complete frames, none when
    N <= Q. Rows with an EOS hold those before it: F = e - 1, as the head of this file explains, also when EOS came in
    the middle of the delay. What stands after the end is ignored. Raises ValueError for a missing BOS or a BOS inside
    a complete frame.
    """
    late = _lateness(rows, bos)
    count, num_codebooks = rows.shape
    end = int(torch.where((rows == eos) & (late > 0), late, NEVER).min()) if rows.numel() else NEVER
    frames = max(0, min(end - 1, count - num_codebooks))
    codes = rows.new_empty(num_codebooks, frames)
    for k in range(num_codebooks):
        codes[k] = rows[k + 1 : k + 1 + frames, k]
    wrong = ((codes == bos) | (codes < 0)).nonzero()
    if len(wrong):
        k, f = wrong[0].tolist()
        raise ValueError(
            f"row {f + k + 1}, codebook {k} holds {int(codes[k, f])} where a code belongs; a sampler must not offer BOS"
        )
    return codes


def sampled_codes_mask(rows: Tensor, bos: int, eos: int) -> Tensor:
    """Return where a sampler that follows the rule above drew what stands in `rows` [N, Q]: bool [N, Q].

    The sum of log-probs over these positions is the log-prob of the rows. Rows may be cut off. Raises ValueError for
    rows that the rule cannot produce.
    """
    late = _lateness(rows, bos)
    if not len(rows):
        return torch.zeros_like(rows, dtype=torch.bool)
    row_end = torch.where((rows == eos) & (late > 0), late, NEVER).amin(1)  # [N] what each row says about e
    after = row_end.cummin(0).values[:, None]
    before = torch.cat([after.new_full((1, 1), NEVER), after[:-1]])
    over = (late > 0) & (late >= after)
    wrong = (((late > 0) & (rows == bos)) | (over & (rows != eos))).nonzero()
    if len(wrong):
        t, k = wrong[0].tolist()
        raise ValueError(f"row {t}, codebook {k} holds {int(rows[t, k])}: not written by the delay pattern's rule")
    return (late > 0) & (late < before) & (late <= after)


def step(row: int | Tensor, draws: Tensor, end: Tensor, bos: int, eos: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the next row of a generation for a batch of streams, from what was sampled for it.

    row: its number, counted from 0; [B, 1] where each stream is at a row of its own.
    draws: [B, Q], sampled from distributions without BOS; any value where nothing is sampled.
    end: [B] int64, row e in which codebook 0 ends; NEVER before the first row.
    Returns what to write [B, Q], where it was sampled [B, Q] and the new `end` [B]. A stream is over when its row
    is all EOS, which is in row end + Q - 1.
    """
    late = row - torch.arange(draws.shape[1], device=draws.device)
    is_open = (late > 0) & (late < end[:, None])
    end = torch.where(is_open & (draws == eos), late, end[:, None]).amin(1)
    tokens = draws.masked_fill(late >= end[:, None], eos).masked_fill(late <= 0, bos)
    return tokens, is_open & (late <= end[:, None]), end


def _lateness(rows: Tensor, bos: int) -> Tensor:
    """[N, Q] row minus codebook, after a check that BOS stands wherever it is not positive."""
    _check(rows, "rows", "[N, Q]", rows.shape[-1] if rows.ndim else 0)
    count, num_codebooks = rows.shape
    late = torch.arange(count, device=rows.device)[:, None] - torch.arange(num_codebooks, device=rows.device)
    wrong = ((late <= 0) & (rows != bos)).nonzero()
    if len(wrong):
        t, k = wrong[0].tolist()
        raise ValueError(f"row {t}, codebook {k} holds {int(rows[t, k])}, not BOS ({bos}): rows begin with all BOS")
    return late


def _check(values: Tensor, name: str, shape: str, num_codebooks: int) -> None:
    if values.ndim != 2 or num_codebooks == 0:
        raise ValueError(
            f"{name} must be {shape} of one recording with at least one codebook, got {list(values.shape)}"
        )
    if values.dtype.is_floating_point or values.dtype is torch.bool:
        raise ValueError(f"{name} must be integers, got {values.dtype}")
