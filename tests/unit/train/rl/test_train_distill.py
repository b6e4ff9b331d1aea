"""Distillation in the trainer: gradients against autograd on full logits, what is paid once, mixing, and bad input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from audiorl.algos.distill import divergence
from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.config import (
    CriticConfig,
    DistillConfig,
    KLConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RLConfig,
    SamplingConfig,
)
from audiorl.distributed.local import LocalGroup
from audiorl.models import AudioPolicy
from audiorl.models.examples import Example, experience
from audiorl.models.families import qwen_omni
from audiorl.run.folder import Run
from audiorl.run.metrics_log import read_metrics
from audiorl.train.rl.distill import (
    Teacher,
    check_teacher_prompts,
    selected_tokens,
    shared_vocabulary,
    with_teacher_prompts,
)
from audiorl.train.rl.processes import GroupEngine, Workers, check_separate_teacher
from audiorl.train.rl.train import train_rl
from audiorl.train.rl.trainer import Separate, TrainBatch, Trainer
from audiorl.train.rl.workers import ReferenceWorker
from audiorl.types import Rollout, Sample, Score, Turn
from tests.conftest import TEXTS, make_omni
from tests.support.experiences import batch_of, with_advantage
from tests.support.trainer_steps import gradients

TEMPERATURE = 0.7
KINDS = pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def spoken(samples: list[Sample]) -> list[Sample]:
    """The questions with a transcript of their audio."""
    return [replace(s, metadata={"text": text}) for s, text in zip(samples, ("yes no", "why", "English"), strict=True)]


def learner(
    policy: AudioPolicy, distill: dict[str, Any], reference: Any = None, elsewhere: bool = False, **options: Any
) -> Trainer:
    """Does not clip gradients, so that they can be read after its update."""
    settings: dict[str, Any] = dict(steps=4, prompts_per_step=2, group_size=3, kl_beta=0.0, advantage="none") | options
    config = RLConfig(distill=DistillConfig(**({"coef": 1.0} | distill)), **settings)
    optim, separate = OptimConfig(lr=1e-3, max_grad_norm=1e9), Separate(reference=elsewhere)
    return Trainer(policy, config, optim, TEMPERATURE, 8, reference, separate=separate)


@torch.no_grad()
def disturb(policy: AudioPolicy, by: float = 0.05) -> None:
    rng = torch.Generator().manual_seed(1)
    for p in policy.trainable().values():
        p.add_(by * torch.randn(p.shape, generator=rng))


def batch(policy: AudioPolicy, spoken: Sequence[Sample], view: str = "transcript") -> list[Experience]:
    experiences = batch_of(policy, spoken[:2])
    prompts = [s for s in spoken[:2] for _ in range(3)]
    return with_teacher_prompts(experiences, prompts, DistillConfig(view=view))


def step(trainer: Trainer, experiences: Sequence[Experience], answers: Sequence[Experience] = ()) -> dict[str, float]:
    return trainer.step(TrainBatch(experiences, answers=answers)).metrics


def log_probs(policy: AudioPolicy, e: Experience) -> Tensor:
    """[N, V] from the full logits."""
    hidden = policy.predicting_hidden(pack_experiences([e]))
    return (policy.backbone.head(policy.model)(hidden) / TEMPERATURE).log_softmax(-1)


def as_teacher(policy: AudioPolicy, e: Experience) -> Experience:
    """The answer after the teacher's prompt."""
    assert e.teacher_prompt is not None
    prompt, ids = policy.prompt(e.teacher_prompt), e.ids[e.loss_mask]
    mask = torch.arange(len(prompt) + len(ids)) >= len(prompt)
    return Experience(torch.cat([prompt.ids, ids]), mask, len(prompt), prompt.audio)


