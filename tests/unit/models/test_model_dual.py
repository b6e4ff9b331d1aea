"""The second branch: equal to transformers' DualFFN layer, silent where nothing speaks, kept by files and adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    HiggsAudioV2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.higgs_audio_v2.modeling_higgs_audio_v2 import (
    HiggsAudioV2DecoderLayer,
    HiggsAudioV2RotaryEmbedding,
)

from audiorl.algos.experience import Experience
from audiorl.algos.packing import pack_experiences
from audiorl.audio import AudioClip
from audiorl.config import LoraConfig, ModelConfig, OptimConfig
from audiorl.models import AudioPolicy, dualize, load_policy, load_weights
from audiorl.models.speech import DualLayer, Routing
from audiorl.models.tiny import tiny_llama_tokenizer
from audiorl.train.optim.adamw import Optimizer
from audiorl.types import Message, Sample
from tests.conftest import TEXTS, make_omni, make_qwen2_audio, make_text
from tests.support.decoders import of_class
from tests.support.packing import with_audio
from tests.support.speaking_models import CODES, codec, experiences, laid_out

__all__ = ["codec"]


def make_llama(config: ModelConfig | None = None) -> AudioPolicy:
    """With Llama's reserved tokens."""
    tokenizer = tiny_llama_tokenizer(TEXTS, 400)
    tokenizer.add_tokens([f"<|reserved_special_token_{i}|>" for i in range(7, 12)], special_tokens=True)
    return of_class(LlamaForCausalLM, LlamaConfig, False, tokenizer, config)


def make_qwen3(config: ModelConfig | None = None) -> AudioPolicy:
    """With tied embeddings, and more rows of them than the tokenizer has tokens."""
    return of_class(Qwen3ForCausalLM, Qwen3Config, True, config=config, spare=8)


DUALIZED: dict[str, Callable[..., AudioPolicy]] = {
    "llama": make_llama,
    "qwen2": make_text,
    "qwen3": make_qwen3,
    "qwen2.5-omni": make_omni,
    "qwen2-audio": make_qwen2_audio,
}


@pytest.fixture(params=list(DUALIZED))
def make_silent(request: pytest.FixtureRequest) -> Callable[..., AudioPolicy]:
    return DUALIZED[request.param]


# -- the layer -----------------------------------------------------------------------------------------------------


def layers() -> tuple[HiggsAudioV2DecoderLayer, HiggsAudioV2RotaryEmbedding, DualLayer]:
    config = HiggsAudioV2Config(
        hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=32
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    stock = HiggsAudioV2DecoderLayer(config, 0)
    for name, p in stock.named_parameters():
        if "norm" in name:  # they begin as ones, which would hide a mistaken weight
            torch.nn.init.uniform_(p, 0.5, 1.5)
    parts = (stock.audio_input_layernorm, stock.audio_post_attention_layernorm, stock.audio_mlp)
    return stock, HiggsAudioV2RotaryEmbedding(config), DualLayer(stock, *parts)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 1.0])
def test_the_layer_equals_transformers(share: float) -> None:
    """Outputs and all gradients, for batches without frames, of frames alone, and mixed ones."""
    stock, rotary, ours = layers()
    x = torch.randn(2, 40, 64)
    frames = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) < share
    places = {"position_embeddings": rotary(x, torch.arange(40)[None].expand(2, -1)), "attention_mask": None}
    weights = torch.randn(2, 40, 64)

    def run(layer: torch.nn.Module, **kwargs: object) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        layer.zero_grad()
        inputs = x.clone().requires_grad_()
        out = layer(inputs, **places, **kwargs)
        (out * weights).sum().backward()
        assert inputs.grad is not None
        grads = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
        return out.detach(), inputs.grad, {n: g.clone() for n, g in grads.items() if bool(g.any())}

    expected = run(stock, audio_token_mask=frames)
    found = run(ours, routing=Routing.from_mask(frames, x.device))
    for a, b in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert found[2].keys() == expected[2].keys()
    for name, grad in expected[2].items():
        torch.testing.assert_close(found[2][name], grad, atol=1e-5, rtol=1e-4, msg=name)


