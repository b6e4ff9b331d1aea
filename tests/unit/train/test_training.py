"""Updates, optimizer state, checkpoints and what is loaded from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from audiorl.algos.advantages import group_relative
from audiorl.algos.experience import Experience, PackedBatch, PolicyOutput
from audiorl.algos.packing import pack_experiences
from audiorl.config import LoraConfig, ModelConfig, OptimConfig, RLConfig, SamplingConfig, SFTConfig
from audiorl.distributed.local import World
from audiorl.models import AudioPolicy, load_policy, load_weights
from audiorl.models.examples import Example
from audiorl.models.families import text
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.train import fit
from audiorl.train.fit import Learner
from audiorl.train.optim import steps
from audiorl.train.optim.adamw import Optimizer, learning_rate
from audiorl.train.optim.steps import choose_precision, optimizer_for
from audiorl.train.rl.trainer import Trainer
from audiorl.train.sft import sft_loss
from audiorl.types import Sample
from tests.conftest import make_omni, make_qwen2_audio
from tests.support.experiences import with_advantage
from tests.support.gradients import gradients_of
from tests.support.packing import experience, logprobs
from tests.support.released import save_released
from tests.support.trainer_steps import learn


def rollouts_of(policy: AudioPolicy, samples: list[Sample], n: int = 4) -> list[Experience]:
    rollouts = HFEngine(policy, SamplingConfig(max_new_tokens=8)).generate([Request(s, n) for s in samples])
    rewards = torch.tensor([float(r.segments[0].ids.float().mean()) for r in rollouts])
    advantages = group_relative(rewards, [r.group_id for r in rollouts])
    return [with_advantage(Experience.from_rollout(r), float(a)) for r, a in zip(rollouts, advantages, strict=True)]


def worker(policy: AudioPolicy, lr: float = 1e-3, **grpo: object) -> Trainer:
    config = RLConfig(prompts_per_step=3, group_size=4, **grpo)  # type: ignore[arg-type]
    return Trainer(policy, config, OptimConfig(lr=lr), 1.0, 8)


def gradient(policy: AudioPolicy) -> torch.Tensor:
    return torch.cat([g.flatten() for g in gradients_of(policy.trainable()).values()])


def test_sft_learns_and_does_not_depend_on_the_cut(policy: AudioPolicy, make_policy, samples: list[Sample]) -> None:
    examples = [Example(s, t) for s, t in zip(samples, ("yes", "no", "English"), strict=True)]
    w = Learner(sft_loss, policy, SFTConfig(steps=30), OptimConfig(lr=3e-3))
    losses = [w.train(examples)["sft/loss"] for _ in range(30)]
    assert losses[-1] < 0.2 * losses[0]
    first = []
    for budget in (1, 100_000):
        fresh = Learner(sft_loss, make_policy(), SFTConfig(steps=1, micro_batch_tokens=budget), OptimConfig(lr=1e-3))
        first.append(fresh.train(examples))
    assert first[0]["sft/loss"] == pytest.approx(first[1]["sft/loss"], rel=1e-5)
    assert first[0]["grad_norm"] == pytest.approx(first[1]["grad_norm"], rel=1e-4)


def test_gradient_checkpointing_and_autocast(make_policy, samples: list[Sample]) -> None:
    grads = []
    for config in (ModelConfig(), ModelConfig(gradient_checkpointing=True), ModelConfig(autocast=True)):
        policy = make_policy(config)
        logprobs(policy, [experience(policy, samples[0], 6, seed=0)])[0].sum().backward()
        grads.append(gradient(policy))
    torch.testing.assert_close(grads[1], grads[0], atol=1e-6, rtol=1e-5)
    assert grads[2].isfinite().all()
    assert torch.nn.functional.cosine_similarity(grads[2], grads[0], dim=0) > 0.98


def test_learning_rate_schedule_by_hand() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=4, schedule="linear")
    assert [learning_rate(s, 12, config) for s in (0, 3, 4, 8, 12)] == [0.25, 1.0, 1.0, 0.5, 0.0]
    cosine = OptimConfig(lr=1.0, schedule="cosine")
    assert learning_rate(5, 10, cosine) == pytest.approx(0.5)
    assert learning_rate(99, 10, OptimConfig(lr=1.0)) == 1.0
    # of 6 updates at most 3 warm up
    assert [learning_rate(s, 6, config) for s in range(6)] == pytest.approx([1 / 3, 2 / 3, 1, 1, 2 / 3, 1 / 3])
    assert learning_rate(0, 1, config) == 1.0


def test_master_weights_take_updates_that_bfloat16_loses(caplog: pytest.LogCaptureFixture) -> None:
    """The weights are those of float32 training, rounded; a resumed optimizer goes on with the same bits."""
    start = torch.linspace(0.05, 2.0, 64).bfloat16()
    config = OptimConfig(lr=1e-6, max_grad_norm=1e6)

    def train(p: torch.nn.Parameter, optimizer: Optimizer, updates: range) -> None:
        for step in updates:
            gradient = torch.randn(64, generator=torch.Generator().manual_seed(step)) - 1
            p.grad = None
            (p * gradient.bfloat16().to(p.dtype)).sum().backward()  # the float32 copies collect what a pass adds
            optimizer.step()

    def made(dtype: torch.dtype, master_weights: bool) -> tuple[torch.nn.Parameter, Optimizer]:
        p = torch.nn.Parameter(start.to(dtype, copy=True))
        return p, Optimizer({"p": p}, replace(config, master_weights=master_weights), 3000)

    exact, of_exact = made(torch.float32, False)
    assert not caplog.text
    plain, of_plain = made(torch.bfloat16, False)
    assert (
        "100 % of the trained 16-bit weights stay as they are under an update of the learning rate 1e-06" in caplog.text
    )
    caplog.clear()
    master, of_master = made(torch.bfloat16, True)
    assert not caplog.text
    for p, optimizer in ((exact, of_exact), (plain, of_plain), (master, of_master)):
        train(p, optimizer, range(2000))
    assert torch.equal(plain, start) and not torch.equal(master, start)
    assert torch.equal(master, exact.bfloat16())
    resumed, of_resumed = made(torch.bfloat16, True)
    with torch.no_grad():
        resumed.copy_(master)
    of_resumed.load({k: v.clone() for k, v in of_master.state().items()}, "a state")
    for p, optimizer in ((master, of_master), (resumed, of_resumed)):
        train(p, optimizer, range(2000, 2300))
    assert torch.equal(of_resumed.state()["master.p"], of_master.state()["master.p"])
    assert torch.equal(resumed, master)


def test_a_bad_gradient_stops_before_the_weights_change() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = Optimizer({"p": p}, OptimConfig(lr=0.1), 10)
    (p * torch.tensor([1.0, float("nan"), 1.0])).sum().backward()
    with pytest.raises(FloatingPointError, match="'p' is not finite"):
        optimizer.step()
    assert p.tolist() == [1, 1, 1]


def test_lora_trains_adapters_only_and_comes_back(make_policy, samples: list[Sample], tmp_path: Path) -> None:
    make_policy().save(tmp_path / "base")
    policy = load_policy(tmp_path / "base", ModelConfig(lora=LoraConfig(rank=4, alpha=8)))
    assert policy.trainable() and all("lora_" in n for n in policy.trainable())
    batch = rollouts_of(policy, samples)
    frozen = {n: p.clone() for n, p in policy.model.named_parameters() if not p.requires_grad}
    w = worker(policy, lr=1e-2)
    learn(w, batch)
    metrics = learn(w, batch)
    assert metrics["kl"] > 1e-6  # against the base model, under the adapter
    assert all(torch.equal(p, dict(policy.model.named_parameters())[n]) for n, p in frozen.items())
    assert w.reference is not None
    base = load_policy(tmp_path / "base")
    packed = pack_experiences(batch)
    torch.testing.assert_close(w.reference.forward(packed).logprobs, base.forward(packed).logprobs.detach())
    policy.save(tmp_path / "adapter")
    again = load_policy(tmp_path / "adapter")
    torch.testing.assert_close(again.forward(packed).logprobs, policy.forward(packed).logprobs)


def test_a_whole_omni_checkpoint_gives_its_thinker(samples: list[Sample], tmp_path: Path) -> None:
    """The released checkpoints hold thinker, talker and vocoder; weights carry the prefix `thinker.`."""
    policy = make_omni()
    save_released(policy, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen2_5_omni"
    assert any(name.startswith("talker.") for name in load_file(tmp_path / "model.safetensors"))
    loaded = load_policy(tmp_path)
    batch = [experience(policy, samples[0], 5, seed=0)]
    assert torch.equal(logprobs(policy, batch)[0], logprobs(loaded, batch)[0])


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    make_omni().save(tmp_path / "omni")
    other = make_qwen2_audio()
    with pytest.raises(ValueError, match=r"holds a Qwen2_5OmniThinker.*trains a Qwen2Audio"):
        load_weights(tmp_path / "omni", other)
    wider = make_omni()
    with pytest.raises(ValueError, match="another shape"):
        wider.load_weights({"lm_head.weight": torch.zeros(3, 3)}, "there")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match="model_type 'bert'"):
        load_policy(tmp_path / "bert")
    config = json.loads((tmp_path / "omni" / "config.json").read_text())
    decoder = config["thinker_config"]["text_config"]
    decoder["num_hidden_layers"] -= 1
    decoder.pop("layer_types", None)
    (tmp_path / "omni" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"weight '[\w.]*\.layers\.1\..*not in the model but in the checkpoint"):
        load_policy(tmp_path / "omni")
    with pytest.raises(ValueError, match=r"no config\.json"):
        (tmp_path / "empty").mkdir()
        load_policy(tmp_path / "empty")


def test_a_precision_that_is_slow_on_this_cpu_is_advised_against(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    amx = {"architecture": "x86_64", "avx512_f": True, "amx_bf16": True}
    avx512, avx2 = {"architecture": "x86_64", "avx512_f": True}, {"architecture": "x86_64", "avx2": True}
    wide, narrow = text.tiny(hidden=512, layers=1), text.tiny()
    autocast = text.tiny(config=ModelConfig(autocast=True))
    half = text.tiny(hidden=512, layers=1, config=ModelConfig(dtype="bfloat16"))
    half.model.to(torch.bfloat16)
    assert "--model.autocast (bfloat16) is faster" in choose_precision(wide, amx)
    for policy in (autocast, half):
        assert "leave --model.autocast out" in choose_precision(policy, avx2)
        assert not any(choose_precision(policy, cpu) for cpu in (amx, avx512, {"architecture": "aarch64"}))
    assert not any(choose_precision(narrow, cpu) for cpu in (amx, avx512, avx2))
    assert not choose_precision(wide, avx512) and not choose_precision(wide, avx2)

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: amx)
    optimizer_for(narrow, OptimConfig(), 1, World())
    assert "AMX" not in caplog.text
    optimizer_for(wide, OptimConfig(), 1, World())
    assert "this CPU has AMX" in caplog.text


def test_a_gpu_multiplies_float32_in_tf32_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the program chose a precision, or computes in bfloat16."""
    chosen: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)

    def policy(**config: Any) -> Any:
        weight = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda"), shape=(8, 8))
        backbone = SimpleNamespace(head=lambda _: SimpleNamespace(weight=weight))
        return SimpleNamespace(model=None, backbone=backbone, config=ModelConfig(**config))

    assert "TF32" in choose_precision(policy(), {}) and chosen == ["high"]
    assert not choose_precision(policy(autocast=True), {}) and chosen == ["high"]
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert not choose_precision(policy(), {}) and chosen == ["high"]


