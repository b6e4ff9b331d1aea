"""Grafted checkpoints: the text model's logits bit for bit, Whisper's encoder, and files that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForCTC,
    AutoTokenizer,
    Qwen2AudioForConditionalGeneration,
    WhisperModel,
)

from audiorl.audio import AudioClip
from audiorl.cli import main
from audiorl.models import load_policy
from audiorl.speech_models.protocol import load_model
from corpora.models.graft import graft, read_text_model
from tests.conftest import ask
from tests.support.grafts import save_llm, save_whisper

HELD = [
    ("qwen2.5-omni", "llama"),
    ("qwen2.5-omni", "qwen2"),
    ("qwen2-audio", "llama"),
    ("qwen2-audio", "qwen2"),
    ("qwen2-audio", "qwen3"),
]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("family", "kind"), HELD)
def test_text_is_understood_bit_for_bit_as_before(
    family: Any, kind: str, tied: bool, whisper: Path, tmp_path: Path
) -> None:
    llm = save_llm(tmp_path / "llm", kind, tied=tied)
    parent = AutoModelForCausalLM.from_pretrained(llm)
    text = "Which language is it, and who speaks? Éü 12"
    ids = torch.tensor([AutoTokenizer.from_pretrained(llm).encode(text, add_special_tokens=False)])
    graft(llm, whisper, family).save(tmp_path / "out")
    policy = load_policy(tmp_path / "out")
    assert policy.tokenizer.encode(text) == ids[0].tolist()
    with torch.no_grad():
        expected = parent(input_ids=ids).logits
        assert torch.equal(policy.model(input_ids=ids).logits[..., : expected.shape[-1]], expected)
    embedding = policy.backbone.decoder(policy.model).embed_tokens.weight
    assert (policy.backbone.head(policy.model).weight is embedding) == (tied and family == "qwen2.5-omni")


@pytest.mark.parametrize("family", ["qwen2.5-omni", "qwen2-audio"])
def test_the_encoder_is_whispers_with_and_without_new_layers(family: Any, whisper: Path, tmp_path: Path) -> None:
    llm = save_llm(tmp_path / "llm")
    clip = AudioClip(array=np.random.default_rng(0).normal(0, 0.1, 480_000).astype(np.float32), sample_rate=16_000)
    plain = graft(llm, whisper, family)
    features = plain.audio.features(clip)
    stock = WhisperModel.from_pretrained(whisper).encoder
    with torch.no_grad():
        last = _last_layer(plain, features)
        torch.testing.assert_close(
            stock.layer_norm(last), stock(features["input_features"]).last_hidden_state[0], atol=1e-5, rtol=0
        )
        ours = plain.audio.encoder_output(clip)
        pooled = last.unflatten(0, (-1, 2)).mean(1)
        torch.testing.assert_close(ours, stock.layer_norm(pooled), atol=1e-5, rtol=0)
        deeper = graft(llm, whisper, family, encoder_layers=2)
        assert torch.equal(deeper.audio.encoder_output(clip), ours)
    size = plain.encode_audio([clip])[0].detach().pow(2).mean().sqrt()
    assert 0.5 < float(size / plain.backbone.decoder(plain.model).embed_tokens.weight.detach().pow(2).mean().sqrt()) < 2


def _last_layer(policy: Any, features: Any) -> torch.Tensor:
    """What the last encoder layer gives, [frames, D]."""
    outputs = []
    layer = policy.backbone.audio_encoder(policy.model).layers[-1]
    hook = layer.register_forward_hook(lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    policy.backbone.encode_audio(policy.model, [features])
    hook.remove()
    return outputs[0].reshape(-1, outputs[0].shape[-1])


def test_unused_rows_of_the_vocabulary_are_used_first(whisper: Path, tmp_path: Path) -> None:
    vocabulary = len(graft(save_llm(tmp_path / "exact"), whisper, "qwen2-audio").tokenizer)
    padded = graft(save_llm(tmp_path / "padded", vocab_size=vocabulary + 20), whisper, "qwen2-audio")
    assert len(padded.backbone.decoder(padded.model).embed_tokens.weight) == vocabulary + 20


@pytest.mark.parametrize("sequence", [False, True])
def test_transformers_reads_the_folder_with_its_processor(sequence: bool, whisper: Path, tmp_path: Path) -> None:
    from transformers import AutoProcessor

    graft(save_llm(tmp_path / "llm", sequence=sequence), whisper, "qwen2-audio").save(tmp_path / "out")
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    policy = load_policy(tmp_path / "out")
    sample = ask(AudioClip(array=np.zeros(16_000, np.float32), sample_rate=16_000))
    chat = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "What is said?"}]}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=text, audio=[np.zeros(16_000, np.float32)], return_tensors="pt", sampling_rate=16_000)
    assert inputs.input_ids[0].tolist() == policy.prompt(sample).ids.tolist()
    stock = Qwen2AudioForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert set(stock.generation_config.eos_token_id) == set(policy.stop_ids)


def test_the_command(whisper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = save_llm(tmp_path / "llm", "qwen3", head_dim=16)
    command = ["graft", "--llm", str(llm), "--encoder", str(whisper), "--out", str(tmp_path / "out"), "--family"]
    assert main([*command, "qwen2-audio", "--encoder-layers", "1", "--dtype", "bfloat16"]) == 0
    assert "vLLM does not: its Qwen2 layers have heads of hidden_size / num_attention_heads = 32" in (
        capsys.readouterr().out
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["text_config"]["model_type"], config["audio_config"]["encoder_layers"]) == ("qwen3", 3)
    assert config["dtype"] == "bfloat16"
    assert main([*command, "qwen2-audio"]) == 2
    assert "exists already" in capsys.readouterr().err


def yarn() -> dict[str, Any]:
    return dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=512)


@pytest.mark.parametrize(
    ("family", "kind", "changes", "message"),
    [
        ("qwen2.5-omni", "llama", dict(template=None), "no chat template"),
        (
            "qwen2.5-omni",
            "qwen2",
            dict(use_sliding_window=True, sliding_window=64, max_window_layers=1),
            "sliding window",
        ),
        ("qwen2.5-omni", "llama", dict(vocab_size=100), "tokens and the model embeddings for 100"),
        ("qwen2.5-omni", "llama", dict(attention_bias=True), "have biases"),
        ("qwen2.5-omni", "llama", dict(hidden_act="gelu"), "activation is 'gelu'"),
        ("qwen2.5-omni", "qwen3", {}, "lack the q and k norms of Qwen3; --family qwen2-audio holds it"),
        ("qwen2.5-omni", "llama", dict(rope_parameters=yarn()), "scaled positions"),
    ],
)
def test_text_models_that_do_not_fit(
    family: Any, kind: str, changes: dict[str, Any], message: str, whisper: Path, tmp_path: Path
) -> None:
    llm = save_llm(tmp_path / "llm", kind, **changes)
    with pytest.raises(ValueError, match=message) as error:
        graft(llm, whisper, family)
    assert str(error.value).startswith(f"--llm {llm}: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_mel_bins=128), "gives 80 mel bins and the encoder takes 128"),
        (dict(extractor=dict(sampling_rate=8000)), "features are of 8000 Hz"),
        (dict(extractor=dict(hop_length=200)), "one every 200 samples"),
        (dict(max_source_positions=500), "pads to 3000 frames and the encoder takes 1000"),
    ],
)
def test_encoders_that_do_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    llm, encoder = save_llm(tmp_path / "llm"), save_whisper(tmp_path / "whisper", **changes)
    with pytest.raises(ValueError, match=message) as error:
        graft(llm, encoder, "qwen2.5-omni")
    assert str(error.value).startswith(f"--encoder {encoder}: ")


def test_other_models_and_missing_ones(whisper: Path, tmp_path: Path) -> None:
    llm = save_llm(tmp_path / "llm")
    with pytest.raises(ValueError, match="model_type 'whisper' is not one of llama, qwen2, qwen3"):
        graft(whisper, whisper, "qwen2.5-omni")
    with pytest.raises(ValueError, match=r"--encoder .*llm: not a Whisper model"):
        graft(llm, llm, "qwen2.5-omni")
    with pytest.raises(ValueError, match=r"--llm .*nowhere: not a text model"):
        graft(tmp_path / "nowhere", whisper, "qwen2.5-omni")


def test_learned_positions_need_qwen2_audio(whisper: Path, tmp_path: Path) -> None:
    llm = save_llm(tmp_path / "llm")
    model = WhisperModel.from_pretrained(whisper)
    with torch.no_grad():
        model.encoder.embed_positions.weight += 0.1
    model.save_pretrained(tmp_path / "moved")
    (tmp_path / "moved" / "preprocessor_config.json").write_text((whisper / "preprocessor_config.json").read_text())
    with pytest.raises(ValueError, match="not Whisper's sinusoids"):
        graft(llm, tmp_path / "moved", "qwen2.5-omni")
    policy = graft(llm, tmp_path / "moved", "qwen2-audio")
    positions = policy.backbone.audio_encoder(policy.model).embed_positions.weight
    assert torch.equal(positions, model.encoder.embed_positions.weight)


def test_code_in_a_model_s_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask, and take the y of a user or of a pipe for an answer."""
    code = "from transformers import PretrainedConfig\n\nclass Mine(PretrainedConfig):\n    model_type = 'mine'\n"
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{code}")
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCTC": "mine.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *question: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="trust_remote_code"):
        read_text_model(tmp_path, "qwen2.5-omni", "float32")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_model(AutoModelForCTC, tmp_path, "cpu")
    assert not (tmp_path / "ran").exists()