def test_routing_by_hand() -> None:
    routing = Routing.from_mask(torch.tensor([[True, False, False], [True, True, False]]), torch.device("cpu"))
    assert (routing.texts, routing.frames) == (3, 3)
    assert routing.order is not None and routing.order.tolist() == [1, 2, 5, 0, 3, 4]
    assert routing.place is not None and routing.place.tolist() == [3, 0, 1, 4, 5, 2]
    assert Routing.from_mask(torch.zeros(2, 3, dtype=torch.bool), torch.device("cpu")) is Routing.TEXT
    assert Routing.from_mask(torch.ones(2, 3, dtype=torch.bool), torch.device("cpu")) is Routing.FRAMES


# -- dualize -------------------------------------------------------------------------------------------------------


def heard(policy: AudioPolicy, samples: list[Sample]) -> list[Sample]:
    if policy.backbone.audio_token is not None:
        return samples
    return [Sample(s.id, (Message("user", (str(s.messages[0].content[1]),)),)) for s in samples]


def text_logits(policy: AudioPolicy, samples: list[Sample]) -> Tensor:
    """Of prompts with an answer, audio included, packed."""
    answer = torch.arange(40, 52)
    batch = []
    for s in heard(policy, samples):
        prompt = policy.prompt(s)
        mask = torch.arange(len(prompt) + len(answer)) >= len(prompt)
        batch.append(Experience(torch.cat([prompt.ids, answer]), mask, len(prompt), prompt.audio))
    with torch.no_grad():
        return policy.backbone.head(policy.model)(policy.hidden(pack_experiences(batch)))


def test_text_stays_bit_for_bit_what_it_was(make_silent, samples: list[Sample], tmp_path: Path) -> None:
    """Through the policy, and through the model the way transformers calls it; new tokens have new logits."""
    policy = make_silent()
    known = policy.backbone.head(policy.model).weight.shape[0]
    ids = policy.prompt(heard(policy, samples)[0]).ids[:20]
    before = text_logits(policy, samples)
    plain = policy.model(input_ids=ids[None]).logits
    dualize(policy, 4, 64)
    after = text_logits(policy, samples)
    assert torch.equal(after[:, :known], before)
    assert torch.equal(policy.model(input_ids=ids[None]).logits[..., :known], plain)
    policy.save(tmp_path)
    assert torch.equal(text_logits(load_policy(tmp_path), samples), after)


def test_the_branch_begins_as_the_texts(make_silent) -> None:
    policy, again = dualize(make_silent(), 4, 64), dualize(make_silent(), 4, 64)
    for layer in policy.backbone.decoder(policy.model).layers:
        for own, text in (("audio_mlp", "mlp"), ("audio_input_layernorm", "input_layernorm")):
            pairs = zip(getattr(layer, own).parameters(), getattr(layer, text).parameters(), strict=True)
            assert all(torch.equal(a, b) and a is not b for a, b in pairs)
    assert torch.equal(policy.code_head.weight, again.code_head.weight)


def test_its_tokens_are_reserved_ones_or_new() -> None:
    llama = dualize(make_llama(), 4, 64)
    layout = llama.speech
    assert layout is not None and layout.frame_id == layout.delay_id
    names = llama.tokenizer.convert_ids_to_tokens([layout.begin_id, layout.frame_id, layout.end_id])
    assert names == [f"<|reserved_special_token_{i}|>" for i in (9, 10, 11)]
    for make in (make_text, make_qwen3):
        plain, policy = make(), dualize(make(), 4, 64)
        assert policy.speech is not None
        first = len(plain.tokenizer)
        assert (policy.speech.begin_id, policy.speech.frame_id, policy.speech.end_id) == (first, first + 1, first + 2)
        rows = [p.backbone.head(p.model).weight.shape[0] for p in (plain, policy)]
        assert rows == ([first, first + 3] if make is make_text else [first + 8] * 2)
        with pytest.raises(ValueError, match="reserved token"):
            policy.prompt(Sample("s", (Message("user", ("<|speech_bos|>",)),)))
        assert policy.decode([65, first, first + 1, first + 2]) == policy.decode([65])