def expected_gradient(
    policy: AudioPolicy, teacher: AudioPolicy, experiences: Sequence[Experience], kind: Any, beta: float = 0.5
) -> tuple[dict[str, Tensor], float]:
    """Of the mean over sequences of the mean over tokens, by autograd; and the mean over tokens."""
    policy.model.zero_grad()
    values = []
    for e in experiences:
        with torch.no_grad():
            theirs = log_probs(teacher, as_teacher(teacher, e))
        values.append(divergence(log_probs(policy, e), theirs, kind, beta))
    torch.stack([v.mean() for v in values]).mean().backward()
    found = {n: p.grad.clone() for n, p in policy.trainable().items() if p.grad is not None}
    policy.model.zero_grad()
    return found, float(torch.cat(values).detach().mean())


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-6) -> None:
    """Relative to the largest entry."""
    assert found.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    assert scale > 0
    for name in expected:
        torch.testing.assert_close(found[name] / scale, expected[name] / scale, atol=tolerance, rtol=0, msg=name)


# -- the loss ------------------------------------------------------------------------------------------------------


@KINDS
def test_the_gradient_is_that_of_the_full_logits(spoken: list[Sample], kind: str) -> None:
    policy, teacher = make_omni(), make_omni()
    trainer = learner(policy, {"divergence": kind, "beta": 0.3})
    disturb(policy)
    experiences = batch(policy, spoken)
    expected, mean = expected_gradient(policy, teacher, experiences, kind, 0.3)
    metrics = step(trainer, experiences)
    assert metrics["distill/divergence"] == pytest.approx(mean, rel=1e-4) and mean > 1e-3
    assert (metrics["distill/coef"], metrics["distill/skipped"]) == (1.0, 0.0)
    assert_close(gradients(policy), expected)


@KINDS
@pytest.mark.parametrize("top", [{}, {"top_k": 5}, {"top_k": 5, "top_k_of": "student"}], ids=["all", "top", "own top"])
def test_equal_views_have_no_divergence_and_no_gradient(spoken: list[Sample], kind: str, top: dict[str, Any]) -> None:
    """The policy is its own reference, under the same prompt."""
    policy = make_omni()
    trainer = learner(policy, {"divergence": kind, "view": "none", **top})
    metrics = step(trainer, batch(policy, spoken, "none"))
    assert abs(metrics["distill/divergence"]) <= 1e-6
    assert max(float(g.abs().max()) for g in gradients(policy).values()) <= 1e-6


@KINDS
def test_packed_is_single(spoken: list[Sample], kind: str) -> None:
    results = []
    for budget, share in ((10_000, True), (90, True), (1, True), (10_000, False)):
        policy = make_omni()
        trainer = learner(policy, {"divergence": kind}, micro_batch_tokens=budget, share_prompts=share)
        disturb(policy)
        results.append((step(trainer, batch(policy, spoken)), gradients(policy)))
    for metrics, found in results[1:]:
        assert metrics == pytest.approx(results[0][0], rel=1e-5, abs=1e-6)
        assert_close(found, results[0][1], 5e-6)


@pytest.mark.parametrize("of", ["teacher", "student"])
def test_all_tokens_as_the_top_are_the_whole_vocabulary(spoken: list[Sample], of: str) -> None:
    found = []
    for top in ({}, {"top_k": 10**6, "top_k_of": of}, {"top_k": 3, "top_k_of": of}):
        policy = make_omni()
        trainer = learner(policy, {"divergence": "jsd", **top})
        disturb(policy)
        found.append((step(trainer, batch(policy, spoken))["distill/divergence"], gradients(policy)))
    assert_close(found[1][1], found[0][1], 1e-5)
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4) and 0 < found[2][0] < found[0][0]


