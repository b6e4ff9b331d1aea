"""Every backbone: equal to the stock model, packed as unpacked, and its loss hears the right audio."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import WhisperFeatureExtractor

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.audio import AudioClip, AudioError, seconds
from audiorl.config import LoraConfig, ModelConfig, OptimConfig, SamplingConfig
from audiorl.models import AudioPolicy, audio_encoder, backbone, load_policy
from audiorl.models.features import log_mels, spectrogram
from audiorl.models.lora import NON_LORA_WEIGHTS
from audiorl.protocols import Request
from audiorl.rollout.hf import HFEngine
from audiorl.run.checkpoint import save_checkpoint
from audiorl.train.optim.adamw import Optimizer
from audiorl.types import Message, Sample
from tests.conftest import Make, every_listener, make_omni, make_qwen2_audio, make_qwen3_omni, make_whisper
from tests.support.checkpoints import load_checkpoint
from tests.support.packing import assert_same, experience, groups_of_three, logprobs, with_audio, with_gradients


@pytest.mark.parametrize("make", [make_omni, make_qwen3_omni, make_qwen2_audio, make_whisper])
def test_features_of_a_gpu_are_the_extractors(make: Make, samples: list[Sample]) -> None:
    """As computed there, of clips of different lengths together, one of them silent."""
    extractor = make().extractor
    wavs = [np.zeros(12_345, np.float32), *(clip.load() for s in samples for clip in s.audio)]
    padded = np.zeros((len(wavs), max(map(len, wavs)) + 640), np.float32)
    for row, wav in zip(padded, wavs, strict=True):
        row[: len(wav)] = wav
    computed = spectrogram(extractor, torch.from_numpy(padded))
    expected = extractor(padded, sampling_rate=16_000, padding=False, truncation=False, return_tensors="pt")
    torch.testing.assert_close(computed, expected["input_features"], atol=1e-5, rtol=0)


def test_a_cache_counts_a_replaced_value_once() -> None:
    cache = audio_encoder.ClipCache[torch.Tensor](100)
    for key in ("a", "a", "a", "b"):
        cache.put(key, torch.zeros(10))
    assert cache.get("a") is not None  # 80 bytes
    cache.put("c", torch.zeros(10))
    assert [cache.get(key) is not None for key in "abc"] == [True, False, True]


def test_clips_that_are_read_ahead_are_encoded_alike(samples: list[Sample]) -> None:
    """An error waits for the clip that it is about, and what nobody asked for is forgotten."""
    policy, other = make_omni(), make_omni()
    clips = policy.clips_of(samples)
    assert clips and clips == [c for s in samples for c in s.audio]
    missing = AudioClip(path="nowhere.wav")
    policy.audio.load_ahead([*clips, missing])
    assert len(policy.audio.loading) == len({c.key for c in clips}) + 1
    policy.copy()
    for one, two in zip(policy.encode_audio(clips), other.encode_audio(clips), strict=True):
        assert torch.equal(one, two)
    assert list(policy.audio.loading) == [missing.key]
    with pytest.raises(AudioError, match="nowhere"):
        policy.encode_audio([missing])
    policy.audio.load_ahead([missing])
    policy.audio.load_ahead(clips)
    assert not policy.audio.loading


def test_a_gpu_gets_the_clips_of_prompts_together(samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    """Here computed on the CPU: features of clips in batches by their length are those of each clip alone, and prompts
    find their clips encoded."""
    policy = make_omni(ModelConfig(audio="full"))
    batches: list[int] = []

    def on_cpu(extractor: Any, wavs: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
        batches.append(len(wavs))
        return log_mels(extractor, wavs)

    clips = [*policy.clips_of(samples), policy.clips_of(samples)[0]]
    alone = [log_mels(policy.extractor, [clip.load()])[0] for clip in clips]
    monkeypatch.setattr(backbone, "log_mels", on_cpu)
    monkeypatch.setattr(audio_encoder, "PASS_SECONDS", 2.5 * max(seconds(c) for s in samples for c in s.audio))
    for _ in range(2):  # then from what was kept
        together = policy.audio._features(clips, torch.device("cuda"))
        for features, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(features["input_features"][0], expected, atol=1e-6, rtol=0)
    assert max(batches) > 1 and sum(batches) == len({c.key for c in clips})

    policy.encode_ahead(samples)
    assert policy.audio.cache.get(clips[0].key) is None, "on a CPU each is encoded when it is asked for"
    monkeypatch.setattr(AudioPolicy, "device", property(lambda _: torch.device("cuda")))
    with torch.no_grad():
        policy.encode_ahead(samples)
    assert all(policy.audio.cache.get(c.key) is not None for c in clips)


def test_log_mel_equals_the_stock_extractor(samples: list[Sample]) -> None:
    extractor = WhisperFeatureExtractor(feature_size=80)
    wav = samples[0].audio[0].load()
    stock = extractor(wav, sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="pt")
    frames = int(stock["attention_mask"].sum())
    (ours,) = log_mels(extractor, [wav])
    assert ours.shape == (80, frames)
    torch.testing.assert_close(ours, stock["input_features"][0, :, :frames], atol=1e-6, rtol=0)


@pytest.mark.parametrize("audio", ["frozen", "full"])
def test_packed_equals_the_padded_batch_of_transformers(make_any: Make, samples: list[Sample], audio: str) -> None:
    """The stock model on a right-padded batch, its own features and positions: log-probs and gradients."""
    policy = make_any(ModelConfig(audio=audio))
    batch = groups_of_three(policy, samples)
    length = max(len(e) for e in batch)
    ids = torch.stack([torch.nn.functional.pad(e.ids, (0, length - len(e)), value=1) for e in batch])
    inputs = {"attention_mask": torch.stack([torch.arange(length) < len(e) for e in batch]).long()}
    if policy.extractor is not None:
        wavs = [clip.load() for e in batch for clip in e.audio]
        features = policy.extractor(
            wavs, sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="pt"
        )
        inputs["input_features"] = features["input_features"]
        inputs["feature_attention_mask"] = features["attention_mask"]
    logs = policy.model(input_ids=ids, **inputs).logits.log_softmax(-1)
    stock = [
        logs[i, e.prompt_length - 1 : len(e) - 1].gather(-1, e.ids[e.prompt_length :, None]).squeeze(-1)
        for i, e in enumerate(batch)
    ]
    expected = with_gradients(policy, stock)
    for share in (False, True):
        assert_same(with_gradients(policy, logprobs(policy, batch, share)), expected)


@every_listener
@pytest.mark.parametrize("share", [True, False])
def test_the_loss_hears_the_right_audio(policy: AudioPolicy, samples: list[Sample], share: bool) -> None:
    """Change one prompt's waveform: only its own log-probs move. Swap two prompts' audio: exactly those two move."""
    clips = [AudioClip(array=s.audio[0].load()[:14_400], sample_rate=16_000) for s in samples]  # equal lengths
    samples = [with_audio(s, c) for s, c in zip(samples, clips, strict=True)]

    def run(sounds: list[AudioClip]) -> list[torch.Tensor]:
        batch = [
            experience(policy, with_audio(s, c), 6, seed=10 * i + k, group=s.id)
            for i, (s, c) in enumerate(zip(samples, sounds, strict=True))
            for k in range(2)
        ]
        return logprobs(policy, batch, share)

    def moved(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[bool]:
        return [float((x - y).detach().abs().max()) > 1e-4 for x, y in zip(a, b, strict=True)]

    before = run(clips)
    assert moved(before, run(clips)) == [False] * 6
    noise = np.random.default_rng(0).normal(0, 0.1, len(clips[1].array)).astype(np.float32)  # type: ignore[arg-type]
    changed = [clips[0], AudioClip(array=clips[1].array + noise, sample_rate=16_000), clips[2]]
    assert moved(before, run(changed)) == [False, False, True, True, False, False]
    assert moved(before, run([clips[2], clips[1], clips[0]])) == [True, True, False, False, True, True]


@pytest.mark.parametrize(("audio", "tower", "projector"), [("frozen", 0, 0), ("projector", 0, 1), ("full", 1, 1)])
def test_what_of_the_audio_side_gets_gradients(make_policy, samples, audio: str, tower: int, projector: int) -> None:
    policy = make_policy(ModelConfig(audio=audio))
    logprobs(policy, [experience(policy, samples[0], 5, seed=0)])[0].sum().backward()
    side = {id(p) for m in policy.backbone.projector(policy.model) for p in m.parameters()}

    def reached(parameters: list[torch.nn.Parameter]) -> int:
        return int(any(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in parameters))

    towers = [p for p in policy.backbone.audio_encoder(policy.model).parameters() if id(p) not in side]
    assert reached(towers) == tower
    assert reached([p for p in policy.model.parameters() if id(p) in side]) == projector


@every_listener
def test_frozen_tower_hears_each_clip_once(make_policy, samples: list[Sample]) -> None:
    policy = make_policy()
    calls = []
    policy.backbone.audio_encoder(policy.model).register_forward_hook(lambda *_: calls.append(1))
    batch = [experience(policy, s, 3, seed=i, group=s.id) for i, s in enumerate(samples) for _ in range(2)]
    for _ in range(3):
        logprobs(policy, batch)
    assert len(calls) == len(samples)


@every_listener
@pytest.mark.parametrize("audio", ["frozen", "full"])
def test_autocast_reaches_the_audio_encoder_wherever_a_clip_is_encoded(
    make_policy: Make, samples: list[Sample], audio: str
) -> None:
    """Rollouts and updates read the same bits, of passes in bfloat16, as floats like the weights."""
    clip = samples[0].audio[0]
    exact = make_policy(ModelConfig(audio=audio)).audio.encoder_output(clip)
    policy = make_policy(ModelConfig(audio=audio, autocast=True))
    outside = policy.audio.encoder_output(clip)
    policy.audio.cache.clear()
    with policy.autocast():
        inside = policy.audio.encoder_output(clip)
    assert torch.equal(inside, outside) and outside.dtype == exact.dtype == torch.float32
    assert not torch.equal(outside, exact)
    torch.testing.assert_close(outside, exact, atol=0.1 * float(exact.detach().abs().max()), rtol=0)


def test_prompts_that_cannot_be_read(policy: AudioPolicy, samples: list[Sample]) -> None:
    """Also more tokens than the model has positions: rotary ones have no end, and it would read on at unknown ones."""
    clip, ones = samples[0].audio[0], np.ones(200, dtype=np.float32)
    cases = [
        ((clip, "ignore <|im_end|> this"), "reserved token"),
        ((AudioClip(array=ones, sample_rate=16_000), "?"), "too short"),
    ]
    if policy.backbone.__class__.__name__ == "Qwen2Audio":
        cases.append(((AudioClip(array=ones.repeat(16 * 55), sample_rate=16_000), "?"), "longer than"))
    policy.backbone.decoder(policy.model).config.max_position_embeddings = 2000
    message = r"its prompt has \d+ tokens, the model reads at most 2000; shorten the text, or cut"
    cases.append(((clip, "why " * 2000), message))
    for content, said in cases:
        with pytest.raises(ValueError, match=f"sample 'row-7'.*{said}"):
            policy.prompt(Sample("row-7", (Message("user", content),)))


ADAPTED = ModelConfig(lora=LoraConfig(rank=4, alpha=8), audio="projector")


def updated(policy: AudioPolicy, batch: list[Experience]) -> AudioPolicy:
    """The policy after two large updates; the first of an adapter moves its B matrices alone."""
    optimizer = Optimizer(policy.trainable(), OptimConfig(lr=1e-2), 2)
    for _ in range(2):
        optimizer.zero_grad()
        torch.cat(logprobs(policy, batch)).sum().backward()
        optimizer.step()
        policy.weights_changed()
    return policy


def test_what_is_trained_beside_an_adapter_comes_back(make_policy: Make, samples: list[Sample], tmp_path: Path) -> None:
    """From an adapter's folder, and from a checkpoint, which does not read the base model again."""
    make_policy().save(tmp_path / "base")
    policy = load_policy(tmp_path / "base", ADAPTED)
    side = {id(p): n for n, p in policy.parameters_by_name().items()}
    projector = {side[id(p)] for m in policy.backbone.projector(policy.model) for p in m.parameters()}
    assert {n for n in policy.trainable() if ".lora_" not in n} == projector
    batch = groups_of_three(policy, samples)
    start = {n: p.clone() for n, p in policy.trainable().items()}
    before = torch.cat(logprobs(policy, batch))
    expected = torch.cat(logprobs(updated(policy, batch), batch))
    assert all(not torch.equal(p, start[n]) for n, p in policy.trainable().items())
    save_checkpoint(tmp_path / "step", policy, {}, {"step": 1})
    assert load_file(tmp_path / "step" / NON_LORA_WEIGHTS).keys() == projector
    for config in (ModelConfig(), ADAPTED, ModelConfig(audio="full")):
        again = load_policy(tmp_path / "step", config)
        assert torch.equal(torch.cat(logprobs(again, batch)), expected)
        again.save(tmp_path / "again")  # as a further stage that trains other parts does
        assert torch.equal(torch.cat(logprobs(load_policy(tmp_path / "again", config), batch)), expected)

    resumed = load_policy(tmp_path / "base", ADAPTED)
    assert torch.equal(torch.cat(logprobs(resumed, batch)), before)
    shutil.rmtree(tmp_path / "base")
    load_checkpoint(tmp_path / "step", resumed)
    assert torch.equal(torch.cat(logprobs(resumed, batch)), expected)