def test_what_cannot_be_dualized() -> None:
    policy = dualize(make_text(), 4, 64)
    with pytest.raises(ValueError, match="speaks already"):
        dualize(policy, 4, 64)
    with pytest.raises(ValueError, match=r"dualize its base, save that, and load it with an adapter"):
        dualize(make_text(ModelConfig(lora=LoraConfig(rank=2))), 4, 64)
    other = make_text()
    other.model.config.model_type = "mamba"
    with pytest.raises(ValueError, match="'mamba' cannot be dualized"):
        dualize(other, 4, 64)


def test_trained_and_kept(make_silent, samples: list[Sample], tmp_path: Path) -> None:
    """All of the branch learns from speech; the folder brings it back, and opens as the text model it was."""
    policy = dualize(make_silent(), 4, 64)
    batch = pack_experiences(experiences(policy))
    optimizer = Optimizer(policy.trainable(), OptimConfig(lr=1e-2), 1)
    policy.forward(batch).logprobs.sum().backward()
    branch = {n: p for n, p in policy.model.named_parameters() if "audio_mlp" in n or "audio_lm" in n or "embed_a" in n}
    assert len(branch) == 2 * 3 + 2 and all(p.grad is not None and bool(p.grad.any()) for p in branch.values())
    optimizer.step()
    expected = policy.forward(batch)
    policy.save(tmp_path)
    loaded = load_policy(tmp_path)
    assert type(loaded.model) is type(policy.model) and loaded.speech == policy.speech
    assert torch.equal(loaded.forward(batch).logprobs, expected.logprobs)
    fresh = dualize(make_silent(), 4, 64, seed=3)
    load_weights(tmp_path, fresh)
    assert torch.equal(fresh.forward(batch).logprobs, expected.logprobs)
    with pytest.raises(ValueError, match="speaks as"):
        load_weights(tmp_path, make_silent())
    if policy.extractor is None:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path)
        ids = torch.arange(20)[None]
        assert torch.equal(plain(input_ids=ids).logits, policy.model(input_ids=ids).logits)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    dualize(make_text(), 4, 64).save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.audio_mlp.up_proj.weight"
    save_file({n: w for n, w in weights.items() if n != name}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"weight '{name}' is missing from the checkpoint"):
        load_policy(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (({"size": 64}, "must count both"), ({"colour": 1}, "does not say how the model speaks")):
        broken = config | {"audiorl_speech": config["audiorl_speech"] | change}
        (tmp_path / "config.json").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=message):
            load_policy(tmp_path)


# -- a dualized model that hears -----------------------------------------------------------------------------------


def test_speech_hears_the_right_audio(samples: list[Sample]) -> None:
    """Other audio in one prompt: all it says, text and codes, has other log-probs, and nothing else has."""
    policy = dualize(make_omni(), 4, 64)
    clips = [AudioClip(array=s.audio[0].load()[:14_400], sample_rate=16_000) for s in samples[:2]]
    noise = np.random.default_rng(0).normal(0, 0.1, 14_400).astype(np.float32)
    louder = AudioClip(array=clips[0].array + noise, sample_rate=16_000)

    def run(sounds: list[AudioClip]) -> list[Tensor]:
        batch = [
            laid_out(policy, policy.prompt(with_audio(s, c)), CODES[0], "yes", "no").replace(group_id=s.id)
            for s, c in zip(samples, sounds, strict=False)
        ]
        out = policy.forward(pack_experiences(batch)).code_logprobs
        assert out is not None
        return list(out.detach().split([int(e.loss_mask.sum()) for e in batch]))

    (one, two), (other, same) = run(clips), run([louder, clips[1]])
    assert torch.equal(two, same)
    frames = (one != 0).sum(1) > 1  # more than one code drawn
    for rows in (frames, ~frames):
        assert float((one - other)[rows].abs().max()) > 1e-4


