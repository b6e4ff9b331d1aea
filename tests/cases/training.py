"""Signs, noise and overflow in training: advantages of equal rewards, ratios beyond float32, steps without reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from audiorl.algos.advantages import (
    group_relative,
    process_relative,
    reinforce_plus_plus_baseline,
    rloo,
    step_index_relative,
    time_index_relative,
    whiten,
)
from audiorl.algos.experience import Experience
from audiorl.algos.experimental import gdpo, maxrl
from audiorl.algos.losses import (
    KLController,
    Loss,
    LossInputs,
    gspo_loss,
    kl_estimate,
    ppo_clip_loss,
    ratio_sums,
    tis_weights,
)
from audiorl.config import EstimatorConfig, GenerationConfig, KLConfig, RLConfig, SamplingConfig, ScoreConfig
from audiorl.rewards import StandardisedSum, WeightedSum
from audiorl.rollout.vllm import VLLMEngine
from audiorl.train.rl.advantages import compute_advantages, normalize_scores
from audiorl.train.rl.collect import RolloutBatch, scored_experiences, step_metrics
from audiorl.types import Rollout, Sample, Score, Segment
from tests.cases import Case, Refused

T = torch.tensor
R = math.sqrt(0.5)


def largest(found: torch.Tensor) -> float:
    return float(found.abs().max())


def two_groups(a: Sequence[float], b: Sequence[float], *weights: float, eps: float = 1e-4) -> torch.Tensor:
    """GDPO's advantages of eight answers with the terms `a` and eight with the terms `b`."""
    return gdpo(T([list(a)] * 8 + [list(b)] * 8), list(weights), ["a"] * 8 + ["b"] * 8, eps)


def answer(*credit: float, ends: Sequence[int] | None = None, group: str = "g", kl: float = 0.0) -> Experience:
    """One of a group: credit per token and the tokens that end its steps."""
    segment = Segment(torch.arange(2), torch.arange(len(credit)), torch.zeros(len(credit)))
    score = Score(sum(credit), per_token=credit, step_ends=None if ends is None else tuple(ends))
    e = Experience.from_rollout(Rollout(Sample("s", ()), (segment,), group, score=score))
    old = torch.where(e.loss_mask, kl, 0.0)
    return e.replace(old_logprobs=old, ref_logprobs=torch.zeros_like(old))


def normalised(*words: Sequence[float]) -> list[Experience]:
    """Answers of a word a token, after `scores.normalize`."""
    rollouts = [
        Rollout(
            Sample("s", ()), (Segment(torch.arange(2), torch.arange(len(w)), torch.zeros(len(w))),), "g"
        ).with_score(Score(sum(w), per_token=tuple(w), step_ends=tuple(range(len(w)))))
        for w in words
    ]
    return scored_experiences(
        RolloutBatch(rollouts, []), RLConfig(advantage="step-index", scores=ScoreConfig(normalize=True))
    )


def by_step(advantage: str, *answers: Experience, beta: float = 0.0, **changes: Any) -> list[list[float]]:
    config = RLConfig(advantage=advantage, estimator=EstimatorConfig(std=False), kl=KLConfig("k1", "reward"), **changes)
    found = compute_advantages(answers, config, beta)
    return [e.advantages[e.loss_mask].tolist() for e in found if e.advantages is not None]


def without_signal(advantage: str, *scores: Score, **config: Any) -> float:
    """The metric of one group of answers of two segments of a token, by which dynamic sampling drops it, too."""
    segments = tuple(Segment(torch.arange(2), torch.arange(1), torch.zeros(1)) for _ in range(2))
    rollouts = [Rollout(Sample("s", ()), segments, "g", score=score) for score in scores]
    return step_metrics(RolloutBatch(rollouts, []), 0, RLConfig(advantage=advantage, **config))["group/without_signal"]


def words(*credit: float) -> Score:
    return Score(sum(credit), per_token=credit, step_ends=(0, 1))


