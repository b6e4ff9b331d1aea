"""Higgs Audio V2: equal to transformers' own model, in forward passes, gradients and files; prompts with voices."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import HiggsAudioV2ForConditionalGeneration

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.audio import AudioClip
from audiorl.config import ModelConfig, SamplingConfig
from audiorl.data.corpus import Utterance
from audiorl.models import AudioPolicy, FrameLayout, load_policy, load_weights
from audiorl.models.examples import Example, check_example, experience
from audiorl.models.families import higgs
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.types import Message, Sample
from tests.conftest import TEXTS
from tests.support.speaking_models import CODES, codec, experiences, laid_out
from tokenizers_audio import AudioTokenizer

__all__ = ["codec"]


def tiny(config: ModelConfig | None = None, seed: int = 0) -> AudioPolicy:
    return higgs.tiny(TEXTS, seed=seed, config=config)


@pytest.fixture
def policy() -> AudioPolicy:
    return tiny()


def stock_of(policy: AudioPolicy, folder: Path) -> HiggsAudioV2ForConditionalGeneration:
    policy.save(folder)
    return HiggsAudioV2ForConditionalGeneration.from_pretrained(folder, use_text_head=True).eval()


def stock_logprobs(stock: HiggsAudioV2ForConditionalGeneration, e: Experience, layout: FrameLayout) -> Tensor:
    """[N, Q] of one experience, with a plain softmax over what the model's own forward pass gives."""
    nothing = torch.full((len(e), layout.codebooks), -1)
    codes, code_mask = (nothing if e.codes is None else e.codes), (nothing >= 0 if e.code_mask is None else e.code_mask)
    frames = codes[:, 0] >= 0
    speech = {"audio_input_ids": codes[frames][None], "audio_input_ids_mask": torch.ones(1, int(frames.sum())).bool()}
    hidden = stock.model(input_ids=e.ids[None], **(speech if bool(frames.any()) else {})).last_hidden_state[0]
    text = stock.text_lm_head(hidden).log_softmax(-1)
    logits = stock.audio_lm_head(hidden).view(len(e), layout.codebooks, layout.size)
    logits = logits.masked_fill(torch.arange(layout.size) == layout.bos, -torch.inf)
    spoken = logits.log_softmax(-1)
    rows = []
    for t in e.loss_mask.nonzero()[:, 0].tolist():
        if frames[t]:
            found = spoken[t - 1].gather(-1, codes[t][:, None])[:, 0]
            rows.append(torch.where(code_mask[t], found, 0.0))
        else:
            rows.append(torch.nn.functional.pad(text[t - 1, e.ids[t]][None], (0, layout.codebooks - 1)))
    return torch.stack(rows)


