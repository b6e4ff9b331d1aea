"""A value on a policy's trunk: whose weights it trains, what it reads, and what comes back from disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.config import LoraConfig, ModelConfig, OptimConfig
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.value import HEAD_FILE, ValueModel, load_value_model, make_critic
from audiorl.train.optim.adamw import Optimizer
from audiorl.types import Sample
from tests.conftest import Make
from tests.support.decoders import FAMILIES
from tests.support.packing import groups_of_three


def learned(model: ValueModel, batch: list[Experience]) -> ValueModel:
    """The model after one large update towards 1 everywhere."""
    optimizer = Optimizer(model.trainable(), OptimConfig(lr=1e-2), 1)
    ((model(pack_experiences(batch)) - 1) ** 2).mean().backward()
    optimizer.step()
    model.weights_changed()
    return model


def test_a_critic_begins_with_zeros_on_the_policys_states(make_any: Make, samples: list[Sample]) -> None:
    policy = make_any()
    row = pack_experiences(groups_of_three(policy, samples))
    for shared in (True, False):
        critic = make_critic(policy, shared)
        assert (critic.trunk is policy) is shared
        assert torch.equal(critic(row), torch.zeros(int(row.loss_mask.sum())))
        assert torch.equal(critic.trunk.predicting_hidden(row), policy.predicting_hidden(row))


def test_values_and_scores_are_read_where_they_should_be(make_any: Make, samples: list[Sample]) -> None:
    """V before each sampled token; a score at an answer's last token; packed and shared as one by one."""
    torch.manual_seed(0)
    model = ValueModel(make_any(), spread=1.0)
    batch = groups_of_three(model.trunk, samples)
    weight, bias = model.head.linear.weight[0].double(), model.head.linear.bias[0].double()
    with torch.no_grad():
        states = [model.trunk.hidden(pack_experiences([e])).double() for e in batch]
        values = torch.cat([h[e.prompt_length - 1 : -1] @ weight + bias for h, e in zip(states, batch, strict=True)])
        scores = torch.stack([h[-1] @ weight + bias for h in states])
        for share in (False, True):
            row = pack_experiences(batch, share)
            torch.testing.assert_close(model(row).double(), values, atol=1e-5, rtol=0)
            torch.testing.assert_close(model.scores(row).double(), scores, atol=1e-5, rtol=0)


def test_a_critic_of_its_own_leaves_the_policy_alone(make_policy: Make, samples: list[Sample]) -> None:
    policy = make_policy(ModelConfig(audio="projector"))
    batch = groups_of_three(policy, samples)
    before = {n: p.clone() for n, p in policy.model.named_parameters()}
    critic = learned(learned(make_critic(policy, shared=False), batch), batch)  # the first only moves the head
    assert all(torch.equal(p, before[n]) for n, p in policy.model.named_parameters())
    moved = [n for n, p in critic.trunk.model.named_parameters() if not torch.equal(p, before[n])]
    assert any("proj" in n and "layers" not in n for n in moved) and any("layers.0" in n for n in moved)


def test_a_shared_critic_trains_its_head_alone(make_policy: Make, samples: list[Sample]) -> None:
    policy = make_policy()
    critic = make_critic(policy, shared=True)
    assert critic.trainable().keys() == {"value_head.linear.weight", "value_head.linear.bias"}
    assert {id(p) for p in critic.parameters()}.isdisjoint(id(p) for p in policy.parameters())
    before = {n: p.clone() for n, p in policy.model.named_parameters()}
    learned(critic, groups_of_three(policy, samples))
    assert all(torch.equal(p, before[n]) for n, p in policy.model.named_parameters())
    assert float(critic.head.linear.weight.detach().abs().max()) > 0


def test_the_vocabulary_head_is_trained_only_where_it_is_the_embedding(make_any: Make, samples: list[Sample]) -> None:
    model = make_critic(make_any(), shared=False)
    names = {id(p): n for n, p in model.trunk.trainable().items()}
    head = model.trunk.backbone.head(model.trunk.model).weight
    assert id(head) in names and names[id(head)] not in model.trainable()
    heads = {names[id(head)], "audio_lm_head.weight"}
    assert model.trainable().keys() == set(names.values()) - heads | {
        "value_head.linear.weight",
        "value_head.linear.bias",
    }
    torch.nn.init.ones_(model.head.linear.weight)
    model(pack_experiences(groups_of_three(model.trunk, samples))).sum().backward()
    assert head.grad is None
    reached = [p for n, p in model.trainable().items() if ".layers." in n and "tower" not in n and ".audio_" not in n]
    assert all(p.grad is not None for p in reached)

    tied = make_critic(FAMILIES["qwen3-tied"](), shared=False)
    weight = tied.trunk.backbone.head(tied.trunk.model).weight
    assert any(p is weight for p in tied.trainable().values())


@pytest.mark.parametrize("lora", [LoraConfig(rank=0), LoraConfig(rank=4, alpha=8)], ids=["whole", "lora"])
def test_what_is_saved_comes_back(make_any: Make, samples: list[Sample], tmp_path: Path, lora: LoraConfig) -> None:
    make_any().save(tmp_path / "base")
    config = ModelConfig(lora=lora)

    def fresh() -> AudioPolicy:
        return load_policy(tmp_path / "base", config)

    policy = fresh()
    row = pack_experiences(batch := groups_of_three(policy, samples))
    model = learned(make_critic(policy, shared=False), batch)
    learned(model, batch)
    values = model(row)
    model.save(tmp_path / "critic")
    restored = make_critic(fresh(), shared=False)
    assert not torch.equal(restored(row), values)
    restored.restore(tmp_path / "critic")
    assert torch.equal(restored(row), values)
    assert torch.equal(load_value_model(tmp_path / "critic", ModelConfig())(row), values)
    weights = load_file(tmp_path / "critic" / HEAD_FILE)
    next(iter(weights.values())).view(-1)[0] = float("inf")
    save_file(weights, tmp_path / "critic" / HEAD_FILE)
    with pytest.raises(ValueError, match=rf"{HEAD_FILE}: weight '.*' holds values that are not finite"):
        restored.restore(tmp_path / "critic")
    assert torch.equal(restored(row), values)
