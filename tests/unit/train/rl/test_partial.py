"""Answers that a later step goes on with: their log-probs, versions and groups, and what a resume repeats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.config import GenerationConfig, RLConfig, SamplingConfig
from audiorl.models import AudioPolicy
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine, token_versions
from audiorl.run.folder import Run
from audiorl.tasks.simul.streams import interpretation_sample
from audiorl.train.batches import gather
from audiorl.train.rl.collect import UnfinishedGroup, load_unfinished, save_unfinished
from audiorl.train.rl.train import train_rl
from audiorl.types import Rollout, Sample, Score
from tests.conftest import Make, make_dual_omni, make_omni, make_qwen2_audio, make_text, make_whisper, readable
from tests.support.overlapped_runs import CONFIG, OPTIM, SAMPLING, assert_same, column, even, rows
from tests.support.streams import stream

PARTIAL = replace(CONFIG, generation=GenerationConfig(overlap=True, partial_tokens=3), steps=6)


def train(
    folder: Path, samples: list[Sample], config: RLConfig = PARTIAL, reward: Any = even, resume: bool = False
) -> AudioPolicy:
    policy = make_omni()
    with Run.open(folder) if resume else Run.create(folder, "partial", [], config) as run:
        train_rl(policy, samples, reward, run, config=config, optim=OPTIM, sampling=SAMPLING)
    return policy


def moved(policy: AudioPolicy) -> None:
    """As if it had been trained."""
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    policy.weights_changed()


def logprobs(policy: AudioPolicy, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [policy.forward(pack_experiences([Experience.from_rollout(r)])).logprobs for r in rollouts]


def generate(engine: HFEngine, samples: Sequence[Sample], limit: int | None, paused: Sequence[Rollout] = ()) -> Any:
    if not paused:
        return engine.generate([Request(s, 3, seed=3, token_limit=limit) for s in samples])
    groups = [tuple(r for r in paused if r.sample is s) for s in samples]
    return engine.generate(
        [Request(s, len(g), seed=3, token_limit=limit, paused=g) for s, g in zip(samples, groups, strict=True) if g]
    )


@pytest.mark.parametrize("make", [make_omni, make_qwen2_audio, make_whisper, make_text], ids=lambda m: m.__name__)
@pytest.mark.parametrize("stop", [(), ("a",)], ids=["", "stop strings"])
def test_with_the_same_weights_a_paused_answer_is_the_ordinary_one(
    make: Make, stop: tuple[str, ...], samples: list[Sample]
) -> None:
    policy = make()
    samples = readable(policy, samples) if make is make_text else samples
    engine = HFEngine(policy, SamplingConfig(max_new_tokens=8, stop=stop))
    ordinary = generate(engine, samples, None)
    first = generate(engine, samples, 3)
    ended = {(r.sample.id, r.index): r for r in first if r.segments[0].stop_reason != "paused"}
    paused = [r for r in first if r.segments[0].stop_reason == "paused"]
    assert paused and all(len(r.segments[0].ids) == 3 for r in paused)
    while paused:
        again = generate(engine, samples, 3, paused)
        ended |= {(r.sample.id, r.index): r for r in again if r.segments[0].stop_reason != "paused"}
        paused = [r for r in again if r.segments[0].stop_reason == "paused"]
    for r in ordinary:
        a, b = r.segments[0], ended[r.sample.id, r.index].segments[0]
        assert (a.ids.tolist(), a.text, a.stop_reason) == (b.ids.tolist(), b.text, b.stop_reason)
        torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-5, rtol=0)


def test_each_token_keeps_the_logprob_of_the_weights_that_sampled_it(samples: list[Sample]) -> None:
    policy = make_omni()
    engine = HFEngine(policy, SAMPLING)
    paused = generate(engine, samples, 3)
    of_old = logprobs(policy, paused)
    moved(policy)
    engine.policy_version = 1
    ended = generate(engine, samples, None, paused)
    of_new = logprobs(policy, ended)
    assert [r.name for r in ended] == [r.name for r in paused]
    for before, after, old, new in zip(paused, ended, of_old, of_new, strict=True):
        a, b = before.segments[0], after.segments[0]
        assert token_versions(b).tolist() == [0] * 3 + [1] * (len(b.ids) - 3) and b.policy_version == 1
        assert b.prompt_ids.tolist() == a.prompt_ids.tolist() and b.ids[:3].tolist() == a.ids.tolist()
        assert b.logprobs[:3].tolist() == a.logprobs.tolist()
        torch.testing.assert_close(b.logprobs[:3], old, atol=1e-5, rtol=0)
        torch.testing.assert_close(b.logprobs[3:], new[3:], atol=1e-5, rtol=0)
        assert (b.logprobs[:3] - new[:3]).abs().max() > 1e-3
    # And so in the packed row that is trained on, where the ratio to the engine is taken for each token.
    batch = [Experience.from_rollout(r) for r in ended]
    engine_N = gather(batch, "rollout_logprobs")
    assert engine_N is not None and engine_N.tolist() == [p for r in ended for p in r.segments[0].logprobs.tolist()]


def test_groups_wait_and_are_trained_whole(samples: list[Sample], tmp_path: Path) -> None:
    """Answers of 8 tokens at most, 3 in a step: most take three steps, under three versions of the weights."""
    config = replace(PARTIAL, generation=GenerationConfig(partial_tokens=3))
    train(tmp_path / "out", samples, config)
    out = rows(tmp_path / "out")
    trained = [json.loads(line) for f in sorted((tmp_path / "out/rollouts").iterdir()) for line in f.open()]
    asked = config.steps * config.prompts_per_step
    groups = [row["group_id"] for row in trained]
    assert len(set(groups)) == asked and all(groups.count(g) == config.group_size for g in set(groups))
    assert max(r["rollout/partial"] for r in out) > 0.5 and max(r["rollout/partial_tokens"] for r in out) > 0.1
    assert max(r["rollout/staleness_max"] for r in out) >= 1 and out[-1]["rollout/paused"] == 0
    assert any(r["rollout/paused"] for r in out) and max(r["policy/logprob_gap"] for r in out) > 1e-3
    lengths = {len(row["segments"][0]["text"]) for row in trained}
    assert len(lengths) > 1


def test_an_interrupted_run_resumes_bit_by_bit(samples: list[Sample], tmp_path: Path) -> None:
    config = replace(PARTIAL, generation=GenerationConfig(True, 3), save_every=2)
    once = train(tmp_path / "once", samples, config)
    assert column(tmp_path / "once", "rollout/paused")[3] > 0, "answers wait over the checkpoint after step 4"
    calls = []

    def killed(rollouts: Sequence[Rollout]) -> list[Score]:
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("killed")
        return even(rollouts)

    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "out", samples, config, killed)
    assert_same(train(tmp_path / "out", samples, config, resume=True), once)
    for a, b in zip(rows(tmp_path / "once"), rows(tmp_path / "out"), strict=True):
        timeless = {k: v for k, v in a.items() if not k.startswith(("time", "tokens_per_s"))}
        assert timeless == {k: b[k] for k in timeless}


def waiting_groups(policy: AudioPolicy, samples: Sequence[Sample]) -> list[UnfinishedGroup]:
    engine = HFEngine(policy, SAMPLING)
    first = generate(engine, samples, 3)
    engine.policy_version = 4
    second = generate(engine, samples, 2, [r for r in first if r.segments[0].stop_reason == "paused"])
    return [UnfinishedGroup(Request(s, 3, 3, s.id), [r for r in second if r.sample is s]) for s in samples]


def test_groups_that_wait_are_read_as_they_were_written(samples: list[Sample], tmp_path: Path) -> None:
    policy = make_omni()
    groups = waiting_groups(policy, samples)
    save_unfinished(tmp_path, 2, groups)
    for one, other in zip(groups, load_unfinished(tmp_path, 2, policy, samples), strict=True):
        a, b = one.request, other.request
        assert (a.sample.id, a.seed, a.group_id, a.n) == (b.sample.id, b.seed, b.group_id, b.n)
        for r, s in zip(one.rollouts, other.rollouts, strict=True):
            a, b = r.segments[0], s.segments[0]
            assert (r.name, a.text, a.stop_reason) == (s.name, b.text, b.stop_reason)
            assert torch.equal(a.ids, b.ids) and torch.equal(a.logprobs, b.logprobs)
            assert a.policy_version == b.policy_version and token_versions(a).tolist() == token_versions(b).tolist()
            assert (a.policy_versions is None) == (b.policy_versions is None)
            assert torch.equal(a.prompt_ids, b.prompt_ids) and len(a.audio) == len(b.audio)
    with pytest.raises(ValueError, match=r"step_000002\.jsonl: sample '.*' is not in the data; resume with the data"):
        load_unfinished(tmp_path, 2, policy, samples[:1])
    with pytest.raises(ValueError, match=r"step_000009\.jsonl is missing"):
        load_unfinished(tmp_path, 9, policy, samples)


@pytest.mark.slow
def test_files_of_removed_checkpoints_go(samples: list[Sample], tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(out, samples, replace(PARTIAL, save_every=1))
    checkpoints = {p.name for p in (out / "checkpoints/rl").glob("step_*")}
    assert {p.stem for p in (out / "checkpoints/rl/unfinished").iterdir()} == {*checkpoints, "step_000004"}


def test_what_cannot_be_paused_is_refused(samples: list[Sample], speech: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"partial_tokens trains on tokens of older weights, .*: set tis_cap"):
        RLConfig(generation=GenerationConfig(partial_tokens=8))
    with pytest.raises(ValueError, match="partial_tokens is 0; it must be at least 1"):
        RLConfig(generation=GenerationConfig(partial_tokens=0), tis_cap=2.0)
    with pytest.raises(ValueError, match="is a stream, whose turns are short"):
        train(tmp_path / "stream", [interpretation_sample(stream(speech, 0, 2))] * 2)
    run = Run.create(tmp_path / "speech", "partial", [], PARTIAL)
    with pytest.raises(ValueError, match="partial_tokens: answers of a model that speaks cannot be paused"):
        train_rl(make_dual_omni(), samples, even, run, config=PARTIAL, optim=OPTIM, sampling=SAMPLING)
    with pytest.raises(ValueError, match="1 paused answers, but n is 2"):
        Request(samples[0], 2, paused=(Rollout(samples[0], (), "g"),))
