"""Quantisers and how their codebooks learn, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.unified_codec import tiny_config
from tokenizers_audio.unified.codebooks import CodebookTrainer, kmeans
from tokenizers_audio.unified.quantizer import GroupedQuantizer, ResidualQuantizer, nearest


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def residual(*books: list[list[float]]) -> ResidualQuantizer:
    codebooks = torch.tensor(books)
    shape = dict(zip(("num_codebooks", "codebook_size", "codebook_dim"), codebooks.shape, strict=True))
    quantizer = ResidualQuantizer(tiny_config(**shape))
    quantizer.codebooks.copy_(codebooks)
    return quantizer


def two_levels() -> ResidualQuantizer:
    """In the plane: corners first, then small steps."""
    return residual([[0, 0], [4, 0], [0, 4]], [[0, 0], [1, 0], [0, -1]])


def vectors(*rows: list[float]) -> Tensor:
    """[1, D, F]"""
    return torch.tensor([rows], dtype=torch.float32).transpose(1, 2)


def test_nearest_is_the_smallest_distance_and_the_first_of_equals() -> None:
    x = torch.randn(50, 7, generator=generator())
    book = torch.randn(9, 7, generator=generator(1))
    assert torch.equal(nearest(x, book), torch.cdist(x.double(), book.double()).argmin(1))
    assert nearest(torch.tensor([[0.5, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])).tolist() == [0]


def test_each_level_names_what_the_one_before_left() -> None:
    x = vectors([5.1, 0.2], [0.2, 2.9], [0.9, -0.1])
    codes = two_levels().encode(x, 2)
    # 5.1, 0.2 = (4, 0) + (1, 0) + rest;  0.2, 2.9 = (0, 4) + (0, -1);  0.9, -0.1 = (0, 0) + (1, 0)
    assert codes.tolist() == [[[1, 2, 0], [1, 2, 1]]]
    assert two_levels().decode(codes).tolist() == vectors([5, 0], [0, 3], [1, 0]).tolist()
    assert two_levels().encode(x, 1).tolist() == [[[1, 2, 0]]]
    assert two_levels().decode(codes[:, :1]).tolist() == vectors([4, 0], [0, 4], [0, 0]).tolist()


def test_training_uses_as_many_levels_as_each_recording_may() -> None:
    x = torch.cat([vectors([5.1, 0.2]), vectors([5.1, 0.2])])
    out = two_levels()(x, torch.tensor([1, 2]))
    assert out.vectors[0, :, 0].tolist() == pytest.approx([4, 0]) and out.vectors[1, :, 0].tolist() == [5, 0]
    assert out.codes.tolist() == [[[1], [1]], [[1], [1]]]  # all levels are named, so that all codebooks learn
    torch.testing.assert_close(out.inputs[1], torch.tensor([[1.1, 0.2], [1.1, 0.2]]))
    # level 1: (1.1² + 0.2²) twice; level 2: (0.1² + 0.2²) where it counts; over 2 x 2 numbers and 2 levels
    assert float(out.commitment) == pytest.approx((2 * 1.25 + 0.05) / 4 / 2)


def test_gradients_go_straight_through_and_commitment_pulls_to_the_codes() -> None:
    x = vectors([5.1, 0.2]).requires_grad_()
    out = two_levels()(x, torch.tensor([2]))
    (out.vectors * torch.tensor([[[2.0], [3.0]]])).sum().backward()
    assert x.grad is not None and x.grad.flatten().tolist() == [2, 3]
    (gradient,) = torch.autograd.grad(two_levels()(x, torch.tensor([2])).commitment, x)
    # the derivative of (|x - (4, 0)|² + |x - (5, 0)|²) / 2 numbers / 2 levels
    assert gradient.flatten().tolist() == pytest.approx([(2 * 1.1 + 2 * 0.1) / 4, (2 * 0.2 + 2 * 0.2) / 4])


def test_groups_name_their_own_coordinates() -> None:
    quantizer = GroupedQuantizer(tiny_config(num_codebooks=2, codebook_size=2, codebook_dim=4, quantizer="grouped"))
    quantizer.codebooks.copy_(torch.tensor([[[0.0, 0], [1, 1]], [[0, 0], [0, 2]]]))
    x = vectors([0.9, 0.8, 0.1, 0.3], [0.2, 0.1, 0.1, 1.7])
    codes = quantizer.encode(x, 2)
    assert codes.tolist() == [[[1, 0], [0, 1]]]
    assert quantizer.decode(codes).tolist() == vectors([1, 1, 0, 0], [0, 0, 0, 2]).tolist()
    assert quantizer.decode(codes[:, :1]).tolist() == vectors([1, 1, 0, 0], [0, 0, 0, 0]).tolist()
    out = quantizer(x, torch.tensor([2]))
    torch.testing.assert_close(out.vectors, quantizer.decode(codes))
    distances = (0.01 + 0.04) + (0.01 + 0.09) + (0.04 + 0.01) + (0.01 + 0.09)
    assert float(out.commitment) == pytest.approx(distances / 8)


def test_moving_averages_by_hand() -> None:
    quantizer = residual([[0.0, 0], [10, 0]])
    trainer = CodebookTrainer(quantizer, decay=0.9, revive_below=0.0)
    named = torch.tensor([[1.0, 0], [3, 0], [8, 0]])
    trainer.update([named], torch.tensor([[[0, 0, 1]]]), generator())
    # n: 0.9 + 0.1 · 2 = 1.1 and 0.9 + 0.1 = 1.0;  m: 0.9 · 0 + 0.1 · 4 = 0.4 and 0.9 · 10 + 0.1 · 8 = 9.8
    torch.testing.assert_close(trainer.counts, torch.tensor([[1.1, 1.0]]))
    torch.testing.assert_close(quantizer.codebooks[0, :, 0], torch.tensor([0.4 / 1.1, 9.8]))
    trainer.update([named[:1]], torch.tensor([[[0]]]), generator())
    torch.testing.assert_close(trainer.counts, torch.tensor([[0.9 * 1.1 + 0.1, 0.9]]))
    assert float(quantizer.codebooks[0, 1, 0]) == pytest.approx(9.8)  # unused codes stay where they are


def test_a_code_that_nobody_uses_moves_onto_a_vector() -> None:
    quantizer = residual([[0.0, 0], [5, 5], [99, 99]])
    trainer = CodebookTrainer(quantizer, decay=0.5, revive_below=0.4)
    named = torch.tensor([[0.5, 0.0], [5.0, 5.5]])
    codes = torch.tensor([[[0, 1]]])
    assert trainer.update([named], codes, generator())["codebook/revived"] == 0  # counts 1, 1, 0.5
    assert trainer.update([named], codes, generator())["codebook/revived"] == 1  # 0.25 < 0.4 · 0.75
    fresh = quantizer.codebooks[0, 2]
    assert any(torch.equal(fresh, row) for row in named)
    torch.testing.assert_close(trainer.counts[0], torch.tensor([1.0, 1.0, 0.75]))
    trainer.update([fresh[None]], torch.tensor([[[2]]]), generator())
    torch.testing.assert_close(quantizer.codebooks[0, 2], named[[torch.equal(fresh, r) for r in named]][0])


def test_perplexity_counts_codes_in_use() -> None:
    trainer = CodebookTrainer(residual([[0.0, 0], [1, 0], [2, 0], [3, 0]]), decay=0.5, revive_below=0.0)
    trainer.counts.copy_(torch.tensor([[1.0, 1, 0, 0]]))
    x = torch.tensor([[0.0, 0], [1, 0]])
    assert trainer.update([x], torch.tensor([[[0, 1]]]), generator())["codebook/perplexity"] == pytest.approx(2)


def test_kmeans_finds_clusters_and_is_repeatable() -> None:
    centres = torch.tensor([[0.0, 0], [10, 0], [0, 10], [10, 10]])
    x = (centres[:, None] + torch.randn(4, 30, 2, generator=generator())).flatten(0, 1)
    found = kmeans(x, 4, generator(3), iterations=30)
    error = torch.cdist(x, found).min(1).values.square().mean()
    assert error < 3  # 2 is the noise; two clusters under one centre would make it more than 10
    assert torch.equal(found, kmeans(x, 4, generator(3), iterations=30))
    few = kmeans(x[:3], 5, generator(), iterations=3)
    assert few.shape == (5, 2) and all(any(torch.allclose(c, v) for v in x[:3]) for c in few)


def test_the_start_clusters_what_each_level_leaves() -> None:
    quantizer = ResidualQuantizer(tiny_config(num_codebooks=3, codebook_size=16))
    latents = torch.randn(400, 8, generator=generator())
    CodebookTrainer(quantizer).start(latents, generator())
    x = latents.T[None]
    errors = [float((quantizer.decode(quantizer.encode(x, n)) - x).square().mean()) for n in (1, 2, 3)]
    assert 1 > errors[0] > errors[1] > errors[2]
    grouped = GroupedQuantizer(tiny_config(quantizer="grouped"))
    CodebookTrainer(grouped).start(latents, generator())
    assert float((grouped.decode(grouped.encode(x, 4)) - x).square().mean()) < 0.3
