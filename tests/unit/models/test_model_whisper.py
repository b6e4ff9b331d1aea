"""Whisper as a policy: equal to transformers' model, packed as unpacked, rollouts under the trainer's log-probs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from audiorl.algos.packing import pack_experiences
from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, SamplingConfig
from audiorl.data.prompts import asr_prompt
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.examples import Example, experience
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.vllm import VLLMEngine
from audiorl.train.batches import idle_batch
from audiorl.types import Message, Sample
from tests.conftest import make_whisper
from tests.support.packing import assert_same, groups_of_three, logprobs, with_audio, with_gradients
from tests.support.rollouts import forced
from tests.support.rollouts import logprobs as logprobs_of

LANGUAGES = ("en", "es", "fr")


@pytest.fixture
def transcripts(samples: list[Sample]) -> list[Sample]:
    return [replace(s, messages=asr_prompt(s.audio[0], code)) for s, code in zip(samples, LANGUAGES, strict=True)]


@pytest.fixture(scope="module")
def policy() -> AudioPolicy:
    return make_whisper()


def memory(policy: AudioPolicy, clip: AudioClip) -> BaseModelOutput:
    """The encoder's output by transformers, on the features of the extractor itself."""
    features = policy.extractor(clip.load(), sampling_rate=16_000, return_tensors="pt").input_features
    return BaseModelOutput(last_hidden_state=policy.model.model.encoder(features).last_hidden_state)


def test_log_probs_and_gradients_equal_transformers(samples: list[Sample], transcripts: list[Sample]) -> None:
    """The clips end in 50 ms of zeros: after a clip that ends in sound, the extractor's first frame of silence still
    contains some of it, and ours does not."""
    policy = make_whisper(ModelConfig(audio="full"))
    quiet = np.zeros(800, dtype=np.float32)
    clips = [AudioClip(array=np.concatenate([s.audio[0].load(), quiet]), sample_rate=16_000) for s in samples]
    samples, transcripts = (
        [with_audio(s, c) for s, c in zip(several, clips, strict=True)] for several in (samples, transcripts)
    )
    for batch in (groups_of_three(policy, transcripts), groups_of_three(policy, samples)):
        stock = []
        for e in batch:
            ids = e.ids[e.ids != policy.audio_token_id]
            logs = policy.model(encoder_outputs=memory(policy, e.audio[0]), decoder_input_ids=ids[None]).logits[0]
            answer = len(e) - e.prompt_length
            stock.append(logs[-answer - 1 : -1].log_softmax(-1).gather(-1, ids[-answer:, None])[:, 0])
        expected = with_gradients(policy, stock)
        for share in (False, True):
            assert_same(with_gradients(policy, logprobs(policy, batch, share)), expected)


def test_the_engine_samples_under_the_trainers_logprobs(
    policy: AudioPolicy, samples: list[Sample], transcripts: list[Sample]
) -> None:
    """Requests of different length, clips of different length, rows that end while others go on."""
    requests = [Request(s, n, seed=1) for n, s in enumerate([*samples, *transcripts], 1)]
    rollouts = HFEngine(policy, SamplingConfig(max_new_tokens=10)).generate(requests)
    assert len({len(r.segments[0].ids) for r in rollouts}) > 1
    torch.testing.assert_close(forced(policy, rollouts), logprobs_of(rollouts), atol=1e-5, rtol=0)