def terms(a: float, b: float, weight: float) -> Score:
    return Score(weight * a + b, {"a": a, "b": b}, weights={"a": weight, "b": 1.0})


def loss_and_gradient(loss: Callable[[LossInputs], Loss], advantage: float, old: float) -> tuple[float, float]:
    """Of one token of log-prob -0.1."""
    lp = T([-0.1], requires_grad=True)
    x = LossInputs(lp, T([old]), T([advantage]), T([1.0]), torch.zeros(1, dtype=torch.long))
    value, _ = loss(x)
    (gradient,) = torch.autograd.grad(value, lp)
    return float(value.detach()), float(gradient)


def k3(d: float) -> tuple[bool, bool]:
    lp = T([d], requires_grad=True)
    value = kl_estimate(lp, T([0.0])).sum()
    (gradient,) = torch.autograd.grad(value, lp)
    return math.isfinite(float(value.detach())), float(gradient) <= 0


def beta_after(config: KLConfig, *observed: float, samples: int = 64) -> bool:
    """Whether β is above 0, finite and has not grown where the KL was below its target."""
    state, before = KLController(0.01, config), 0.01
    for kl in observed:
        state = state.update(kl, samples)
        if not 0 < state.beta < math.inf or (kl < config.target and state.beta > before):
            return False
        before = state.beta
    return True


def unsigned(scores: Sequence[Score | None]) -> list[float]:
    return [abs(s.total) for s in scores if s is not None]


def rewarded(values: Sequence[float]) -> list[Score | None]:
    rollouts = [
        Rollout(Sample("s", ()), (Segment(torch.arange(1), torch.arange(1), torch.zeros(1)),), "g") for _ in values
    ]
    return StandardisedSum.of(a=lambda rollouts: [Score(v) for v in values])(rollouts)


def sum_of_terms(*terms: Score) -> Score | None:
    tokens = 4
    segment = Segment(torch.arange(1), torch.arange(tokens), torch.zeros(tokens))
    given = {f"t{i}": (lambda rollouts, t=t: [t]) for i, t in enumerate(terms)}
    return WeightedSum.of(**given)([Rollout(Sample("s", ()), (segment,), "g")])[0]


def ends_of(score: Score | None) -> Any:
    return None if score is None else score.step_ends


def vllm_logprobs(*logprobs: float | None) -> list[bool]:
    """Which log-probs of an answer are nan after the engine has read vLLM's output."""
    steps = [{i: SimpleNamespace(logprob=x)} for i, x in enumerate(logprobs)]
    answer = SimpleNamespace(token_ids=range(len(steps)), logprobs=steps, finish_reason="stop", stop_reason=None)
    left = [SimpleNamespace(request_id="0", finished=True, outputs=[answer])]
    engine = object.__new__(VLLMEngine)
    engine._num_inputs, engine._lora_request = 0, None
    engine._llm = SimpleNamespace(
        add_request=lambda *a, **k: None, has_unfinished_requests=lambda: left, step=lambda: [left.pop()]
    )
    ((buffer, _),) = engine._run([("s", None, None)])
    return buffer.fields()["logprobs"].isnan().tolist()  # type: ignore[no-any-return]


def paired(sampling: SamplingConfig, **options: Any) -> str:
    RLConfig(**options).check_sampling(sampling)
    return "accepted"


MASK = torch.ones(2, 4, dtype=torch.bool)
WORDS = T([[0, 1, 1, 1], [0, 1, 1, 1]])
MIXED = T([0.1] * 7 + [0.1 + 1e-3])

