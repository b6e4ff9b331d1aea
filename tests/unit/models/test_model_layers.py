"""What training puts in place of transformers' parts: the same numbers, fewer kernels, weights cast once an update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.glm import modeling_glm
from transformers.models.qwen2 import modeling_qwen2

from audiorl.algos.experience import PackedBatch
from audiorl.algos.packing import pack_experiences
from audiorl.config import LoraConfig, ModelConfig, OptimConfig, RLConfig
from audiorl.models import AudioPolicy
from audiorl.models.families import text
from audiorl.models.layers import (
    CastLinear,
    FusedMLP,
    FusedNorm,
    _replace_rotation,
    replace_parts,
    use_working_copies,
    working_copy,
)
from audiorl.train.optim.adamw import Optimizer
from audiorl.train.optim.steps import checkpoint_what_does_not_fit
from audiorl.train.rl.trainer import TrainBatch, Trainer
from tests.conftest import TEXTS, make_dual_omni, make_omni, make_qwen2_audio
from tests.support.experiences import with_advantage
from tests.support.launches import Launches
from tests.unit.plan.test_plan import groups, scored

LAYERS = 3


def make(**config: Any) -> AudioPolicy:
    torch.manual_seed(0)  # of adapters
    return text.tiny(TEXTS, hidden=64, layers=LAYERS, config=ModelConfig(**config))


@pytest.fixture
def batch() -> PackedBatch:
    return pack_experiences(groups(20, 12, 3, 2))


def pass_through(policy: AudioPolicy, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    policy.zero_grad()
    out = policy.forward(batch).logprobs
    (out * torch.linspace(0.5, 1.5, len(out))).sum().backward()
    return out.detach(), {n: p.grad.clone() for n, p in policy.trainable().items() if p.grad is not None}


def stock(policy: AudioPolicy) -> AudioPolicy:
    """The policy with transformers' modules as they were."""
    for module in policy.model.modules():
        if type(module) is FusedNorm:
            module.__class__ = modeling_qwen2.Qwen2RMSNorm
        elif type(module) is FusedMLP:
            module.__class__ = modeling_qwen2.Qwen2MLP
    use_working_copies(policy.model, on=False)
    return policy


@pytest.mark.parametrize("config", [{}, {"autocast": True}, {"lora": LoraConfig(rank=4)}], ids=str)
def test_losses_and_gradients_are_those_of_transformers(config: dict[str, Any], batch: PackedBatch) -> None:
    ours, theirs = make(**config), stock(make(**config))
    assert {type(m) for m in ours.model.modules()} >= {FusedNorm, FusedMLP}
    (logprobs, gradients), (expected, slopes) = pass_through(ours, batch), pass_through(theirs, batch)
    assert torch.equal(logprobs, expected)
    if not config.get("autocast"):
        torch.testing.assert_close(gradients, slopes, atol=1e-5, rtol=1e-4)
    for name, gradient in gradients.items():
        a, b = gradient.double(), slopes[name].double()
        assert float((a - b).norm()) <= (2e-2 if config.get("autocast") else 1e-4) * float(b.norm()), name
    with torch.no_grad():
        assert torch.equal(ours.forward(batch).logprobs, logprobs), "scored as it is trained"


