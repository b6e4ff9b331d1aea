"""The cores, against numbers worked out by hand and independent references."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from audiorl.algos.advantages import group_relative
from audiorl.algos.experience import Experience
from audiorl.algos.logprobs import fused_logprobs
from audiorl.algos.losses import LossInputs, kl_estimate, ppo_clip_loss, token_weights
from audiorl.algos.packing import attention_mask, micro_batches, pack_experiences


def test_group_relative_by_hand() -> None:
    # group a: 1, 0, 0, 1 -> mean 0.5, unbiased std sqrt(1/3); group b: 3, 3; group c: alone
    rewards = torch.tensor([1.0, 3.0, 0.0, 0.0, 3.0, 1.0, 7.0])
    groups = ["a", "b", "a", "a", "b", "a", "c"]
    a = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    torch.testing.assert_close(group_relative(rewards, groups), torch.tensor([a, 0, -a, -a, 0, a, 0.0]))
    torch.testing.assert_close(
        group_relative(rewards, groups, std=False), torch.tensor([0.5, 0, -0.5, -0.5, 0, 0.5, 0.0])
    )
    with pytest.raises(ValueError, match=r"rewards of shape \[7\] but 6 group ids"):
        group_relative(rewards, groups[:6])


def test_kl_by_hand() -> None:
    lp = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([math.log(0.25)], dtype=torch.float64)
    assert kl_estimate(lp, ref, "k1").item() == pytest.approx(math.log(2))
    assert kl_estimate(lp, ref, "k2").item() == pytest.approx(0.5 * math.log(2) ** 2)
    k3 = kl_estimate(lp, ref, "k3")
    assert k3.item() == pytest.approx(0.5 - 1 + math.log(2))
    k3.backward()
    assert lp.grad is not None and lp.grad.item() == pytest.approx(1 - 0.5)  # 1 - ref/p


def test_policy_loss_by_hand() -> None:
    """Tokens: inside, clipped above (A > 0), clipped below (A < 0), outside but against the gain, weight 0."""
    ratio = torch.tensor([1.1, 1.5, 0.5, 1.5, 2.0], dtype=torch.float64)
    advantage = torch.tensor([1.0, 2.0, -1.0, -1.0, 5.0], dtype=torch.float64)
    weight = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0], dtype=torch.float64)
    lp = ratio.log().requires_grad_(True)
    x = LossInputs(lp, torch.zeros(5, dtype=torch.float64), advantage, weight)
    loss, sums = ppo_clip_loss(x)
    # gains: 1.1, 1.2*2, -0.8, -1.5
    assert loss.item() == pytest.approx(-(1.1 + 2.4 - 0.8 - 1.5) / 4)
    assert sums["clip_frac"].item() == pytest.approx(0.5)
    loss.backward()
    torch.testing.assert_close(lp.grad, torch.tensor([-1.1, 0, 0, 1.5, 0], dtype=torch.float64) / 4)

    higher, _ = ppo_clip_loss(x, clip_low=0.2, clip_high=0.6)
    assert higher.item() == pytest.approx(-(1.1 + 3.0 - 0.8 - 1.5) / 4)
    one = LossInputs(torch.tensor([5.0]).log(), torch.zeros(1), torch.tensor([-1.0]), torch.ones(1))
    dual, _ = ppo_clip_loss(one, dual_clip=3.0)
    assert dual.item() == pytest.approx(3.0)


def test_token_weights_by_hand() -> None:
    assert token_weights([2, 4, 0]) == [1 / 4, 1 / 8, 1 / 2]  # two sequences have tokens
    assert token_weights([2, 4, 0], "token-mean") == [1 / 6] * 3
    assert token_weights([2, 4, 0], "sequence-mean-token-sum", 10) == [1 / 20] * 3


@pytest.mark.parametrize("chunk", [4096, 3])
def test_fused_logprobs_equal_log_softmax(chunk: int) -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 8, dtype=torch.float64) for n in (10, 20))
    targets = torch.randint(0, 20, (10,))
    results = []
    for fused in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if fused:
            lp, entropy = fused_logprobs(h, w, targets, temperature=0.7, chunk=chunk)
        else:
            logs = ((h @ w.T) / 0.7).log_softmax(-1)
            lp, entropy = logs.gather(-1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
        (lp.sum() + 2 * entropy.sum()).backward()
        results.append((lp.double(), entropy.double(), h.grad, w.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def stream(prompt: list[int], answer: list[int], group: str = "") -> Experience:
    mask = torch.tensor([False] * len(prompt) + [True] * len(answer))
    return Experience(torch.tensor(prompt + answer), mask, len(prompt), group_id=group)


def test_packing_layout_by_hand() -> None:
    batch = pack_experiences([stream([9, 8, 7, 6], [1, 2, 3], "g"), stream([9, 8, 7, 6], [4, 5], "g")])
    assert batch.ids.tolist() == [9, 8, 7, 6, 1, 2, 3, 4, 5]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 4, 5]
    assert batch.span_ids.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert batch.span_parents.tolist() == [-1, 0, 0]
    assert batch.predecessor.tolist() == [-1, 0, 1, 2, 3, 4, 5, 3, 7]
    assert [s.tolist() for s in batch.source] == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 7, 8]]
    mask = attention_mask(batch.span_ids, batch.span_parents)
    assert mask[8].tolist() == [True] * 4 + [False] * 3 + [True] * 2
    assert mask[6].tolist() == [True] * 7 + [False] * 2


def test_different_prompts_or_groups_are_not_shared() -> None:
    for other in (stream([9, 9], [3], "g"), stream([9, 8], [3], "h"), stream([9, 8], [3], "")):
        batch = pack_experiences([stream([9, 8], [1], "g"), other])
        assert batch.span_parents.tolist() == [-1, -1]


streams = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(1, 4)).map(
        lambda t: stream([t[0]] * t[1], [7] * t[2], f"{t[0]}{t[1]}")
    ),
    min_size=1,
    max_size=8,
)


@given(streams, st.booleans(), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_packing_properties(experiences: list[Experience], share: bool, budget: int) -> None:
    batch = pack_experiences(experiences, share)
    mask = attention_mask(batch.span_ids, batch.span_parents)
    for e, rows in zip(experiences, batch.source, strict=True):
        assert torch.equal(batch.ids[rows], e.ids)
        assert torch.equal(batch.loss_mask[rows], e.loss_mask)
        assert batch.position_ids[rows].tolist() == list(range(len(e)))
        assert batch.predecessor[rows].tolist() == [-1, *rows[:-1].tolist()]
        for k, row in enumerate(rows.tolist()):  # a token sees exactly its own past
            assert mask[row].nonzero()[:, 0].tolist() == sorted(rows[: k + 1].tolist())
    packs = micro_batches(experiences, budget, share)
    assert sorted(i for pack in packs for i in pack) == list(range(len(experiences)))
    for pack in packs:
        row = len(pack_experiences([experiences[i] for i in pack], share).ids)
        assert row <= budget or len(pack) == 1


def test_importing_algos_needs_torch_only() -> None:
    code = (
        "import sys, audiorl, audiorl.algos.packing, audiorl.algos.losses, audiorl.algos.logprobs, "
        "audiorl.algos.advantages\n"
        "heavy = {'transformers', 'peft', 'datasets', 'soundfile', 'ray', 'vllm', 'deepspeed'} & set(sys.modules)\n"
        "sys.exit(str(sorted(heavy)) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