def test_adapter_and_whole_model_are_not_mistaken(make_any: Make, tmp_path: Path) -> None:
    whole = make_any()
    whole.save(tmp_path / "base")
    adapted = load_policy(tmp_path / "base", ModelConfig(lora=LoraConfig(rank=4)))
    for name, policy in (("whole", whole), ("adapter", adapted)):
        save_checkpoint(tmp_path / name, policy, {}, {"step": 1})
    with pytest.raises(ValueError, match="adapter: holds a low-rank adapter, this run trains a whole model"):
        load_checkpoint(tmp_path / "adapter", whole)
    with pytest.raises(ValueError, match="whole: holds a whole model, this run trains a low-rank adapter"):
        load_checkpoint(tmp_path / "whole", adapted)
    wider = load_policy(tmp_path / "base", ModelConfig(lora=LoraConfig(rank=8)))
    with pytest.raises(ValueError, match="adapter: the adapter has another shape"):
        load_checkpoint(tmp_path / "adapter", wider)


@every_listener
def test_audio_cannot_slip_into_another_prompt(policy: AudioPolicy, samples: list[Sample]) -> None:
    """Two prompts whose placeholders are wrong by one each way, so that only their sum is right."""
    clips = [s.audio[0] for s in samples[:2]]
    lengths = [len(a) for a in policy.encode_audio(clips)]
    placeholder = policy.audio_token_id

    def row(*runs: int) -> torch.Tensor:
        return torch.tensor([t for n in runs for t in (1, *[placeholder] * n, 2)])

    policy.embed(row(*lengths), clips)
    for runs in ((lengths[0] + 1, lengths[1] - 1), (lengths[0], lengths[1] + 1), (lengths[0],)):
        with pytest.raises(ValueError, match="audio and text do not match"):
            policy.embed(row(*runs), clips)


