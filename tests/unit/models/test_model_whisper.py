"""What Whisper has beside other recognisers: requests, models of English, positions of text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration

from audiorl.audio import AudioClip
from audiorl.data.prompts import asr_prompt
from audiorl.models import AudioPolicy, load_policy
from audiorl.models.examples import Example, experience
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.rollout.vllm import VLLMEngine
from audiorl.train.batches import idle_batch
from audiorl.types import Message, Sample
from tests.conftest import make_whisper
from tests.support.packing import groups_of_three, logprobs

LANGUAGES = ("en", "es", "fr")


@pytest.fixture
def transcripts(samples: list[Sample]) -> list[Sample]:
    return [replace(s, messages=asr_prompt(s.audio[0], code)) for s, code in zip(samples, LANGUAGES, strict=True)]


@pytest.fixture(scope="module")
def policy() -> AudioPolicy:
    return make_whisper()


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


def test_hotwords_stand_where_whisper_reads_what_came_before(policy: AudioPolicy, samples: list[Sample]) -> None:
    clip, words = samples[0].audio[0], ("Kerberos", "Le Havre")
    sample = Sample("row-7", asr_prompt(clip, "fr", hotwords=words), metadata={"hotwords": words})
    text = policy.tokenizer.decode(policy.prompt(sample).ids).replace("<|startoflm|>", "")
    plain = "<|startoftranscript|><|fr|><|transcribe|><|notimestamps|>"
    assert text == f"<|startofprev|> Kerberos, Le Havre{plain}"
    many = replace(sample, messages=asr_prompt(clip, "fr", hotwords=[f"word{n}" for n in range(200)]))
    with pytest.raises(ValueError, match=r"row-7.* 200 hotwords take \d+ tokens, Whisper reads 223 before"):
        policy.prompt(many)


def test_a_hotword_that_the_tokenizer_does_not_write(
    policy: AudioPolicy, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes write everything; here is a tokenizer that has no ø."""
    encode = policy.tokenizer.encode
    monkeypatch.setattr(policy.tokenizer, "encode", lambda text, **how: encode(text.replace("ø", "?"), **how))
    sample = Sample("row-7", asr_prompt(samples[0].audio[0], "da", hotwords=["Ribe", "Sorø"]))
    with pytest.raises(ValueError, match="does not write the hotword 'Sorø', it reads 'Sor\\?' back; leave it out"):
        policy.prompts.check(replace(sample, metadata={"hotwords": ["Ribe", "Sorø"]}))
