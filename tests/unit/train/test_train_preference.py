"""Preference optimisation: every loss against its formula, one answer at a time, and the reference computed once.

Token log-probs w, l [n] of a chosen and a rejected answer under the policy; rw, rl under the reference.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from audiorl.algos.preference import WITHOUT_REFERENCE, kto_weights
from audiorl.config import OptimConfig, PreferenceConfig
from audiorl.data.preferences import Pair, pairs_to_judged
from audiorl.errors import Interrupted
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, answer_example
from audiorl.run.folder import Run
from audiorl.train import preference
from audiorl.train.fit import Learner, training_indices
from audiorl.train.preference import Compared, pair_examples, prefer, preference_loss, silenced_prompt
from audiorl.types import Message, Sample
from tests.conftest import Make, make_omni, make_text, readable
from tests.support.data_trainers import (
    UNCLIPPED,
    Gradients,
    alone,
    assert_hears,
    assert_same_gradients,
    contrasted,
    gradients,
    log_sigma,
    pairs_of,
    referenced,
)

OPTIONS: dict[str, dict[str, float]] = {
    "dpo": {"beta": 0.3},
    "dpo-norm": {"beta": 2.5},
    "cdpo": {"beta": 0.3, "label_smoothing": 0.2},
    "ipo": {"beta": 0.25},
    "r-dpo": {"beta": 0.3, "alpha": 0.05},
    "sampo": {"beta": 0.3},
    "ld-dpo": {"beta": 0.3, "alpha": 0.4},
    "simpo": {"beta": 2.5, "gamma": 0.7},
    "cpo": {"beta": 0.2, "alpha": 0.5},
    "orpo": {"lam": 0.3},
    "kto": {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7},
}
"""All options of every loss, none at its default."""
NAMES = {name for options in OPTIONS.values() for name in options}


def items_of(loss: str, samples: Sequence[Sample], make: Make) -> Sequence[Any]:
    pairs, reference = pairs_of(samples), make(seed=1)
    if loss == "kto":
        return contrasted(pairs, reference, drift=1.0)  # a baseline above 0
    return referenced(pairs, None if loss in WITHOUT_REFERENCE else reference)


def by_hand(name: str, w: Tensor, l: Tensor, rw: Tensor, rl: Tensor, o: dict[str, float], draw: Tensor) -> Tensor:
    """One pair's loss. `draw`: SamPO's positions of the longer answer."""
    h = (w.sum() - rw.sum()) - (l.sum() - rl.sum()) if len(rw) else torch.zeros(())
    n = min(len(w), len(l))
    if name == "dpo":
        return -log_sigma(o["beta"] * h)
    if name == "dpo-norm":
        return -log_sigma(o["beta"] * ((w - rw).mean() - (l - rl).mean()))
    if name == "cdpo":
        e = o["label_smoothing"]
        return -(1 - e) * log_sigma(o["beta"] * h) - e * log_sigma(-o["beta"] * h)
    if name == "ipo":
        return (h - 1 / (2 * o["beta"])) ** 2
    if name == "r-dpo":
        return -log_sigma(o["beta"] * h + o["alpha"] * (len(w) - len(l)))
    if name == "sampo":
        long, short = (w - rw, l - rl) if len(w) > len(l) else (l - rl, w - rw)
        gap = long[draw[:n]].sum() - short.sum()
        return -log_sigma(o["beta"] * (gap if len(w) > len(l) else -gap))
    if name == "ld-dpo":
        good, bad = (x[:n].sum() + o["alpha"] * x[n:].sum() for x in (w - rw, l - rl))
        return -log_sigma(o["beta"] * (good - bad))
    if name == "simpo":
        return -log_sigma(o["beta"] * w.mean() - o["beta"] * l.mean() - o["gamma"])
    if name == "cpo":
        return -log_sigma(o["beta"] * (w.sum() - l.sum())) - o["alpha"] * w.sum()
    assert name == "orpo"
    odds = [m - torch.log(1 - torch.exp(m)) for m in (w.mean(), l.mean())]
    return -w.mean() - o["lam"] * log_sigma(odds[0] - odds[1])


def answer_alone(policy: AudioPolicy, compared: Compared, number: int) -> Tensor:
    return alone(policy, compared.answers[number].sample, compared.answers[number].target)


def kto_by_hand(policy: AudioPolicy, items: Sequence[Compared], o: dict[str, float]) -> Tensor:
    with torch.no_grad():
        drift = [answer_alone(policy, i, 1).sum() - i.refs[1].double().sum() for i in items]
        z0 = torch.stack(drift).mean()
    assert z0 > 0.1
    each = []
    for i in items:
        gain = answer_alone(policy, i, 0).sum() - i.refs[0].double().sum() - z0
        sign, weight = (1, o["desirable_weight"]) if i.item.desirable else (-1, o["undesirable_weight"])
        each.append(weight * (1 - torch.sigmoid(sign * o["beta"] * gain)))
    return torch.stack(each).mean()


def pair_loss(policy: AudioPolicy, items: Sequence[Compared], name: str, worker: Learner) -> Tensor:
    each = []
    for place, i in enumerate(items):
        w, l = (answer_alone(policy, i, k) for k in (0, 1))
        rw, rl = (ref.double() for ref in i.refs[:2] or (torch.empty(0), torch.empty(0)))
        seed = worker.optimizer.updates * 1_000_003 + place
        draw = torch.randperm(max(len(w), len(l)), generator=torch.Generator().manual_seed(seed))
        each.append(by_hand(name, w, l, rw, rl, OPTIONS[name], draw))
    return torch.stack(each).mean()


def worker_of(policy: AudioPolicy, loss: str, optim: OptimConfig = UNCLIPPED, **config: Any) -> Learner:
    return Learner(preference_loss, policy, PreferenceConfig(loss=loss, **OPTIONS[loss], **config), optim)  # type: ignore[arg-type]


def assert_update(policy: AudioPolicy, worker: Learner, items: Sequence[Any], expected: Tensor) -> None:
    policy.model.zero_grad()
    expected.backward()
    grads = gradients(policy)
    metrics = worker.train(items)
    assert metrics["preference/loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(gradients(policy), grads, 1e-5)


@pytest.mark.parametrize("loss", list(OPTIONS))
def test_loss_and_gradient_are_the_formulas(make_policy: Make, samples: list[Sample], loss: str) -> None:
    policy = make_policy()
    items, worker = items_of(loss, samples, make_policy), worker_of(policy, loss)
    by_formula = kto_by_hand(policy, items, OPTIONS["kto"]) if loss == "kto" else pair_loss(policy, items, loss, worker)
    assert_update(policy, worker, items, by_formula)


@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_sft_coef_adds_the_chosen_tokens_mean(samples: list[Sample], loss: str) -> None:
    policy = make_omni()
    items, worker = items_of(loss, samples, make_omni), worker_of(policy, loss, sft_coef=0.4, micro_batch_tokens=150)
    chosen = torch.cat([answer_alone(policy, i, 0) for i in items])
    assert_update(policy, worker, items, pair_loss(policy, items, loss, worker) - 0.4 * chosen.mean())


@pytest.mark.parametrize("loss", ["dpo", "dpo-norm", "ld-dpo"])
def test_pairs_of_audio_and_the_anchor_are_added(make_policy: Make, samples: list[Sample], loss: str) -> None:
    """OPA-DPO: the chosen answer against itself after silenced audio, and against the reference alone."""
    policy, reference = make_policy(), make_policy(seed=1)
    beta = 0.1 if loss == "dpo-norm" else OPTIONS[loss]["beta"]  # its own is for means over tokens
    coefs = {"audio_coef": 0.2, "silenced": 0.5, "anchor_coef": 0.7}
    worker = worker_of(policy, loss, micro_batch_tokens=150, **coefs)
    items, each = [], []
    for i in referenced(pairs_of(samples), reference):
        other = answer_example(silenced_prompt(i.item.sample, 0.5), i.item.chosen)
        with torch.no_grad():
            ref = alone(reference, other.sample, other.target).float()
        items.append(replace(i, answers=(*i.answers, other), refs=(*i.refs, ref)))
        gain = answer_alone(policy, i, 0).sum() - i.refs[0].double().sum()
        lost = alone(policy, other.sample, other.target).sum() - ref.double().sum()
        each.append(-0.2 * log_sigma(beta * (gain - lost)) - 0.7 * log_sigma(beta * gain))
    assert_update(policy, worker, items, pair_loss(policy, items, loss, worker) + torch.stack(each).mean())


def test_silenced_audio_is_the_same_at_every_call_and_leaves_the_rest(samples: list[Sample]) -> None:
    with pytest.raises(ValueError, match="'t': audio_coef compares with silenced audio"):
        silenced_prompt(Sample("t", (Message("user", ("Why?",)),)), 0.3)
    first, again = (silenced_prompt(samples[0], 0.3).audio[0].load() for _ in range(2))
    wav = samples[0].audio[0].load()
    assert (first == again).all() and len(first) == len(wav)
    silent = (first != wav).reshape(-1)[: len(wav) // 1600 * 1600].reshape(-1, 1600).any(1)
    assert 0.2 < silent.mean() < 0.4 and not first[: len(silent) * 1600].reshape(-1, 1600)[silent].any()


@pytest.mark.parametrize("loss", list(OPTIONS))
def test_an_update_does_not_depend_on_budget_or_order(samples: list[Sample], loss: str) -> None:
    """SamPO's draw belongs to a place in the batch, so there only the budget may change."""
    items = items_of(loss, samples, make_omni)
    extra = {} if loss == "kto" else {"sft_coef": 0.3}
    found = []
    for budget, order in ((100_000, 1), (1, 1), (190, 1), *([] if loss == "sampo" else [(190, -1)])):
        policy = make_omni()
        worker = worker_of(policy, loss, micro_batch_tokens=budget, **extra)
        found.append((worker.train(items[::order]), gradients(policy)))
    metrics, grads = found[0]
    for other, others in found[1:]:
        assert other == pytest.approx(metrics, rel=1e-6, abs=2e-6)
        assert_same_gradients(others, grads, 1e-6)


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_preferences_hear_the_right_audio(make_policy: Make, samples: list[Sample], loss: str) -> None:
    """Against a reference that stays what it was."""

    def learn(policy: AudioPolicy, asked: Sequence[Sample]) -> float:
        texts = [("yes", "no why"), ("English Spanish", "who")]
        pairs = [Pair(s, *both) for s, both in zip(asked, texts, strict=False)]
        lengths = [len(policy.tokenizer.encode(t)) + 1 for both in texts for t in both]
        fixed = [torch.full((n,), -6.0) for n in lengths]
        items = [Compared(p, pair_examples(p), tuple(fixed[2 * k : 2 * k + 2])) for k, p in enumerate(pairs)]
        if loss == "kto":
            judged = pairs_to_judged(pairs)
            turned = [2, 3, 0, 1]
            items = [
                Compared(j, (Example(j.sample, j.answer), Example(j.sample, judged[t].answer)), (fixed[k], fixed[t]))
                for k, (j, t) in enumerate(zip(judged, turned, strict=True))
            ]
        return worker_of(policy, loss).train(items)["preference/loss"]

    assert_hears(make_policy, samples, learn)