@pytest.mark.parametrize("audio", ["frozen", "full"])
def test_speech_and_audio_packed_equal_one_by_one(samples: list[Sample], audio: str) -> None:
    """Log-probs and gradients of a model that hears and speaks: text, speech, text, three answers to each prompt."""
    policy = dualize(make_omni(ModelConfig(audio=audio)), 4, 64)
    batch = [
        laid_out(policy, policy.prompt(s), codes, "yes", "no").replace(group_id=s.id)
        for s in samples
        for codes in CODES
    ]
    results = []
    for packs, share in (([[e] for e in batch], False), ([batch], False), ([batch], True)):
        parts = [policy.forward(pack_experiences(pack, share)).code_logprobs for pack in packs]
        results.append(with_gradients(policy, [p for p in parts if p is not None]))
    single, *packed = results
    for found in packed:
        torch.testing.assert_close(found[0], single[0], atol=1e-5, rtol=0)
        assert found[1].keys() == single[1].keys()
        for name, grad in single[1].items():
            scale = max(float(grad.abs().max()), 1.0)
            torch.testing.assert_close(found[1][name] / scale, grad / scale, atol=1e-5, rtol=0, msg=name)


def with_gradients(policy: AudioPolicy, parts: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    rows = torch.cat(parts)
    policy.model.zero_grad()
    (rows * torch.linspace(0.5, 1.5, rows.numel()).view_as(rows)).sum().backward()
    return rows.detach(), {n: p.grad.clone() for n, p in policy.trainable().items() if p.grad is not None}


def test_the_assistants_clips_are_spoken_and_the_users_heard(codec, samples: list[Sample]) -> None:
    policy = dualize(make_omni(), 4, 64)
    policy.set_codec(codec)
    said, asked = samples[0].audio[0], samples[1].audio[0]
    sample = Sample("s", (Message("assistant", (said,)), Message("user", (asked, "What?"))))
    prompt = policy.prompt(sample)
    assert prompt.audio == (asked,) and prompt.codes is not None and policy.speech is not None
    (codes,) = policy.speech.speeches(prompt.codes)
    assert torch.equal(codes, policy.codes(said))
    assert int((prompt.ids == policy.audio_token_id).sum()) == len(policy.encode_audio([asked])[0])
    silent = make_omni()
    assert silent.prompt(sample).audio == (said, asked)
    with pytest.raises(ValueError, match="dualize it before it gets a codec"):
        silent.set_codec(codec)


def test_adapters_on_both_branches(tmp_path: Path) -> None:
    dualize(make_text(), 4, 64).save(tmp_path / "base")
    policy = load_policy(tmp_path / "base", ModelConfig(lora=LoraConfig(rank=4, alpha=8)))
    assert all(".lora_" in n for n in policy.trainable())
    assert any("audio_mlp" in n for n in policy.trainable())
    reference = policy.reference()
    batch = pack_experiences(experiences(policy))
    start = policy.forward(batch).logprobs
    optimizer = Optimizer(policy.trainable(), OptimConfig(lr=1e-2), 2)
    for _ in range(2):
        optimizer.zero_grad()
        policy.forward(batch).logprobs.sum().backward()
        optimizer.step()
    expected = policy.forward(batch).logprobs
    assert not torch.allclose(expected, start) and torch.equal(reference.forward(batch).logprobs, start)
    policy.save(tmp_path / "adapter")
    assert torch.equal(load_policy(tmp_path / "adapter").forward(batch).logprobs, expected)
