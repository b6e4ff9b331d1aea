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
from audiorl.config.checks import pass_tokens
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
from tests.support.unified_codec import clips, tiny_training
from tests.support.unified_codec import tiny as tiny_codec
from tokenizers_audio.batches import decode_all, encode_all
from tokenizers_audio.unified.train import CodecTrainer

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
def test_devices_do_not_mix_and_waiting_is_counted() -> None:
    waits: list[Callable[[Any], Any]] = [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: torch.zeros(3).copy_(x),
        lambda x: torch.repeat_interleave(x, x.long()),
    ]
    with pretend_device() as counts:
        here, there = torch.ones(3), torch.ones(3, device="pretend")
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
        there = (there * torch.tensor(2.0)).cumsum(0)  # a scalar of the host may take part
        assert there.device.type == "pretend" and not counts.syncs
        for wait in waits:
            counts.clear()
            wait(there)
            assert counts.syncs.total() == 1, counts


# -- rollouts ----------------------------------------------------------------------------------------------------------


def same_rollouts(host: Sequence[Rollout], device: Sequence[Rollout]) -> None:
    assert len(host) == len(device)
    for one, other in zip(host, device, strict=True):
        assert [s.ids.tolist() for s in one.segments] == [s.ids.tolist() for s in other.segments]
        for a, b in zip(one.segments, other.segments, strict=True):
            torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-5, rtol=0)
            assert a.codes is None or torch.equal(a.codes, b.codes)  # type: ignore[arg-type]


def engine(policy: AudioPolicy, in_slots: bool = False, **sampling: Any) -> HFEngine:
    """`in_slots`: as on a GPU."""
    made = HFEngine(policy, SamplingConfig(**({"max_new_tokens": 6} | sampling)))
    made._in_slots = in_slots
    return made


def generate(samples: Sequence[Sample], **options: Any) -> Callable[[AudioPolicy], list[Rollout]]:
    return lambda policy: engine(policy, **options).generate([Request(s, 2, seed=3) for s in samples])


FILTERS = {"top_k": 20, "top_p": 0.9, "stop": ("a",)}


@pytest.mark.parametrize(
    ("make", "asked", "sampling"),
    [
        (make_omni, "audio", {}),
        (make_qwen2_audio, "audio", {}),
        (make_qwen3_omni, "audio", {}),
        (make_omni, "audio", {"in_slots": True}),
        (make_qwen3_omni, "audio", {"in_slots": True}),
        (make_whisper, "audio", {}),
        pytest.param(make_text, "text", FILTERS, marks=pytest.mark.smoke),
        (make_higgs, "spoken", {"max_frames": 6}),
        (make_omni, "streams", {}),
        (make_dual, "streams", {"max_frames": 6}),
    ],
)
def test_rollouts(
    make: Make, asked: str, sampling: dict[str, Any], samples: list[Sample], speech: list[Utterance]
) -> None:
    prompts: dict[str, Sequence[Sample]] = {
        "audio": samples,
        "text": readable(make_text(), samples),
        "spoken": SPOKEN,
        "streams": [interpretation_sample(stream(speech, first, count)) for first, count in ((0, 2), (40, 3))],
    }
    same_rollouts(*on_both(make, generate(prompts[asked], **sampling)))


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


@pytest.mark.parametrize(
    ("make", "sampling"),
    [
        pytest.param(make_text, {}, marks=pytest.mark.smoke),
        pytest.param(make_text, {"in_slots": True}, marks=pytest.mark.smoke),
        pytest.param(make_text, {"temperature": 0.0}, marks=pytest.mark.smoke),
        pytest.param(make_text, {"top_p": 0.9, "top_k": 20, "stop": ("zzz",)}, marks=pytest.mark.smoke),
        (make_omni, {}),
        (make_whisper, {}),
        (make_higgs, {}),
    ],
)
def test_a_token_or_frame_waits_for_the_device_once(
    make: Make, sampling: dict[str, Any], samples: list[Sample]
) -> None:
    asked = SPOKEN[:1] if make is make_higgs else readable(make(), samples)

    def run(policy: AudioPolicy, length: int) -> list[Rollout]:
        made = engine(policy, max_new_tokens=length, max_frames=length, **sampling)
        return made.generate([Request(s, 3, seed=3) for s in asked])

    syncs, copies, where = counted(make, run)
    # Of Higgs, attention makes a tensor on the device now and then.
    assert syncs <= (1.2 if make is make_higgs else 1) and (copies == 0 or make is make_higgs), where


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
def test_an_update_waits_for_the_device_twice(make: Make, changes: dict[str, Any], samples: list[Sample]) -> None:
    """However many micro-batches it has: for all metrics with the norms of gradients, and for the new weights. The
    log-probs of a reference, and the values of a critic, are one more each in a micro-batch."""
    batch = spoken_batch() if make is make_higgs else batch_of(make(), samples)
    with pretend_device() as counts:
        policy = make()
        to_device(policy.model)
        learner = trainer(policy, **changes)
        learner.step(TrainBatch(batch))  # encodes the audio
        counts.clear()
        learner.step(TrainBatch(batch))
        optimizers, filled = 1 + (learner.critic is not None), 1 + (learner.critic is not None)
        assert counts.syncs.total() <= 1 + optimizers + filled, counts
        scored = learner.prepare(batch)
        packs = len(micro_batches(scored, 1))
        assert packs >= 4 and len(micro_batches(scored, pass_tokens(learner.config))) == 1
        learner.config = replace(learner.config, micro_batch_tokens=1)
        counts.clear()
        learner.step(TrainBatch(scored))
        assert counts.syncs.total() <= 1 + optimizers, counts


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


def test_a_resumed_codec_training_has_its_state_on_the_device() -> None:
    """The fused optimizer asks it of the count of steps, too."""
    config = tiny_training(start_vectors=8, adversarial_after=0)
    host = CodecTrainer(tiny_codec(), config)
    host.step(clips(2, 4))
    with pretend_device():
        tokenizer = tiny_codec()
        to_device(tokenizer)
        resumed = CodecTrainer(tokenizer, config)
        resumed.load(host.state(), "here")
        for optimizer in (resumed.generator, resumed.judge):
            states = [value for own in optimizer.state.values() for value in own.values()]
            assert states and all(value.device.type == "pretend" for value in states)