def test_options_of_another_loss_are_refused() -> None:
    for loss, own in OPTIONS.items():
        PreferenceConfig(loss=loss, **own)  # type: ignore[arg-type]
        for name in NAMES - own.keys():
            with pytest.raises(ValueError, match=f"{name} is not an option of the loss '{loss}'"):
                PreferenceConfig(loss=loss, **{name: 0.1})  # type: ignore[arg-type]
    for loss in (*WITHOUT_REFERENCE, "kto"):
        with pytest.raises(ValueError, match="audio_coef is not an option"):
            PreferenceConfig(loss=loss, audio_coef=0.2)  # type: ignore[arg-type]
    others: list[tuple[dict[str, Any], str]] = [
        ({"loss": "kto", "sft_coef": 0.1}, "sft_coef is not an option"),
        ({"loss": "cdpo", "label_smoothing": 0.5}, r"label_smoothing is 0\.5"),
        ({"silenced": 0}, "silenced is 0"),
    ]
    for options, message in others:
        with pytest.raises(ValueError, match=message):
            PreferenceConfig(**options)


@pytest.mark.parametrize(("desirable", "undesirable"), [(10, 90), (90, 10), (11, 10), (4, 3), (3, 4), (1, 1), (7, 1)])
def test_kto_weights_balance_both_kinds(desirable: int, undesirable: int) -> None:
    good, bad = kto_weights(desirable, undesirable)
    assert 1 - 1e-9 <= good * desirable / (bad * undesirable) <= 4 / 3 + 1e-9
    assert min(good, bad) == 1