def test_kernels_of_a_layer_stay_within_their_budget(batch: PackedBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer's forward and backward, without its attention and with the loss of this test: 9 products, 5 additions
    to the residual stream and of gradients, and what is fused."""
    layer, counted = make().model.model.layers[0], {}
    monkeypatch.setattr(layer.self_attn, "forward", lambda hidden_states, **_: (hidden_states, None))
    before = stock(make()).model.model.layers[0]
    monkeypatch.setattr(before.self_attn, "forward", lambda hidden_states, **_: (hidden_states, None))
    for name, module in (("fused", layer), ("stock", before)):
        x = torch.randn(1, 16, 64, requires_grad=True)
        with Launches(monkeypatch) as launches:
            module(x).sum().backward()
        counted[name] = launches
    assert counted["fused"].names["fused"] == 2 * 3, "two norms and the gated activation, forward and backward"
    assert counted["fused"].total <= 22 < 50 <= counted["stock"].total, {n: c.names for n, c in counted.items()}


def casts_of(policy: AudioPolicy, run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    matrices = {p.data_ptr() for p in policy.model.parameters() if p.dim() == 2}
    with Launches(monkeypatch) as launches:
        run()
    return sum(x.data_ptr() in matrices for x in launches.casts)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_weights_are_cast_once_an_update(
    rank: int, checkpointing: bool, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    policy = make(autocast=True, gradient_checkpointing=checkpointing, lora=LoraConfig(rank=rank))
    linears = [m for m in policy.model.modules() if type(m) is CastLinear]
    run = lambda: pass_through(policy, batch)  # noqa: E731
    assert casts_of(policy, run, monkeypatch) == len(linears), "the head's, too"
    assert casts_of(policy, run, monkeypatch) == 0, "neither in a second pass nor where a layer is computed again"
    with torch.no_grad():
        assert casts_of(policy, lambda: policy.forward(batch), monkeypatch) == 0
    copies = {m: m.weight.__dict__["low"][1] for m in linears}
    trained = [m for m in linears if m.weight.requires_grad]
    optimizer = Optimizer(policy.trainable(), OptimConfig(lr=1e-2), 9)
    optimizer.step()
    with policy.autocast():
        assert casts_of(policy, policy.weights_changed, monkeypatch) == len(trained)
        assert casts_of(policy, run, monkeypatch) == 0
        for module, low in copies.items():
            assert working_copy(module) is low and torch.equal(low, module.weight.bfloat16()), "in its place"
    assert not any("low" in p.__dict__ for p in policy.copy().trainable().values())
    policy.save(tmp_path)
    assert sum(p.stat().st_size for p in tmp_path.glob("*.safetensors")) < 4.2 * sum(
        p.numel() for p in policy.model.parameters()
    )


def test_a_weight_written_in_place_is_cast_again() -> None:
    module = nn.Linear(4, 4, bias=False)
    use_working_copies(nn.ModuleList([module]))
    x = torch.eye(4)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        module(x)
        module.weight.fill_(2.0)
        assert bool((module(x) == 2).all())


@pytest.mark.parametrize("make_model", [make_omni, make_dual_omni])
def test_any_number_of_layers_computed_again_gives_the_same_bits(make_model: Any) -> None:
    policy = make_model(ModelConfig(gradient_checkpointing="auto"))
    sample_text = pack_experiences(groups(20, 12, 3, 2))
    layers, results = len(policy.backbone.decoder(policy.model).layers), []
    for again in range(layers + 1):
        policy.layers_again = lambda spans, predicted, again=again: again
        results.append(pass_through(policy, sample_text))
    for logprobs, gradients in results[1:]:
        assert torch.equal(logprobs, results[0][0])
        assert all(torch.equal(g, results[0][1][name]) for name, g in gradients.items())


def test_as_many_layers_stay_as_the_free_memory_holds(batch: PackedBatch) -> None:
    policy = make(gradient_checkpointing="auto")
    optimizer, free = Optimizer(policy.trainable(), OptimConfig(), 9), [0.0]
    checkpoint_what_does_not_fit(policy, optimizer, lambda _: free[0])
    assert policy.layers_again is not None
    spans, counts = [(0, 4000, 0, 0), (4000, 5000, 0, 4000)], []
    for megabytes in range(0, 200, 5):
        free[0] = megabytes * 1e6
        counts.append(policy.layers_again(spans, 1000))
    assert counts == sorted(counts, reverse=True) and set(counts) == set(range(LAYERS + 1))
    free[0] = 0
    pass_through(policy, batch)
    assert all(layer.gradient_checkpointing for layer in policy.model.model.layers)
    free[0] = 1e12
    pass_through(policy, batch)
    assert not any(layer.gradient_checkpointing for layer in policy.model.model.layers)
    assert optimizer.pending_bytes() == 2 * sum(p.nbytes for p in policy.trainable().values()), "gradients are there"


def test_small_rates_move_16_bit_weights_by_default() -> None:
    """Micro-batches add up in float32, so that cutting a batch changes no weight but by rounding; and it is said how
    many of the plain weights move."""
    batch, moved = [scored(e) for e in groups(20, 12, 3, 2)], {}
    batch = [with_advantage(e, 1.0 - 0.3 * i) for i, e in enumerate(batch)]
    for masters in (None, False):
        policy = make(dtype="bfloat16")
        policy.model.to(torch.bfloat16)
        rl = RLConfig(kl_beta=0.0, prompts_per_step=2, group_size=3, micro_batch_tokens=64)
        trainer = Trainer(policy, rl, OptimConfig(lr=1e-6, master_weights=masters), 1.0, 12)
        start = {n: p.clone() for n, p in policy.trainable().items()}
        for _ in range(3):
            trainer.step(TrainBatch(batch))
        state = trainer.optimizer.state()
        kept = {n.removeprefix("master."): t for n, t in state.items() if n.startswith("master.")}
        assert kept.keys() == (start.keys() if masters is None else set())
        weights = kept or policy.trainable()
        moved[masters] = sum(int((w != start[n]).sum()) for n, w in weights.items()) / sum(
            w.numel() for w in start.values()
        )
        assert all(p.grad is None for p in policy.trainable().values())
        trainer.close()
    assert moved[None] > 0.5 > 0.2 > moved[False]
    assert OptimConfig(lr=1e-5).keeps_masters and not OptimConfig(lr=1e-4).keeps_masters
    assert not OptimConfig(lr=1e-6, master_weights=False).keeps_masters


class _OnePlusRMSNorm(nn.Module):
    """Gemma's form, with the attributes of Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(64)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)


class _CappedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=0.1) * self.up_proj(x))


