"""Training: it learns, it goes on as if never stopped, its two players do not mix, several processes are one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.unified_codec import clips, tiny, tiny_training
from tokenizers_audio.unified import UnifiedTokenizer, load
from tokenizers_audio.unified.train import CodecTrainer, LossWeights, State, learning_rate

PLAYED = tiny_training(adversarial_after=2)


def batch(step: int) -> Tensor:
    """[2, 4 frames] that differ from step to step."""
    return clips().roll(960 * step, 1)[step % 3 : step % 3 + 2, : 4 * 960]


def weights(tokenizer: UnifiedTokenizer) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in tokenizer.state_dict().items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="ours"),
        pytest.param(dict(quantizer="grouped", semantic="none"), id="plain"),
        pytest.param(
            dict(spectrum_hop=None, strides=(8, 5, 4, 2, 3), channels=(4, 4, 8, 8, 16, 16), activation="snake"),
            id="samples",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_learns_real_speech(changes: dict[str, Any]) -> None:
    trainer = CodecTrainer(tiny(**changes), tiny_training(start_vectors=12))
    wavs = clips(3, 4)
    history = [trainer.step(wavs) for _ in range(20)]
    assert history[-1]["loss/mel"] < 0.75 * history[0]["loss/mel"]
    assert not history[0]["quantizing"] and history[-1]["quantizing"]
    assert history[-1]["codebook/perplexity"] > 4
    if not changes:
        assert history[-1]["loss/semantic"] < 0.5 * history[0]["loss/semantic"]


@pytest.mark.slow
def test_a_decoder_that_says_mels_begins_with_what_recordings_say_and_gets_better() -> None:
    trainer = CodecTrainer(tiny(phases="peaks"), tiny_training(lr=2e-3))
    trainer.begin(clips(4, 12))
    history = [trainer.step(clips(3, 4)) for _ in range(20)]
    assert history[0]["quantizing"] and history[0]["loss/mel"] < 0.5
    assert history[-1]["loss/mel"] < 0.85 * history[0]["loss/mel"] and "loss/stft" not in history[0]
    played = CodecTrainer(tiny(phases="peaks"), PLAYED)
    played.begin(clips(4, 12))
    assert "loss/adversarial" in [played.step(clips(3, 4)) for _ in range(3)][-1]


def test_the_k_means_start_waits_for_its_time_and_its_vectors() -> None:
    trainer = CodecTrainer(tiny(), tiny_training(start_vectors=20, quantize_after=5))
    quantizing = [trainer.step(batch(k))["quantizing"] for k in range(7)]  # 8 vectors a step
    assert quantizing == [0, 0, 0, 0, 0, 1, 1]
    kept = tiny()
    before = kept.quantizer.codebooks.clone()
    trainer = CodecTrainer(kept, tiny_training(ema_decay=0.999999, revive_below=0.0), trained=True)
    assert trainer.step(batch(0))["quantizing"] == 1
    torch.testing.assert_close(kept.quantizer.codebooks, before, rtol=0, atol=1e-4)


@pytest.mark.parametrize("trained", [False, True])
def test_a_tokenizer_with_a_beginning_waits_for_its_codebooks_too(trained: bool) -> None:
    trainer = CodecTrainer(tiny(phases="peaks"), tiny_training(start_vectors=8, quantize_after=2), trained=trained)
    if not trained:
        trainer.begin(clips(4, 12))
    assert [trainer.step(batch(k))["quantizing"] for k in range(3)] == [0, 0, 1]


def test_a_tokenizer_does_not_begin_with_crops_without_a_frame_to_learn_from() -> None:
    tokenizer = tiny(phases="peaks")
    before = weights(tokenizer)
    with pytest.raises(ValueError, match=r"crops of 1 frames .* at least 0.08 s \(codec.crop_seconds\)"):
        tokenizer.begin(clips(4, 1), torch.Generator())
    assert same(weights(tokenizer), before)
    tokenizer.begin(clips(4, 2), torch.Generator())
    assert all(bool(w.isfinite().all()) for w in tokenizer.state_dict().values())


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 6])  # before the codebooks and the discriminator join, and after
def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path, stop: int) -> None:
    whole = CodecTrainer(tiny(), PLAYED, seed=3)
    metrics = [whole.step(batch(k)) for k in range(9)]

    first = CodecTrainer(tiny(), PLAYED, seed=3)
    for k in range(stop):
        first.step(batch(k))
    first.tokenizer.save(tmp_path / "model")
    save_file(flat(first.state()), tmp_path / "trainer.safetensors")

    second = CodecTrainer(load(tmp_path / "model"), PLAYED, seed=3)
    state: State = {}
    for name, tensor in load_file(tmp_path / "trainer.safetensors").items():
        part, _, rest = name.partition("/")
        state.setdefault(part, {})[rest] = tensor
    second.load(state, "here")
    assert [second.step(batch(k)) for k in range(stop, 9)] == metrics[stop:]
    assert same(weights(second.tokenizer), weights(whole.tokenizer))
    assert same(flat(second.state()), flat(whole.state()))
    with pytest.raises(ValueError, match="here: trained with a discriminator"):
        CodecTrainer(tiny(), tiny_training()).load(state, "here")


def flat(state: State) -> dict[str, Tensor]:
    return {f"{part}/{name}": t.contiguous() for part, tensors in state.items() for name, t in tensors.items()}


def test_neither_player_moves_the_others_weights() -> None:
    def after(config_changes: dict[str, Any]) -> CodecTrainer:
        trainer = CodecTrainer(tiny(), tiny_training(start_vectors=8, **config_changes))
        for k in range(2):
            trainer.step(batch(k))
        return trainer

    judged = dict(adversarial_after=0)
    deaf = after(judged | dict(weights=LossWeights(adversarial=0, feature_matching=0)))
    alone = after(dict(adversarial_after=None, weights=LossWeights(adversarial=0, feature_matching=0)))
    # A tokenizer that does not mind is what it is without a judge, although the judge learned.
    assert same(weights(deaf.tokenizer), weights(alone.tokenizer))
    fresh = CodecTrainer(tiny(), tiny_training(**judged))
    assert not same(deaf.state()["discriminator"], fresh.state()["discriminator"])
    # A judge learns the same whether the tokenizer minds or not, as long as it hears the same.
    first = [CodecTrainer(tiny(), tiny_training(**judged, weights=LossWeights(adversarial=w))) for w in (0.0, 5.0)]
    for trainer in first:
        trainer.step(batch(0))
    assert same(first[0].state()["discriminator"], first[1].state()["discriminator"])
    assert not same(weights(first[0].tokenizer), weights(first[1].tokenizer))


def test_what_is_not_finite_changes_nothing() -> None:
    trainer = CodecTrainer(tiny(), tiny_training(start_vectors=8))
    trainer.step(batch(0))
    before = weights(trainer.tokenizer)
    with torch.no_grad():
        trainer.tokenizer.to_semantic.bias[0] = float("nan")
    with pytest.raises(FloatingPointError, match="the semantic loss is nan; this update changed no weight"):
        trainer.step(batch(1))
    with torch.no_grad():
        trainer.tokenizer.to_semantic.bias[0] = before["to_semantic.bias"][0]
    assert same(weights(trainer.tokenizer), before)


def test_autocast_leaves_features_and_codes_alone() -> None:
    tokenizer, wavs = tiny(), clips(2, 4)
    levels = torch.tensor([4, 4])
    with torch.no_grad():
        exact = tokenizer.reconstruct(wavs, levels)
        with torch.autocast("cpu", torch.bfloat16):
            out = tokenizer.reconstruct(wavs, levels)
    assert out.features is not None and exact.features is not None and torch.equal(out.features, exact.features)
    assert out.quantized is not None and out.quantized.vectors.dtype == torch.float32
    assert out.latents.dtype == torch.bfloat16
    assert torch.equal(out.quantized.codes, tokenizer.quantizer.encode(out.latents.float(), 4))
    trainer = CodecTrainer(tokenizer, tiny_training(autocast=True, adversarial_after=0, start_vectors=16))
    losses = [trainer.step(batch(k))["loss"] for k in range(3)]
    assert all(0 < loss < 1e4 for loss in losses)


def test_dropout_draws_levels_from_seed_and_step() -> None:
    def drawn(seed: int, step: int) -> list[int]:
        trainer = CodecTrainer(tiny(), tiny_training(codebook_dropout=0.5), seed=seed)
        trainer.steps_done = step
        return trainer._levels(400).tolist()

    levels = drawn(0, 7)
    assert drawn(0, 7) == levels and drawn(0, 8) != levels and drawn(1, 7) != levels
    # half of them are drawn from 1 … 4, the others use all
    assert levels.count(4) == pytest.approx(400 * (0.5 + 0.5 / 4), abs=40)
    assert {1, 2, 3} <= set(levels) and levels.count(1) == pytest.approx(50, abs=25)


def test_the_rate_by_hand() -> None:
    config = tiny_training(steps=12, lr=1.0, warmup_steps=2, schedule="cosine")
    assert [learning_rate(k, config) for k in (0, 1, 2, 7, 12)] == pytest.approx([0.5, 1, 1, 0.5, 0])


ALONE = tiny_training(codebook_dropout=0.0, weights=LossWeights(stft=0.0), revive_below=0.2, start_vectors=20)


def train_as(rank: int, store: str, out: str) -> None:
    """Train on one half of each batch as one of two processes; write weights and codebook counts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        # The second process brings other weights, which must not matter.
        trainer = CodecTrainer(tiny(seed=rank), ALONE)
        for k in range(6):
            trainer.step(batch(k)[rank : rank + 1])
        save_file({**weights(trainer.tokenizer), **flat(trainer.state())}, out)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_one(tmp_path: Path) -> None:
    files = [str(tmp_path / f"{rank}.safetensors") for rank in (0, 1)]
    store = str(tmp_path / "store")
    other = multiprocessing.get_context("spawn").Process(target=train_as, args=(1, store, files[1]))
    other.start()
    try:
        train_as(0, store, files[0])
    finally:
        other.join(120)
    assert other.exitcode == 0
    first, second = map(load_file, files)
    assert same(first, second)
    whole = CodecTrainer(tiny(), ALONE)
    for k in range(6):
        whole.step(batch(k))
    for name, t in weights(whole.tokenizer).items():
        torch.testing.assert_close(first[name], t, rtol=0, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(first["codebooks/counts"], whole.codebooks.counts, rtol=0, atol=1e-4)