def weighted_gradients(values: Tensor, model: torch.nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    weights = torch.linspace(0.5, 1.5, values.numel()).view_as(values)
    (values * weights).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_log_probs_and_gradients_equal_transformers(policy: AudioPolicy, tmp_path: Path) -> None:
    """Text, speech and text again: one by one in transformers' model, packed with a shared prompt in ours."""
    assert policy.speech is not None
    stock = stock_of(policy, tmp_path)
    batch = experiences(policy)
    expected = torch.cat([stock_logprobs(stock, e, policy.speech) for e in batch])
    theirs = weighted_gradients(expected, stock)
    for share in (True, False):
        out = policy.forward(pack_experiences(batch, share))
        assert out.code_logprobs is not None
        torch.testing.assert_close(out.code_logprobs, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(out.logprobs, expected.sum(1), atol=1e-5, rtol=0)
        ours = weighted_gradients(out.code_logprobs, policy.model)
        assert ours.keys() == theirs.keys()
        for name, grad in theirs.items():
            scale = max(float(grad.abs().max()), 1.0)
            torch.testing.assert_close(ours[name] / scale, grad / scale, atol=1e-5, rtol=0, msg=name)


def test_joint_entropy_and_temperature(policy: AudioPolicy) -> None:
    """The entropy of a frame is the sum over drawn codes of entropies at the codes' temperature."""
    assert policy.speech is not None
    e = experiences(policy)[0]
    batch = pack_experiences([e])
    out = policy.forward(batch, 0.7, audio_temperature=1.3)
    before = policy.predicting_hidden(batch)
    text = (policy.backbone.head(policy.model)(before) / 0.7).log_softmax(-1)
    codes = (policy.code_head(before) / 1.3).view(len(before), policy.speech.codebooks, -1)
    offered = torch.arange(policy.speech.size) != policy.speech.bos
    codes = codes[..., offered].log_softmax(-1)
    assert e.codes is not None and e.code_mask is not None
    code_mask, is_frame = e.code_mask[e.loss_mask], e.codes[e.loss_mask, 0] >= 0
    by_code = -(codes.exp() * codes).sum(-1) * code_mask
    expected = torch.where(is_frame, by_code.sum(1), -(text.exp() * text).sum(-1))
    torch.testing.assert_close(out.entropy, expected, atol=1e-5, rtol=0)
    same = policy.forward(batch, 0.7).code_logprobs
    assert same is not None and out.code_logprobs is not None
    assert torch.equal(same[~is_frame], out.code_logprobs[~is_frame])
    assert not torch.allclose(same[is_frame], out.code_logprobs[is_frame])


def test_a_checkpoint_comes_back_and_is_transformers_own(policy: AudioPolicy, tmp_path: Path) -> None:
    stock = stock_of(policy, tmp_path / "one")
    loaded = load_policy(tmp_path / "one")
    assert loaded.speech == policy.speech and loaded.stop_ids == policy.stop_ids and loaded.end_id == policy.end_id
    for own in (loaded.model, stock):
        weights = dict(own.named_parameters())
        assert weights.keys() == dict(policy.model.named_parameters()).keys()
        assert all(torch.equal(p, weights[n]) for n, p in policy.model.named_parameters())
    other = tiny(seed=1)
    load_weights(tmp_path / "one", other)
    batch = pack_experiences(experiences(policy))
    assert torch.equal(other.forward(batch).logprobs, policy.forward(batch).logprobs)


def test_a_checkpoint_without_a_text_head_takes_the_embeddings(policy: AudioPolicy, tmp_path: Path) -> None:
    policy.model.text_lm_head, head = None, policy.model.text_lm_head
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    policy.model.text_lm_head = head
    loaded = load_policy(tmp_path)
    assert torch.equal(loaded.model.text_lm_head.weight, policy.model.model.embed_tokens.weight)
    assert torch.equal(loaded.code_head.weight, policy.code_head.weight)


# -- prompts -------------------------------------------------------------------------------------------------------


def test_chat_by_hand(policy: AudioPolicy) -> None:
    def chat(*messages: Message) -> str:
        (text,) = policy.backbone.chat(messages)
        return str(text)

    end = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    begin = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    user = "<|start_header_id|>user<|end_header_id|>\n\n"
    assert chat(Message("user", (" [SPEAKER0] Hello. ",))) == (
        f"{begin}Generate audio following instruction.<|eot_id|>{user}[SPEAKER0] Hello.{end}"
    )
    scene = Message("system", ("Speak.", "A quiet room."))
    assert chat(scene, Message("user", ("Hi",))) == (
        f"{begin}Speak.\n\n<|scene_desc_start|>\nA quiet room.\n<|scene_desc_end|><|eot_id|>{user}Hi{end}"
    )
    voice = "<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|>"
    voices = Message("system", ("Speak.", "A room.", "SPEAKER0:", voice, "SPEAKER1:", "feminine"))
    assert chat(voices, Message("user", ("Hi",))) == (
        f"{begin}Speak.\n\n<|scene_desc_start|>\nA room.\n\nSPEAKER0: {voice}\nSPEAKER1:\nfeminine\n"
        f"<|scene_desc_end|><|eot_id|>{user}Hi{end}"
    )


def test_a_voice_in_the_prompt_is_frames_between_its_tokens(policy, codec, speech: list[Utterance]) -> None:
    layout = policy.speech
    clip = speech[0].clip
    sample = Sample(
        "s", (Message("user", ("One.",)), Message("assistant", (clip,)), Message("user", ("Two.",))), task="tts"
    )
    with pytest.raises(ValueError, match=r"sample 's': .* has no codec yet"):
        policy.prompt(sample)
    policy.set_codec(codec)
    prompt = policy.prompt(sample)
    codes = codec.encode(torch.from_numpy(clip.load(codec.sample_rate))[None])[0]
    frames = prompt.codes[:, 0] >= 0
    assert prompt.audio == () and torch.equal(policy.prompt(sample).ids, prompt.ids)
    first, last = (int(i) for i in frames.nonzero()[[0, -1], 0])
    assert last - first + 1 == codes.shape[1] + layout.codebooks + 1 == int(frames.sum())
    assert [int(prompt.ids[i]) for i in (first - 1, last + 1)] == [layout.begin_id, layout.end_id]
    assert prompt.ids[frames].tolist() == [layout.frame_id] * (codes.shape[1] + 1) + [layout.delay_id] * 4
    (said,) = layout.speeches(prompt.codes)
    assert torch.equal(said, codes)
    text = policy.tokenizer.decode(prompt.ids[~frames])
    assert text.endswith("Two.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
    spoken = policy.prompt(replace(sample, metadata={"respond": "speech"}))
    assert spoken.ids.tolist() == [*prompt.ids.tolist(), layout.begin_id] and int(spoken.codes[-1, 0]) == -1
    # The loss hears the voice.
    other = replace(sample, messages=(sample.messages[0], Message("assistant", (speech[1].clip,)), sample.messages[2]))
    answer = laid_out(policy, policy.prompt(replace(other, metadata={"respond": "speech"})), CODES[0])
    heard = laid_out(policy, spoken, CODES[0])
    one, two = (policy.forward(pack_experiences([e])).logprobs for e in (answer, heard))
    assert not torch.allclose(one, two, atol=1e-4)


def test_what_cannot_be_spoken_is_refused(policy: AudioPolicy, codec, speech: list[Utterance]) -> None:
    assert policy.speech is not None
    for other in (replace(policy.speech, codebooks=3), replace(policy.speech, size=65, bos=63, eos=64)):
        with pytest.raises(ValueError, match="codebooks of 64 codes, the model writes"):
            other.check(codec)
    silent = policy.copy()
    silent.speech = None
    asked = (("song", policy, 'give "text" or "speech"'), ("speech", silent, "text only; dualize it"))
    for respond, one, message in asked:
        with pytest.raises(ValueError, match=f"row-3.*{message}"):
            one.prompt(Sample("row-3", (Message("user", ("Hi",)),), metadata={"respond": respond}))
    with pytest.raises(ValueError, match=r"row-4.*reserved token"):
        policy.prompt(Sample("row-4", (Message("user", ("<|AUDIO_OUT|>",)),)))


def test_the_codec_of_a_model_stays_its_codec(policy: AudioPolicy, codec, tmp_path: Path) -> None:
    policy.set_codec(codec)
    policy.save(tmp_path)
    loaded = load_policy(tmp_path, codec=codec)
    assert loaded.codec is codec
    codec_b = type("Other", (), {"num_codebooks": 4, "codebook_size": 64, "identity": "another", "sample_rate": 1})()
    with pytest.raises(ValueError, match="not of another"):
        loaded.set_codec(codec_b)


def test_the_check_counts_what_is_laid_out_to_the_row(codec: AudioTokenizer) -> None:
    """Prompts with a voice, answers of one and of two recordings, opened by the prompt or after text."""
    policy = tiny()
    policy.set_codec(codec)
    one, two = (AudioClip(array=np.zeros(n, np.float32), sample_rate=24_000) for n in (10_000, 20_001))
    voice = (Message("user", ("Good morning.",)), Message("assistant", (two,)))
    asked, opened = Message("user", ("Who speaks?",)), {"respond": "speech"}
    decoder = policy.backbone.decoder(policy.model)
    for example in (
        Example(Sample("opened", (asked,), metadata=opened), speech=(one,)),
        Example(Sample("two", (*voice, asked), metadata=opened), speech=(one, two)),
        Example(Sample("after", (asked,)), "Good morning.", (one, two)),
        Example(Sample("text", (*voice, asked)), "Good morning."),
    ):
        decoder.config.max_position_embeddings = 4096
        length = len(experience(policy, example))
        for most in (length, length - 1):
            decoder.config.max_position_embeddings = most
            for refuses in (check_example, experience):
                with nullcontext() if most == length else pytest.raises(ValueError, match=f"reads at most {most}"):
                    refuses(policy, example)
    decoder.config.max_position_embeddings = 4096
    sample, sampling = Sample("said", (asked,), metadata=opened), SamplingConfig(max_frames=6)
    longest = max(len(r.segments[0].ids) for r in HFEngine(policy, sampling).generate([Request(sample, 4)]))
    decoder.config.max_position_embeddings = most = len(policy.prompt(sample)) + longest
    policy.prompts.check(sample, sampling.max_frames)
    decoder.config.max_position_embeddings = most - 1
    with pytest.raises(ValueError, match=f"{longest} may be written.*--sampling.max-frames"):
        policy.prompts.check(sample, sampling.max_frames)