def test_mixed_with_an_estimator_the_gradients_add_up(spoken: list[Sample]) -> None:
    """Also with the KL to the same reference, under the policy's own prompt."""

    def gradient(coef: float, **options: Any) -> dict[str, Tensor]:
        policy = make_omni()
        trainer = learner(policy, {"coef": coef}, **({"advantage": "grpo"} | options))
        disturb(policy)
        step(trainer, batch(policy, spoken))
        return gradients(policy)

    grpo, alone = gradient(0.0, kl_beta=0.1), gradient(1.0, advantage="none")
    both = gradient(0.5, kl_beta=0.1)
    assert_close(both, {name: grpo[name] + 0.5 * alone[name] for name in grpo}, 5e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_with_a_critic(spoken: list[Sample], shared: bool) -> None:
    policy = make_omni()
    critic = CriticConfig(shared=shared, warmup_steps=1)
    trainer = learner(policy, {}, advantage="gae", critic=critic)
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    metrics = step(trainer, batch(policy, spoken))
    assert all(torch.equal(before[n], p) for n, p in policy.trainable().items())  # only the critic learns yet
    assert "critic/loss" in metrics
    metrics = step(trainer, batch(policy, spoken))
    assert metrics["distill/divergence"] > 0 and not torch.equal(
        *(x["lm_head.weight"] for x in (before, trained(policy)))
    )


def trained(policy: AudioPolicy) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in policy.trainable().items()}


# -- the advantage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", ["none", "grpo"])
def test_sampled_adds_the_log_ratio_to_each_advantage(spoken: list[Sample], advantage: str) -> None:
    policy, teacher = make_omni(), make_omni()
    trainer = learner(policy, {"divergence": "sampled", "coef": 0.5}, advantage=advantage)
    disturb(policy)
    experiences = batch(policy, spoken)
    ratios = []
    for e in experiences:
        places = torch.arange(e.num_sampled), e.ids[e.loss_mask]
        with torch.no_grad():
            ratios.append(log_probs(teacher, as_teacher(teacher, e))[places] - log_probs(policy, e)[places])
    extra = trainer.step(TrainBatch([with_advantage(e, 2.0) for e in experiences]))
    assert extra.advantages == pytest.approx([2 + 0.5 * float(r.mean()) for r in ratios], abs=1e-4)
    assert extra.metrics["distill/divergence"] == pytest.approx(-float(torch.cat(ratios).mean()), abs=1e-4)


# -- which tokens, which answers -----------------------------------------------------------------------------------


def test_a_teacher_that_is_unsure_is_not_followed(spoken: list[Sample]) -> None:
    policy = make_omni()
    entropies = torch.cat(
        [t.entropy for t in Teacher(policy, policy, gate(None), TEMPERATURE).outputs(batch(policy, spoken))]
    )
    middle = float(entropies.median())
    trainer = learner(policy, {"entropy_gate": middle})
    disturb(policy)
    metrics = step(trainer, batch(policy, spoken))
    assert metrics["distill/skipped"] == pytest.approx(float((entropies > middle).float().mean()))
    assert metrics["distill/teacher_entropy"] == pytest.approx(float(entropies.mean()), rel=1e-4)
    nothing = learner(make_omni(), {"entropy_gate": 0.0})
    metrics = step(nothing, batch(nothing.policy, spoken))
    assert metrics["distill/skipped"] == 1 and metrics["distill/divergence"] == metrics["grad_norm"] == 0


def gate(value: float | None) -> RLConfig:
    return RLConfig(advantage="none", kl_beta=0.0, distill=DistillConfig(coef=1.0, entropy_gate=value))


@pytest.mark.parametrize(
    ("text", "thought"),
    [
        ("<think>yes no</think><answer>why</answer>", "<think>yes no</think>"),
        ("<think>yes no", "<think>yes no"),
        ("<answer>why</answer>", ""),
        ("yes</think>why", "yes</think>"),
    ],
)
def test_thought_and_answer(text: str, thought: str) -> None:
    policy = make_omni()
    ids = torch.tensor(policy.tokenizer.encode(text, add_special_tokens=False))
    mask = selected_tokens(policy.decode, ids, "thought")
    assert (policy.decode(ids[mask]).startswith(thought) and policy.decode(ids[mask][:-1]) != thought) or not thought
    assert torch.equal(selected_tokens(policy.decode, ids, "answer"), ~mask)
    assert bool(mask.any()) == bool(thought) and bool(selected_tokens(policy.decode, ids, "all").all())


def test_only_the_selected_tokens_have_a_gradient(spoken: list[Sample]) -> None:
    """The parts add up to the whole; a response without tags is all answer."""
    policy = make_omni()
    trainer = learner(policy, {"tokens": "thought"})
    disturb(policy)
    metrics = step(trainer, batch(policy, spoken))
    assert metrics["distill/divergence"] == metrics["grad_norm"] == 0


