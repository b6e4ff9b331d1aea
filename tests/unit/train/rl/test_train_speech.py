"""The trainers on rollouts that speak: text tokens and frames of codes in one trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from audiorl.algos.experience import Experience
from audiorl.audio import AudioClip
from audiorl.config import (
    CriticConfig,
    KLConfig,
    LossOptions,
    OptimConfig,
    PreferenceConfig,
    RLConfig,
    SamplingConfig,
    SFTConfig,
)
from audiorl.data.corpus import bundled_speech
from audiorl.data.preferences import Pair
from audiorl.models import AudioPolicy, dualize
from audiorl.models.examples import Example, experience
from audiorl.models.families import higgs
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.speech import CodecSpeechDecoder
from audiorl.tasks.tts.prompts import speech_sample
from audiorl.train.fit import Learner
from audiorl.train.preference import pair_examples, preference_loss
from audiorl.train.rl.trainer import TrainBatch, Trainer
from audiorl.train.sft import sft_loss
from audiorl.types import Message, Rollout, Sample, Score, Turn
from tests.conftest import make_omni
from tests.support.data_trainers import contrasted, referenced
from tests.support.experiences import with_advantage
from tests.support.gradients import gradients_of
from tests.support.speaking_models import codec
from tokenizers_audio import AudioTokenizer

__all__ = ["codec"]
SPEAK = SamplingConfig(max_new_tokens=5, max_frames=6)
ADVANTAGES = (1.0, -0.5, 0.25, -1.0, 0.5, 0.75)


def policy() -> AudioPolicy:
    return higgs.tiny(["Good morning. Who speaks?"])


def rollouts(of: AudioPolicy, sampling: SamplingConfig = SPEAK) -> list[Rollout]:
    """Three answers that are spoken, and three to a question that asks for nothing."""
    asked = [speech_sample("spoken", "Good morning."), Sample("written", (Message("user", ("Who speaks?",)),))]
    return HFEngine(of, sampling).generate([Request(s, 3, seed=3) for s in asked])


def given(found: Sequence[Rollout]) -> list[Experience]:
    return [with_advantage(Experience.from_rollout(r), a) for r, a in zip(found, ADVANTAGES, strict=True)]


def worker(of: AudioPolicy, lr: float = 1e-3, audio_temperature: float | None = None, **changes: object) -> Trainer:
    config = RLConfig(**({"steps": 4, "prompts_per_step": 2, "group_size": 3} | changes))  # type: ignore[arg-type]
    optim = OptimConfig(lr=lr, max_grad_norm=1e9)
    return Trainer(of, config, optim, 1.0, 16, audio_temperature=audio_temperature)


def gradients(of: AudioPolicy) -> dict[str, Tensor]:
    return gradients_of(of.trainable())


def learn(learner: Trainer, batch: Sequence[Experience]) -> dict[str, float]:
    return learner.step(TrainBatch(learner.prepare(batch))).metrics


def test_the_kl_of_each_codebook() -> None:
    """A reference that differs in the second codebook alone."""
    own = policy()
    learner = worker(own, kl_beta=0.1)
    batch = learner.prepare(given(rollouts(own)))
    changed = []
    for e in batch:
        assert e.ref_logprobs is not None
        if e.code_mask is not None:
            moved = torch.where(e.code_mask, 0.5, 0.0)
            moved[:, [k for k in range(moved.shape[1]) if k != 1]] = 0
            e = e.replace(ref_logprobs=e.ref_logprobs + moved)
        changed.append(e)
    metrics = learner.step(TrainBatch(changed)).metrics
    assert own.speech is not None
    by_codebook = [metrics[f"kl_codebook_{k}"] for k in range(own.speech.codebooks)]
    assert by_codebook[1] > 0.05 and sum(by_codebook) == pytest.approx(metrics["kl_audio"])
    assert [by_codebook[0], *by_codebook[2:]] == pytest.approx([0] * (len(by_codebook) - 1), abs=1e-6)


def test_codebook_weights_choose_what_is_trained() -> None:
    """The head of a codebook with weight 0 gets no gradient, and weights of 1 are the default."""
    grads = {}
    own = policy()
    batch = given(rollouts(own))
    assert own.speech is not None
    count, size = own.speech.codebooks, own.speech.size
    for weights in ((), (1.0,) * count, (1.0,) + (0.0,) * (count - 1)):
        learner = worker(policy(), lr=1e-9, kl_beta=0.0, loss_options=LossOptions(codebook_weights=weights))
        learn_gradients = record_gradients(learner, batch)
        grads[weights] = learn_gradients["audio_lm_head.weight"].view(count, size, -1)
    plain, ones, first = grads.values()
    torch.testing.assert_close(plain, ones)
    torch.testing.assert_close(first[0], plain[0])
    assert bool(first[0].any()) and not bool(first[1:].any())
    with pytest.raises(ValueError, match="codebook_weights has 1 weights"):
        learn(worker(policy(), loss_options=LossOptions(codebook_weights=(1.0,))), batch)


def record_gradients(learner: Trainer, batch: Sequence[Experience]) -> dict[str, Tensor]:
    """The gradients of the update on `batch`, as the optimizer receives them."""
    recorded: dict[str, Tensor] = {}
    clip = learner.optimizer.clip

    def recording() -> Tensor:
        recorded.update({name: g.clone() for name, g in gradients(learner.policy).items()})
        return clip()

    learner.optimizer.clip = recording  # type: ignore[method-assign]
    learn(learner, batch)
    return recorded


def test_codes_and_frames_as_actions_have_the_same_first_gradient() -> None:
    """Where the ratio is 1 the gradient of a frame's ratio is the sum of its codes'; later the clips differ."""
    results = []
    for kind in ("code", "frame"):
        own = policy()
        learn(worker(own, kl_beta=0.0, loss_options=LossOptions(frame_ratio=kind), lr=1e-9), given(rollouts(own)))
        results.append(gradients(own))
    for name, grad in results[0].items():
        torch.testing.assert_close(grad, results[1][name], rtol=1e-4, atol=1e-7)


def test_a_frame_is_clipped_as_one_or_code_by_code() -> None:
    """Old log-probs 0.15 lower for every code: each ratio is e^0.15 < 1.2, that of two or more codes is beyond."""
    shares = {}
    for kind in ("code", "frame"):
        own = policy()
        learner = worker(own, lr=1e-9, kl_beta=0.0, loss_options=LossOptions(frame_ratio=kind), epochs=2)
        batch = [e.replace(advantages=e.loss_mask.float()) for e in learner.prepare(given(rollouts(own))[:3])]
        moved = []
        for e in batch:
            assert e.old_logprobs is not None and e.code_mask is not None
            moved.append(e.replace(old_logprobs=torch.where(e.code_mask, e.old_logprobs - 0.15, 0.0)))
        shares[kind] = learner.step(TrainBatch(moved)).metrics["policy/clip_frac"]
    assert shares["code"] == 0 and shares["frame"] > 0.3


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_gradient_does_not_depend_on_packing(beta: float) -> None:
    results = []
    for budget, share in ((10_000, True), (60, True), (1, True), (10_000, False)):
        own = policy()
        settings = {"kl_beta": beta, "entropy_coef": 0.01, "micro_batch_tokens": budget, "share_prompts": share}
        assert own.speech is not None
        options = LossOptions(codebook_weights=tuple(range(1, own.speech.codebooks + 1)))
        batch = given(rollouts(own))
        for i, e in enumerate(batch):  # a ratio of its own for every response
            assert e.rollout_logprobs is not None
            sampled = e.loss_mask if e.code_mask is None else e.code_mask
            batch[i] = e.replace(old_logprobs=torch.where(sampled, e.rollout_logprobs - 0.05 * i, 0.0))
        learner = worker(own, lr=1e-9, aggregation="token-mean", loss_options=options, **settings)
        metrics = learn(learner, batch)
        ratios = torch.repeat_interleave(
            torch.exp(0.05 * torch.arange(6)), torch.tensor([e.num_sampled for e in batch])
        )
        assert metrics["policy/ratio"] == pytest.approx(float(ratios.mean()), abs=1e-5)
        results.append((metrics, gradients(own)))
    for metrics, grads in results[1:]:
        for name in ("loss", "entropy", "entropy_audio", "entropy_text", "approx_kl", "clip_frac"):
            name = f"policy/{name}"
            assert metrics[name] == pytest.approx(results[0][0][name], rel=1e-4, abs=1e-7)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, results[0][1][name], rtol=1e-3, atol=1e-6)


def test_codes_of_another_temperature() -> None:
    own = policy()
    sampling = replace(SPEAK, audio_temperature=0.6)
    batch = given(rollouts(own, sampling))
    assert learn(worker(own, audio_temperature=0.6, lr=1e-9), batch)["policy/logprob_gap"] < 1e-5
    assert learn(worker(own, lr=1e-9), batch)["policy/logprob_gap"] > 1e-2


def test_ppo_values_every_row_and_frames_are_steps() -> None:
    own = policy()
    found = [r.with_score(Score(a)) for r, a in zip(rollouts(own), ADVANTAGES, strict=True)]
    learner = worker(own, advantage="gae", kl=KLConfig(place="reward", kind="k1"), critic=CriticConfig(), kl_beta=0.1)
    trained = learner.step(TrainBatch([Experience.from_rollout(r) for r in found]))
    assert trained.metrics["kl_audio"] == pytest.approx(0, abs=1e-6)
    assert np.isfinite(trained.metrics["critic/loss"]) and trained.metrics["grad_norm"] > 0


def tone(seconds: float, hz: float) -> AudioClip:
    t = np.arange(round(24_000 * seconds)) / 24_000
    return AudioClip(array=(0.3 * np.sin(2 * np.pi * hz * t)).astype(np.float32), sample_rate=24_000)


def test_speech_is_learned_as_it_would_be_sampled(codec: AudioTokenizer) -> None:
    own = policy()
    own.set_codec(codec)
    clip = tone(0.5, 300)
    e = experience(own, Example(speech_sample("a", "Good morning."), speech=(clip,)))
    codes = own.codes(clip)
    assert e.codes is not None and e.code_mask is not None and own.speech is not None
    assert torch.equal(own.speech.speeches(e.codes)[0], codes)
    # every code and the EOS of codebook 0, nothing else; the closing token is forced
    assert int(e.code_mask.sum()) == codes.numel() + 1
    assert int(e.loss_mask.sum()) == codes.shape[1] + codes.shape[0] - 1  # all rows but the first and the last
    assert e.ids[-1] == own.speech.end_id and not e.loss_mask[-1]

    both = experience(own, Example(Sample("b", (Message("user", ("hi",)),)), "yes", (clip, clip)))
    assert both.codes is not None
    assert own.speech.speeches(both.codes)[0].shape[1] == 2 * codes.shape[1]
    assert both.ids[-1] == own.end_id and both.loss_mask[-1]


def test_speech_examples_that_cannot_be_learned(codec: AudioTokenizer) -> None:
    own = policy()
    own.set_codec(codec)
    with pytest.raises(ValueError, match=r"sample 'a'.*recording to learn from"):
        experience(own, Example(speech_sample("a", "hi")))
    with pytest.raises(ValueError, match=r"sample 'a'.*no text before"):
        experience(own, Example(speech_sample("a", "hi"), "hi", (tone(0.3, 200),)))
    with pytest.raises(ValueError, match=r"sample 'w'.*writes text only"):
        experience(make_omni(), Example(Sample("w", (Message("user", ("hi",)),)), "hi", (tone(0.3, 200),)))


def test_a_stream_that_is_answered_in_speech(codec: AudioTokenizer) -> None:
    """A dualized Omni thinker hears chunks with its tower, and learns text and speech in each turn."""
    own = dualize(make_omni(), codec.num_codebooks, codec.codebook_size)
    own.set_codec(codec)
    heard = AudioClip(array=np.zeros(16_000, np.float32), sample_rate=16_000)
    said = tone(0.3, 400)
    turns = (Turn(heard, 1.0), Turn(heard, 2.0, "hola", speech=(said,)))
    stream = Sample("s", (Message("user", ("Translate.",)),), turns=turns)
    e = experience(own, Example(stream))
    assert e.codes is not None and e.segment is not None and own.speech is not None
    (spoken,) = own.speech.speeches(e.codes)
    assert torch.equal(spoken, own.codes(said))
    frames = e.codes[:, 0] >= 0
    assert bool((e.segment[frames] == 1).all())
    loss = Learner(sft_loss, own, SFTConfig(steps=1), OptimConfig(lr=1e-3)).train([Example(stream)])["sft/loss"]
    assert np.isfinite(loss)


def test_the_voice_decodes_what_was_said(codec: AudioTokenizer) -> None:
    own = policy()
    own.set_codec(codec)
    voice = CodecSpeechDecoder.of(own)
    found = rollouts(own)
    for rollout in found[:3]:
        wav = voice.waveform(rollout)
        assert rollout.segments[0].codes is not None and own.speech is not None
        (codes,) = own.speech.speeches(rollout.segments[0].codes)
        if codes.shape[1]:
            assert wav is not None
            assert len(wav) == round(codes.shape[1] * codec.sample_rate / codec.frame_rate)
            assert np.array_equal(wav, codec.decode(codes[None])[0].numpy())
        else:
            assert wav is None
    assert voice.waveform(found[3]) is None or found[3].segments[0].codes is not None
    with pytest.raises(ValueError, match="no speech decoder"):
        CodecSpeechDecoder.of(make_omni())


@pytest.mark.parametrize("loss", ["dpo", "simpo", "sampo", "kto"])
def test_preferences_between_spoken_answers(loss: str, codec: AudioTokenizer) -> None:
    """The chosen speech becomes more probable than the rejected one, which has the same prompt; so with a sentence."""
    own = dualize(make_omni(), 4, 64)
    own.set_codec(codec)
    clips = [u.clip for u in bundled_speech(min_seconds=0.8, max_seconds=1.5)[:4]]
    pairs = [
        Pair(speech_sample("a", "Good morning."), clips[0], clips[1]),
        Pair(speech_sample("b", "Who speaks?", voice=("Hello", clips[0])), clips[2], clips[3]),
        Pair(Sample("c", (Message("user", ("Who speaks?",)),)), "yes", "no why"),
    ]
    pairs = pairs[:2] if loss == "kto" else pairs  # an answer is contrasted with one that is spoken, too
    learner = Learner(preference_loss, own, PreferenceConfig(loss=loss), OptimConfig(lr=1e-3))  # type: ignore[arg-type]

    def margins() -> list[float]:
        return [float(c.sum() - r.sum()) for c, r in learner.logprobs([pair_examples(p) for p in pairs])]

    before = margins()
    items = contrasted(pairs, own) if loss == "kto" else referenced(pairs, own)
    for _ in range(6):
        metrics = learner.train(items)
    assert all(after > earlier + 0.1 for earlier, after in zip(before, margins(), strict=True))
    assert metrics["preference/accuracy"] > 0.5
