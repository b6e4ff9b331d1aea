"""Trained models as rewards: the scores are the model's, whoever the policy is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from audiorl.config import SamplingConfig
from audiorl.models import load_policy
from audiorl.models.examples import Example
from audiorl.models.process_reward import ProcessRewardModel
from audiorl.models.value import score_answers
from audiorl.protocols import Request
from audiorl.rewards import ModelReward, ProcessModelReward, Term, WeightedSum
from audiorl.rollout.hf import HFEngine
from audiorl.types import Rollout, Sample, Segment
from tests.conftest import make_omni, make_qwen2_audio, make_text
from tests.support.data_trainers import reward_model


def said(sample: Sample, text: str) -> Rollout:
    nothing = torch.zeros(0, dtype=torch.long)
    return Rollout(sample, (Segment(nothing, nothing, torch.zeros(0), text, sample.audio),), sample.id)


def test_another_family_is_scored_as_the_model_scores(samples: list[Sample], tmp_path: Path) -> None:
    """The answers of a Qwen2-Audio under a reward model on a Qwen2.5-Omni."""
    model = reward_model(make_omni())
    model.save(tmp_path / "rm")
    rollouts = HFEngine(make_qwen2_audio(), SamplingConfig(max_new_tokens=6)).generate([Request(s, 3) for s in samples])
    expected = score_answers(model, [Example(r.sample, r.text) for r in rollouts])
    assert len(set(expected)) > 3
    found = [s.total for s in ModelReward(str(tmp_path / "rm"))(rollouts)]
    assert found == pytest.approx(expected, abs=1e-6)
    scaled = [s.total for s in ModelReward(str(tmp_path / "rm"), mean=0.5, std=2.0, max_batch_tokens=1)(rollouts)]
    assert scaled == pytest.approx([(x - 0.5) / 2 for x in expected], abs=1e-5)
    reward = WeightedSum((Term("model", ModelReward(str(tmp_path / "rm")), 3.0),))
    assert [s.parts["model"] for s in reward(rollouts)] == pytest.approx(expected, abs=1e-6)
    assert [s.total for s in reward(rollouts)] == pytest.approx([3 * x for x in expected], abs=1e-5)


def test_what_is_no_reward_model_is_refused(samples: list[Sample], tmp_path: Path) -> None:
    make_text().save(tmp_path / "policy")
    with pytest.raises(ValueError, match=r"no value_head\.safetensors"):
        ModelReward(str(tmp_path / "policy"))([said(samples[0], "yes")])
    with pytest.raises(ValueError, match=r"nowhere: neither a local folder"):
        ModelReward(str(tmp_path / "nowhere"))([said(samples[0], "yes")])


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("<think>one\ntwo</think><answer>2</answer>", ("<think>one", "two</think>", "<answer>2</answer>")),
        ("<think>a</think>\n\n<answer>b</answer>\n", ("<think>a</think>", "<answer>b</answer>")),
        (" one line ", ("one line",)),
        ("", ()),
        (" \n\n ", ()),
    ],
)
def test_an_answer_in_steps(text: str, steps: tuple[str, ...]) -> None:
    assert ProcessModelReward("x").steps(text) == steps
    other = ProcessModelReward("x", separator=";").steps("one; two\nthree</think>four")
    assert other == ("one", "two\nthree</think>", "four")


def test_the_worst_step_counts_and_an_empty_answer_scores_nothing(samples: list[Sample], tmp_path: Path) -> None:
    make_omni().save(tmp_path / "prm")
    texts = {"English\nwhy\nno": 0, "": 1, "yes": 1, "What is said?</think>Spanish": 2}
    rollouts = [said(samples[i], text) for text, i in texts.items()]
    judge = ProcessRewardModel(load_policy(tmp_path / "prm"), "\n\n", "yes", "no")
    scores = ProcessModelReward(str(tmp_path / "prm"), good="yes", bad="no")(rollouts)
    assert scores[1].total == 0 and scores[1].parts == {"mean": 0.0}
    for i, steps in ((0, ("English", "why", "no")), (2, ("yes",)), (3, ("What is said?</think>", "Spanish"))):
        (values,) = judge.score_steps([(rollouts[i].sample, steps)])
        assert scores[i].total == pytest.approx(min(values), abs=1e-6)
        assert scores[i].parts["mean"] == pytest.approx(sum(values) / len(values), abs=1e-6)
        assert len(steps) == 1 or max(values) > min(values)


def test_credit_per_step_stands_on_the_token_that_ends_it(samples: list[Sample], tmp_path: Path) -> None:
    policy = make_omni()
    policy.save(tmp_path / "prm")
    text = "<think>yes no\nwhy</think><answer>English</answer>"
    ids = torch.tensor([*policy.tokenizer.encode(text), policy.end_id])
    segment = Segment(
        torch.zeros(0, dtype=torch.long), ids, torch.zeros(len(ids)), policy.decode(ids), samples[0].audio
    )
    written = Rollout(samples[0], (segment,), "a")
    reward = ProcessModelReward(str(tmp_path / "prm"), good="yes", bad="no", credit="steps")
    steps = reward.steps(written.text)
    assert len(steps) == 3
    (values,) = reward.judge.score_steps([(samples[0], steps)])
    (score,) = reward([written])
    assert score.per_token is not None and len(score.per_token) == len(ids)
    assert score.total == pytest.approx(sum(values) / 3) == pytest.approx(sum(score.per_token))
    places = [k for k, credit in enumerate(score.per_token) if credit]
    assert [score.per_token[k] for k in places] == pytest.approx([v / 3 for v in values])
    for place, step in zip(places, steps, strict=True):
        assert policy.decode(ids[: place + 1]).rstrip().endswith(step) and step[-1] in policy.decode(ids[place])
    empty = Rollout(samples[0], (Segment(segment.prompt_ids, ids[-1:], torch.zeros(1), ""),), "a")
    assert reward([empty])[0].per_token == (0.0,)


def test_credit_per_step_needs_the_policys_tokenizer(samples: list[Sample], tmp_path: Path) -> None:
    make_omni().save(tmp_path / "prm")
    other = Segment(torch.zeros(0, dtype=torch.long), torch.tensor([5, 6]), torch.zeros(2), "yes")
    with pytest.raises(ValueError, match="reads differently under the process reward model's tokenizer"):
        ProcessModelReward(str(tmp_path / "prm"), good="yes", bad="no", credit="steps")(
            [Rollout(samples[0], (other,), "a")]
        )