# -- where transformers keeps a thinker's parts: before release 5.21, and since ----------------------------------------


@pytest.mark.parametrize("make", [make_omni, make_qwen3_omni])
@pytest.mark.parametrize("since_5_21", [False, True])
def test_weights_have_the_names_of_checkpoints(make: Make, since_5_21: bool, tmp_path: Path) -> None:
    policy = make()
    backbone = policy.backbone
    decoder, encoder = backbone.decoder(policy.model), backbone.audio_encoder(policy.model)
    model = nn.Module()
    model.lm_head = backbone.head(policy.model)
    model.model = nn.Module() if since_5_21 else decoder
    if since_5_21:
        model.model.language_model = decoder
    (model.model if since_5_21 else model).audio_tower = encoder

    assert backbone.decoder(model) is decoder and backbone.audio_encoder(model) is encoder
    names = {backbone.weight_name(name): p for name, p in model.named_parameters()}
    assert names.items() <= policy.parameters_by_name().items()
    assert len(names) == len(list(model.parameters())) and names.keys() >= policy.trainable().keys()
    assert {backbone.weight_name(name) for name in names} == names.keys()
    policy.save(tmp_path)
    saved = load_file(tmp_path / "model.safetensors").keys()
    if make is make_omni:  # the released Qwen3-Omni has a tensor for each expert, in memory they are one
        assert {f"thinker.{name}" for name in names} <= saved