def test_what_only_looks_alike_is_not_replaced() -> None:
    torch.manual_seed(0)
    layer = nn.ModuleDict({"norm": _OnePlusRMSNorm(), "mlp": _CappedMLP()})
    layer["attention"] = nn.ModuleDict({"q_proj": nn.Linear(8, 8)})
    layer["attention"].__class__ = type("GlmAttention", (nn.ModuleDict,), {"__module__": modeling_glm.__name__})
    before = modeling_glm.apply_rotary_pos_emb  # turns neighbours, not halves
    replace_parts(layer, autocast=False)
    assert type(layer["norm"]) is _OnePlusRMSNorm and type(layer["mlp"]) is _CappedMLP
    assert modeling_glm.apply_rotary_pos_emb is before


@pytest.mark.parametrize("audio", ["frozen", "full"])
def test_only_layers_that_are_computed_again_are_in_training_mode(audio: Any) -> None:
    """Nothing is dropped and no running statistic moves: neither by dropout modules nor by dropout as a function."""
    policy = make_qwen2_audio(ModelConfig(audio=audio, gradient_checkpointing=True))
    noisy: Any = policy.backbone.audio_encoder(policy.model).layers[0]
    noisy.dropout, noisy.inner = 0.5, nn.BatchNorm1d(4)
    policy._set_trainable()
    training = {type(m).__name__ for m in policy.model.modules() if m.training}
    assert training == {
        "Qwen2AudioForConditionalGeneration", "Qwen2Model", "Qwen2DecoderLayer", "Qwen2AudioEncoderLayer"
    }  # fmt: skip
    assert noisy.dropout == 0
    with policy.evaluating():
        assert not any(m.training for m in policy.model.modules())
    assert {type(m).__name__ for m in policy.model.modules() if m.training} == training


def test_rotations_are_known_while_models_are_made_without_memory() -> None:
    module = ModuleType("modeling")

    def turn(x: Tensor) -> Tensor:
        return torch.cat([-x[..., 4:], x[..., :4]], -1)

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + turn(q) * sin, k * cos + turn(k) * sin

    module.apply_rotary_pos_emb = apply_rotary_pos_emb  # type: ignore[attr-defined]
    with torch.device("meta"):
        _replace_rotation(module)
    assert module.apply_rotary_pos_emb is not apply_rotary_pos_emb