CASES = [
    Case("A1", "NVIDIA-NeMo/RL#4161", "GDPO, eight rewards of 0.7 and eight of 0.1",
         lambda _: largest(two_groups([0.7], [0.1], 1.0)), 0.0),
    Case("A1", "redai-studio/Relax#277", "GDPO, three terms that are constant in each group",
         lambda _: largest(two_groups([6 / 7, 0, 0], [0.9, 0, 0], 1.0, 0.5, 0.2)), 0.0),
    Case("A1", "huggingface/trl#6365", "GRPO, eight rewards of 2.6",
         lambda _: largest(group_relative(T([2.6] * 8), ["g"] * 8)), 0.0),
    Case("A1", "own", "GDPO, a group of three rewards of 1e6 + 0.1 and one of eight of -3e5 / 7",
         lambda _: largest(gdpo(T([[1e6 + 0.1]] * 3 + [[-3e5 / 7]] * 8), [1.0], ["a"] * 3 + ["b"] * 8)), 0.0),
    Case("A1", "own", "GDPO, two terms that cancel: right and 1 - right, weighed 1 each",
         lambda _: largest(gdpo(T([[x, 1 - x] for x in (0.1, 0.7, 0.3, 0.9, 0.2, 0.6)]), [1.0, 1.0], ["g"] * 6, 0.0)),
         0.0),
    Case("A1", "own", "REINFORCE++ with baseline, six rewards of 1e6 + 0.1 in each of two groups",
         lambda _: largest(reinforce_plus_plus_baseline(T([1e6 + 0.1] * 6 + [3e5 + 0.7] * 6), ["a"] * 6 + ["b"] * 6,
                                                        torch.ones(12, 5, dtype=torch.bool))), 0.0),
    Case("A1", "own", "RLOO and MaxRL, seven rewards of 1e5 / 3",
         lambda _: [largest(f(T([1e5 / 3] * 7), ["g"] * 7)) for f in (rloo, maxrl)], [0.0, 0.0]),
    Case("A1", "own", "GRPO with eps 0, four rewards of 0.3 and four of the next number of float32",
         lambda _: largest(group_relative(T([0.3] * 4 + [0.3 + 3e-8] * 4), ["g"] * 8, eps=0.0)), 0.0),
    Case("A1", "own", "whitening of 20 values of 1e6 + 0.1 of which one is the next number of float32",
         lambda _: largest(whiten(T([1e6 + 0.1] * 19 + [1e6 + 0.19]), torch.ones(20))), 0.0),
    Case("A1", "own", "time-index, streams of three turns with rewards 0.1, 1 / 3 and 2.6 each, seven of them",
         lambda _: largest(time_index_relative(T([[0.1, 1 / 3, 2.6]] * 7), torch.ones(7, 3), ["g"] * 7)), 0.0),
    Case("A1", "own", "step-index, words of 0.7 in six answers", lambda _: largest(step_index_relative(
        T([[0.7, 0.7]] * 6), torch.ones(6, 2), torch.ones(6, 2), ["g"] * 6)), 0.0),
    Case("A1", "own", "process, four steps of 0.7 in six answers",
         lambda _: largest(process_relative(T([[0.7] * 4] * 6), torch.ones(6, 4), torch.ones(6, 4), ["g"] * 6)), 0.0),
    Case("A1", "own", "scores.normalize, six scores of 1e9 + 0.1",
         lambda _: unsigned(normalize_scores([Score(1e9 + 0.1)] * 6, None, True)), [0.0] * 6),
    Case("A1", "own", "StandardisedSum, seven rewards of 1e9 + 0.1", lambda _: unsigned(rewarded([1e9 + 0.1] * 7)),
         [0.0] * 7),
    Case("A1", "own", "StandardisedSum, rewards of 1e6 and 1e6 + 0.005",
         lambda _: unsigned(rewarded([1e6, 1e6 + 5e-3])), [1.0, 1.0]),
    Case("A1", "own", "a small spread counts: 0.5 seven times and 0.500001 once, deviation 1e-6 / √8",
         lambda _: round(float(group_relative(T([0.5] * 7 + [0.500001]), ["g"] * 8, eps=0.0)[-1]), 4), 2.4749),
    Case("A1", "own", "a small spread counts: 0.1 seven times and 0.101 once, and so in GDPO",
         lambda _: [round(float(f[-1]), 3)
                    for f in (group_relative(MIXED, ["g"] * 8, eps=0.0), gdpo(MIXED[:, None], [1.0], ["g"] * 8, 0.0))],
         [2.475, 2.475]),
    Case("A1", "own", "a reward of 1e20: the advantages would be 0",
         lambda _: largest(group_relative(T([1e20, 0, 0, 0]), ["g"] * 4)), Refused("a reward of 1e+20")),
    Case("A1", "own", "a reward of 1e25 in a run, of a sample that is named",
         lambda _: by_step("grpo", answer(0, 1e25), answer(0, 1)), Refused("a reward of 1e+25 is too large")),
    Case("A1", "own", "StandardisedSum, a reward of 1e200", lambda _: unsigned(rewarded([1e200, 0.0])),
         Refused("a reward of 1e+200 is too large")),
    Case("A2", "bojieli/ai-agent-book#498", "GRPO with eps 0, three rewards of 1",
         lambda _: largest(group_relative(T([1.0] * 3), ["g"] * 3, eps=0.0)), 0.0),
    Case("A2", "huggingface/trl#5773", "GRPO with eps 0, six rewards of 2.6",
         lambda _: largest(group_relative(T([2.6] * 6), ["g"] * 6, eps=0.0)), 0.0),
    Case("A2", "own", "GRPO with eps 0, a group of one and one of rewards 0, 1",
         lambda _: group_relative(T([0.3, 0, 1]), ["a", "b", "b"], eps=0.0).tolist(), [0.0, -R, R]),
    Case("A2", "own", "GDPO with eps 0, no group has any signal",
         lambda _: largest(two_groups([1.0, 0.0], [0.0, 0.0], 1.0, 1.0, eps=0.0)), 0.0),
    Case("A2", "own", "process with eps 0, all steps 0",
         lambda _: largest(process_relative(torch.zeros(2, 4), MASK, WORDS, ["g", "g"], eps=0.0)), 0.0),
    Case("A2", "own", "step-index with eps 0, the first words equal and the second not",
         lambda _: step_index_relative(T([[0.7, 0.1], [0.7, 0.6]]), torch.ones(2, 2), torch.ones(2, 2), ["g", "g"],
                                       eps=0.0).tolist(), [[0.0, -R], [0.0, R]]),
    Case("A2", "own", "time-index with eps 0, a turn that one stream alone has", lambda _: time_index_relative(
        T([[0.0, 5.0], [1.0, 0.0]]), T([[1, 1], [1, 0]]), ["g", "g"], eps=0.0).tolist(), [[-R, 0.0], [R, 0.0]]),
    Case("A23", "OpenRLHF/OpenRLHF#1314", "PPO, A = 1, log-prob -0.1 of old -100",
         lambda _: loss_and_gradient(ppo_clip_loss, 1.0, -100.0), (-1.2, 0.0)),
    Case("A23", "OpenRLHF/OpenRLHF#1335", "PPO, A = 0, old log-prob -100",
         lambda _: loss_and_gradient(ppo_clip_loss, 0.0, -100.0), (0.0, 0.0)),
    Case("A23", "PrimeIntellect-ai/prime-rl#2085", "PPO with dual clip 3, A = -1, old log-prob -100",
         lambda _: loss_and_gradient(lambda x: ppo_clip_loss(x, dual_clip=3.0), -1.0, -100.0), (3.0, 0.0)),
    Case("A23", "own", "GSPO, A = 2, old log-prob -300", lambda _: loss_and_gradient(gspo_loss, 2.0, -300.0),
         (-2 * (1 + 4e-4), 0.0)),
    Case("A23", "own", "PPO, A = 5, old log-prob -1e4", lambda _: loss_and_gradient(ppo_clip_loss, 5.0, -1e4),
         (-6.0, 0.0)),
    Case("A23", "own", "PPO, A = 1, old log-prob -inf", lambda _: loss_and_gradient(ppo_clip_loss, 1.0, -math.inf),
         (-1.2, 0.0)),
    Case("A23", "own", "PPO, A = -1, a ratio of e^60 that nothing clips is as large as it is",
         lambda _: [round(math.log(x), 3) for x in loss_and_gradient(ppo_clip_loss, -1.0, -60.1)], [60.0, 60.0]),
    Case("A23", "own", "the metrics of a ratio of e^100 are finite",
         lambda _: all(math.isfinite(float(x)) for x in ratio_sums(T([100.0]), T([True]), T([1.0])).values()), True),
    Case("A23", "huggingface/trl#6637", "k3 where the reference has e^89 times the probability", lambda _: k3(-89.0),
         (True, True)),
    Case("A23", "own", "k3 at e^1000", lambda _: k3(-1000.0), (True, True)),
    Case("A23", "own", "β of the log-space controller with gain 10, KL below its target and above",
         lambda _: beta_after(KLConfig(control="log-space", gain=10.0), *[0.0] * 9, 1.0), True),
    Case("A23", "own", "β of the log-space controller with gain 5, which made it 0",
         lambda _: beta_after(KLConfig(control="log-space", gain=5.0), *[0.0] * 3), True),
    Case("A23", "own", "β of the horizon controller: 64 rollouts a step and a horizon of 3",
         lambda _: beta_after(KLConfig(control="horizon", horizon=3.0), *[0.0] * 5), True),
    Case("A23", "own", "β after 5000 steps of gain 100 below the target, and as many above",
         lambda _: beta_after(KLConfig(control="log-space", gain=100.0), *[0.0] * 5000, *[1.0] * 5000), True),
    Case("A24", "huggingface/trl#6693", "an engine's log-prob of nan, -0.1 of the trainer",
         lambda _: tis_weights(T([-0.1]), T([math.nan])).tolist(), [1.0]),
    Case("A24", "own", "the same with a cap of 0.5: the ratio is unknown, not capped",
         lambda _: tis_weights(T([-0.1]), T([math.nan]), 0.5).tolist(), [1.0]),
    Case("A24", "own", "nan among other tokens", lambda _: tis_weights(
        T([-1.0, -2.0, -3.0]), T([-1.0, math.nan, -3.0 - math.log(4)])).tolist(), [1.0, 1.0, 2.0]),
    Case("A24", "huggingface/trl#6297", "vLLM gives None, nan and -0.5", lambda _: vllm_logprobs(None, math.nan, -0.5),
         [True, True, False]),
    Case("A24", "own", "a trainer's own log-prob of nan stays an error",
         lambda _: math.isnan(float(tis_weights(T([math.nan]), T([-1.0])))), True),
    Case("A25", "huggingface/trl#6789", "top-p 0.5 with tis_cap 2",
         lambda _: paired(SamplingConfig(top_p=0.5), tis_cap=2.0), Refused("sampling.top_p 0.5 samples from a part")),
    Case("A25", "own", "top-k 20 with tis_cap 2", lambda _: paired(SamplingConfig(top_k=20), tis_cap=2.0),
         Refused("sampling.top_k 20")),
    Case("A25", "own", "top-p 0.9 of codec codes with tis_cap 2",
         lambda _: paired(SamplingConfig(audio_top_p=0.9), tis_cap=2.0), Refused("sampling.audio_top_p 0.9")),
    Case("A25", "own", "top-k of codec codes with overlapped rollouts, which need tis_cap",
         lambda _: paired(SamplingConfig(audio_top_k=5), tis_cap=2.0, generation=GenerationConfig(overlap=True)),
         Refused("sampling.audio_top_k 5")),
    Case("A25", "own", "top-p 0.5 without tis_cap, and tis_cap at a temperature of 0.7",
         lambda _: [paired(SamplingConfig(top_p=0.5)), paired(SamplingConfig(temperature=0.7), tis_cap=2.0)],
         ["accepted", "accepted"]),
    Case("A26", "own", "step-index, words of .5, 0, .9 and of .5, .8, .9: the second differ by 0.8",
         lambda _: by_step("step-index", answer(0.5, 0, 0.9, ends=(0, 1, 2)), answer(0.5, 0.8, 0.9, ends=(0, 1, 2))),
         [[0.0, -0.4, 0.0], [0.0, 0.4, 0.0]]),
    Case("A26", "own", "process, steps of (1, 0) and (1, 1): mean 0.75", lambda _: by_step(
        "process", answer(1, 0, ends=(0, 1)), answer(1, 1, ends=(0, 1))), [[-0.5, -0.75], [0.5, 0.25]]),
    Case("A26", "own", "step-index, two words that end on one token: the third is compared with the third",
         lambda _: by_step("step-index", answer(1.0, 0.2, ends=(0, 0, 1)), answer(0.4, 0.6, 0.8, ends=(0, 1, 2))),
         [[0.0, -0.3], [-0.05, 0.05, 0.3]]),
    Case("A26", "own", "process, two steps that end on the last token and a token after it",
         lambda _: by_step("process", answer(0.5, 1.5, 0.0, ends=(0, 1, 1)), answer(0, 0.25, ends=(1,))),
         [[0.3125, 0.375, 0.0], [-0.3125, -0.3125]]),
    Case("A26", "own", "step-index with β·KL of 0.1 on every token: no steps of their own",
         lambda _: by_step("step-index", answer(0, 0.4, 0, ends=(1, 2), kl=1.0), answer(0.6, 0, 0.2, ends=(0, 2)),
                           beta=0.1), [[-0.2, -0.2, -0.15], [0.2, 0.15, 0.15]]),
    Case("A26", "own", "terms of words and of the whole answer in a sum: the whole is the last token's",
         lambda _: ends_of(sum_of_terms(Score(0.5, per_token=(0.5, 0, 0, 0), step_ends=(0, 1)), Score(0.0))),
         (0, 1, 3)),
    Case("A26", "own", "two terms with the same words in a sum, two of which end on one token", lambda _: ends_of(
        sum_of_terms(*[Score(1.0, per_token=(0.5, 0, 0.5, 0), step_ends=(0, 0, 2))] * 2)), (0, 0, 2)),
    Case("A26", "own", "scores.normalize, words of .2, .6 and of .4, .6, .8: scaled by 2, and no word set apart",
         lambda _: by_step("step-index", *normalised([0.2, 0.6], [0.4, 0.6, 0.8])), [[-0.2, 0.0], [0.2, 0.0, 0.0]]),
    Case("A29", "own", "process, steps of (1, 0) and (0, 1): totals are equal, advantages are not",
         lambda _: without_signal("process", words(1, 0), words(0, 1)), 0.0),
    Case("A29", "own", "step-index, words of (.2, .8) and (.8, .2)",
         lambda _: without_signal("step-index", words(0.2, 0.8), words(0.8, 0.2)), 0.0),
    Case("A29", "own", "time-index, turns of (1, 0) and (0, 1)",
         lambda _: without_signal("time-index", Score(1.0, per_segment=(1, 0)), Score(1.0, per_segment=(0, 1))), 0.0),
    Case("A29", "own", "gdpo, terms of weights 2 and 1 with equal sums, which it weighs one by one",
         lambda _: without_signal("gdpo", terms(1, 0, 2), terms(0, 2, 2)), 0.0),
    Case("A29", "own", "gdpo, terms of equal weights that cancel",
         lambda _: without_signal("gdpo", terms(1, 0, 1), terms(0, 1, 1)), 1.0),
    Case("A29", "own", "grpo, steps of (1, 0) and (0, 1): it compares totals",
         lambda _: without_signal("grpo", words(1, 0), words(0, 1)), 1.0),
    Case("A29", "own", "process, equal steps within and between answers",
         lambda _: without_signal("process", words(0.2, 0.2), words(0.2, 0.2)), 1.0),
    Case("A29", "own", "grpo, totals of 2 and 3 with scores.clip 1",
         lambda _: without_signal("grpo", Score(2.0), Score(3.0), scores=ScoreConfig(clip=1.0)), 1.0),
]  # fmt: skip