def test_greedy_transcripts_equal_generate(policy: AudioPolicy, transcripts: list[Sample]) -> None:
    """A policy that was trained a little, so that its answers differ by clip and end by themselves."""
    policy = policy.copy()
    optimizer = torch.optim.AdamW(policy.trainable().values(), lr=3e-3)
    texts = ("yes", "no why", "Which language")
    lesson = [experience(policy, Example(s, text)) for s, text in zip(transcripts, texts, strict=True)]
    for _ in range(60):
        (-policy.forward(pack_experiences(lesson)).logprobs.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    rollouts = HFEngine(policy, SamplingConfig(max_new_tokens=20)).generate(
        [Request(s, 1, greedy=True) for s in transcripts]
    )
    assert [r.text for r in rollouts] == list(texts)
    for r in rollouts:
        (segment,) = r.segments
        start = segment.prompt_ids[segment.prompt_ids != policy.audio_token_id]
        stock = policy.model.generate(
            encoder_outputs=memory(policy, segment.audio[0]), decoder_input_ids=start[None], max_new_tokens=20
        )
        written = segment.ids[segment.ids != policy.end_id].tolist()
        assert stock[0, -len(written) :].tolist() == written


def test_a_transcript_is_asked_for_in_whispers_tokens(policy: AudioPolicy, transcripts: list[Sample]) -> None:
    for sample, code in zip(transcripts, LANGUAGES, strict=True):
        text = policy.tokenizer.decode(policy.prompt(sample).ids).replace("<|startoflm|>", "")
        assert text == f"<|startoftranscript|><|{code}|><|transcribe|><|notimestamps|>"
    answer = experience(policy, Example(transcripts[0], "yes no"))
    written = answer.ids[answer.loss_mask]
    assert policy.tokenizer.decode(written) == " yes no<|endoftext|>" and policy.decode(written) == "yes no"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: asr_prompt(c),
            "sample 'row-7': Whisper needs the language of a recording: give the row \"language\"",
        ),
        (lambda c: asr_prompt(c, "tlh"), "no language 'tlh'"),
        (lambda c: (Message("user", ("What?",)),), "one recording, got 0"),
        (lambda c: asr_prompt(AudioClip(array=np.ones(200, np.float32), sample_rate=16_000), "es"), "too short"),
        (lambda c: (Message("user", (c, c)),), "one recording, got 2"),
        (lambda c: (Message("system", ("Be brief.",)), Message("user", (c,))), "one user turn"),
        (lambda c: (Message("user", (c, "<|es|> What?")),), "reserved token"),
    ],
)
def test_what_whisper_cannot_read_is_refused(policy: AudioPolicy, samples: list[Sample], change, message: str) -> None:
    sample = Sample("row-7", change(samples[0].audio[0]))
    with pytest.raises(ValueError, match=message):
        policy.prompt(sample)


def test_a_text_beyond_the_positions_is_refused(policy: AudioPolicy, samples: list[Sample]) -> None:
    long = replace(samples[0], messages=(Message("user", (samples[0].audio[0], "why " * 500)),))
    with pytest.raises(ValueError, match=r"sample-0.*its prompt has 503 tokens, the model reads at most 448 of text"):
        HFEngine(policy).generate([Request(long)])


def test_the_folder_is_transformers_own(policy: AudioPolicy, transcripts: list[Sample], tmp_path: Path) -> None:
    policy.save(tmp_path / "model")
    loaded = load_policy(tmp_path / "model")
    batch = groups_of_three(policy, transcripts)
    assert torch.equal(torch.cat(logprobs(loaded, batch)), torch.cat(logprobs(policy, batch)))
    assert torch.equal(loaded.prompt(transcripts[1]).ids, policy.prompt(transcripts[1]).ids)
    assert loaded.trainable().keys() == policy.trainable().keys() and loaded.stop_ids == policy.stop_ids
    stock, info = WhisperForConditionalGeneration.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(stock.model.decoder.layers[1].fc2.weight, policy.model.model.decoder.layers[1].fc2.weight)
    with pytest.raises(ValueError, match="vLLM does not serve model_type 'whisper' here"):
        VLLMEngine(tmp_path / "model")


def test_a_pass_without_audio_is_finite() -> None:
    """Under ZeRO a rank without work runs one, times 0."""
    policy = make_whisper()
    out = policy.forward(idle_batch(policy))
    (0 * out.logprobs.sum()).backward()
    assert bool(out.logprobs.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in policy.trainable().values() if p.grad is not None)


def test_english_only_models_have_prompts_of_their_own(transcripts: list[Sample], tmp_path: Path) -> None:
    policy = make_whisper()
    policy.model.generation_config.is_multilingual = False
    policy.save(tmp_path / "model")
    english = load_policy(tmp_path / "model")
    text = english.tokenizer.decode(english.prompt(transcripts[0]).ids).replace("<|startoflm|>", "")
    assert text == "<|startoftranscript|><|notimestamps|>"
    with pytest.raises(ValueError, match="this Whisper knows English only, the recording's language is 'es'"):
        english.prompt(transcripts[1])
