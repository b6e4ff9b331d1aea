"""Reward models and process reward models: losses by formula, scores that know no batch, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.audio import AudioClip
from audiorl.config import LoraConfig, ModelConfig, OptimConfig, ProcessRewardConfig, RewardModelConfig
from audiorl.data.preferences import Pair, Steps
from audiorl.models import AudioPolicy, dualize, load_policy
from audiorl.models.examples import Example, experience
from audiorl.models.process_reward import ProcessRewardModel
from audiorl.models.value import ValueModel, load_value_model, score_answers
from audiorl.run.checkpoint import save_checkpoint
from audiorl.run.folder import Run
from audiorl.train.fit import Learner
from audiorl.train.reward_model import (
    judged_right,
    pair_score_loss,
    ranked_right,
    step_judgement_loss,
    train_process_reward,
    train_reward_model,
)
from audiorl.types import Message, Sample, Turn
from tests.conftest import Make, make_dual_omni, make_omni, make_text, readable
from tests.support.checkpoints import load_checkpoint
from tests.support.data_trainers import (
    UNCLIPPED,
    Gradients,
    assert_hears,
    assert_same_gradients,
    gradients,
    log_sigma,
    pairs_of,
    reward_model,
    times_heard,
)
from tests.support.gradients import gradients_of
from tests.support.speaking_models import codec
from tokenizers_audio import AudioTokenizer

__all__ = ["codec"]


def hidden_alone(policy: AudioPolicy, e: Experience) -> Tensor:
    """[L, H] of one experience in a pass of its own, in float64."""
    return policy.hidden(pack_experiences([e], share_prompts=False)).double()


def score_alone(model: ValueModel, sample: Sample, text: str) -> Tensor:
    last = hidden_alone(model.trunk, experience(model.trunk, Example(sample, text)))[-1]
    linear = model.head.linear
    return last @ linear.weight[0].double() + linear.bias[0].double()


def all_gradients(model: ValueModel) -> Gradients:
    return gradients_of(model.trainable())


def with_margins(samples: Sequence[Sample]) -> list[Pair]:
    return [Pair(p.sample, p.chosen, p.rejected, 0.5 * k) for k, p in enumerate(pairs_of(samples))]


@pytest.mark.parametrize("budget", [1, 190, 100_000])
@pytest.mark.parametrize("regulariser", [0.0, 0.1])
def test_loss_and_gradient_are_the_formula(samples: list[Sample], regulariser: float, budget: int) -> None:
    model, pairs = reward_model(make_omni()), with_margins(samples)
    each = []
    for p in pairs:
        good, bad = (score_alone(model, p.sample, t) for t in (p.chosen, p.rejected))
        each.append(-log_sigma(good - bad - p.margin) + regulariser * (good**2 + bad**2) / 2)
    expected = torch.stack(each).mean()
    expected.backward()
    grads = all_gradients(model)
    assert {"value_head.linear.weight", "value_head.linear.bias"} < grads.keys() or not regulariser
    config = RewardModelConfig(micro_batch_tokens=budget, regulariser=regulariser)
    metrics = Learner(pair_score_loss, model, config, UNCLIPPED).train(pairs)
    assert metrics["reward_model/loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(all_gradients(model), grads, 2e-5)  # float32: 1.2e-5 on CPUs without AVX-512


def test_length_debias_leaves_to_the_expert_what_length_explains(samples: list[Sample]) -> None:
    pairs, slope, scale = with_margins(samples), 1.5, 2.0
    model = reward_model(make_omni())
    each = []
    for p in pairs:
        good, bad = (score_alone(model, p.sample, text) for text in (p.chosen, p.rejected))
        tokens = [len(model.trunk.tokenizer.encode(text)) for text in (p.chosen, p.rejected)]
        each.append(
            -log_sigma(good - bad - p.margin + slope * torch.tanh(torch.tensor((tokens[0] - tokens[1]) / scale)))
        )
    expected = torch.stack(each).mean()
    expected.backward()
    grads = all_gradients(model)
    config = RewardModelConfig(length_debias=True, micro_batch_tokens=150)
    metrics = Learner(partial(pair_score_loss, expert=(slope, scale)), model, config, UNCLIPPED).train(pairs)
    assert metrics["reward_model/loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(all_gradients(model), grads, 2e-5)  # float32: 1.2e-5 on CPUs without AVX-512


def test_a_reward_model_hears_the_right_audio(make_policy: Make, samples: list[Sample]) -> None:
    def learn(policy: AudioPolicy, asked: Sequence[Sample]) -> float:
        pairs = [Pair(asked[0], "yes", "no why"), Pair(asked[1], "English Spanish", "who")]
        learner = Learner(pair_score_loss, reward_model(policy), RewardModelConfig(), UNCLIPPED)
        return learner.train(pairs)["reward_model/loss"]

    assert_hears(make_policy, samples, learn)


def test_a_score_does_not_depend_on_its_batch(make_any: Make, samples: list[Sample]) -> None:
    model = reward_model(make_any())
    asked = readable(model.trunk, samples)
    texts = [Example(s, t) for s in asked for t in ("yes", "no why English", "", "who")]
    with torch.no_grad():
        expected = [float(score_alone(model, e.sample, e.target)) for e in texts]
    assert max(expected) - min(expected) > 0.05
    for budget in (1, 150, 100_000):
        assert score_answers(model, texts, budget) == pytest.approx(expected, abs=1e-5)
    turned = [texts[i] for i in (3, 0, 7, 11, 4, 2, 1, 5, 6, 10, 9, 8)]  # neighbours no longer share a prompt
    by_text = dict(zip([(e.sample.id, e.target) for e in texts], expected, strict=True))
    assert score_answers(model, turned) == pytest.approx([by_text[e.sample.id, e.target] for e in turned], abs=1e-5)


@pytest.mark.parametrize("lora", [LoraConfig(rank=0), LoraConfig(rank=4, alpha=8)], ids=["whole", "lora"])
def test_a_reward_model_comes_back(make_policy: Make, samples: list[Sample], tmp_path: Path, lora: LoraConfig) -> None:
    make_policy().save(tmp_path / "base")
    config = ModelConfig(lora=lora, audio="projector")
    pairs = with_margins(samples)
    model = reward_model(load_policy(tmp_path / "base", config))
    worker = Learner(pair_score_loss, model, RewardModelConfig(), OptimConfig(lr=1e-2))
    worker.train(pairs)
    save_checkpoint(tmp_path / "step", model, worker.state(), {"step": 1})
    texts = [Example(p.sample, t) for p in pairs for t in (p.chosen, p.rejected)]
    expected = score_answers(model, texts)
    assert score_answers(load_value_model(tmp_path / "step"), texts) == expected

    torch.manual_seed(4)
    other = ValueModel(load_policy(tmp_path / "base", config), spread=1.0)
    resumed = Learner(pair_score_loss, other, RewardModelConfig(), OptimConfig(lr=1e-2))
    assert score_answers(other, texts) != expected
    trainer, _ = load_checkpoint(tmp_path / "step", other)
    resumed.load(trainer, "here")
    assert score_answers(other, texts) == expected
    assert worker.train(pairs) == resumed.train(pairs)
    for (name, a), b in zip(model.trainable().items(), other.trainable().values(), strict=True):
        assert torch.equal(a, b), name


def test_it_learns_a_separable_toy(samples: list[Sample], tmp_path: Path) -> None:
    """Chosen is always yes. Accuracy also on prompts that were not trained on."""
    pairs = [Pair(s, "yes", no) for s in samples for no in ("no", "why", "English")]
    model = reward_model(make_omni())
    assert sum(ranked_right(model, pairs)) < len(pairs)
    config = RewardModelConfig(steps=12, batch_size=3, save_every=100)
    with Run.create(tmp_path / "run", "r.py", [], config) as run:
        train_reward_model(model, pairs[:6], run, config=config, optim=OptimConfig(lr=1e-3))
    assert all(ranked_right(model, pairs))
    again = reward_model(make_omni())
    with Run.open(run.dir) as run:
        train_reward_model(again, pairs[:6], run, config=config, optim=OptimConfig(lr=1e-3))
    texts = [Example(p.sample, p.chosen) for p in pairs]
    assert score_answers(again, texts) == score_answers(model, texts)


def test_a_trained_tower_hears_each_clip_once_an_update(make_policy: Make, samples: list[Sample]) -> None:
    model = reward_model(make_policy(ModelConfig(audio="full")))
    worker = Learner(pair_score_loss, model, RewardModelConfig(micro_batch_tokens=1), UNCLIPPED)
    assert times_heard(model.trunk, lambda: worker.train(pairs_of(samples))) == len(samples)
    judge = Learner(step_judgement_loss, make_policy(ModelConfig(audio="full")), PROCESS, UNCLIPPED)
    assert times_heard(judge.policy, lambda: judge.train(steps_of(samples, soft=False))) == len(samples)


# -- process rewards --------------------------------------------------------------------------------------------------

PROCESS = ProcessRewardConfig(marker="\n\n", good="yes", bad="no")


def steps_of(samples: Sequence[Sample], soft: bool) -> list[Steps]:
    labels = [(0.9, 0.25), (0.0,), (1.0, 0.5, 0.1)] if soft else [(1.0, 0.0), (0.0,), (1.0, 1.0, 0.0)]
    texts = [("What is said?", "yes"), ("English Spanish French",), ("why", "no no", "who speaks")]
    return [Steps(s, t, x) for s, t, x in zip(samples, texts, labels, strict=False)]


def marker_logits(policy: AudioPolicy, item: Steps) -> Tensor:
    """[K, 2] of the good and the bad token after each step, from one pass a step over the text until there."""
    tokenizer = policy.tokenizer
    prompt = policy.prompt(item.sample).ids.tolist()
    both = [tokenizer.encode(t)[0] for t in (PROCESS.good, PROCESS.bad)]
    assert both[0] != both[1]
    ids, rows = list(prompt), []
    for step in item.steps:
        ids = [*ids, *tokenizer.encode(step), *tokenizer.encode(PROCESS.marker)]
        own = torch.arange(len(ids)) >= len(prompt)
        last = hidden_alone(policy, Experience(torch.tensor(ids), own, len(prompt), item.sample.audio))[-1]
        rows.append(policy.backbone.head(policy.model).weight.double()[both] @ last)
    return torch.stack(rows)


@pytest.mark.parametrize("budget", [1, 100_000])
@pytest.mark.parametrize("soft", [False, True])
def test_a_process_reward_is_the_mean_cross_entropy_of_all_steps(
    make_policy: Make, samples: list[Sample], soft: bool, budget: int
) -> None:
    policy, items = make_policy(), steps_of(samples, soft)
    logs = torch.cat([marker_logits(policy, i) for i in items]).log_softmax(-1)
    labels = torch.tensor([x for i in items for x in i.labels], dtype=torch.float64)
    expected = -(labels * logs[:, 0] + (1 - labels) * logs[:, 1]).sum() / 6
    expected.backward()
    grads = gradients(policy)
    config = ProcessRewardConfig(marker="\n\n", good="yes", bad="no", soft=soft, micro_batch_tokens=budget)
    metrics = Learner(step_judgement_loss, policy, config, UNCLIPPED).train(items)
    assert metrics["process_reward/loss"] == pytest.approx(expected.item(), rel=1e-5)
    right = (logs[:, 0] > logs[:, 1]) == (labels > 0.5)
    assert metrics["process_reward/accuracy"] == pytest.approx(float(right.double().mean()))
    assert_same_gradients(gradients(policy), grads, 1e-5)


def test_a_process_reward_model_hears_the_right_audio(make_policy: Make, samples: list[Sample]) -> None:
    def learn(policy: AudioPolicy, asked: Sequence[Sample]) -> float:
        worker = Learner(step_judgement_loss, policy, PROCESS, UNCLIPPED)
        return worker.train(steps_of(asked, soft=False)[:2])["process_reward/loss"]

    assert_hears(make_policy, samples, learn)


def test_a_judgement_does_not_depend_on_its_batch(make_any: Make, samples: list[Sample]) -> None:
    policy = make_any()
    items = steps_of(readable(policy, samples), soft=False)
    items.insert(1, Steps(items[0].sample, ("who", "why", "no"), (0.0, 0.0, 0.0)))  # shares its prompt with the first
    judge = ProcessRewardModel(policy, PROCESS.marker, PROCESS.good, PROCESS.bad)
    with torch.no_grad():
        expected = [marker_logits(policy, i).softmax(-1)[:, 0].tolist() for i in items]
    for budget in (1, 150, 100_000):
        found = judge.score_steps([(i.sample, i.steps) for i in items], budget)
        assert [len(f) for f in found] == [2, 3, 1, 3]
        for one, wanted in zip(found, expected, strict=True):
            assert one == pytest.approx(wanted, abs=1e-6)
    assert judge.score_steps([(items[3].sample, items[3].steps)])[0] == pytest.approx(expected[3], abs=1e-6)
    assert judge.score_steps([]) == []


def test_steps_about_a_spoken_prompt_are_judged_by_its_frames(codec: AudioTokenizer, samples: list[Sample]) -> None:
    """A clip of the assistant's is speech in frames; the tower hears the user's. Both reach the judgement."""
    policy = dualize(make_omni(), codec.num_codebooks, codec.codebook_size)
    policy.set_codec(codec)
    judge = ProcessRewardModel(policy, PROCESS.marker, PROCESS.good, PROCESS.bad)
    clips = [s.audio[0] for s in samples]

    def asked(heard: AudioClip, said: AudioClip) -> Sample:
        turns = (Message("user", (heard, "Who speaks?")), Message("assistant", (said,)), Message("user", ("Why?",)))
        return Sample("a", turns)

    def judged(heard: AudioClip, said: AudioClip) -> list[float]:
        return judge.score_steps([(asked(heard, said), ("yes", "no why"))])[0]

    found = judged(clips[0], clips[1])
    assert judged(clips[0], clips[2]) != found != judged(clips[2], clips[1])
    prompt, steps = policy.prompt(asked(clips[0], clips[1])), []
    ids: list[int] = []
    for step in ("yes", "no why"):
        ids += [*policy.tokenizer.encode(step), *policy.tokenizer.encode(PROCESS.marker)]
        row = prompt.followed_by(torch.tensor(ids), ())
        own = torch.arange(len(row)) >= len(prompt)
        e = Experience(row.ids, own, len(prompt), row.audio, codes=row.codes)
        e = e.replace(code_mask=torch.nn.functional.pad(own[:, None], (0, codec.num_codebooks - 1)))
        logits = policy.backbone.head(policy.model).weight.double()[list(judge.label_ids)] @ hidden_alone(policy, e)[-1]
        steps.append(logits.softmax(-1)[0].item())
    assert found == pytest.approx(steps, abs=1e-6)
    batch = [(asked(clips[0], clips[1]), ("yes", "no why")), (samples[0], ("yes",))]  # with frames and without
    assert judge.score_steps(batch)[0] == pytest.approx(found, abs=1e-6)


def test_an_answer_without_steps_has_no_scores(samples: list[Sample]) -> None:
    judge = ProcessRewardModel(make_omni(), PROCESS.marker, PROCESS.good, PROCESS.bad)
    marked = judge.mark(samples[0], ())
    assert (marked.experience.ids.dtype, marked.markers.dtype, len(marked.markers)) == (torch.long, torch.long, 0)
    alone, beside = judge.score_steps([(samples[0], ("yes",))])[0], [(samples[0], ()), (samples[0], ("yes",))]
    assert judge.score_steps([(samples[1], ())]) == [[]]
    assert judge.score_steps(beside) == [[], pytest.approx(alone, abs=1e-6)]


def test_what_is_not_answered_in_steps_is_refused(samples: list[Sample]) -> None:
    judge = ProcessRewardModel(make_dual_omni(), PROCESS.marker, PROCESS.good, PROCESS.bad)
    spoken = Sample("s", (Message("user", ("Why?",)),), metadata={"respond": "speech"})
    with pytest.raises(ValueError, match=r"'s': a prompt that opens speech is not answered in steps"):
        judge.score_steps([(spoken, ("yes",))])
    stream = Sample("t", (Message("user", ("Why?",)),), turns=(Turn(samples[0].audio[0], 1.0),))
    with pytest.raises(ValueError, match=r"'t': a stream is not answered in steps"):
        judge.score_steps([(stream, ("yes",))])


def test_a_process_reward_model_learns_and_comes_back(samples: list[Sample], tmp_path: Path) -> None:
    """A step is right when it says yes."""
    items = [Steps(s, (a, b), (float(a == "yes"), float(b == "yes"))) for s in samples for a, b in WORDS]
    policy = make_omni()
    config = ProcessRewardConfig(steps=25, batch_size=4, save_every=100, good="yes", bad="no")
    run = Run.create(tmp_path / "run", "r.py", [], config)
    train_process_reward(policy, items, run, config=config, optim=OptimConfig(lr=2e-3))
    judge = ProcessRewardModel(policy, config.marker, config.good, config.bad)
    assert all(judged_right(judge, items))
    loaded = ProcessRewardModel(load_policy(run.checkpoint("process_reward")), config.marker, config.good, config.bad)
    asked = [(i.sample, i.steps) for i in items]
    assert loaded.score_steps(asked) == judge.score_steps(asked)


WORDS = [("yes", "why"), ("why", "yes"), ("who", "French"), ("yes", "yes")]


@pytest.mark.parametrize(
    ("marker", "good", "bad", "message"),
    [
        ("\n\n", "yes", "yes", "begin with the same token"),
        ("\n\n", "+", "+x", "begin with the same token"),
        ("", "+", "-", "'' has no token"),
    ],
)
def test_texts_that_mark_no_step_are_refused(marker: str, good: str, bad: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProcessRewardModel(make_text(), marker, good, bad)