def test_reference_answers_take_their_share(spoken: list[Sample]) -> None:
    """Off-policy share 1/2: half of the mean over sampled answers, half of that over the tokens of reference ones."""
    policy, teacher = make_omni(), make_omni()
    trainer = learner(policy, {"off_policy": 0.5})
    disturb(policy)
    experiences = batch(policy, spoken)
    given = with_teacher_prompts(
        [experience(policy, Example(s, "why")) for s in spoken[:2]], spoken[:2], DistillConfig()
    )
    on, _ = expected_gradient(policy, teacher, experiences, "reverse")
    off, mean = expected_gradient(policy, teacher, given, "reverse")
    metrics = step(trainer, experiences, given)
    assert metrics["distill/divergence_off_policy"] == pytest.approx(mean, rel=1e-4)
    assert_close(gradients(policy), {name: (on[name] + off[name]) / 2 for name in on}, 5e-6)


# -- the teacher ---------------------------------------------------------------------------------------------------


def test_the_teacher_reads_each_response_once(spoken: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_omni()
    trainer = learner(policy, {}, epochs=2, mini_batches=2)
    assert trainer.reference is not None
    read = []
    forward = trainer.reference.forward
    monkeypatch.setattr(
        trainer.reference,
        "forward",
        lambda batch, *a, **k: read.append(int(batch.loss_mask.sum())) or forward(batch, *a, **k),
    )
    experiences = batch(policy, spoken)
    step(trainer, experiences)
    assert sum(read) == sum(e.num_sampled for e in experiences)


def test_the_live_policy_as_it_was_when_the_step_began(spoken: list[Sample]) -> None:
    """Its own text view; with several updates the same as a frozen copy in the first step."""
    results = []
    for teacher in ("policy", "reference"):
        policy = make_omni()
        trainer = learner(policy, {"teacher": teacher}, epochs=2)
        assert (trainer.reference is None) == (teacher == "policy")
        results.append((step(trainer, batch(policy, spoken)), trained(policy)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for name, weight in results[0][1].items():
        torch.testing.assert_close(weight, results[1][1][name], atol=1e-6, rtol=0)


def test_under_an_adapter_the_reference_is_the_model_below(spoken: list[Sample]) -> None:
    policy = make_omni(ModelConfig(lora=LoraConfig(rank=2)))
    trainer = learner(policy, {})
    assert trainer.reference is not None and trainer.reference.is_base
    base = make_omni()
    disturb(policy)
    experiences = batch(policy, spoken)
    expected, mean = expected_gradient(policy, base, experiences, "reverse")
    assert step(trainer, experiences)["distill/divergence"] == pytest.approx(mean, rel=1e-4)
    assert_close(gradients(policy), expected, 1e-5)


def test_another_model_by_its_folder(spoken: list[Sample], tmp_path: Path) -> None:
    """A wider one, and the text model with the same tokenizer, which lacks the tokens of audio."""
    wide = qwen_omni.tiny(TEXTS, hidden=96, layers=2, vocab_size=400, whisper=False)
    wide.save(tmp_path / "wide")
    policy = make_omni()
    trainer = learner(policy, {"teacher": str(tmp_path / "wide")})
    experiences = batch(policy, spoken)
    expected, mean = expected_gradient(policy, wide, experiences, "reverse")
    assert step(trainer, experiences)["distill/divergence"] == pytest.approx(mean, rel=1e-4)
    assert_close(gradients(policy), expected)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    other = qwen_omni.tiny(["something else entirely " * 30], hidden=64, layers=2, vocab_size=400, whisper=False)
    other.save(tmp_path / "other")
    with pytest.raises(ValueError, match=r"distill.teacher .*other: token \d+ is .* the policy's tokenizer"):
        learner(make_omni(), {"teacher": str(tmp_path / "other")})
    with pytest.raises(
        ValueError, match=r"distill.teacher: give reference, policy, or the folder of a model: refrence"
    ):
        learner(make_omni(), {"teacher": "refrence"})


def test_further_tokens_behind_a_shared_vocabulary() -> None:
    policy, more = make_omni(), make_omni()
    assert shared_vocabulary(more, policy, "same") == len(policy.backbone.head(policy.model).weight)
    size = max(policy.tokenizer.get_vocab().values()) + 1
    more.tokenizer.add_tokens(["<|later|>"], special_tokens=True)
    assert shared_vocabulary(more, policy, "more") == shared_vocabulary(policy, more, "fewer") == size


@pytest.mark.parametrize("distill", [{"divergence": "sampled"}, {"divergence": "jsd", "top_k": 5}])
def test_a_teacher_in_another_process_gives_the_same_step(spoken: list[Sample], distill: dict[str, Any]) -> None:
    results = []
    for separate in (False, True):
        policy = make_omni()
        trainer = learner(policy, distill, elsewhere=separate)
        experiences = batch(policy, spoken)
        if separate:
            assert trainer.reference is None
            frozen = make_omni()
            sampling = SamplingConfig(temperature=TEMPERATURE)
            worker = ReferenceWorker(
                frozen, trainer.config, sampling, Teacher(frozen, frozen, trainer.config, TEMPERATURE)
            )
            experiences = [
                e.replace(teacher=t) for e, t in zip(experiences, worker.teacher_outputs(experiences), strict=True)
            ]
        disturb(policy)
        results.append((step(trainer, experiences), gradients(policy)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5, abs=1e-7)
    assert_close(*(found for _, found in results))


def test_processes_that_hold_the_teacher_fill_in_what_the_step_needs(spoken: list[Sample]) -> None:
    """Each for whole groups; log-probs for the KL only where there is one."""
    policy, distill = make_omni(), DistillConfig(coef=1.0, divergence="sampled")
    for beta in (0.0, 0.1):
        config = RLConfig(kl_beta=beta, distill=distill)
        teacher = Teacher(policy, policy, config, 1.0)
        group = LocalGroup([ReferenceWorker(policy, config, SamplingConfig(), teacher) for _ in range(2)])
        filled = Workers(config, group, GroupEngine(group), references=group).fill_in(batch(policy, spoken))
        assert all(e.teacher is not None and len(e.teacher.logprobs) == e.num_sampled for e in filled)
        assert all((e.ref_logprobs is not None) == (beta > 0) for e in filled)
    alive = RLConfig(kl_beta=0.0, distill=replace(distill, teacher="policy"))
    filled = Workers(alive, group, GroupEngine(group), references=group).fill_in(batch(policy, spoken))
    assert all(e.teacher is None for e in filled)


def test_a_whole_vocabulary_from_another_process_is_refused() -> None:
    for distill in ({}, {"top_k": 5, "top_k_of": "student"}):
        with pytest.raises(ValueError, match=r"runtime.references: .*distill.top_k 64"):
            check_separate_teacher(DistillConfig(coef=1.0, **distill))  # type: ignore[arg-type]
    check_separate_teacher(DistillConfig(coef=1.0, teacher="policy"))
    check_separate_teacher(DistillConfig())


# -- bad input, whole runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coef": -1.0}, "distill.coef is -1.0; it must be at least 0"),
        ({"coef": float("nan")}, "distill.coef is nan; it must be finite"),
        ({"beta": 1.0}, "distill.beta is 1.0; it must be between 0 and 1"),
        ({"entropy_gate": -0.1}, "distill.entropy_gate is -0.1; it must be at least 0"),
        ({"off_policy": 1.0}, "distill.off_policy is 1.0; it must be at least 0 and below 1"),
        ({"top_k": 4, "divergence": "sampled"}, "distill.top_k needs a distill.divergence over the vocabulary"),
        ({"off_policy": 0.5, "divergence": "sampled"}, "distill.off_policy needs a distill.divergence over"),
        ({"coef": 1.0, "teacher": "policy", "view": "none"}, "the policy under its own prompt is no teacher"),
        ({"view": ""}, "distill.view is ''; it must be a name"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistillConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": "none"}, "advantage 'none' trains nothing without distillation: set distill.coef"),
        ({"distill": DistillConfig(coef=1.0, view="none")}, "kl_beta and distill.coef both hold the policy to its"),
        ({"distill": DistillConfig(coef=1.0, off_policy=0.01)}, r"distill.off_policy 0.01 of 8 prompts is 0"),
        (
            {"distill": DistillConfig(coef=1.0), "advantage": "none", "dynamic_sampling": 2},
            "advantage 'none' does not compare groups of 8, of which dynamic_sampling drops those of equal rewards",
        ),
        (
            {"distill": DistillConfig(coef=1.0), "advantage": "none", "kl": KLConfig(place="reward")},
            "advantage 'none' reads no rewards: set kl.place 'loss'",
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RLConfig(**options)
    RLConfig(distill=DistillConfig(coef=1.0))  # the KL under the audio, distillation under the transcript


def test_bad_rows_are_named_before_the_first_step(samples: list[Sample], spoken: list[Sample], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import replace\nfrom audiorl.data.views import text_only\n"
        "def easier(sample):\n    return replace(text_only(sample), choices=('x',))\n"
    )
    for i, (rows, view, message) in enumerate(
        (
            ([spoken[0], samples[1]], "transcript", "sample 'sample-1': no transcript in metadata"),
            (spoken, f"{file}:easier", "changes the choices or references of sample 'sample-0'"),
            (spoken, "louder", "no view is called 'louder'"),
            ([replace(spoken[0], turns=(Turn(spoken[0].audio[0], 1.0),))], "none", "sample 'sample-0' is a stream"),
        )
    ):
        with pytest.raises(ValueError, match=message):
            check_teacher_prompts(rows, DistillConfig(coef=1.0, view=view))
        run = Run.create(tmp_path / f"run {i}", "distill", [], RLConfig())
        with pytest.raises(ValueError, match=message):
            train(run, rows, DistillConfig(coef=1.0, view=view))


def test_answers_with_frames_or_turns_are_refused(spoken: list[Sample]) -> None:
    policy = make_omni()
    e = batch(policy, spoken)[0]
    later = e.loss_mask.clone()
    later[e.prompt_length] = False  # something was observed between sampled tokens
    reader = Teacher(policy, policy, gate(None), TEMPERATURE)
    for wrong in (e.replace(loss_mask=later), e.replace(codes=torch.zeros(len(e), 2, dtype=torch.long))):
        with pytest.raises(ValueError, match=r"'sample-0': distillation is of answers in text to single prompts"):
            reader.outputs([wrong])


def even(rollouts: Sequence[Rollout]) -> list[Score]:
    return [Score(float((r.segments[0].ids % 2 == 0).float().mean())) for r in rollouts]


def train(run: Run, rows: Sequence[Sample], distill: DistillConfig, answers: Sequence[Example] = ()) -> AudioPolicy:
    policy = make_omni()
    beta = 0.0 if distill.view == "none" else 0.01
    config = RLConfig(steps=2, prompts_per_step=2, group_size=2, save_every=1, kl_beta=beta, distill=distill)
    sampling, optim = SamplingConfig(max_new_tokens=4), OptimConfig(lr=1e-3)
    train_rl(policy, rows, even, run, config=config, optim=optim, sampling=sampling, answers=answers)
    return policy


def test_a_run_with_reference_answers(spoken: list[Sample], tmp_path: Path) -> None:
    distill = DistillConfig(coef=1.0, divergence="jsd", off_policy=0.5)
    run = Run.create(tmp_path / "run", "distill", [], distill)
    with pytest.raises(ValueError, match=r"distill.off_policy is set, but this recipe gives no reference answers"):
        train(run, spoken, distill)
    train(run, spoken, distill, [Example(s, s.references[0]) for s in spoken])
    rows = read_metrics(run.dir / "metrics.jsonl")
    assert len(rows) == 2 and all(row["distill/divergence"] > 0 for row in rows)
    assert all(row["distill/divergence_off_policy"] > 0 and row["kl"] >= 0 for row in rows)