# -- the loop and its reference ---------------------------------------------------------------------------------------


def text_pairs(samples: Sequence[Sample], count: int = 6) -> list[Pair]:
    asked = readable(make_text(), list(samples))
    words = ("yes", "no", "why", "English", "Spanish", "French")
    return [Pair(asked[i % 3], words[i], f"{words[(i + 1) % 6]} who") for i in range(count)]


CONFIG = PreferenceConfig(steps=4, batch_size=2, save_every=1, micro_batch_tokens=1)
"""Each pair is a pack of its own, so forward passes count pairs."""


def train(
    items: Sequence[Any], run: Run, policy: AudioPolicy | None = None, config: PreferenceConfig = CONFIG
) -> AudioPolicy:
    policy = policy or make_text()
    with run:
        prefer(policy, items, run, config=config, optim=OptimConfig(lr=1e-3))
    return policy


def new_run(folder: Path) -> Run:
    return Run.create(folder, "r.py", [], CONFIG)


def watched(policy: AudioPolicy, then: Callable[[list[bool]], None] = lambda passes: None) -> list[bool]:
    """Forward passes of the decoder as they come: whether each was one that learns."""
    passes: list[bool] = []

    def hook(*_: Any) -> None:
        passes.append(torch.is_grad_enabled())
        then(passes)

    policy.backbone.decoder(policy.model).register_forward_hook(hook)
    return passes