def test_an_adapter_is_read_under_another_release(samples: list[Sample], tmp_path: Path) -> None:
    make_omni().save(tmp_path / "base")
    policy = load_policy(tmp_path / "base", ADAPTED)
    batch = groups_of_three(policy, samples)
    expected = torch.cat(logprobs(updated(policy, batch), batch))
    policy.save(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    saved = {name.replace(".language_model.", "."): tensor for name, tensor in load_file(file).items()}
    assert any(name.startswith("base_model.model.model.layers.") for name in saved)
    for inner in ("", "language_model."):
        save_file({name.replace(".model.layers.", f".model.{inner}layers."): t for name, t in saved.items()}, file)
        assert torch.equal(torch.cat(logprobs(load_policy(tmp_path / "adapter"), batch)), expected)


@pytest.mark.parametrize("kept", ["frozen", "lora"])
def test_experts_are_multiplied_as_groups(samples: list[Sample], kept: str) -> None:
    """Of Qwen3-Omni, in passes with gradients and in decoding: one product for all experts, which no host waits for,
    gives what one product for each expert gives."""
    torch.manual_seed(0)
    lora = LoraConfig(rank=4 if kept == "lora" else 0, target_modules=("q_proj", "v_proj"))
    policy = make_qwen3_omni(ModelConfig(lora=lora))
    config = policy.backbone.decoder(policy.model).config
    assert config._experts_implementation == "grouped_mm"
    batch = groups_of_three(policy, samples)
    results = []
    for implementation in ("grouped_mm", "eager"):
        config._experts_implementation_internal = implementation
        policy.model.zero_grad()
        out = policy.forward(pack_experiences(batch)).logprobs
        (out * torch.linspace(-1, 1, len(out))).sum().backward()
        rollouts = HFEngine(policy, SamplingConfig(max_new_tokens=5)).generate([Request(samples[0], 2, seed=1)])
        grads = {name: p.grad for name, p in policy.trainable().items() if p.grad is not None}
        results.append((out.detach(), grads, [r.segments[0].ids.tolist() for r in rollouts]))
    (one, grads, ids), (other, other_grads, other_ids) = results
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert ids == other_ids and grads.keys() == other_grads.keys()
    assert kept == "lora" or any("experts" in name for name in grads)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, other_grads[name], atol=1e-5 * float(grad.abs().max()) + 1e-8, rtol=1e-4)
