"""Everything that trains and generates, on a device that cannot be mixed with the host: the results are the host's.

`test_pretend_device.py` runs this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from audiorl.algos.experience import Experience
from audiorl.algos.packing import micro_batches
from audiorl.config import (
    CriticConfig,
    DistillConfig,
    KLConfig,
    LoraConfig,
    LossOptions,
    ModelConfig,
    OptimConfig,
    PreferenceConfig,
    RLConfig,
    SamplingConfig,
    SFTConfig,
)
from audiorl.data.corpus import Utterance
from audiorl.models import AudioPolicy, dualize
from audiorl.models.examples import Example, experience
from audiorl.models.families import higgs
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.run.checkpoint import save_checkpoint
from audiorl.tasks.simul.streams import interpretation_sample
from audiorl.tasks.tts.prompts import speech_sample
from audiorl.train.fit import Learner
from audiorl.train.preference import preference_loss
from audiorl.train.rl.distill import with_teacher_prompts
from audiorl.train.rl.trainer import TrainBatch, Trainer
from audiorl.train.sft import sft_loss
from audiorl.types import Message, Rollout, Sample
from tests.conftest import Make, make_omni, make_qwen2_audio, make_qwen3_omni, make_text, make_whisper, readable
from tests.support.checkpoints import load_checkpoint
from tests.support.data_trainers import contrasted, pairs_of, referenced
from tests.support.experiences import batch_of, with_advantage
from tests.support.pretend_device import pretend_device, register, to_device
from tests.support.streams import stream
from tests.support.unified_codec import tiny as tiny_codec
from tokenizers_audio.batches import decode_all, encode_all

register()
SPOKEN = [speech_sample("spoken", "Good morning."), Sample("written", (Message("user", ("Who speaks?",)),))]
ADVANTAGES = (1.0, -0.5, 0.25, -1.0, 0.5, 0.75)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def on_both(make: Make, run: Callable[[AudioPolicy], Any], config: ModelConfig | None = None) -> tuple[Any, Any]:
    """What `run` gives for the policy on the host, and on the device."""

    def fresh() -> AudioPolicy:
        torch.manual_seed(0)  # of adapters
        return make(config)

    host = run(fresh())
    with pretend_device():
        policy = fresh()
        to_device(policy.model)
        device = run(policy)
    return host, device


def make_higgs(config: ModelConfig | None = None) -> AudioPolicy:
    return higgs.tiny(["Good morning. Who speaks?"], config=config)


def make_dual(config: ModelConfig | None = None) -> AudioPolicy:
    return dualize(make_omni(config), 4, 64)


# -- the device itself -------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_devices_do_not_mix() -> None:
    with pretend_device() as counts:
        here, there = torch.ones(3), torch.ones(3, device="pretend")
        assert there.device.type == "pretend" and (there + 1).device == there.device
        for mixed in (
            lambda: here + there,
            lambda: torch.cat([there, here]),
            lambda: torch.where(there > 0, here, there),
            lambda: here[torch.zeros(1, dtype=torch.long, device="pretend")],
            lambda: there.index_put_((torch.tensor([0]),), torch.ones(2)),
            lambda: there.numpy(),
        ):
            with pytest.raises((RuntimeError, TypeError)):
                mixed()
        assert not counts.syncs
        there = there * torch.tensor(2.0)  # a scalar of the host may take part
        assert there[torch.tensor([0, 1])].cpu().tolist() == [2.0, 2.0]


@pytest.mark.smoke
@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: bool((x > 0).any()),
        lambda x: float(x[0]),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: torch.zeros(3).copy_(x),
        lambda x: torch.repeat_interleave(x, x.long()),
    ],
)
def test_waiting_for_the_device_is_counted(wait: Callable[[Any], Any]) -> None:
    with pretend_device() as counts:
        x = torch.ones(3).to("pretend")
        assert not counts.syncs and counts.copies.total() == 1
        (x * 2).cumsum(0).argmax()
        assert not counts.syncs
        wait(x)
        assert counts.syncs.total() == 1, counts


@pytest.mark.smoke
def test_gradients_are_those_of_the_host() -> None:
    layer = torch.nn.Linear(4, 3)
    layer(torch.ones(2, 4)).square().sum().backward()
    with pretend_device():
        other = torch.nn.Linear(4, 3)
        other.load_state_dict(layer.state_dict())
        to_device(other)
        other(torch.ones(2, 4, device="pretend")).square().sum().backward()
        assert other.weight.grad.device.type == "pretend"  # type: ignore[union-attr]
        torch.testing.assert_close(other.weight.grad.cpu(), layer.weight.grad)  # type: ignore[union-attr]


# -- rollouts ----------------------------------------------------------------------------------------------------------


def same_rollouts(host: Sequence[Rollout], device: Sequence[Rollout]) -> None:
    assert len(host) == len(device)
    for one, other in zip(host, device, strict=True):
        assert [s.ids.tolist() for s in one.segments] == [s.ids.tolist() for s in other.segments]
        for a, b in zip(one.segments, other.segments, strict=True):
            torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-5, rtol=0)
            assert a.codes is None or torch.equal(a.codes, b.codes)  # type: ignore[arg-type]


def generate(samples: Sequence[Sample], **sampling: Any) -> Callable[[AudioPolicy], list[Rollout]]:
    config = SamplingConfig(**({"max_new_tokens": 6} | sampling))
    return lambda policy: HFEngine(policy, config).generate([Request(s, 2, seed=3) for s in samples])


@pytest.mark.parametrize(
    "make", [make_omni, make_qwen2_audio, make_qwen3_omni, make_whisper], ids=lambda m: m.__name__[5:]
)
def test_answers_to_audio(make: Make, samples: list[Sample]) -> None:
    same_rollouts(*on_both(make, generate(samples)))


@pytest.mark.smoke
def test_answers_with_filters_and_stop_strings(samples: list[Sample]) -> None:
    run = generate(readable(make_text(), samples), top_k=20, top_p=0.9, stop=("a",))
    same_rollouts(*on_both(make_text, run))


def test_spoken_answers() -> None:
    same_rollouts(*on_both(make_higgs, generate(SPOKEN, max_frames=6)))


@pytest.mark.parametrize("make", [make_omni, make_dual], ids=["text", "speech"])
def test_streams(make: Make, speech: list[Utterance]) -> None:
    streams = [interpretation_sample(stream(speech, first, count)) for first, count in ((0, 2), (40, 3))]
    same_rollouts(*on_both(make, generate(streams, max_frames=6)))


def counted(make: Make, run: Callable[[AudioPolicy, int], list[Rollout]]) -> tuple[float, float, str]:
    """Syncs and copies for each further row of the longest rollout, and where they were; `run` takes a length."""
    policy = make()
    with pretend_device() as counts:
        to_device(policy.model)
        run(policy, 3)  # encodes the audio
        numbers = []
        for length in (3, 11):
            counts.clear()
            rollouts = run(policy, length)
            longest = max(len(s.ids) for r in rollouts for s in r.segments)
            numbers.append((longest, counts.syncs.total(), counts.copies.total()))
        (few, syncs, copies), (many, more_syncs, more_copies) = numbers
        assert many >= few + 5
        return (more_syncs - syncs) / (many - few), (more_copies - copies) / (many - few), str(counts)


def per_token(make: Make, samples: Sequence[Sample], **sampling: Any) -> tuple[float, float, str]:
    def run(policy: AudioPolicy, length: int) -> list[Rollout]:
        config = SamplingConfig(max_new_tokens=length, **sampling)
        return HFEngine(policy, config).generate([Request(s, 3, seed=3) for s in samples])

    return counted(make, run)


@pytest.mark.smoke
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_p": 0.9, "top_k": 20, "stop": ("zzz",)}], ids=str)
def test_a_token_waits_for_the_device_once(sampling: dict[str, Any], samples: list[Sample]) -> None:
    syncs, copies, where = per_token(make_text, readable(make_text(), samples), **sampling)
    assert syncs <= 1 and copies == 0, where


@pytest.mark.parametrize(
    "make", [make_omni, make_qwen2_audio, make_qwen3_omni, make_whisper], ids=lambda m: m.__name__[5:]
)
def test_a_token_of_an_answer_to_audio_waits_for_the_device_once(make: Make, samples: list[Sample]) -> None:
    syncs, copies, where = per_token(make, samples)
    assert syncs <= 1 and copies == 0, where


def test_a_frame_waits_for_the_device_once() -> None:
    def run(policy: AudioPolicy, length: int) -> list[Rollout]:
        return HFEngine(policy, SamplingConfig(max_frames=length)).generate([Request(SPOKEN[0], 3, seed=3)])

    syncs, _, where = counted(make_higgs, run)
    assert syncs <= 1, where


# -- training ----------------------------------------------------------------------------------------------------------


def trainer(policy: AudioPolicy, **changes: Any) -> Trainer:
    critic = CriticConfig(shared=changes.pop("shared", False), optim=OptimConfig(lr=1e-3))
    settings = {"steps": 4, "prompts_per_step": 2, "group_size": 3, "kl_beta": 0.04, "critic": critic} | changes
    return Trainer(policy, RLConfig(**settings), OptimConfig(lr=1e-3), 1.0, 8)


def same_metrics(host: dict[str, float], device: dict[str, float]) -> None:
    assert host.keys() == device.keys()
    assert device == pytest.approx(host, abs=1e-4)


def two_steps(batch: Sequence[Experience], **changes: Any) -> Callable[[AudioPolicy], dict[str, float]]:
    def run(policy: AudioPolicy) -> dict[str, float]:
        learner = trainer(policy, **changes)
        learner.step(TrainBatch(batch))
        return learner.step(TrainBatch(batch)).metrics

    return run


FULL = ModelConfig(audio="full")


@pytest.mark.parametrize(
    ("make", "config", "changes"),
    [
        pytest.param(make_omni, None, {}, id="grpo", marks=pytest.mark.smoke),
        pytest.param(make_omni, None, {"mini_batches": 2, "epochs": 2, "ema_decay": 0.9}, id="grpo, four updates"),
        pytest.param(make_omni, None, {"advantage": "gae", "kl": KLConfig(place="reward")}, id="ppo"),
        pytest.param(make_omni, None, {"advantage": "gae", "shared": True}, id="ppo, shared trunk"),
        pytest.param(make_omni, ModelConfig(lora=LoraConfig(rank=4)), {}, id="lora"),
        pytest.param(make_omni, ModelConfig(gradient_checkpointing=True), {}, id="gradient checkpointing"),
        pytest.param(make_omni, FULL, {"mini_batches": 2}, id="trained audio encoder"),
        pytest.param(make_qwen2_audio, FULL, {}, id="qwen2-audio"),
        pytest.param(make_qwen3_omni, FULL, {}, id="qwen3-omni"),
        pytest.param(make_whisper, FULL, {}, id="whisper"),
    ],
)
def test_reinforcement_learning(
    make: Make, config: ModelConfig | None, changes: dict[str, Any], samples: list[Sample]
) -> None:
    torch.manual_seed(0)
    same_metrics(*on_both(make, two_steps(batch_of(make(config), samples), **changes), config))


@pytest.mark.parametrize("loss", get_args(get_type_hints(RLConfig)["loss"]))
def test_every_loss(loss: str, samples: list[Sample]) -> None:
    batch = batch_of(make_text(), readable(make_text(), samples))
    same_metrics(*on_both(make_text, two_steps(batch, loss=loss)))


@pytest.mark.parametrize(
    "distill",
    [
        {"teacher": "policy"},
        {"divergence": "jsd", "entropy_gate": 5.9, "off_policy": 0.5},
        {"top_k": 5},
        {"top_k": 5, "top_k_of": "student"},
        {"divergence": "sampled"},
    ],
    ids=str,
)
def test_distillation(distill: dict[str, Any], samples: list[Sample]) -> None:
    config = DistillConfig(**({"coef": 1.0, "view": "text"} | distill))
    batch, answered = batch_of(make_omni(), samples), [experience(make_omni(), Example(samples[0], "yes"))]
    batch = with_teacher_prompts(batch, [s for s in samples[:2] for _ in range(3)], config)
    answers = with_teacher_prompts(answered, samples[:1], config) if config.off_policy else []

    def run(policy: AudioPolicy) -> dict[str, float]:
        learner = trainer(policy, distill=config, epochs=2)
        learner.step(TrainBatch(batch, answers=answers))
        return learner.step(TrainBatch(batch, answers=answers)).metrics

    same_metrics(*on_both(make_omni, run))


def spoken_batch() -> list[Experience]:
    rollouts = HFEngine(make_higgs(), SamplingConfig(max_new_tokens=5, max_frames=6)).generate(
        [Request(s, 3, seed=3) for s in SPOKEN]
    )
    return [with_advantage(Experience.from_rollout(r), a) for r, a in zip(rollouts, ADVANTAGES, strict=True)]


@pytest.mark.parametrize("ratio", ["frame", "code"])
def test_speech_is_learned(ratio: str) -> None:
    same_metrics(*on_both(make_higgs, two_steps(spoken_batch(), loss_options=LossOptions(frame_ratio=ratio))))


def test_supervised_fine_tuning(samples: list[Sample]) -> None:
    examples = [Example(s, "yes no") for s in samples]

    def run(policy: AudioPolicy) -> dict[str, float]:
        worker = Learner(sft_loss, policy, SFTConfig(), OptimConfig(lr=1e-3))
        worker.train(examples)
        return worker.train(examples)

    same_metrics(*on_both(make_omni, run, FULL))


@pytest.mark.parametrize("loss", ["dpo", "sampo", "ld-dpo", "orpo", "kto"])
def test_preferences(loss: str, samples: list[Sample]) -> None:
    pairs = pairs_of(samples)
    items: Sequence[Any] = contrasted(pairs, make_omni()) if loss == "kto" else referenced(pairs, make_omni())

    def run(policy: AudioPolicy) -> dict[str, float]:
        worker = Learner(preference_loss, policy, PreferenceConfig(loss=loss), OptimConfig(lr=1e-3))  # type: ignore[arg-type]
        worker.train(items)
        return worker.train(items)

    same_metrics(*on_both(make_omni, run))


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        pytest.param(make_omni, {}, id="grpo", marks=pytest.mark.smoke),
        pytest.param(make_omni, {"advantage": "gae", "shared": True}, id="ppo"),
        pytest.param(make_omni, {"loss": "gspo"}, id="gspo"),
        pytest.param(make_whisper, {}, id="whisper"),
        pytest.param(make_higgs, {"loss_options": LossOptions(frame_ratio="frame")}, id="speech, frames"),
        pytest.param(make_higgs, {"loss_options": LossOptions(frame_ratio="code")}, id="speech, codes"),
    ],
)
def test_a_micro_batch_waits_for_the_device_once(make: Make, changes: dict[str, Any], samples: list[Sample]) -> None:
    """And an update a few times more: for the norms of gradients and weights."""
    batch = spoken_batch() if make is make_higgs else batch_of(make(), samples)
    with pretend_device() as counts:
        policy = make()
        to_device(policy.model)
        learner = trainer(policy, **changes)
        learner.step(TrainBatch(batch))  # encodes the audio
        scored = learner.prepare(batch)
        syncs = []
        for budget in (100_000, 1):
            learner.config = replace(learner.config, micro_batch_tokens=budget)
            counts.clear()
            learner.step(TrainBatch(scored))
            syncs.append(counts.syncs.total())
        packs = len(micro_batches(scored, 1))
        assert packs >= 4 and len(micro_batches(scored, 100_000)) == 1
        assert (syncs[1] - syncs[0]) / (packs - 1) <= 1, counts
        assert syncs[0] <= 6, counts


@pytest.mark.parametrize("loss", ["sft", "dpo", "kto"])
def test_a_supervised_micro_batch_waits_for_the_device_once(loss: str, samples: list[Sample]) -> None:
    pairs, optim, syncs = pairs_of(samples), OptimConfig(lr=1e-3), []
    items: Sequence[Any] = contrasted(pairs, make_omni()) if loss == "kto" else referenced(pairs, make_omni())
    with pretend_device() as counts:
        for budget in (100_000, 1):
            policy = make_omni()
            to_device(policy.model)
            worker: Any
            if loss == "sft":
                worker = Learner(sft_loss, policy, SFTConfig(micro_batch_tokens=budget), optim)
                items = [Example(samples[i % 3], "yes no") for i in range(4)]
            else:
                config = PreferenceConfig(loss=loss, micro_batch_tokens=budget)  # type: ignore[arg-type]
                worker = Learner(preference_loss, policy, config, optim)
            worker.train(items)  # encodes the audio
            counts.clear()
            worker.train(items)
            syncs.append(counts.syncs.total())
    passes = 2 if loss == "kto" else 1  # kto also runs mismatched answers, to take their log-probs
    count = len(items)
    assert (syncs[1] - syncs[0]) / (passes * (count - 1)) <= 1, counts
    assert syncs[0] <= 4 + passes, counts


def test_a_checkpoint_continues_bit_by_bit(samples: list[Sample], tmp_path: Path) -> None:
    changes = {"advantage": "gae", "ema_decay": 0.9}
    batch = batch_of(make_omni(), samples)

    def fresh() -> Trainer:
        policy = make_omni()
        to_device(policy.model)
        return trainer(policy, **changes)

    with pretend_device():
        straight = fresh()
        straight.step(TrainBatch(batch))
        save_checkpoint(tmp_path / "step_1", straight.policy, straight.state(), {"step": 1})
        expected = straight.step(TrainBatch(batch)).metrics
        resumed = fresh()
        state, _ = load_checkpoint(tmp_path / "step_1", resumed.policy)
        resumed.load(state, "here")
        assert resumed.step(TrainBatch(batch)).metrics == expected
        for name, weight in resumed.policy.weights().items():
            assert torch.equal(weight, straight.policy.weights()[name]), name


# -- speech ------------------------------------------------------------------------------------------------------------


def test_a_codec_on_the_device_gives_the_codes_and_the_sound_of_the_host() -> None:
    """Also its identity, which checkpoints compare."""
    codec = tiny_codec()
    waves = [0.1 * torch.randn(length) for length in (4000, 5000, 4000)]
    codes, name = encode_all(codec, waves), codec.identity
    sounds = decode_all(codec, codes)
    with pretend_device():
        to_device(codec)
        assert codec.identity == name
        for there, here in zip(encode_all(codec, waves), codes, strict=True):
            assert there.device.type == "cpu" and torch.equal(there, here)
        for there, here in zip(decode_all(codec, codes), sounds, strict=True):
            assert there.device.type == "cpu"
            torch.testing.assert_close(there, here)