def stop_at(count: int) -> Callable[[list[bool]], None]:
    """Ctrl-C in the pass of this number."""

    def then(passes: list[bool]) -> None:
        if len(passes) == count:
            os.kill(os.getpid(), signal.SIGINT)

    return then


def weights(policy: AudioPolicy) -> Gradients:
    return {n: p.detach().clone() for n, p in policy.trainable().items()}


def assert_equal_weights(a: AudioPolicy, b: AudioPolicy) -> None:
    for name, p in a.trainable().items():
        assert torch.equal(p, b.trainable()[name]), name


def reference_file(run: Run | Path, phase: str = "preference") -> Path:
    return (run if isinstance(run, Path) else run.dir) / "checkpoints" / phase / "reference.safetensors"


def kept(run: Run | Path) -> dict[str, Tensor]:
    """The reference's log-probs in a run folder."""
    return {name: t for name, t in load_file(reference_file(run)).items() if name != "items"}


def test_the_reference_is_computed_once_by_the_policy_before_it_learns(samples: list[Sample], tmp_path: Path) -> None:
    pairs, policy, run = text_pairs(samples), make_text(), new_run(tmp_path / "run")
    passes = watched(policy)
    before = weights(policy)
    train(pairs, run, policy)
    assert passes == [False] * 6 + [True] * 8
    assert any(not torch.equal(p, before[n]) for n, p in weights(policy).items())
    saved, untouched = kept(run), make_text()
    assert saved.keys() == {f"{i}/{k}" for i in range(6) for k in (0, 1)}
    with torch.no_grad():
        for i, pair in enumerate(pairs):
            for k, text in enumerate((pair.chosen, pair.rejected)):
                expected = alone(untouched, pair.sample, text).float()
                torch.testing.assert_close(saved[f"{i}/{k}"], expected, atol=2e-6, rtol=0)


def test_only_what_will_be_seen_is_computed(samples: list[Sample], tmp_path: Path) -> None:
    pairs, run = text_pairs(samples), new_run(tmp_path / "run")
    config = PreferenceConfig(steps=2, batch_size=2, micro_batch_tokens=1)
    train(pairs, run, config=config)
    wanted = training_indices(pairs, config, seed=0)
    assert len(wanted) == 4
    assert kept(run).keys() == {f"{i}/{k}" for i in wanted for k in (0, 1)}