class Small:
    """A GPU whose memory holds passes of `tokens`, as the forward pass of a policy sees it."""

    def __init__(self, policy: AudioPolicy, tokens: int):
        self._forward, self._tokens = policy.forward, tokens
        self.lengths: list[int] = []

    def __call__(self, batch: PackedBatch, *args: Any, **kwargs: Any) -> PolicyOutput:
        self.lengths.append(len(batch.ids))
        if len(batch.ids) > self._tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._forward(batch, *args, **kwargs)


def test_passes_that_memory_does_not_hold_are_halved(
    samples: list[Sample], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The update is that of passes which were small from the beginning, bit for bit. A given number stays."""
    monkeypatch.setattr(steps, "FEWEST", 50)
    examples = [Example(s, "yes no") for s in samples]

    def trained(held: int, given: int | None, planned: int) -> tuple[dict[str, Tensor], list[int]]:
        monkeypatch.setattr(fit, "with_pass_tokens", lambda config, *_: replace(config, micro_batch_tokens=planned))
        policy = make_omni()
        policy.forward = small = Small(policy, held)  # type: ignore[method-assign]
        Learner(sft_loss, policy, SFTConfig(steps=1, micro_batch_tokens=given), OptimConfig(lr=1e-3)).train(examples)
        return {name: weight.clone() for name, weight in policy.weights().items()}, small.lengths

    _, (whole,) = trained(10_000, None, 10_000)
    expected, parts = trained(10_000, 100, 100)
    weights, lengths = trained(100, None, 400)
    assert len(parts) > 1 and lengths == [whole, whole, *parts] and 100 < whole <= 200 and max(parts) <= 100
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert "400 did not fit into the GPU's memory, 200 from now on" in caplog.text
    for given, held in ((400, 100), (None, 20)):
        with pytest.raises(torch.OutOfMemoryError):
            trained(held, given, 400)