def test_audio_is_silenced_once_a_prompt_of_what_will_be_seen(
    samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[Compared] = []
    monkeypatch.setattr(preference, "fit", lambda group, policy, items, *rest, **options: handed.extend(items))
    pairs = [Pair(s, word, "no why") for s in samples for word in ("yes", "no", "why")]
    config = PreferenceConfig(steps=2, batch_size=3, audio_coef=0.2)
    run = new_run(tmp_path / "run")
    train(pairs, run, make_omni(), config)
    seen = training_indices(pairs, config, seed=0)
    assert len(seen) == 6 < len(pairs)
    assert [len(c.answers) for c in handed] == [3 if i in seen else 2 for i in range(len(pairs))]
    assert all([len(x) > 0 for x in handed[i].refs] == [True] * 3 for i in seen)
    assert kept(run).keys() == {f"{i + start}/{k}" for i in seen for start, k in ((0, 0), (0, 1), (len(pairs), 0))}
    silenced = {id(handed[i].answers[2].sample): pairs[i].sample.id for i in seen}
    assert sorted(silenced.values()) == sorted({pairs[i].sample.id for i in seen})


@pytest.mark.parametrize("loss", ["dpo", "sampo", "kto"])
def test_training_goes_on_without_computing_the_reference_again(
    samples: list[Sample], tmp_path: Path, loss: str
) -> None:
    pairs = text_pairs(samples)
    items: Sequence[Any] = pairs_to_judged(pairs) if loss == "kto" else pairs
    config = PreferenceConfig(loss=loss, steps=4, batch_size=2, save_every=3, micro_batch_tokens=100_000)  # type: ignore[arg-type]
    whole = train(items, new_run(tmp_path / "a"), config=config)
    run, first, second = new_run(tmp_path / "b"), make_text(), make_text()
    count = {"dpo": 3, "sampo": 3, "kto": 5}[loss]  # inside the second step
    passes = watched(first, stop_at(count))
    with pytest.raises(Interrupted, match="after preference step 2"):
        train(items, run, first, config)
    assert passes.count(True) == 2
    passes = watched(second)
    train(items, Run.open(run.dir), second, config)
    assert passes == ([False, True] * 2 if loss == "kto" else [True] * 2)  # kto's baseline is no reference
    assert_equal_weights(second, whole)


def test_an_interrupted_reference_goes_on_where_it_was(
    samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preference, "REFERENCE_CHUNK", 2)
    pairs, first, second = text_pairs(samples), make_text(), make_text()
    whole = train(pairs, new_run(tmp_path / "a"))
    run = new_run(tmp_path / "b")
    passes = watched(first, stop_at(2))
    with pytest.raises(Interrupted, match="before preference step 1"):
        train(pairs, run, first)
    assert passes == [False] * 2 and len(kept(run)) == 4
    passes = watched(second)
    train(pairs, Run.open(run.dir), second)
    assert passes == [False] * 4 + [True] * 8
    assert_equal_weights(second, whole)
    assert kept(run).keys() == kept(tmp_path / "a").keys()


def test_a_reference_of_other_answers_is_refused(samples: list[Sample], tmp_path: Path) -> None:
    run, first = new_run(tmp_path / "run"), make_text()
    watched(first, stop_at(7))
    with pytest.raises(Interrupted):
        train(text_pairs(samples), run, first)
    with pytest.raises(ValueError, match=r"reference\.safetensors: holds the log-probs of other answers"):
        train(text_pairs(samples)[::-1], Run.open(run.dir))


def test_what_a_loss_cannot_learn_from_is_refused(samples: list[Sample], tmp_path: Path) -> None:
    pairs = text_pairs(samples)
    judged = pairs_to_judged(pairs)
    kto = PreferenceConfig(loss="kto", steps=1, batch_size=2)
    for name, items, config, message in (
        ("a", judged, CONFIG, "the loss 'dpo' learns from Pair rows"),
        ("b", pairs, kto, "the loss 'kto' learns from Judged rows"),
        ("c", [], CONFIG, "the data is empty"),
        ("d", judged[:2], kto, "all written answers are to one prompt"),
    ):
        with pytest.raises(ValueError, match=message):
            train(items, new_run(tmp_path / name), config=config)


def test_kto_contrasts_with_other_prompts_and_balances_both_kinds(
    samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pairs' two answers lie side by side: the next answer is not always a mismatched one, nor as good."""
    handed: list[Any] = []
    monkeypatch.setattr(
        preference, "fit", lambda group, policy, items, *rest, **options: handed.extend([*group.workers, items])
    )
    judged = pairs_to_judged(text_pairs(samples, 3))
    few = [j for j in judged if j.desirable] + judged[1:2]
    config = PreferenceConfig(loss="kto", steps=3, batch_size=2)
    given: list[dict[str, float]] = [{"desirable_weight": 0.8}, {"undesirable_weight": 3}, {"desirable_weight": 0}, {}]
    for name, items, own in (("a", judged, given[0]), *(("bcde"[k], few, own) for k, own in enumerate(given))):
        train(items, new_run(tmp_path / name), config=replace(config, **own))
    of_prompt = {j.sample.id: {k.answer for k in judged if k.sample.id == j.sample.id} for j in judged}
    assert all(i.answers[1].target not in of_prompt[i.item.sample.id] for i in handed[1])
    good = {j.answer: j.desirable for j in judged}
    assert all(good[i.answers[1].target] == i.item.desirable for i in handed[1])
    weights = [(w.config.desirable_weight, w.config.undesirable_weight) for w in handed[::2]]
    balanced = 3 * 3 / 4  # three good ones and a bad one
    expected = [(0.8, 0.8), (0.8, 0.8 * balanced), (3 / balanced, 3), (0, balanced), (1, balanced)]
    assert weights == [pytest.approx(both) for both in expected]
